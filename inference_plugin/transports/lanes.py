"""The way from one trainer rank to one worker: buckets are packed, sent and answered, one in flight at a time."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from inference_plugin.net.channel import bytes_channel
from inference_plugin.transports.base import Target
from inference_plugin.transports.pieces import Bytes
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.geometry import Piece, intersect
from inference_plugin.wire.messages import Bucket, Done, Hop, Relay, Relaying
from inference_plugin.wire.tracing import span_since

__all__ = ["Buffer", "Lane", "WriteTerms"]


@dataclass(frozen=True)
class WriteTerms:
    """The terms that all lanes of one rank's `write` share. `deadline_s` is a time of `time.monotonic()`; `silence_s`: how long a
    worker may take to answer."""

    group: str
    txn: str
    rank: int
    degree: int
    deadline_s: float
    silence_s: float


class Buffer(NamedTuple):
    """A buffer for one bucket. `offset`: where it begins in memory that holds several."""

    memory: Bytes
    offset: int = 0


class Lane:
    """A channel to one worker, and its buffers: at most one is in flight, one is being packed, the others wait to be sent.

    `below`: the workers that this one feeds. If it is lost, another lane of its class takes them over.
    """

    def __init__(self, target: Target, config: Config) -> None:
        self.target = target
        self.channel = bytes_channel(target, "trainer", config.silence_s)
        self._to = f"{target.replica} rank {target.rank}"
        self._bucket_bytes = config.bucket_bytes
        self.buffers = collections.deque(self._make_buffers(config))

    def _make_buffers(self, config: Config) -> list[Buffer]:
        return [Buffer(np.empty(config.bucket_bytes, dtype=np.uint8)) for _ in range(config.buffers)]

    @property
    def held_bytes(self) -> int:
        """Memory of its buffers."""
        return len(self.buffers) * self._bucket_bytes

    def close(self) -> None:
        """Frees everything."""
        self.channel.close()

    def begin(self, terms: WriteTerms, target: Target, below: tuple[Target, ...], siblings: Sequence[Lane]) -> None:
        self._terms, self.target, self.below, self._siblings = terms, target, below, siblings
        self._stranded: tuple[Target, ...] = ()
        self._needs = {box.tensor: box for box in target.needs}
        self._pieces: list[Piece] = []
        self._sizes: list[int] = []
        self._used_bytes = 0
        self._seq = 0
        self._packed: collections.deque[tuple[Bucket, memoryview | None]] = collections.deque()
        self._in_flight: tuple[Bucket | Relay, int] | None = None
        self._sent_s = 0.0
        self.messages = 0
        self.sent_bytes = 0
        self.error: WeightwireError | None = None

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Keeps a failure in `error`: this lane sends nothing more, the others continue."""
        try:
            yield
        except WeightwireError as error:
            self.fail(error)

    def fail(self, error: WeightwireError) -> None:
        """Stops this lane. Another lane of the class takes over the workers below; without one they are stranded."""
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
        """The replicas that can't be reached through this lane, with the reason."""
        if self.error is None:
            return {}
        reason = f"{self.target.replica}, which was to feed it, is lost: {self.error.message}"
        cut_off = {t.replica: PeerLost(reason, replica=t.replica, rank=t.rank, phase="stage") for t in self._stranded}
        return {**cut_off, self.target.replica: self.error}

    def feed(self, below: Sequence[Target]) -> None:
        """Has the worker feed these too: every bucket that it received and will receive."""
        if below:
            self.drain()
            hops = tuple(Hop(t.replica, t.rank, t.address, t.pid, t.boot_id, t.start_ticks) for t in below)
            self._send(Relay(self._terms.group, self._terms.txn, hops, self._terms.degree))

    def drain(self) -> None:
        """Sends all packed buckets and waits for their answers."""
        while self.busy:
            self.advance(wait=True)

    def needs(self, piece: Piece) -> bool:
        """Whether the worker needs any of it, and is not lost."""
        wanted = self._needs.get(piece.box.tensor)
        return self.error is None and wanted is not None and intersect(piece.box, wanted) is not None

    def add(self, piece: Piece, data: Bytes) -> None:
        """Packs a piece, as `data`, if the worker needs any of it; sends the bucket once it is full."""
        if not self.needs(piece):
            return
        if self._packed:
            self.advance()
        if self._used_bytes + data.nbytes > self._bucket_bytes:
            self.flush()
        self.buffers[0].memory[self._used_bytes : self._used_bytes + data.nbytes] = data
        self._used_bytes += data.nbytes
        self._pieces.append(piece)
        self._sizes.append(data.nbytes)

    def flush(self) -> None:
        """Queues the bucket for sending, and turns to the next buffer once one is free."""
        if not self._pieces or self.error is not None:
            return
        terms = self._terms
        bucket = Bucket(terms.group, terms.txn, terms.rank, self._seq, tuple(self._pieces))
        self._packed.append(self._message(bucket, self.buffers[0], self._used_bytes))
        self._seq += 1
        self._pieces, self._sizes = [], []
        self._used_bytes = 0
        self.buffers.rotate(-1)
        self.advance(wait=self.unanswered == len(self.buffers))

    def _message(self, bucket: Bucket, buffer: Buffer, nbytes: int) -> tuple[Bucket, memoryview | None]:
        """The bucket as it is sent, with its payload frame."""
        return bucket, buffer.memory[:nbytes].data

    def advance(self, *, wait: bool = False) -> None:
        """Sends the next bucket if the one in flight was answered; with `wait`, waits for that answer."""
        if self._in_flight is not None and (wait or self.channel.has_news()):
            (sent, nbytes), self._in_flight = self._in_flight, None
            self.channel.receive(Done if isinstance(sent, Bucket) else Relaying, timeout_s=self._left_s())
            if isinstance(sent, Bucket):
                span_since(self._sent_s, "bucket", f"buckets to {self._to}", seq=sent.seq, bytes=nbytes)
        if self._packed and self._in_flight is None and self.error is None:
            self._send(*self._packed.popleft())

    @property
    def unanswered(self) -> int:
        """Number of buckets that wait to be sent or answered."""
        return len(self._packed) + (self._in_flight is not None)

    @property
    def busy(self) -> bool:
        """Whether anything waits to be sent or answered."""
        return self.error is None and self.unanswered > 0

    def _send(self, request: Bucket | Relay, payload: memoryview | None = None) -> None:
        nbytes = len(payload) if payload is not None else 0
        self.channel.send(request, payload=payload)
        self._in_flight = request, nbytes
        self._sent_s = time.perf_counter()
        self.messages += 1
        self.sent_bytes += nbytes

    def _left_s(self) -> float:
        """How long to wait for an answer. Not until the deadline: the other workers wait meanwhile. Less where another
        worker can take a silent one's place."""
        left_s = self._terms.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SyncTimeout(f"bucket {self._seq} was not answered before the deadline", phase="stage")
        return min(left_s, self._terms.silence_s)
