"""Whether a process still runs, whatever the kernel lets us know of it."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.net.processes import ProcessWatch, has_ended, start_ticks
from inference_plugin.wire.errors import PeerLost, SyncTimeout
from inference_plugin.wire.messages import Describe, Done, Hop, Sender
from tests.support.rig import eventually, fork, kill

SYS_EXIT = {"x86_64": 60, "aarch64": 93}
"""The system call that ends the calling thread alone."""


@pytest.fixture
def pid() -> Iterator[int]:
    one = fork("tests.wire.test_addresses:sleep_for_ever")
    yield one
    if not has_ended(one):
        kill(one)


@pytest.fixture(params=["pidfd", "EPERM", "EMFILE", "ENOSYS"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `pidfd_open` says."""
    if request.param != "pidfd":

        def refuse(_: int) -> int:
            raise OSError(getattr(errno, request.param), "the test refuses")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    return str(request.param)


def ends(watch: ProcessWatch) -> bool:
    """As its users wait: for its descriptor, or for its time."""
    deadline_s = time.monotonic() + 60
    while not watch.ended() and time.monotonic() < deadline_s:
        time.sleep(min(0.01, max(0.0, watch.look_at_s - time.monotonic())))
    return watch.ended()


def test_a_process_is_alive_until_it_ends_whether_or_not_there_is_a_descriptor(pid: int, kernel: str) -> None:
    watch = ProcessWatch(pid, start_ticks(pid))
    assert not watch.ended()
    assert (watch.fd is not None) == (kernel == "pidfd") == (watch.look_at_s == math.inf)
    kill(pid)
    assert ends(watch) and watch.fd is None and watch.look_at_s == 0
    watch.close()
    watch.close()


def end_the_main_thread_alone() -> None:
    """As a killed process is for some time where the cores are busy, with the threads in another order."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)


def test_a_process_lives_while_any_thread_of_it_does_whether_or_not_there_is_a_descriptor(kernel: str) -> None:
    pid = fork("tests.wire.test_processes:end_the_main_thread_alone")
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the end of its main thread")
    watch = ProcessWatch(pid, start_ticks(pid))
    assert not has_ended(pid) and not watch.ended()
    kill(pid)
    assert has_ended(pid) and ends(watch)


def test_a_pid_that_is_another_processs_now_has_ended(pid: int, kernel: str) -> None:
    assert ProcessWatch(pid, start_ticks(pid) - 1).ended() and has_ended(pid, start_ticks(pid) - 1)
    unknown = ProcessWatch(pid)
    assert not unknown.ended() and not has_ended(pid)
    unknown.close()


@pytest.mark.parametrize("nobody", [0, -1, 1 << 31, 1 << 62, -(1 << 70)])
def test_a_number_that_is_no_pid_has_ended_and_raises_nothing(nobody: int) -> None:
    assert ProcessWatch(nobody).ended() and has_ended(nobody) and has_ended(nobody, 7)


def test_every_process_reads_the_same_start(pid: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", f"from inference_plugin.net.processes import start_ticks; print(start_ticks({pid}))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert int(told.stdout) == start_ticks(pid) > start_ticks(1) >= 0
    assert start_ticks() == start_ticks(os.getpid()) > 0


def test_a_process_whose_state_cannot_be_read_is_alive_until_it_is_gone(
    pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bytes:
        raise OSError(errno.EMFILE, "the test refuses")

    since = start_ticks(pid)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert not has_ended(pid, since)
    kill_without_reading(pid)
    assert has_ended(pid, since)


def kill_without_reading(pid: int) -> None:
    os.kill(pid, 9)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.005)


def test_a_channel_to_a_living_peer_waits_and_to_a_dead_one_does_not(pid: int, kernel: str, directory: object) -> None:
    with Channel(
        f"ipc://{directory}/p", pid=pid, start_ticks=start_ticks(pid), peer_boot_id=addresses.boot_id()
    ) as asking:
        with pytest.raises(SyncTimeout):
            asking.request(Describe(), Done, timeout_s=0.05)
        kill(pid)
        with pytest.raises(PeerLost, match="is gone"):
            asking.request(Describe(), Done, timeout_s=3600)


def test_a_channel_to_a_pid_that_was_taken_by_another_process_is_lost_at_once(pid: int, directory: object) -> None:
    with (
        Channel(f"ipc://{directory}/p", pid=pid, start_ticks=1, peer_boot_id=addresses.boot_id()) as asking,
        pytest.raises(PeerLost, match="is gone"),
    ):
        asking.request(Describe(), Done, timeout_s=3600)


def test_a_message_of_before_this_field_tells_no_start(pid: int) -> None:
    hop = msgspec.msgpack.decode(msgspec.msgpack.encode(["r", 0, "ipc:///a", pid, "boot"]), type=Hop)
    sender = msgspec.msgpack.decode(msgspec.msgpack.encode({"session": "s", "pid": pid}), type=Sender)
    assert (hop.start_ticks, sender.start_ticks) == (0, 0)
    watch = ProcessWatch(hop.pid, hop.start_ticks)
    assert not watch.ended()
    watch.close()
