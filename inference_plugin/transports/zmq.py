"""Anywhere a socket goes: buckets of pieces as payload frames to each worker's socket (ipc or TCP).

1. a rank cuts its slices into pieces and sends each worker the pieces that it needs, many to a bucket;
2. a worker's lane has two buffers or more: bucket k+1 is packed while k is in flight, and a buffer is filled again only
   after its bucket was answered;
3. the worker compares each piece with its digest on arrival and copies what it needs into its staging memory;
4. with many replicas, a rank sends to a few workers of each class, and these relay the buckets (`relay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from inference_plugin.transports.base import Delivery, Sender, Target, Transport, WriteStats, digested_pieces
from inference_plugin.transports.bucket_staging import BucketReceiver
from inference_plugin.transports.lanes import Lane, WriteTerms
from inference_plugin.transports.pieces import Bytes
from inference_plugin.transports.relay import RelayTerms
from inference_plugin.transports.spread import FanOut, branches, classes_of, degree_of
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import PeerLost
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest

__all__ = ["TRANSPORT", "ZmqSender"]


ANSWER_SHARE = 0.25
"""Share of the time for writing that one silent worker may take at most."""


class ZmqSender(Sender):
    """Keeps one channel, and `config.buffers` buffers, per worker that it sends to."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self._used: list[Lane] = []
        self._degree = 0

    def probe(self) -> bytes:
        return b""

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        largest = max((len(members) for members in classes_of((t.needs, t) for t in targets)), default=0)
        self._degree = degree_of(fan_out, largest)

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        self._used = []
        return msgspec.msgpack.encode(RelayTerms(self._degree, self.config.silence_s)) if self._degree else b""

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        description, deadline_s = delivery.description, delivery.deadline_s
        degree = decode_as(description, RelayTerms).degree if description else 0
        config = self.config
        # Less where another worker can take a silent one's place; and never so long that no time is left for the others.
        patience_s = config.silence_s if degree else config.control_timeout_s
        silence_s = min(patience_s, ANSWER_SHARE * max(0.0, deadline_s - time.monotonic()))
        terms = WriteTerms(delivery.group, delivery.txn, delivery.rank, degree, deadline_s, silence_s)
        lanes = self._used = self._spread(terms, delivery.targets)
        pieces: list[Piece] = []
        stats = WriteStats()
        for piece, part in digested_pieces(delivery, stats):
            pieces.append(piece)
            sent_as = self._sent_as(delivery.manifest, piece, part)
            for lane in lanes:
                with lane.failing():
                    lane.add(piece, sent_as(lane))
            del part, sent_as  # before the next one is made
        started_s = time.perf_counter()
        for lane in lanes:
            with lane.failing():
                lane.flush()
        self._finish(stats, started_s)
        stats.sent_bytes = sum(lane.sent_bytes for lane in lanes)
        stats.held_bytes = self._held_bytes()
        return pieces, stats

    def without(self, replica: str) -> None:
        for lane in self._used:
            if lane.target.replica == replica and lane.error is None:
                lane.fail(PeerLost("it dropped out of the update", replica=replica, rank=lane.target.rank))

    def close(self) -> None:
        while self.lanes:
            self.lanes.popitem()[1].close()

    def _finish(self, stats: WriteStats, started_s: float) -> None:
        """Waits until the workers have answered, and notes which were lost. `started_s`: since when this counts as moving."""
        while any(lane.busy for lane in self._used):
            for lane in self._used:
                with lane.failing():
                    lane.advance(wait=True)
        stats.move_s += time.perf_counter() - started_s
        stats.messages = sum(lane.messages for lane in self._used)
        for lane in self._used:
            stats.lost |= lane.lost()

    def _spread(self, terms: WriteTerms, targets: Sequence[Target]) -> list[Lane]:
        """Lanes to the workers that this rank sends to itself; each worker is told which ones it feeds."""
        chosen = [branches(members, terms.degree) for members in classes_of((t.needs, t) for t in targets)]
        for gone in set(self.lanes) - {target.address for together in chosen for target, _ in together}:
            self.lanes.pop(gone).close()
        lanes = []
        for together in chosen:
            siblings = [self._lane(target) for target, _ in together]
            for lane, (target, below) in zip(siblings, together, strict=True):
                lane.begin(terms, target, below, siblings)
            for lane in siblings:
                with lane.failing():
                    lane.feed(lane.below)
            lanes += siblings
        return lanes

    def _sent_as(self, manifest: Manifest, piece: Piece, part: Bytes) -> Callable[[Lane], Bytes]:
        """What each lane sends of a piece whose bytes are `part`."""
        return lambda lane: part

    def _held_bytes(self) -> int:
        return sum(lane.held_bytes for lane in self.lanes.values())

    def _make_lane(self, target: Target) -> Lane:
        return Lane(target, self.config)

    def _lane(self, target: Target) -> Lane:
        lane = self.lanes.get(target.address)
        if lane is None:
            lane = self.lanes[target.address] = self._make_lane(target)
            self.config.warn_if_short_of_memory(self._held_bytes())
        return lane


TRANSPORT = Transport(
    name="zmq",
    summary="anywhere a socket goes: buckets as ZMQ frames over ipc or TCP",
    preference=90,
    why_not=lambda: None,
    sender=ZmqSender,
    receiver=BucketReceiver,
    copies_per_byte=5,  # trainer -> bucket -> kernel -> frame -> staging -> parameter
    sends=True,
)
