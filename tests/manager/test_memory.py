"""Memory is asked for before anything is allocated, and what is free on a host is counted once for all of its replicas."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from inference_plugin.transports.shm import ShmSender
from inference_plugin.wire import host_memory
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, TransportUnavailable, WeightwireError
from tests.manager.conftest import Start
from tests.manager.test_zones import held, holds, source
from tests.support.managers import SyncManager
from tests.support.plain_engine import FREE_BYTES, ShardSource, checkpoint
from tests.support.rig import eventually
from trainer_adapters import LocalSlice
from trainer_adapters.update import leader

NBYTES = source(1).manifest().nbytes


@pytest.mark.parametrize(("replicas", "install"), [(1, "standby"), (2, "copy")])
def test_what_is_enough_for_one_replica_is_not_enough_for_each_of_two(
    start: Start, replicas: int, install: str
) -> None:
    rigs = [start(**{FREE_BYTES: str(3 * NBYTES)}) for _ in range(replicas)]
    with SyncManager(timeout_s=60) as manager:
        report = manager.update(source(1), 1)
    assert [replica.install for replica in report.replicas] == [install] * replicas
    assert all(holds(rig, 1) for rig in rigs)


@pytest.mark.parametrize("replicas", [1, 2])
def test_second_sets_that_do_not_fit_together_are_refused_with_both_numbers(start: Start, replicas: int) -> None:
    rigs = [start(**{FREE_BYTES: str(NBYTES * 9 // 5)}) for _ in range(replicas)]
    with SyncManager(install="standby", timeout_s=60) as manager:
        if replicas == 1:
            assert manager.update(source(1), 1).failed == () and holds(rigs[0], 1)
            return
        with pytest.raises(EngineUnsupported) as raised:
            manager.update(source(1), 1)
        assert "a second set of 0 MiB does not fit: 0 MiB are free for this rank" in str(raised.value)
        assert all(held(rig.worker_pid()) == set() and holds(rig, 0) for rig in rigs)


def test_second_sets_and_the_segment_are_counted_together_before_either_is_made(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs = [start(), start(tp=2)]
    free = [5 * NBYTES // 2]  # the two second sets fit, and so would the segment alone
    monkeypatch.setattr(leader, "free_host_bytes", lambda: free[0])
    before = held(os.getpid())
    with SyncManager(install="standby", timeout_s=60) as manager:
        words = r"second sets of 0 MiB and a segment of 0 MiB do not fit: 0 MiB are free on this host"
        with pytest.raises(TransportUnavailable, match=words):
            manager.update(source(1), 1)
        assert len(held(os.getpid()) - before) <= 1, "the probe, which is one page"
        assert all(held(rig.worker_pid()) == set() and holds(rig, 0) for rig in rigs)
        free[0] = 1 << 30
        assert manager.update(source(2), 2).failed == ()
        free[0] = 0
        assert manager.update(source(3), 3).failed == (), "what an update takes is there since the last one"
        assert all(holds(rig, 3) for rig in rigs)


@pytest.mark.parametrize(
    ("transport", "install"),
    [("shm", "copy"), ("shm", "standby"), ("zmq", "copy"), ("delta", "standby"), ("nixl", "copy"), ("zone", "standby")],
)
def test_a_verification_gives_all_memory_back(start: Start, transport: str, install: Any) -> None:
    start(tp=2)
    with SyncManager(transport=transport, install=install, timeout_s=60) as manager:
        for version in (1, 2, 3):
            manager.update(source(version), version)
        assert manager.verify(source(3)).ok
        gc.collect()
        before = held(os.getpid())
        for _ in range(3):
            assert manager.verify(source(3)).ok
            assert not manager.verify(source(2)).ok
        gc.collect()
        assert held(os.getpid()) <= before
        assert manager.update(source(4), 4).failed == () and manager.verify(source(4)).ok


class EndsEarly(ShardSource):
    def slices(self) -> Iterator[LocalSlice]:
        yield next(super().slices())
        raise ValueError("no more slices")


@pytest.mark.parametrize("fault", ["source", "engine"])
def test_a_verification_that_fails_gives_all_memory_back_while_its_error_is_kept(start: Start, fault: str) -> None:
    rig = start(tp=2)
    with SyncManager(transport="zmq", timeout_s=60) as manager:
        manager.update(source(1), 1)
        before, weights = held(os.getpid()), source(1)
        if fault == "source":
            weights = EndsEarly(checkpoint(1))
        else:
            rig.end()
        with pytest.raises(WeightwireError, match="no more slices" if fault == "source" else "no replica of job"):
            manager.verify(weights)
        assert held(os.getpid()) <= before


def test_memory_that_no_worker_takes_goes_even_if_somebody_keeps_a_view_of_it() -> None:
    sender, manifest = ShmSender(), source(1).manifest()
    with sender.scratch(manifest, frozenset()) as (_, segment):
        view = segment.tensor
        view.fill_(3)
    assert not view.any()


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_a_verification_writes_over_nothing_that_a_replica_may_need(start: Start, install: Any) -> None:
    """The way back of those that there are, and the bytes of the last version for those that come."""
    first = start(tp=2)
    with SyncManager(transport="shm", install=install, timeout_s=60) as manager:
        for version in (1, 2, 3):
            manager.update(source(version), version)
        assert not manager.verify(source(7)).ok
        second = start(tp=2)
        eventually(lambda: [each.state for each in manager.replicas()] == ["current"] * 2, "the newcomer caught up")
        assert holds(second, 3)
        assert not manager.verify(source(8)).ok
        for rig in (first, second):
            rig.ask("fault", rank=1, step="install")
        with pytest.raises(CommitFailed, match="undone on all ranks"):
            manager.update(source(4), 4)
        for rig in (first, second):
            eventually(lambda rig=rig: rig.ask("state")["log"][-1] == "resume", "the engine going on")  # type: ignore[misc]
            eventually(lambda rig=rig: holds(rig, 3), "the way back")  # type: ignore[misc]


def test_a_verification_that_does_not_fit_is_refused_with_both_numbers(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    with SyncManager(transport="zmq", timeout_s=60) as manager:
        manager.update(source(1), 1)
        before = held(os.getpid())
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "free_host_bytes", lambda: 0)
            with pytest.raises(TransportUnavailable, match="shm: a segment of 0 MiB does not fit: 0 MiB are free"):
                manager.verify(source(1))
        assert held(os.getpid()) <= before and manager.verify(source(1)).ok and holds(rig, 1)


def test_the_memory_that_a_killed_replica_held_is_written_again(start: Start) -> None:
    doomed, healthy = start(), start()
    with SyncManager(transport="shm", install="copy", timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(source(version), version)
        before = held(os.getpid())
        doomed.end()
        for version in (3, 4):
            manager.update(source(version), version)
            assert holds(healthy, version)
        assert held(os.getpid()) <= before
