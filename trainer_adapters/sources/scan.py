"""The common base of most sources: scans a model, plans, and cuts the slices that this rank sends.

1. a *stream* yields `(name, tensor)` with the trainer's names; for a module, these are its state dict without copying;
2. a *scan* of the stream makes a `TensorInfo` of each tensor: name, shape, dtype, how it is spread over ranks, and which
   tensors share memory;
3. a *plan* makes the manifest of them: removes wrappers from names, renames and filters, separates stacked experts, ties
   twins, applies dtype rules;
4. `LocalShards` says which boxes of a tensor this rank has, and which ranks send them; together with the plan this gives the
   *slice plan*, which stays the same as long as the scan finds the same;
5. `slices()` runs over the stream again, compares it with the scan, and cuts this rank's slices from the memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import torch
from torch.nn.parameter import is_lazy

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.sources.computed import refuse_computed
from trainer_adapters.sources.conversion import checkpoint_layout
from trainer_adapters.sources.inspection import Inspection, Memory, mark_of, memory_of, why_not_plain
from trainer_adapters.sources.plan import (
    Plan,
    PlannedSlice,
    Rename,
    Target,
    TensorInfo,
    checked_rename,
    make_plan,
)
from trainer_adapters.sources.selection import DtypeRules, NameFilter, Rules
from trainer_adapters.sources.sharded import is_one_of_several_experts
from trainer_adapters.sources.slice_plan import LocalShards, Runs, SlicePlan, plan_slices
from trainer_adapters.sources.streams import Stream, module_ties, trained_names

__all__ = ["ScanOptions", "ScannedSource"]

MOST_READINGS = 2
"""Tensors of different shapes that may begin in the same memory: a head may be the first rows of the embedding. More of them lie
in a buffer that was filled for one after the other."""

SEVERAL_EXPERTS = (
    "is an expert's under expert parallelism, and other ranks have other experts under this name: let ExportAdapter send each "
    "rank's under their own names"
)


class _Seen(NamedTuple):
    """The last scan of tensors that all live at the same time, and the marks that its things had."""

    names: list[str]
    marks: list[Hashable]
    infos: tuple[TensorInfo, ...]


class ScanOptions(TypedDict, total=False):
    """What a user says of names and dtypes: arguments of `ScannedSource`."""

    dtype_rules: Rules
    rename: Rename
    include: Iterable[str]
    exclude: Iterable[str]


class ScannedSource(WeightSource):
    """A source that scans a stream, plans, and cuts slices.

    `stream` is called for each pass. `module`: what it reads, unless that is no module. `in_memory`: all tensors of the stream
    live at the same time, so that equal memory means tied weights, and each `manifest()` scans; otherwise a scan is kept until
    the stream yields something else.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        module: torch.nn.Module | None,
        in_memory: bool,
        dtype_rules: Rules = None,
        rename: Rename = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> None:
        self._stream = stream
        self._module = module
        self._in_memory = in_memory
        self._rules = DtypeRules(dtype_rules)
        self._rename = checked_rename(rename)
        self._names = NameFilter(include, exclude)
        self._plan: Plan | None = None
        self._last_slice_plan: SlicePlan | None = None
        self._seen: _Seen | None = None
        self._kept: list[LocalSlice] = []

    def manifest(self) -> Manifest:
        if self._plan is None or self._in_memory:
            infos = self._scan()
            if self._plan is None or infos != self._plan.infos:
                plan = make_plan(
                    infos,
                    ties=module_ties(self._module) if self._module is not None else {},
                    rename=self._rename,
                    layout=checkpoint_layout(self._module) if self._module is not None else None,
                    names=self._names,
                    rules=self._rules,
                )
                if self._module is not None:
                    sent = [info.name for info, places in zip(plan.infos, plan.places, strict=True) if places]
                    refuse_computed(self._module, sent)
                self._check_plan(plan)
                if self._plan is not None and plan.manifest == self._plan.manifest:
                    plan = replace(plan, manifest=self._plan.manifest)
                self._plan = plan
        return self._plan.manifest

    def targets(self) -> Mapping[str, tuple[Target, ...]]:
        """By the name of each of the model's tensors, after `rename`: the checkpoint tensors in it, if they are sent or tied."""
        if self._plan is None:
            self.manifest()
        assert self._plan is not None
        return self._plan.targets

    def adopt_dtypes(self, rules: Mapping[str, str]) -> bool:
        if not self._rules.adopt(rules):
            return False
        self._plan = None
        return True

    @property
    def follows_engine(self) -> bool:
        return self._rules.follow_engine

    @property
    def engine_dtypes(self) -> Mapping[str, str]:
        return self._rules.adopted

    def slices(self) -> Iterator[LocalSlice]:
        return self._pass(self._slice_plan().sent)

    def slices_last(self) -> bool:
        return self._in_memory and type(self).slices is ScannedSource.slices and not self.made_together()

    def copies(self) -> Iterator[LocalSlice]:
        copied = self._slice_plan().copied
        return self._pass(copied) if copied else iter(())

    def kept_equal(self) -> Iterator[LocalSlice]:
        """Of tensors that a stream makes one by one, what the last pass of `slices()` kept of them."""
        if not self._in_memory:
            kept, self._kept = self._kept, []
            return iter(kept)
        equal = self._slice_plan().kept_equal
        return self._pass(equal) if equal and not self.made_together() else iter(())

    def claims(self) -> tuple[Box, ...] | None:
        return self._slice_plan().claims

    @abstractmethod
    def _local_shards(self, info: TensorInfo) -> LocalShards:
        """The shards that this rank has of a tensor, and whether it sends them."""

    def _local(self, thing: Any) -> torch.Tensor:
        """The memory in which the shards of `thing` lie, without gradient."""
        tensor: torch.Tensor = thing.detach()
        return tensor

    def _inspect(self, thing: Any) -> Inspection:
        """Inspects one item of the stream. Never raises: an item that can't be sent has a `problem`."""
        if not isinstance(thing, torch.Tensor) or is_lazy(thing):
            return Inspection((), torch.uint8, problem=f"is a {type(thing).__name__}, which has no values")
        problem = why_not_plain(thing) or (SEVERAL_EXPERTS if is_one_of_several_experts(thing) else "")
        return Inspection(tuple(thing.shape), thing.dtype, None, problem, None if problem else memory_of(thing))

    def _mark(self, thing: Any) -> Hashable:
        """What `_inspect` looks at, at a fraction of its time: an item with the mark that it had is seen as it was. None if only
        an inspection can tell."""
        return mark_of(thing) if isinstance(thing, torch.Tensor) else None

    def _check_plan(self, plan: Plan) -> None:
        """Raises `ManifestMismatch` for problems that only the whole model shows."""

    def _slice_plan(self) -> SlicePlan:
        """The slice plan, computed once for each plan."""
        if self._plan is None:
            self.manifest()
        assert self._plan is not None
        if self._last_slice_plan is None or self._last_slice_plan.plan is not self._plan:
            trained = trained_names(self._module) if self._module is not None else ()
            self._last_slice_plan = plan_slices(self._plan, self._local_shards, trained, in_memory=self._in_memory)
        return self._last_slice_plan

    def _scan(self, keep: list[Any] | None = None) -> tuple[TensorInfo, ...]:
        """Scans what the stream yields now; appends the items themselves to `keep`."""
        if not self._in_memory:
            return self._scan_one_by_one()
        names, things = [], [] if keep is None else keep
        for name, thing in self._stream():
            names.append(name)
            things.append(thing)
        if (seen := self._seen) is None or names != seen.names or not self._look_as(seen.marks, things):
            marks = [self._mark(thing) for thing in things]
            seen = self._seen = _Seen(names, marks, self._infos(names, things))
        return seen.infos

    def _look_as(self, marks: list[Hashable], things: list[Any]) -> bool:
        """Whether all things have these marks. Makes one mark at a time: tens of thousands that live at once set off
        Python's garbage collector, which takes longer than all of this."""
        return all(mark is not None and self._mark(thing) == mark for mark, thing in zip(marks, things, strict=True))

    def _scan_one_by_one(self) -> tuple[TensorInfo, ...]:
        infos: list[TensorInfo] = []
        for name, thing in self._stream():
            seen = self._inspect(thing)
            infos.append(TensorInfo(name, seen.shape, seen.dtype, len(infos), seen.spread, seen.problem))
            del thing  # before the stream makes the next one
        return tuple(infos)

    def _infos(self, names: list[str], things: list[Any]) -> tuple[TensorInfo, ...]:
        infos: list[TensorInfo] = []
        first_with: dict[Hashable, int] = {}
        begin_at: dict[Hashable, dict[Hashable, str]] = {}
        for position, (name, thing) in enumerate(zip(names, things, strict=True)):
            seen = self._inspect(thing)
            twin, problem = position, seen.problem
            if seen.memory is not None:
                twin = first_with.setdefault(seen.memory, position)
                if isinstance(seen.memory, Memory):
                    beside = begin_at.setdefault(seen.memory[:2], {})
                    beside.setdefault(seen.memory.reading, name)
                    if len(beside) > MOST_READINGS:
                        problem = _why_refilled(*list(beside.values())[:MOST_READINGS])
            infos.append(TensorInfo(name, seen.shape, seen.dtype, twin, seen.spread, problem))
        return tuple(infos)

    def _pass(self, planned: Runs) -> Iterator[LocalSlice]:
        """One pass over the stream. Raises `ManifestMismatch`, at once or during the pass, if the stream doesn't fit the plan."""
        plan = self._slice_plan().plan
        if not self._in_memory:
            return self._one_by_one(plan, planned)
        things: list[Any] = []
        if (infos := self._scan(things)) != plan.infos:
            raise _disagreement(plan.infos, infos)
        return self._cut(things, planned)

    def _cut(self, things: list[Any], planned: Runs) -> Iterator[LocalSlice]:
        for position, own in planned:
            local = self._local(things[position])
            for one in own:
                yield LocalSlice(one.box, one.view_of(local))

    def _one_by_one(self, plan: Plan, planned: Runs) -> Iterator[LocalSlice]:
        own, equal, self._kept = _by_position(planned), _by_position(self._slice_plan().kept_equal), []
        # Counted by hand, and deleted: `enumerate` and the loop's variable would keep the last tensor alive.
        position = 0
        for name, tensor in self._stream():
            info = plan.infos[position] if position < len(plan.infos) else None
            if info is None or info.name != name or (plan.places[position] and not _fits(info, tensor)):
                self._plan = None
                found = f"{name}: {getattr(tensor, 'dtype', type(tensor))} {list(getattr(tensor, 'shape', ()))}"
                raise ManifestMismatch(
                    f"tensor {position} is {found}, but the manifest was made from {_describe(info)}",
                    hint="names, shapes, dtypes and order must stay the same; the next update scans the model again",
                    side="trainer",
                )
            for one in own.get(position, ()):
                yield LocalSlice(one.box, one.view_of(self._local(tensor)))
            for one in equal.get(position, ()):
                self._kept.append(LocalSlice(one.box, one.view_of(self._local(tensor)).to("cpu", copy=True)))
            del tensor
            position += 1
        if position != len(plan.infos):
            self._plan = None
            raise ManifestMismatch(
                f"the model yielded {position} tensors, but the manifest was made from {len(plan.infos)}; the first missing one "
                f"is {_describe(plan.infos[position])}",
                hint="a callable must return a fresh iterator each time; the next update scans the model again",
                side="trainer",
            )


def _by_position(runs: Runs) -> dict[int, list[PlannedSlice]]:
    found: dict[int, list[PlannedSlice]] = {}
    for position, own in runs:
        found.setdefault(position, []).extend(own)
    return found


def _why_refilled(first: str, second: str) -> str:
    why = "as in one buffer that was filled for each of them (pass a callable that yields one tensor at a time)"
    return f"begins where {first} and {second} begin, in a third shape, {why}"


def _fits(info: TensorInfo, tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and info.shape == tensor.shape and info.dtype == tensor.dtype


def _disagreement(old: tuple[TensorInfo, ...], new: tuple[TensorInfo, ...]) -> ManifestMismatch:
    before = {info.name: info for info in old}
    after = {info.name: info for info in new}
    changes = [f"{name} appeared" for name in after if name not in before]
    changes += [f"{name} vanished" for name in before if name not in after]
    changes += [
        f"{_describe(info)} is now {_describe(after[name])}"
        for name, info in before.items()
        if name in after and (info.shape, info.dtype) != (after[name].shape, after[name].dtype)
    ]
    return ManifestMismatch(
        f"the model changed after its manifest was made: {first_few(changes or ['its order, ties or sharding'])}",
        hint="start the update again: each one makes a manifest of its own",
        side="trainer",
    )


def _describe(info: TensorInfo | None) -> str:
    return f"{info.name}: {info.dtype} {list(info.shape)}" if info else "nothing more"
