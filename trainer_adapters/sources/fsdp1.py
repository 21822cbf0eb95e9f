"""FSDP1 (`FullyShardedDataParallel`): each rank sends its shards of the flat parameters from where they lie.

A unit's parameters lie end to end, in C order and padded, in one flat parameter, of which each rank holds an equal range.
So a rank holds a run of some parameters' elements: a partial first row, whole rows, a partial last row, each a box. The
shard is the optimizer's (the master weights under mixed precision), with or without `use_orig_params`, and exists even while
the unit is unsharded.

A parameter whose elements don't lie in C order (`channels_last`, a transposed view) has no such boxes. These come last:
unit by unit the ranks summon the full parameters, and each sends a share of the bytes. That is a collective, which
holds one unit at a time beside the model. A rank whose slices end early still summons the rest with the others.

Private parts of torch used here: `FlatParamHandle`, and a `FlatParameter`'s record of the parameters in it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from inference_plugin.wire.errors import ManifestMismatch
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.inspection import Inspection, why_not_plain
from trainer_adapters.sources.plan import PlannedSlice, TensorInfo, shards_of_run, whole_shard
from trainer_adapters.sources.scan import ScannedSource, ScanOptions
from trainer_adapters.sources.slice_plan import LocalShards, Runs
from trainer_adapters.sources.streams import Buffers, Pairs, module_stream, walk

__all__ = ["FlatSource", "managed_parameters"]

logger = logging.getLogger(__name__)


class FlatSource(ScannedSource):
    """A source for a model that `FullyShardedDataParallel` wraps, in whole or in nested units; see `FSDPAdapter`."""

    _module: torch.nn.Module

    def __init__(self, model: torch.nn.Module, *, include_buffers: Buffers, **options: Unpack[ScanOptions]) -> None:
        self._plain = module_stream(model, include_buffers)
        super().__init__(self._all, module=model, in_memory=True, **options)

    def made_together(self) -> frozenset[int]:
        plan = self._slice_plan().plan
        return frozenset(
            index
            for info, places in zip(plan.infos, plan.places, strict=True)
            if isinstance(info.spread, FlatSpread) and info.spread.summoned
            for index, _ in places
        )

    def _all(self) -> Pairs:
        """The parameters that FSDP manages and all other tensors, in the order of the model's state dict."""
        if summoned := [unit for unit in units_of(self._module) if unit.is_summoned]:
            raise ManifestMismatch(
                f"full parameters are summoned at the moment in {len(summoned)} units",
                hint="leave summon_full_params before an update",
                side="trainer",
            )
        plain: dict[str, Any] = dict(self._plain())
        for prefix, part, own in managed_parameters(self._module):
            for name, parameter in own.items():
                yield prefix + name, parameter
            for name in (*part._parameters, *part._buffers):
                thing = plain.get(prefix + name)
                if thing is not None and name not in own and not getattr(thing, "_is_flat_param", False):
                    yield prefix + name, thing

    def _inspect(self, thing: Any) -> Inspection:
        return thing.inspect() if isinstance(thing, ManagedParameter) else super()._inspect(thing)

    def _local(self, thing: Any) -> torch.Tensor:
        return thing.unit.shard if isinstance(thing, ManagedParameter) else super()._local(thing)

    def _local_shards(self, info: TensorInfo) -> LocalShards:
        spread = info.spread
        if not isinstance(spread, FlatSpread):
            ranks = self._ranks()
            return LocalShards((whole_shard(info.shape),), ranks, ranks.index(dist.get_rank()))
        place = spread.copies.index(dist.get_rank())
        if spread.summoned:
            return LocalShards((whole_shard(info.shape),), spread.copies, place)
        return LocalShards(
            tuple(shards_of_run(info.shape, spread.start, spread.count, spread.at)), spread.copies, place
        )

    def _ranks(self) -> tuple[int, ...]:
        """All ranks of this FSDP."""
        return next((unit.everyone for unit in units_of(self._module)), tuple(range(dist.get_world_size())))

    def _cut(self, things: list[Any], planned: Runs) -> Iterator[LocalSlice]:
        apart: dict[FullyShardedDataParallel, list[int]] = {}
        for position, thing in enumerate(things):
            if isinstance(thing, ManagedParameter) and thing.is_summoned:
                apart.setdefault(thing.unit.module, []).append(position)
        late: dict[int, list[PlannedSlice]] = {position: [] for positions in apart.values() for position in positions}
        for position, own in planned:
            late.get(position, []).extend(own)
        coming = list(apart.items())
        for root in FullyShardedDataParallel.fsdp_modules(self._module, root_only=True) if coming else ():
            root.check_is_root()  # before any forward pass a unit that is summoned first would count as the root
        try:
            yield from super()._cut(things, [run for run in planned if run[0] not in late])
            while coming:  # on all ranks, even if this rank sends no part of the unit
                module, positions = coming.pop(0)
                with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
                    for position in positions:
                        full = things[position].full()
                        for one in late[position]:
                            yield LocalSlice(one.box, one.view_of(full))
        finally:
            _take_part([module for module, _ in coming])


def _take_part(modules: list[FullyShardedDataParallel]) -> None:
    """Summons these parameters with the other ranks, although this rank doesn't need them: its slices ended early."""
    for module in modules:
        try:
            with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
                pass
        except Exception as error:  # noqa: BLE001 -- whatever ended the slices here is the error to raise; this one follows from it
            logger.warning("weightwire: this rank's part in summoning parameters for the other ranks failed: %s", error)
            return


@dataclass(frozen=True, slots=True)
class FlatSpread:
    """The run of a parameter's elements that this rank has: `count` elements from `start` on, at `at` in the unit's shard.

    `copies`: the ranks that have the same run, and divide it. `summoned`: the whole parameter is gathered before it is sent.
    """

    start: int
    count: int
    at: int
    copies: tuple[int, ...]
    summoned: bool


@dataclass(frozen=True, eq=False)
class ManagedParameter:
    """A parameter of the model that lies in a unit's flat parameter, at position `index` there."""

    unit: Unit
    index: int

    @property
    def is_summoned(self) -> bool:
        return not self.unit.flat._contiguities[self.index]

    def full(self) -> torch.Tensor:
        """The whole parameter, while full parameters are summoned."""
        name, owner, _ = self.unit.flat._param_infos[self.index]
        tensor: torch.Tensor = getattr(owner, name).detach()
        return tensor

    def inspect(self) -> Inspection:
        unit, i = self.unit, self.index
        shape = tuple(unit.flat._shapes[i])
        start = unit.starts[i]
        first = min(max(unit.begin, start), start + math.prod(shape))
        last = max(first, min(unit.begin + unit.shard.numel(), start + math.prod(shape)))
        at = first - unit.begin if last > first else 0
        copies = unit.everyone if self.is_summoned else unit.copies
        spread = FlatSpread(first - start, last - first, at, copies, self.is_summoned)
        memory: Hashable = ("flat parameter", id(unit.handle), i)
        return Inspection(shape, unit.shard.dtype, spread, unit.problem(i, spread), memory)


def units_of(model: torch.nn.Module) -> Iterator[Unit]:
    return (Unit(part) for part in FullyShardedDataParallel.fsdp_modules(model) if part._handle is not None)


def managed_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, dict[str, ManagedParameter]]]:
    """Each submodule as `walk` yields it, and its own parameters that FSDP1 manages. Tied ones are one object."""
    managed: dict[int, dict[str, ManagedParameter]] = {}
    for unit in units_of(model):
        for owner, name, parameter in unit.parameters():
            managed.setdefault(id(owner), {})[name] = parameter
    return ((prefix, part, managed.get(id(part), {})) for prefix, part in walk(model))


class Unit:
    """A module that FSDP1 wraps and that has parameters of its own."""

    def __init__(self, module: FullyShardedDataParallel) -> None:
        self.module = module
        handle: Any = module._handle
        self.handle = handle
        self.flat: Any = self.handle.flat_param
        # Before the first forward pass only the shard exists; afterwards it stays beside the parameter used for computing.
        self.shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data).detach()
        group = handle.process_group
        self.begin = self.shard.numel() * dist.get_rank(group) if handle.uses_sharded_strategy else 0
        ends = accumulate(self.flat._numels_with_padding, initial=0)
        self.starts = [start for start, padding in zip(ends, self.flat._is_padding_mask, strict=False) if not padding]
        self.is_summoned = self.handle._training_state.name == "SUMMON_FULL_PARAMS"
        own = tuple(sorted(dist.get_process_group_ranks(group)))
        # A hybrid strategy keeps copies of each shard in a second group, which doesn't name the ranks of other shards.
        between = getattr(module, "_inter_node_pg", None)
        replicas = tuple(sorted(dist.get_process_group_ranks(between))) if between is not None else (dist.get_rank(),)
        both = tuple(range(dist.get_world_size()))
        self.everyone = own if len(replicas) == 1 else replicas if len(own) == 1 else both
        self.copies = replicas if handle.uses_sharded_strategy else self.everyone

    def parameters(self) -> Iterator[tuple[torch.nn.Module, str, ManagedParameter]]:
        """Each parameter with its module and its name there; tied parameters occur at each of their places."""
        found = {}
        for i, (name, owner, _) in enumerate(self.flat._param_infos):
            found[id(owner), name] = parameter = ManagedParameter(self, i)
            yield owner, name, parameter
        for name, owner, _, first_name, first_owner, _ in self.flat._shared_param_infos:
            yield owner, name, found[id(first_owner), first_name]

    def problem(self, index: int, spread: FlatSpread) -> str:
        """Why a parameter can't be sent; "" if it can."""
        if self.flat._param_extensions[index] is not None:
            return "is a DTensor under FSDP1: shard the model with fully_shard and use DTensorAdapter"
        if why := why_not_plain(self.shard):
            return why
        pending = "was given other memory, which FSDP takes over in the next forward pass: update after that"
        if self.flat.numel() == self.shard.numel() and self.flat.data_ptr() != self.shard.data_ptr():
            return pending
        name, owner, _ = self.flat._param_infos[index]
        held = owner._parameters if self.flat._params is not None else {}
        parameter = held.get(name)  # may be another object than FSDP's
        if parameter is None or not spread.count or self.handle._skipped_use_sharded_views:
            return ""
        expected = self.shard.data_ptr() + spread.at * self.shard.itemsize
        is_current = self.flat.data_ptr() == self.shard.data_ptr()
        return pending if is_current and parameter.data_ptr() != expected else ""
