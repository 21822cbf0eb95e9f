"""The worker's side of `store`, and what the trainer tells it."""

from __future__ import annotations

import collections
import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch

from inference_plugin.devices import start_thread
from inference_plugin.net.gate import no_thread
from inference_plugin.transports.base import Staging
from inference_plugin.transports.bucket_staging import CANCEL_S, BucketStaging
from inference_plugin.transports.delta import Base, DeltaReceiver, Name, make_changes
from inference_plugin.transports.objects import KEY, ByteRange, ObjectStore, merged_ranges
from inference_plugin.transports.pieces import Bytes, DigestPasses, place_piece
from inference_plugin.wire.codec import MAX_PAYLOAD_BYTES, decode_as
from inference_plugin.wire.config import Config, variable_of
from inference_plugin.wire.errors import (
    DigestMismatch,
    ProtocolError,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.geometry import Box, Piece, PiecePlace
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest
from inference_plugin.wire.messages import Bucket
from inference_plugin.wire.messages.common import MAX_PIECES, Count, Seconds
from inference_plugin.wire.tensors import box_view, bytes_view
from inference_plugin.wire.tracing import carried, span

__all__ = ["Holds", "ObjectPlace", "Probe", "StoreReceiver", "Terms", "store_of"]

Key = Annotated[str, msgspec.Meta(pattern=KEY)]


class Probe(msgspec.Struct, frozen=True):
    """An object with which a worker tests that it sees the trainer's store. `shown`: the trainer's URL."""

    shown: Annotated[str, msgspec.Meta(max_length=1024)]
    key: Key
    content: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
    wait_s: Seconds


class Terms(msgspec.Struct, frozen=True):
    """The description of an update. `name`: what its bytes will be called. `folder`: where this manager's objects lie. `at_once`:
    how many objects a worker reads at once. `read_s`: how long a read may take; `wait_s`: how long an object may be missing."""

    name: Name
    folder: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z][0-9a-z-]{0,63}\Z")]
    at_once: Annotated[int, msgspec.Meta(ge=1, le=64)]
    read_s: Seconds
    wait_s: Seconds


class ObjectPlace(msgspec.Struct, frozen=True):
    """Where the pieces of a bucket lie: in an object, each at an offset. `follows`: the bytes that a piece of changes changes, by
    name."""

    key: Key
    follows: Annotated[bytes, msgspec.Meta(max_length=64)]
    offsets: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_PIECES)]


class Holds(msgspec.Struct, frozen=True):
    """A worker's landing. `name`: the bytes that it holds. `refused`: those of the last update, if it could not make them of what
    it read."""

    name: bytes = b""
    refused: bytes = b""


def store_of(config: Config) -> ObjectStore:
    """Raises `TransportUnavailable` where no store is named."""
    if config.store_url is None:
        raise TransportUnavailable(
            f"{variable_of('store_url')} is not set",
            hint="set it on the trainer's ranks and the engines: a URL of fsspec, such as file:///mnt/weights or s3://bucket/folder",
        )
    return ObjectStore(config.store_url)


class _Read(NamedTuple):
    """Pieces that are read from an object, and the ranges that cover them."""

    bucket: Bucket
    place: ObjectPlace
    ranges: list[ByteRange]
    call: Future[list[bytes]] | None


class StoreStaging(BucketStaging):
    """Filled by a thread that reads the objects in the order in which they were told. Every piece of which the worker needs a
    part is kept whole, for its digest and for changes to come."""

    def begin(
        self,
        terms: Terms,
        store: ObjectStore,
        base: Base | None,
        refused: bytes,
        is_over: Callable[[Base | None, bytes], None],
    ) -> None:
        """Before the first bucket. `is_over` hears of the next update's base, and of what was refused: as soon as bytes are to
        arrive (the base stays unless it lies in this memory), and once they were compared, or could not be made."""
        self._terms, self._store, self._base, self._is_over = terms, store, base, is_over
        held = Holds(base.name if base is not None else b"", refused)
        self.landing = msgspec.msgpack.encode(held) if held != Holds() else b""
        self._changed = threading.Condition()
        self._told: collections.deque[tuple[Bucket, ObjectPlace]] = collections.deque()
        self._all_told = False
        self._cancelled = threading.Event()
        self._error: WeightwireError | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        self._reads = self._closing = False
        self._is_named = False

    def receive(self, bucket: Bucket, payload: memoryview) -> None:
        """Queues the bucket: its bytes are read in the background."""
        if self._error is not None:
            raise copy.copy(self._error)
        place = decode_as(bucket.lies_at, ObjectPlace)
        _check(self._manifest, bucket, place, payload)
        with self._changed:
            self._told.append((bucket, place))
            self._changed.notify_all()
        if self._thread is None:
            base = self._base
            self._is_over(None if base is None or base.memory is self._memory else base, b"")
            self._reads = True
            try:
                self._thread = start_thread(carried(self._run), name="weightwire-store-reader", stop=self.cancel)
            except RuntimeError as error:
                self._reads = False
                raise no_thread(error, "reading the store") from error

    def wait_for(self, pieces: Sequence[Piece], cancelled: threading.Event) -> None:
        """Waits until all that was told is read. Raises the error that ended the reading."""
        with self._changed:
            self._all_told = True
            self._changed.notify_all()
        while self._thread is not None and self._thread.is_alive():  # each read has its limit
            self._thread.join(CANCEL_S)
            if cancelled.is_set():
                raise VersionConflict("the transaction was dropped")
        if self._error is not None:
            raise copy.copy(self._error)
        self.extra_bytes = self._stagings * sum(self._manifest.box_nbytes(piece.box) for piece in pieces)

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        """Compares the pieces where they lie."""
        try:
            nbytes = Staging.check(self, manifest, pieces, between, threads)
        except DigestMismatch:
            if not self._is_named:
                self._is_over(None, self._terms.name)
            raise
        if not self._is_named:  # else it is the way back
            assert self._memory is not None
            self._is_named, self._base = True, None
            self._is_over(Base(self._terms.name, self._memory, frozenset()), b"")
        return nbytes

    def cancel(self) -> None:
        self._cancelled.set()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        self.cancel()
        with self._ending:
            self._closing = True
            if not self._reads:
                self._free()

    # --- the thread that reads ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read_all()
        except Exception as error:  # noqa: BLE001 -- raised by `wait_for`, which the trainer asks for
            self._error = copy.copy(WeightwireError.wrap(error))  # a traceback would hold the memory
            if isinstance(error, ProtocolError | DigestMismatch) and not self._cancelled.is_set():
                self._is_over(None, self._terms.name)
        finally:
            with self._ending:
                self._reads = False
                if self._closing:
                    self._free()

    def _free(self) -> None:
        self._base = None
        super().close()

    def _read_all(self) -> None:
        under_way: collections.deque[_Read] = collections.deque()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._told or under_way or self._all_told or self._cancelled.is_set())
                room = self._terms.at_once - len(under_way)
                told = [self._told.popleft() for _ in range(min(room, len(self._told)))]
            if self._cancelled.is_set():
                raise VersionConflict("the transaction was dropped")
            under_way.extend(self._begin_read(*each) for each in told)
            if not under_way:
                return
            read = under_way.popleft()
            with span("read", key=read.place.key, bytes=sum(read.bucket.sizes)):
                self._take_read(read, self._blocks(read))

    def _begin_read(self, bucket: Bucket, place: ObjectPlace) -> _Read:
        extents = zip(place.offsets, bucket.sizes, strict=True)
        ranges = merged_ranges([ByteRange(offset, offset + size) for offset, size in extents if size])
        call = self._store.read(place.key, ranges, self._terms.wait_s) if ranges else None
        return _Read(bucket, place, ranges, call)

    def _blocks(self, read: _Read) -> list[bytes]:
        """The bytes of each range."""
        if read.call is None:
            return []
        until_s = time.monotonic() + self._terms.read_s
        blocks = self._store.result(read.call, f"reading object {read.place.key}", until_s, self._cancelled)
        for (start, end), block in zip(read.ranges, blocks, strict=True):
            if len(block) != end - start:
                raise DigestMismatch(
                    f"store {self._store.shown}: object {read.place.key} has {start + len(block)} bytes, and the trainer wrote "
                    f"{end} at least"
                )
        return blocks

    def _take_read(self, read: _Read, blocks: list[bytes]) -> None:
        at = 0
        nothing = np.empty(0, dtype=np.uint8)
        for piece, offset, size in zip(read.bucket.pieces, read.place.offsets, read.bucket.sizes, strict=True):
            data = nothing
            if size:
                while offset >= read.ranges[at].end:
                    at += 1
                data = np.frombuffer(blocks[at], dtype=np.uint8, count=size, offset=offset - read.ranges[at].start)
            self._take_piece(piece.box, data, read.place.follows)

    def _take_piece(self, box: Box, data: Bytes, follows: bytes) -> None:
        manifest = self._manifest
        if data.nbytes == manifest.box_nbytes(box):
            place_piece(self.segment, manifest, PiecePlace(box, 0, data.nbytes, manifest.region(box)), data)
            return
        own, base = box_view(self.segment, manifest, box), self._base
        if base is not None and follows == base.name and base.memory is not self._memory:
            own.copy_(box_view(base.memory, manifest, box))
        if data.nbytes:
            changed = own.contiguous()
            make_changes(bytes_view(changed).numpy(), data, DTYPE_BYTES[manifest.tensors[box.tensor].dtype])
            if not own.is_contiguous():
                own.copy_(changed)


def _check(manifest: Manifest, bucket: Bucket, place: ObjectPlace, payload: memoryview) -> None:
    """Raises `ProtocolError` for a bucket that can't lie in an object."""
    numbers = {len(bucket.pieces), len(bucket.sizes), len(place.offsets)}
    if len(payload) or len(numbers) != 1:
        raise ProtocolError(
            f"a bucket of {len(bucket.pieces)} pieces, {len(bucket.sizes)} sizes, {len(place.offsets)} offsets and "
            f"{len(payload)} bytes: it is to say where its bytes lie, and to have none"
        )
    end = 0
    for piece, offset, size in zip(bucket.pieces, place.offsets, bucket.sizes, strict=True):
        nbytes = manifest.box_nbytes(manifest.check_box(piece.box))
        if offset < end or size > nbytes:
            raise ProtocolError(
                f"{manifest.describe(piece.box)} of {nbytes} bytes: {size} at byte {offset}, after {end}"
            )
        end = offset + size
    if end > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"an object of {end} bytes: {MAX_PAYLOAD_BYTES} are the limit")


class StoreReceiver(DeltaReceiver):
    """Remembers what the memory of the last transaction holds, and whether it could be made."""

    staging = StoreStaging

    def __init__(self) -> None:
        super().__init__()
        self._refused = b""
        self._passes = DigestPasses()
        self._store: ObjectStore | None = None
        self._lending = threading.Lock()  # a thread that reads gives its memory back when it ends

    def check_probe(self, probe: bytes) -> None:
        offered, store = decode_as(probe, Probe), store_of(Config.from_environment())
        until_s = time.monotonic() + offered.wait_s + 1
        wanted = [ByteRange(0, len(offered.content))]
        try:
            (found,) = store.result(store.read(offered.key, wanted, offered.wait_s), "reading the probe", until_s)
        except WeightwireError as error:
            raise TransportUnavailable(
                f"the trainer wrote an object into {offered.shown}, and this worker can't read it: {error.message}",
                hint=error.hint,
            ) from error
        if found != offered.content:
            raise TransportUnavailable(
                f"the trainer's {offered.shown} and this worker's {store.shown} hold different objects of one name",
                hint=f"{variable_of('store_url')} must name one store on both sides, or a replica of it",
            )
        self._store = store

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        terms = decode_as(description, Terms)
        if self._store is None:
            self._store = store_of(Config.from_environment())
        with self._lending:
            staging = self._opened(manifest, needs)
        assert isinstance(staging, StoreStaging)
        staging.passes = self._passes
        staging.begin(terms, self._store, self._base, self._refused, self._note)
        return staging

    def _note(self, base: Base | None, refused: bytes) -> None:
        self._set_base(base)
        self._refused = refused

    def take_back(self, memory: torch.Tensor) -> None:
        with self._lending:
            super().take_back(memory)
