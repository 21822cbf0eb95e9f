"""A zone: a worker's second set of weights, in the engine's layout, into which trainer ranks write. Here is what says where each
box of a checkpoint tensor lands in it: pure functions on plain values, used by both sides."""

from __future__ import annotations

from functools import cached_property
from operator import mul, sub
from typing import TYPE_CHECKING, Annotated

import msgspec

from inference_plugin.wire.errors import ProtocolError
from inference_plugin.wire.geometry import Box, Dims, Region, c_strides, overlap, rows_region
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest

if TYPE_CHECKING:
    import torch

__all__ = ["Landing", "Place", "ZoneLayout", "strides_of_box"]

MAX_PLACES = 1 << 22
ZoneBytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a checkpoint tensor and where it lies in the zone: the byte of its first element, and the bytes from one element
    to the next in each dimension."""

    box: Box
    offset: ZoneBytes
    strides: Dims


class Landing(msgspec.Struct, frozen=True, gc=False):
    """A part of a place, as bytes. `base`: where the place begins; `rows`: (rows, bytes of a row), None where the part has no
    rows of one length that are equally far apart."""

    base: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    rows: Region | None

    def view(self, zone: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The part as a view of `zone`, which is uint8."""
        item_bytes = dtype.itemsize
        typed = zone.narrow(0, 0, zone.numel() // item_bytes * item_bytes).view(dtype)
        strides = [stride // item_bytes for stride in self.strides]
        return typed.as_strided(self.sizes, strides, typed.storage_offset() + self.offset // item_bytes)


class ZoneLayout(msgspec.Struct, frozen=True, dict=True):
    """A zone of `nbytes`, and every place in it. Places of one tensor may overlap in the tensor, never in the zone."""

    nbytes: ZoneBytes
    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=MAX_PLACES)]

    def check(self, manifest: Manifest) -> ZoneLayout:
        """Returns itself. Raises `ManifestMismatch` or `ProtocolError` for a place that is no box of the manifest, or that does
        not lie within the zone."""
        for place in self.places:
            item_bytes = DTYPE_BYTES[manifest.tensors[manifest.check_box(place.box).tensor].dtype]
            sizes = place.box.sizes
            if len(place.strides) != len(sizes) or any(step % item_bytes for step in (place.offset, *place.strides)):
                raise ProtocolError(f"a place of {manifest.describe(place.box)} has strides {list(place.strides)}")
            end = place.offset + sum((n - 1) * step for n, step in zip(sizes, place.strides, strict=True)) + item_bytes
            if end > self.nbytes:
                raise ProtocolError(f"a place of {manifest.describe(place.box)} ends at byte {end} of {self.nbytes}")
        return self

    def landings(self, manifest: Manifest, box: Box) -> tuple[Landing, ...]:
        """Where a box lands; nowhere if the worker needs nothing of it. Remembered: every update asks for the same.

        Raises `ProtocolError` for a box of which a place holds a part: its bytes would lie apart.
        """
        if (known := self._known.get(box)) is None:
            known = self._known[box] = tuple(self._find(manifest, box))
        return known

    def _find(self, manifest: Manifest, box: Box) -> list[Landing]:
        item_bytes = DTYPE_BYTES[manifest.tensors[box.tensor].dtype]
        found = []
        for place in self._by_tensor.get(box.tensor, ()):
            shared = overlap(place.box.offsets, place.box.sizes, box.offsets, box.sizes)
            if shared is None:
                continue
            if shared != (box.offsets, box.sizes):
                raise ProtocolError(
                    f"{manifest.describe(box)} is not cut where {manifest.describe(place.box)} begins or ends"
                )
            offset = place.offset + sum(map(mul, map(sub, box.offsets, place.box.offsets), place.strides))
            rows = rows_region(offset, box.sizes, place.strides, item_bytes)
            found.append(Landing(place.offset, offset, box.sizes, place.strides, rows))
        return found

    @cached_property
    def _by_tensor(self) -> dict[int, list[Place]]:
        found: dict[int, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.box.tensor, []).append(place)
        return found

    @cached_property
    def _known(self) -> dict[Box, tuple[Landing, ...]]:
        return {}


def strides_of_box(box: Box, shape: tuple[int, ...], source: Region, dest: Region) -> tuple[int, ...]:
    """The stride in `dest` of each dimension of `box`, in elements.

    `source` is all of the box, as a region of C-contiguous `shape`, each element once; `dest` has the same sizes, and element k
    of one is element k of the other.
    """
    strides = []
    for size, unit in zip(box.sizes, c_strides(shape), strict=True):
        if size == 1:
            strides.append(0)
            continue
        around = [
            (step, target)
            for count, step, target in zip(source.sizes, source.strides, dest.strides, strict=True)
            if step <= unit < step * count
        ]
        step, target = max(around)
        strides.append(unit // step * target)
    return tuple(strides)
