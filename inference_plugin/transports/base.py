"""The contract of a transport: a sending half on every trainer rank, a receiving half on every worker.

One update, numbered as the methods are called:

1. manager rank: `Sender.probe()`; each worker: `Receiver.check_probe()`; a refusal makes `auto` try the next transport.
2. manager rank: `Sender.meet()` hears who takes part, `Sender.allocate()` describes where the bytes will be; the
   description travels in `Begin`.
3. each worker: `Receiver.open()` gives the staging memory, laid out by the manifest.
4. every trainer rank: `Sender.write()` brings its slices across and returns the pieces with their digests.
   Where bytes travel in messages, each worker's `Staging.receive()` takes them.
5. each worker: `Staging.check()` compares every piece it needs with its digest.
6. after the commit the staging is kept as the way back, or closed.
"""

from __future__ import annotations

import abc
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch

from inference_plugin.transports.pieces import (
    Bytes,
    DigestPass,
    DigestPasses,
    Lying,
    in_segment,
    pieces_of,
    place_piece,
)
from inference_plugin.transports.spread import FanOut
from inference_plugin.wire.config import PIECE_BYTES, Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
)
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, Slice
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Bucket, Relay, Target
from inference_plugin.wire.tracing import carried, span
from inference_plugin.wire.zone import ZoneLayout

__all__ = [
    "Delivery", "Kept", "Put", "Receiver", "Sender", "Slice", "Staging", "Target", "Transport", "WriteStats",
    "digested_pieces", "pieces_of", "place_piece",
]  # fmt: skip


@dataclass(frozen=True)
class Delivery:
    """What one trainer rank brings across in one transaction. `rank`: its number among the trainer's; `description`: what the
    manager rank's `Sender.allocate` returned; `deadline_s`: a time of `time.monotonic()`; `slices_last`: whether each slice's
    memory holds its values until `write` returns, and not only until the next slice is taken; `piece_bytes`: the largest
    piece, the same over all transports of one update, because all its workers get one list of pieces."""

    txn: str
    group: str
    rank: int
    manifest: Manifest
    description: bytes
    slices: Iterator[Slice]
    targets: Sequence[Target]
    deadline_s: float
    slices_last: bool = False
    piece_bytes: int = PIECE_BYTES

    def check_deadline(self, written_bytes: int) -> None:
        """Between two slices. Raises `SyncTimeout` once the deadline has passed."""
        if time.monotonic() > self.deadline_s:
            raise SyncTimeout(
                f"rank {self.rank} wrote {written_bytes} of {self.manifest.nbytes} bytes before the deadline"
            )


@dataclass
class WriteStats:
    """The cost of one rank's `write`."""

    nbytes: int = 0
    messages: int = 0
    sent_bytes: int = 0
    """Payload that left this rank in messages."""
    held_bytes: int = 0
    """Memory that this rank keeps for bytes in transit: segments, buckets."""
    move_s: float = 0.0
    digest_s: float = 0.0
    """Time of separate digests; a digest that is computed while its bytes are copied counts in `move_s`."""
    lost: dict[str, WeightwireError] = field(default_factory=dict)
    """Replicas that couldn't be written to, where others could."""


def digested_pieces(delivery: Delivery, stats: WriteStats) -> Iterator[tuple[Piece, Bytes]]:
    """The pieces of a delivery with their bytes, each valid until the next. What the caller does with each counts in `move_s`."""
    for item in delivery.slices:
        yield from _digested(pieces_of(delivery.manifest, item, delivery.piece_bytes), stats)
        del item  # before the next one is made


def _digested(pieces: Iterable[tuple[PiecePlace, Bytes]], stats: WriteStats) -> Iterator[tuple[Piece, Bytes]]:
    for place, data in pieces:
        started_s = time.perf_counter()
        piece = Piece(place.box, digest_bytes(data))
        digested_s = time.perf_counter()
        yield piece, data
        stats.nbytes += data.nbytes
        stats.digest_s += digested_s - started_s
        stats.move_s += time.perf_counter() - digested_s


class Staging(abc.ABC):
    """Memory of one transaction on one worker: `segment` is uint8 of the layout's size, read-only by agreement.

    `landing`: where trainer ranks write, on a transport that lands in the worker's own memory."""

    segment: torch.Tensor
    segment_id: str
    extra_bytes: int = 0
    """Memory that the worker holds for it beside the live weights."""
    landing: bytes = b""
    takes_late: bool = False
    """Whether buckets may still arrive after the seal was requested."""
    streams: bool = False
    """Whether nothing is staged: each piece goes from its bucket to its place, on the engine's thread, by `place`."""
    passes: DigestPasses | None = None
    """Where a receiver keeps them for its next transaction."""

    def receive(self, bucket: Bucket, payload: memoryview) -> None:
        """Takes the bytes of a bucket. Raises `ProtocolError` on a transport that sends no buckets."""
        raise ProtocolError("this transport takes no bytes in messages")

    def place(self, put: Put, limit_s: float) -> None:
        """Engine's thread, where `streams`: gives what comes within `limit_s` to `put`; returns earlier once all is there.
        Raises what `put` raises, and `VersionConflict` after `cancel`."""
        raise ProtocolError("this transport does not stream")

    def cancel(self) -> None:  # noqa: B027 -- most wait for nobody
        """Any thread: ends the waits in `receive` and `place`."""

    def pass_on(self, bucket: Bucket, payload: memoryview) -> None:  # noqa: B027 -- most pass nothing on
        """After `receive`: relays the bucket, as it was received, to the workers that this one feeds."""

    def relay(self, request: Relay) -> None:
        """Begins to relay buckets. Raises `ProtocolError` if nobody does in this update."""
        raise ProtocolError("no worker relays bytes in this update")

    def wait_for(self, pieces: Sequence[Piece], cancelled: threading.Event) -> None:  # noqa: B027
        """Before `check`: waits for pieces that may still be under way. Raises once `cancelled` is set."""

    def settle(self) -> None:  # noqa: B027
        """After the commit, and before a `close` that follows it: no more buckets come, and nobody is waited for."""

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        """Compares pieces with their digests; returns the bytes read.

        `between` is called after each pass over memory, on the thread that made it: it throttles, or raises to
        cancel. Raises `DigestMismatch` naming the first piece that differs.
        """
        failed = threading.Event()

        def check_some(passes: Sequence[DigestPass]) -> int:
            checked = 0
            with span("compare digests", pieces=sum(len(one.pieces) for one in passes)):
                for one in passes:
                    if failed.is_set():
                        break
                    for position, digest in zip(one.pieces, one.digests(self.segment), strict=True):
                        if digest != listed[position].digest:
                            failed.set()
                            box = listed[position].box
                            raise DigestMismatch(f"{manifest.describe(box)} is not what the trainer sent")
                    checked += one.nbytes
                    between()
            return checked

        listed = list(pieces)
        passes = (self.passes or DigestPasses()).of(manifest, (piece.box for piece in listed), self.lying)
        if threads == 1 or len(passes) < threads:
            return check_some(passes)
        ends = list(itertools.accumulate(one.nbytes for one in passes))
        parts: list[list[DigestPass]] = [[] for _ in range(threads)]
        for one, end in zip(passes, ends, strict=True):
            parts[min((end - 1) * threads // ends[-1], threads - 1) if end else 0].append(one)
        with ThreadPoolExecutor(threads, thread_name_prefix="weightwire-check") as pool:
            return sum(pool.map(carried(check_some), parts))

    def start_check(
        self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1
    ) -> Callable[[], int]:
        """Begins `check`: a device reads on while this thread does something else. Call what it returns to end the check; that
        returns and raises what `check` does. Where no device reads, all of it is done here."""
        nbytes = self.check(manifest, pieces, between, threads)
        return lambda: nbytes

    def lying(self, manifest: Manifest, box: Box) -> Iterable[Lying]:
        """Where a box lies in `segment`: `LyingAt`."""
        return (in_segment(manifest, box),)

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the memory; may be called twice."""


class Receiver(abc.ABC):
    """The half of a transport on one worker, for one group."""

    @abc.abstractmethod
    def check_probe(self, probe: bytes) -> None:
        """Raises `TransportUnavailable` with the reason if this worker can't use what the sender's probe describes."""

    def land_in(self, layout: ZoneLayout, device: str) -> None:
        """Before the first `open`, on a transport that lands in zones: what the installer wants a zone to be, and the type of
        device that holds the weights. Raises `TransportUnavailable` where it has no zones on such a device."""
        raise TransportUnavailable("this transport does not land in zones")

    @abc.abstractmethod
    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        """Staging for one transaction. Raises `ProtocolError` or `TransportUnavailable`, and then leaves nothing open."""

    def drop_kept(self) -> None:  # noqa: B027 -- most keep nothing
        """Frees what is kept between transactions. Called while none is open."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything; may be called twice."""


class Sender(abc.ABC):
    """The half of a transport on one trainer rank, for one group. Its manager sets `config` before any call.

    `writes_once`: nothing need be kept for another transaction."""

    config = Config()
    writes_once = False

    @abc.abstractmethod
    def probe(self) -> bytes:
        """Manager rank: bytes with which a worker can test whether the transport works for it."""

    def meet(  # noqa: B027 -- most needn't know
        self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut
    ) -> None:
        """Manager rank, before `allocate`: who takes part in the next transaction, how long it may take, and how buckets
        reach many replicas."""

    def edges(self, manifest: Manifest, target: Target) -> Sequence[Box]:
        """Every rank, where `Transport.sends`: slices are cut where one of these boxes begins or ends."""
        return target.needs

    def takes_bytes(self, manifest: Manifest, busy: frozenset[str]) -> int:
        """Manager rank: the memory of this host that `allocate` would take in addition."""
        return 0

    @abc.abstractmethod
    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        """Manager rank: where the next transaction's bytes will be. `busy` are the segment ids that workers still hold."""

    def retire(self, segments: frozenset[str]) -> None:  # noqa: B027 -- most own no segments
        """Manager rank, before `allocate`: lost replicas may still read these segments. They are never written again."""

    @abc.abstractmethod
    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        """Every rank: brings this rank's slices to all targets. Returns every piece, with the digest of the trainer's own bytes.
        Raises typed errors; the caller then aborts the transaction."""

    def without(self, replica: str) -> None:  # noqa: B027 -- most reach each replica by itself
        """Manager rank, until the commit: a replica dropped out. Replicas that it was to feed must be fed by others."""

    def kept(self, manifest: Manifest, description: bytes, targets: Sequence[Target]) -> Kept | None:
        """Manager rank, after the commit: the bytes of a transaction, for replicas that join late.

        Valid until `allocate` or `close`. None where this process can't read them."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything; may be called twice."""


Put: TypeAlias = Callable[[Box, torch.Tensor], None]
"""Takes a checked piece: its box, and its elements, of the box's shape, which are valid until it returns."""

Kept: TypeAlias = Callable[[Box], torch.Tensor | None]
"""The elements of a box that was written in one piece, of its shape; None where they are not kept. Holds what it reads from."""


@dataclass(frozen=True)
class Transport:
    """An entry of the registry. `why_not` returns why the transport can't work on this machine, None if it can.

    `auto` takes the available transport of the lowest `preference` that all workers' probes accept.
    """

    name: str
    summary: str
    preference: int
    why_not: Callable[[], str | None]
    sender: Callable[[], Sender]
    receiver: Callable[[], Receiver]
    copies_per_byte: float = 0.0
    """Copies of each payload byte between the trainer's memory and the parameter, copies in the kernel included."""
    sends: bool = False
    """Whether each worker is sent its own bytes: slices are then cut where a worker's need ends."""
    streams: bool = False
    """Whether it is the way of `install='streaming'`: it brings no whole update, and nothing else uses it."""
    named_only: bool = False
    """Whether `auto` never takes it."""
    lands_in_zone: bool = False
    """Whether trainer ranks write a worker's second set itself: for the only replica of its host that takes part."""
    piece_bytes: int = PIECE_BYTES
    """Largest piece, where no other transport of the same update has smaller ones: a sender cuts as `Delivery` says."""

    AUTO: ClassVar[str] = "auto"
