"""What a transport is: a sending half on every trainer rank, a receiving half on every worker.

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
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import torch

from inference_plugin.transports.spread import FanOut
from inference_plugin.wire.config import PIECE_BYTES, Config
from inference_plugin.wire.copying import copy_rows, copy_rows_and_digest, digest_rows
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, WeightwireError
from inference_plugin.wire.manifest import Box, Cut, Manifest, Piece, Rows
from inference_plugin.wire.messages import Bucket, Relay
from inference_plugin.wire.tensors import box_view, bytes_view, torch_dtype
from inference_plugin.wire.tracing import carried, span

__all__ = [
    "PIECE_BYTES",
    "Bytes",
    "Receiver",
    "Sender",
    "Slice",
    "Staging",
    "Target",
    "Transport",
    "WriteStats",
    "pieces_of",
    "typed",
    "place_and_digest",
    "place_piece",
]

Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
"""Bytes in a row: numpy's calls cost a fraction of torch's, and one copy of this size wants one thread."""


class Slice(Protocol):
    """A box of a checkpoint tensor and the tensor that fills it, of the box's shape."""

    @property
    def box(self) -> Box: ...
    @property
    def tensor(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Target:
    """A worker to send to: its socket, its process for noticing its death, and what it needs (a box per tensor)."""

    replica: str
    rank: int
    address: str
    pid: int
    boot_id: str
    needs: tuple[Box, ...]


@dataclass
class WriteStats:
    """What one rank's `write` cost."""

    nbytes: int = 0
    messages: int = 0
    sent_bytes: int = 0
    """Payload that left this rank in messages."""
    move_s: float = 0.0
    digest_s: float = 0.0
    """Of digests by themselves; one that is computed while its bytes are copied takes part in `move_s`."""
    lost: dict[str, WeightwireError] = field(default_factory=dict)
    """Replicas that couldn't be written to, where others could."""


class Staging(abc.ABC):
    """Memory of one transaction on one worker: `segment` is uint8 of the layout's size, read-only by agreement."""

    segment: torch.Tensor
    segment_id: str
    extra_bytes: int
    takes_late: bool = False
    """Whether messages with bytes may come after the seal was asked for."""

    def receive(self, pieces: Sequence[Piece], payload: memoryview) -> None:
        """Takes bytes that came in a message; a transport that sends none refuses."""
        raise ProtocolError("this transport takes no bytes in messages")

    def pass_on(self, bucket: Bucket, payload: memoryview) -> None:  # noqa: B027 -- most pass nothing on
        """After `receive`: the message as it came, for whoever is fed from here."""

    def relay(self, request: Relay) -> None:
        """Begins to pass on; a transport, or an update, in which nobody does refuses."""
        raise ProtocolError("in this update nobody passes bytes on")

    def wait_for(self, pieces: Sequence[Piece], cancelled: threading.Event) -> None:  # noqa: B027
        """Before `check`: until all pieces are here, where they may be under way. Raises once `cancelled` is set."""

    def settle(self) -> None:  # noqa: B027
        """After the commit: nothing more comes, and nobody else is waited for."""

    def check(
        self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[int], None], threads: int = 1
    ) -> int:
        """Compares pieces with their digests; returns the bytes read.

        `between(nbytes)` is called after each look at memory, on the thread that did it, for cancelling and for going
        slowly: after a piece, or after those that lie side by side.
        Raises `DigestMismatch` naming the first piece that differs.
        """
        failed = threading.Event()

        def check_some(some: Sequence[_Band]) -> int:
            checked = 0
            with span("compare digests", pieces=sum(len(band.pieces) for band in some)):
                for band in some:
                    if failed.is_set():
                        break
                    for piece, digest in zip(band.pieces, _digests_in(self.segment, manifest, band), strict=True):
                        if digest != piece.digest:
                            failed.set()
                            raise DigestMismatch(f"{manifest.describe(piece.box)} is not what the trainer sent")
                    checked += band.nbytes
                    between(band.nbytes)
            return checked

        bands = _bands(manifest, pieces)
        if threads == 1 or len(bands) < threads:
            return check_some(bands)
        ends = list(itertools.accumulate(band.nbytes for band in bands))
        parts: list[list[_Band]] = [[] for _ in range(threads)]
        for band, end in zip(bands, ends, strict=True):
            parts[min((end - 1) * threads // ends[-1], threads - 1) if end else 0].append(band)
        with ThreadPoolExecutor(threads, thread_name_prefix="weightwire-check") as pool:
            return sum(pool.map(carried(check_some), parts))

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the memory; may be called twice."""


class Receiver(abc.ABC):
    """The half of a transport on one worker, for one group."""

    @abc.abstractmethod
    def check_probe(self, probe: bytes) -> None:
        """Raises `TransportUnavailable` with the reason if this worker can't use what the sender's probe describes."""

    @abc.abstractmethod
    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        """Staging for one transaction. Raises `ProtocolError` or `TransportUnavailable`; then nothing is left open."""

    def drop_kept(self) -> None:  # noqa: B027 -- most keep nothing
        """Frees what is kept from one transaction for the next; none is open."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything; may be called twice."""


class Sender(abc.ABC):
    """The half of a transport on one trainer rank, for one group. `config` is its manager's from the beginning on."""

    config = Config()

    @abc.abstractmethod
    def probe(self) -> bytes:
        """Manager rank: something that a worker can test itself against."""

    def meet(  # noqa: B027 -- most needn't know
        self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut
    ) -> None:
        """Manager rank, before `allocate`: who takes part in the next transaction, how long it may take, and how bytes
        are to reach many."""

    @abc.abstractmethod
    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        """Manager rank: where the next transaction's bytes will be. `busy` are the segment ids that workers still hold."""

    @abc.abstractmethod
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
        """Every rank: brings this rank's slices to all targets. `deadline_s` is on `time.monotonic()`'s clock.

        Returns every piece with the digest of what the trainer meant. Raises typed errors; the transaction is then
        to be aborted.
        """

    def without(self, replica: str) -> None:  # noqa: B027 -- most reach each replica by itself
        """Manager rank, until the commit: a replica drops out; those that were to be reached through it must be reached by
        others."""

    def memory(self, description: bytes) -> torch.Tensor | None:
        """Manager rank: where a transaction's bytes lie, all of them and laid out by the manifest, until `allocate` or
        `close` takes their memory. None where they lie with the workers only. Replicas that come late are caught up
        from there."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Frees everything; may be called twice."""


@dataclass(frozen=True)
class Transport:
    """An entry of the registry. `why_not` tells why it can't work on this machine, None if it can.

    `auto` takes the available transport of the lowest `preference` that all workers' probes accept.
    """

    name: str
    summary: str
    preference: int
    why_not: Callable[[], str | None]
    sender: Callable[[], Sender]
    receiver: Callable[[], Receiver]
    copies_per_byte: float = 0.0
    """Copies of a payload byte on its way from the trainer's memory to the parameter, those in the kernel included."""
    sends: bool = False
    """Whether bytes go to each worker by itself: slices are then cut where what a worker needs ends."""

    AUTO: ClassVar[str] = "auto"


def pieces_of(manifest: Manifest, item: Slice) -> Iterator[tuple[Cut, Bytes]]:
    """A slice cut into pieces, with their bytes in C order, in CPU memory.

    A cast happens only where the manifest states another dtype than the tensor has, which only a dtype rule brings
    about. Each array is valid until the next iteration; where it can, it is a view of the slice itself.
    """
    dtype = torch_dtype(manifest.tensors[item.box.tensor].dtype)
    cuts = manifest.cut(item.box, PIECE_BYTES)
    if item.tensor.dtype == dtype and item.tensor.device.type == "cpu" and item.tensor.is_contiguous():
        flat = bytes_view(item.tensor).numpy()
        for cut in cuts:
            yield cut, flat[cut.start : cut.end]
        return
    for cut in cuts:
        part = item.tensor
        for dim, (start, size) in enumerate(zip(cut.box.offsets, cut.box.sizes, strict=True)):
            if size != item.box.sizes[dim]:
                part = part.narrow(dim, start - item.box.offsets[dim], size)
        yield cut, bytes_view(part.to(device="cpu", dtype=dtype).contiguous()).numpy()


def place_piece(segment: torch.Tensor, manifest: Manifest, cut: Cut, data: Bytes) -> None:
    """Copies a piece's bytes to their place in a segment."""
    if cut.place is not None:
        start, count, row_bytes, stride = cut.place
        copy_rows(segment.numpy(), start, stride, data, 0, row_bytes, count, row_bytes, True)
    else:
        view = box_view(segment, manifest, cut.box)
        view.copy_(typed(data, view.dtype).view(cut.box.sizes))


def place_and_digest(segment: torch.Tensor, manifest: Manifest, cut: Cut, data: Bytes, stats: WriteStats) -> Piece:
    """As `place_piece`, and the digest, in one pass over memory."""
    started_s = time.perf_counter()
    if cut.place is None:
        digest = digest_bytes(data)
        stats.digest_s += time.perf_counter() - started_s
        started_s = time.perf_counter()
        place_piece(segment, manifest, cut, data)
    else:
        start, count, row_bytes, stride = cut.place
        digest = copy_rows_and_digest(segment.numpy(), start, stride, data, count, row_bytes)
    stats.nbytes += data.nbytes
    stats.move_s += time.perf_counter() - started_s
    return Piece(cut.box, digest)


@dataclass
class _Band:
    """Pieces whose rows are the same rows of a tensor, side by side or apart; or one piece of whole rows."""

    pieces: list[Piece] = field(default_factory=list)
    places: list[Rows | None] = field(default_factory=list)
    nbytes: int = 0

    @property
    def start(self) -> int:
        place = self.places[0]
        return place.start if place else 0


def _bands(manifest: Manifest, pieces: Iterable[Piece]) -> list[_Band]:
    """As they lie in the segment."""
    bands: defaultdict[Hashable, _Band] = defaultdict(_Band)
    for piece in pieces:
        place = manifest.rows(piece.box)
        if place is None or place.rows == 1:
            band = bands[piece.box]
        else:
            first_row = (place.start - manifest.layout.offsets[piece.box.tensor]) // place.stride
            band = bands[piece.box.tensor, first_row, place.rows, place.stride]
        band.pieces.append(piece)
        band.places.append(place)
        band.nbytes += manifest.box_nbytes(piece.box)
    return sorted(bands.values(), key=lambda band: band.start)


def _digests_in(segment: torch.Tensor, manifest: Manifest, band: _Band) -> list[int]:
    """Of each piece's bytes in C order, as they lie in a segment."""
    places = [place for place in band.places if place is not None]
    if len(places) != len(band.pieces):
        views = (box_view(segment, manifest, piece.box) for piece in band.pieces)
        return [digest_bytes(bytes_view(view.contiguous()).numpy()) for view in views]
    spans = [(place.start, place.row_bytes) for place in places]
    return digest_rows(segment.numpy(), places[0].stride, places[0].rows, spans)


def typed(data: Bytes, dtype: torch.dtype) -> torch.Tensor:
    """Bytes, from anywhere in a bucket, as elements of `dtype`; copied only where torch can't view them."""
    aligned = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch can't mark a tensor read-only and says so
        return torch.from_numpy(aligned).view(dtype)
