"""What goes on at the same time: groups beside each other, training beside a transfer, slow replicas beside ready ones."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.net.channel import Channel
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire.errors import CommitFailed, ManifestMismatch, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Abort, Describe, WorkerCard
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source, waiting
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig, eventually, kill
from trainer_adapters import LocalSlice, ModuleAdapter
from trainer_adapters.settings import BestEffort, Quorum


def half(seed: int, *, layers: bool) -> ShardSource:
    """The tensors of a checkpoint that are in its layers, or those that aren't."""
    return ShardSource({name: t for name, t in checkpoint(seed).items() if name.startswith("layers.") == layers})


def mixed(inner: int, outer: int) -> dict[str, Any]:
    """A checkpoint with the layers of one seed and the rest of another."""
    return {
        name: (checkpoint(inner) if name.startswith("layers.") else checkpoint(outer))[name] for name in checkpoint(0)
    }


def groups_of(rig: Rig) -> dict[str, int | None]:
    with Channel(rig.card.workers[0].address) as worker:
        return {g.group: g.version for g in worker.request(Describe(), WorkerCard, timeout_s=60).groups}


@pytest.fixture
def two_groups(directory: Path) -> Iterator[tuple[SyncManager, SyncManager]]:
    with (
        SyncManager("inner", partial=True, timeout_s=60) as inner,
        SyncManager("outer", partial=True, timeout_s=60) as outer,
    ):
        yield inner, outer


def test_two_groups_of_one_model_are_updated_at_the_same_time_and_never_mix(
    start: Start,
    two_groups: tuple[SyncManager, SyncManager],
) -> None:
    rig = start(tp=2)
    inner, outer = two_groups
    for step in range(1, 9):
        under_way = [
            inner.update_async(half(step, layers=True), step),
            outer.update_async(half(100 + step, layers=False), 10 * step),
        ]
        for pending in under_way:
            assert [r.status for r in pending.result(600).replicas] == ["committed"]
        assert rig.peek() == digests_expected(mixed(step, 100 + step), 2)
    assert groups_of(rig) == {"inner": 8, "outer": 80}
    assert inner.verify(half(8, layers=True)).ok and outer.verify(half(108, layers=False)).ok
    assert inner.versions() == {rig.replica: 8} and outer.versions() == {rig.replica: 80}


def test_a_commit_that_waits_for_requests_makes_another_groups_commit_wait_not_fail(
    start: Start,
    two_groups: tuple[SyncManager, SyncManager],
) -> None:
    rig = start()
    inner, outer = two_groups
    inner.settings.in_flight = "drain"
    first = inner.update_async(half(1, layers=True), 1)
    eventually(lambda: "pause:drain" in rig.ask("state")["log"], "the pause")
    second = outer.update_async(half(2, layers=False), 1)
    eventually(lambda: groups_state(rig).get("outer") == "sealed", "the other group's seal")
    assert not first.done() and not second.done()
    rig.ask("drained")
    assert first.result(600).version == second.result(600).version == 1
    assert rig.peek() == digests_expected(mixed(1, 2), 1)


def groups_state(rig: Rig) -> dict[str, str]:
    with Channel(rig.card.workers[0].address) as worker:
        return {g.group: g.state for g in worker.request(Describe(), WorkerCard, timeout_s=60).groups}


def test_what_one_group_writes_another_may_not_until_the_first_is_closed(start: Start) -> None:
    rig = start()
    with SyncManager("policy", timeout_s=60) as policy, SyncManager("inner", partial=True, timeout_s=60) as inner:
        policy.update(source(1), 1)
        with pytest.raises(ManifestMismatch, match="group 'policy' writes already"):
            inner.update(half(2, layers=True), 1)
        assert holds(rig, 1)
        policy.close_group()
        assert "policy" not in groups_of(rig)
        inner.update(half(2, layers=True), 1)
        assert rig.peek() == digests_expected(mixed(2, 1), 1)
        with pytest.raises(ManifestMismatch, match="group 'inner' writes already"):
            policy.update(source(3), 2)
        inner.close_group()
        policy.update(source(3), 2)
        assert holds(rig, 3)


def test_a_part_of_a_model_is_refused_where_it_is_not_said_to_be_one(start: Start) -> None:
    rig = start()
    with (
        SyncManager("policy", timeout_s=60) as policy,
        pytest.raises(ManifestMismatch, match="no tensor of the manifest fills"),
    ):
        policy.update(half(1, layers=True), 1)
    assert holds(rig, 0)


# --- training beside a transfer ---------------------------------------------------------------------------------------


def test_weights_may_change_once_they_are_read_while_the_update_goes_on(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        rig.ask("hold")
        weights = source(1)
        pending = manager.update_async(weights, 1)
        pending.wait_released(60)
        for tensor in weights.tensors.values():
            tensor.zero_()  # the next optimizer step
        assert pending.released and not pending.done()
        rig.ask("go on")
        assert pending.result(600).version == 1
    assert holds(rig, 1)


class TrainsOn(ModuleAdapter):
    """A step runs after so many slices: nobody waited for the update."""

    def __init__(self, model: dict[str, torch.Tensor], after: int, step: Callable[[torch.Tensor], object]) -> None:
        super().__init__(model)
        self._weights, self._after, self._step_of = model, after, step

    def slices(self) -> Iterator[LocalSlice]:
        for position, item in enumerate(super().slices()):
            if position == self._after:
                for tensor in self._weights.values():
                    self._step_of(tensor)
            yield item

    def slices_last(self) -> bool:
        return True


@pytest.mark.parametrize("after", [1, 5, 13])
def test_a_step_while_the_weights_are_read_is_found_out_and_the_old_version_stays(start: Start, after: int) -> None:
    rig = start(tp=2)
    weights = checkpoint(2)
    weights["norm.weight"][0] = torch.nan
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        with pytest.raises(ManifestMismatch, match=r"changed while they were read: .*wait_released") as raised:
            manager.update(TrainsOn(weights, after, lambda tensor: tensor.add_(1)), 2)
        assert (raised.value.side, raised.value.phase) == ("trainer", "stage")
        assert holds(rig, 1)
        manager.update(TrainsOn(weights, after, lambda tensor: tensor.add_(0)), 3)
        assert manager.versions() == {rig.replica: 3}


@pytest.mark.parametrize("transport", ["zone", "shm", "zmq", "delta", "nixl", "stream", "collective"])
@pytest.mark.parametrize("check_finite", [False, True])
def test_of_tensors_that_a_function_makes_one_is_held_at_a_time(
    start: Start, transport: str, check_finite: bool
) -> None:
    """Each is freed before the next one is made: two of the largest may be more than a trainer has."""
    rig = start()
    held: list[str] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        before, memory = "", lambda: None
        for name, tensor in checkpoint(1).items():
            if memory() is not None:
                held.append(before)
            array = tensor.clone().flatten().view(torch.uint8).numpy()
            before, memory = name, weakref.ref(array)
            made = torch.from_numpy(array).view(tensor.dtype).reshape(tensor.shape)
            del array
            yield name, made
            del made

    install = "streaming" if transport == "stream" else "standby"
    with SyncManager(timeout_s=60, transport=transport, install=install, check_finite=check_finite) as manager:
        manager.update(pairs, 1)
    assert holds(rig, 1)
    assert held == []


def test_an_update_cannot_be_cancelled_half_way(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        rig.ask("hold")
        first, second = (manager.update_async(source(version), version) for version in (1, 2))
        assert not first.cancel() and not second.cancel()  # other ranks would wait in them for this one
        rig.ask("go on")
        assert (first.result(600).version, second.result(600).version) == (1, 2)
    assert holds(rig, 2)


def test_an_update_that_fails_releases_the_weights_too(directory: Path) -> None:
    with SyncManager(timeout_s=60) as manager:
        pending = manager.update_async(source(1), 1)
        pending.wait_released(60)
        with pytest.raises(WeightwireError):
            pending.result(600)


def test_an_event_loop_goes_on_while_an_update_waits(start: Start) -> None:
    rig = start()
    rig.ask("hold")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def train(manager: SyncManager) -> int:
        ticker = asyncio.create_task(tick())
        update = asyncio.wrap_future(manager.update_async(source(1), 1))
        while ticks < 1000 or not waiting(rig):  # the update waits for its boundary, the loop for nobody
            await asyncio.sleep(0)
        assert not update.done()
        rig.ask("go on")
        version = (await update).version
        ticker.cancel()
        return version

    with SyncManager(timeout_s=60) as manager:
        assert asyncio.run(train(manager)) == 1


def test_closing_fails_what_has_not_begun_and_lets_what_is_under_way_end(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    rig = start()
    rig.ask("hold")
    manager = SyncManager(timeout_s=60)
    updates = [manager.update_async(source(version), version) for version in (1, 2, 3)]
    eventually(lambda: waiting(rig), what="the first update at its boundary")
    closing = threading.Thread(target=manager.close)
    closing.start()
    eventually(lambda: "the manager closes after the operation under way" in caplog.text, what="the close")
    rig.ask("go on")
    assert updates[0].result(600).version == 1
    for update in updates[1:]:
        with pytest.raises(CommitFailed, match="the manager was closed before this update began"):
            update.result(600)
    closing.join(600)
    assert holds(rig, 1)


def test_the_end_of_a_block_waits_for_what_it_began(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        updates = [manager.update_async(source(version), version) for version in (1, 2)]
    assert [update.result(0).version for update in updates] == [1, 2]
    assert holds(rig, 2)


# --- what listeners hear ----------------------------------------------------------------------------------------------


class Heard:
    """A plug-in and callables: what they were told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    @hookimpl
    def weightwire_update_staged(self, version: int) -> None:
        self.events.append(("staged", version))

    @hookimpl
    def weightwire_update_committed(self, report: Any) -> None:
        self.events.append(("committed", report.version))

    @hookimpl
    def weightwire_update_failed(self, version: int, error: Exception) -> None:
        self.events.append(("failed", version))

    @hookimpl
    def weightwire_replica_joined(self, card: Any) -> None:
        self.events.append(("joined", card.replica))

    @hookimpl
    def weightwire_replica_lost(self, replica: str) -> None:
        self.events.append(("lost", replica))


def test_listeners_hear_of_each_event_in_order_and_none_of_them_fails_an_update(start: Start) -> None:
    rig = start()
    plugin, own = Heard(), Heard()
    plugin_manager().register(plugin)
    try:
        with SyncManager(timeout_s=60) as manager:
            manager.on("staged", lambda **_: 1 / 0)
            manager.on("staged", lambda version, **_: own.events.append(("staged", version)))
            remove = manager.on("committed", lambda report: own.events.append(("committed", report.version)))
            manager.update(source(1), 1)
            remove()
            manager.update(source(2), 2)
            with pytest.raises(WeightwireError):
                manager.update(source(1), 1)
            rig.end()
            with pytest.raises(WeightwireError):
                manager.update(source(3), 3)
            with pytest.raises(ValueError, match="none of staged, committed"):
                manager.on("commited", print)  # type: ignore[arg-type]
    finally:
        plugin_manager().unregister(plugin)
    assert own.events == [("staged", 1), ("committed", 1), ("staged", 2)]
    of_replicas = [event for event in plugin.events if event[1] == rig.replica]
    assert of_replicas == [("joined", rig.replica), ("lost", rig.replica)]
    assert [event for event in plugin.events if event not in of_replicas] == [
        ("staged", 1), ("committed", 1), ("staged", 2), ("committed", 2), ("failed", 1), ("failed", 3)
    ]  # fmt: skip


# --- slow replicas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Quorum(1), BestEffort(5)])
def test_a_replica_that_is_too_slow_is_left_behind_and_caught_up_by_the_next_update(
    start: Start, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, slow = start(), start()
    told_when_ready_held: list[bool] = []
    send = Channel.send

    def sending(channel: Channel, body: Any, payload: Any = None) -> None:
        if isinstance(body, Abort):
            told_when_ready_held.append(holds(ready, 2))
        send(channel, body, payload)

    monkeypatch.setattr(Channel, "send", sending)
    with SyncManager(timeout_s=600, catch_up="never") as manager:
        manager.update(source(1), 1)
        manager.settings.stragglers = policy
        remove = manager.on("staged", lambda **_: os.kill(slow.worker_pid(), signal.SIGSTOP))
        report = manager.update(source(2), 2)
        (behind,) = report.failed
        assert behind.replica == slow.replica and behind.error is not None
        assert isinstance(WeightwireError.of(behind.error), SyncTimeout) and behind.error.phase == "seal"
        assert told_when_ready_held == [True], "who isn't waited for holds nobody up"
        remove()
        os.kill(slow.worker_pid(), signal.SIGCONT)
        assert holds(ready, 2) and holds(slow, 1)
        manager.settings.stragglers = "report"
        assert manager.update(source(3), 3).failed == ()
    assert holds(ready, 3) and holds(slow, 3)


def test_who_is_ready_keeps_its_lease_while_another_takes_longer_than_the_lease(start: Start) -> None:
    ready, slow = start(), start()
    with SyncManager(timeout_s=120, lease_s=6, catch_up="never") as manager:
        manager.update(source(1), 1)
        manager.on("staged", lambda **_: os.kill(slow.worker_pid(), signal.SIGSTOP))
        wakes = threading.Timer(14, os.kill, (slow.worker_pid(), signal.SIGCONT))
        wakes.start()
        report = manager.update(source(2), 2)
        wakes.join()
    assert ready.replica not in [failed.replica for failed in report.failed]
    assert holds(ready, 2) and holds(slow, 1 if report.failed else 2)


@pytest.mark.parametrize("policy", ["all", Quorum(2)])
def test_where_too_few_replicas_are_ready_none_commits(start: Start, policy: Any) -> None:
    survivor, lost = start(), start()
    with SyncManager(timeout_s=60, stragglers=policy) as manager:
        manager.update(source(1), 1)
        remove = manager.on("staged", lambda **_: kill(lost.worker_pid()))
        with pytest.raises(CommitFailed, match="1 of 2 replicas are ready, the commit wants 2"):
            manager.update(source(2), 2)
        remove()
        assert holds(survivor, 1)
        lost.end()
        manager.settings.stragglers = "all"
        assert manager.update(source(3), 3).failed == ()
    assert holds(survivor, 3)


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_a_quorum_that_is_no_number_of_replicas_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="a quorum is a number of replicas"):
        Quorum(count)
    for seconds in (0, float("nan"), True, "5"):
        with pytest.raises(ValueError, match="deadline_s is a number of seconds above 0"):
            BestEffort(seconds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of 'report', 'all'"):
        SyncManager(stragglers="most")  # type: ignore[arg-type]
