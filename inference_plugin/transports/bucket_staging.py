"""Staging memory of one worker's own, for transports that bring the bytes in buckets (`zmq`, `collective`)."""

from __future__ import annotations

import mmap
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import sub

import numpy as np
import torch

from inference_plugin.transports.base import Receiver, Staging
from inference_plugin.transports.pieces import Bytes, place_piece, typed
from inference_plugin.transports.relay import BucketRelay, RelayTerms
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    ProtocolError,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, intersect
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Bucket, Relay
from inference_plugin.wire.tensors import box_view, narrowed, torch_dtype

__all__ = ["BucketReceiver", "BucketStaging", "check_received", "checked_pieces"]

CANCEL_S = 0.1
"""Longest time until a worker that waits for bytes notices that its transaction was dropped."""


class BucketStaging(Staging):
    """Private memory laid out by the manifest. Only pages of what the worker needs are ever touched.

    Where workers relay buckets, every piece that arrives is kept whole: another worker may need the rest of it.
    `release` gets the memory back once the staging is closed and nobody is fed from it any more. `others`: number of stagings
    of this receiver that are open already: under `copy`, that of the version before is the way back.
    """

    def __init__(
        self,
        manifest: Manifest,
        needs: Sequence[Box],
        memory: torch.Tensor,
        release: Callable[[torch.Tensor], None],
        *,
        others: int = 0,
        relays: RelayTerms | None = None,
    ) -> None:
        self._manifest = manifest
        self._needs = {box.tensor: box for box in needs}
        self._memory: torch.Tensor | None = memory
        self._release = release
        self.segment = memory[: manifest.layout.nbytes]
        self.segment_id = secrets.token_hex(8)
        self._stagings = 1 + others
        self.extra_bytes = self._stagings * sum(manifest.box_nbytes(box) for box in needs)
        self._received: dict[Box, int] = {}
        self.takes_late = relays is not None
        self._relay = BucketRelay(manifest, memory, relays.silence_s) if relays is not None else None
        self._arrived = threading.Condition()
        self._complete = False
        self._refused: WeightwireError | None = None

    def receive(self, bucket: Bucket, payload: memoryview) -> None:
        self.receive_pieces(bucket.pieces, payload)

    def receive_pieces(self, pieces: Sequence[Piece], payload: memoryview) -> None:
        """As `receive`, for bytes that arrived without a message."""
        self._take(checked_pieces(self._manifest, pieces, payload))

    def _take(self, checked: Iterator[tuple[Piece, Bytes]]) -> None:
        """Places pieces, each once it was compared with its digest."""
        with self._arrived:
            try:
                if self._complete:
                    raise ProtocolError("a new bucket after the last one that was sealed")
                for piece, data in checked:
                    if self._place(piece.box, data):
                        self._received[piece.box] = piece.digest
                self._refused = None
            except WeightwireError as error:
                self._refused = error
                raise
            finally:
                self._arrived.notify_all()

    def _place(self, box: Box, data: Bytes) -> bool:
        """Copies what the worker needs of a piece to its place; False if it needs nothing of it."""
        wanted = box if self._relay is not None else self._needs.get(box.tensor)
        if wanted is None or (part := intersect(box, wanted)) is None:
            return False
        if part == box:
            place = PiecePlace(box, 0, data.nbytes, self._manifest.region(box))
            place_piece(self.segment, self._manifest, place, data)
            return True
        source = typed(data, torch_dtype(self._manifest.tensors[box.tensor].dtype)).view(box.sizes)
        needed = narrowed(source, tuple(map(sub, part.offsets, box.offsets)), part.sizes)
        box_view(self.segment, self._manifest, part).copy_(needed)
        return True

    def pass_on(self, bucket: Bucket, payload: memoryview) -> None:
        if self._relay is not None:
            self._relay.add(bucket, payload)

    def relay(self, request: Relay) -> None:
        if self._relay is None:
            super().relay(request)
        else:
            self._relay.feed(request)

    def wait_for(self, pieces: Sequence[Piece], cancelled: threading.Event) -> None:
        """Waits until all pieces are here, if workers relay buckets. Raises `PeerLost` once nobody feeds this worker any more,
        and the error with which the last bucket was refused: its sender has given up."""
        if self._relay is None:
            return
        missing = {piece.box for piece in pieces}
        self._relay.heard()
        with self._arrived:
            while missing := missing - self._received.keys():
                if self._refused is not None:
                    raise self._refused
                if cancelled.is_set():
                    raise VersionConflict("the transaction was dropped")
                self._relay.check_heard(f"{len(missing)} of {len(pieces)} pieces are missing")
                self._arrived.wait(CANCEL_S)
            self._complete = True
            self.extra_bytes = self._stagings * sum(self._manifest.box_nbytes(box) for box in self._received)

    def settle(self) -> None:
        if self._relay is not None:
            self._relay.settle()

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        """Every needed piece arrived and was compared on arrival; nobody else can write the memory since then."""
        return check_received(manifest, self._received, pieces, between)

    def close(self) -> None:
        self.segment = torch.empty(0, dtype=torch.uint8)
        self._received.clear()
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if self._relay is not None:
            self._relay.settle(lambda: self._release(memory))
        else:
            self._release(memory)


def checked_pieces(manifest: Manifest, pieces: Sequence[Piece], payload: memoryview) -> Iterator[tuple[Piece, Bytes]]:
    """The pieces of a bucket with their bytes, one after the other, each compared with its digest. Raises `ProtocolError` for a
    bucket that is not what its pieces take, `DigestMismatch` for the first piece that differs."""
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
        yield piece, data[start:end]


def check_received(
    manifest: Manifest, received: Mapping[Box, int], pieces: Iterable[Piece], between: Callable[[], None]
) -> int:
    """Compares the digests of what was `received` with those of the list that was sealed; returns the bytes. Raises
    `DigestMismatch` for what did not arrive, for what arrived and was not sealed, and for what differs."""
    checked = 0
    pieces = list(pieces)
    if extra := received.keys() - {piece.box for piece in pieces}:
        named = first_few([manifest.describe(box) for box in sorted(extra)])
        raise DigestMismatch(f"arrived and was not sealed: {named}")
    for piece in pieces:
        if (digest := received.get(piece.box)) is None:
            raise DigestMismatch(f"{manifest.describe(piece.box)} did not arrive")
        if digest != piece.digest:
            raise DigestMismatch(f"{manifest.describe(piece.box)} is not what the trainer sealed")
        checked += manifest.box_nbytes(piece.box)
        between()
    return checked


class BucketReceiver(Receiver):
    """Keeps the memory of the last transaction for the next one: fresh pages cost more than the copy into them."""

    staging = BucketStaging

    def __init__(self) -> None:
        self._spare: torch.Tensor | None = None
        self._open: set[int] = set()
        """Where the memory of each open staging begins."""
        self._closed = False

    def check_probe(self, probe: bytes) -> None:
        """The probe arrived: there is nothing else to test."""

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        return self._opened(manifest, needs, decode_as(description, RelayTerms) if description else None)

    def _opened(self, manifest: Manifest, needs: Sequence[Box], relays: RelayTerms | None = None) -> BucketStaging:
        nbytes = max(manifest.layout.nbytes, mmap.PAGESIZE)
        memory, self._spare = self._spare, None
        if memory is None or memory.numel() != nbytes:
            touched = nbytes if relays is not None else sum(manifest.box_nbytes(box) for box in needs)
            check_fits(
                touched, "staging", "partial=True sends a part; install='streaming' stages a few buckets at a time"
            )
            try:
                anonymous = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise TransportUnavailable(
                    f"no memory to stage {nbytes} bytes: {error}",
                    hint="free memory, or raise this process's limit of addresses (`ulimit -v`)",
                ) from error
            memory = torch.frombuffer(anonymous, dtype=torch.uint8)
        staging = self.staging(manifest, needs, memory, self.take_back, others=len(self._open), relays=relays)
        self._open.add(memory.data_ptr())
        return staging

    def drop_kept(self) -> None:
        self._spare = None

    def close(self) -> None:
        self._closed = True
        self._spare = None

    def take_back(self, memory: torch.Tensor) -> None:
        self._open.discard(memory.data_ptr())
        if not self._closed:
            self._spare = memory
