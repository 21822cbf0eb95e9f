"""Updates over `store` into running replicas: what changed is uploaded once, and each serves exactly what the trainer has."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_plugin.wire.errors import TransportUnavailable
from tests.manager.conftest import Start
from tests.manager.test_delta import NBYTES, holds, stepped
from tests.manager.trainer import Trainer
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import eventually, kill


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHTWIRE_STORE_URL", f"file://{tmp_path}")
    monkeypatch.setenv("WEIGHTWIRE_CONTROL_TIMEOUT_S", "2")
    return tmp_path


def test_each_byte_is_uploaded_once_for_all_replicas_and_one_that_comes_late_costs_none(
    start: Start, place: Path
) -> None:
    url = f"file://{place}"
    first, second = start(tp=2, WEIGHTWIRE_STORE_URL=url), start(tp=2, WEIGHTWIRE_STORE_URL=url)
    weights = checkpoint(1)
    with SyncManager(transport="store", install="standby", timeout_s=60) as manager:
        assert manager.update(ShardSource(weights)).egress_bytes == NBYTES
        for seed in (1, 2, 3):
            weights = stepped(weights, seed)
            report = manager.update(ShardSource(weights))
            assert report.egress_bytes < 0.1 * NBYTES and {each.transport for each in report.replicas} == {"store"}
            assert holds(first, weights) and holds(second, weights)
        third = start(tp=2, WEIGHTWIRE_STORE_URL=url)
        eventually(lambda: third.replica in manager.versions(), "the new replica")
        weights = stepped(weights, 4)
        assert manager.update(ShardSource(weights)).egress_bytes < 0.1 * NBYTES
        assert holds(first, weights) and holds(second, weights) and holds(third, weights)

        second.ask("fault", rank=1, step="install")  # undone; what it staged was compared all the same
        before, weights = weights, stepped(weights, 5)
        (failed,) = manager.update(ShardSource(weights)).failed
        assert failed.replica == second.replica and holds(second, before) and holds(first, weights)
        kill(third.pid)
        weights = stepped(weights, 6)
        assert manager.update(ShardSource(weights)).egress_bytes < 0.1 * NBYTES
        assert holds(first, weights) and holds(second, weights) and manager.verify(ShardSource(weights)).ok

        for each in place.glob("*/0-*"):
            each.unlink()
        fourth = start(tp=1, WEIGHTWIRE_STORE_URL=url)
        eventually(lambda: fourth.replica in manager.versions(), "the new replica")
        before, weights = weights, stepped(weights, 7)
        (failed,) = manager.update(ShardSource(weights)).failed
        assert failed.replica == fourth.replica and failed.error is not None and "is not there" in failed.error.message
        assert holds(first, weights) and holds(second, weights)
        weights = stepped(weights, 8)
        assert manager.update(ShardSource(weights)).egress_bytes >= NBYTES
        assert holds(first, weights) and holds(fourth, weights) and manager.verify(ShardSource(weights)).ok
    assert not list(place.iterdir())


def test_a_replica_is_caught_up_between_updates_and_then_costs_no_upload(start: Start, place: Path) -> None:
    url = f"file://{place}"
    first = start(WEIGHTWIRE_STORE_URL=url)
    weights = checkpoint(1)
    with SyncManager(transport="store", install="copy", catch_up="always", timeout_s=60) as manager:
        manager.update(ShardSource(weights))
        weights = stepped(weights, 1)
        manager.update(ShardSource(weights))
        second = start(WEIGHTWIRE_STORE_URL=url)
        caught_up = [("current", 2)] * 2
        eventually(lambda: [(each.state, each.version) for each in manager.replicas()] == caught_up, "the new replica")
        assert holds(second, weights)
        weights = stepped(weights, 2)
        assert manager.update(ShardSource(weights)).egress_bytes < 0.1 * NBYTES
        assert holds(first, weights) and holds(second, weights)
    assert not list(place.iterdir())


def test_engines_without_the_store_take_no_update_and_say_why(start: Start, place: Path) -> None:
    start()
    refused = pytest.raises(TransportUnavailable, match="store: WEIGHTWIRE_STORE_URL is not set")
    with SyncManager(transport="store", timeout_s=30) as manager, refused:
        manager.update(ShardSource(checkpoint(1)))


def test_a_rank_that_fails_in_the_middle_is_healed_and_one_that_is_killed_leaves_a_folder_that_harms_nobody(
    start: Start, place: Path, directory: Path
) -> None:
    url = f"file://{place}"
    rig = start(tp=2, WEIGHTWIRE_STORE_URL=url)
    steps = [{"version": 1}, {"version": 2, "fault": "raise"}, {"version": 3}, {"version": 4, "fault": "kill"}]
    environment = {"WEIGHTWIRE_STORE_URL": url}
    ranks = Trainer(directory, 2, steps, environment, transport="store", timeout_s=60)
    for number, outcome in enumerate(("ok", "error", "ok")):
        assert all(outcome in ranks.step(rank, number) for rank in range(2))
    assert "error" in ranks.step(0, 3)
    assert holds(rig, checkpoint(3))
    with SyncManager(transport="store", timeout_s=60) as manager:
        weights = checkpoint(5)
        assert manager.update(ShardSource(weights), 5).egress_bytes == NBYTES
        assert holds(rig, weights)
    assert "1-" in {path.name[:2] for each in place.iterdir() for path in each.iterdir()}
