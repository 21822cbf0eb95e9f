"""A process that may start no more threads: a manager that can't be made leaves nothing, and nothing hangs later."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from inference_plugin.wire.errors import TransportUnavailable, WeightwireError
from tests.support.rig import Rig, eventually, fork, runtime
from tests.support.scarce_threads import Starts
from trainer_adapters import SyncManager


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def held() -> list[int]:
    """How many descriptors and threads this process has, once they no longer change: libzmq closes what a socket had on a thread
    of its own."""
    seen: list[list[int]] = []

    def stands() -> bool:
        seen.append([descriptors(), threading.active_count()])
        time.sleep(0.1)
        return len(seen) >= 5 and all(one == seen[-1] for one in seen[-5:])

    eventually(stands, "the end of what was closed")
    return seen[-1]


def test_a_manager_whose_threads_can_t_be_started_is_a_typed_error_and_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread after the other of those that a manager starts. What is left open would hang whoever collects it: libzmq waits
    for its sockets without a deadline."""
    with SyncManager():
        pass  # the threads that a process keeps are there
    starts = Starts(monkeypatch)
    with SyncManager():
        count = len(starts.names)
    gc.collect()
    before, threads = descriptors(), threading.active_count()
    assert count >= 5
    for lacks in range(1, count + 1):
        starts.but(lacks)
        with pytest.raises(TransportUnavailable, match="no thread can be started") as raised:
            SyncManager()
        assert "ulimit -u" in raised.value.hint
        del raised
        gc.collect()
        eventually(lambda: threading.active_count() <= threads, "the end of the manager's threads")
        eventually(lambda: descriptors() <= before, "the end of the manager's sockets")
        assert not list(directory.rglob("registry-*"))
    starts.but(0)
    with SyncManager() as manager:
        assert manager.replicas() == []


def test_a_pause_without_a_thread_that_renews_it_is_a_typed_error_and_pauses_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(directory)
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name == "weightwire-pauses":
            raise RuntimeError("can't start new thread")  # what CPython says at RLIMIT_NPROC
        start(thread)

    with SyncManager(timeout_s=60) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starting)
            with pytest.raises(TransportUnavailable, match="no thread can be started for a pause"):
                manager.pause()
        assert [one.generation for one in manager.replicas()] == ["running"]
        assert [one.state for one in manager.pause().replicas] == ["paused"]
    rig.end()


def make_twice(rank: int, directory: str) -> None:
    """One rank of a trainer. Both ranks make three managers; rank 0 finds no thread for its second one."""
    out = Path(directory)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), 2), rank=rank, world_size=2)
    with SyncManager(timeout_s=60):
        pass  # what a process keeps is there
    start = threading.Thread.start
    refused: list[str] = []

    def starting(thread: threading.Thread) -> None:
        if rank == 0 and thread.name == "weightwire-reception" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")  # what CPython says at RLIMIT_NPROC
        start(thread)

    threading.Thread.start = starting  # type: ignore[method-assign]
    before, seen = held(), {"error": "", "hint": ""}
    try:
        SyncManager(timeout_s=60).close()
    except (WeightwireError, RuntimeError) as error:
        seen = {"error": type(error).__name__, "hint": getattr(error, "hint", "")}
    gc.collect()
    eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "the end of all that it had")
    sockets = [path.name for path in out.rglob("trainer-*") if rank == 0]
    with SyncManager(timeout_s=60) as manager:
        note = json.dumps(seen | {"sockets": sockets, "rank": manager.rank})
        (out / f"rank{rank}.new").write_text(note)
        (out / f"rank{rank}.new").rename(out / f"rank{rank}")
        eventually(lambda: all((out / f"rank{other}").exists() for other in range(2)), "the other rank's manager")


def test_rank_0_without_a_thread_for_late_ranks_is_a_typed_error_and_leaves_nothing(directory: Path) -> None:
    for rank in range(2):
        fork(
            "tests.manager.test_scarce_threads:make_twice",
            {"WEIGHTWIRE_RUNTIME_DIR": str(directory)},
            rank=rank,
            directory=str(directory),
        )
    seen = []
    for rank in range(2):
        note = directory / f"rank{rank}"
        eventually(note.exists, note.name)
        seen.append(json.loads(note.read_text()))
    assert [(one["rank"], one["error"]) for one in seen] == [(0, "TransportUnavailable"), (1, "")]
    assert "ulimit -u" in seen[0]["hint"]
    assert seen[0]["sockets"] == []
