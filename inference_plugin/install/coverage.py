"""Computes exactly which elements of a storage a plan covers, without a mask of its elements if all regions are boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference_plugin.wire.geometry import Region, bounding_box

__all__ = ["Destination", "coverage_of", "gaps_between"]


@dataclass
class Destination:
    """A storage of the model, and the parameters that lie in it."""

    name: str
    dtype: torch.dtype
    numel: int
    frame: tuple[int, ...]
    """A shape whose C-contiguous layout is the storage's: the first parameter's own shape if that parameter fills the storage."""
    parameters: dict[str, Region] = field(default_factory=dict)


@dataclass
class _Cover:
    uncovered: dict[str, int] = field(default_factory=dict)
    doubled: bool = False
    has_gaps: bool = False


_MOST_CELLS = 1 << 24


def coverage_of(dest: Destination, copies: Sequence[Region], fills: Sequence[Region]) -> _Cover:
    """The elements of a storage that `copies` and `fills` leave unwritten, by parameter; whether copies overlap; and whether the
    storage has unwritten elements at all, in a buffer or beside its parameters.

    If all regions are boxes (nearly always), it counts the cells between the boxes' edges, which costs the same for any size
    of tensor; else it counts elements.
    """
    named = {name: region for name, region in dest.parameters.items() if region.numel}
    regions = [*copies, *fills, *named.values()]
    if (cells := _cells(regions, dest.frame)) is not None:
        where, volume = cells
        writes = torch.zeros_like(volume, dtype=torch.int32)
        parts, volumes = [writes[at] for at in where], [volume[at] for at in where]
    else:
        writes = torch.zeros(dest.numel, dtype=torch.uint8)
        parts, volumes = [region.of(writes) for region in regions], []
    for part in parts[: len(copies)]:
        part.add_(1)
    cover = _Cover(doubled=bool((writes > 1).any()))
    for part in parts[len(copies) : len(copies) + len(fills)]:
        part.add_(1)
    written = writes > 0
    cover.has_gaps = dest.numel > int(volume[written].sum() if cells is not None else written.sum())
    for i, name in enumerate(named, len(copies) + len(fills)):
        missing = parts[i] == 0
        if count := int(volumes[i][missing].sum() if volumes else missing.sum()):
            cover.uncovered[name] = count
    return cover


def gaps_between(regions: Iterable[Region], numel: int) -> list[tuple[int, int]]:
    """The ranges of a storage's elements, as start and end, that lie in none of the regions."""
    left = torch.ones(numel, dtype=torch.bool)
    for region in regions:
        region.of(left).fill_(False)
    edge = torch.zeros(1, dtype=torch.int8)
    edges = torch.diff(left.to(torch.int8), prepend=edge, append=edge)
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, stops, strict=True))


def _cells(regions: Sequence[Region], frame: tuple[int, ...]) -> tuple[list[tuple[slice, ...]], Tensor] | None:
    """The cells that each region covers, and the number of elements in each cell; None if some region is no box, or if there are
    too many cells."""
    boxes = [bounding_box(region, frame) for region in regions]
    edges = [
        sorted({edge for box, _ in boxes for edge in (box.offsets[d], box.offsets[d] + box.sizes[d])})
        for d in range(len(frame))
    ]
    cells = [max(1, len(edge) - 1) for edge in edges]
    if not all(exact for _, exact in boxes) or math.prod(cells) > _MOST_CELLS:
        return None
    volume = torch.ones(cells, dtype=torch.int64)
    for d, edge in enumerate(edges):
        widths = torch.tensor([b - a for a, b in itertools.pairwise(edge)] or [1])
        volume *= widths.view([-1 if i == d else 1 for i in range(len(edges))])
    position = [{value: i for i, value in enumerate(edge)} for edge in edges]
    where = [
        tuple(slice(p[a], p[a + n]) for p, a, n in zip(position, box.offsets, box.sizes, strict=True))
        for box, _ in boxes
    ]
    return where, volume
