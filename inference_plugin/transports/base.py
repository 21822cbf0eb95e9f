"""What a transport is: a sending half on every trainer rank, a receiving half on every worker.

One update, numbered as the methods are called:

1. manager rank: `Sender.probe()`; each worker: `Receiver.check_probe()`; a refusal makes `auto` try the next transport.
2. manager rank: `Sender.allocate()` describes where the bytes will be; the description travels in `Begin`.
3. each worker: `Receiver.open()` gives the staging memory, laid out by the manifest.
4. every trainer rank: `Sender.write()` brings its slices across and returns the pieces with their digests.
   Where bytes travel in messages, each worker's `Staging.receive()` takes them.
5. each worker: `Staging.check()` compares every piece it needs with its digest.
6. after the commit the staging is kept as the way back, or closed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, WeightwireError
from inference_plugin.wire.manifest import DTYPE_BYTES, Box, Manifest, Piece, box_volume, split_box
from inference_plugin.wire.tensors import box_view, bytes_view, torch_dtype

__all__ = [
    "PIECE_BYTES",
    "Receiver",
    "Sender",
    "Slice",
    "Staging",
    "Target",
    "Transport",
    "WriteStats",
    "pieces_of",
    "typed",
    "place_piece",
]

PIECE_BYTES = 4 << 20
"""Largest piece: its digest leaves it in the cache for the copy, and the calls per piece don't count."""


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
    move_s: float = 0.0
    digest_s: float = 0.0
    lost: dict[str, WeightwireError] = field(default_factory=dict)
    """Replicas that couldn't be written to, where others could."""


class Staging(abc.ABC):
    """Memory of one transaction on one worker: `segment` is uint8 of the layout's size, read-only by agreement."""

    segment: torch.Tensor
    segment_id: str
    extra_bytes: int

    def receive(self, pieces: Sequence[Piece], payload: memoryview) -> None:
        """Takes bytes that came in a message; a transport that sends none refuses."""
        raise ProtocolError("this transport takes no bytes in messages")

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[int], None]) -> int:
        """Compares pieces with their digests; returns the bytes read.

        `between(nbytes)` is called after each piece, for cancelling and for going slowly. Raises `DigestMismatch`
        naming the first piece that differs.
        """
        checked = 0
        flat = self.segment.numpy()
        for piece in pieces:
            if (place := manifest.byte_range(piece.box)) is not None:
                digest = digest_bytes(flat[place[0] : place[1]])
            else:
                digest = digest_bytes(bytes_view(box_view(self.segment, manifest, piece.box).contiguous()).numpy())
            if digest != piece.digest:
                raise DigestMismatch(f"{manifest.describe(piece.box)} is not what the trainer sent")
            nbytes = manifest.box_nbytes(piece.box)
            checked += nbytes
            between(nbytes)
        return checked

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
    """The half of a transport on one trainer rank, for one group."""

    @abc.abstractmethod
    def probe(self) -> bytes:
        """Manager rank: something that a worker can test itself against."""

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

    AUTO: ClassVar[str] = "auto"


def pieces_of(manifest: Manifest, item: Slice) -> Iterator[tuple[Box, torch.Tensor]]:
    """A slice cut into pieces: their boxes, and their bytes in C order as a 1-D uint8 CPU tensor.

    A cast happens only where the manifest states another dtype than the tensor has, which only a dtype rule brings
    about. Each tensor is valid until the next iteration; where it can, it is a view of the slice itself.
    """
    spec = manifest.tensors[item.box.tensor]
    item_bytes = DTYPE_BYTES[spec.dtype]
    dtype = torch_dtype(spec.dtype)
    boxes = split_box(item.box, item_bytes, PIECE_BYTES)
    if item.tensor.dtype == dtype and item.tensor.device.type == "cpu" and item.tensor.is_contiguous():
        flat = bytes_view(item.tensor)
        start = 0
        for box in boxes:
            end = start + box_volume(box) * item_bytes
            yield box, flat[start:end]
            start = end
        return
    for box in boxes:
        part = item.tensor
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != item.box.sizes[dim]:
                part = part.narrow(dim, start - item.box.offsets[dim], size)
        yield box, bytes_view(part.to(device="cpu", dtype=dtype).contiguous())


def place_piece(segment: torch.Tensor, manifest: Manifest, box: Box, data: torch.Tensor) -> None:
    """Copies a piece's bytes (1-D uint8, C order) to their place in a segment."""
    if (place := manifest.byte_range(box)) is not None:
        segment[place[0] : place[1]].copy_(data)
    else:
        view = box_view(segment, manifest, box)
        view.copy_(typed(data, view.dtype).view(box.sizes))


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes (1-D uint8, from anywhere in a bucket) as elements of `dtype`; copied only where torch can't view them."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)
