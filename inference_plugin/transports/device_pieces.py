"""Slices on a device, cut into pieces, copied to their places in zones, and digested there; nothing goes through the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from inference_plugin.devices import ByteCopy, Device, Digests, Offsets, Runs, device_of
from inference_plugin.transports.base import WriteStats
from inference_plugin.transports.pieces import Lying, LyingAt, Passes, checked_dtype, part_of
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, Slice
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import bytes_view, copyable
from inference_plugin.wire.zone import Landing, ZoneLayout

__all__ = ["PIECE_BYTES", "DevicePieces", "KnownRuns", "KnownSpots", "Spots"]

PIECE_BYTES = 16 << 20
"""Largest piece in a device's memory. Each one costs the processes on both sides some microseconds, and a device copies 16 MiB
in as many; one four times as large would make the longest chain of its digest as long as a copy of the whole model."""

BATCH_BYTES = 2 << 30
"""A worker looks between so many bytes whether its update was given up."""

MADE_BYTES = 256 << 20
"""Casts and packed slices or pieces that are held until they are read together."""

FEWEST_WAITING_BYTES, MOST_WAITING_BYTES = 256 << 20, 2 << 30
"""Slices wait to be copied and read together: few at first, so that the device begins soon, then twice as many each time."""


Span: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class SliceRuns:
    """A slice in C order: its pieces as runs of bytes, and the copies that bring it to the zone that needs it, if one does: each
    with where it begins in the zone and in the slice, and its bytes."""

    boxes: tuple[Box, ...]
    starts: Offsets
    lengths: Offsets
    zone: int
    copies: tuple[Span, ...]


class KnownRuns:
    """The runs of slices' boxes, for one manifest, one size of pieces and the layouts of some zones: every update asks for the
    same."""

    def __init__(self) -> None:
        self._of: tuple[int, ...] = ()
        self._keep: object = None
        """What has these ids."""
        self._known: dict[Box, SliceRuns | None] = {}

    def under(
        self, manifest: Manifest, layouts: tuple[ZoneLayout, ...], piece_bytes: int
    ) -> Callable[[Box], SliceRuns | None]:
        """A function of a slice's box. None: a piece of it lands in several zones, or in places that are not contiguous."""
        of = (piece_bytes, id(manifest), *map(id, layouts))
        if of != self._of:
            self._of, self._keep, self._known = of, (manifest, layouts), {}
        known = self._known

        def runs_of(box: Box) -> SliceRuns | None:
            if box not in known:
                known[box] = _runs_of(manifest, layouts, piece_bytes, box)
            return known[box]

        return runs_of


def _runs_of(manifest: Manifest, layouts: Sequence[ZoneLayout], piece_bytes: int, box: Box) -> SliceRuns | None:
    places = manifest.split(box, piece_bytes)
    zones: set[int | None] = set()
    copies: list[Span] = []
    for place in places:
        found = [
            (zone, landing) for zone, layout in enumerate(layouts) for landing in layout.landings(manifest, place.box)
        ]
        if len(found) > 1 or any(not _is_contiguous(landing) for _, landing in found):
            return None
        zones.add(found[0][0] if found else None)
        if found:
            copy = found[0][1].offset, place.start, place.end - place.start
            copies[-1:] = _together(copies[-1], copy) if copies else [copy]
    if len(zones) != 1:
        return None
    starts = np.array([place.start for place in places], dtype=np.int64)
    ends = np.array([place.end for place in places], dtype=np.int64)
    return SliceRuns(tuple(place.box for place in places), starts, ends - starts, zones.pop() or 0, tuple(copies))


def _together(one: Span, following: Span) -> list[Span]:
    """One copy where the other follows on both sides."""
    at, start, nbytes = one
    if (at + nbytes, start + nbytes) == following[:2]:
        return [(at, start, nbytes + following[2])]
    return [one, following]


def _is_contiguous(landing: Landing) -> bool:
    return landing.rows is not None and landing.rows.sizes[0] == 1


@dataclass
class Spots:
    """Where some pieces lie in a zone, to be digested together: as runs of bytes; `starts` is None where the bytes lie apart."""

    pieces: list[int]
    lying: list[Lying]
    starts: Offsets | None
    lengths: Offsets
    nbytes: int


class KnownSpots(Passes[Spots]):
    """The spots of a list of boxes."""

    def _divided(self, manifest: Manifest, boxes: Sequence[Box], lying: LyingAt) -> Iterator[Spots]:
        found = [(position, where) for position, box in enumerate(boxes) for where in lying(manifest, box)]
        for are_runs in (True, False):
            batch: list[tuple[int, Lying]] = []
            nbytes = 0
            some = [one for one in found if (one[1].rows is not None and one[1].rows.sizes[0] == 1) == are_runs]
            for index, (position, where) in enumerate(some):
                batch.append((position, where))
                nbytes += manifest.box_nbytes(boxes[position])
                # Pieces that lie apart are packed to be read, in memory beside the engine's.
                if nbytes >= (BATCH_BYTES if are_runs else MADE_BYTES) or index == len(some) - 1:
                    rows = [where.rows for _, where in batch if where.rows is not None]
                    starts = np.array([each.offset for each in rows], dtype=np.int64) if are_runs else None
                    lengths = np.array([manifest.box_nbytes(boxes[position]) for position, _ in batch], dtype=np.int64)
                    yield Spots([p for p, _ in batch], [where for _, where in batch], starts, lengths, nbytes)
                    batch, nbytes = [], 0


class DevicePieces:
    """The pieces that one rank writes into `zones`, each with its layout. `slices_last`: whether each slice's memory holds its
    values until `end`; they are then copied and read together.

    A slice travels in runs of contiguous bytes; one that is cast, or doesn't lie so, is packed first. Where a piece doesn't land
    so, or in several zones, its slice is copied and digested piece by piece.
    """

    def __init__(
        self,
        manifest: Manifest,
        zones: Sequence[tuple[torch.Tensor, ZoneLayout]],
        stats: WriteStats,
        known: KnownRuns,
        *,
        slices_last: bool,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._manifest = manifest
        self._zones = zones
        self._stats = stats
        self._runs_of = known.under(manifest, tuple(layout for _, layout in zones), piece_bytes)
        self._slices_last = slices_last
        self._piece_bytes = piece_bytes
        self._pieces: list[Piece] = []
        self._where: torch.device | None = None
        self._is_here = True
        self._device: Device
        self._digests: Digests
        self._boxes: list[Box] = []
        self._waiting_copies: list[ByteCopy] = []
        self._waiting: list[Runs] = []
        self._waiting_bytes = 0
        self._most_waiting_bytes = FEWEST_WAITING_BYTES
        self._made_bytes = 0

    def add(self, item: Slice) -> None:
        """Queues the copies of a slice and the reading for its digests, so that what is queued afterwards may change the slice;
        with `slices_last` perhaps later, in `end` at the latest. Raises `ManifestMismatch` as `pieces_of` does."""
        began_s = time.perf_counter()
        where = item.tensor.device
        if self._where != where:
            self._flush()
            self._where, self._device = where, device_of(where)
            self._digests = self._device.new_digests()
            self._is_here = where.index in (None, self._device.current())
        if not self._is_here:  # what waited for the trainer's step is this thread's queue, on another device
            self._device.drain(where)
        dtype = checked_dtype(self._manifest, item)
        runs = self._runs_of(item.box)
        if runs is None or getattr(item, "seen", None) is not None:
            self._add_parts(item, dtype)
        else:
            self._add_runs(item.tensor, dtype, runs)
        self._stats.move_s += time.perf_counter() - began_s

    def end(self) -> list[Piece]:
        """Every piece with its digest. What this thread queued on the slices' devices has ended."""
        self._flush()
        return self._pieces

    def _add_runs(self, given: torch.Tensor, dtype: torch.dtype, runs: SliceRuns) -> None:
        is_made = given.dtype != dtype or given.is_conj() or given.is_neg() or not given.is_contiguous()
        if is_made:
            with torch.inference_mode():
                given = given.to(dtype).resolve_conj().resolve_neg().contiguous()
        for at, start, nbytes in runs.copies:
            self._waiting_copies.append(ByteCopy(self._zones[runs.zone][0], at, given, start, nbytes))
        self._waiting.append(Runs(given, runs.starts, runs.lengths))
        self._boxes += runs.boxes
        self._stats.nbytes += given.nbytes
        self._waiting_bytes += given.nbytes
        if is_made:
            self._made_bytes += given.nbytes
        lasts = is_made or self._slices_last
        if not lasts or self._made_bytes >= MADE_BYTES or self._waiting_bytes >= self._most_waiting_bytes:
            self._most_waiting_bytes = min(2 * self._most_waiting_bytes, MOST_WAITING_BYTES)
            self._read_waiting()

    def _read_waiting(self) -> None:
        with torch.inference_mode():
            self._device.copy_bytes(self._waiting_copies)
            self._digests.add_runs(self._waiting)
        self._waiting_copies, self._waiting, self._waiting_bytes, self._made_bytes = [], [], 0, 0

    def _add_parts(self, item: Slice, dtype: torch.dtype) -> None:
        self._read_waiting()  # pieces come in the order in which they are read
        with torch.inference_mode():
            parts = list(self._parts(item, dtype))
            copies = [copy for box, part in parts for copy in self._copies(box, part)]
            if copies:
                torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
            self._digests.add([part for _, part in parts])
        self._boxes += [box for box, _ in parts]
        self._stats.nbytes += sum(part.nbytes for _, part in parts)

    def _parts(self, item: Slice, dtype: torch.dtype) -> Iterator[tuple[Box, torch.Tensor]]:
        seen: Callable[[PiecePlace, object], None] | None = getattr(item, "seen", None)
        for place in self._manifest.split(item.box, self._piece_bytes):
            part = part_of(item, place).to(dtype)
            if seen is not None and not _is_finite(part):
                seen(place, bytes_view(part.contiguous()).cpu().numpy())
            yield place.box, part

    def _copies(self, box: Box, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for memory, layout in self._zones:
            for landing in layout.landings(self._manifest, box):
                yield copyable(landing.view(memory, part.dtype)), copyable(part)

    def _flush(self) -> None:
        if self._where is None:
            return
        began_s = time.perf_counter()
        self._read_waiting()
        self._pieces += map(Piece, self._boxes, self._digests.end())
        self._stats.digest_s += time.perf_counter() - began_s
        self._where, self._boxes = None, []


def _is_finite(part: torch.Tensor) -> bool:
    """Whether all values are finite; False also where that is to be told from the bytes."""
    if not (part.is_floating_point() or part.is_complex()):
        return True
    return part.dtype.itemsize > 1 and bool(torch.isfinite(part).all())
