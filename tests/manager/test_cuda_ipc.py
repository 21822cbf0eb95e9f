"""`cuda_ipc` in real processes: on a device whose memory lies in the host's, through the real calls of the CUDA driver's
interface (`tests/support/shared_host.py`). No GPU has run this."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.devices import DEVICES, ByteCopy
from inference_plugin.wire.errors import CommitFailed, DigestMismatch, SyncTimeout, TransportUnavailable
from inference_plugin.wire.tensors import bytes_view
from tests.manager.conftest import Start
from tests.manager.test_zones import Watched, holds, source, ways
from tests.manager.trainer import Trainer
from tests.support.managers import SyncManager
from tests.support.rig import Rig, eventually, kill, stands_still
from tests.support.shared_host import ON_SHARED_HOST, SharedHost, can_be_built, shared_allocations

pytestmark = pytest.mark.skipif(not can_be_built(), reason="needs a C compiler")
IPC = [("committed", "cuda_ipc", "standby")]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's device."""
    monkeypatch.setitem(DEVICES, "cpu", SharedHost())


@pytest.fixture
def begin(start: Start) -> Callable[..., Rig]:
    return lambda **options: start(**ON_SHARED_HOST, **options)


def has_allocations(pid: int, count: int) -> Callable[[], bool]:
    return lambda: len(shared_allocations(pid)) == count


@pytest.mark.parametrize("tp", [1, 2])
def test_each_version_lands_in_the_device_s_memory_in_two_zones_in_turn(begin: Callable[..., Rig], tp: int) -> None:
    rig = begin(tp=tp)
    seen: list[set[int]] = []
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2, 3, 4):
            report = manager.update(source(version), version)
            assert holds(rig, version) and ways(report) == IPC and report.copies_per_byte == 1
            assert manager.verify(source(version)).ok
            seen.append(shared_allocations(rig.worker_pid()))
            assert not shared_allocations(os.getpid()), "no mapping is left in the trainer"
    assert len(seen[1]) == 2 and seen[1] == seen[2] == seen[3]
    eventually(has_allocations(rig.worker_pid(), 1), "only what the engine computes with")
    assert holds(rig, 4)


def test_workers_of_another_device_are_reached_another_way(start: Start) -> None:
    rig = start(**ON_SHARED_HOST, WEIGHTWIRE_TEST_UUID="GPU-of-another-host")
    with SyncManager(timeout_s=60) as manager:
        assert ways(manager.update(source(1), 1)) == [("committed", "zone", "standby")] and holds(rig, 1)
    words = "can't map memory of this worker's device GPU-of-another-host"
    with SyncManager(timeout_s=60, transport="cuda_ipc") as manager, pytest.raises(TransportUnavailable, match=words):
        manager.update(source(2), 2)
    assert holds(rig, 1)


def test_a_worker_without_such_a_device_says_so(start: Start) -> None:
    start()
    words = "'cuda_ipc' can't be used here: this process computes on the host"
    with SyncManager(timeout_s=60, transport="cuda_ipc") as manager, pytest.raises(TransportUnavailable, match=words):
        manager.update(source(1), 1)


def test_an_installation_that_fails_on_one_rank_is_undone_on_all(begin: Callable[..., Rig]) -> None:
    rig = begin(tp=2)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)
        rig.ask("fail", step="install", rank=1)
        with pytest.raises(CommitFailed, match="undone on all ranks"):
            manager.update(source(3), 3)
        assert holds(rig, 2)
        for version in (4, 5):
            assert ways(manager.update(source(version), version)) == IPC and holds(rig, version)


class Flipping(SharedHost):
    """Lets one bit of what it copied flip."""

    def copy_bytes(self, copies: Sequence[ByteCopy]) -> None:
        super().copy_bytes(copies)
        for copy in copies[:1]:
            bytes_view(copy.target)[copy.at] ^= 1


@pytest.mark.parametrize("tp", [1, 2])
def test_a_bit_that_flips_on_the_way_is_found_before_the_commit(
    begin: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """The worker had prepared the installation of that zone meanwhile."""
    rig = begin(tp=tp)
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)
        with monkeypatch.context() as patched:
            patched.setitem(DEVICES, "cpu", Flipping())
            with pytest.raises(DigestMismatch, match="is not what the trainer sent"):
                manager.update(source(3), 3)
        assert holds(rig, 2) and manager.verify(source(2)).ok
        for version in (4, 5, 6):
            assert ways(manager.update(source(version), version)) == IPC and holds(rig, version)


def test_an_update_that_came_to_nothing_leaves_a_zone_that_is_freed_and_never_used_again(
    begin: Callable[..., Rig],
) -> None:
    rig = begin()
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)

        def fails() -> None:
            raise SyncTimeout("the source stalls")

        used: list[set[int]] = []
        with pytest.raises(SyncTimeout, match="the source stalls"):
            manager.update(Watched(3, lambda: (used.append(shared_allocations(os.getpid())), fails())), 3)
        (reached,) = used[0]
        eventually(lambda: reached not in shared_allocations(rig.worker_pid()), "the end of the zone")
        assert holds(rig, 2) and not shared_allocations(os.getpid())
        for version in (4, 5):
            assert ways(manager.update(source(version), version)) == IPC and holds(rig, version)


def test_what_a_stopped_rank_may_write_into_is_neither_used_nor_freed_before_its_end(
    begin: Callable[..., Rig], directory: Path, trainer: Any
) -> None:
    rig = begin()
    stopped = {"version": 3, "fault": "stop", "timeout_s": 8}
    steps = [{"version": 1}, {"version": 2}, stopped, {"wait": "the end", "only": [0]}]
    ranks: Trainer = trainer(2, steps, environment=ON_SHARED_HOST)
    eventually(lambda: (ranks.out / "rank0.step1").exists(), "the update before")
    assert holds(rig, 2)
    late = ranks.pids[1]
    eventually(lambda: stands_still(late), "a rank that stands still in its writing")
    (reached,) = shared_allocations(late)
    assert reached in shared_allocations(rig.worker_pid())
    assert ranks.step(0, 2)["error"] == "SyncTimeout" and holds(rig, 2)
    with SyncManager(timeout_s=60) as manager:
        for version in (4, 5):
            assert ways(manager.update(source(version), version)) == IPC and holds(rig, version)
        assert reached in shared_allocations(rig.worker_pid()), "freed under a writer"
        os.kill(late, signal.SIGCONT)
        eventually(lambda: reached not in shared_allocations(late), "the end of its writing")
        assert holds(rig, 5) and manager.verify(source(5)).ok
        eventually(has_allocations(rig.worker_pid(), 2), "the end of the zone")


def test_a_rank_that_is_killed_while_it_writes_leaves_nothing_held(
    begin: Callable[..., Rig], directory: Path, trainer: Any
) -> None:
    rig = begin()
    ranks: Trainer = trainer(2, [{"version": 1}, {"version": 2, "fault": "stop"}], environment=ON_SHARED_HOST)
    late = ranks.pids[1]
    eventually(lambda: stands_still(late), "a rank that stands still in its writing")
    (reached,) = shared_allocations(late)
    kill(late)
    assert ranks.step(0, 1)["error"] == "PeerLost"
    eventually(lambda: reached not in shared_allocations(rig.worker_pid()), "the end of the zone")
    assert holds(rig, 1)
    with SyncManager(timeout_s=60) as manager:
        for version in (4, 5):
            assert ways(manager.update(source(version), version)) == IPC and holds(rig, version)


def test_a_worker_that_is_killed_is_replaced(begin: Callable[..., Rig]) -> None:
    dies = begin()
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)
        dies.end()
        again = begin()
        for version in (3, 4):
            assert ways(manager.update(source(version), version))[-1:] == IPC and holds(again, version)
