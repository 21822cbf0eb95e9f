"""Placement plans: which region of a checkpoint tensor lands in which region of a parameter's storage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from inference_plugin.install.coverage import gaps_between
from inference_plugin.wire.geometry import Box, Region, bounding_box, hull

__all__ = ["Fill", "LoadWeights", "Placement", "PlacementPlan", "TensorInfo", "grouped", "in_place"]

TensorInfo = tuple[str, tuple[int, ...], torch.dtype]
"""Checkpoint name, shape and dtype of a tensor that the trainer sends."""


LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
"""The engine's own loader, bound to the model that it loads."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """One plain copy, element by element. Both regions have the same sizes, both sides this dtype."""

    source: Region
    dest: Region
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the checkpoint tensor."""

    @property
    def nbytes(self) -> int:
        return self.dest.numel * self.dtype.itemsize


class Fill(msgspec.Struct, frozen=True, gc=False):
    """A constant that the loader writes whatever the checkpoint holds: zeros in a padded vocabulary, say."""

    dest: Region
    value: bool | int | float | complex
    dtype: torch.dtype


_Write = TypeVar("_Write", Placement, Fill)


def in_place(placements: Iterable[Placement]) -> list[Placement]:
    """The placements as copies from a second set of storages, in which the bytes lie where they go."""
    return [msgspec.structs.replace(placement, source=placement.dest) for placement in placements]


def grouped(names: Iterable[str]) -> list[str]:
    """The names in their order, but all that begin alike (`model.`, `model.layers.0.`) together, as in published checkpoints.
    vLLM calls a module's own loader for each run of its tensors; DeepSeek-V3.2's drops a weight whose scale comes in another."""
    tree: dict[str | None, Any] = {}
    for name in names:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})
        node[None] = name
    found: list[str] = []
    left: list[Any] = [tree]
    while left:  # no recursion: a name may have any number of dots
        if isinstance(node := left.pop(), str):
            found.append(node)
        else:
            left += reversed(node.values())
    return found


@dataclass(frozen=True)
class PlacementPlan:
    """The effect of a load on a model, as copies. Destinations are storages, by key (see `storages`).

    - `placements`: in the order of destinations in the model, then of offsets; placements of a destination in `doubled` stay in
      the order in which the loader wrote them.
    - `fills`: constants, which a replay writes before the placements.
    - `refused`: destination -> why it must go through the engine's own loader. `refused_sources`: the checkpoint tensors
      that the loader needs for it; empty if they are unknown.
    - `refusal`: why the whole plan is unusable; everything but `unused`, `made_of_nothing`, `kept`, `elsewhere` and `numbers` is
      then empty. `broke`: the loader raised. `broke_at`: the tensor that it had been given last; "" if none.
    - `unused`: checkpoint names that no placement and no refused write used, such as a tied `lm_head`. If the plan is refused:
      names with which the loader did nothing.
    - `made_of_nothing`: destinations that the loader computes from memory of its own, into which it loaded no tensor.
    - `kept`: module and attribute in which the load leaves numbers that it makes of the checkpoint's tensors. Such a plan is
      refused. `numbers`: the numbers that modules hold after the load, by module and attribute, if the
      loader read values of tensors; a load of other values that leaves other numbers keeps what it makes of them.
    - `elsewhere`: `storage_id` of tensors beside parameters and buffers to which the loader writes checkpoint tensors. Such a
      plan is refused.
    - `uncovered`: parameter -> the exact number of its elements that neither a placement nor a fill writes. Without buffers
      and refused destinations (see `trial_load.loader_coverage` for those).
    - `doubled`: destinations where placements overlap, so that the order of names decides. `repeats`: placements that were left
      out because another one has the same destination, each with that one (see `without_repeats`).
    - `dtype_conflicts`: checkpoint name -> both dtypes, in words; `dtypes_wanted`: the engine's dtype. Nothing is cast: such
      destinations are refused too.
    - `extents`: planned destination -> elements of its storage. `gapped`: planned destinations of which the load leaves elements
      unwritten: of a parameter, of a buffer, or beside them in their storage.
    """

    placements: tuple[Placement, ...] = ()
    fills: tuple[Fill, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    refused_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refusal: str | None = None
    broke: bool = False
    broke_at: str = ""
    unused: tuple[str, ...] = ()
    made_of_nothing: frozenset[str] = frozenset()
    kept: frozenset[tuple[str, str]] = frozenset()
    elsewhere: frozenset[int] = frozenset()
    numbers: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)
    uncovered: Mapping[str, int] = field(default_factory=dict)
    doubled: tuple[str, ...] = ()
    repeats: tuple[tuple[Placement, Placement], ...] = ()
    dtype_conflicts: Mapping[str, str] = field(default_factory=dict)
    dtypes_wanted: Mapping[str, torch.dtype] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)
    gapped: frozenset[str] = frozenset()

    def needs(self) -> dict[str, Box]:
        """The smallest box of each checkpoint tensor that holds everything the plan reads from it, by tensor name."""
        boxes: dict[str, Box] = {}
        for placement in (*self.placements, *(other for other, _ in self.repeats)):
            name = placement.source.tensor
            box, _ = bounding_box(placement.source, placement.shape)
            boxes[name] = hull(boxes[name], box) if name in boxes else box
        return boxes

    def gaps(self, keys: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
        """The ranges of elements that the load leaves unwritten in each of these planned destinations, as start and end."""
        filled: dict[str, list[Region]] = {key: [] for key in keys}
        for region in (*(p.dest for p in self.placements), *(f.dest for f in self.fills)):
            if region.tensor in filled:
                filled[region.tensor].append(region)
        return {key: gaps_between(regions, self.extents[key]) for key, regions in filled.items()}

    def without_repeats(self) -> PlacementPlan:
        """The plan with only the last of several placements that have the same destination, as the parts of a fused module have
        for a scale that they share. Other overlaps stay in `doubled`."""
        last = {p.dest: p for p in self.placements if p.dest.tensor in self.doubled}
        repeats = [(p, last[p.dest]) for p in self.placements if p.dest in last and last[p.dest] is not p]
        left: dict[str, list[Region]] = {}
        for dest in last:
            left.setdefault(dest.tensor, []).append(dest)
        apart = {
            name
            for name, regions in left.items()
            if all(
                one.end <= other.offset for one, other in itertools.pairwise(sorted(regions, key=lambda r: r.offset))
            )
        }
        gone = {id(other) for other, _ in repeats if other.dest.tensor in apart}
        return replace(
            self,
            placements=tuple(p for p in self.placements if id(p) not in gone),
            repeats=tuple(pair for pair in repeats if id(pair[0]) in gone),
            doubled=tuple(name for name in self.doubled if name not in apart),
        )

    def tied(self, ties: Mapping[str, str], source_of: Callable[[str], str]) -> tuple[PlacementPlan, dict[str, str]]:
        """The plan for a live model in which destinations are tied: `ties` maps a second destination to the first.

        `source_of` gives the name under which a checkpoint tensor is sent. Also returns an error text for each second destination
        that different tensors would fill than the first.
        """
        placements, fills = list(self.placements), list(self.fills)
        extents, uncovered = dict(self.extents), dict(self.uncovered)
        gapped = dict.fromkeys(self.gapped, 0)
        apart: dict[str, str] = {}
        for second, first in ties.items():
            writes: dict[str, set[tuple[Region, Region]]] = {second: set(), first: set()}
            for p in placements:
                if p.dest.tensor in writes:
                    source = p.source.named(source_of(p.source.tensor))
                    writes[p.dest.tensor].add((source, p.dest.named("")))
            if writes[second] and writes[first] and writes[second] != writes[first]:
                apart[second] = f"{second} and {first} are one weight in the running engine, and two in the trainer"
            gone, kept = (second, first) if writes[first] else (first, second)
            placements = _retied(placements, gone, kept, first)
            fills = _retied(fills, gone, kept, first)
            for table in (extents, uncovered, gapped):
                left = {name: table.pop(name) for name in (gone, kept) if name in table}
                if kept in left:
                    table[first] = left[kept]
        plan = replace(
            self,
            placements=tuple(placements),
            fills=tuple(fills),
            extents=extents,
            uncovered=uncovered,
            gapped=frozenset(gapped),
            doubled=tuple(dict.fromkeys(ties.get(n, n) for n in self.doubled)),
        )
        return plan, apart


def _retied(writes: list[_Write], gone: str, kept: str, name: str) -> list[_Write]:
    """The writes without those to `gone`; those to `kept` go to `name`."""
    left = (write for write in writes if write.dest.tensor != gone)
    return [msgspec.structs.replace(w, dest=w.dest.named(name)) if w.dest.tensor == kept else w for w in left]
