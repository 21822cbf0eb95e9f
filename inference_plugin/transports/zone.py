"""Same host, one replica: trainer ranks write the workers' second sets of weights themselves, in the engine's layout.

1. each worker makes a *zone*: a memfd that holds a second set of weights, and behind it, as msgpack, the `ZoneLayout`, which says
   where each box lands. The answer to `Begin` says where the zone is.
2. every trainer rank makes its mapping of the zones writable for one `write`, cuts its slices where places begin and end, and
   writes each piece to its place. The mapping is read-only again before the rank says `Wrote`: a later write faults there.
3. each worker compares the pieces with their digests, in place, by one read.
4. the commit swaps pointers: the zone is the live memory, and the one that it replaced is the next update's.

So a byte is copied once, and no segment is made. A zone whose update did not commit is never used again: a rank that was stopped
in the middle of it may wake and write, into memory that nobody reads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from inference_plugin.transports.base import Delivery, Kept, Receiver, Sender, Staging, Target, Transport, WriteStats
from inference_plugin.transports.pieces import Bytes, DigestPasses, Lying, PieceRows, rows_of_pieces, typed
from inference_plugin.transports.segment import SegmentAddress, SharedSegment
from inference_plugin.transports.shm import TRANSPORT as SHM
from inference_plugin.transports.written import WrittenPieces
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.copying import copy_rows, copy_rows_and_digest
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import ProtocolError, TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, Slice
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import Manifest, aligned
from inference_plugin.wire.messages.common import Count
from inference_plugin.wire.tensors import torch_dtype
from inference_plugin.wire.zone import ZoneLayout

__all__ = ["TRANSPORT", "AnyZone", "ZoneAddress", "ZoneReceiver", "ZoneStaging"]

NOTHING: Bytes = np.empty(0, dtype=np.uint8)

TOUCHED_AT_ONCE = 4 << 20
"""Bytes of a new zone that its worker touches without a pause: the engine generates meanwhile."""


class ZoneAddress(msgspec.Struct, frozen=True):
    """Where a zone can be opened; its `ZoneLayout` is its bytes from `layout_at` on."""

    segment: SegmentAddress
    layout_at: Count
    layout_nbytes: Count


# --- the worker's side -------------------------------------------------------------------------------------------------------


class AnyZone(Protocol):
    """What a staging needs of a zone, whatever memory it lies in. `address` travels; peers open its `segment`."""

    layout: ZoneLayout
    address: Any

    @property
    def memory(self) -> torch.Tensor: ...

    def close(self) -> None: ...


class Zone:
    """A worker's zone. Weights that lie in it keep its memory after `close`."""

    def __init__(self, layout: ZoneLayout) -> None:
        check_fits(layout.nbytes, "zone: a second set of weights", "install='copy' holds none on the engine's side")
        described = msgspec.msgpack.encode(layout)
        layout_at = aligned(layout.nbytes)
        self.layout = layout
        self._segment = SharedSegment.create(layout_at + len(described))
        self._segment.ask_for_large_pages()
        self._segment.write(layout_at, described)
        self.address = ZoneAddress(self._segment.address, layout_at, len(described))
        self._closed = threading.Event()
        with contextlib.suppress(RuntimeError):  # no thread can be started: the first writer pays for the page faults
            threading.Thread(target=self._touch, name="weightwire-zone", daemon=True).start()

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes, uint8."""
        return self._segment.tensor[: self.layout.nbytes]

    def close(self) -> None:
        """From now on no rank can map it. May be called twice."""
        self._closed.set()
        self._segment.close()

    def _touch(self) -> None:
        """Allocates all pages now, so that writers do not pay for the page faults."""
        for start in range(0, self.layout.nbytes, TOUCHED_AT_ONCE):
            if self._closed.wait(0.0005) or not self._segment.touch(start, TOUCHED_AT_ONCE):
                return


class ZoneStaging(Staging):
    """The zone of one transaction. `settle` hands it to the receiver as the live memory; `close` without it drops the zone."""

    def __init__(self, receiver: ZoneReceiver, zone: AnyZone) -> None:
        self._receiver = receiver
        self._zone: AnyZone | None = zone
        self._layout = zone.layout
        self.passes = receiver.passes
        self.segment = zone.memory
        self.segment_id = zone.address.segment.segment_id
        self.landing = msgspec.msgpack.encode(zone.address)

    def lying(self, manifest: Manifest, box: Box) -> Iterable[Lying]:
        dtype = torch_dtype(manifest.tensors[box.tensor].dtype)
        for landing in self._layout.landings(manifest, box):
            yield Lying(landing, dtype)

    def settle(self) -> None:
        zone, self._zone = self._zone, None
        if zone is not None:
            self._receiver.is_live(zone)

    def close(self) -> None:
        self.segment = torch.empty(0, dtype=torch.uint8)
        zone, self._zone = self._zone, None
        if zone is not None:
            zone.close()


class ZoneReceiver(Receiver):
    """Two zones used in turn: the live one, and that of the next update."""

    def __init__(self) -> None:
        self.passes = DigestPasses()
        self._layout: ZoneLayout | None = None
        self._live: AnyZone | None = None
        self._spare: AnyZone | None = None
        self._is_closed = False

    def check_probe(self, probe: bytes) -> None:
        SharedSegment.attach(decode_as(probe, SegmentAddress), writable=False).close()

    def land_in(self, layout: ZoneLayout, device: str) -> None:
        if device != "cpu":
            raise TransportUnavailable(f"zone: the weights are on {device}", hint="transport 'shm' brings them there")
        self._layout, self.passes = layout, DigestPasses()

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        if self._layout is None:
            raise ProtocolError("a zone was asked for before its layout was agreed")
        zone, self._spare = self._spare, None
        return self._new_staging(zone or self._new_zone(self._layout))

    def _new_zone(self, layout: ZoneLayout) -> AnyZone:
        return Zone(layout)

    def _new_staging(self, zone: AnyZone) -> ZoneStaging:
        return ZoneStaging(self, zone)

    def is_live(self, zone: AnyZone) -> None:
        """The engine computes with `zone` from now on. The zone before it is free: no writer can write into it any more."""
        if self._is_closed:
            zone.close()
            return
        self._spare, self._live = self._live, zone
        if self._spare is None and self._layout is not None:
            # Now: the next update must not wait for its pages. What this one replaced may not be free yet.
            with contextlib.suppress(TransportUnavailable):
                self._spare = self._new_zone(self._layout)

    def drop_kept(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def close(self) -> None:
        self._is_closed = True
        self.drop_kept()
        if self._live is not None:
            self._live.close()  # the weights keep its memory
            self._live = None


# --- the trainer's side ------------------------------------------------------------------------------------------------------


class ZoneSender(Sender):
    """Keeps the last two zones of each worker mapped, to read: building page tables anew costs as much as a copy."""

    KEPT = 2

    def __init__(self) -> None:
        self._zones: dict[str, MappedZone] = {}
        self._probe = SHM.sender()

    def probe(self) -> bytes:
        return self._probe.probe()

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        return b""

    def edges(self, manifest: Manifest, target: Target) -> Sequence[Box]:
        return [place.box for place in self._zone(manifest, target).layout.places]

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        manifest, targets = delivery.manifest, delivery.targets
        stats = WriteStats()
        written = WrittenPieces(stats)
        lasts = delivery.slices_last
        zones = [self._zone(manifest, target) for target in targets]
        is_over = False
        try:
            for zone in zones:
                zone.begin_writing()
            for item in delivery.slices:
                places = manifest.split(item.box, delivery.piece_bytes)
                if not written.copy_slice(manifest, item, places, partial(_run_in, zones, manifest), lasts=lasts):
                    _land_pieces(written, zones, delivery, item, stats)
                del item  # before the next one is made
                delivery.check_deadline(stats.nbytes)
            pieces = written.end()
            for zone in zones:
                zone.end_writing()
            is_over = True
        finally:
            written.close()
            if not is_over:  # the update fails, and these zones are never used again
                for zone in zones:
                    with contextlib.suppress(OSError):
                        zone.end_writing()
                for target in targets:
                    self._drop(decode_as(target.landing, ZoneAddress).segment.segment_id)
        for known in list(self._zones)[: -self.KEPT * len(targets)]:
            self._drop(known)
        return pieces, stats

    def kept(self, manifest: Manifest, description: bytes, targets: Sequence[Target]) -> Kept | None:
        zones: list[MappedZone] = []
        for target in targets:
            layout = self._zone(manifest, target).layout
            try:
                segment = SharedSegment.attach(decode_as(target.landing, ZoneAddress).segment, writable=False)
            except TransportUnavailable:  # its worker has ended, or dropped it
                for zone in zones:
                    zone.segment.close()
                return None
            zones.append(MappedZone(segment, layout))
        return KeptZones(manifest, zones).read

    def close(self) -> None:
        for known in list(self._zones):
            self._drop(known)
        self._probe.close()

    def _zone(self, manifest: Manifest, target: Target) -> MappedZone:
        """A worker's zone, mapped to read. `_zones` is in the order of use, the latest one last."""
        address = decode_as(target.landing, ZoneAddress)
        if (zone := self._zones.pop(address.segment.segment_id, None)) is None:
            segment = SharedSegment.attach(address.segment, writable=True)
            try:
                segment.ask_for_large_pages()
                segment.keep_from_children()
                segment.set_writable(False)
                zone = MappedZone(segment, _layout_in(segment, address).check(manifest))
            except BaseException:
                segment.close()
                raise
        self._zones[address.segment.segment_id] = zone
        return zone

    def _drop(self, segment_id: str) -> None:
        if (zone := self._zones.pop(segment_id, None)) is not None:
            zone.segment.close()


class MappedZone:
    """A worker's zone in a trainer's process. `is_fresh`: its pages are not mapped yet. `writable`: its bytes, while this rank
    writes them."""

    def __init__(self, segment: SharedSegment, layout: ZoneLayout) -> None:
        self.layout = layout
        self.segment = segment
        self.is_fresh = True
        self.writable = NOTHING

    def begin_writing(self) -> None:
        self.segment.set_writable(True)
        self.writable = self.segment.tensor.numpy()

    def end_writing(self) -> None:
        """Raises OSError where the permission to write can't be ended."""
        self.writable = NOTHING
        self.segment.set_writable(False)
        self.is_fresh = False


class KeptZones:
    """Reads what the zones of an update hold now; a catch-up compares it with the trainer's digests. Keeps their memory,
    also after their worker has ended."""

    def __init__(self, manifest: Manifest, zones: Sequence[MappedZone]) -> None:
        self._manifest = manifest
        self._zones = zones

    def read(self, box: Box) -> torch.Tensor | None:
        dtype = torch_dtype(self._manifest.tensors[box.tensor].dtype)
        for zone in self._zones:
            for landing in zone.layout.landings(self._manifest, box):
                return landing.view(zone.segment.tensor, dtype)
        return None

    def __del__(self) -> None:
        for zone in self._zones:
            zone.segment.close()


def _layout_in(segment: SharedSegment, address: ZoneAddress) -> ZoneLayout:
    layout = segment.read(address.layout_at, address.layout_nbytes, ZoneLayout)
    if layout.nbytes > address.layout_at:
        raise ProtocolError(f"a zone whose layout, at {address.layout_at}, lies in its {layout.nbytes} bytes")
    return layout


def _run_in(zones: Sequence[MappedZone], manifest: Manifest, place: PiecePlace) -> tuple[Any, int] | None:
    """`Lands`, for the zones of some workers."""
    found = [(zone, landing.rows) for zone in zones for landing in zone.layout.landings(manifest, place.box)]
    if len(found) != 1:
        return None
    ((zone, rows),) = found
    if rows is None or rows.sizes[0] != 1:
        return None
    if zone.is_fresh:
        zone.segment.touch(rows.offset, rows.sizes[1])
    return zone.writable, rows.offset


def _land_pieces(
    written: WrittenPieces, zones: Sequence[MappedZone], delivery: Delivery, item: Slice, stats: WriteStats
) -> None:
    for place, rows in rows_of_pieces(delivery.manifest, item, delivery.piece_bytes):
        began_s = time.perf_counter()
        written.add(place.box, _land(zones, delivery.manifest, place.box, rows))
        stats.nbytes += place.end - place.start
        stats.move_s += time.perf_counter() - began_s


def _land(zones: Sequence[MappedZone], manifest: Manifest, box: Box, piece: PieceRows) -> int:
    """Copies a piece to all its places; returns its digest, computed while it is copied where its rows allow that."""
    digest: int | None = None
    for zone in zones:
        for landing in zone.layout.landings(manifest, box):
            if (rows := landing.rows) is None:
                dtype = torch_dtype(manifest.tensors[box.tensor].dtype)
                landing.view(zone.segment.tensor, dtype).copy_(typed(piece.packed(), dtype).view(box.sizes))
                continue
            (count, row_bytes), stride = rows.sizes, rows.strides[0]
            if zone.is_fresh:
                zone.segment.touch(rows.offset, (count - 1) * stride + row_bytes)
            data, apart = piece.data, row_bytes
            if count == 1:
                count, row_bytes, stride, apart = piece.rows, piece.row_bytes, piece.row_bytes, piece.stride
            elif (piece.rows, piece.row_bytes) == (count, row_bytes):
                apart = piece.stride
            elif piece.rows != 1:
                data = piece.packed()
            if digest is None:
                digest = copy_rows_and_digest(zone.writable, rows.offset, stride, data, count, row_bytes, apart)
            else:
                copy_rows(zone.writable, rows.offset, stride, data, 0, apart, count, row_bytes, True)
    return digest_bytes(piece.packed()) if digest is None else digest


TRANSPORT = Transport(
    name="zone",
    summary="same host, one replica: trainer ranks write the second set that the commit swaps in; 1 copy per byte",
    preference=5,
    why_not=SHM.why_not,
    sender=ZoneSender,
    receiver=ZoneReceiver,
    copies_per_byte=1,  # trainer -> parameter
    sends=True,
    lands_in_zone=True,
)
