"""Same host, CPU memory: one shared segment per transaction, laid out by the manifest.

1. the manager rank makes a memfd (or takes a spare one) and seals its size;
2. every trainer rank maps it and copies its slices to their places; every worker of the host maps it read-only;
3. digests are taken from the trainer's own memory and compared, in place, by the workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch

from inference_plugin.transports.base import Delivery, Kept, Receiver, Sender, Staging, Target, Transport, WriteStats
from inference_plugin.transports.pieces import Bytes, DigestPasses, pieces_of, place_piece
from inference_plugin.transports.segment import (
    MIN_SEGMENT_BYTES,
    MappedSegments,
    SegmentAddress,
    SharedSegment,
    why_no_segments,
)
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.copying import copy_rows_and_digest
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece, PiecePlace
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import box_view

__all__ = ["TRANSPORT"]

SEGMENTS = 2
"""Used in turn: while one is the way back, the next update is written to the other."""


class ShmStaging(Staging):
    """The segment of one transaction, shared with the receiver that keeps it mapped for the next one."""

    def __init__(self, segment: SharedSegment, nbytes: int, passes: DigestPasses) -> None:
        self.passes = passes
        self.segment = segment.tensor[:nbytes]
        self.segment_id = segment.segment_id

    def close(self) -> None:
        self.segment = torch.empty(0, dtype=torch.uint8)


class ShmReceiver(Receiver):
    """Maps segments, and keeps the last ones mapped."""

    def __init__(self) -> None:
        self._segments = MappedSegments(writable=False, most=SEGMENTS, first=SharedSegment.page_lock)
        self._passes = DigestPasses()

    def check_probe(self, probe: bytes) -> None:
        segment = SharedSegment.attach(decode_as(probe, SegmentAddress), writable=False)
        segment.close()

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        address = decode_as(description, SegmentAddress)
        if address.nbytes < manifest.layout.nbytes:
            raise TransportUnavailable(
                f"shm: the segment has {address.nbytes} bytes, the manifest needs {manifest.layout.nbytes}"
            )
        return ShmStaging(self._segments.at(address), manifest.layout.nbytes, self._passes)

    def drop_kept(self) -> None:
        self._segments.close()

    def close(self) -> None:
        self.drop_kept()


class ShmSender(Sender):
    """Manager rank: owns at most two segments, used in turn. Every rank: keeps them mapped."""

    def __init__(self) -> None:
        self._owned: dict[str, SharedSegment] = {}
        self._mapped = MappedSegments(writable=True, most=SEGMENTS)
        self._probe: SharedSegment | None = None

    def probe(self) -> bytes:
        if self._probe is None:
            self._probe = SharedSegment.create(MIN_SEGMENT_BYTES)
        return msgspec.msgpack.encode(self._probe.address)

    def takes_bytes(self, manifest: Manifest, busy: frozenset[str]) -> int:
        needed = max(manifest.layout.nbytes, MIN_SEGMENT_BYTES)
        spare = any(each.nbytes == needed and each.segment_id not in busy for each in self._owned.values())
        return 0 if spare else needed

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        needed = max(manifest.layout.nbytes, MIN_SEGMENT_BYTES)
        for segment in list(self._owned.values()):
            if segment.nbytes != needed:
                self._owned.pop(segment.segment_id).close()
        spare = [s for s in self._owned.values() if s.segment_id not in busy]
        if not spare:
            check_fits(
                needed, "shm: a segment", "transport 'zmq' needs none on the trainer's side; partial=True sends a part"
            )
        segment = spare[0] if spare else SharedSegment.create(needed)
        segment.ask_for_large_pages()
        self._owned[segment.segment_id] = segment
        for unused in spare[1:]:
            self._owned.pop(unused.segment_id).close()
        return msgspec.msgpack.encode(segment.address)

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        manifest = delivery.manifest
        address = decode_as(delivery.description, SegmentAddress)
        segment = (self._owned.get(address.segment_id) or self._mapped.at(address)).tensor
        pieces: list[Piece] = []
        stats = WriteStats()
        for item in delivery.slices:
            for place, data in pieces_of(manifest, item, delivery.piece_bytes):
                pieces.append(_place_and_digest(segment, manifest, place, data, stats))
            delivery.check_deadline(stats.nbytes)
        stats.held_bytes = sum(owned.nbytes for owned in self._owned.values())
        return pieces, stats

    def kept(self, manifest: Manifest, description: bytes, targets: Sequence[Target]) -> Kept | None:
        owned = self._owned.get(decode_as(description, SegmentAddress).segment_id)
        if owned is None:
            return None
        memory = owned.tensor
        return lambda box: box_view(memory, manifest, box)

    def close(self) -> None:
        self._mapped.close()
        while self._owned:
            self._owned.popitem()[1].close()
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def _place_and_digest(
    segment: torch.Tensor, manifest: Manifest, place: PiecePlace, data: Bytes, stats: WriteStats
) -> Piece:
    """As `place_piece`, with the digest computed in the same pass over memory where the rows allow it."""
    started_s = time.perf_counter()
    if (region := place.region) is None:
        digest = digest_bytes(data)
        stats.digest_s += time.perf_counter() - started_s
        started_s = time.perf_counter()
        place_piece(segment, manifest, place, data)
    else:
        digest = copy_rows_and_digest(segment.numpy(), region.offset, region.strides[0], data, *region.sizes)
    stats.nbytes += data.nbytes
    stats.move_s += time.perf_counter() - started_s
    return Piece(place.box, digest)


TRANSPORT = Transport(
    name="shm",
    summary="same host: shared memory that trainer ranks write and workers read in place; 2 copies per byte",
    preference=10,
    why_not=why_no_segments,
    sender=ShmSender,
    receiver=ShmReceiver,
    copies_per_byte=2,  # trainer -> segment -> parameter
)
