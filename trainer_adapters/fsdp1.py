"""FSDP1 (`FullyShardedDataParallel`): each rank sends what its shards of the flat parameters hold, where it is.

A unit's parameters lie end to end, in C order and padded, in one flat parameter, of which each rank holds an equal range.
So a rank holds a run of some parameters' elements: a partial first row, whole rows, a partial last row, each a box. The
shard is the optimizer's (the master weights under mixed precision), with or without `use_orig_params`, and is there
whether or not the unit is unsharded just now.

A parameter whose elements don't lie in C order (`channels_last`, a transposed view) has no such boxes. It comes last:
unit by unit the ranks summon the full parameters, and each sends a share of the bytes. That is a collective, which
holds one unit at a time beside the model and whose wait is limited by the process group's timeout.

From torch's private side: `FlatParamHandle` and what a `FlatParameter` knows of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from inference_plugin.wire.errors import ManifestMismatch
from trainer_adapters.experts import checkpoint_layout
from trainer_adapters.module import Buffers, module_stream, module_ties, walk
from trainer_adapters.plan import Head, Rename, Rules, Take, parts_of_run, whole_part
from trainer_adapters.scan import Holding, Look, Pairs, ScannedSource, why_not_plain
from trainer_adapters.source import LocalSlice

__all__ = ["FlatSource"]


class FlatSource(ScannedSource):
    """A source for a model that `FullyShardedDataParallel` wraps, in whole or in nested units; see `FSDPAdapter`."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype_rules: Rules,
        include_buffers: Buffers,
        rename: Rename,
        include: Iterable[str],
        exclude: Iterable[str],
    ) -> None:
        self._plain = module_stream(model, include_buffers)
        super().__init__(
            self._all,
            ties=lambda: module_ties(model),
            layout=lambda: checkpoint_layout(model),
            rescan=True,
            twins=True,
            dtype_rules=dtype_rules,
            rename=rename,
            include=include,
            exclude=exclude,
        )
        self._model = model

    def made_together(self) -> frozenset[int]:
        plan = self._takes().plan
        return frozenset(
            index
            for head, places in zip(plan.heads, plan.places, strict=True)
            if isinstance(head.layout, FlatLayout) and head.layout.summoned
            for index, _ in places
        )

    def _all(self) -> Pairs:
        """The model in the order of its state dict: pieces of flat parameters, and what FSDP doesn't manage."""
        units = [Unit(part) for part in FullyShardedDataParallel.fsdp_modules(self._model) if part._handle is not None]
        if summoned := [unit for unit in units if unit.is_summoned]:
            raise ManifestMismatch(
                f"full parameters are summoned just now in {len(summoned)} units",
                hint="leave summon_full_params before an update",
                side="trainer",
            )
        managed: dict[int, dict[str, Piece]] = {}
        for unit in units:
            for owner, name, piece in unit.pieces():
                managed.setdefault(id(owner), {})[name] = piece
        plain: dict[str, Any] = dict(self._plain())
        for prefix, part in walk(self._model):
            own = managed.get(id(part), {})
            for name, piece in own.items():
                yield prefix + name, piece
            for name in (*part._parameters, *part._buffers):
                thing = plain.get(prefix + name)
                if thing is not None and name not in own and not getattr(thing, "_is_flat_param", False):
                    yield prefix + name, thing

    def _look(self, thing: Any) -> Look:
        return thing.look() if isinstance(thing, Piece) else super()._look(thing)

    def _local(self, thing: Any) -> torch.Tensor:
        return thing.unit.shard if isinstance(thing, Piece) else super()._local(thing)

    def _holding(self, head: Head) -> Holding:
        layout = head.layout
        if not isinstance(layout, FlatLayout):
            ranks = self._ranks()
            return Holding((whole_part(head.shape),), ranks, ranks.index(dist.get_rank()))
        place = layout.copies.index(dist.get_rank())
        if layout.summoned:
            return Holding((whole_part(head.shape),), layout.copies, place)
        return Holding(tuple(parts_of_run(head.shape, layout.start, layout.count, layout.at)), layout.copies, place)

    def _ranks(self) -> tuple[int, ...]:
        """All ranks of this FSDP."""
        units = (Unit(part) for part in FullyShardedDataParallel.fsdp_modules(self._model) if part._handle is not None)
        return next((unit.everyone for unit in units), tuple(range(dist.get_world_size())))

    def _cut(self, things: list[Any], takes: dict[int, list[Take]]) -> Iterator[LocalSlice]:
        apart: dict[FullyShardedDataParallel, list[int]] = {}
        for position, thing in enumerate(things):
            if isinstance(thing, Piece) and thing.is_summoned:
                apart.setdefault(thing.unit.module, []).append(position)
        late = {position for positions in apart.values() for position in positions}
        yield from super()._cut(things, {p: own for p, own in takes.items() if p not in late})
        for module, positions in apart.items():  # on all ranks, whether this one sends something of it or not
            with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
                for position in positions:
                    full = things[position].full()
                    for take in takes.get(position, ()):
                        yield LocalSlice(take.box, take.of(full))


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Of one parameter: which run of its elements this rank has, and where in the shard it begins.

    `copies` are the ranks that have the same; they divide it.
    """

    start: int
    count: int
    at: int
    copies: tuple[int, ...]
    summoned: bool


@dataclass(frozen=True, eq=False)
class Piece:
    """One parameter of a unit's flat parameter."""

    unit: Unit
    index: int

    @property
    def is_summoned(self) -> bool:
        return not self.unit.flat._contiguities[self.index]

    def full(self) -> torch.Tensor:
        """All of it, where full parameters are summoned."""
        name, owner, _ = self.unit.flat._param_infos[self.index]
        tensor: torch.Tensor = getattr(owner, name).detach()
        return tensor

    def look(self) -> Look:
        unit, i = self.unit, self.index
        shape = tuple(unit.flat._shapes[i])
        start = unit.starts[i]
        first = min(max(unit.begin, start), start + math.prod(shape))
        last = max(first, min(unit.begin + unit.shard.numel(), start + math.prod(shape)))
        at = first - unit.begin if last > first else 0
        copies = unit.everyone if self.is_summoned else unit.copies
        layout = FlatLayout(first - start, last - first, at, copies, self.is_summoned)
        memory: Hashable = ("flat parameter", id(unit.handle), i)
        return Look(shape, unit.shard.dtype, layout, unit.problem(i, layout), memory)


class Unit:
    """A module that FSDP1 wraps and that has parameters of its own."""

    def __init__(self, module: FullyShardedDataParallel) -> None:
        self.module = module
        handle: Any = module._handle
        self.handle = handle
        self.flat: Any = self.handle.flat_param
        # Before the first forward pass there is nothing but the shard; then it is kept beside what is computed with.
        self.shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data).detach()
        group = handle.process_group
        self.begin = self.shard.numel() * dist.get_rank(group) if handle.uses_sharded_strategy else 0
        ends = accumulate(self.flat._numels_with_padding, initial=0)
        self.starts = [start for start, padding in zip(ends, self.flat._is_padding_mask, strict=False) if not padding]
        self.is_summoned = self.handle._training_state.name == "SUMMON_FULL_PARAMS"
        own = tuple(sorted(dist.get_process_group_ranks(group)))
        # A hybrid strategy keeps copies of each shard in a second group; it doesn't tell who else there is.
        between = getattr(module, "_inter_node_pg", None)
        replicas = tuple(sorted(dist.get_process_group_ranks(between))) if between is not None else (dist.get_rank(),)
        both = tuple(range(dist.get_world_size()))
        self.everyone = own if len(replicas) == 1 else replicas if len(own) == 1 else both
        self.copies = replicas if handle.uses_sharded_strategy else self.everyone

    def pieces(self) -> Iterator[tuple[torch.nn.Module, str, Piece]]:
        """Each parameter with the module that has it and its name there; tied ones at each of their places."""
        found = {}
        for i, (name, owner, _) in enumerate(self.flat._param_infos):
            found[id(owner), name] = piece = Piece(self, i)
            yield owner, name, piece
        for name, owner, _, first_name, first_owner, _ in self.flat._shared_param_infos:
            yield owner, name, found[id(first_owner), first_name]

    def problem(self, index: int, layout: FlatLayout) -> str:
        """Why a parameter can't be sent; "" if it can."""
        if self.flat._param_extensions[index] is not None:
            return "is a DTensor under FSDP1: shard the model with fully_shard and use DTensorAdapter"
        if why := why_not_plain(self.shard):
            return why
        pending = "was given other memory, which FSDP takes over in the next forward pass: update after one"
        if self.flat.numel() == self.shard.numel() and self.flat.data_ptr() != self.shard.data_ptr():
            return pending
        parameters = self.flat._params
        if parameters is None or not layout.count or self.handle._skipped_use_sharded_views:
            return ""
        expected = self.shard.data_ptr() + layout.at * self.shard.itemsize
        is_current = self.flat.data_ptr() == self.shard.data_ptr()
        return pending if is_current and parameters[index].data_ptr() != expected else ""
