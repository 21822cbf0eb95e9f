"""Pauses and sleeps through the manager: real sockets, real processes, the plain engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import (
    CommitFailed,
    PeerLost,
    ReplicaAsleep,
    SyncTimeout,
    TornReplica,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import Body, Describe, RenewPause, ReplicaCard, Verified, Verify, WorkerCard
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.manager.trainer import Trainer
from tests.support.commands import weightwire
from tests.support.managers import SyncManager
from tests.support.phases import fall_silent
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import LONG_S, Rig, eventually, fork, kill
from trainer_adapters import LocalSlice
from trainer_adapters.fleet import asking, pauses
from trainer_adapters.update import handle

LEASE_S = 1.5


@pytest.fixture
def manager(directory: Path) -> Iterator[SyncManager]:
    with SyncManager(timeout_s=60) as one:
        yield one


def log(rig: Rig) -> list[str]:
    """What the coordinator asked of its engine, since the last look."""
    rig.peek()  # runs in its loop: whatever it does just now is over
    seen: list[str] = rig.ask("state")["log"]
    known = getattr(rig, "known", 0)
    rig.known = len(seen)  # type: ignore[attr-defined]
    return seen[known:]


def card(rig: Rig) -> ReplicaCard:
    """As the coordinator gives it."""
    with Channel(rig.card.address) as asking:
        return asking.request(Describe(), ReplicaCard, timeout_s=60)


def stands(rig: Rig, state: str) -> bool:
    return card(rig).state == state


# --- pauses -------------------------------------------------------------------------------------------------------------


def test_replicas_stand_still_from_pause_to_resume_and_take_updates_meanwhile(
    start: Start, manager: SyncManager
) -> None:
    rigs = [start(tp=2), start(tp=1)]
    report = manager.pause()
    assert [(r.state, r.asleep, r.error) for r in report.replicas] == [("paused", (), None)] * 2
    assert [log(rig) for rig in rigs] == [["pause:keep", "hold"]] * 2
    assert f"by the manager of process {os.getpid()}" in card(rigs[0]).detail
    assert manager.pause().failed == () and [log(rig) for rig in rigs] == [[]] * 2, "again: nothing to do"
    for version in (1, 2):
        assert manager.update(source(version), version).failed == ()
        assert all(holds(rig, version) for rig in rigs)
        assert [log(rig) for rig in rigs] == [["pause:keep", f"installed:policy:{version}"]] * 2, "no resume"
    assert manager.verify(source(2)).ok
    assert {found.state for found in manager.discover()} == {"paused"}
    assert [r.state for r in manager.resume().replicas] == ["serving"] * 2
    assert [log(rig) for rig in rigs] == [["resume"]] * 2
    assert manager.update(source(3), 3).failed == ()
    assert [log(rig)[-1] for rig in rigs] == ["resume"] * 2
    assert [r.state for r in manager.resume().replicas] == ["serving"] * 2, "nothing is paused"


def test_whatever_happens_inside_the_replicas_go_on(start: Start, manager: SyncManager) -> None:
    rig = start(tp=2)
    with manager.paused():
        manager.update(source(1), 1)
    log(rig)
    rig.ask("fail", step="install", rank=1)
    with pytest.raises(CommitFailed, match="undone on all ranks"), manager.paused("recompute"):
        manager.update(source(2), 2)
    assert log(rig) == ["pause:recompute", "hold", "pause:keep", "resume"]
    assert holds(rig, 1) and stands(rig, "serving")
    with SyncManager(timeout_s=60) as other:
        other.pause()
    assert stands(rig, "serving"), "a manager that is closed lets go"


def test_an_installation_that_tears_a_paused_replica_leaves_it_refusing_when_it_goes_on(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    for step in ("install", "undo"):
        rig.ask("fail", step=step, rank=1)
    manager.pause()
    with pytest.raises(TornReplica):
        manager.update(source(2), 2)
    assert stands(rig, "torn")
    manager.resume()
    assert "the test lets 'undo' fail" in rig.ask("state")["refusal"]
    with manager.paused():
        manager.update(source(3), 3)
    assert rig.ask("state")["refusal"] is None and holds(rig, 3) and stands(rig, "serving")


def test_a_pause_that_finds_no_boundary_in_time_leaves_the_replica_running(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_all(*arguments: Any, timeout_s: float, silence_s: float, **options: Any) -> Any:
        """Waits for the answer, which comes a tenth of a second before the manager's time is over, as long as it takes."""
        return asking.ask_all(*arguments, timeout_s=LONG_S, silence_s=LONG_S, **options)

    monkeypatch.setattr(pauses, "ask_all", ask_all)
    monkeypatch.setattr(handle, "GRACE_S", LONG_S)
    rig = start()
    with SyncManager(timeout_s=1) as impatient, pytest.raises(SyncTimeout, match="no step boundary by policy 'drain'"):
        impatient.pause("drain")
    assert log(rig) == ["pause:drain", "resume"] and stands(rig, "serving")


def test_pauses_and_commits_take_turns(start: Start, manager: SyncManager) -> None:
    """A commit that comes while requests drain for a pause is installed after them, and the replica stays paused."""
    rig = start()
    manager.update(source(1), 1)
    log(rig)
    with SyncManager(group="other", timeout_s=60) as other:
        pausing = threading.Thread(target=other.pause, args=("drain",))
        pausing.start()
        eventually(lambda: rig.ask("state")["log"][-1] == "pause:drain", "the drain")
        pending = manager.update_async(source(2), 2)
        eventually(lambda: waiting_in_line(rig), "the commit in line")
        rig.ask("drained")
        pausing.join(600)
        assert pending.result(600).failed == ()
        assert log(rig) == ["pause:drain", "hold", "pause:keep", "installed:policy:2"]
        assert holds(rig, 2) and stands(rig, "paused")
        with pytest.raises(VersionConflict, match="paused by the manager of process"):
            manager.pause()
        with pytest.raises(VersionConflict, match="paused by the manager of process"):
            manager.resume()
        assert [r.state for r in other.resume().replicas] == ["serving"]


def waiting_in_line(rig: Rig) -> bool:
    """Whether the workers have sealed: the commit is the next message of the manager."""
    worker = rig.card.workers[0]
    with Channel(worker.address) as asking:
        found = asking.request(Describe(), WorkerCard, timeout_s=60)
    return any(group.state == "sealed" for group in found.groups)


def test_drain_of_a_commit_is_refused_where_the_pause_keeps_requests_and_needless_where_it_drained(
    start: Start, manager: SyncManager
) -> None:
    rig = start()
    with SyncManager(timeout_s=60, in_flight="drain") as draining:
        draining.pause("keep")
        with pytest.raises(CommitFailed, match="requests in flight can't end first") as raised:
            draining.update(source(1), 1)
        assert "resume it and pause with in_flight='drain'" in str(raised.value)
        with pytest.raises(CommitFailed, match="requests in flight can't end first"):
            draining.pause("drain")
        assert stands(rig, "paused")
        draining.resume()
        pausing = threading.Thread(target=draining.pause)
        log(rig)
        pausing.start()
        eventually(lambda: rig.ask("state")["log"][-1] == "pause:drain", "the drain")
        rig.ask("drained")
        pausing.join(600)
        assert draining.update(source(1), 1).failed == ()
        assert log(rig) == ["pause:drain", "hold", "pause:recompute", "installed:policy:1"]


def pause_and_wait(ready: str, lease_s: float, level: int) -> None:
    with SyncManager(timeout_s=60, lease_s=lease_s) as manager:
        manager.sleep(level) if level else manager.pause()  # type: ignore[arg-type]
        Path(ready).touch()
        signal.pause()


@pytest.mark.parametrize("level", [0, 1])
def test_a_manager_that_is_killed_leaves_no_replica_standing(
    start: Start, directory: Path, tmp_path: Path, level: int
) -> None:
    rigs = [start(tp=2), start()]
    ready = tmp_path / "ready"
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
    killed = fork("tests.manager.test_pausing:pause_and_wait", environment, ready=str(ready), lease_s=600, level=level)
    eventually(ready.exists, "the pause")
    assert all(stands(rig, "asleep" if level else "paused") for rig in rigs)
    kill(killed)
    eventually(lambda: all(stands(rig, "serving") for rig in rigs), "the replicas to go on")
    assert all(log(rig)[-1] == "resume" and holds(rig, 0) for rig in rigs)


def test_a_silent_manager_loses_its_pause_and_is_told_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = start()
    fall_silent(monkeypatch)
    with SyncManager(timeout_s=60, lease_s=LEASE_S) as silent:
        silent.pause()
        eventually(lambda: stands(rig, "serving"), "the end of the lease")
        assert log(rig)[-1] == "resume"
        with pytest.raises(SyncTimeout, match=f"the manager was silent for {LEASE_S:g} s"):
            silent.resume()
        silent.settings.config = silent.settings.config.but(lease_s=600)
        silent.pause()
        assert [r.state for r in silent.resume().replicas] == ["serving"], "a new pause is a new beginning"


def test_a_pause_outlives_its_lease_while_its_manager_lives(start: Start) -> None:
    rig = start()
    renewed = threading.Event()
    with SyncManager(timeout_s=60, lease_s=6) as manager, pytest.MonkeyPatch.context() as patch:
        send = Channel.send
        count = 0

        def counted(channel: Channel, body: Body, payload: object = None) -> None:
            nonlocal count
            send(channel, body, payload)
            count += isinstance(body, RenewPause)
            if count > 3:  # longer than the lease
                renewed.set()

        patch.setattr(Channel, "send", counted)
        manager.pause()
        assert renewed.wait(600) and stands(rig, "paused")
        assert [r.state for r in manager.resume().replicas] == ["serving"]


def test_a_replica_that_dies_while_it_is_paused_keeps_nobody_from_going_on(start: Start, manager: SyncManager) -> None:
    dies, lives = start(), start()
    with manager.paused() as report:
        assert report.failed == ()
        dies.end()
        manager.update(source(1), 1)
    assert stands(lives, "serving") and holds(lives, 1)
    lives.end()
    with pytest.raises(PeerLost, match="no replica of job"):
        manager.pause()
    assert manager.resume().replicas == ()


def test_verifications_that_come_too_late_to_a_boundary_are_dropped_and_the_next_one_is_whole(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    rig.ask("hold")
    with contextlib.ExitStack() as stack:
        late = [stack.enter_context(Channel(rig.card.address)) for _ in range(10)]
        for channel in late:
            channel.send(Verify("policy", timeout_s=0.1))
        for channel in late[1:]:  # the first one waits for the boundary, where it is found to be late
            with pytest.raises(SyncTimeout, match="before the engine's thread was free"):
                channel.receive(Verified, timeout_s=60)
        rig.ask("go on")
        with pytest.raises(SyncTimeout, match="before the engine's thread was free"):
            late[0].receive(Verified, timeout_s=60)
    assert manager.verify(source(1)).ok and holds(rig, 1)


def test_a_replica_whose_card_cannot_be_written_goes_on_when_its_manager_is_killed(
    start: Start, directory: Path, tmp_path: Path
) -> None:
    rig = start()
    ready = tmp_path / "ready"
    unwritable = addresses.runtime_dir() / f"{rig.replica}.card.tmp"
    unwritable.mkdir()
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
    killed = fork("tests.manager.test_pausing:pause_and_wait", environment, ready=str(ready), lease_s=600, level=1)
    eventually(ready.exists, "the pause")
    kill(killed)
    eventually(lambda: stands(rig, "serving"), "the replica to go on")
    assert log(rig)[-1] == "resume" and holds(rig, 0)
    unwritable.rmdir()
    with SyncManager(timeout_s=60) as manager:
        manager.pause()
        assert [found.state for found in addresses.discover()] == ["paused"]


# --- sleep --------------------------------------------------------------------------------------------------------------


def test_asleep_it_takes_no_update_until_its_weights_are_awake_and_serves_once_all_is(
    start: Start, manager: SyncManager
) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    log(rig)
    assert [(r.state, r.asleep) for r in manager.sleep(1).replicas] == [("asleep", ("kv_cache", "weights"))]
    assert log(rig) == ["pause:recompute", "hold", "hold:kv_cache:weights"], "keys and values can't be kept"
    assert not holds(rig, 1), "its memory is gone"
    with SyncManager("new") as another:
        for either in (manager, another):
            with pytest.raises(ReplicaAsleep) as raised:
                either.update(source(2), 2)
            assert raised.value.hint.startswith("call wake_up(tags=['weights']) first")
    verified = manager.verify(source(1))
    assert [r.error.kind for r in verified.replicas if r.error] == ["ReplicaAsleep"]
    code, shown, _ = weightwire(["status"])
    assert code == 0
    assert "asleep (asleep at level 1 by the manager of process" in shown.replace("\n", " ").replace("  ", " ")
    assert [(r.state, r.asleep) for r in manager.wake_up(["weights"]).replicas] == [("asleep", ("kv_cache",))]
    assert holds(rig, 1), "level 1 brings them back"
    assert manager.update(source(2), 2).failed == ()
    assert [r.state for r in manager.wake_up().replicas] == ["serving"]
    assert log(rig) == ["hold:kv_cache", "pause:keep", "installed:policy:2", "hold", "resume"]
    assert holds(rig, 2)


def test_discarded_weights_serve_nobody_before_a_full_update(start: Start, manager: SyncManager) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    manager.sleep(2)
    assert rig.ask("state")["refusal"] is None, "requests may wait: an update may come first"
    manager.wake_up(["weights"])
    manager.update(source(1), 1)  # the same version again: what was there is gone
    manager.wake_up()
    assert holds(rig, 1) and rig.ask("state")["refusal"] is None and stands(rig, "serving")

    manager.sleep(2)
    assert [r.state for r in manager.wake_up().replicas] == ["torn"]
    assert "a sleep of level 2 discarded the weights" in rig.ask("state")["refusal"]
    assert "level 2 discarded" in card(rig).detail
    manager.update(source(2), 2)
    assert holds(rig, 2) and rig.ask("state")["refusal"] is None and stands(rig, "serving")


def test_discarded_weights_of_a_replica_that_had_no_update_yet_are_healed_by_one_of_the_whole_model(
    start: Start,
) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        manager.sleep(2)
        assert [r.state for r in manager.wake_up().replicas] == ["torn"]
        manager.update(source(1), 1)
        assert holds(rig, 1) and rig.ask("state")["refusal"] is None and stands(rig, "serving")
        manager.close_group()
    with SyncManager("part", partial=True, timeout_s=60) as part:
        part.update(source(2), 1)
        with pytest.raises(WeightwireError, match="no open group brings back: part"):
            part.sleep(2)
    assert stands(rig, "serving") and holds(rig, 2)


@pytest.mark.parametrize("step", ["sleep", "wake weights", "wake kv_cache"])
def test_a_rank_that_cant_sleep_wakes_the_others_and_one_that_cant_wake_is_marked_until_it_is_healed(
    start: Start, manager: SyncManager, step: str
) -> None:
    rig = start(tp=2)
    manager.update(source(1), 1)
    rig.ask("fail", step=step, rank=1)
    if step == "sleep":
        with pytest.raises(WeightwireError, match="the test lets 'sleep' fail"):
            manager.sleep(1)
        assert rig.peek()[0] == digests_expected(checkpoint(1), 2)[0], "the rank that slept is awake"
        assert log(rig)[-1] == "resume" and not stands(rig, "asleep")
        return
    manager.sleep(1)
    with pytest.raises(WeightwireError, match=f"the test lets '{step}' fail"):
        manager.wake_up()
    assert stands(rig, "asleep") and "it could not be woken" in card(rig).detail
    assert [r.state for r in manager.wake_up().replicas] == ["torn"], "awake, and nobody knows what it holds"
    assert "it could not be woken" in rig.ask("state")["refusal"]
    manager.update(source(1), 1)
    assert holds(rig, 1) and rig.ask("state")["refusal"] is None and stands(rig, "serving")


def test_a_replica_stays_asleep_while_its_silent_manager_may_use_the_memory_and_another_may_take_over(
    start: Start, manager: SyncManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    fall_silent(monkeypatch)
    with SyncManager(timeout_s=60, lease_s=600) as silent:
        silent.sleep(1)
        with pytest.raises(VersionConflict, match="asleep at level 1 by the manager of process"):
            manager.wake_up()
        silent.settings.config = silent.settings.config.but(lease_s=LEASE_S)
        silent.sleep(1)
        eventually(lambda: "is silent for more than" in card(rig).detail, "the end of the lease")
        assert stands(rig, "asleep")
        assert [r.state for r in manager.wake_up().replicas] == ["serving"]
        assert holds(rig, 0)


def test_a_replica_does_not_fall_asleep_under_an_update(start: Start, manager: SyncManager) -> None:
    rig = start()
    stalled, go_on = threading.Event(), threading.Event()

    class Stalling(ShardSource):
        def slices(self) -> Iterator[LocalSlice]:
            stalled.set()
            go_on.wait(600)
            yield from super().slices()

    with SyncManager("other", timeout_s=60) as other:
        pending = manager.update_async(Stalling(checkpoint(1)), 1)
        assert stalled.wait(600)
        with pytest.raises(VersionConflict, match="an update of policy is on its way"):
            other.sleep(1)
        go_on.set()
        assert pending.result(600).failed == ()
    assert holds(rig, 1) and stands(rig, "serving")


def test_above_rank_0_a_pause_is_nobodys_business(start: Start, trainer: Callable[..., Trainer]) -> None:
    rig = start()
    calls = ["pause", "sleep", "resume", "wake_up"]
    steps = [{"version": 0, "calls": calls, "only": [1]}, {"wait": "go on"}, {"version": 1}]
    ranks = trainer(2, steps, timeout_s=60)
    assert ranks.step(1, 0)["ok"] == [{"replicas": []}] * 4
    assert log(rig) == []
    ranks.let("go on")
    assert all("ok" in ranks.step(rank, 2) for rank in (0, 1)) and holds(rig, 1)
