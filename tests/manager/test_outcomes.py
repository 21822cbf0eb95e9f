"""What an update tells its caller: when it raises, what the error says, weights that are not finite, listeners, pauses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import ArgumentError, CommitFailed, NotFinite, TornReplica
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.trainer import Trainer
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import eventually, kill
from trainer_adapters import Quorum, SyncManager
from trainer_adapters.events import Events

# --- a replica that did not take the update ---------------------------------------------------------------------------


def test_a_replica_that_lives_and_did_not_take_the_version_raises_and_the_others_keep_it(start: Start) -> None:
    fine, failing = start(), start()
    told: list[str] = []
    with SyncManager(timeout_s=60, catch_up="never") as manager:  # else the failed one would soon hold version 2 too
        manager.on("committed", lambda report: told.append("committed"))
        manager.on("failed", lambda **_: told.append("failed"))
        manager.update(source(1), 1)
        failing.ask("fault", rank=0, step="install")
        with pytest.raises(CommitFailed, match="1 of 2 replicas did not take version 2, 1 serve it") as raised:
            manager.update(source(2), 2)
        assert raised.value.replica == failing.replica
        report = raised.value.report
        assert report is not None
        assert {one.replica: one.status for one in report.replicas} == {
            fine.replica: "committed",
            failing.replica: "failed",
        }
        assert (holds(fine, 2), holds(failing, 1)) == (True, True)
        assert told == ["committed", "committed"]
        assert manager.update(source(3), 3).failed == ()


def test_the_future_of_an_update_raises_the_same(start: Start) -> None:
    _, failing = start(), start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        failing.ask("fault", rank=0, step="install")
        pending = manager.update_async(source(2), 2)
        error = pending.exception()
        assert isinstance(error, CommitFailed) and error.report is not None
        with pytest.raises(CommitFailed):
            pending.result()


def test_with_report_a_failed_replica_is_in_the_report_and_nothing_is_raised(start: Start) -> None:
    _, failing = start(), start()
    with SyncManager(timeout_s=60, on_failure="report") as manager:
        manager.update(source(1), 1)
        failing.ask("fault", rank=0, step="install")
        (failed,) = manager.update(source(2), 2).failed
        assert failed.replica == failing.replica
        failing.ask("fault", rank=0, step="install")


def test_no_replica_that_took_the_version_raises_in_either_way(start: Start) -> None:
    rig = start()
    for on_failure in ("raise", "report"):
        with SyncManager(timeout_s=60, on_failure=on_failure) as manager:  # type: ignore[arg-type]
            rig.ask("fault", rank=0, step="install")
            with pytest.raises(CommitFailed) as raised:
                manager.update(source(1), 1)
            assert raised.value.report is not None and len(raised.value.report.failed) == 1


def test_a_lost_replica_is_only_reported(start: Start) -> None:
    fine, lost = start(), start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        remove = manager.on("staged", lambda **_: kill(lost.worker_pid()))
        report = manager.update(source(2), 2)
        remove()
        assert [one.replica for one in report.failed] == [lost.replica]
        assert holds(fine, 2)


def test_a_torn_replica_raises(start: Start) -> None:
    fine, torn = start(), start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        torn.ask("fault", rank=1, step="install")
        torn.ask("fault", rank=0, step="undo")
        with pytest.raises(TornReplica) as raised:
            manager.update(source(2), 2)
        assert raised.value.report is not None and holds(fine, 2)
        states = {one.replica: (one.state, one.generation) for one in manager.replicas()}
        assert states == {fine.replica: ("current", "running"), torn.replica: ("torn", "refused")}


def test_a_quorum_does_not_raise_for_replicas_that_it_did_not_wait_for(start: Start) -> None:
    fine, slow = start(), start()
    with SyncManager(timeout_s=60, stragglers=Quorum(1), catch_up="never", transport="shm") as manager:
        manager.update(source(1), 1)
        manager.on("staged", lambda **_: os.kill(slow.worker_pid(), signal.SIGSTOP))
        try:
            report = manager.update(source(2), 2)
        finally:
            os.kill(slow.worker_pid(), signal.SIGCONT)
        assert [(one.replica, one.error and one.error.kind) for one in report.failed] == [(slow.replica, "SyncTimeout")]
        assert holds(fine, 2)


def test_all_trainer_ranks_raise_alike_and_have_the_report(start: Start, trainer: Callable[..., Trainer]) -> None:
    fine, failing = start(tp=2), start()
    failing.ask("fault", rank=0, step="install")
    ranks = trainer(2, [{"version": 1}, {"version": 2}])
    first = [ranks.step(rank, 0) for rank in range(2)]
    assert [(one["error"], one["failed"]) for one in first] == [("CommitFailed", [failing.replica])] * 2
    assert first[0]["text"] == first[1]["text"]
    assert all("ok" in ranks.step(rank, 1) for rank in range(2))
    assert holds(fine, 2)


# --- weights that are not finite --------------------------------------------------------------------------------------


def spoilt(seed: int, *names: str, value: float = float("nan")) -> dict[str, torch.Tensor]:
    tensors = checkpoint(seed)
    for name in names:
        tensors[name].view(-1)[3] = value
    return tensors


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_nan_and_infinity_are_named_and_nothing_is_applied(start: Start, transport: str) -> None:
    rig = start(tp=2)
    with SyncManager(transport=transport, timeout_s=60, check_finite=True) as manager:
        manager.update(source(1), 1)
        with pytest.raises(NotFinite, match=r"layers\.0\.k\.weight, norm\.weight \(2 in all\)") as raised:
            manager.update(ShardSource(spoilt(2, "layers.0.k.weight", "norm.weight")), 2)
        assert (raised.value.side, raised.value.phase) == ("trainer", "stage")
        assert holds(rig, 1)
        with pytest.raises(NotFinite, match=r"embed\.weight"):
            manager.update(spoilt(2, "embed.weight", value=float("-inf")), 2)
        assert holds(rig, 1)
        manager.update(source(2), 2)
        assert holds(rig, 2)


def test_a_cast_that_overflows_is_found(start: Start) -> None:
    start()
    wide = {"layers.0.norm.weight": torch.full((16,), 3.0e38, dtype=torch.float64) * 10}
    with SyncManager("part", partial=True, timeout_s=60, check_finite=True) as part:
        with pytest.raises(NotFinite, match=r"layers\.0\.norm\.weight"):
            part.update(wide, 1, dtype="float32")
        part.update({name: tensor / 100 for name, tensor in wide.items()}, 1, dtype="float32")


def test_without_the_check_weights_are_sent_as_they_are(start: Start) -> None:
    start()
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(ShardSource(spoilt(2, "norm.weight")), 2).failed == ()


def test_one_ranks_nan_fails_the_update_on_all_trainer_ranks(start: Start, trainer: Callable[..., Trainer]) -> None:
    rig = start(tp=2)
    ranks = trainer(2, [{"version": 1}, {"version": 2, "fault": "nan"}, {"version": 3}], check_finite=True)
    seen = [ranks.step(rank, 1) for rank in range(2)]
    assert [one["error"] for one in seen] == ["NotFinite"] * 2
    assert [one["rank"] for one in seen] == [1, 1]
    assert all("ok" in ranks.step(rank, 2) for rank in range(2))
    assert holds(rig, 3)


# --- listeners and pauses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "listener", "words"),
    [
        ("committed", lambda: None, r"def listener\(report\)"),
        ("failed", lambda report: None, r"def listener\(group, version, error\)"),
        ("replica_lost", lambda replica: None, r"group, replica, reason"),
        ("comitted", lambda **_: None, "none of staged, committed"),
    ],
)
def test_a_listener_that_cannot_be_called_is_refused_at_once(event: Any, listener: Any, words: str) -> None:
    with SyncManager(timeout_s=60) as manager, pytest.raises(ArgumentError, match=words):
        manager.on(event, listener)


def test_a_listener_that_was_added_twice_is_removed_once_however_often_that_is_asked() -> None:
    events, heard = Events(), list[int]()

    def listener(group: str, version: int, seconds: float) -> None:
        heard.append(version)

    remove, _ = events.on("staged", listener), events.on("staged", listener)
    remove()
    remove()
    events.tell("staged", group="policy", version=7, seconds=0.1)
    assert heard == [7]


def test_a_paused_replica_is_said_to_be_paused(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)

        def seen() -> list[tuple[str, str]]:
            return [(one.state, one.generation) for one in manager.replicas()]

        assert seen() == [("current", "running")]
        with manager.paused() as report:
            assert "1 paused" in str(report) and rig.replica in str(report)
            eventually(lambda: seen() == [("current", "paused")], "the pause")
        eventually(lambda: seen() == [("current", "running")], "the end of the pause")
