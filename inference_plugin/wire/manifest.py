"""The manifest of a group: its tensors by checkpoint name, and their layout in a segment.

The layout is a pure function of the manifest, so that sender and receiver cannot disagree about it. The manifest's
fingerprint travels wherever an offset does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

import msgspec
import xxhash

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import (
    MAX_TENSORS,
    Box,
    Dims,
    PiecePlace,
    Region,
    box_volume,
    segment_region,
    split_box,
)

__all__ = ["ALIGNMENT_BYTES", "DTYPE_BYTES", "Manifest", "SegmentLayout", "TensorSpec", "aligned"]

ALIGNMENT_BYTES = 512
"""Every tensor of a segment begins at a multiple of this: enough for any dtype, for SIMD and for a CUDA copy."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element of each dtype that can travel, by torch's name."""

MAX_SEGMENT_BYTES = 1 << 44

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One checkpoint tensor: Hugging Face name, dtype by torch's name, shape."""

    name: Name
    dtype: Annotated[str, msgspec.Meta(max_length=64)]
    shape: Dims

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """Everything that a group carries, in order. `tied` maps a second name of a tensor to the name that travels.

    Raises `ManifestMismatch` from `check()` for duplicate names, unknown dtypes and dangling ties; a manifest that
    came over the wire is checked by the codec.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    tied: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_TENSORS)] = {}

    def check_not_empty(self) -> None:
        """Raises `ManifestMismatch` if it names no tensor: an update would be reported as a version that changes nothing."""
        if not self.tensors:
            raise ManifestMismatch(
                "the manifest names no tensor",
                hint="look at what exclude= and rename= leave of the model, and at what the export yields; if rank 0 alone has "
                "the tensors (full_state_dict=True), ExportAdapter(lambda: state) takes them on every rank",
            )

    def check(self) -> Manifest:
        """Returns itself; raises `ManifestMismatch` that lists the first offenders and their count."""
        names = [spec.name for spec in self.tensors]
        if len(set(names)) != len(names):
            seen: set[str] = set()
            doubled = [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
            raise ManifestMismatch(f"duplicate tensor names: {first_few(doubled)}")
        if unknown := [f"{spec.name}: {spec.dtype}" for spec in self.tensors if spec.dtype not in DTYPE_BYTES]:
            raise ManifestMismatch(f"dtypes that can't travel: {first_few(unknown)}; known: {', '.join(DTYPE_BYTES)}")
        # Counted without dimensions of 0: an empty tensor's strides must be numbers that a tensor can have.
        huge = [spec.name for spec in self.tensors if math.prod(d for d in spec.shape if d) > MAX_SEGMENT_BYTES]
        if huge:
            raise ManifestMismatch(f"shapes that no tensor can have: {first_few(huge)}")
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
        *offsets, nbytes = itertools.accumulate((aligned(spec.nbytes) for spec in self.tensors), initial=0)
        return SegmentLayout(tuple(offsets), nbytes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 over names, dtypes, shapes, order and ties, in hex."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([self.tensors, sorted(self.tied.items())]))

    def sent_name(self, name: str) -> str:
        """The name under which a tensor travels: `name` itself, or the name that it is tied to."""
        return self.tied.get(name, name)

    def whole(self, tensor: int) -> Box:
        """The box that is all of one tensor."""
        shape = self.tensors[tensor].shape
        return Box(tensor, (0,) * len(shape), shape)

    def box_nbytes(self, box: Box) -> int:
        return box_volume(box) * DTYPE_BYTES[self.tensors[box.tensor].dtype]

    def region(self, box: Box) -> Region | None:
        """The box's bytes in the segment, as rows; see `geometry.segment_region`."""
        spec = self.tensors[box.tensor]
        return segment_region(box, spec.shape, DTYPE_BYTES[spec.dtype], self.layout.offsets[box.tensor])

    def split(self, box: Box, piece_bytes: int) -> tuple[PiecePlace, ...]:
        """A slice's box in pieces of at most `piece_bytes`, with their places. Remembered: every update asks for the same."""
        key = (box, piece_bytes)
        if (known := self._splits.get(key)) is None:
            item_bytes = DTYPE_BYTES[self.tensors[box.tensor].dtype]
            places = []
            start = 0
            for part in split_box(self.check_box(box), item_bytes, piece_bytes):
                end = start + box_volume(part) * item_bytes
                places.append(PiecePlace(part, start, end, self.region(part)))
                start = end
            known = self._splits[key] = tuple(places)
        return known

    @cached_property
    def _splits(self) -> dict[tuple[Box, int], tuple[PiecePlace, ...]]:
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


class SegmentLayout(msgspec.Struct, frozen=True):
    """Start of each tensor in a segment, and the segment's length, in bytes."""

    offsets: tuple[int, ...]
    nbytes: int


def aligned(nbytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """`nbytes` rounded up to a multiple of `alignment_bytes`."""
    return -(-nbytes // alignment_bytes) * alignment_bytes
