"""A process that runs out of descriptors: who can't be served is refused, the engine and its peers live."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from inference_plugin.net.addresses import boot_id
from inference_plugin.net.channel import Channel
from inference_plugin.net.listening import Listener
from inference_plugin.wire import codec
from inference_plugin.wire.errors import SyncTimeout, TransportUnavailable
from inference_plugin.wire.messages import Describe, Pause, ReplicaCard, Resume, Sender, Stands, WorkerCard
from tests.manager.conftest import start  # noqa: F401 -- a fixture
from tests.support.rig import ROOT, Rig, eventually, few_descriptors, gone

IDLE_PEERS = 200
FLOOD = 1000
MARGIN = 24
"""Descriptors that a process may take beyond what it had."""


def descriptors(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()]


def limit(pid: int, soft: int) -> None:
    """Descriptors that the process may have from now on."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@contextlib.contextmanager
def idle_peers(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, as many as are let in or wait to be."""
    peers = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    for peer in peers:
        peer.settimeout(0)
        with contextlib.suppress(OSError):
            peer.connect(address.removeprefix("ipc://"))
    yield peers
    for peer in peers:
        peer.close()


def described(channel: Channel, kind: Any, timeout_s: float = 60) -> Any:
    return channel.request(Describe(), kind, timeout_s=timeout_s)


@pytest.fixture
def ends(start: Any) -> list[tuple[int, str, Any]]:  # noqa: F811
    """ReplicaCoordinator and worker of a replica: process, address, what it answers."""
    rig: Rig = start()
    return [(rig.pid, rig.card.address, ReplicaCard), (rig.worker_pid(), rig.card.workers[0].address, WorkerCard)]


def test_idle_peers_and_a_flood_of_requests_leave_coordinator_and_worker_alive_and_their_old_peers_served(
    ends: list[tuple[int, str, Any]],
) -> None:
    request = [b"", codec.encode(Describe())]
    for pid, address, kind in ends:
        with Channel(address) as old, zmq.Context.instance().socket(zmq.DEALER) as flooding:
            described(old, kind)
            flooding.linger, flooding.sndtimeo = 0, 60_000
            flooding.connect(address)
            flooding.send_multipart(request)
            assert flooding.poll(60_000)
            top = max(64, max(descriptors(pid)) + MARGIN)
            limit(pid, top)
            with idle_peers(address, IDLE_PEERS):
                with Channel(address) as late, pytest.raises(SyncTimeout):
                    described(late, kind, timeout_s=0.3)
                for _ in range(FLOOD):
                    flooding.send_multipart(request)
                for _ in range(10):
                    described(old, kind)
                assert not gone(pid) and max(descriptors(pid)) < top
            with Channel(address) as new:
                described(new, kind)
            described(old, kind)
            eventually(lambda pid=pid, top=top: len(descriptors(pid)) <= top - MARGIN + 4, "the peers' descriptors")


@pytest.mark.parametrize("left", [0, 3])
def test_with_no_descriptor_left_old_peers_are_served_and_new_ones_once_there_are_some(
    ends: list[tuple[int, str, Any]], left: int
) -> None:
    for pid, address, kind in ends:
        with Channel(address) as old:
            described(old, kind)
            limit(pid, len(descriptors(pid)) + left)
            with idle_peers(address, 50), Channel(address) as new:
                new.send(Describe())
                for _ in range(50):
                    described(old, kind)
                if kind is ReplicaCard:
                    sender = Sender("s", os.getpid(), boot_id())
                    assert old.request(Pause(sender, 600), Stands, timeout_s=60).state == "paused"
                    assert old.request(Resume("s"), Stands, timeout_s=60).state == "serving"
                assert not gone(pid)
                limit(pid, 4096)
                assert new.receive(kind, timeout_s=60).address == address
                described(old, kind)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_listener_takes_no_more_peers_than_it_may_and_others_once_they_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("inference_plugin.net.gate.MAX_PEERS", 8)
    monkeypatch.setattr("inference_plugin.net.gate.COUNT_AGAIN_S", 0)
    listener = Listener(zmq.ROUTER, f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:*", max_bytes=1 << 20)
    family, at = (socket.AF_UNIX, str(tmp_path / "s")) if kind == "ipc" else (socket.AF_INET, port_of(listener.address))
    peers = [socket.socket(family) for _ in range(20)]
    for peer in peers:
        peer.settimeout(300)
        peer.connect(at)
    greeted = [greets(peer) for peer in peers]
    assert greeted.count(True) == 8, "and the others were closed"
    assert listener.gate is not None
    for peer in peers:
        peer.close()
    listener.gate.peers.update(range(10_000, 10_008))  # as if it had never been told that these left
    asking = zmq.Context.instance().socket(zmq.REQ)
    asking.connect(listener.address)
    asking.send(b"there is room again")
    assert listener.socket.poll(300_000)
    assert listener.socket.recv_multipart()[-1] == b"there is room again"
    asking.close(linger=0)
    listener.close()
    listener.close()


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def greets(peer: socket.socket) -> bool:
    """libzmq sends its greeting to whom it took; who was refused reads the end."""
    try:
        return bool(peer.recv(10))
    except ConnectionResetError:
        return False


@pytest.mark.parametrize(
    "socket",
    [lambda address: Listener(zmq.ROUTER, address, max_bytes=1 << 20), lambda address: Channel(address)],
    ids=["that listens", "that asks"],
)
def test_a_socket_is_refused_with_a_typed_error_where_libzmq_would_end_the_process(
    tmp_path: Path, socket: Callable[[str], object]
) -> None:
    with few_descriptors(5), pytest.raises(TransportUnavailable, match="too few file descriptors") as raised:
        socket(f"ipc://{tmp_path}/s")
    assert "ulimit -n" in raised.value.hint


WITHOUT_THREADS = """
import re, resource, sys
from pathlib import Path
import zmq
from inference_plugin.net.channel import Channel
from inference_plugin.net.listening import Listener
from inference_plugin.wire.errors import TransportUnavailable

size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), resource.RLIM_INFINITY))
address = f"ipc://{sys.argv[1]}/s"
for make in (lambda: Channel(address), lambda: Listener(zmq.ROUTER, address, max_bytes=1 << 20)):
    try:
        make()
    except TransportUnavailable as error:
        print(error.message, error.hint)
"""


def test_a_socket_is_refused_with_a_typed_error_where_no_thread_can_be_started(tmp_path: Path) -> None:
    """Memory suffices for everything but a thread's stack."""
    stack = functools.partial(resource.setrlimit, resource.RLIMIT_STACK, (64 << 20, resource.RLIM_INFINITY))
    command = [sys.executable, "-c", WITHOUT_THREADS, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, preexec_fn=stack)
    assert (ended.returncode, ended.stdout.count("no thread can be started for a socket")) == (0, 2), ended.stderr
    assert "ulimit -u" in ended.stdout


def test_a_listener_that_is_closed_leaves_no_descriptor(directory: Path) -> None:
    """Looking for the listening socket among all descriptors duplicates those that are none."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(5):
        Listener(zmq.ROUTER, f"ipc://{directory}/{number}", max_bytes=1 << 20).close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
