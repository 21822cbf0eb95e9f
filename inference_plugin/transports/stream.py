"""For `install='streaming'`: each bucket goes into the live parameters as it arrives, so that no whole update is ever held.

1. a rank cuts its slices into pieces and packs each worker's, many to a bucket, in two buffers or more; on the worker's host
   the buffers are shared memory and a message only says where the bucket lies, else its bytes are the payload frame;
2. the worker compares each piece with its digest in the bucket; the engine's thread, which generates nothing meanwhile, writes
   the piece to its place;
3. the reply says that the bucket is in place; only then does the rank fill its buffer again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from inference_plugin.net.addresses import boot_id
from inference_plugin.transports.base import Put, Receiver, Staging, Target, Transport
from inference_plugin.transports.bucket_staging import check_received, checked_pieces
from inference_plugin.transports.lanes import Buffer, Lane
from inference_plugin.transports.pieces import Bytes, typed
from inference_plugin.transports.segment import MappedSegments, SegmentAddress, SharedSegment
from inference_plugin.transports.shm import TRANSPORT as SHM
from inference_plugin.transports.spread import FanOut
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import CommitFailed, ProtocolError, TransportUnavailable, VersionConflict
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Bucket
from inference_plugin.wire.messages.common import MAX_PEERS, Count
from inference_plugin.wire.tensors import torch_dtype

__all__ = ["TRANSPORT", "SharedPlace"]

REACHED = b"shared memory"
"""The landing that a worker announces if it can map the trainer's memory."""


class SharedPlace(msgspec.Struct, frozen=True):
    """Where a bucket lies."""

    segment: SegmentAddress
    offset: Count
    nbytes: Count


# --- the worker's side -----------------------------------------------------------------------------------------------------


class StreamStaging(Staging):
    """Hands buckets from the thread that receives them to the engine's thread, one at a time: the receiving thread waits until
    its bucket is in place."""

    streams = True

    def __init__(self, manifest: Manifest, buffers: MappedSegments, landing: bytes) -> None:
        self.segment = torch.empty(0, dtype=torch.uint8)
        self.segment_id = secrets.token_hex(8)
        self.landing = landing
        self._manifest = manifest
        self.buffers = buffers
        self._received: dict[Box, int] = {}
        self._changed = threading.Condition()
        self._offered: Sequence[tuple[Piece, Bytes]] | None = None
        self._failed: Exception | None = None
        self._is_complete = False
        self._is_cancelled = False

    def receive(self, bucket: Bucket, payload: memoryview) -> None:
        data = _bytes_of(self.buffers, bucket) if bucket.lies_at else payload
        pieces = list(checked_pieces(self._manifest, bucket.pieces, data))
        if again := [piece for piece, _ in pieces if piece.box in self._received]:
            raise ProtocolError(f"{self._manifest.describe(again[0].box)} was placed already")
        with self._changed:
            if self._is_complete:
                raise ProtocolError("a new bucket after the last one that was sealed")
            self._offered = pieces
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._offered is None or self._is_cancelled or self._failed is not None)
            self._offered = None
            self._check()
        self._received.update((piece.box, piece.digest) for piece, _ in pieces)
        self.extra_bytes = max(self.extra_bytes, len(payload))

    def place(self, put: Put, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._offered is not None or self._is_complete or self._is_cancelled,
                    timeout=max(0.0, until_s - time.monotonic()),
                )
                self._check()
                if (offered := self._offered) is None:
                    return
            self._put(put, offered)
            if time.monotonic() >= until_s:
                return

    def _put(self, put: Put, offered: Sequence[tuple[Piece, Bytes]]) -> None:
        failed: Exception | None = None
        try:
            for piece, data in offered:
                dtype = torch_dtype(self._manifest.tensors[piece.box.tensor].dtype)
                put(piece.box, typed(data, dtype).view(piece.box.sizes))
        except Exception as error:
            failed = error
            raise
        finally:
            with self._changed:
                self._offered, self._failed = None, failed
                self._changed.notify_all()

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        """Checks that exactly the needed pieces were placed. Each was compared with its digest before."""
        checked = check_received(manifest, self._received, pieces, between)
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        return checked

    def cancel(self) -> None:
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        self.cancel()
        self._received.clear()

    def _check(self) -> None:
        if self._failed is not None:
            raise CommitFailed(f"a bucket was not placed: {self._failed}") from self._failed
        if self._is_cancelled:
            raise VersionConflict("the transaction was dropped")


def _bytes_of(buffers: MappedSegments, bucket: Bucket) -> memoryview:
    """The bytes of a bucket, in the trainer's memory. Raises `TransportUnavailable` if this process can't map it."""
    place = decode_as(bucket.lies_at, SharedPlace)
    end = place.offset + place.nbytes
    if end > place.segment.nbytes:
        raise ProtocolError(f"a bucket at {place.offset} of {place.nbytes} bytes, in {place.segment.nbytes} bytes")
    return buffers.at(place.segment).tensor[place.offset : end].numpy().data


class StreamReceiver(Receiver):
    """Maps the trainer ranks' buffers, for as long as updates come."""

    def __init__(self) -> None:
        self.buffers = MappedSegments(writable=False, most=MAX_PEERS)
        self._landing = b""

    def check_probe(self, probe: bytes) -> None:
        """A trainer whose memory can't be mapped sends the bytes themselves."""
        self._landing = b""
        try:
            SharedSegment.attach(decode_as(probe, SegmentAddress), writable=False).close()
        except TransportUnavailable:
            return
        self._landing = REACHED

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> Staging:
        return StreamStaging(manifest, self.buffers, self._landing)

    def drop_kept(self) -> None:
        self.buffers.close()

    def close(self) -> None:
        self.drop_kept()


# --- the trainer's side ----------------------------------------------------------------------------------------------------


class SharedLane(Lane):
    """A lane whose buffers the worker maps: a bucket is packed once, and not sent."""

    def _make_buffers(self, config: Config) -> list[Buffer]:
        nbytes = config.bucket_bytes * config.buffers
        check_fits(nbytes, "streaming: buffers", "a smaller WEIGHTWIRE_BUCKET_BYTES takes less")
        self._segment = SharedSegment.create(nbytes)
        self._address = self._segment.address
        self._segment.keep_from_children()
        memory = self._segment.tensor.numpy()
        size = config.bucket_bytes
        return [Buffer(memory[i * size : (i + 1) * size], i * size) for i in range(config.buffers)]

    def _message(self, bucket: Bucket, buffer: Buffer, nbytes: int) -> tuple[Bucket, memoryview | None]:
        place = SharedPlace(self._address, buffer.offset, nbytes)
        return msgspec.structs.replace(bucket, lies_at=msgspec.msgpack.encode(place)), None

    def close(self) -> None:
        super().close()
        self.buffers.clear()
        self._segment.close()


class StreamSender(ZmqSender):
    """A lane to each worker: of shared memory on the worker's host, else of messages."""

    def __init__(self) -> None:
        super().__init__()
        self._probe = SHM.sender()

    def probe(self) -> bytes:
        return self._probe.probe()

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        """Every worker is sent its own: a bucket that is relayed would have to be held."""

    def close(self) -> None:
        super().close()
        self._probe.close()

    def _make_lane(self, target: Target) -> Lane:
        is_shared = target.landing == REACHED and target.boot_id == boot_id()
        return (SharedLane if is_shared else Lane)(target, self.config)


TRANSPORT = Transport(
    name="stream",
    summary="install='streaming': buckets that are written into the live parameters; 2 copies per byte on one host",
    preference=95,
    why_not=lambda: None,
    sender=StreamSender,
    receiver=StreamReceiver,
    copies_per_byte=2,  # trainer -> bucket -> parameter
    sends=True,
    streams=True,
)
