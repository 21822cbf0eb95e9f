"""Computes exactly which elements of a storage a plan covers, without a mask of its elements if all regions are boxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference_plugin.wire.geometry import Region, bounding_box

__all__ = ["Destination", "coverage_of"]


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


_MOST_CELLS = 1 << 24


def coverage_of(dest: Destination, copies: Sequence[Region], fills: Sequence[Region]) -> _Cover:
    """The elements of a storage that `copies` and `fills` leave unwritten, by parameter, and whether copies overlap.

    If all regions are boxes (nearly always), it counts the cells between the boxes' edges, which costs the same for any size
    of tensor; else it counts elements.
    """
    regions = [*copies, *fills, *(r for r in dest.parameters.values() if r.numel)]
    boxes = [bounding_box(region, dest.frame) for region in regions]
    edges = [
        sorted({edge for box, _ in boxes for edge in (box.offsets[d], box.offsets[d] + box.sizes[d])})
        for d in range(len(dest.frame))
    ]
    cells = [max(1, len(edge) - 1) for edge in edges]
    if all(exact for _, exact in boxes) and math.prod(cells) <= _MOST_CELLS:
        volume = torch.ones(cells, dtype=torch.int64)
        for d, edge in enumerate(edges):
            widths = torch.tensor([b - a for a, b in itertools.pairwise(edge)] or [1])
            volume *= widths.view([-1 if i == d else 1 for i in range(len(edges))])
        position = [{value: i for i, value in enumerate(edge)} for edge in edges]
        where = {
            id(region): tuple(slice(p[a], p[a + n]) for p, a, n in zip(position, box.offsets, box.sizes, strict=True))
            for region, (box, _) in zip(regions, boxes, strict=True)
        }
        placed = torch.zeros(cells, dtype=torch.int32)
        return _count(dest, copies, fills, placed, volume, lambda grid, region: grid[where[id(region)]])
    placed = torch.zeros(dest.numel, dtype=torch.uint8)
    return _count(dest, copies, fills, placed, None, lambda grid, region: region.of(grid))


def _count(
    dest: Destination,
    copies: Sequence[Region],
    fills: Sequence[Region],
    placed: Tensor,
    volume: Tensor | None,
    view: Callable[[Tensor, Region], Tensor],
) -> _Cover:
    for region in copies:
        view(placed, region).add_(1)
    cover = _Cover(doubled=bool((placed > 1).any()))
    for region in fills:
        view(placed, region).add_(1)
    for name, region in dest.parameters.items():
        if not region.numel:
            continue
        missing = view(placed, region) == 0
        count = int(missing.sum() if volume is None else view(volume, region)[missing].sum())
        if count:
            cover.uncovered[name] = count
    return cover
