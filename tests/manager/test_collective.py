"""Collectives between trainer ranks and workers: bytes, faults on either side, and groups that are made anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.transports.collective import BACKENDS, CollectiveReceiver, backend_for, topology
from inference_plugin.wire.errors import PeerLost, SyncTimeout, TransportUnavailable, WeightwireError
from tests.manager.conftest import Start
from tests.manager.test_manager import Ranks, holds, source
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import Rig, kill
from trainer_adapters import SyncManager
from trainer_adapters.source import LocalSlice


class Watched(ShardSource):
    """A source that calls `then` when its second slice is asked for: in the middle of the broadcasts' making."""

    def __init__(self, seed: int, then: Any) -> None:
        super().__init__(checkpoint(seed))
        self.then = then

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 1:
                self.then()
            yield item


@given(senders=st.integers(1, 64), receivers=st.integers(0, 64))
def test_each_group_has_one_sender_and_all_receivers_with_ranks_from_0_on(senders: int, receivers: int) -> None:
    found = topology(senders, receivers)
    for group in range(found.senders if found.size else 0):
        ranks = [found.sender_ranks(sender)[group] for sender in range(senders)]
        assert ranks.count(0) == 1 and ranks.index(0) == group and ranks.count(-1) == senders - 1
        ranks = [0, *(found.receiver_ranks(receiver)[group] for receiver in range(receivers))]
        assert ranks == list(range(found.size))
    assert (found.size == 0) == (receivers == 0)


@pytest.mark.parametrize(("senders", "receivers"), [(0, 1), (-1, 1), (1, -1)])
def test_numbers_of_ranks_that_cannot_be_are_refused(senders: int, receivers: int) -> None:
    with pytest.raises(ValueError, match="at least one sends"):
        topology(senders, receivers)


def test_a_backend_is_found_by_device_and_an_explicit_one_always_wins() -> None:
    assert {device: backend_for(device) for device in BACKENDS} == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
    assert backend_for("cuda", "gloo") == backend_for("mps", "gloo") == "gloo"
    with pytest.raises(TransportUnavailable, match="'mps'; known are cpu, cuda, npu") as raised:
        backend_for("mps")
    assert "gloo" in raised.value.hint


def test_another_host_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(TransportUnavailable, match="another host") as raised:
        CollectiveReceiver().check_probe(b"elsewhere")
    assert "zmq" in raised.value.hint


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_every_worker_of_every_replica_holds_each_version(start: Start, install: Any, directory: Path) -> None:
    rigs = [start(tp=2), start(tp=1)]
    with SyncManager(transport="collective", install=install, timeout_s=60) as manager:
        for version in (1, 2, 3):
            report = manager.update(source(version), version)
            assert [(r.status, r.transport) for r in report.replicas] == [("committed", "collective")] * 2
            assert all(holds(rig, version) for rig in rigs)
        assert len({r.digest for r in report.replicas}) == 1
    assert not list(directory.rglob("collective-*"))


def test_two_trainer_ranks_broadcast_what_each_holds(start: Start, directory: Path) -> None:
    rigs: list[Rig] = [start(tp=2), start(tp=1)]
    ranks = Ranks(directory, [{"version": v} for v in (1, 2)], transport="collective")
    for number in range(2):
        assert all("ok" in ranks.step(rank, number) for rank in range(2))
    assert all(holds(rig, 2) for rig in rigs)


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_trainer_rank_lost_in_the_middle_is_a_typed_error_and_the_engines_keep_their_version(
    start: Start, directory: Path, fault: str
) -> None:
    rig = start(tp=2)
    ranks = Ranks(directory, [{"version": 1}, {"version": 2, "fault": fault}], transport="collective")
    assert "ok" in ranks.step(0, 0)
    seen = ranks.step(0, 1)
    assert seen["error"] in ("WeightwireError", "PeerLost") and seen["side"] in ("trainer", "manager"), seen
    assert holds(rig, 1)
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(3), 3)
    assert holds(rig, 3)


def test_a_worker_killed_in_the_middle_is_a_lost_peer_and_the_next_update_makes_groups_without_it(start: Start) -> None:
    survivor, lost = start(tp=2), start(tp=1)
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(1), 1)
        with pytest.raises(WeightwireError) as raised:
            manager.update(Watched(2, lambda: kill(lost.worker_pid())), 2)
        assert isinstance(raised.value, PeerLost | SyncTimeout) and raised.value.phase == "stage"
        assert holds(survivor, 1)
        lost.end()
        assert [r.status for r in manager.update(source(3), 3).replicas] == ["committed"]
    assert holds(survivor, 3)


def test_a_worker_that_stalls_ends_the_update_by_its_deadline_and_takes_the_next_one(start: Start) -> None:
    rig, stalled = start(tp=1), start(tp=1)
    with SyncManager(transport="collective", timeout_s=60) as manager:
        manager.update(source(1), 1)
        manager.settings.timeout_s = 4
        with pytest.raises(WeightwireError) as raised:
            manager.update(Watched(2, lambda: os.kill(stalled.worker_pid(), signal.SIGSTOP)), 2)
        assert isinstance(raised.value, PeerLost | SyncTimeout)
        os.kill(stalled.worker_pid(), signal.SIGCONT)
        assert holds(rig, 1) and holds(stalled, 1)
        manager.settings.timeout_s = 60
        assert manager.update(source(3), 3).failed == ()
    assert holds(rig, 3) and holds(stalled, 3)
