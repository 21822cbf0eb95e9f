"""Boxes of checkpoint tensors and regions of memory: pure functions on plain values, used by both sides.

box      offsets and sizes within one checkpoint tensor
slice    a box together with the bytes of it that one trainer rank holds
piece    a part of a slice with its digest: the unit that is written, checked and placed
region   a strided place in a parameter's storage, in a contiguous checkpoint tensor or in a segment

Boxes and regions count elements; regions of a segment count bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from operator import mul, sub
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_DIMS", "MAX_TENSORS", "Box", "Dims", "Edges", "Piece", "PiecePlace", "Region", "Slice", "bounding_box",
    "box_volume", "c_strides", "cut_at_edges", "edges_of", "hull", "in_box", "intersect", "may_overlap", "merge_dims",
    "overlap", "region_of", "rows_region", "segment_region", "split_box", "subtract", "through_copy", "tile",
]  # fmt: skip

MAX_TENSORS = 1 << 20
MAX_DIMS = 8
Dim = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Dims = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]

Edges: TypeAlias = dict[int, tuple[frozenset[int], ...]]
"""Per tensor and dimension: where a box begins or ends."""


class Box(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Offsets and sizes within one tensor. `tensor` is its index in the manifest, and 0 where a name says which it is."""

    tensor: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENSORS)]
    offsets: Dims
    sizes: Dims


class Piece(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """A box that was written, and the xxh3-64 digest of its bytes in C order."""

    box: Box
    digest: Annotated[int, msgspec.Meta(ge=0)]
    """Below 2^64: msgpack has no larger integer."""


class Region(msgspec.Struct, frozen=True, gc=False):
    """A strided place in the tensor, storage or segment that `tensor` names.

    Regions of a placement plan have no dimension of size 1, and neighbouring dimensions are merged where source and
    destination allow it: a whole tensor is one dimension. A stride of 0 (sources only) reads one element many times.
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
        """One past the last element of the region."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The region as a view of `flat`, any tensor that starts where the region's tensor does."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)

    def select(self, dim: int, index: int) -> Region:
        """The region at one index of `dim`, without that dimension."""
        offset = self.offset + index * self.strides[dim]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        return Region(self.tensor, offset, self.sizes[:dim] + self.sizes[dim + 1 :], strides)

    def narrow(self, dim: int, start: int, size: int) -> Region:
        """The region with `size` indices of `dim`, from `start` on."""
        sizes = (*self.sizes[:dim], size, *self.sizes[dim + 1 :])
        return Region(self.tensor, self.offset + start * self.strides[dim], sizes, self.strides)

    def named(self, tensor: str) -> Region:
        """The same place in another tensor."""
        return Region(tensor, self.offset, self.sizes, self.strides)


class Slice(Protocol):
    """A box and the tensor that fills it, of the box's shape."""

    @property
    def box(self) -> Box: ...
    @property
    def tensor(self) -> torch.Tensor: ...


class PiecePlace(NamedTuple):
    """The place of a piece: bytes `start:end` of its slice in C order, and its region in the segment.

    `region` is in bytes, with dimensions (rows, bytes of a row); None if the piece's rows are not equally far apart.
    """

    box: Box
    start: int
    end: int
    region: Region | None


def box_volume(box: Box) -> int:
    """Elements of a box (1 for the box of a 0-d tensor)."""
    return math.prod(box.sizes)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of the intersection of two boxes in one space; None if it is empty."""
    starts = tuple(map(max, offsets, other_offsets))
    ends = (min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, other_offsets, other_sizes, strict=True))
    shared = tuple(map(sub, ends, starts))
    return (starts, shared) if all(size > 0 for size in shared) else None


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None if it is empty."""
    if a.tensor != b.tensor:
        return None
    shared = overlap(a.offsets, a.sizes, b.offsets, b.sizes)
    return Box(a.tensor, *shared) if shared is not None else None


def hull(a: Box, b: Box) -> Box:
    """The smallest box around two boxes of one tensor."""
    starts = tuple(map(min, a.offsets, b.offsets))
    ends = (max(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    return Box(a.tensor, starts, tuple(map(sub, ends, starts)))


def subtract(boxes: Iterable[Box], taken: Iterable[Box]) -> list[Box]:
    """`boxes` without the elements of `taken`, as boxes."""
    left = list(boxes)
    for hole in taken:
        left = [part for box in left for part in _around(box, hole)]
    return left


def _around(box: Box, hole: Box) -> list[Box]:
    if (shared := intersect(box, hole)) is None:
        return [box]
    parts = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        start, end = offsets[dim], offsets[dim] + sizes[dim]
        inner_start, inner_end = shared.offsets[dim], shared.offsets[dim] + shared.sizes[dim]
        for low, high in ((start, inner_start), (inner_end, end)):
            if low < high:
                offsets[dim], sizes[dim] = low, high - low
                parts.append(Box(box.tensor, tuple(offsets), tuple(sizes)))
        offsets[dim], sizes[dim] = inner_start, inner_end - inner_start
    return parts


def split_box(box: Box, item_bytes: int, piece_bytes: int) -> list[Box]:
    """`box` cut along its outermost dimensions into boxes of at most `piece_bytes` (one element at the least), in C order.

    An empty box gives none.
    """
    volume = box_volume(box)
    if volume == 0:
        return []
    if volume * item_bytes <= piece_bytes or volume == 1:
        return [box]
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    row_bytes = volume // box.sizes[dim] * item_bytes
    rows = max(1, piece_bytes // row_bytes)
    parts = []
    for start in range(0, box.sizes[dim], rows):
        size = min(rows, box.sizes[dim] - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        part = Box(box.tensor, offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
        parts.extend([part] if rows > 1 else split_box(part, item_bytes, piece_bytes))
    return parts


def edges_of(boxes: Iterable[Box]) -> Edges:
    """The edges of boxes, for `cut_at_edges`."""
    found: dict[int, tuple[set[int], ...]] = {}
    for box in boxes:
        edges = found.setdefault(box.tensor, tuple(set() for _ in box.sizes))
        for own, offset, size in zip(edges, box.offsets, box.sizes, strict=True):
            own.update((offset, offset + size))
    return {tensor: tuple(map(frozenset, edges)) for tensor, edges in found.items()}


def cut_at_edges(box: Box, edges: Edges) -> list[Box]:
    """`box` in parts that no edge crosses, in C order; itself where none does."""
    spans = [
        list(itertools.pairwise(sorted({low, low + size, *(at for at in own if low < at < low + size)})))
        for own, low, size in zip(edges.get(box.tensor, ()), box.offsets, box.sizes, strict=False)
    ]
    if all(len(span) <= 1 for span in spans):
        return [box]
    return [
        Box(box.tensor, tuple(start for start, _ in part), tuple(end - start for start, end in part))
        for part in itertools.product(*spans)
    ]


def tile(whole: Box, parts: Sequence[Box]) -> bool:
    """Whether every element of `whole` lies in exactly one of `parts`, which lie within it.

    A box is the sum of its corners with alternating signs (the difference of its indicator along every dimension). So
    parts tile the whole exactly if the corners that they share cancel out and those of the whole are left. The cost
    follows the number of parts.
    """
    if not box_volume(whole):
        return not parts
    cut = [d for d, size in enumerate(whole.sizes) if any(part.sizes[d] != size for part in parts)]
    corners: dict[tuple[int, ...], int] = {}
    for box, sign in ((whole, -1), *((part, 1) for part in parts)):
        ends = [((box.offsets[d], 1), (box.offsets[d] + box.sizes[d], -1)) for d in cut]
        for corner in itertools.product(*ends):
            at = tuple(place for place, _ in corner)
            corners[at] = corners.get(at, 0) + sign * math.prod(side for _, side in corner)
    return not any(corners.values())


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def region_of(name: str, tensor: torch.Tensor) -> Region:
    """The region of its storage that `tensor` is, in elements of its dtype."""
    return Region(name, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


def segment_region(box: Box, shape: Sequence[int], item_bytes: int, start: int) -> Region | None:
    """The bytes of a box of C-contiguous `shape` that begins at byte `start`, as (rows, bytes of a row).

    None if they don't lie in rows of one length that are equally far apart.
    """
    strides = [item_bytes * step for step in c_strides(shape)]
    return rows_region(start + sum(map(mul, box.offsets, strides)), box.sizes, strides, item_bytes)


def rows_region(offset: int, sizes: Sequence[int], strides: Sequence[int], item_bytes: int) -> Region | None:
    """Elements of `item_bytes` that lie `strides` bytes apart from byte `offset` on, in C order, as (rows, bytes of a row).

    None if they don't lie in rows of one length that are equally far apart.
    """
    count, row_bytes, stride = 1, item_bytes, 0
    for size, step in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if count == 1 and step == row_bytes:
            row_bytes *= size
        elif count == 1 and step > row_bytes:
            count, stride = size, step
        elif count != 1 and step == count * stride:
            count *= size
        else:
            return None
    return Region("", offset, (count, row_bytes), (stride if count != 1 else row_bytes, 1))


def merge_dims(sizes: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Drops dimensions of size 1, and joins neighbours that are one dimension under every one of the `strides`."""
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
    """The smallest box of C-contiguous `shape` around `region`, and whether the region is all of it, each element once.

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
            offsets = tuple(first if d == top else 0 for d in range(len(shape)))
            return Box(0, offsets, tuple(rows if d == top else shape[d] for d in range(len(shape)))), False
        exact = exact and step == 1 and extent[dims[at]] == 1
        extent[dims[at]] += (run - 1) * step
    return Box(0, tuple(start), tuple(extent)), exact


def in_box(region: Region, shape: tuple[int, ...], box: Box) -> Region:
    """`region` of C-contiguous `shape`, in coordinates of `box` as a C-contiguous tensor of its own.

    Raises ValueError if the box does not hold the region.
    """
    units = c_strides(box.sizes)
    moved = _relayout(region, shape, units, -sum(map(mul, box.offsets, units)))
    if moved is None or hull(box, bounding_box(region, shape)[0]) != box:
        raise ValueError(f"the box {box} of {region.tensor} {shape} does not hold what is read of it")
    return moved


def through_copy(view: Region, copied: Region, strides: Sequence[int]) -> Region | None:
    """The region of a tensor that `view` shows, if `view` lies in a copy of the region `copied`, laid out with `strides`.

    None if that is no region, or the copy is not dense.
    """
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    sizes = [copied.sizes[d] for d in order]
    if any(size != 1 and unit != strides[d] for d, size, unit in zip(order, sizes, c_strides(sizes), strict=True)):
        return None
    moved = _relayout(view, sizes, [copied.strides[d] for d in order], copied.offset)
    return moved and moved.named(copied.tensor)


def may_overlap(one: Region, other: Region, shape: tuple[int, ...]) -> bool:
    """False only if two regions of C-contiguous `shape` certainly share no element."""
    if one.end <= other.offset or other.end <= one.offset:
        return False
    return intersect(bounding_box(one, shape)[0], bounding_box(other, shape)[0]) is not None


def _index(offset: int, units: Sequence[int]) -> list[int]:
    index = []
    for unit in units:
        at, offset = divmod(offset, unit)
        index.append(at)
    return index


def _relayout(region: Region, shape: Sequence[int], strides: Sequence[int], base: int) -> Region | None:
    """`region` of C-contiguous `shape`, for memory where the same elements lie at `base` with `strides`.

    None if a dimension of the region steps from row to row where the new layout has no single stride for that.
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
    return Region(region.tensor, offset, region.sizes, tuple(out))
