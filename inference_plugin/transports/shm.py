"""Same host, CPU memory: one shared segment per transaction, laid out by the manifest.

1. the manager rank makes a memfd (or takes a spare one) and seals its size;
2. every trainer rank maps it and copies its slices to their places; every worker of the host maps it read-only;
3. digests are taken from the trainer's own memory and compared, in place, by the workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

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
from inference_plugin.transports.written import WrittenPieces
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.copying import copy_rows_and_digest
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, Slice
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import box_view

__all__ = ["TRANSPORT"]

NO_MEMORY_HINT = (
    "free memory on the trainer's host; an update needs none there by transport 'zmq', and less with partial=True"
)

SEGMENTS = 2
"""Used in turn: while one is the way back, the next update is written to the other."""


class WrittenAddress(SegmentAddress, frozen=True):
    """The segment that trainer ranks write to. `once`: a rank to whom it is new doesn't keep it mapped."""

    once: bool = False


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
        self.owned: dict[str, SharedSegment] = {}
        self._mapped = MappedSegments(writable=True, most=SEGMENTS)
        self._probe: SharedSegment | None = None

    def probe(self) -> bytes:
        if self._probe is None:
            self._probe = SharedSegment.create(MIN_SEGMENT_BYTES)
        return msgspec.msgpack.encode(self._probe.address)

    def takes_bytes(self, manifest: Manifest, busy: frozenset[str]) -> int:
        needed = max(manifest.layout.nbytes, MIN_SEGMENT_BYTES)
        spare = any(each.nbytes == needed and each.segment_id not in busy for each in self.owned.values())
        return 0 if spare else needed

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        needed = max(manifest.layout.nbytes, MIN_SEGMENT_BYTES)
        for segment in list(self.owned.values()):
            if segment.nbytes != needed:
                self.owned.pop(segment.segment_id).close()
        spare = [s for s in self.owned.values() if s.segment_id not in busy]
        segment = spare[0] if spare else _new_segment(needed)
        self.owned[segment.segment_id] = segment
        for unused in spare[1:]:
            self.owned.pop(unused.segment_id).close()
        return msgspec.msgpack.encode(segment.address)

    def retire(self, segments: frozenset[str]) -> None:
        for segment_id in segments & set(self.owned):
            self.owned.pop(segment_id).close()  # the memory goes with the last process that maps it

    @contextmanager
    def scratch(self, manifest: Manifest, needed: frozenset[str]) -> Iterator[tuple[bytes, SharedSegment]]:
        """Manager rank: memory for bytes that no worker takes. Yields its description, for `write`, and the segment.

        It is a segment of this rank that nobody needs; if there is none, a new one, which is freed in the end. `needed`: ids of
        the segments that somebody needs. Raises `TransportUnavailable` where the system has no memory."""
        nbytes = max(manifest.layout.nbytes, MIN_SEGMENT_BYTES)
        spare = [s for s in self.owned.values() if s.nbytes == nbytes and s.segment_id not in needed]
        segment = spare[0] if spare else _new_segment(nbytes)
        self.owned[segment.segment_id] = segment
        address = WrittenAddress(**msgspec.structs.asdict(segment.address), once=not spare)
        try:
            yield msgspec.msgpack.encode(address), segment
        finally:
            if not spare:
                self.owned.pop(segment.segment_id, None)
                with contextlib.suppress(OSError):  # memory that the process locked goes with its last view
                    segment.give_back(0, nbytes)  # an error may keep a view in the frames of its traceback
                segment.close()

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        with self._written(decode_as(delivery.description, WrittenAddress)) as segment:
            pieces, stats = _write(segment, delivery)
        stats.held_bytes = sum(owned.nbytes for owned in self.owned.values())
        return pieces, stats

    @contextmanager
    def _written(self, address: WrittenAddress) -> Iterator[SharedSegment]:
        """The segment, mapped for writing."""
        if not address.once or address.segment_id in self.owned:
            yield self.owned.get(address.segment_id) or self._mapped.at(address)
        else:
            with closing(SharedSegment.attach(address, writable=True)) as segment:
                segment.ask_for_large_pages()
                yield segment

    def kept(self, manifest: Manifest, description: bytes, targets: Sequence[Target]) -> Kept | None:
        owned = self.owned.get(decode_as(description, SegmentAddress).segment_id)
        if owned is None:
            return None
        memory = owned.tensor
        return lambda box: box_view(memory, manifest, box)

    def close(self) -> None:
        self._mapped.close()
        while self.owned:
            self.owned.popitem()[1].close()
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def _new_segment(nbytes: int) -> SharedSegment:
    check_fits(nbytes, "shm: a segment", NO_MEMORY_HINT)
    segment = SharedSegment.create(nbytes)
    segment.ask_for_large_pages()
    return segment


def _write(segment: SharedSegment, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
    manifest = delivery.manifest
    stats = WriteStats()

    def run_in(place: PiecePlace) -> tuple[Bytes, int] | None:
        region = place.region
        return (segment.tensor.numpy(), region.offset) if region is not None and region.sizes[0] == 1 else None

    with closing(WrittenPieces(stats)) as written:
        for item in delivery.slices:
            if segment.is_fresh:
                _back(segment, manifest, item.box)
            places = manifest.split(item.box, delivery.piece_bytes)
            if not written.copy_slice(manifest, item, places, run_in, lasts=delivery.slices_last):
                _place_pieces(written, segment.tensor, delivery, item, stats)
            del item  # before the next one is made
            delivery.check_deadline(stats.nbytes)
        pieces = written.end()
    segment.is_fresh = False
    return pieces, stats


def _back(segment: SharedSegment, manifest: Manifest, box: Box) -> None:
    """Has the pages of a slice exist, on the NUMA node of the rank that writes it. Raises `TransportUnavailable`."""
    view = box_view(segment.tensor, manifest, box)
    if not view.numel():
        return
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    try:
        segment.back(view.data_ptr() - segment.tensor.data_ptr(), span * view.itemsize)
    except OSError as error:
        raise TransportUnavailable(
            f"shm: the system has no memory for {manifest.describe(box)} in a segment of {segment.nbytes} bytes: {error}",
            hint=NO_MEMORY_HINT,
        ) from error


def _place_pieces(
    written: WrittenPieces, segment: torch.Tensor, delivery: Delivery, item: Slice, stats: WriteStats
) -> None:
    for place, data in pieces_of(delivery.manifest, item, delivery.piece_bytes):
        written.add(place.box, _place_and_digest(segment, delivery.manifest, place, data, stats))


def _place_and_digest(
    segment: torch.Tensor, manifest: Manifest, place: PiecePlace, data: Bytes, stats: WriteStats
) -> int:
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
    return digest


TRANSPORT = Transport(
    name="shm",
    summary="same host: shared memory that trainer ranks write and workers read in place; 2 copies per byte",
    preference=10,
    why_not=why_no_segments,
    sender=ShmSender,
    receiver=ShmReceiver,
    copies_per_byte=2,  # trainer -> segment -> parameter
)
