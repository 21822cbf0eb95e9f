"""Strided regions of tensors, and the geometry of boxes and strides that plans are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "Box",
    "Fill",
    "Image",
    "Placement",
    "Region",
    "bounding_box",
    "boxes_of",
    "c_strides",
    "in_box",
    "may_overlap",
    "merge_dims",
    "region_of",
    "seen_through",
    "union_box",
]


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box in a tensor's own coordinates."""


@dataclass(frozen=True)
class Region:
    """A strided region, in elements, of a C-contiguous checkpoint tensor or of a destination's whole storage.

    Dimensions of size 1 are dropped and neighbours are merged where source and destination allow it, so that
    a whole tensor is one dimension. A stride of 0 (sources only) reads one element many times.
    """

    tensor: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        """One past the last element that the region touches."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1

    def of(self, flat: Tensor) -> Tensor:
        """The region as a view of ``flat``, any tensor that starts where the region's tensor does."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Placement:
    """One plain copy, element by element in the order of the (equal) sizes; both sides have this dtype."""

    source: Region
    dest: Region
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the checkpoint tensor."""

    @property
    def nbytes(self) -> int:
        return self.dest.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Fill:
    """A constant that the loader writes whatever the checkpoint holds: zeros in a padded vocabulary, say."""

    dest: Region
    value: bool | int | float | complex
    dtype: torch.dtype


@dataclass
class Image:
    """Element ``i`` of a copy laid out with ``strides`` in its own storage is element ``i`` of ``region``."""

    region: Region
    strides: tuple[int, ...]
    dtype: torch.dtype


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def region_of(name: str, tensor: Tensor) -> Region:
    return Region(name, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def _index(offset: int, units: Sequence[int]) -> list[int]:
    index = []
    for unit in units:
        index.append(offset // unit)
        offset -= index[-1] * unit
    return index


def merge_dims(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Drop dimensions of size 1 and join neighbours that are one dimension under every one of the
    ``strides``."""
    merged: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(sizes):
        if size == 1:
            continue
        if merged and all(own[-1] == size * given[d] for own, given in zip(kept, strides, strict=True)):
            merged[-1] *= size
            for own, given in zip(kept, strides, strict=True):
                own[-1] = given[d]
        else:
            merged.append(size)
            for own, given in zip(kept, strides, strict=True):
                own.append(given[d])
    return tuple(merged), [tuple(own) for own in kept]


def bounding_box(region: Region, shape: tuple[int, ...]) -> tuple[Box, bool]:
    """The smallest box of ``shape`` around ``region``, and whether the region is all of it, each element
    once.

    A region that crosses rows in a way that is no box gets whole rows of the first dimension.
    """
    units = c_strides(shape)
    start = _index(region.offset, units)
    extent = [1] * len(shape)
    dims = [d for d in range(len(shape)) if shape[d] > 1]
    exact = 0 not in region.strides
    by_stride = sorted((pair for pair in zip(region.strides, region.sizes, strict=True) if pair[0]), reverse=True)
    runs, (strides,) = merge_dims([size for _, size in by_stride], [stride for stride, _ in by_stride])
    for run, stride in zip(runs, strides, strict=True):
        at = next(i for i, d in enumerate(dims) if units[d] <= stride)
        step, odd = divmod(stride, units[dims[at]])
        while not odd and start[d := dims[at]] + extent[d] - 1 + (run - 1) * step >= shape[d]:
            # The run goes on in the dimension above; only whole rows can.
            odd = at == 0 or step != 1 or start[d] != 0 or extent[d] != 1 or run % shape[d] != 0
            extent[d], run, at = shape[d], run // shape[d], at - 1
        if odd:
            top, first = dims[0], region.offset // units[dims[0]]
            rows = (region.end - 1) // units[top] - first + 1
            return (
                tuple(first if d == top else 0 for d in range(len(shape))),
                tuple(rows if d == top else shape[d] for d in range(len(shape))),
            ), False
        exact = exact and step == 1 and extent[dims[at]] == 1
        extent[dims[at]] += (run - 1) * step
    return (tuple(start), tuple(extent)), exact


def _relayout(region: Region, shape: Sequence[int], strides: Sequence[int], base: int) -> Region | None:
    """``region`` of C-contiguous ``shape``, for memory where the same elements lie at ``base`` with
    ``strides``.

    None if one dimension of the region steps from row to row where the new layout has no single stride for
    that.
    """
    sizes, (units, moved) = merge_dims(shape, c_strides(shape), strides)
    index = _index(region.offset, units)
    reach = list(index)
    out = []
    for size, stride in zip(region.sizes, region.strides, strict=True):
        if stride == 0 or size == 1:
            out.append(0)
            continue
        d = next(d for d, unit in enumerate(units) if unit <= stride)
        step, odd = divmod(stride, units[d])
        reach[d] += (size - 1) * step
        if odd or reach[d] >= sizes[d]:
            return None
        out.append(step * moved[d])
    offset = base + sum(i * stride for i, stride in zip(index, moved, strict=True))
    return replace(region, offset=offset, strides=tuple(out))


def in_box(region: Region, shape: tuple[int, ...], box: Box) -> Region:
    """``region`` of C-contiguous ``shape``, in coordinates of ``box`` as a C-contiguous tensor of its own."""
    units = c_strides(box[1])
    base = -sum(start * unit for start, unit in zip(box[0], units, strict=True))
    moved = _relayout(region, shape, units, base)
    around, _ = bounding_box(region, shape)
    if moved is None or union_box(around, box) != box:
        raise ValueError(f"the box {box} of {region.tensor} {shape} does not hold what is read of it")
    return moved


def seen_through(view: Region, image: Image) -> Region | None:
    """What ``view``, a view of a plain copy, shows of the checkpoint tensor that was copied."""
    order = sorted(range(len(image.strides)), key=lambda d: -image.strides[d])
    sizes = [image.region.sizes[d] for d in order]
    dense = all(
        size == 1 or unit == image.strides[d] for d, size, unit in zip(order, sizes, c_strides(sizes), strict=True)
    )
    if not dense:
        return None
    moved = _relayout(view, sizes, [image.region.strides[d] for d in order], image.region.offset)
    return moved and replace(moved, tensor=image.region.tensor)


def boxes_of(placement: Placement) -> Iterator[Placement]:
    """``placement`` in parts that each read a box of the checkpoint tensor."""
    source, dest = placement.source, placement.dest
    _, exact = bounding_box(source, placement.shape)
    if exact:
        yield placement
        return
    # Repeated elements first, then the outermost dimension: inner ones are the likeliest to be boxes.
    cut = source.strides.index(0) if 0 in source.strides else source.strides.index(max(source.strides))
    for i in range(source.sizes[cut]):
        yield from boxes_of(replace(placement, source=_select(source, cut, i), dest=_select(dest, cut, i)))


def _select(region: Region, dim: int, i: int) -> Region:
    return Region(
        region.tensor,
        region.offset + i * region.strides[dim],
        region.sizes[:dim] + region.sizes[dim + 1 :],
        region.strides[:dim] + region.strides[dim + 1 :],
    )


def union_box(one: Box, other: Box) -> Box:
    start = tuple(map(min, one[0], other[0]))
    ends = (max(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    return start, tuple(end - first for end, first in zip(ends, start, strict=True))


def may_overlap(one: Region, other: Region, shape: tuple[int, ...]) -> bool:
    """False only if the two certainly share no element."""
    if one.end <= other.offset or other.end <= one.offset:
        return False
    (first, sizes), _ = bounding_box(one, shape)
    (second, others), _ = bounding_box(other, shape)
    return all(a < b + m and b < a + n for a, n, b, m in zip(first, sizes, second, others, strict=True))
