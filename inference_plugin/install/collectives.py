"""Answers the collectives of an engine's post-processing without running any.

Post-processing runs on a thread beside the engine's own, or at a commit that may fail on another rank. A collective there would
mix with the engine's own collectives in another order on each rank, or wait for a rank that never comes. So none is run:

- An all-reduce of `REDUCTIONS` is answered from the operands of all ranks. Each rank notes its own after it has checked an
  update (`Noted`), the first round of the commit brings them together, and post-processing at the commit is answered with
  their reduction (`Reduced`). vLLM scales a row-parallel layer by its largest weight over all ranks, for example.
- Any other collective refuses the model by the module's name when the group is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported
from inference_plugin.wire.tensors import bytes_view, dtype_name, torch_dtype

__all__ = ["AllNoted", "Answers", "Collectives", "Noted", "Operand", "Reduced", "Share", "own_share", "shares_of"]

NAMES = (
    "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast", "alltoall", "all_to_all",
    "barrier",
)  # fmt: skip
"""Parts of the names of collectives: torch's (`c10d`, `_c10d_functional`) and the engines' own operators."""

REDUCTIONS: Mapping[str, Callable[..., torch.Tensor]] = {"MAX": torch.maximum, "MIN": torch.minimum}
"""Reductions whose result does not depend on the order of the ranks: ours equals the collective's, bit for bit."""


class Operand(msgspec.Struct, frozen=True):
    """One rank's operand of an all-reduce among `ranks` (global ranks of `torch.distributed`)."""

    reduction: str
    ranks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.data), dtype=torch_dtype(self.dtype)).reshape(self.shape)


class Share(msgspec.Struct, frozen=True):
    """The operands of one rank, by module, in the order in which the module's post-processing reduces them."""

    rank: int
    operands: dict[str, list[Operand]]


class Answers(Protocol):
    """Answers the all-reduces of one module's post-processing."""

    def answer(self, operand: Operand) -> torch.Tensor:
        """The result of the all-reduce."""


class AllNoted(Exception):
    """Ends post-processing: the last operand that was wanted is noted."""


class Noted:
    """Notes this rank's operands and answers each with itself, times `factor`. Raises `AllNoted` at the `limit`-th operand."""

    def __init__(self, *, limit: int | None = None, factor: int = 1) -> None:
        self.operands: list[Operand] = []
        self._limit = limit
        self._factor = factor

    def answer(self, operand: Operand) -> torch.Tensor:
        self.operands.append(operand)
        if len(self.operands) == self._limit:
            raise AllNoted
        return operand.tensor() * self._factor


class Reduced:
    """Answers with the reduction over the shares of all ranks."""

    def __init__(self, module: str, shares: Sequence[Share]) -> None:
        self._module = module
        self._of = {share.rank: share.operands.get(module, []) for share in shares}
        self._next = 0

    def answer(self, operand: Operand) -> torch.Tensor:
        """Raises `CommitFailed` if the operand of a rank is missing, or this rank's differs from the one that it noted."""
        number, self._next = self._next, self._next + 1
        found = [held[number] for rank in operand.ranks if len(held := self._of.get(rank, [])) > number]
        if len(found) < len(operand.ranks):
            raise CommitFailed(
                f"post-processing of {self._module} reduces over {len(operand.ranks)} ranks, and {len(found)} sent their part",
                phase="commit",
            )
        if operand not in found or len({(o.reduction, o.ranks, o.dtype, o.shape) for o in found}) > 1:
            raise CommitFailed(
                f"post-processing of {self._module} reduces other values over the ranks than before the seal",
                phase="commit",
            )
        result = found[0].tensor()
        for other in found[1:]:
            result = REDUCTIONS[operand.reduction](result, other.tensor())
        return result


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which collectives of this thread are answered by `answers`, or raise `EngineUnsupported` before anything is
    sent. `what`: names, in the error, what runs in the context."""

    def __init__(self, what: str, answers: Answers | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("aten", "prims") or not any(name in func.__name__ for name in NAMES):
            return func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func.__name__}"
        if func is not torch.ops.c10d.allreduce_.default:
            self._refuse(name)
        reduction = _reduction()
        if self._answers is None or reduction not in REDUCTIONS:
            self._refuse(f"{name} by {reduction}")
        tensors, ranks = args[0], tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(args[1])))
        if len(ranks) > 1:
            for tensor in tensors:
                operand = _operand(reduction, ranks, tensor)
                tensor.copy_(self._answers.answer(operand))
        return tensors, _done()

    def _refuse(self, name: str) -> NoReturn:
        raise EngineUnsupported(
            f"{self._what} communicates with the other ranks ({name})",
            hint="quantise in blocks, which needs no other rank, or serve with one rank, or serve a quantised checkpoint",
            phase="open",
        )


def own_share(operands: Mapping[str, list[Operand]]) -> bytes:
    """What this rank sends to the others; empty if they need nothing."""
    return msgspec.msgpack.encode(Share(dist.get_rank(), dict(operands))) if operands else b""


def shares_of(told: Sequence[bytes]) -> tuple[Share, ...]:
    return tuple(decode_as(share, Share) for share in told if share)


def _operand(reduction: str, ranks: tuple[int, ...], tensor: torch.Tensor) -> Operand:
    data = bytes_view(tensor.detach().contiguous().cpu()).numpy().tobytes()
    return Operand(reduction, ranks, dtype_name(tensor.dtype), tuple(tensor.shape), data)


def _done() -> Any:
    """A completed work handle, for a caller that waits for the collective."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def _reduction() -> str:
    """The reduction that the running `torch.distributed.all_reduce` was asked for; "?" where another function called.

    The operator receives it as an object that Python can't inspect, so it is read from the caller's argument.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "all_reduce" and frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
            return str(getattr(frame.f_locals.get("op"), "name", "?"))
        frame = frame.f_back
    return "?"
