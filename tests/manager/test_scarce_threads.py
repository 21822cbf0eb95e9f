"""A process that may start no more threads: a manager that can't be made leaves nothing, and nothing hangs later."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.errors import TransportUnavailable
from tests.support.rig import eventually, runtime
from trainer_adapters import SyncManager


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_manager_whose_threads_can_t_be_started_is_a_typed_error_and_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread after the other of those that a manager starts. What is left open would hang whoever collects it: libzmq waits
    for its sockets without a deadline."""
    started: list[str] = []
    lacks = 0
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        started.append(thread.name)
        if len(started) == lacks:
            raise RuntimeError("can't start new thread")  # what CPython says at RLIMIT_NPROC
        start(thread)

    with SyncManager():
        pass  # the threads that a process keeps are there
    monkeypatch.setattr(threading.Thread, "start", starting)
    with SyncManager():
        count = len(started)
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    assert count >= 5
    for lacks in range(1, count + 1):  # noqa: B007 -- `starting` reads it
        started.clear()
        with pytest.raises(TransportUnavailable, match="no thread can be started") as raised:
            SyncManager()
        assert "ulimit -u" in raised.value.hint
        del raised
        gc.collect()
        eventually(lambda: threading.active_count() <= threads, "the end of the manager's threads")
        eventually(lambda: descriptors() <= before, "the end of the manager's sockets")
        assert not list(directory.rglob("registry-*"))
    lacks = 0
    with SyncManager() as manager:
        assert manager.replicas() == []
