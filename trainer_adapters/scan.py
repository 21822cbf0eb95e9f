"""What the sources of this package share: looking at a model, planning, and cutting out what this rank sends.

1. a *stream* yields `(name, tensor)` in the trainer's words; for a module it is its state dict, without the copies;
2. a *scan* of the stream turns it into heads: name, shape, dtype, how it is spread over ranks, and which tensors are one
   and the same memory;
3. a *plan* turns heads into the manifest: names cleaned of wrappers, renamed and filtered, stacked experts told apart,
   twins tied, dtype rules applied;
4. each head's *holding* says which boxes of it this rank has, and who sends them; with the plan they give the *takes*,
   which stay the same as long as the heads do;
5. `slices()` runs over the stream again, holds it against the heads, and takes this rank's boxes from the memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import MAX_DIMS, Box, Manifest
from trainer_adapters.plan import Dims, Head, Layout, Part, Plan, Rename, Rules, Take, make_plan, takes_of
from trainer_adapters.source import DtypeRules, LocalSlice, NameFilter, WeightSource, share_boxes

__all__ = ["Holding", "Look", "Pairs", "ScannedSource", "Stream", "memory_of", "why_not_plain"]

Pairs: TypeAlias = Iterable[tuple[str, Any]]
Stream: TypeAlias = Callable[[], Pairs]


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of one thing of a stream. `memory` is equal for things that are the same elements of the same memory,
    on all ranks alike; None where that can't be told."""

    shape: Dims
    dtype: torch.dtype
    layout: Hashable = None
    problem: str = ""
    memory: Hashable = None


@dataclass(frozen=True, slots=True)
class Holding:
    """Which parts of a tensor a rank has, and what it does with them.

    `ranks` hold the same parts, kept equal, and divide them by bytes; this one's place among them is `place`. A "copy" is
    what another rank sends, and nothing keeps equal.
    """

    parts: tuple[Part, ...]
    ranks: tuple[int, ...] = (0,)
    place: int = 0
    role: Literal["send", "copy"] = "send"


@dataclass(frozen=True)
class Takes:
    """Of a plan, by position in its heads: what this rank sends, and what it holds as a copy of what another sends."""

    plan: Plan
    sent: dict[int, list[Take]]
    copied: dict[int, list[Take]]
    claims: tuple[Box, ...]


class ScannedSource(WeightSource):
    """A source that scans, plans and takes.

    `stream` is called anew for each pass. With `rescan` each `manifest()` scans; without, one scan lasts
    until the stream stops agreeing with it. `twins` says that tensors of a stream live at the same time, so
    that equal memory means tied weights. `layout` gives the rule for tensors that hold several of the checkpoint's.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        ties: Callable[[], dict[str, str]],
        layout: Callable[[], Layout | None] = lambda: None,
        rescan: bool,
        twins: bool,
        dtype_rules: Rules,
        rename: Rename,
        include: Iterable[str],
        exclude: Iterable[str],
    ) -> None:
        self._stream = stream
        self._ties = ties
        self._layout = layout
        self._rescan = rescan
        self._twins = twins
        self._rules = DtypeRules(dtype_rules)
        self._rename = rename
        self._names = NameFilter(include, exclude)
        self._plan: Plan | None = None
        self._taken: Takes | None = None

    def manifest(self) -> Manifest:
        if self._plan is None or self._rescan:
            heads = self._scan()
            if self._plan is None or heads != self._plan.heads:
                plan = make_plan(
                    heads,
                    ties=self._ties(),
                    rename=self._rename,
                    layout=self._layout(),
                    names=self._names,
                    rules=self._rules,
                )
                self._check_plan(plan)
                if self._plan is not None and plan.manifest == self._plan.manifest:
                    plan = Plan(plan.heads, self._plan.manifest, plan.places)
                self._plan = plan
        return self._plan.manifest

    def slices(self) -> Iterator[LocalSlice]:
        return self._pass(self._takes().sent)

    def copies(self) -> Iterator[LocalSlice]:
        copied = self._takes().copied
        return self._pass(copied) if copied else iter(())

    def claims(self) -> tuple[Box, ...] | None:
        return self._takes().claims

    @abstractmethod
    def _holding(self, head: Head) -> Holding:
        """What this rank has of a tensor that is sent."""

    def _local(self, thing: Any) -> torch.Tensor:
        """The memory that the parts of `thing` are indices of, without gradient."""
        tensor: torch.Tensor = thing.detach()
        return tensor

    def _look(self, thing: Any) -> Look:
        """What there is to know about one thing of the stream; never raises."""
        if not isinstance(thing, torch.Tensor) or is_lazy(thing):
            return Look((), torch.uint8, problem=f"is a {type(thing).__name__}, which has no values")
        problem = why_not_plain(thing)
        return Look(tuple(thing.shape), thing.dtype, None, problem, None if problem else memory_of(thing))

    def _check_plan(self, plan: Plan) -> None:
        """Raises for what only the whole model shows."""

    def _takes(self) -> Takes:
        """This rank's takes of the plan; computed once for each plan."""
        if self._plan is None:
            self.manifest()
        assert self._plan is not None
        if self._taken is None or self._taken.plan is not self._plan:
            self._taken = self._takes_of(self._plan)
        return self._taken

    def _takes_of(self, plan: Plan) -> Takes:
        sent: dict[int, list[Take]] = {}
        copied: dict[int, list[Take]] = {}
        shared: dict[tuple[int, ...], list[tuple[int, Take]]] = {}
        places: dict[tuple[int, ...], int] = {}
        for position in range(len(plan.heads)):
            if not plan.places[position]:
                continue
            holding = self._holding(plan.heads[position])
            takes = takes_of(plan, position, holding.parts)
            if not takes:
                continue
            if holding.role == "copy":
                copied[position] = takes
            elif len(holding.ranks) == 1:
                sent[position] = takes
            else:
                shared.setdefault(holding.ranks, []).extend((position, take) for take in takes)
                places[holding.ranks] = holding.place
        for ranks, entries in shared.items():
            boxes = share_boxes(plan.manifest, [take.box for _, take in entries], places[ranks], len(ranks))
            for i, box in boxes.items():
                position, take = entries[i]
                sent.setdefault(position, []).append(take if box == take.box else take.cut(box))
        claims = tuple(take.box for position in sorted(sent) for take in sent[position])
        return Takes(plan, sent, copied, claims)

    def _scan(self, keep: list[Any] | None = None) -> tuple[Head, ...]:
        """Heads of what the stream yields now; the things themselves go to `keep`."""
        heads: list[Head] = []
        first_with: dict[Hashable, int] = {}
        for name, thing in self._stream():
            position = len(heads)
            if keep is not None:
                keep.append(thing)
            look = self._look(thing)
            twin = position
            if self._twins and look.memory is not None:
                twin = first_with.setdefault(look.memory, position)
            heads.append(Head(name, look.shape, look.dtype, twin, look.layout, look.problem))
            del thing
        return tuple(heads)

    def _pass(self, takes: dict[int, list[Take]]) -> Iterator[LocalSlice]:
        """One pass over the stream. Raises `ManifestMismatch`, at once or on the way, when it isn't the plan's."""
        plan = self._takes().plan
        if not self._rescan:
            return self._one_by_one(plan, takes)
        things: list[Any] = []
        if (heads := self._scan(things)) != plan.heads:
            raise _disagreement(plan.heads, heads)
        return self._cut(things, takes)

    def _cut(self, things: list[Any], takes: dict[int, list[Take]]) -> Iterator[LocalSlice]:
        for position in sorted(takes):
            local = self._local(things[position])
            for take in takes[position]:
                yield LocalSlice(take.box, take.of(local))

    def _one_by_one(self, plan: Plan, takes: dict[int, list[Take]]) -> Iterator[LocalSlice]:
        # Counted by hand, and deleted: `enumerate` and the loop's variable would keep the last tensor alive.
        position = 0
        for name, tensor in self._stream():
            head = plan.heads[position] if position < len(plan.heads) else None
            if head is None or head.name != name or (plan.places[position] and not _fits(head, tensor)):
                self._plan = None
                found = f"{name}: {getattr(tensor, 'dtype', type(tensor))} {list(getattr(tensor, 'shape', ()))}"
                raise ManifestMismatch(
                    f"tensor {position} is {found}, the manifest was made from {_describe(head)}",
                    hint="names, shapes, dtypes and order must stay the same; the next update looks again",
                    side="trainer",
                )
            for take in takes.get(position, ()):
                yield LocalSlice(take.box, take.of(self._local(tensor)))
            del tensor
            position += 1
        if position != len(plan.heads):
            self._plan = None
            raise ManifestMismatch(
                f"{position} tensors came, the manifest was made from {len(plan.heads)}; the first that is "
                f"missing is {_describe(plan.heads[position])}",
                hint="a callable must return a fresh iterator each time; the next update looks again",
                side="trainer",
            )


def why_not_plain(tensor: torch.Tensor) -> str:
    """Why a tensor's values can't be read where they are; "" if they can."""
    if isinstance(tensor, DTensor):
        return "is a DTensor: ModuleAdapter takes whole tensors, use FSDPAdapter or DTensorAdapter"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and bool(is_traceable_wrapper_subclass(tensor)):
        return f"is a {type(tensor).__name__}, which wraps other tensors: convert it to a plain one"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {tensor.layout} {tensor.dtype}: convert it to a plain tensor"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "has no memory: it was freed, or moved away by an offloader"
    if tensor.dim() > MAX_DIMS:
        return f"has {tensor.dim()} dimensions, {MAX_DIMS} can travel"
    return ""


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same elements of the same memory, on all ranks alike."""
    if isinstance(tensor, DTensor) or not tensor.numel():
        return id(tensor)
    reading = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.device, tensor.data_ptr(), reading


def _fits(head: Head, tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and head.shape == tensor.shape and head.dtype == tensor.dtype


def _disagreement(old: tuple[Head, ...], new: tuple[Head, ...]) -> ManifestMismatch:
    before = {head.name: head for head in old}
    after = {head.name: head for head in new}
    changes = [f"{name} appeared" for name in after if name not in before]
    changes += [f"{name} vanished" for name in before if name not in after]
    changes += [
        f"{_describe(head)} is now {_describe(after[name])}"
        for name, head in before.items()
        if name in after and (head.shape, head.dtype) != (after[name].shape, after[name].dtype)
    ]
    changes = changes or ["its order, ties or sharding"]
    return ManifestMismatch(
        f"the model changed after its manifest was made: {first_few(changes)}",
        hint="start the update again: each one makes a manifest of its own",
        side="trainer",
    )


def _describe(head: Head | None) -> str:
    return f"{head.name}: {head.dtype} {list(head.shape)}" if head else "nothing more"
