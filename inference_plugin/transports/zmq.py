"""Anywhere a socket goes: buckets of pieces as payload frames to each worker's REP socket (ipc or TCP).

1. a rank cuts its slices into pieces and sends to each worker those that it needs, many to a bucket;
2. two buffers per worker, or more: bucket k+1 is packed while k is in flight, and no buffer is filled again before its
   bucket was answered;
3. the worker compares each piece with its digest as it arrives and copies what it needs into its staging memory.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

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
from inference_plugin.wire.channel import Channel
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.manifest import Box, Cut, Manifest, Piece, intersect
from inference_plugin.wire.messages import Bucket, Done
from inference_plugin.wire.tensors import box_view, torch_dtype
from inference_plugin.wire.tracing import span_since

__all__ = ["TRANSPORT"]


class ZmqStaging(Staging):
    """Private memory laid out by the manifest; only pages of what the worker needs are ever touched.

    `release` takes the memory back when it is closed.
    """

    def __init__(
        self,
        manifest: Manifest,
        needs: Sequence[Box],
        memory: torch.Tensor,
        release: Callable[[torch.Tensor], None],
    ) -> None:
        self._manifest = manifest
        self._needs = {box.tensor: box for box in needs}
        self._memory: torch.Tensor | None = memory
        self._release = release
        self.segment = memory[: manifest.layout.nbytes]
        self.segment_id = secrets.token_hex(8)
        self.extra_bytes = sum(manifest.box_nbytes(box) for box in needs)
        self._received: dict[Box, int] = {}

    def receive(self, pieces: Sequence[Piece], payload: memoryview) -> None:
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
        wanted = self._needs.get(box.tensor)
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
        if memory is not None:
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
        nbytes = max(manifest.layout.nbytes, mmap.PAGESIZE)
        memory, self._spare = self._spare, None
        if memory is None or memory.numel() != nbytes:
            try:
                anonymous = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise TransportUnavailable(f"zmq: no memory to stage {nbytes} bytes: {error}") from error
            memory = torch.frombuffer(anonymous, dtype=torch.uint8)
        return self.staging(manifest, needs, memory, self._take_back)

    def drop_kept(self) -> None:
        self._spare = None

    def close(self) -> None:
        self._closed = True
        self._spare = None

    def _take_back(self, memory: torch.Tensor) -> None:
        if not self._closed:
            self._spare = memory


class ZmqSender(Sender):
    """Keeps one channel, and `config.buffers` buffers, per worker."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    def probe(self) -> bytes:
        return b""

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        return b""

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
        lanes = [self._lane(target) for target in targets]
        for gone in set(self._lanes) - {target.address for target in targets}:
            self._lanes.pop(gone).channel.close()
        for lane, target in zip(lanes, targets, strict=True):
            lane.begin(group, txn, rank, target, deadline_s)
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
        for _ in range(self.config.buffers - 1):
            for lane in lanes:
                with lane.failing():
                    lane.advance(wait=True)
        stats.move_s += time.perf_counter() - started_s
        stats.messages = sum(lane.messages for lane in lanes)
        stats.lost = {t.replica: lane.error for t, lane in zip(targets, lanes, strict=True) if lane.error is not None}
        return pieces, stats

    def close(self) -> None:
        while self._lanes:
            self._lanes.popitem()[1].channel.close()

    def _lane(self, target: Target) -> _Lane:
        lane = self._lanes.get(target.address)
        if lane is None:
            lane = self._lanes[target.address] = _Lane(target, self.config)
            self.config.warn_if_short_of_memory(self.config.buffers * len(self._lanes))
        return lane


class _Lane:
    """The way to one worker: a channel and buffers: one in flight at most, one being packed, the others packed before it."""

    def __init__(self, target: Target, config: Config) -> None:
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

    def begin(self, group: str, txn: str, rank: int, target: Target, deadline_s: float) -> None:
        self._group, self._txn, self._rank, self._deadline_s = group, txn, rank, deadline_s
        self._needs = {box.tensor: box for box in target.needs}
        self._pieces: list[Piece] = []
        self._used_bytes = 0
        self._seq = 0
        self._packed: collections.deque[tuple[Bucket, memoryview]] = collections.deque()
        self._in_flight: tuple[Bucket, memoryview] | None = None
        self._sent_s = 0.0
        self.messages = 0
        self.error: WeightwireError | None = None

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What fails on one lane is kept in `error`, and the lane carries nothing more; the others go on."""
        try:
            yield
        except WeightwireError as error:
            self.error = error

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
        bucket = Bucket(self._group, self._txn, self._rank, self._seq, tuple(self._pieces))
        self._packed.append((bucket, self._buffers[0][: self._used_bytes].data))
        self._seq += 1
        self._pieces = []
        self._used_bytes = 0
        self._buffers.rotate(-1)
        self.advance(wait=len(self._packed) + (self._in_flight is not None) == len(self._buffers))

    def advance(self, *, wait: bool = False) -> None:
        """Sends the next bucket if the one in flight was answered; that is waited for with `wait` only."""
        if self._in_flight is not None and (wait or self.channel.has_news()):
            (bucket, payload), self._in_flight = self._in_flight, None
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise SyncTimeout(f"bucket {bucket.seq} was not answered before the deadline", phase="stage")
            self.channel.receive(Done, timeout_s=left_s)
            span_since(self._sent_s, "bucket", f"buckets to {self._to}", seq=bucket.seq, bytes=len(payload))
        if self._packed and self._in_flight is None and self.error is None:
            self._in_flight = bucket, payload = self._packed.popleft()
            self.channel.send(bucket, payload=payload)
            self._sent_s = time.perf_counter()
            self.messages += 1


TRANSPORT = Transport(
    name="zmq",
    summary="anywhere a socket goes: buckets as ZMQ frames over ipc or TCP",
    preference=90,
    why_not=lambda: None,
    sender=ZmqSender,
    receiver=ZmqReceiver,
    copies_per_byte=5,  # trainer -> bucket -> kernel -> frame -> staging -> parameter
)
