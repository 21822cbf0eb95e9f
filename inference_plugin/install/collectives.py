"""Post-processing that talks to other ranks is refused.

It runs on a thread beside the engine's own, on each rank when that rank comes to it. A collective there would meet the engine's
own collectives in another order on each rank: they would hang, or exchange each other's bytes.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["NoCollectives"]

NAMES = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "broadcast",
    "alltoall",
    "all_to_all",
    "barrier",
)
"""In the names of collectives, of torch's (`c10d`, `_c10d_functional`) and of the engines' own operators."""


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, on this thread: a collective raises `EngineUnsupported` before anything is sent. `what` is done in it, in words."""

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prims") and any(name in func.__name__ for name in NAMES):
            raise EngineUnsupported(
                f"{self._what} talks to the other ranks ({func.namespace}.{func.__name__})",
                hint="quantise in blocks, which needs no other rank, or serve with one rank or from a quantised checkpoint",
                phase="open",
            )
        return func(*args, **(kwargs or {}))
