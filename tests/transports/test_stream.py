"""`stream`, the worker's half: a bucket is answered once it is in place, and what is wrong with it is said."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
import torch

from inference_plugin.transports.base import Staging
from inference_plugin.transports.segment import SharedSegment
from inference_plugin.transports.stream import SharedPlace, StreamReceiver
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    CommitFailed,
    DigestMismatch,
    ProtocolError,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import Bucket

MANIFEST = Manifest((TensorSpec("a", "uint8", (4,)), TensorSpec("b", "float32", (2,))))
BYTES = (bytes(range(4)), bytes(range(8)))
FAR_S = 60.0


def bucket(tensor: int, *, lies_at: bytes = b"", digest: int | None = None) -> Bucket:
    found = digest_bytes(BYTES[tensor]) if digest is None else digest
    return Bucket("policy", "t", 0, tensor, (Piece(MANIFEST.whole(tensor), found),), lies_at)


@pytest.fixture
def receiver() -> Iterator[StreamReceiver]:
    one = StreamReceiver()
    yield one
    one.close()


@pytest.fixture
def staging(receiver: StreamReceiver) -> Iterator[Staging]:
    one = receiver.open(MANIFEST, b"", [MANIFEST.whole(0), MANIFEST.whole(1)])
    yield one
    one.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def received(threads: ThreadPoolExecutor, staging: Staging, tensor: int, lies_at: bytes = b"") -> Future[None]:
    payload = b"" if lies_at else BYTES[tensor]
    return threads.submit(staging.receive, bucket(tensor, lies_at=lies_at), memoryview(payload))


def test_a_bucket_is_answered_once_it_is_in_place(staging: Staging, threads: ThreadPoolExecutor) -> None:
    placed: list[tuple[Box, list[float]]] = []
    first = received(threads, staging, 0)
    assert not first.done()
    while not first.done():
        staging.place(lambda box, tensor: placed.append((box, tensor.tolist())), 0.2)
    second = received(threads, staging, 1)
    while not second.done():
        staging.place(lambda box, tensor: placed.append((box, tensor.tolist())), 0.2)
    assert [box for box, _ in placed] == [MANIFEST.whole(0), MANIFEST.whole(1)]
    assert placed[0][1] == list(BYTES[0])
    assert placed[1][1] == torch.frombuffer(bytearray(BYTES[1]), dtype=torch.float32).tolist()
    pieces = [bucket(0).pieces[0], bucket(1).pieces[0]]
    assert staging.check(MANIFEST, pieces, lambda: None) == 12
    staging.place(lambda *_: pytest.fail("nothing is left"), FAR_S)  # returns at once
    with pytest.raises(ProtocolError, match="placed already"):
        staging.receive(bucket(0), memoryview(BYTES[0]))


def test_a_bucket_in_shared_memory_is_read_where_it_lies(staging: Staging, threads: ThreadPoolExecutor) -> None:
    memory = SharedSegment.create(4096)
    memory.tensor[100:104] = torch.tensor(list(BYTES[0]), dtype=torch.uint8)
    lies_at = msgspec.msgpack.encode(SharedPlace(memory.address, 100, 4))
    waiting = received(threads, staging, 0, lies_at)
    placed: list[list[float]] = []
    while not waiting.done():
        staging.place(lambda _, tensor: placed.append(tensor.tolist()), 0.2)
    assert placed == [list(BYTES[0])]
    memory.close()


def test_a_place_that_is_none_is_refused(staging: Staging) -> None:
    memory = SharedSegment.create(4096)
    beyond = msgspec.msgpack.encode(SharedPlace(memory.address, 4090, 40))
    with pytest.raises(ProtocolError, match="in 4096 bytes"):
        staging.receive(bucket(0, lies_at=beyond), memoryview(b""))
    memory.close()
    gone = msgspec.msgpack.encode(SharedPlace(msgspec.structs.replace(memory_address(), fd=999_999), 0, 4))
    with pytest.raises(TransportUnavailable, match="can't open"):
        staging.receive(bucket(0, lies_at=gone), memoryview(b""))
    with pytest.raises(ProtocolError, match="not a SharedPlace"):
        staging.receive(bucket(0, lies_at=b"garbage"), memoryview(b""))


def memory_address() -> object:
    memory = SharedSegment.create(4096)
    address = memory.address
    memory.close()
    return address


def test_bytes_that_differ_from_their_digest_reach_nobody(staging: Staging) -> None:
    with pytest.raises(DigestMismatch, match="is not what the trainer sent"):
        staging.receive(bucket(0, digest=1), memoryview(BYTES[0]))
    with pytest.raises(ProtocolError, match="a bucket of 3 bytes whose pieces take 4"):
        staging.receive(bucket(0), memoryview(BYTES[0][:3]))
    staging.place(lambda *_: pytest.fail("nothing is to be placed"), 0.01)


def test_whoever_sent_a_bucket_hears_that_it_could_not_be_placed(staging: Staging, threads: ThreadPoolExecutor) -> None:
    waiting = received(threads, staging, 0)

    def fails(box: Box, tensor: torch.Tensor) -> None:
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own"):
        staging.place(fails, FAR_S)
    with pytest.raises(CommitFailed, match="the engine's own"):
        waiting.result(FAR_S)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_who_waits_is_woken_when_the_transaction_is_dropped(
    staging: Staging, threads: ThreadPoolExecutor, end: str
) -> None:
    waiting = received(threads, staging, 0)
    threading.Timer(0.05, getattr(staging, end)).start()
    with pytest.raises(VersionConflict, match="dropped"):
        waiting.result(FAR_S)
    with pytest.raises(VersionConflict, match="dropped"):
        staging.place(lambda *_: None, FAR_S)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_seal_of_more_or_of_less_than_what_came_is_refused(
    staging: Staging, threads: ThreadPoolExecutor, missing: int
) -> None:
    waiting = received(threads, staging, 0)
    while not waiting.done():
        staging.place(lambda *_: None, 0.2)
    pieces = [] if missing else [bucket(0).pieces[0], bucket(1).pieces[0]]
    with pytest.raises(WeightwireError, match="did not arrive" if pieces else "was not sealed"):
        staging.check(MANIFEST, pieces, lambda: None)
