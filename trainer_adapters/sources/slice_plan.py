"""The slice plan of a rank: which boxes of the manifest it sends, and of which it holds copies. Pure functions, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal, TypeAlias

from inference_plugin.wire.geometry import Box
from trainer_adapters.sources.plan import LocalShard, Plan, PlannedSlice, TensorInfo, planned_slices
from trainer_adapters.sources.sharing import beginnings, share_boxes, some_of

__all__ = ["LocalShards", "Runs", "SlicePlan", "plan_slices"]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards of a tensor that a rank has, and what it does with them.

    `ranks`: those that hold the same shards, which are kept equal, and that divide them by bytes. `place`: this rank's position
    among them. Role "copy": another rank sends them, and nothing keeps the two equal.
    """

    shards: tuple[LocalShard, ...]
    ranks: tuple[int, ...] = (0,)
    place: int = 0
    role: Literal["send", "copy"] = "send"


Runs: TypeAlias = "list[tuple[int, list[PlannedSlice]]]"
"""Slices in the manifest's order: each run lies in the tensor at its position in the plan's `infos`. A tensor has several runs if
others are a part of the same checkpoint tensor."""


@dataclass(frozen=True)
class SlicePlan:
    """The slices of this rank: those that it sends, its copies of slices that others send, and a few of the copies that training
    keeps equal. `claims`: the boxes of the slices that it sends."""

    plan: Plan
    sent: Runs
    copied: Runs
    kept_equal: Runs
    claims: tuple[Box, ...]


def plan_slices(
    plan: Plan, shards_of: Callable[[TensorInfo], LocalShards], trained: Collection[str], *, in_memory: bool
) -> SlicePlan:
    """The slices of this rank. `trained`: names of the tensors that training changes. `in_memory`: all tensors live at the same
    time; else only the beginnings of equal copies are compared."""
    sent: dict[int, list[PlannedSlice]] = {}
    copied: dict[int, list[PlannedSlice]] = {}
    shared: dict[tuple[int, ...], list[tuple[int, PlannedSlice]]] = {}
    places: dict[tuple[int, ...], int] = {}
    for position in range(len(plan.infos)):
        if not plan.places[position]:
            continue
        local_shards = shards_of(plan.infos[position])
        planned = planned_slices(plan, position, local_shards.shards)
        if not planned:
            continue
        if local_shards.role == "copy":
            copied[position] = planned
        elif len(local_shards.ranks) == 1:
            sent[position] = planned
        else:
            shared.setdefault(local_shards.ranks, []).extend((position, one) for one in planned)
            places[local_shards.ranks] = local_shards.place
    kept_equal: dict[int, list[PlannedSlice]] = {}
    for ranks, entries in shared.items():
        all_boxes = [one.box for _, one in entries]
        boxes = share_boxes(plan.manifest, all_boxes, places[ranks], len(ranks))
        others = share_boxes(plan.manifest, all_boxes, (places[ranks] + 1) % len(ranks), len(ranks))
        learnt = {i for i, (position, _) in enumerate(entries) if plan.infos[position].name in trained}
        equal = some_of(plan.manifest, others, learnt)
        equal = equal if in_memory else beginnings(plan.manifest, equal)
        for shares, found in ((boxes, sent), (equal, kept_equal)):
            for i, box in shares.items():
                position, one = entries[i]
                found.setdefault(position, []).append(one if box == one.box else one.narrowed(box))
    in_order = _in_order(sent)
    claims = tuple(one.box for _, own in in_order for one in own)
    return SlicePlan(plan, in_order, _in_order(copied), _in_order(kept_equal), claims)


def _in_order(found: dict[int, list[PlannedSlice]]) -> Runs:
    """The slices of each position, in the manifest's order."""
    every = [(one.box.tensor, position, one) for position, own in sorted(found.items()) for one in own]
    every.sort(key=itemgetter(0, 1))
    return [(position, [one for _, _, one in run]) for position, run in groupby(every, key=itemgetter(1))]
