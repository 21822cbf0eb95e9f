"""Memory is asked for before anything is allocated, and what is free on a host is counted once for all of its replicas."""

from __future__ import annotations

import os

import pytest

from inference_plugin.wire.errors import EngineUnsupported, TransportUnavailable
from tests.manager.conftest import Start
from tests.manager.test_zones import held, holds, source
from tests.support.managers import SyncManager
from tests.support.plain_engine import FREE_BYTES
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
