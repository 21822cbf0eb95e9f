"""By NIXL, for RDMA: each worker reads buckets of pieces out of the trainer's memory.

1. a rank packs its pieces into buckets of registered memory, each piece once for all workers;
2. once a bucket is full, a message tells each worker where those of its pieces lie that it needs. The worker reads them into one
   of two buffers of its own, and answers;
3. it compares each piece with its digest and copies it into its staging memory, as over `zmq`, while it reads the next bucket;
4. a rank fills a bucket again once all workers that read it have answered or are lost. A lost one that reads on gets other bytes:
   it has no part in the update any more.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Annotated

import msgspec
import torch

from inference_plugin.transports.base import Delivery, Staging, Target, Transport, WriteStats
from inference_plugin.transports.bucket_staging import BucketReceiver, BucketStaging
from inference_plugin.transports.lanes import Buffer, Lane, WriteTerms
from inference_plugin.transports.nixl_agent import (
    DEVICES,
    Agent,
    Span,
    named_devices,
    why_no_nixl,
)
from inference_plugin.transports.nixl_reader import Reader
from inference_plugin.transports.pieces import Bytes
from inference_plugin.transports.spread import FanOut
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire.codec import MAX_PAYLOAD_BYTES, decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Bucket
from inference_plugin.wire.messages.common import MAX_PIECES
from inference_plugin.wire.tracing import carried

__all__ = ["TRANSPORT"]

PROBE_BYTES = 64
PROBE_S = 20.0
"""How long a worker tries to read the trainer's memory. On a busy machine making its agent alone takes seconds."""

Metadata = Annotated[bytes, msgspec.Meta(min_length=1, max_length=1 << 16)]
Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Place(msgspec.Struct, frozen=True):
    """Where the pieces of a message begin in a trainer rank's memory, and what NIXL must know to read there."""

    metadata: Metadata
    starts: Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_PIECES)]


class Probe(msgspec.Struct, frozen=True):
    """Bytes in the trainer's memory that a worker reads. `devices` is said in errors."""

    metadata: Metadata
    start: Address
    holds: Annotated[bytes, msgspec.Meta(min_length=PROBE_BYTES, max_length=PROBE_BYTES)]
    devices: Annotated[str, msgspec.Meta(max_length=8192)]


# --- the worker's side -----------------------------------------------------------------------------------------------------


class NixlStaging(BucketStaging):
    """Places one bucket in a thread of the receiver, while the next one is read."""

    def begin(self, reader: Reader, thread: ThreadPoolExecutor) -> None:
        self._reader, self._thread = reader, thread
        self._placing: Future[None] | None = None
        self._cancelled = threading.Event()

    def receive(self, bucket: Bucket, payload: memoryview) -> None:
        place, manifest = decode_as(bucket.lies_at, Place), self._manifest
        sizes = [manifest.box_nbytes(manifest.check_box(piece.box)) for piece in bucket.pieces]
        if len(place.starts) != len(sizes) or sum(sizes) > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"a bucket of {len(sizes)} pieces and {sum(sizes)} bytes, with {len(place.starts)} places"
            )
        spans = _joined(zip(place.starts, sizes, strict=True))
        data = self._reader.read(place.metadata, spans, self._cancelled)
        self._wait_for_placing()
        self._placing = self._thread.submit(carried(self.receive_pieces), bucket.pieces, data)

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        self._wait_for_placing()
        return super().check(manifest, pieces, between, threads)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self.cancel()
        if self._placing is not None:
            wait([self._placing])  # it copies into the memory that is given back
        super().close()

    def _wait_for_placing(self) -> None:
        placing, self._placing = self._placing, None
        if placing is not None:
            placing.result()


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in fewer spans, where one begins at the end of the one before."""
    joined: list[Span] = []
    for start, nbytes in spans:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        elif nbytes:
            joined.append((start, nbytes))
    return joined


class NixlReceiver(BucketReceiver):
    """Keeps its agent and its buffers for as long as updates come."""

    staging = NixlStaging

    def __init__(self) -> None:
        super().__init__()
        self._reader = Reader()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightwire-nixl")

    def check_probe(self, probe: bytes) -> None:
        offered = decode_as(probe, Probe)
        until_s = time.monotonic() + PROBE_S
        try:
            spans = [(offered.start, PROBE_BYTES)]
            read = self._reader.read(offered.metadata, spans, threading.Event(), until_s)
            what = "" if read == offered.holds else "other bytes came"
        except PeerLost as error:
            what = error.message
        except SyncTimeout:
            what = f"nothing came in {PROBE_S:g} s"
        if what:
            raise TransportUnavailable(
                f"this worker, on {named_devices()}, can't read the memory of the trainer, on {offered.devices}: {what}",
                hint=f"name devices of one network in {DEVICES}, on both sides; UCX says more on standard error",
            )

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        staging = self._opened(manifest, needs)
        assert isinstance(staging, NixlStaging)
        staging.begin(self._reader, self._thread)
        return staging

    def drop_kept(self) -> None:
        self._reader.close()
        super().drop_kept()

    def close(self) -> None:
        self._thread.shutdown()
        self._reader.close()
        super().close()


# --- the trainer's side ----------------------------------------------------------------------------------------------------


class Ring:
    """The buckets of one rank, in one memory that workers read, and an agent that lets them. The probe's bytes lie at its end."""

    def __init__(self, config: Config) -> None:
        self._bucket_bytes, self._buckets = config.bucket_bytes, config.buffers
        nbytes = self._bucket_bytes * self._buckets + PROBE_BYTES
        check_fits(nbytes, "nixl: buckets", "a smaller WEIGHTWIRE_BUCKET_BYTES takes less")
        self._agent = Agent()
        try:
            self.memory = self._agent.register(nbytes).memory
            self.metadata = self._agent.metadata()
        except BaseException:
            self._agent.close()
            raise
        self.nbytes = nbytes
        holds = secrets.token_bytes(PROBE_BYTES)
        self.memory[-PROBE_BYTES:] = torch.frombuffer(bytearray(holds), dtype=torch.uint8)
        start = self.memory.data_ptr() + nbytes - PROBE_BYTES
        self.probe = msgspec.msgpack.encode(Probe(self.metadata, start, holds, named_devices()))
        self.number = 0
        """Of the bucket that is being packed, since the ring was made."""
        self._used_bytes = 0
        self.start = 0
        """Address of what was added last."""

    def has_room(self, nbytes: int) -> bool:
        return self._used_bytes + nbytes <= self._bucket_bytes

    def add(self, data: Bytes) -> None:
        """Copies `data` into the bucket, to `start`."""
        at = self.number % self._buckets * self._bucket_bytes + self._used_bytes
        self.memory[at : at + data.nbytes].numpy()[:] = data
        self._used_bytes += data.nbytes
        self.start = self.memory.data_ptr() + at

    def turn(self) -> int:
        """Turns to the next bucket. Returns the number of the one that was packed there before: nobody may read it any more."""
        self.number += 1
        self._used_bytes = 0
        return self.number - self._buckets

    def close(self) -> None:
        self._agent.close()


class NixlLane(Lane):
    """Tells one worker where its pieces lie; they are packed once for all lanes."""

    def __init__(self, target: Target, config: Config, ring: Ring) -> None:
        super().__init__(target, config)
        self._ring = ring

    def _make_buffers(self, config: Config) -> list[Buffer]:
        return []

    def begin(self, terms: WriteTerms, target: Target, below: tuple[Target, ...], siblings: Sequence[Lane]) -> None:
        super().begin(terms, target, below, siblings)
        self._starts: list[int] = []
        self._numbers: list[int] = []
        """Of the ring's buckets that the worker was told of or will be."""

    def add(self, piece: Piece, data: Bytes) -> None:
        if self.needs(piece):
            self._pieces.append(piece)
            self._starts.append(self._ring.start)
            self._used_bytes += data.nbytes

    def flush(self) -> None:
        if not self._pieces or self.error is not None:
            return
        terms, place = self._terms, Place(self._ring.metadata, tuple(self._starts))
        bucket = Bucket(
            terms.group, terms.txn, terms.rank, self._seq, tuple(self._pieces), msgspec.msgpack.encode(place)
        )
        self._packed.append((bucket, None))
        self._numbers.append(self._ring.number)
        self.sent_bytes += self._used_bytes
        self._seq += 1
        self._pieces, self._starts = [], []
        self._used_bytes = 0
        self.advance()

    def wait_until_read(self, number: int) -> None:
        """Waits until the worker has read all buckets up to that of `number`."""
        while self.busy and self._numbers[-self.unanswered] <= number:
            self.advance(wait=True)


class NixlSender(ZmqSender):
    """Keeps one ring, however many workers there are, and a channel to each."""

    _ring: Ring | None = None

    @property
    def ring(self) -> Ring:
        self._ring = self._ring or Ring(self.config)
        return self._ring

    def probe(self) -> bytes:
        return self.ring.probe

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        """Every worker reads for itself."""

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        self.ring.turn()  # whoever still reads the bucket of an update that was given up has no part in this one
        pieces, stats = super().write(delivery)
        stats.held_bytes = self.ring.nbytes
        return pieces, stats

    def close(self) -> None:
        super().close()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _sent_as(self, manifest: Manifest, piece: Piece, part: Bytes) -> Callable[[Lane], Bytes]:
        if any(lane.needs(piece) for lane in self._used):
            if not self.ring.has_room(part.nbytes):
                self._turn()
            self.ring.add(part)
        return super()._sent_as(manifest, piece, part)

    def _turn(self) -> None:
        for lane in self._used:
            with lane.failing():
                lane.flush()
        number = self.ring.turn()
        for lane in self._used:
            assert isinstance(lane, NixlLane)
            with lane.failing():
                lane.wait_until_read(number)

    def _make_lane(self, target: Target) -> Lane:
        return NixlLane(target, self.config, self.ring)


TRANSPORT = Transport(
    name="nixl",
    summary="workers read the trainer's memory, by RDMA or UCX over TCP",
    preference=93,
    why_not=why_no_nixl,
    sender=NixlSender,
    receiver=NixlReceiver,
    copies_per_byte=4,  # trainer -> bucket -> buffer -> staging -> parameter; over TCP two more, in the kernel
    sends=True,
    named_only=True,
)
