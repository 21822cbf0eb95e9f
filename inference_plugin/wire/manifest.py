"""What a group carries: tensors by checkpoint name, how they lie in a segment, and boxes of them.

The layout is a pure function of the manifest, so that a sender and a receiver can't disagree about it, and its
fingerprint travels wherever an offset does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from inference_plugin.wire.errors import ManifestMismatch, first_few

__all__ = [
    "ALIGNMENT_BYTES",
    "DTYPE_BYTES",
    "Box",
    "Cut",
    "ExactCover",
    "Manifest",
    "Piece",
    "Rows",
    "SegmentLayout",
    "TensorSpec",
    "aligned",
    "box_volume",
    "check_exact_cover",
    "intersect",
    "split_box",
]

ALIGNMENT_BYTES = 512
"""Every tensor of a segment begins at a multiple of this: enough for any dtype, for SIMD and for a CUDA copy."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of each dtype that can travel, by torch's name."""

MAX_TENSORS = 1 << 20
MAX_DIMS = 8
MAX_SEGMENT_BYTES = 1 << 44

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Dim = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Dims = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One checkpoint tensor: Hugging Face name, dtype by torch's name, shape."""

    name: Name
    dtype: str
    shape: Dims

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A box of one tensor of a manifest: `tensor` is the index, `offsets` and `sizes` are in elements per dimension."""

    tensor: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENSORS)]
    offsets: Dims
    sizes: Dims


class Piece(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A box that was written, and the xxh3-64 digest of its bytes in C order. The unit that is checked."""

    box: Box
    digest: Annotated[int, msgspec.Meta(ge=0)]


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """Everything that a group carries, in order. `tied` maps a second name of a tensor to the name that travels.

    Raises `ManifestMismatch` from `check()` for duplicate names, unknown dtypes and dangling ties; a manifest that
    came over the wire is checked by the codec.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    tied: dict[str, str] = {}

    def check(self) -> Manifest:
        """Returns itself; raises `ManifestMismatch` that lists the first offenders and their count."""
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            seen: set[str] = set()
            doubled = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
            raise ManifestMismatch(f"duplicate tensor names: {first_few(doubled)}")
        if unknown := [f"{spec.name}: {spec.dtype}" for spec in self.tensors if spec.dtype not in DTYPE_BYTES]:
            raise ManifestMismatch(f"dtypes that can't travel: {first_few(unknown)}; known: {', '.join(DTYPE_BYTES)}")
        known = set(names)
        dangling = [f"{a} -> {b}" for a, b in self.tied.items() if b not in known or a in known]
        if dangling:
            raise ManifestMismatch(f"tied names that don't resolve to one tensor: {first_few(dangling)}")
        if self.layout.nbytes > MAX_SEGMENT_BYTES:
            raise ManifestMismatch(f"{self.layout.nbytes} bytes are more than a segment can hold ({MAX_SEGMENT_BYTES})")
        return self

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of each tensor by name."""
        return {spec.name: i for i, spec in enumerate(self.tensors)}

    @cached_property
    def layout(self) -> SegmentLayout:
        return SegmentLayout.of(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 over names, dtypes, shapes, order and ties, in hex."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([self.tensors, sorted(self.tied.items())]))

    def whole(self, tensor: int) -> Box:
        """The box that is all of one tensor."""
        shape = self.tensors[tensor].shape
        return Box(tensor, (0,) * len(shape), shape)

    def box_nbytes(self, box: Box) -> int:
        return box_volume(box) * DTYPE_BYTES[self.tensors[box.tensor].dtype]

    def rows(self, box: Box) -> Rows | None:
        """How the box's bytes lie in the segment; None if not in rows of one length at one distance."""
        item_bytes = DTYPE_BYTES[self.tensors[box.tensor].dtype]
        start, count, row_bytes, stride = self.layout.offsets[box.tensor], 1, item_bytes, 0
        step = item_bytes
        shape = self.tensors[box.tensor].shape
        for offset, size, dim in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
            start += offset * step
            if size != 1:
                if count == 1 and step == row_bytes:
                    row_bytes *= size
                elif count == 1:
                    count, stride = size, step
                elif step == count * stride:
                    count *= size
                else:
                    return None
            step *= dim
        return Rows(start, count, row_bytes, stride if count != 1 else row_bytes)

    def cut(self, box: Box, piece_bytes: int) -> tuple[Cut, ...]:
        """`split_box(box, ...)` with where each piece lies. Remembered: every update asks for the same boxes."""
        key = (box, piece_bytes)
        if (known := self._cuts.get(key)) is None:
            item_bytes = DTYPE_BYTES[self.tensors[box.tensor].dtype]
            cuts = []
            start = 0
            for part in split_box(self.check_box(box), item_bytes, piece_bytes):
                end = start + box_volume(part) * item_bytes
                cuts.append(Cut(part, start, end, self.rows(part)))
                start = end
            known = self._cuts[key] = tuple(cuts)
        return known

    @cached_property
    def _cuts(self) -> dict[tuple[Box, int], tuple[Cut, ...]]:
        return {}

    def check_box(self, box: Box) -> Box:
        """Returns `box`; raises `ManifestMismatch` if it isn't a box of one of the tensors."""
        if box.tensor >= len(self.tensors):
            raise ManifestMismatch(f"box of tensor {box.tensor}, but the manifest has {len(self.tensors)} tensors")
        spec = self.tensors[box.tensor]
        fits = len(box.offsets) == len(box.sizes) == len(spec.shape) and all(
            offset + size <= dim for offset, size, dim in zip(box.offsets, box.sizes, spec.shape, strict=True)
        )
        if not fits:
            raise ManifestMismatch(
                f"{spec.name}: box at {list(box.offsets)} of size {list(box.sizes)} does not lie in shape {list(spec.shape)}"
            )
        return box

    def describe(self, box: Box) -> str:
        """`box` for a reader: name and index ranges."""
        ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
        return f"{self.tensors[box.tensor].name}[{ranges}]"


class Rows(NamedTuple):
    """Bytes that lie in rows: where the first one starts, how many there are, how long each is, and how far it is from
    one to the next."""

    start: int
    rows: int
    row_bytes: int
    stride: int


class Cut(NamedTuple):
    """A piece of a box: itself, its bytes `start:end` in the outer box (C order), and its `rows` in the segment."""

    box: Box
    start: int
    end: int
    place: Rows | None


class SegmentLayout(msgspec.Struct, frozen=True):
    """Where each tensor of a manifest begins in a segment, in bytes, and how long the segment is."""

    offsets: tuple[int, ...]
    nbytes: int

    @staticmethod
    def of(tensors: Iterable[TensorSpec]) -> SegmentLayout:
        *offsets, nbytes = itertools.accumulate((aligned(spec.nbytes) for spec in tensors), initial=0)
        return SegmentLayout(tuple(offsets), nbytes)


def aligned(nbytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `alignment_bytes`. Raises ValueError for negative or zero arguments."""
    if alignment_bytes <= 0:
        raise ValueError(f"alignment_bytes must be positive, not {alignment_bytes}")
    if nbytes < 0:
        raise ValueError(f"nbytes must not be negative, not {nbytes}")
    return -(-nbytes // alignment_bytes) * alignment_bytes


def box_volume(box: Box) -> int:
    """Elements of a box (1 for a 0-d tensor's box)."""
    return math.prod(box.sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None if that is nothing."""
    if a.tensor != b.tensor:
        return None
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    ends = tuple(min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(a.tensor, starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


class ExactCover:
    """`check_exact_cover` for boxes that come again with every update: only a list that is new is gone through.

    `within` as there. Belongs to one thread at a time.
    """

    def __init__(self, manifest: Manifest, within: Sequence[Box] | None = None) -> None:
        self._manifest = manifest
        self._within = within
        self._passed: tuple[Box, ...] | None = None
        self._touching: tuple[int, ...] = ()

    def check(self, boxes: Sequence[Box], owner_of: Callable[[int], str]) -> tuple[int, ...]:
        """Positions of the boxes that hold something of what must be covered. `owner_of(position)` is for the error.

        Raises `ManifestMismatch` as `check_exact_cover` does.
        """
        boxes = tuple(boxes)
        if boxes != self._passed:
            self._passed = None
            owned = [(box, owner_of(position)) for position, box in enumerate(boxes)]
            check_exact_cover(self._manifest, owned, within=self._within)
            wanted = {box.tensor: box for box in self._within} if self._within is not None else None
            self._touching = tuple(
                position
                for position, box in enumerate(boxes)
                if wanted is None or (box.tensor in wanted and intersect(box, wanted[box.tensor]) is not None)
            )
            self._passed = boxes
        return self._touching


def split_box(box: Box, item_bytes: int, piece_bytes: int) -> list[Box]:
    """`box` cut along its outermost dimensions into boxes of at most `piece_bytes` (one element at the least), in C order.

    An empty box gives no piece.
    """
    if piece_bytes <= 0 or item_bytes <= 0:
        raise ValueError(f"piece_bytes and item_bytes must be positive, not {piece_bytes} and {item_bytes}")
    volume = box_volume(box)
    if volume == 0:
        return []
    if volume * item_bytes <= piece_bytes or volume == 1:
        return [box]
    dim = next(d for d, size in enumerate(box.sizes) if size > 1)
    row_bytes = volume // box.sizes[dim] * item_bytes
    rows = max(1, piece_bytes // row_bytes)
    pieces = []
    for start in range(0, box.sizes[dim], rows):
        size = min(rows, box.sizes[dim] - start)
        part = Box(
            box.tensor,
            (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
            (*box.sizes[:dim], size, *box.sizes[dim + 1 :]),
        )
        pieces.extend([part] if rows > 1 else split_box(part, item_bytes, piece_bytes))
    return pieces


def check_exact_cover(
    manifest: Manifest, boxes: Sequence[tuple[Box, str]], *, within: Sequence[Box] | None = None
) -> None:
    """Checks that `boxes` (each with its owner's name, for the error) cover the manifest exactly: no orphan, no double.

    `within`, one box per tensor at most, restricts what must be covered. Raises `ManifestMismatch` naming the first
    orphans and doubles and their counts. Boxes are compared pair by pair within a tensor after sorting, so the cost
    follows the number of boxes.
    """
    by_tensor: dict[int, list[tuple[Box, str]]] = {}
    for box, owner in boxes:
        manifest.check_box(box)
        if box_volume(box):
            by_tensor.setdefault(box.tensor, []).append((box, owner))
    doubles: list[str] = []
    orphans: list[str] = []
    wanted = [manifest.whole(i) for i in range(len(manifest.tensors))] if within is None else within
    for whole in wanted:
        held = sorted(by_tensor.get(whole.tensor, []), key=lambda entry: entry[0])
        covered = 0
        for i, (box, owner) in enumerate(held):
            if (inside := intersect(box, whole)) is not None:
                covered += box_volume(inside)
            for other, other_owner in held[i + 1 :]:
                if other.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                    break
                if (shared := intersect(box, other)) is not None or not box.offsets:
                    doubles.append(f"{manifest.describe(shared or box)} by {owner} and {other_owner}")
        if not doubles and covered < box_volume(whole):
            orphans.append(f"{manifest.describe(whole)} ({box_volume(whole) - covered} elements)")
    if doubles:
        raise ManifestMismatch(f"written more than once: {first_few(doubles)}")
    if orphans:
        raise ManifestMismatch(f"written by nobody: {first_few(orphans)}")
