"""Anywhere a socket goes: buckets of pieces as payload frames to each worker's socket (ipc or TCP).

1. a rank cuts its slices into pieces and sends to each worker those that it needs, many to a bucket;
2. two buffers per worker, or more: bucket k+1 is packed while k is in flight, and no buffer is filled again before its
   bucket was answered;
3. the worker compares each piece with its digest as it arrives and copies what it needs into its staging memory;
4. where there are many replicas, a rank sends to a few workers of each class, and these pass the buckets on (`relay`).
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
import torch

from inference_plugin.transports.base import (
    Bytes,
    Receiver,
    Sender,
    Slice,
    Staging,
    Target,
    Transport,
    WriteStats,
    pieces_of,
    place_piece,
    typed,
)
from inference_plugin.transports.relay import PassingOn
from inference_plugin.transports.spread import FanOut, branches, classes_of, degree_of
from inference_plugin.wire.channel import Channel
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.manifest import Box, Cut, Manifest, Piece, intersect
from inference_plugin.wire.messages import Bucket, Done, Hop, Relay, Relaying
from inference_plugin.wire.tensors import box_view, torch_dtype
from inference_plugin.wire.tracing import span_since

__all__ = ["TRANSPORT"]

CANCEL_S = 0.1
"""How soon a worker that waits for bytes hears that its transaction was dropped."""


class Passing(msgspec.Struct, frozen=True):
    """The description of an update in which workers pass buckets on; without one nobody does."""

    degree: Annotated[int, msgspec.Meta(ge=1, lt=65)]
    silence_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]


class ZmqStaging(Staging):
    """Private memory laid out by the manifest; only pages of what the worker needs are ever touched.

    Where workers pass buckets on, every piece that arrives is kept whole: another may need the rest of it. `release` takes
    the memory back when it is closed, and nobody is fed from it any more.
    """

    def __init__(
        self,
        manifest: Manifest,
        needs: Sequence[Box],
        memory: torch.Tensor,
        release: Callable[[torch.Tensor], None],
        *,
        passing: Passing | None = None,
    ) -> None:
        self._manifest = manifest
        self._needs = {box.tensor: box for box in needs}
        self._memory: torch.Tensor | None = memory
        self._release = release
        self.segment = memory[: manifest.layout.nbytes]
        self.segment_id = secrets.token_hex(8)
        self.extra_bytes = sum(manifest.box_nbytes(box) for box in needs)
        self._received: dict[Box, int] = {}
        self.takes_late = passing is not None
        self._passing = PassingOn(manifest, memory, passing.silence_s) if passing is not None else None
        self._arrived = threading.Condition()
        self._complete = False
        self._refused: WeightwireError | None = None

    def receive(self, pieces: Sequence[Piece], payload: memoryview) -> None:
        with self._arrived:
            try:
                if self._complete:
                    raise ProtocolError("a new bucket after the last one that was sealed")
                self._receive(pieces, payload)
                self._refused = None
            except WeightwireError as error:
                self._refused = error
                raise
            finally:
                self._arrived.notify_all()

    def _receive(self, pieces: Sequence[Piece], payload: memoryview) -> None:
        manifest = self._manifest
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + manifest.box_nbytes(manifest.check_box(piece.box)))
        if starts[-1] != len(payload):
            named = ", ".join(manifest.describe(piece.box) for piece in pieces[:8])
            raise ProtocolError(f"a bucket of {len(payload)} bytes whose pieces take {starts[-1]}: {named}")
        data = np.frombuffer(payload, dtype=np.uint8)
        for piece, start, end in zip(pieces, starts, starts[1:], strict=False):
            if digest_bytes(payload[start:end]) != piece.digest:
                raise DigestMismatch(f"{manifest.describe(piece.box)} is not what the trainer sent")
            if self._place(piece.box, data[start:end]):
                self._received[piece.box] = piece.digest

    def _place(self, box: Box, data: Bytes) -> bool:
        """Copies what the worker needs of a piece to its place; false if that is nothing."""
        wanted = box if self._passing is not None else self._needs.get(box.tensor)
        if wanted is None or (part := intersect(box, wanted)) is None:
            return False
        if part == box:
            cut = Cut(box, 0, data.nbytes, self._manifest.rows(box))
            place_piece(self.segment, self._manifest, cut, data)
            return True
        source = typed(data, torch_dtype(self._manifest.tensors[box.tensor].dtype)).view(box.sizes)
        for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            source = source.narrow(dim, offset - box.offsets[dim], size)
        box_view(self.segment, self._manifest, part).copy_(source)
        return True

    def pass_on(self, bucket: Bucket, payload: memoryview) -> None:
        if self._passing is not None:
            self._passing.add(bucket, payload)

    def relay(self, request: Relay) -> None:
        if self._passing is None:
            super().relay(request)
        else:
            self._passing.feed(request)

    def wait_for(self, pieces: Sequence[Piece], cancelled: threading.Event) -> None:
        """Where workers pass buckets on. Raises `PeerLost` once nobody does any more, and what the last bucket was refused
        for: who sent it has given up."""
        if self._passing is None:
            return
        missing = {piece.box for piece in pieces}
        self._passing.heard()
        with self._arrived:
            while missing := missing - self._received.keys():
                if self._refused is not None:
                    raise self._refused
                if cancelled.is_set():
                    raise VersionConflict("the transaction was dropped")
                self._passing.check_heard(f"{len(missing)} of {len(pieces)} pieces are missing")
                self._arrived.wait(CANCEL_S)
            self._complete = True
            self.extra_bytes = sum(self._manifest.box_nbytes(box) for box in self._received)

    def settle(self) -> None:
        if self._passing is not None:
            self._passing.settle()

    def check(
        self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[int], None], threads: int = 1
    ) -> int:
        """Every needed piece arrived and was compared on arrival; the bytes are this process's own since then."""
        checked = 0
        pieces = list(pieces)
        if extra := self._received.keys() - {piece.box for piece in pieces}:
            named = first_few([manifest.describe(box) for box in sorted(extra)])
            raise DigestMismatch(f"arrived and was not sealed: {named}")
        for piece in pieces:
            if (digest := self._received.get(piece.box)) is None:
                raise DigestMismatch(f"{manifest.describe(piece.box)} did not arrive")
            if digest != piece.digest:
                raise DigestMismatch(f"{manifest.describe(piece.box)} is not what the trainer sealed")
            checked += manifest.box_nbytes(piece.box)
            between(0)
        return checked

    def close(self) -> None:
        self.segment = torch.empty(0, dtype=torch.uint8)
        self._received.clear()
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if self._passing is not None:
            self._passing.settle(lambda: self._release(memory))
        else:
            self._release(memory)


class ZmqReceiver(Receiver):
    """Keeps the memory of the last transaction for the next one: fresh pages cost more than the copy into them."""

    staging = ZmqStaging

    def __init__(self) -> None:
        self._spare: torch.Tensor | None = None
        self._closed = False

    def check_probe(self, probe: bytes) -> None:
        """The probe arrived: that is all there is to test."""

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        passing = decode_as(description, Passing) if description else None
        nbytes = max(manifest.layout.nbytes, mmap.PAGESIZE)
        memory, self._spare = self._spare, None
        if memory is None or memory.numel() != nbytes:
            try:
                anonymous = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise TransportUnavailable(f"zmq: no memory to stage {nbytes} bytes: {error}") from error
            memory = torch.frombuffer(anonymous, dtype=torch.uint8)
        return self.staging(manifest, needs, memory, self._take_back, passing=passing)

    def drop_kept(self) -> None:
        self._spare = None

    def close(self) -> None:
        self._closed = True
        self._spare = None

    def _take_back(self, memory: torch.Tensor) -> None:
        if not self._closed:
            self._spare = memory


class ZmqSender(Sender):
    """Keeps one channel, and `config.buffers` buffers, per worker that it sends to."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._used: list[_Lane] = []
        self._degree = 0

    def probe(self) -> bytes:
        return b""

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        largest = max((len(members) for members in classes_of((t.needs, t) for t in targets)), default=0)
        self._degree = degree_of(fan_out, largest)

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        self._used = []
        return msgspec.msgpack.encode(Passing(self._degree, self.config.silence_s)) if self._degree else b""

    def write(
        self,
        txn: str,
        group: str,
        rank: int,
        manifest: Manifest,
        description: bytes,
        slices: Iterator[Slice],
        targets: Sequence[Target],
        *,
        deadline_s: float,
    ) -> tuple[list[Piece], WriteStats]:
        degree = decode_as(description, Passing).degree if description else 0
        lanes = self._used = self._spread(Course(group, txn, rank, degree, deadline_s), targets)
        pieces: list[Piece] = []
        stats = WriteStats()
        for item in slices:
            for cut, part in pieces_of(manifest, item):
                started_s = time.perf_counter()
                piece = Piece(cut.box, digest_bytes(part))
                digested_s = time.perf_counter()
                pieces.append(piece)
                for lane in lanes:
                    with lane.failing():
                        lane.add(piece, part)
                stats.nbytes += part.nbytes
                stats.digest_s += digested_s - started_s
                stats.move_s += time.perf_counter() - digested_s
        started_s = time.perf_counter()
        for lane in lanes:
            with lane.failing():
                lane.flush()
        while any(lane.busy for lane in lanes):
            for lane in lanes:
                with lane.failing():
                    lane.advance(wait=True)
        stats.move_s += time.perf_counter() - started_s
        stats.messages = sum(lane.messages for lane in lanes)
        stats.sent_bytes = sum(lane.sent_bytes for lane in lanes)
        for lane in lanes:
            stats.lost |= lane.lost()
        return pieces, stats

    def without(self, replica: str) -> None:
        for lane in self._used:
            if lane.target.replica == replica and lane.error is None:
                lane.fail(PeerLost("it dropped out of the update", replica=replica, rank=lane.target.rank))

    def close(self) -> None:
        while self._lanes:
            self._lanes.popitem()[1].channel.close()

    def _spread(self, course: Course, targets: Sequence[Target]) -> list[_Lane]:
        """Lanes to those that this rank sends to itself; each is told whom it is to pass on to."""
        chosen = [branches(members, course.degree) for members in classes_of((t.needs, t) for t in targets)]
        for gone in set(self._lanes) - {target.address for together in chosen for target, _ in together}:
            self._lanes.pop(gone).channel.close()
        lanes = []
        for together in chosen:
            siblings = [self._lane(target) for target, _ in together]
            for lane, (target, below) in zip(siblings, together, strict=True):
                lane.begin(course, target, below, siblings)
            for lane in siblings:
                with lane.failing():
                    lane.feed(lane.below)
            lanes += siblings
        return lanes

    def _lane(self, target: Target) -> _Lane:
        lane = self._lanes.get(target.address)
        if lane is None:
            lane = self._lanes[target.address] = _Lane(target, self.config)
            self.config.warn_if_short_of_memory(self.config.buffers * len(self._lanes))
        return lane


@dataclass(frozen=True)
class Course:
    """One rank's writing. `deadline_s` is on `time.monotonic()`'s clock."""

    group: str
    txn: str
    rank: int
    degree: int
    deadline_s: float


class _Lane:
    """The way to one worker: a channel and buffers: one in flight at most, one being packed, the others packed before it.

    `below` are those to whom the worker passes on. When it is lost another lane of its class takes them over.
    """

    def __init__(self, target: Target, config: Config) -> None:
        self.target = target
        self._silence_s = config.silence_s
        self.channel = Channel(
            target.address,
            pid=target.pid,
            peer_boot_id=target.boot_id,
            side="trainer",
            replica=target.replica,
            rank=target.rank,
            phase="stage",
            silence_s=config.silence_s,
        )
        self._to = f"{target.replica} rank {target.rank}"
        self._bucket_bytes = config.bucket_bytes
        self._buffers = collections.deque(np.empty(config.bucket_bytes, dtype=np.uint8) for _ in range(config.buffers))

    def begin(self, course: Course, target: Target, below: tuple[Target, ...], siblings: Sequence[_Lane]) -> None:
        self._course, self.target, self.below, self._siblings = course, target, below, siblings
        self._stranded: tuple[Target, ...] = ()
        self._needs = {box.tensor: box for box in target.needs}
        self._pieces: list[Piece] = []
        self._used_bytes = 0
        self._seq = 0
        self._packed: collections.deque[tuple[Bucket, memoryview]] = collections.deque()
        self._in_flight: tuple[Bucket | Relay, int] | None = None
        self._sent_s = 0.0
        self.messages = 0
        self.sent_bytes = 0
        self.error: WeightwireError | None = None

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What fails on one lane is kept in `error`, and the lane carries nothing more; the others go on."""
        try:
            yield
        except WeightwireError as error:
            self.fail(error)

    def fail(self, error: WeightwireError) -> None:
        """Carries nothing more. Those below go to another lane of the class; where there is none they are stranded."""
        self.error = error
        below, self.below = self.below, ()
        for lane in self._siblings:
            if below and lane.error is None:
                with lane.failing():
                    lane.feed(below)
                    lane.drain()
                    lane.below += below
                    below = ()
        self._stranded = below

    def lost(self) -> dict[str, WeightwireError]:
        """The replicas that can't be reached by this lane, with the reason."""
        if self.error is None:
            return {}
        reason = f"{self.target.replica}, which was to pass the update on to it, is lost: {self.error.message}"
        cut_off = {t.replica: PeerLost(reason, replica=t.replica, rank=t.rank, phase="stage") for t in self._stranded}
        return {**cut_off, self.target.replica: self.error}

    def feed(self, below: Sequence[Target]) -> None:
        """Has the worker pass on to these too all that it got and will get."""
        if below:
            self.drain()
            hops = tuple(Hop(t.replica, t.rank, t.address, t.pid, t.boot_id) for t in below)
            self._send(Relay(self._course.group, self._course.txn, hops, self._course.degree))

    def drain(self) -> None:
        """Until all that is packed was sent and answered."""
        while self.busy:
            self.advance(wait=True)

    def add(self, piece: Piece, data: Bytes) -> None:
        """Packs a piece if the worker needs any of it; sends the bucket when it is full."""
        wanted = self._needs.get(piece.box.tensor)
        if self.error is not None or wanted is None or intersect(piece.box, wanted) is None:
            return
        if self._packed:
            self.advance()
        if self._used_bytes + data.nbytes > self._bucket_bytes:
            self.flush()
        self._buffers[0][self._used_bytes : self._used_bytes + data.nbytes] = data
        self._used_bytes += data.nbytes
        self._pieces.append(piece)

    def flush(self) -> None:
        """Hands the bucket on to be sent, and turns to the next buffer, once there is one that is free."""
        if not self._pieces or self.error is not None:
            return
        course = self._course
        bucket = Bucket(course.group, course.txn, course.rank, self._seq, tuple(self._pieces))
        self._packed.append((bucket, self._buffers[0][: self._used_bytes].data))
        self._seq += 1
        self._pieces = []
        self._used_bytes = 0
        self._buffers.rotate(-1)
        self.advance(wait=len(self._packed) + (self._in_flight is not None) == len(self._buffers))

    def advance(self, *, wait: bool = False) -> None:
        """Sends the next bucket if what is in flight was answered; that is waited for with `wait` only."""
        if self._in_flight is not None and (wait or self.channel.has_news()):
            (sent, nbytes), self._in_flight = self._in_flight, None
            self.channel.receive(Done if isinstance(sent, Bucket) else Relaying, timeout_s=self._left_s())
            if isinstance(sent, Bucket):
                span_since(self._sent_s, "bucket", f"buckets to {self._to}", seq=sent.seq, bytes=nbytes)
        if self._packed and self._in_flight is None and self.error is None:
            self._send(*self._packed.popleft())

    @property
    def busy(self) -> bool:
        """Whether there is something to send, or an answer to come."""
        return self.error is None and bool(self._packed or self._in_flight)

    def _send(self, request: Bucket | Relay, payload: memoryview | None = None) -> None:
        nbytes = len(payload) if payload is not None else 0
        self.channel.send(request, payload=payload)
        self._in_flight = request, nbytes
        self._sent_s = time.perf_counter()
        self.messages += 1
        self.sent_bytes += nbytes

    def _left_s(self) -> float:
        """How long to wait for an answer. Where others can take a silent worker's place, not until the deadline."""
        left_s = self._course.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SyncTimeout(f"bucket {self._seq} was not answered before the deadline", phase="stage")
        return min(left_s, self._silence_s) if self._course.degree else left_s


TRANSPORT = Transport(
    name="zmq",
    summary="anywhere a socket goes: buckets as ZMQ frames over ipc or TCP",
    preference=90,
    why_not=lambda: None,
    sender=ZmqSender,
    receiver=ZmqReceiver,
    copies_per_byte=5,  # trainer -> bucket -> kernel -> frame -> staging -> parameter
    sends=True,
)
