"""No message ends a service thread: any field of any message with any value, at a live coordinator and at a live registry."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from inference_plugin.engines.coordinator import ReplicaCoordinator
from inference_plugin.net import addresses
from inference_plugin.wire import codec
from inference_plugin.wire.messages import (
    PROTOCOL_VERSION,
    Commit,
    Describe,
    Done,
    Envelope,
    Failed,
    GroupStatus,
    Leave,
    Pause,
    Register,
    RenewPause,
    ReplicaCard,
    Resume,
    Sender,
    Verify,
    WorkerCard,
)
from tests.support.rig import runtime
from tests.worker.test_coordinator import Control, committed, coordinator_of
from trainer_adapters.fleet.registry import Registry

REPLY_TIMEOUT_MS = 300_000
HERE = addresses.boot_id()


def card(replica: str = "plain-1-ab") -> ReplicaCard:
    status = GroupStatus("policy", "idle", 3, "t", "shm", "copy", "plan", "d", "", False)
    worker = WorkerCard(replica, 0, 0, 0, 1, HERE, "ipc:///nowhere", "cpu", 1, (status,))
    return ReplicaCard(replica, "plain", "0", "m", addresses.job_name(), 1, HERE, "ipc:///nowhere", (worker,))


TO_A_FRONT = [
    Describe(),
    Commit("policy", "t", 1),
    Verify("policy", 5.0),
    Pause(Sender("s", 1, HERE), 5.0),
    RenewPause("s"),
    Resume("s", ("weights",)),
]
TO_A_REGISTRY = [Register(card(), 5.0), Leave("plain-1-ab")]

DEEP = msgspec.Raw(b"\x91" * 50_000 + b"\xc0")
EXTREMES = [
    *(-1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -(2**31), -(2**63)),
    *(math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e300, 86400.0),
    *("", "\0", "../../etc/passwd", "*", "a" * (1 << 17), "é" * 300, "-1", "torn", "weights"),
    *(None, True, False, b"", b"\xff" * 4096, [], {}, [[]], ["weights"] * 4096, {"": {}}, DEEP),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a message, at any depth."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(message: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    whole = inner = copy.deepcopy(message)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


@st.composite
def extreme(draw: Any, bodies: list[Any]) -> bytes:
    """A valid message with one to three of its values replaced."""
    body = draw(st.sampled_from(bodies))
    message = msgspec.to_builtins(Envelope(PROTOCOL_VERSION, 7, body), builtin_types=(bytes,))
    for _ in range(draw(st.integers(1, 3))):
        among = sorted(places(message), key=repr)
        message = changed(message, draw(st.sampled_from(among)), draw(st.sampled_from(EXTREMES)))
    return msgspec.msgpack.encode(message)


def with_pid(pid: int) -> bytes:
    return codec.encode(Pause(Sender("s", pid, HERE), 5.0))


class Peer:
    """Sends what it likes."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def ask(self, *frames: bytes) -> Any:
        self._socket.send_multipart([b"", *frames])
        assert self._socket.poll(REPLY_TIMEOUT_MS), "no reply"
        return codec.decode(self._socket.recv_multipart()[1]).body  # a payload may follow

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[tuple[ReplicaCoordinator, Control, Peer]]:
    with pytest.MonkeyPatch.context() as patch, runtime(patch):
        control = Control(lambda operation: committed(operation, 1))
        one = coordinator_of(control, 1)
        peer = Peer(one.address)
        yield one, control, peer
        peer.close()
        one.close()


@pytest.fixture(scope="module")
def registry() -> Iterator[Peer]:
    with pytest.MonkeyPatch.context() as patch, runtime(patch):
        one = Registry()
        peer = Peer(one.address)
        yield peer
        peer.close()
        one.close()


MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(extreme([*TO_A_FRONT, *TO_A_REGISTRY]))
@example(with_pid(-1))
@example(with_pid(2**31))
@example(with_pid(2**63 - 1))
@example(codec.encode(Pause(Sender("s" * (1 << 19), 1, HERE), 0.0)))
@example(b"")
@example(b"\x91" * 100_000)
@example(b"\x81\xa1a" * 50_000)
def test_whatever_a_coordinator_is_sent_it_answers_and_goes_on(
    coordinator: tuple[ReplicaCoordinator, Control, Peer], message: bytes
) -> None:
    one, control, peer = coordinator
    peer.ask(message)
    described = peer.ask(codec.encode(Describe()))
    assert isinstance(described, ReplicaCard) and described.address == one.address
    assert control.escaped == []


@MANY
@given(extreme(TO_A_REGISTRY))
@example(codec.encode(Register(msgspec.structs.replace(card(), pid=-1), 5.0)))
@example(codec.encode(Register(msgspec.structs.replace(card(), pid=2**31), 5.0)))
def test_whatever_a_registry_is_sent_it_answers_and_goes_on(registry: Peer, message: bytes) -> None:
    registry.ask(message)
    assert isinstance(registry.ask(codec.encode(Register(card("plain-2-cd"), 0.0))), Done)


def test_a_registry_outlives_a_runtime_directory_that_can_t_be_read_and_listeners_that_fail(directory: Path) -> None:
    one = Registry()
    peer = Peer(one.address)

    def fails() -> None:
        raise RuntimeError("the test's listener")

    remove = one.on_change(fails)
    unreadable = addresses.runtime_dir() / "plain-3-ef.card"
    unreadable.mkdir()
    assert isinstance(peer.ask(codec.encode(Register(card("plain-2-cd"), 0.0))), Failed)
    remove()
    unreadable.rmdir()
    assert isinstance(peer.ask(codec.encode(Register(card("plain-2-cd"), 0.0))), Done)
    peer.close()
    one.close()


@pytest.mark.parametrize("frames", [(), (b"x", b"y"), (b"",) * 300])
def test_frames_that_are_no_message_get_an_error(
    coordinator: tuple[ReplicaCoordinator, Control, Peer], frames: tuple[bytes, ...]
) -> None:
    _, _, peer = coordinator
    assert isinstance(peer.ask(*frames), Failed)
    assert isinstance(peer.ask(codec.encode(Describe())), ReplicaCard)
