"""The asking side, against real sockets whose peers answer late, wrongly, twice or never."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from inference_plugin.net import addresses, channel
from inference_plugin.net.channel import Channel, Outgoing, fan_out, take_ready
from inference_plugin.net.listening import check_listen_address
from inference_plugin.wire import codec
from inference_plugin.wire.errors import AuthError, PeerLost, ProtocolError, SyncTimeout, VersionConflict
from inference_plugin.wire.messages import Begun, Body, Describe, Done, Envelope, Failed
from tests.support.rig import eventually, fork, gone, kill


class Peer:
    """The answering side, by hand. A ROUTER sees what a REP sees, and can answer late or twice."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.address = f"ipc://{path}/peer"
        self.socket.bind(self.address)

    def take(self) -> tuple[list[bytes], Envelope]:
        assert self.socket.poll(20_000), "nothing was asked"
        frames: list[bytes] = self.socket.recv_multipart()
        cut = frames.index(b"") + 1
        return frames[:cut], codec.decode(frames[cut])

    def answer(self, route: list[bytes], body: Body, seq: int) -> None:
        self.socket.send_multipart([*route, codec.encode(body, seq)])


@pytest.fixture
def peer(directory: Path) -> Iterator[Peer]:
    one = Peer(directory)
    yield one
    one.context.destroy(linger=0)


def rep_that_hangs(address: str, ready: str) -> None:
    import signal

    socket = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    Path(ready).touch()
    socket.recv()
    Path(ready + ".asked").touch()
    signal.pause()


def test_a_peer_that_answers_with_a_timeout_has_answered(peer: Peer) -> None:
    """A worker whose lease ran out says so; it must not be taken for one that says nothing."""
    with Channel(peer.address) as asking:
        asking.send(Describe())
        assert take_ready([asking], Done, timeout_s=0.01) == [] and asking.is_open
        route, envelope = peer.take()
        peer.answer(route, Failed(SyncTimeout("the trainer was silent").info()), envelope.seq)
        ((channel, reply),) = take_ready([asking], Done, timeout_s=60)
        assert channel is asking and isinstance(reply, SyncTimeout) and reply.message == "the trainer was silent"


def test_a_timeout_names_the_address_the_time_and_the_side(peer: Peer) -> None:
    asking = Channel(peer.address, side="worker", replica="r", rank=1, phase="seal")
    with asking, pytest.raises(SyncTimeout, match=r"no reply from ipc://.*/peer within 0\.051 s") as raised:
        asking.request(Describe(), Done, timeout_s=0.0512345)
    error = raised.value
    assert (error.side, error.replica, error.rank, error.phase) == ("worker", "r", 1, "seal")
    assert "which replicas answer" in error.hint


def test_an_address_where_nobody_listens_is_a_timeout_not_a_hang(directory: Path) -> None:
    with Channel(f"ipc://{directory}/nobody") as asking, pytest.raises(SyncTimeout):
        asking.request(Describe(), Done, timeout_s=0.05)


def test_after_a_timeout_the_same_channel_works_and_a_stale_reply_is_never_taken(peer: Peer) -> None:
    with Channel(peer.address) as asking:
        with pytest.raises(SyncTimeout):
            asking.request(Describe(), Done, timeout_s=0.01)
        late_route, late = peer.take()
        asking.send(Describe())
        route, asked = peer.take()
        peer.answer(late_route, Failed(VersionConflict("the answer to the first").info()), late.seq)
        peer.answer(route, Begun(already=True), asked.seq)
        assert asking.receive(Begun, timeout_s=20) == Begun(already=True)


def test_a_reply_with_another_requests_number_is_dropped_even_on_the_right_route(peer: Peer) -> None:
    with Channel(peer.address) as asking:
        asking.send(Describe())
        route, asked = peer.take()
        peer.answer(route, Done(), asked.seq - 1)
        with pytest.raises(SyncTimeout):
            asking.receive(Done, timeout_s=0.05)


def test_a_request_without_a_reply_is_sent_again_as_it_was(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "RESEND_S", 0.01)
    with Channel(peer.address) as asking:
        asking.send(Describe())
        with pytest.raises(SyncTimeout):
            asking.receive(Done, timeout_s=0.1)
        first, second = peer.take()[1], peer.take()[1]
        assert first == second
        assert asking.sent_messages >= 2


def test_a_peer_slower_than_the_first_resend_still_gets_its_reply_through(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the reply to the last sending counts, so the time between sendings must outgrow any peer's pace."""
    monkeypatch.setattr(channel, "RESEND_S", 0.001)
    ended = threading.Event()

    def answer_slowly() -> None:
        while not ended.is_set():
            if peer.socket.poll(10):
                route, asked = peer.take()
                ended.wait(0.02)
                peer.answer(route, Done(), asked.seq)

    answering = threading.Thread(target=answer_slowly)
    answering.start()
    try:
        with Channel(peer.address) as asking:
            assert asking.request(Describe(), Done, timeout_s=60) == Done()
    finally:
        ended.set()
        answering.join()


def test_the_peers_error_is_raised_here_with_its_class_and_fields(peer: Peer) -> None:
    with Channel(peer.address, side="worker", replica="here") as asking:
        asking.send(Describe())
        route, asked = peer.take()
        peer.answer(route, Failed(VersionConflict("too old", version=3, replica="there").info()), asked.seq)
        with pytest.raises(VersionConflict, match="too old") as raised:
            asking.receive(Done, timeout_s=20)
    assert (raised.value.version, raised.value.replica, raised.value.side) == (3, "there", "worker")


@pytest.mark.parametrize("frame", [b"", b"garbage", codec.encode(Begun(), 1)], ids=["empty", "garbage", "type"])
def test_a_wrong_reply_is_a_protocol_error_and_the_next_request_works(peer: Peer, frame: bytes) -> None:
    with Channel(peer.address) as asking:
        asking.send(Describe())
        route, _ = peer.take()
        peer.socket.send_multipart([*route, frame])
        with pytest.raises(ProtocolError):
            asking.receive(Done, timeout_s=20)
        asking.send(Describe())
        route, asked = peer.take()
        peer.answer(route, Done(), asked.seq)
        assert asking.receive(Done, timeout_s=20) == Done()


def test_receiving_what_was_not_asked_is_an_error_not_a_wait(peer: Peer) -> None:
    with Channel(peer.address) as asking, pytest.raises(ProtocolError, match="no request is open"):
        asking.receive(Done, timeout_s=60)


def test_a_peer_killed_while_it_owes_a_reply_is_noticed_at_once(directory: Path) -> None:
    address, ready = f"ipc://{directory}/p", str(directory / "ready")
    pid = fork("tests.wire.test_channel:rep_that_hangs", address=address, ready=ready)
    eventually(Path(ready).exists, "the peer's socket")
    with Channel(address, pid=pid, peer_boot_id=addresses.boot_id(), side="worker", rank=2) as asking:
        asking.send(Describe())
        eventually(Path(ready + ".asked").exists, "the request")
        assert not asking.peer_is_gone()
        kill(pid)
        with pytest.raises(PeerLost, match=r"the process behind ipc://.* is gone") as raised:
            asking.receive(Done, timeout_s=3600)  # the pidfd ends the wait, not the deadline
        assert (raised.value.side, raised.value.rank) == ("worker", 2)
        assert asking.peer_is_gone()


def test_a_peer_that_was_gone_before_is_noticed_at_once(directory: Path) -> None:
    pid = fork("tests.wire.test_addresses:sleep_for_ever")
    kill(pid)
    with Channel(f"ipc://{directory}/p", pid=pid, peer_boot_id=addresses.boot_id()) as asking, pytest.raises(PeerLost):
        asking.request(Describe(), Done, timeout_s=3600)


def test_a_pid_of_another_boot_is_not_watched(peer: Peer) -> None:
    with Channel(peer.address, pid=os.getpid(), peer_boot_id="another host") as asking:
        assert not asking.peer_is_gone()
        asking.send(Describe())
        route, asked = peer.take()
        peer.answer(route, Done(), asked.seq)
        assert asking.receive(Done, timeout_s=20) == Done()


def test_what_a_peer_said_before_it_died_counts(directory: Path) -> None:
    """Also where the asker sees the peer's end before its socket's own thread has read the reply: here both wait for it when it
    wakes."""
    for turn in range(20):
        said = directory / f"said{turn}"
        address = f"ipc://{directory}/p{turn}"
        answering = fork("tests.wire.test_channel:answers_then_dies", address=address, said=str(said))
        asking = fork("tests.wire.test_channel:asks", address=address, pid=answering, said=str(said))
        eventually(Path(f"{said}.asked").exists, "the request")
        os.kill(asking, signal.SIGSTOP)
        Path(f"{said}.go").touch()
        eventually(lambda pid=answering: gone(pid), "the end of the peer")
        os.kill(asking, signal.SIGCONT)
        eventually(said.exists, "the end of the question")
        assert said.read_text() == "Done()"


def answers_then_dies(address: str, said: str) -> None:
    context = zmq.Context()
    socket: Any = context.socket(zmq.REP)
    socket.bind(address)
    envelope = codec.decode(socket.recv())
    Path(f"{said}.asked").touch()
    eventually(Path(f"{said}.go").exists, "the word to go on")
    socket.send(codec.encode(Done(), envelope.seq))
    context.destroy(linger=10_000)


def asks(address: str, pid: int, said: str) -> None:
    with Channel(address, pid=pid, peer_boot_id=addresses.boot_id()) as asking:
        asking.send(Describe())
        try:
            heard = repr(asking.receive(Done, timeout_s=3600))
        except PeerLost as lost:
            heard = str(lost)
    Path(f"{said}.tmp").write_text(heard)
    Path(f"{said}.tmp").rename(said)


def test_a_fan_out_waits_once_for_all_and_puts_errors_in_their_places(directory: Path, peer: Peer) -> None:
    with Channel(peer.address) as good, Channel(f"ipc://{directory}/nobody", rank=1) as silent:
        good.send(Describe())
        route, _ = peer.take()
        peer.answer(route, Done(), 2)  # its reply to the request of the fan-out, ahead of it
        results = fan_out([Outgoing(silent, Describe()), Outgoing(good, Describe())], Done, timeout_s=0.2)
        assert isinstance(results[0], SyncTimeout) and results[0].rank == 1
        assert isinstance(results[1], SyncTimeout)  # an answer before the question is none
        _, asked = peer.take()
        assert asked.seq == 2


def test_a_process_has_as_many_channels_as_it_has_descriptors() -> None:
    """libzmq's own limit is 1023 sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        if hard < 8000:
            pytest.skip(f"a process may have {hard} descriptors only")
        Channel("ipc:///nowhere").close()
        before = len(list(Path("/proc/self/fd").iterdir()))
        with contextlib.ExitStack() as opened:
            for _ in range(1100):
                opened.enter_context(Channel("ipc:///nowhere"))
        eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, "the end of all sockets")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_closing_twice_is_harmless_and_leaves_no_pidfd(peer: Peer) -> None:
    def pidfds() -> int:
        found = 0
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found += "pidfd" in str(entry.readlink())
        return found

    before = pidfds()
    asking = Channel(peer.address, pid=os.getpid(), peer_boot_id=addresses.boot_id())
    assert pidfds() == before + 1
    asking.close()
    asking.close()
    assert pidfds() == before


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:5555",
        "tcp://0.0.0.0:1",
        "tcp://10.0.0.3:1",
        "tcp://[::]:1",
        "tcp://host:1",
    ],
)
def test_listening_where_others_can_reach_is_refused(address: str) -> None:
    with pytest.raises(AuthError, match="can be reached from outside this host") as raised:
        check_listen_address(address)
    assert "127.0.0.1" in raised.value.hint


@pytest.mark.parametrize(
    "address",
    [
        "inproc://x",
        "ws://127.0.0.1:1",
        "eth0",
        "127.0.0.1:5000",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:65536",
    ],
)
def test_what_is_no_address_is_refused_as_such(address: str) -> None:
    with pytest.raises(AuthError, match="is no address to listen on") as raised:
        check_listen_address(address)
    assert "tcp://HOST:PORT" in raised.value.hint


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "tcp://127.0.0.1:*", "tcp://127.0.0.1:65535", "tcp://[::1]:*"])
def test_listening_on_this_host_only_is_allowed(address: str) -> None:
    check_listen_address(address)


@pytest.mark.parametrize("address", ["tcp://127.evil.example.com:5555", "tcp://127.0.0.1.example.com:1"])
def test_a_name_that_only_looks_like_loopback_is_refused(address: str) -> None:
    with pytest.raises(AuthError):
        check_listen_address(address)
