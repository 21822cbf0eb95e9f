"""The worker's socket: one reply per request in every branch, whatever a peer sends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_plugin.net.channel import take_ready
from inference_plugin.wire import codec
from inference_plugin.wire.errors import AuthError, ProtocolError, WeightwireError
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import (
    PROTOCOL_VERSION,
    Begun,
    Body,
    Bucket,
    Commit,
    Describe,
    Done,
    Failed,
    Go,
    GroupOpened,
    OpenGroup,
    Renew,
    Seal,
    Sealed,
    WorkerCard,
)
from inference_plugin.worker.server import WorkerServer
from tests.support.rig import eventually
from tests.support.worker import Worker
from tests.worker.driver import Driver, weights
from tests.worker.test_groups import maps


@pytest.fixture
def raw(worker: Worker) -> Iterator[Any]:
    """A bare REQ socket: it can neither send twice nor receive twice, so every exchange proves one reply."""
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(worker.address)
    yield socket
    context.destroy(linger=0)


def exchange(raw: Any, *frames: bytes) -> Any:
    raw.send_multipart(list(frames))
    (reply,) = raw.recv_multipart()
    return codec.decode(reply)


def failure(raw: Any, *frames: bytes) -> WeightwireError:
    envelope = exchange(raw, *frames)
    assert isinstance(envelope.body, Failed)
    error = WeightwireError.of(envelope.body.error)
    assert (error.side, error.replica, error.rank) == ("worker", "replica", 0)
    return error


def test_it_tells_who_it_is_and_echoes_the_requests_number(worker: Worker, raw: Any) -> None:
    envelope = exchange(raw, codec.encode(Describe(), 41))
    assert envelope.seq == 41
    assert envelope.body == worker.card()
    assert isinstance(envelope.body, WorkerCard) and envelope.body.protocol == PROTOCOL_VERSION


def test_status_shows_every_group_with_state_version_and_terms(worker: Worker, trainer: Driver) -> None:
    assert trainer.describe().groups == ()
    trainer.open()
    trainer.begin("t1", 4)
    (status,) = trainer.describe().groups
    assert (status.group, status.state, status.version, status.txn) == ("policy", "receiving", None, "t1")
    assert (status.transport, status.install, status.mechanism) == ("shm", "copy", "plan")
    trainer.write(weights(1))
    sealed = trainer.seal_fully("t1")
    worker.commit("t1", 4)
    (status,) = trainer.describe().groups
    assert (status.state, status.version, status.digest, status.txn) == ("idle", 4, sealed.digest, "")


def test_garbage_of_every_kind_is_answered_and_the_socket_goes_on(worker: Worker, raw: Any) -> None:
    describe = codec.encode(Describe(), 1)
    bad: dict[str, tuple[bytes, ...]] = {
        "not a message of this protocol": (b"garbage",),
        "not a message": (b"",),
        "the peer speaks protocol 99": (
            msgspec.msgpack.encode({"protocol": 99, "seq": 1, "body": {"type": "describe"}}),
        ),
        "a message of 3 frames": (describe, b"", b""),
        "a Describe takes no payload frame": (describe, b"payload"),
        "a worker takes no Commit": (codec.encode(Commit("policy", "t", 1)),),
        "a worker takes no Begun": (codec.encode(Begun()),),
        "a worker takes no Go": (codec.encode(Go("t", (), 1.0)),),
        "a bucket without its payload frame": (codec.encode(Bucket("policy", "t", 0, 0, ())),),
        "no weight-update group is named": (codec.encode(Renew("policy", "t")),),
        "Invalid value": (
            msgspec.msgpack.encode({"protocol": PROTOCOL_VERSION, "seq": 1, "body": {"type": "explode"}}),
        ),
    }
    for text, frames in bad.items():
        error = failure(raw, *frames)
        assert isinstance(error, ProtocolError) and text in error.message, (text, error)
        assert exchange(raw, describe).body == worker.card()


def test_random_frames_get_exactly_one_reply_each(worker: Worker, raw: Any) -> None:
    @given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def answered(frames: list[bytes]) -> None:
        assert isinstance(exchange(raw, *frames).body, Failed)

    answered()
    assert isinstance(exchange(raw, codec.encode(Describe())).body, WorkerCard)


def test_a_bug_in_a_request_is_answered_too_and_the_thread_lives(worker: Worker, trainer: Driver, raw: Any) -> None:
    trainer.open()
    for step in ("discard", "open"):
        worker.installer.fail[step] = ZeroDivisionError("a bug of ours")
    trainer.begin("t1", 1)
    with pytest.raises(WeightwireError, match="ZeroDivisionError: a bug of ours") as raised:
        trainer.abort("t1")
    assert (raised.value.side, raised.value.rank) == ("worker", 0)
    with pytest.raises(WeightwireError, match="ZeroDivisionError"):
        trainer.open(install="standby")
    assert isinstance(exchange(raw, codec.encode(Describe())).body, WorkerCard)


def test_an_oversized_message_closes_its_senders_connection_and_nobody_elses(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 1 << 16)
    worker = Worker(f"ipc://{directory}/small")
    context = zmq.Context()
    rude = context.socket(zmq.REQ)
    monitor = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rude.connect(worker.address)
    with worker.channel() as polite:
        rude.send(bytes(1 << 17))
        assert monitor.poll(60_000), "the connection was not closed"
        assert polite.request(Describe(), WorkerCard, timeout_s=60) == worker.card()
    context.destroy(linger=0)
    worker.close()


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.PUSH, zmq.PUB, zmq.PAIR], ids=["DEALER", "PUSH", "PUB", "PAIR"])
def test_a_peer_that_is_no_req_stops_nobody_and_neither_leases_nor_closing(
    worker: Worker, trainer: Driver, kind: int
) -> None:
    context = zmq.Context()
    socket = context.socket(kind)
    socket.connect(worker.address)
    trainer.open()
    trainer.begin("t1", 1, lease_s=0.2)
    if kind == zmq.DEALER:
        for _ in range(3):
            socket.send(b"no envelope")  # nobody waits for an answer to it
    eventually(lambda: worker.status().state == "idle", "the end of the lease: the thread is not stuck in a receive")
    assert trainer.describe() == worker.card()
    worker.close()
    context.destroy(linger=0)


def test_a_dealer_with_an_envelope_is_served_like_a_req(worker: Worker) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(worker.address)
    for seq in (1, 2, 3):
        socket.send_multipart([b"", codec.encode(Describe(), seq)])
    seqs = []
    for _ in range(3):
        assert socket.poll(60_000)
        empty, reply = socket.recv_multipart()
        seqs.append(codec.decode(reply).seq)
        assert empty == b""
    assert seqs == [1, 2, 3]
    assert not socket.poll(0)
    context.destroy(linger=0)


def test_a_dealer_gets_an_answer_to_each_of_its_requests_also_to_those_that_take_time(worker: Worker) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(worker.address)
    manifest = Manifest((TensorSpec("w", "int8", (4,)),))
    requests: list[Body] = [OpenGroup("policy", manifest, "zmq"), Describe(), OpenGroup("critic", manifest, "zmq")]
    for seq, request in enumerate(requests):
        socket.send_multipart([b"", codec.encode(request, seq)])
    replies = {}
    for _ in requests:
        assert socket.poll(60_000)
        envelope = codec.decode(socket.recv_multipart()[1])
        replies[envelope.seq] = type(envelope.body)
    assert replies == {0: GroupOpened, 1: WorkerCard, 2: GroupOpened}
    context.destroy(linger=0)


def test_a_lost_reply_is_asked_for_again_and_the_request_applied_once(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    trainer.seal_fully("t1")
    trainer.channel.close()  # whatever was on its way back is lost
    again = Driver(worker.address)
    again.segment, again.pieces = trainer.segment, trainer.pieces
    assert again.seal("t1").done
    assert worker.installer.calls.count("prepare") == 1
    again.close()


def test_a_seal_that_waits_for_its_answer_keeps_nobody_else_waiting(worker: Worker, trainer: Driver) -> None:
    trainer.open()
    trainer.begin("t1", 1)
    trainer.write(weights(1))
    worker.installer.gate.clear()
    with worker.channel() as sealing:
        sealing.send(Seal("policy", "t1", trainer.digest(trainer.pieces), trainer.pieces, 5))
        eventually(lambda: "prepare" in worker.installer.calls, "the seal's work")
        assert trainer.renew("t1") == Done()
        assert take_ready([sealing], Sealed, timeout_s=0) == []
        worker.installer.gate.set()
        assert sealing.receive(Sealed, timeout_s=60).done


def test_the_socket_lies_where_only_its_user_can_come(worker: Worker, directory: Path) -> None:
    from inference_plugin.net import addresses

    address = addresses.ipc_address("r", "0")
    other = Worker(address)
    path = Path(address.removeprefix("ipc://"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    other.close()


def test_tcp_on_loopback_gets_a_free_port_and_works(directory: Path) -> None:
    one, two = Worker("tcp://127.0.0.1:*"), Worker("tcp://127.0.0.1:*")
    assert one.address != two.address
    for worker in (one, two):
        with worker.channel() as channel:
            assert channel.request(Describe(), WorkerCard, timeout_s=60).address == worker.address
        worker.close()


def test_listening_beyond_this_host_is_refused_before_anything_is_bound() -> None:
    from inference_plugin.worker.groups import GroupTable

    for address in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*"):
        with pytest.raises(AuthError):
            WorkerServer(GroupTable("r", 0, lambda _: None), address, lambda: None, {})  # type: ignore[arg-type, return-value]


def test_closing_twice_ends_the_thread_frees_the_groups_and_answers_nobody(directory: Path) -> None:
    import threading

    before = maps()
    worker = Worker(f"ipc://{directory}/w")
    trainer = Driver(worker.address)
    trainer.open()
    trainer.update("t1", 1, weights(1))
    worker.commit("t1", 1)
    trainer.begin("t2", 2)
    worker.close()
    worker.close()
    assert not any(thread.name == "weightwire-rep" for thread in threading.enumerate())
    assert worker.installer.calls[-1] == "close"
    assert worker.table.statuses() == ()
    trainer.close()
    assert maps() == before


def test_a_server_that_was_never_started_can_be_closed(directory: Path) -> None:
    from inference_plugin.worker.groups import GroupTable

    server = WorkerServer(GroupTable("r", 0, lambda _: None), f"ipc://{directory}/x", lambda: None, {})  # type: ignore[arg-type, return-value]
    server.close()
    server.close()
    assert os.getpid()


def test_a_peer_that_leaves_before_its_reply_does_no_harm(worker: Worker, trainer: Driver) -> None:
    for _ in range(20):
        context = zmq.Context()
        socket = context.socket(zmq.REQ)
        socket.connect(worker.address)
        socket.send(codec.encode(Describe()))
        context.destroy(linger=0)
    assert trainer.describe() == worker.card()
    assert trainer.abort("nothing") == Done()
