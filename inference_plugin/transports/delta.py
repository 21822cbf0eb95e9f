"""Buckets that carry only what changed since the last update: of each piece the elements that differ, and their new values.

1. a rank keeps a copy of the bytes that it sent last, a worker those that were staged last; both have one name;
2. the worker's `Begun` says the name of what it holds. Where that is also what the rank holds, a piece travels as the elements
   that changed. Elsewhere, and where these are many, it travels whole, as over `zmq`;
3. the worker changes those elements, and compares the whole piece with the digest that the trainer made of the whole piece;
4. bytes have a name once all of them were written (the rank's) and compared (the worker's). So the update after one that failed
   sends everything.

A piece of changes holds the gaps between the elements that changed (`uint16`, little-endian: elements between it and the one
before, which did not change), and then their new values. Values, not differences: changes may be made twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch

from inference_plugin.transports.base import Delivery, Staging, Target, Transport, WriteStats
from inference_plugin.transports.bucket_staging import BucketReceiver, BucketStaging
from inference_plugin.transports.lanes import Buffer, Lane
from inference_plugin.transports.pieces import Bytes
from inference_plugin.transports.spread import FanOut
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import DigestMismatch, ProtocolError
from inference_plugin.wire.geometry import Box, Piece, box_volume, intersect
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest
from inference_plugin.wire.messages import Bucket
from inference_plugin.wire.tensors import box_view, bytes_view

__all__ = [
    "NAME_BYTES", "TRANSPORT", "Base", "DeltaReceiver", "LastSent", "Name", "changes_between", "make_changes",
]  # fmt: skip

NAME_BYTES = 16

_NOTHING = np.empty(0, dtype=np.uint8)

GAP_BYTES = 2
LARGEST_GAP = 0xFFFF

MOST_ELEMENTS = 1 << 27
"""Of all pieces of a bucket. The worker compares them all before it answers, however little of them travels."""

CHECKED_BYTES = 64 << 20
"""A rank asks for free memory each time that its copy has grown by as much."""


# --- what changed ----------------------------------------------------------------------------------------------------------


def changes_between(old: Bytes, new: Bytes, item_bytes: int) -> Bytes | None:
    """The changes that make `new` of `old`, which are as long: elements of `item_bytes` bytes. None if they take more than half
    of the bytes of `new`: then making them takes longer than copying all."""
    kind = _element(item_bytes)
    values = new.view(kind)
    at = np.flatnonzero(values != old.view(kind))
    if at.size == 0:
        return _NOTHING
    if 2 * at.size * (GAP_BYTES + kind.itemsize) > new.nbytes:
        return None
    gaps = _gaps(at)
    if gaps.max() > LARGEST_GAP:  # elements between that did not change shorten it
        at = np.union1d(at, np.arange(LARGEST_GAP, at[-1], LARGEST_GAP + 1))
        gaps = _gaps(at)
    return np.concatenate([gaps.astype("<u2").view(np.uint8), values[at].view(np.uint8)])


def make_changes(data: Bytes, changes: Bytes, item_bytes: int) -> None:
    """Makes `changes_between` in `data`, in place. Raises `ProtocolError` for changes that are none of so many bytes, and then
    leaves `data` as it was."""
    kind = _element(item_bytes)
    count, odd = divmod(changes.nbytes, GAP_BYTES + kind.itemsize)
    if odd:
        raise ProtocolError(f"{changes.nbytes} bytes are no changes of elements of {item_bytes} bytes")
    gaps = changes[: count * GAP_BYTES].view("<u2")
    at = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and at[-1] * kind.itemsize >= data.nbytes:
        raise ProtocolError(f"a change of element {at[-1]} in {data.nbytes} bytes")
    data.view(kind)[at] = changes[count * GAP_BYTES :].view(kind)


def _element(item_bytes: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{min(item_bytes, 8)}")


def _gaps(at: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    gaps = at.copy()
    gaps[1:] -= at[:-1] + 1
    return gaps


# --- the worker's side -----------------------------------------------------------------------------------------------------


Name = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]


class Named(msgspec.Struct, frozen=True):
    """The description of an update: what its bytes will be called."""

    name: Name


class Base(NamedTuple):
    """Bytes of which the trainer's ranks can send the changes: pieces that were compared, where they lie in `memory`."""

    name: bytes
    memory: torch.Tensor
    boxes: frozenset[Box]


class DeltaStaging(BucketStaging):
    """Its `landing` is the name of the bytes that the worker holds, b"" for none. Where the memory that holds them is also this
    staging's, they are changed where they lie."""

    _base: Base | None = None
    _in_place: Bytes | None = None
    """The piece that was changed where it lies."""

    def follow(self, name: bytes, base: Base | None, set_base: Callable[[Base | None], None]) -> None:
        """Before the first bucket. `name`: what its bytes will be called. `set_base` hears of the next update's base: none as
        soon as bytes arrive, and these once all were compared."""
        self._name, self._base, self._set_base = name, base, set_base
        self._is_named = False
        self.landing = base.name if base is not None else b""

    def receive(self, bucket: Bucket, payload: memoryview) -> None:
        self._set_base(None)
        try:
            self._take(self._whole_pieces(bucket, payload))
        except BaseException:
            self._received.clear()  # a piece may have been changed where it lies, or in part, after it was compared
            raise

    def _whole_pieces(self, bucket: Bucket, payload: memoryview) -> Iterator[tuple[Piece, Bytes]]:
        """The pieces of a bucket, whole, each compared with its digest."""
        manifest, sizes = self._manifest, bucket.sizes
        if len(sizes) != len(bucket.pieces) or sum(sizes) != len(payload):
            raise ProtocolError(
                f"a bucket of {len(payload)} bytes with {len(bucket.pieces)} pieces, whose {len(sizes)} sizes make {sum(sizes)}"
            )
        volumes = [box_volume(manifest.check_box(piece.box)) for piece in bucket.pieces]
        if len(volumes) > 1 and sum(volumes) > MOST_ELEMENTS:
            raise ProtocolError(f"a bucket with pieces of {sum(volumes)} elements: {MOST_ELEMENTS} are the limit")
        rest = np.frombuffer(payload, dtype=np.uint8)
        for piece, size in zip(bucket.pieces, sizes, strict=True):
            data, rest = rest[:size], rest[size:]
            if size != manifest.box_nbytes(piece.box):
                data = self._changed(piece.box, data)
            if digest_bytes(data) != piece.digest:
                raise DigestMismatch(f"{manifest.describe(piece.box)} is not what the trainer sent")
            yield piece, data

    def _changed(self, box: Box, changes: Bytes) -> Bytes:
        base, manifest = self._base, self._manifest
        if base is None or box not in base.boxes or not _holds(self._needs, box):
            raise ProtocolError(
                f"changes of {manifest.describe(box)} came, and this worker holds nothing that they change"
            )
        before = box_view(base.memory, manifest, box)
        data = bytes_view(before.contiguous()).numpy()
        if before.is_contiguous():
            if base.memory is self._memory:
                self._in_place = data
            else:
                data = data.copy()
        make_changes(data, changes, DTYPE_BYTES[manifest.tensors[box.tensor].dtype])
        return data

    def _place(self, box: Box, data: Bytes) -> bool:
        return data is self._in_place or super()._place(box, data)

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        nbytes = super().check(manifest, pieces, between, threads)
        if self._is_named:  # the way back, which is compared again before it is taken
            return nbytes
        assert self._memory is not None
        self._is_named = True
        self._set_base(Base(self._name, self._memory, frozenset(self._received)))
        return nbytes

    def close(self) -> None:
        self._base = self._in_place = self._refused = None
        super().close()


class DeltaReceiver(BucketReceiver):
    """Remembers what the memory of the last transaction holds. There is one for each agreement on manifest and needs."""

    staging: type[BucketStaging] = DeltaStaging

    def __init__(self) -> None:
        super().__init__()
        self._base: Base | None = None

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        name = decode_as(description, Named).name
        staging = self._opened(manifest, needs)
        assert isinstance(staging, DeltaStaging)
        staging.follow(name, self._base, self._set_base)
        return staging

    def drop_kept(self) -> None:
        self._base = None
        super().drop_kept()

    def close(self) -> None:
        self._base = None
        super().close()

    def _set_base(self, base: Base | None) -> None:
        self._base = base

    def take_back(self, memory: torch.Tensor) -> None:
        """Of two memories that nobody uses, that of the base is kept."""
        spare = self._spare
        super().take_back(memory)
        if self._spare is not None and self._base is not None and spare is self._base.memory:
            self._spare = spare


def _holds(needs: Mapping[int, Box], box: Box) -> bool:
    """Whether all of the box is needed, and so is kept."""
    need = needs.get(box.tensor)
    return need is not None and intersect(box, need) == box


# --- the trainer's side ----------------------------------------------------------------------------------------------------


class DeltaLane(Lane):
    """A lane whose buckets say what each piece takes of them."""

    _elements = 0
    """Of the pieces in the bucket that is being packed."""

    def add(self, piece: Piece, data: Bytes) -> None:
        volume = box_volume(piece.box)
        if self._elements + volume > MOST_ELEMENTS:
            self.flush()
        super().add(piece, data)
        if self._pieces and self._pieces[-1] is piece:
            self._elements = volume + (self._elements if len(self._pieces) > 1 else 0)

    def holds(self, piece: Piece) -> bool:
        """Whether the worker needs all of the piece, and so can be sent its changes the next time."""
        return _holds(self._needs, piece.box)

    def takes_changes(self, piece: Piece, name: bytes) -> bool:
        """Whether the worker holds all of the piece, as these bytes."""
        return self.target.landing == name and self.holds(piece)

    def _message(self, bucket: Bucket, buffer: Buffer, nbytes: int) -> tuple[Bucket, memoryview | None]:
        return super()._message(msgspec.structs.replace(bucket, sizes=tuple(self._sizes)), buffer, nbytes)


class LastSent:
    """A copy of the bytes that a rank sent last, in the host's memory. `name`: what workers call these bytes; b"" unless all of
    them were written. `name_before`: the same of the update before, while one is being written."""

    def __init__(self) -> None:
        self.name = self.name_before = b""
        self._fingerprint = ""
        """Of the manifest whose boxes these are."""
        self._kept: dict[Box, Bytes] = {}
        self._before: dict[Box, Bytes] = {}
        self._unasked_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    @contextlib.contextmanager
    def replaced(self, fingerprint: str, name: bytes) -> Iterator[None]:
        """Around one update: its bytes are called `name` once all of them were written."""
        follows = self.name and fingerprint == self._fingerprint
        self._before, self.name_before = (self._kept, self.name) if follows else ({}, b"")
        self._kept, self.name, self._fingerprint = {}, b"", fingerprint
        try:
            yield
        finally:
            self._before = {}
        self.name = name

    def changes(self, manifest: Manifest, piece: Piece, part: Bytes) -> Bytes | None:
        """The changes that make `part` of the same piece of the update before, as `changes_between`; None where there was none.
        Keeps a copy of `part`. Raises `TransportUnavailable` where that does not fit."""
        item_bytes = DTYPE_BYTES[manifest.tensors[piece.box.tensor].dtype]
        kept, changes = self._before.pop(piece.box, None), None
        if kept is None:
            self._ask_for_memory(part.nbytes)
            kept = part.copy()
        elif (changes := changes_between(kept, part, item_bytes)) is None:
            np.copyto(kept, part)
        else:
            make_changes(kept, changes, item_bytes)
        self._kept[piece.box] = kept
        return changes

    def clear(self) -> None:
        self._kept, self.name = {}, b""

    def _ask_for_memory(self, nbytes: int) -> None:
        if self._unasked_bytes < nbytes:
            self._unasked_bytes = max(nbytes, CHECKED_BYTES)
            check_fits(self._unasked_bytes, "a copy of what was sent last", "transport='zmq' keeps none")
        self._unasked_bytes -= nbytes


class DeltaSender(ZmqSender):
    """Sends each worker what changed, or all, as the worker needs. Keeps a copy of pieces that some worker holds whole."""

    _used: list[DeltaLane]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._last = LastSent()

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        """Every worker is sent its own, of which it may hold something else than another."""

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        super().allocate(manifest, busy)
        return msgspec.msgpack.encode(Named(secrets.token_bytes(NAME_BYTES)))

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        with self._last.replaced(delivery.manifest.fingerprint, decode_as(delivery.description, Named).name):
            pieces, stats = super().write(dataclasses.replace(delivery, description=b""))
        stats.held_bytes += self._last.nbytes
        return pieces, stats

    def close(self) -> None:
        super().close()
        self._last.clear()

    def _sent_as(self, manifest: Manifest, piece: Piece, part: Bytes) -> Callable[[Lane], Bytes]:
        if self.writes_once or not any(lane.holds(piece) for lane in self._used):
            return lambda lane: part
        changes = self._last.changes(manifest, piece, part)

        def sent_as(lane: Lane) -> Bytes:
            assert isinstance(lane, DeltaLane)
            return part if changes is None or not lane.takes_changes(piece, self._last.name_before) else changes

        return sent_as

    def _make_lane(self, target: Target) -> Lane:
        return DeltaLane(target, self.config)


TRANSPORT = Transport(
    name="delta",
    summary="as zmq, and only what changed since the last update: for networks",
    preference=92,
    why_not=lambda: None,
    sender=DeltaSender,
    receiver=DeltaReceiver,
    copies_per_byte=5,  # as zmq, where everything changed
    sends=True,
)
