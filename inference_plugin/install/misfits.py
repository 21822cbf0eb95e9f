"""The tensors of a manifest that an engine's loader can't take, and what their names and shapes say that the trainer gave."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch

from inference_plugin.install.plan import PlacementPlan, TensorInfo
from inference_plugin.wire.errors import first_few
from inference_plugin.wire.tensors import dtype_name

__all__ = ["Misfits", "expected_shape"]

SHOWN_MISFITS, SHOWN_CHARACTERS = 8, 200
"""Tensors that an error names, and characters of the loader's reason for the first: vLLM's lists all parameters of the model."""

MISFITS_S = 10.0
"""Time in which tensors that the loader can't take are looked for, beside the first ones."""

Checkpoint: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the engine's own checkpoint, by name; empty if it can't be read."""

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_Item = TypeVar("_Item")


def expected_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> str:
    """In words, the shape that the engine's own checkpoint has for this tensor; "" if it is the same or unknown."""
    own, _ = checkpoint.get(name, (shape, None))
    return f", expected {list(own)} as in the engine's checkpoint" if own != shape else ""


class Misfits:
    """`trace`: traces a load of some tensors. `plan`: what it gave for all of `tensors`, at which the loader raised."""

    def __init__(
        self,
        trace: Callable[[Sequence[TensorInfo]], PlacementPlan],
        tensors: Sequence[TensorInfo],
        plan: PlacementPlan,
        checkpoint: Checkpoint,
    ) -> None:
        self._trace, self._tensors, self._plan, self._checkpoint = trace, tensors, plan, checkpoint
        self._is_cut = False
        """Whether there was too little time to find all."""

    def listed(self) -> str:
        """Names the first of them and counts all; "" if there are none."""
        if not (wrong := self._found()):
            return ""
        if self._is_cut:
            return f"{', '.join(wrong[:SHOWN_MISFITS])}, ... (at least {len(wrong)})"
        if len(wrong) != SHOWN_MISFITS or not (own := self._checkpoint):
            return first_few(wrong)
        differ = sum(name not in own or own[name][0] != shape for name, shape, _ in self._tensors)
        return f"{', '.join(wrong)}, ... ({differ} in all are not as in the engine's checkpoint)"

    def hint(self) -> str:
        """What their names and shapes say that the trainer gave, and what to do."""
        sent = {name: shape for name, shape, _ in self._tensors}
        own = {name: shape for name, (shape, _) in self._checkpoint.items()}
        if any(".lora_A." in name or ".base_layer." in name for name in sent):
            hint = "these are names of a PEFT model's state dict: give the PEFT model itself, which is merged as it is sent"
        elif any(
            beside in own and beside not in sent
            for name in sent
            for beside in (f"{name}_packed", f"{name}_scale_2", f"{name.removesuffix('weight')}qweight")
        ):
            hint = (
                "the engine's checkpoint has these weights quantised: QuantizedAdapter(source, checkpoint) sends them as it has "
                "them in INT4 and NVFP4; send other formats, such as GPTQ and AWQ, by ExportAdapter"
            )
        elif lacking := _prefix(sent, own):
            hint = (
                f"the engine's names begin with {lacking!r}: give the whole model, such as AutoModelForCausalLM's, not a part of "
                f"it, or the trainer's adapter rename=lambda name: {lacking!r} + name"
            )
        elif surplus := _prefix(own, sent):
            hint = (
                f"the engine's names don't begin with {surplus!r}: give the model inside, without a value head, or the trainer's "
                f"adapter rename=lambda name: name.removeprefix({surplus!r}), with exclude= for what the engine lacks"
            )
        elif shards := _shards(sent, own):
            hint = (
                f"these look like one of {shards} tensor-parallel shards: DTensorAdapter, MegatronAdapter or ExportAdapter sends "
                "what each rank holds"
            )
        else:
            hint = (
                "leave out what the engine lacks, such as a value head, with exclude= or rename={name: None} of the trainer's "
                "adapter; else compare shapes and names (see rename=) with the engine's"
            )
        return f"{hint}; nothing was changed"

    def _found(self) -> list[str]:
        """The tensors that the loader can't take, the first of them with the reason; if a checkpoint tells how many there
        are, only these. Most loaders raise at the tensor that they were given last; only if this doesn't explain it each tensor
        is tried alone: a trial takes as long as a whole load does."""
        left, raised = {info[0]: info for info in self._tensors}, list[TensorInfo]()
        plan = self._plan
        for _ in self._in_time(range(SHOWN_MISFITS if self._checkpoint else len(self._tensors))):
            if not plan.broke or plan.broke_at not in left:
                break
            raised.append(left.pop(plan.broke_at))
            plan = self._trace(list(left.values()))
        fitting = [] if plan.broke else list(left.values())
        plans = [self._trace([*fitting, info]) for info in raised[:SHOWN_MISFITS]]
        if raised and all(plan.broke for plan in plans):
            told = [self._misfit(info, None if i else plans[0]) for i, info in enumerate(raised[:SHOWN_MISFITS])]
            return told + [info[0] for info in raised[SHOWN_MISFITS:]]
        return self._found_one_by_one()

    def _found_one_by_one(self) -> list[str]:
        alone = {info: self._trace([info]) for info in self._in_time(self._tensors)}
        fitting, wrong = [info for info, plan in alone.items() if not plan.broke], list[str]()
        for info in self._in_time([info for info, plan in alone.items() if plan.broke]):
            named = len(wrong) >= SHOWN_MISFITS
            plan = alone[info] if named else self._trace([*fitting, info])  # a tied head fits beside its embedding
            wrong += ([info[0]] if named else [self._misfit(info, None if wrong else plan)]) if plan.broke else []
        return wrong

    def _in_time(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """The first items, and the others as long as there is time."""
        until_s = time.monotonic() + MISFITS_S
        for index, item in enumerate(items):
            if index >= SHOWN_MISFITS and time.monotonic() > until_s:
                self._is_cut = True
                return
            yield item

    def _misfit(self, info: TensorInfo, plan: PlacementPlan | None) -> str:
        """`plan`: of the first one, with the loader's reason, which resembles that for the others."""
        why = f": {textwrap.shorten(plan.refusal or '', SHOWN_CHARACTERS, placeholder=' ...')}" if plan else ""
        return (
            f"{info[0]} {list(info[1])} {dtype_name(info[2])}{expected_shape(self._checkpoint, info[0], info[1])}{why}"
        )


def _prefix(short: Shapes, long: Shapes) -> str:
    """What stands before most of the names `short` in `long`, which lacks these names themselves; "" if nothing does."""
    alone = [name for name in short if name not in long]
    for name in alone[:1]:
        for other in long:
            front = other.removesuffix(name) if other.endswith(f".{name}") else ""
            if front and 2 * sum(front + each in long for each in alone) > len(alone):
                return front
    return ""


def _shards(sent: Shapes, own: Shapes) -> int:
    """By which number one dimension of each tensor of another shape than the engine's has to be multiplied; 0 for no such one."""
    factors: set[tuple[int, ...]] = set()
    for name, shape in sent.items():
        whole = own.get(name, shape)
        if whole != shape:
            pairs = list(zip(shape, whole, strict=False)) if len(shape) == len(whole) else []
            factors.add(tuple(b // a if a and not b % a else 0 for a, b in pairs if a != b))
    found = factors.pop() if len(factors) == 1 else ()
    return found[0] if len(found) == 1 and found[0] > 1 else 0
