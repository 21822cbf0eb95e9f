"""Workers that pass buckets on, over real sockets: bit for bit, from the middle, and with relays that lie or hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq as libzmq

from inference_plugin.transports.base import Delivery, WriteStats
from inference_plugin.transports.bucket_staging import BucketReceiver
from inference_plugin.transports.relay import RelayTerms
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire import codec
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import AuthError, DigestMismatch, PeerLost, ProtocolError, VersionConflict
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    Body,
    Bucket,
    Done,
    Failed,
    GroupOpened,
    Hop,
    OpenGroup,
    Relay,
    Relaying,
    Sealed,
    Sender,
)
from tests.support.rig import eventually
from tests.support.worker import KeepingInstaller, Worker
from tests.transports.cases import (
    CASES,
    any_bits,
    assert_equal_bytes,
    block_slices,
    column_slices,
    manifest_for,
    whole_slices,
)

FAR_S = 3600.0
CHAIN = msgspec.msgpack.encode(RelayTerms(1, 10.0))


@pytest.fixture
def make(directory: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def made(manifest: Manifest, *, needs: tuple[Box, ...] | None = None, segment: bytes = CHAIN) -> Worker:
        worker = Worker(f"ipc://{directory}/{len(workers)}", lambda _: KeepingInstaller(needs=needs))
        workers.append(worker)
        ask(worker, OpenGroup("policy", manifest, "zmq"), GroupOpened)
        ask(worker, Begin("policy", "t", 1, Sender("s"), FAR_S, manifest.fingerprint, segment), Begun)
        return worker

    yield made
    for worker in workers:
        worker.close()


def ask(worker: Worker, body: Body, kind: Any, payload: bytes | None = None) -> Any:
    with worker.channel() as channel:
        return channel.request(body, kind, timeout_s=60, payload=payload)


def seal(worker: Worker, pieces: list[Piece]) -> Sealed:
    while not (sealed := ask(worker, worker.seal("t", pieces), Sealed)).done:
        pass
    return sealed  # type: ignore[no-any-return]


def write(
    manifest: Manifest, slices: Any, workers: list[Worker], degree: int, needs: tuple[Box, ...] | None = None
) -> tuple[list[Piece], WriteStats]:
    sender = ZmqSender()
    segment = msgspec.msgpack.encode(RelayTerms(degree, 10.0)) if degree else b""
    targets = [worker.target(manifest, needs) for worker in workers]
    try:
        return sender.write(Delivery("t", "policy", 0, manifest, segment, slices, targets, time.monotonic() + FAR_S))
    finally:
        sender.close()


def hop(address: str) -> Hop:
    return Hop("r", 0, address, 0, "")


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("slices", [whole_slices, column_slices, block_slices], ids=["whole", "columns", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_passed_on_is_installed_bit_for_bit(
    make: Callable[..., Worker], case: str, slices: Any, degree: int
) -> None:
    tensors = CASES[case]()
    manifest = manifest_for(tensors)
    workers = [make(manifest) for _ in range(5)]
    pieces, stats = write(manifest, slices(tensors), workers, degree)
    assert stats.sent_bytes == degree * manifest.nbytes
    for worker in workers:
        seal(worker, pieces)
        worker.commit("t", 1)
        assert_equal_bytes(worker.installer.installed, tensors)


def test_a_piece_of_which_a_worker_needs_a_part_goes_on_whole(make: Callable[..., Worker]) -> None:
    tensors = {"a": any_bits(torch.float32, 8, 6), "b": any_bits(torch.int8, 5)}
    manifest = manifest_for(tensors)
    need = (Box(0, (2, 1), (4, 3)),)
    workers = [make(manifest, needs=need) for _ in range(3)]
    pieces, _ = write(manifest, whole_slices(tensors), workers, 1, need)
    for worker in workers:
        seal(worker, pieces)
        worker.commit("t", 1)
        held = worker.installer.installed["a"][2:6, 1:4].view(torch.int32)
        assert torch.equal(held, tensors["a"][2:6, 1:4].contiguous().view(torch.int32))


@pytest.mark.parametrize("slices", [whole_slices, column_slices, block_slices], ids=["whole", "columns", "blocks"])
def test_who_is_fed_late_gets_the_first_buckets_from_the_staging(
    make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, slices: Any
) -> None:
    config = Config()
    msgspec.structs.force_setattr(config, "bucket_bytes", 1000)
    monkeypatch.setattr(ZmqSender, "config", config)
    tensors = {f"t{i}": any_bits(torch.uint8, 10, 48, seed=i) for i in range(12)}
    manifest = manifest_for(tensors)
    first, late = make(manifest), make(manifest)
    pieces, stats = write(manifest, slices(tensors), [first], 1)
    assert stats.messages > 4
    assert ask(first, Relay("policy", "t", (hop(late.address),), 1), Relaying) == Relaying({0: stats.messages})
    seal(late, pieces)
    late.commit("t", 1)
    assert_equal_bytes(late.installer.installed, tensors)


class Child:
    """A worker's socket that the test answers for."""

    def __init__(self, directory: Path) -> None:
        self.context = libzmq.Context()
        self.socket = self.context.socket(libzmq.REP)
        self.address = f"ipc://{directory}/child"
        self.socket.bind(self.address)

    def take(self) -> Any:
        assert self.socket.poll(60_000), "nothing came"
        envelope = codec.decode(self.socket.recv_multipart()[0])
        self._seq = envelope.seq
        return envelope.body

    def answer(self, body: Body) -> None:
        self.socket.send(codec.encode(body, self._seq))


@pytest.fixture
def child(directory: Path) -> Iterator[Child]:
    peer = Child(directory)
    yield peer
    peer.context.destroy(linger=0)


def buckets(worker: Worker, tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """One bucket for each tensor."""
    pieces = []
    for i, tensor in enumerate(tensors.values()):
        data = tensor.numpy().tobytes()
        pieces.append(Piece(Box(i, (0,), (len(data),)), digest_bytes(data)))
        ask(worker, Bucket("policy", "t", 0, i, (pieces[-1],)), Done, data)
    return pieces


def test_what_a_child_has_from_somebody_else_is_not_sent_again(make: Callable[..., Worker], child: Child) -> None:
    tensors = {f"t{i}": any_bits(torch.int8, 9, seed=i) for i in range(5)}
    worker = make(manifest_for(tensors))
    buckets(worker, tensors)
    below = (hop("ipc:///nowhere"),)
    ask(worker, Relay("policy", "t", (hop(child.address), *below), 1), Relaying)
    assert child.take() == Relay("policy", "t", below, 1)
    child.answer(Relaying({0: 3}))
    for seq in (3, 4):
        assert child.take().seq == seq
        child.answer(Done())
    assert child.take() == Relay("policy", "t", below, 1)  # is it still there?


def test_the_memory_is_given_back_when_nobody_is_fed_from_it_any_more(
    make: Callable[..., Worker], child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(BucketReceiver, "take_back", lambda _, memory: given.append(memory))
    tensors = {"a": any_bits(torch.int8, 9)}
    worker = make(manifest_for(tensors))
    buckets(worker, tensors)
    ask(worker, Relay("policy", "t", (hop(child.address),), 1), Relaying)
    child.take()
    ask(worker, Abort("policy", "t", "the test says so"), Done)
    assert given == []
    child.answer(Failed(VersionConflict("dropped here too").info()))
    eventually(lambda: given, "the memory")


def test_a_relay_that_sends_other_bytes_is_found_at_the_worker_by_the_trainers_digest(
    make: Callable[..., Worker],
) -> None:
    tensors = {"a": any_bits(torch.int8, 9), "b": any_bits(torch.int8, 9, seed=1)}
    worker = make(manifest_for(tensors))
    data = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
    pieces = [Piece(Box(i, (0,), (9,)), digest_bytes(one)) for i, one in enumerate(data.values())]
    ask(worker, Bucket("policy", "t", 0, 0, (pieces[0],)), Done, data["a"])
    with pytest.raises(DigestMismatch, match=r"b\[0:9\] is not what the trainer sent"):
        ask(worker, Bucket("policy", "t", 0, 1, (pieces[1],)), Done, bytes(9))
    with pytest.raises(DigestMismatch, match=r"b\[0:9\] is not what the trainer sent"):
        seal(worker, pieces)


def test_other_bytes_with_a_digest_of_their_own_are_found_at_the_seal(make: Callable[..., Worker]) -> None:
    tensors = {"a": any_bits(torch.int8, 9)}
    worker = make(manifest_for(tensors))
    (piece,) = [Piece(Box(0, (0,), (9,)), digest_bytes(tensors["a"].numpy().tobytes()))]
    ask(worker, Bucket("policy", "t", 0, 0, (Piece(piece.box, digest_bytes(bytes(9))),)), Done, bytes(9))
    with pytest.raises(DigestMismatch, match=r"a\[0:9\] is not what the trainer sealed"):
        seal(worker, [piece])


def test_a_seal_waits_for_buckets_that_are_under_way_and_takes_none_after_the_last(make: Callable[..., Worker]) -> None:
    tensors = {"a": any_bits(torch.int8, 9)}
    worker = make(manifest_for(tensors))
    data = tensors["a"].numpy().tobytes()
    piece = Piece(Box(0, (0,), (9,)), digest_bytes(data))
    request = worker.seal("t", [piece], 0.0)
    assert not ask(worker, request, Sealed).done
    ask(worker, Bucket("policy", "t", 0, 0, (piece,)), Done, data)
    seal(worker, [piece])
    with pytest.raises(ProtocolError, match="a new bucket after the last one"):
        ask(worker, Bucket("policy", "t", 0, 1, (piece,)), Done, data)
    worker.commit("t", 1)
    assert_equal_bytes(worker.installer.installed, tensors)
    assert ask(worker, Relay("policy", "t", (), 1), Relaying) == Relaying()


def test_workers_that_nobody_feeds_say_so_together_and_what_to_do(make: Callable[..., Worker]) -> None:
    """One asks the other whether it is there: that is no food."""
    tensors = {"a": any_bits(torch.int8, 9), "b": any_bits(torch.int8, 9, seed=1)}
    segment = msgspec.msgpack.encode(RelayTerms(1, 0.1))
    first, second = (make(manifest_for(tensors), segment=segment) for _ in range(2))
    pieces = [Piece(Box(i, (0,), (9,)), digest_bytes(t.numpy().tobytes())) for i, t in enumerate(tensors.values())]
    ask(first, Bucket("policy", "t", 0, 0, (pieces[0],)), Done, tensors["a"].numpy().tobytes())
    ask(first, Relay("policy", "t", (hop(second.address),), 1), Relaying)
    nobody = Relay("policy", "t", (), 1)
    eventually(lambda: ask(second, nobody, Relaying) == Relaying({0: 1}), "what the first one passes on")
    for worker in (second, first):
        with pytest.raises(PeerLost, match="no other worker passes this update on to this one: 1 of 2") as raised:
            seal(worker, pieces)
        assert (raised.value.phase, raised.value.version) == ("seal", 1) and "fan_out='direct'" in raised.value.hint


def test_nothing_is_passed_on_where_that_was_not_agreed_and_nothing_unprotected_to_other_hosts(
    make: Callable[..., Worker],
) -> None:
    manifest = manifest_for({"a": any_bits(torch.int8, 9)})
    with pytest.raises(ProtocolError, match="no worker relays bytes in this update"):
        ask(make(manifest, segment=b""), Relay("policy", "t", (hop("ipc:///nowhere"),), 1), Relaying)
    with pytest.raises(AuthError, match="without authentication"):
        ask(make(manifest), Relay("policy", "t", (hop("tcp://10.0.0.1:7"),), 1), Relaying)
    with pytest.raises(ProtocolError, match="not a RelayTerms"):
        make(manifest, segment=msgspec.msgpack.encode(RelayTerms(65, 10.0)))


def test_workers_that_ask_each_other_do_not_outlive_their_trainer(make: Callable[..., Worker]) -> None:
    worker = make(manifest_for({"a": any_bits(torch.int8, 9)}))
    transaction = worker.table.named("policy").group.transaction
    assert transaction is not None
    before_s = transaction.expires_at_s
    ask(worker, Relay("policy", "t", (), 1), Relaying)
    assert transaction.expires_at_s == before_s
