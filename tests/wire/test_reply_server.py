"""The answering side of every socket: each request gets one reply, whatever the service, the peer or a process does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import zmq

from inference_plugin.net.channel import Channel, take_ready
from inference_plugin.net.listening import Listener
from inference_plugin.net.processes import ProcessId, start_ticks
from inference_plugin.net.reply_server import Asker, ReplyServer, Service
from inference_plugin.wire import codec
from inference_plugin.wire.errors import ConfigError, ProtocolError, WeightwireError
from inference_plugin.wire.messages import (
    Abort,
    Body,
    ClearTasks,
    CloseGroup,
    Describe,
    Done,
    Pull,
    Pulled,
    Release,
    Renew,
    Sealed,
)
from tests.support.rig import eventually
from tests.support.small_disk import small_disk, without_inodes


class Recorder(Service):
    """Answers `Describe` at once and `Renew` twice; keeps others' askers; raises at an `Abort`."""

    def __init__(self) -> None:
        self.waiting: list[Asker] = []
        self.watched: set[ProcessId] = set()
        self.ended: set[ProcessId] = set()
        self.fails: list[Exception] = []
        self.looks = 0

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body | None:
        if isinstance(body, Abort):
            raise ZeroDivisionError("a bug of ours")
        if isinstance(body, Renew):
            asker.reply(Done())
            return Sealed(done=False)
        if isinstance(body, Describe):
            return Done()
        if isinstance(body, Pull):
            asker.reply(Pulled(), bytes(range(256)) * 1000)
            return None
        if isinstance(body, ClearTasks):
            asker.reply(Done(), b"x")
            return None
        self.waiting.append(asker)
        return None

    def processes(self) -> Collection[ProcessId]:
        return self.watched

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        self.looks += 1
        self.ended |= set(ended)
        self.watched -= set(ended)
        if self.fails:
            raise self.fails.pop()


@pytest.fixture
def service() -> Recorder:
    return Recorder()


@pytest.fixture
def server(service: Recorder, tmp_path: Path) -> Iterator[ReplyServer]:
    where = {"side": "worker", "rank": 3}
    addresses = [f"ipc://{tmp_path}/one", "tcp://127.0.0.1:*"]
    one = ReplyServer(service, addresses, name="weightwire-test", where=where, max_bytes=1 << 20, most_open=2)
    one.start()
    yield one
    one.close()
    one.close()
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(tmp_path / "one"))
    assert not any(thread.name == "weightwire-test" for thread in threading.enumerate())


def test_each_address_is_served_and_a_second_reply_goes_nowhere(server: ReplyServer) -> None:
    for address in server.addresses:
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(address)
            for seq in (1, 2, 3):
                asking.send_multipart([b"", codec.encode(Renew("g", "t"), seq)])
            replies = []
            for _ in range(3):
                assert asking.poll(60_000)
                replies.append(codec.decode(asking.recv_multipart()[1]))
            assert [(reply.seq, reply.body) for reply in replies] == [(1, Done()), (2, Done()), (3, Done())]
            assert not asking.poll(50)


def test_a_reply_that_takes_time_comes_from_any_thread_and_keeps_nobody_waiting(
    server: ReplyServer, service: Recorder
) -> None:
    with Channel(server.addresses[0]) as slow, Channel(server.addresses[0]) as other:
        slow.send(Release("g"))
        eventually(lambda: service.waiting, "the slow request")
        assert other.request(Describe(), Done, timeout_s=60) == Done()
        assert take_ready([slow], Done, timeout_s=0) == []
        thread = threading.Thread(target=service.waiting[0].reply, args=(Done(),))
        thread.start()
        assert slow.receive(Done, timeout_s=60) == Done()
        thread.join()


def test_one_peers_unanswered_requests_are_limited_and_anothers_are_not(server: ReplyServer, service: Recorder) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy, Channel(server.addresses[0]) as other:
        greedy.linger = 0
        greedy.connect(server.addresses[0])
        for seq in (1, 2, 3):
            greedy.send_multipart([b"", codec.encode(CloseGroup("g"), seq)])
        assert greedy.poll(60_000)
        refused = codec.decode(greedy.recv_multipart()[1])
        assert refused.seq == 3 and "2 requests of this peer are not answered yet" in str(refused.body)
        assert other.request(Describe(), Done, timeout_s=60) == Done()
        for asker in service.waiting:
            asker.reply(Done())
        assert [codec.decode(greedy.recv_multipart()[1]).seq for _ in range(2)] == [1, 2]
        greedy.send_multipart([b"", codec.encode(Describe(), 4)])
        assert codec.decode(greedy.recv_multipart()[1]).seq == 4


def test_whatever_fails_is_the_reply_with_the_servers_fields_and_the_thread_goes_on(
    server: ReplyServer, service: Recorder
) -> None:
    with Channel(server.addresses[1]) as asking:
        with pytest.raises(WeightwireError, match="ZeroDivisionError: a bug of ours") as raised:
            asking.request(Abort("g", "t"), Done, timeout_s=60)
        assert (raised.value.side, raised.value.rank) == ("worker", 3)
        with pytest.raises(ProtocolError, match="a Describe takes no payload frame"):
            asking.request(Describe(), Done, timeout_s=60, payload=b"x")
        service.fails.append(RuntimeError("the service fails"))
        assert asking.request(Describe(), Done, timeout_s=60) == Done()
        eventually(lambda: not service.fails, "the failure")
        assert asking.request(Describe(), Done, timeout_s=60) == Done()


def test_a_reply_carries_a_payload_where_its_message_takes_one(server: ReplyServer) -> None:
    for address in server.addresses:
        with Channel(address) as asking:
            assert asking.request(Pull(()), Pulled, timeout_s=60) == Pulled()
            assert asking.payload == bytes(range(256)) * 1000
            with pytest.raises(ProtocolError, match="a Done takes no payload frame"):
                asking.request(ClearTasks("s", 0, ()), Done, timeout_s=60)
            assert asking.payload is None
            assert asking.request(Describe(), Done, timeout_s=60) == Done()


def test_the_end_of_a_watched_process_is_told_at_once(server: ReplyServer, service: Recorder) -> None:
    child = subprocess.Popen(["sleep", "600"])
    process = child.pid, start_ticks(child.pid)
    service.watched.add(process)
    server.wake()
    eventually(lambda: process in server.processes, "the watch")
    os.kill(child.pid, signal.SIGKILL)
    eventually(lambda: service.ended == {process}, "the end")
    child.wait()


def test_a_socket_file_that_was_removed_is_made_again_and_the_service_is_told(
    server: ReplyServer, service: Recorder
) -> None:
    mended = threading.Event()
    service.mended = mended.set  # type: ignore[method-assign]
    path = Path(server.addresses[0].removeprefix("ipc://"))
    path.unlink()
    assert mended.wait(600) and path.exists()
    with Channel(server.addresses[0]) as asking:
        assert asking.request(Describe(), Done, timeout_s=60) == Done()


def test_a_socket_is_made_again_while_libzmq_still_holds_the_monitor_of_the_old_one(tmp_path: Path) -> None:
    listener = Listener(zmq.ROUTER, f"ipc://{tmp_path}/one", max_bytes=1 << 20)
    late = listener.context.socket(zmq.PAIR)
    try:
        late.bind(f"inproc://monitor.s-{listener.socket.FD}")  # pyzmq's own address, which libzmq frees some time later
        (tmp_path / "one").unlink()
        listener.mend_at_s = 0.0
        assert listener.mend() and (tmp_path / "one").exists()
    finally:
        late.close(0)
        listener.close()


def test_a_directory_in_which_no_socket_may_be_made_is_an_error_that_says_what_to_set() -> None:
    """There is nothing to wait for."""
    with pytest.raises(ConfigError, match="no socket can be made at ipc:///sys/one") as raised:
        Listener(zmq.ROUTER, "ipc:///sys/one", max_bytes=1 << 20, waits_for_room=True)
    assert raised.value.hint == "set WEIGHTWIRE_RUNTIME_DIR to another directory"


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_server_that_waits_for_room_is_reached_once_there_is_some(has_directory: bool, service: Recorder) -> None:
    """Also a peer that connected before."""
    with small_disk() as path:
        if has_directory:
            (path / "job").mkdir()
        address = f"ipc://{path}/job/s"
        with without_inodes(path):
            server = ReplyServer(
                service, [address], name="weightwire-t", where={}, max_bytes=1 << 20, waits_for_room=True
            )
            server.start()
            early = Channel(address)
            early.send(Describe())
            assert server.addresses == [address]
        try:
            assert early.receive(Done, timeout_s=60) == Done()
            with Channel(address) as late:
                assert late.request(Describe(), Done, timeout_s=60) == Done()
        finally:
            early.close()
            server.close()


def test_a_closed_server_takes_late_replies_and_touches_no_descriptor(tmp_path: Path) -> None:
    service = Recorder()
    server = ReplyServer(service, [f"ipc://{tmp_path}/s"], name="weightwire-late", where={}, max_bytes=1 << 20)
    server.start()
    with Channel(server.addresses[0]) as asking:
        asking.send(Release("g"))
        eventually(lambda: service.waiting, "the request")
        server.close()
        service.waiting[0].reply(Done())
        service.waiting[0].fail(ProtocolError("too late"))
    server.wake()
