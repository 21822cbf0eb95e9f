"""Cuts slices into pieces, places pieces in a segment, and digests the pieces of a segment."""

from __future__ import annotations

import abc
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul, sub
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch

from inference_plugin.devices import Mark, device_of
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.copying import SPANS_AT_ONCE, copy_rows, digest_rows, digest_spans
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box, PiecePlace, Region, Slice, c_strides, rows_region
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import box_view, bytes_view, narrowed, torch_dtype
from inference_plugin.wire.zone import Landing

__all__ = [
    "Bytes", "DigestPass", "DigestPasses", "Lying", "LyingAt", "Passes", "PieceRows", "checked_dtype", "in_segment",
    "part_of", "pieces_of", "place_piece", "rows_of_pieces", "typed",
]  # fmt: skip

Pass = TypeVar("Pass")

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
"""Contiguous bytes. numpy's calls cost a fraction of torch's, and a copy of this size needs one thread only."""

SHORTEST_ROW_BYTES = 256
"""Shorter rows are packed before they are copied elsewhere."""


def pieces_of(manifest: Manifest, item: Slice, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[PiecePlace, Bytes]]:
    """The pieces of a slice, of at most `piece_bytes`, with their bytes in C order, in CPU memory.

    Where the slice has a `seen`, it is called with each piece and its bytes, before the piece is yielded.

    Bytes are cast only where the manifest states another dtype than the tensor has, which a dtype rule brings about.
    Each array is valid until the next iteration; where possible it is a view of the slice.

    Raises `ManifestMismatch` for a tensor that does not have its box's shape, whose bytes would land in other places, and
    for a cast between integers, booleans and floating point, which no dtype rule allows.
    """
    dtype = checked_dtype(manifest, item)
    seen: Callable[[PiecePlace, Bytes], None] | None = getattr(item, "seen", None)
    for place, data in _cut(manifest, item, dtype, piece_bytes):
        if seen is not None:
            seen(place, data)
        yield place, data


class PieceRows(NamedTuple):
    """A piece's bytes where the slice holds them: `rows` rows of `row_bytes` bytes, `stride` bytes apart in `data`."""

    data: Bytes
    rows: int
    row_bytes: int
    stride: int

    def packed(self) -> Bytes:
        """The bytes in C order, copied unless they are that already."""
        if self.stride == self.row_bytes:
            return self.data
        lying = np.lib.stride_tricks.as_strided(self.data, (self.rows, self.row_bytes), (self.stride, 1))
        return np.ascontiguousarray(lying).reshape(-1)


def rows_of_pieces(
    manifest: Manifest, item: Slice, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[PiecePlace, PieceRows]]:
    """As `pieces_of`, for whoever can read rows that lie apart: a slice of columns is not packed first."""
    tensor, dtype = item.tensor, checked_dtype(manifest, item)
    plain = tensor.dtype == dtype and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg())
    if plain and not tensor.is_contiguous() and getattr(item, "seen", None) is None:
        places = manifest.split(item.box, piece_bytes)
        parts = [rows for place in places if (rows := _rows_in_place(part_of(item, place))) is not None]
        if len(parts) == len(places):
            yield from zip(places, parts, strict=True)
            return
    for place, data in pieces_of(manifest, item, piece_bytes):
        yield place, PieceRows(data, 1, data.size, data.size)


def _rows_in_place(part: torch.Tensor) -> PieceRows | None:
    """None where the rows are not equally far apart, or so short that packing them first is faster."""
    item_bytes = part.itemsize
    rows = rows_region(0, part.shape, [step * item_bytes for step in part.stride()], item_bytes)
    if rows is None or rows.sizes[1] < SHORTEST_ROW_BYTES:
        return None
    (count, row_bytes), stride = rows.sizes, rows.strides[0]
    span = ((count - 1) * stride + row_bytes) // item_bytes
    return PieceRows(bytes_view(part.as_strided((span,), (1,))).numpy(), count, row_bytes, stride)


def checked_dtype(manifest: Manifest, item: Slice) -> torch.dtype:
    """The dtype in which a slice travels. Raises `ManifestMismatch` as `pieces_of` does."""
    dtype = torch_dtype(manifest.tensors[item.box.tensor].dtype)
    given = item.tensor.dtype
    if item.tensor.shape != item.box.sizes or (given != dtype and _kind(given) != _kind(dtype)):
        raise ManifestMismatch(
            f"the source gave {item.tensor.dtype} {list(item.tensor.shape)} for {manifest.describe(item.box)}, which is "
            f"{dtype}",
            hint="a slice's tensor has the shape of its box, and the kind of numbers that the manifest says",
            side="trainer",
        )
    return dtype


def _cut(manifest: Manifest, item: Slice, dtype: torch.dtype, piece_bytes: int) -> Iterator[tuple[PiecePlace, Bytes]]:
    places, tensor = manifest.split(item.box, piece_bytes), item.tensor
    lies_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if tensor.dtype == dtype and tensor.device.type == "cpu" and lies_plain:
        flat = bytes_view(tensor).numpy()
        for place in places:
            yield place, flat[place.start : place.end]
        return
    parts = [(place, part_of(item, place)) for place in places]
    if tensor.device.type != "cpu":
        yield from _from_device(parts, tensor.device, dtype)
        return
    for place, part in parts:
        yield place, bytes_view(part.to(dtype).resolve_conj().resolve_neg().contiguous()).numpy()


def part_of(item: Slice, place: PiecePlace) -> torch.Tensor:
    """A piece of a slice, as a view of it."""
    return narrowed(item.tensor, tuple(map(sub, place.box.offsets, item.box.offsets)), place.box.sizes)


def _from_device(
    parts: Sequence[tuple[PiecePlace, torch.Tensor]], where: torch.device, dtype: torch.dtype
) -> Iterator[tuple[PiecePlace, Bytes]]:
    """The next piece is on its way to the host while the caller works on the one before, in two buffers in turn."""
    device = device_of(where)
    is_current = where.index == device.current()
    if not is_current:
        device.drain(where)  # what waited for the trainer's step is this thread's queue, on another device
    largest = max((place.end - place.start for place, _ in parts), default=0)
    buffers = [device.host_memory(largest) for _ in parts[:2]]
    marks: list[Mark] = []

    def bytes_of(index: int) -> torch.Tensor:
        place, _ = parts[index]
        return buffers[index % 2][: place.end - place.start]

    def start(index: int) -> None:
        if index < len(parts):
            _, part = parts[index]
            device.copy(bytes_of(index).view(dtype).view(part.shape), part)
            marks.append(device.record())

    start(0)
    for index, (place, _) in enumerate(parts):
        start(index + 1)
        if is_current:
            device.finish(marks[index])
        else:
            device.drain(where)
        yield place, bytes_of(index).numpy()


def place_piece(segment: torch.Tensor, manifest: Manifest, place: PiecePlace, data: Bytes) -> None:
    """Copies a piece's bytes to their place in a segment."""
    if (region := place.region) is not None:
        rows, row_bytes = region.sizes
        copy_rows(segment.numpy(), region.offset, region.strides[0], data, 0, row_bytes, rows, row_bytes, True)
    else:
        view = box_view(segment, manifest, place.box)
        view.copy_(typed(data, view.dtype).view(place.box.sizes))


def typed(data: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Bytes, from anywhere in a bucket, as elements of `dtype`; copied only where torch can't view them."""
    aligned = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch can't mark a tensor read-only and says so
        return torch.from_numpy(aligned).view(dtype)


class Lying(msgspec.Struct, frozen=True, gc=False):
    """Where a piece's bytes lie in memory, and of which dtype they are. Kept for every piece of an update: as objects that
    Python's garbage collector looks through, they would make it hold up the engine's own thread."""

    landing: Landing
    dtype: torch.dtype

    @property
    def base(self) -> int:
        """Where the piece's tensor, or the place of it, begins."""
        return self.landing.base

    @property
    def rows(self) -> Region | None:
        """As `PiecePlace.region`."""
        return self.landing.rows

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The piece's elements, as a view of that memory."""
        return self.landing.view(memory, self.dtype)


LyingAt: TypeAlias = Callable[[Manifest, Box], Iterable[Lying]]
"""Where a box lies: once in a segment, in a zone once for each place that it lands in."""


def in_segment(manifest: Manifest, box: Box) -> Lying:
    """Where a box lies in a segment. Raises `ManifestMismatch` for a box that doesn't lie in its tensor."""
    manifest.check_box(box)
    spec, base = manifest.tensors[box.tensor], manifest.layout.offsets[box.tensor]
    dtype = torch_dtype(spec.dtype)
    strides = tuple(stride * dtype.itemsize for stride in c_strides(spec.shape))
    offset = base + sum(map(mul, box.offsets, strides))
    return Lying(Landing(base, offset, box.sizes, strides, manifest.region(box)), dtype)


@dataclass
class DigestPass:
    """Pieces whose digests one pass over memory gives: their rows are the same rows of a tensor, or each is one run of bytes, or
    there is one piece. `pieces`: their positions in the list of pieces."""

    pieces: list[int] = field(default_factory=list)
    lying: list[Lying] = field(default_factory=list)
    nbytes: int = 0

    @property
    def start(self) -> int:
        first = self.lying[0]
        return first.rows.offset if first.rows is not None else first.base

    def digests(self, memory: torch.Tensor) -> list[int]:
        """The digest of each piece's bytes in C order, as they lie in `memory`."""
        if self.spans is None:
            views = (each.view(memory) for each in self.lying)
            return [digest_bytes(bytes_view(view.contiguous()).numpy()) for view in views]
        stride, rows = self.rows
        return (
            digest_rows(memory.numpy(), stride, rows, self.spans)
            if rows > 1
            else digest_spans(memory.numpy(), self.spans)
        )

    @cached_property
    def spans(self) -> list[tuple[int, int]] | None:
        """Where each piece's first row begins, and its bytes; None where a piece has no rows that are equally far apart."""
        regions = [each.rows for each in self.lying if each.rows is not None]
        return [(one.offset, one.sizes[1]) for one in regions] if len(regions) == len(self.lying) else None

    @cached_property
    def rows(self) -> tuple[int, int]:
        """The distance between rows, in bytes, and their number, of pieces that have `spans`."""
        region = self.lying[0].rows
        assert region is not None
        return region.strides[0], region.sizes[0]


class Passes(abc.ABC, Generic[Pass]):
    """What is digested together of a list of boxes. Lists repeat with every update: only a new one is divided."""

    def __init__(self) -> None:
        self._known: tuple[Manifest | None, tuple[Box, ...], list[Pass]] = None, (), []

    def of(self, manifest: Manifest, boxes: Iterable[Box], lying: LyingAt) -> list[Pass]:
        """`lying` says where a box lies, the same at every call."""
        boxes = tuple(boxes)
        of, known, passes = self._known
        if manifest is not of or boxes != known:
            passes = list(self._divided(manifest, boxes, lying))
            self._known = manifest, boxes, passes
        return passes

    @abc.abstractmethod
    def _divided(self, manifest: Manifest, boxes: Sequence[Box], lying: LyingAt) -> Iterable[Pass]: ...


class DigestPasses(Passes[DigestPass]):
    """Passes over the host's memory, in its order."""

    def _divided(self, manifest: Manifest, boxes: Sequence[Box], lying: LyingAt) -> Iterable[DigestPass]:
        passes: defaultdict[Hashable, DigestPass] = defaultdict(DigestPass)
        runs: list[DigestPass] = []
        for position, box in enumerate(boxes):
            for where in lying(manifest, box):
                rows = where.rows
                if rows is None:
                    group = passes[where.base, box]
                elif rows.sizes[0] == 1:
                    runs.append(group := DigestPass())
                else:
                    first_row = (rows.offset - where.base) // rows.strides[0]
                    group = passes[where.base, first_row, rows.sizes[0], rows.strides[0]]
                group.pieces.append(position)
                group.lying.append(where)
                group.nbytes += manifest.box_nbytes(box)
        runs.sort(key=lambda run: run.start)
        return sorted([*passes.values(), *_joined(runs)], key=lambda group: group.start)


def _joined(runs: Iterable[DigestPass]) -> Iterator[DigestPass]:
    """Passes over short runs of bytes together, as far as they are no longer than a piece."""
    last: DigestPass | None = None
    for run in runs:
        if last is not None and last.nbytes + run.nbytes <= PIECE_BYTES and len(last.pieces) < SPANS_AT_ONCE:
            last.pieces += run.pieces
            last.lying += run.lying
            last.nbytes += run.nbytes
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool
