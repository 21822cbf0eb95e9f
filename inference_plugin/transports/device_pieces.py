"""Slices on a device, cut into pieces, copied to their places in zones, and digested there; nothing goes through the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from inference_plugin.devices import Digests, device_of
from inference_plugin.transports.base import WriteStats
from inference_plugin.transports.pieces import checked_dtype, part_of
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, Slice
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import bytes_view
from inference_plugin.wire.zone import ZoneLayout

__all__ = ["BATCH_BYTES", "DevicePieces"]

BATCH_BYTES = 4 << 30
"""Bytes whose digests are ended together: many chains then run side by side (`devices.digests`). A sixteenth of it is held for
them on the device."""


class DevicePieces:
    """The pieces that one rank writes into `zones`, each with its layout."""

    def __init__(self, manifest: Manifest, zones: Sequence[tuple[torch.Tensor, ZoneLayout]], stats: WriteStats) -> None:
        self._manifest = manifest
        self._zones = zones
        self._stats = stats
        self._pieces: list[Piece] = []
        self._where: torch.device | None = None
        self._digests: Digests
        self._boxes: list[Box] = []
        self._nbytes = 0

    def add(self, item: Slice) -> None:
        """Queues the copies of a slice and the reading for its digests: what is queued afterwards may change it. Raises
        `ManifestMismatch` as `pieces_of` does."""
        began_s = time.perf_counter()
        where = item.tensor.device
        if self._where != where or self._nbytes >= BATCH_BYTES:
            self._flush()
            self._where, self._digests = where, device_of(where).new_digests()
        if where.index not in (None, device_of(where).current()):
            device_of(where).drain(
                where
            )  # what waited for the trainer's step is this thread's queue, on another device
        with torch.inference_mode():
            parts = list(self._parts(item))
            copies = [copy for box, part in parts for copy in self._copies(box, part)]
            if copies:
                torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
            self._digests.add([part for _, part in parts])
        self._boxes += [box for box, _ in parts]
        self._nbytes += sum(part.nbytes for _, part in parts)
        self._stats.move_s += time.perf_counter() - began_s

    def end(self) -> list[Piece]:
        """Every piece with its digest. What this thread queued on the slices' devices has ended."""
        self._flush()
        return self._pieces

    def _parts(self, item: Slice) -> Iterator[tuple[Box, torch.Tensor]]:
        dtype = checked_dtype(self._manifest, item)
        seen: Callable[[PiecePlace, object], None] | None = getattr(item, "seen", None)
        for place in self._manifest.split(item.box, PIECE_BYTES):
            part = part_of(item, place).to(dtype)
            if seen is not None and not _is_finite(part):
                seen(place, bytes_view(part.contiguous()).cpu().numpy())
            yield place.box, part

    def _copies(self, box: Box, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for memory, layout in self._zones:
            for landing in layout.landings(self._manifest, box):
                yield landing.view(memory, part.dtype), part

    def _flush(self) -> None:
        if self._where is None:
            return
        began_s = time.perf_counter()
        self._pieces += map(Piece, self._boxes, self._digests.end())
        self._stats.digest_s += time.perf_counter() - began_s
        self._stats.nbytes += self._nbytes
        self._where, self._boxes, self._nbytes = None, [], 0


def _is_finite(part: torch.Tensor) -> bool:
    """Whether all values are finite; False also where that is to be told from the bytes."""
    if not (part.is_floating_point() or part.is_complex()):
        return True
    return part.dtype.itemsize > 1 and bool(torch.isfinite(part).all())
