"""Replicas that join, fall behind, tear or leave: what the manager knows of them, and how they are caught up between updates."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from inference_plugin.net.channel import Channel
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire.errors import CommitFailed, SyncTimeout, TornReplica, TransportUnavailable
from inference_plugin.wire.tracing import Trace
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source, waiting
from tests.support.managers import SyncManager
from tests.support.rig import Rig, eventually, kill
from trainer_adapters.fleet import machine
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.settings import Quorum
from trainer_adapters.update.trainer_ranks import TrainerRanks
from trainer_adapters.update.transaction import Transaction


@pytest.fixture
def manager(directory: Path) -> Iterator[SyncManager]:
    with SyncManager(timeout_s=60) as one:
        yield one


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that this process, the trainer, sends requests to."""
    sent: list[str] = []
    send = Channel.send

    def sending(channel: Channel, *arguments: Any, **options: Any) -> None:
        sent.append(channel.address)
        send(channel, *arguments, **options)

    monkeypatch.setattr(Channel, "send", sending)
    return sent


def states(manager: SyncManager) -> dict[str, tuple[str, int | None]]:
    return {status.replica: (status.state, status.version) for status in manager.replicas()}


def seen(manager: SyncManager, rig: Rig, state: str, version: int | None) -> bool:
    return states(manager).get(rig.replica) == (state, version)


def installed(rig: Rig) -> list[str]:
    return [line for line in rig.ask("state")["log"] if line.startswith("installed")]


def paused(rig: Rig, times: int = 1) -> Callable[[], bool]:
    return lambda: rig.ask("state")["log"].count("pause:drain") == times


# --- who is caught up, and who isn't asked for it ---------------------------------------------------------------------


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("transport", ["shm", "zmq", "nixl"])
def test_a_replica_that_joins_gets_the_last_version_at_once_and_no_other_one_is_asked(
    start: Start, asked: list[str], transport: str, install: Any
) -> None:
    first = start(tp=2)
    with SyncManager(timeout_s=60, install=install, transport="shm") as manager:
        for version in (1, 2, 3):
            manager.update(source(version), version)
        manager.settings.transports = [transport_named(transport)]  # the newcomer's: a host apart would have zmq only
        asked.clear()
        second = start(tp=2)
        eventually(lambda: seen(manager, second, "current", 3), "the newcomer caught up")
        assert holds(second, 3) and installed(second) == ["installed:policy:3"]
        others = {first.card.address, *(worker.address for worker in first.card.workers)}
        assert asked and not others & set(asked), "p2p: the others notice nothing"
        if transport == "shm":
            inodes = {str(os.fstat(s.fd).st_ino) for s in manager.context.writer.senders["shm"].owned.values()}  # type: ignore[attr-defined]
            mapped = Path(f"/proc/{second.worker_pid()}/maps").read_text().splitlines()
            assert {line.split()[4] for line in mapped if "memfd:weightwire" in line} <= inodes, "no copy of it is made"
        # From now on it is a replica like the others, and has a way back.
        asked.clear()
        manager.settings.transports = [transport_named("shm"), transport_named("zmq")]
        report = manager.update(source(4), 4)
        assert {r.replica: (r.status, r.transport) for r in report.replicas} == {
            first.replica: ("committed", "shm"), second.replica: ("committed", "shm")
        }, "it was not offered before"  # fmt: skip
        second.ask("fault", rank=1, step="install")
        (failed,) = manager.update(source(5), 5).failed
        assert failed.replica == second.replica and failed.error is not None and "undone" in failed.error.message
        eventually(lambda: seen(manager, second, "current", 5), "the one that failed caught up")
        assert holds(first, 5) and holds(second, 5)


def test_an_update_goes_on_without_a_replica_that_is_being_caught_up_and_leaves_it_its_bytes(
    start: Start, manager: SyncManager
) -> None:
    first = start()
    manager.update(source(1), 1)
    manager.settings.in_flight = "drain"
    second = start()
    eventually(paused(second), "the newcomer's commit, which waits for its requests")
    manager.settings.in_flight = "keep"
    for version in (2, 3):
        report = manager.update(source(version), version)
        assert [(r.replica, r.status) for r in report.replicas] == [(first.replica, "committed")]
        assert seen(manager, second, "joining", None)
    manager.settings.in_flight = "drain"
    second.ask("drained")
    eventually(paused(second, 2), "the commit of the version that it missed")
    assert seen(manager, second, "behind", 1) and holds(second, 1), "those bytes were not written over"
    second.ask("drained")
    eventually(lambda: seen(manager, second, "current", 3), "the newcomer caught up")
    assert holds(second, 3) and installed(second) == ["installed:policy:1", "installed:policy:3"]


def test_whoever_wants_all_replicas_is_told_of_one_that_is_still_being_caught_up(
    start: Start, manager: SyncManager
) -> None:
    """A verification was `ok` without it, and `stragglers="all"` committed the others."""
    first = start()
    manager.update(source(1), 1)
    manager.settings.in_flight = "drain"
    second = start()
    eventually(paused(second), "the newcomer's commit, which waits for its requests")
    manager.settings.in_flight, manager.settings.timeout_s = "keep", 6
    verified = manager.verify(source(1))
    errors = {one.replica: one.error.message if one.error else "" for one in verified.replicas}
    assert errors == {first.replica: "", second.replica: "it is still being caught up"} and not verified.ok
    manager.settings.stragglers = "all"
    with pytest.raises(CommitFailed, match=r"1 of 2 replicas are ready.*none commits.*it is still being caught up"):
        manager.update(source(2), 2)
    assert holds(first, 1)
    second.ask("drained")
    eventually(lambda: seen(manager, second, "current", 1), "the newcomer caught up")


def test_a_replica_that_registers_during_an_update_waits_for_its_end(start: Start, manager: SyncManager) -> None:
    first = start()
    manager.update(source(1), 1)
    first.ask("hold")
    pending = manager.update_async(source(2), 2)
    eventually(lambda: waiting(first), "the commit at the held step boundary")
    second = start()
    eventually(lambda: seen(manager, second, "joining", None), "the newcomer")
    assert installed(second) == []
    first.ask("go on")
    assert [r.replica for r in pending.result(600).replicas] == [first.replica]
    eventually(lambda: seen(manager, second, "current", 2), "the newcomer caught up")
    assert installed(second) == ["installed:policy:2"]


def test_an_update_waits_for_the_only_replica_there_is(start: Start, manager: SyncManager) -> None:
    first = start()
    manager.update(source(1), 1)
    first.end()
    manager.settings.in_flight = "drain"
    second = start()
    eventually(paused(second), "the newcomer's commit, which waits for its requests")
    manager.settings.in_flight = "keep"
    pending = manager.update_async(source(2), 2)
    second.ask("drained")
    assert [(r.replica, r.status) for r in pending.result(600).replicas] == [(second.replica, "committed")]
    assert installed(second) == ["installed:policy:1", "installed:policy:2"]


def test_a_replica_that_was_left_behind_is_caught_up_without_another_update(
    start: Start, manager: SyncManager, asked: list[str]
) -> None:
    ready, slow = start(), start()
    manager.update(source(1), 1)
    manager.settings.stragglers = Quorum(1)
    manager.on("staged", lambda **_: os.kill(slow.worker_pid(), signal.SIGSTOP))
    wakes = manager.on("committed", lambda **_: (asked.clear(), os.kill(slow.worker_pid(), signal.SIGCONT)))
    manager.update(source(2), 2)
    wakes()
    eventually(lambda: seen(manager, slow, "current", 2), "the slow one caught up")
    assert holds(slow, 2) and holds(ready, 2)
    assert ready.card.address not in asked and ready.card.workers[0].address not in asked


@pytest.mark.parametrize(
    ("catch_up", "transport"), [("auto", "zmq"), ("always", "zmq"), ("always", "collective"), ("never", "shm")]
)
def test_without_shared_memory_it_waits_for_the_next_update_unless_bytes_are_kept_for_it(
    start: Start, catch_up: Any, transport: str
) -> None:
    start()
    with SyncManager(timeout_s=60, transport=transport, catch_up=catch_up) as manager:
        manager.update(source(1), 1)
        manager.update(source(2), 2)
        second = start()
        if catch_up == "always":
            eventually(lambda: seen(manager, second, "current", 2), "the newcomer caught up")
        manager.update(source(3), 3)
        eventually(lambda: seen(manager, second, "current", 3), "the newcomer's version")
        assert holds(second, 3)
        assert installed(second) == [f"installed:policy:{v}" for v in ((2, 3) if catch_up == "always" else (3,))]


def test_bytes_are_kept_on_one_host_only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainerRanks, "on_one_host", False)
    with pytest.raises(TransportUnavailable, match="the trainer's ranks are on several hosts"):
        SyncManager(catch_up="always")
    SyncManager().close()


def test_a_manager_that_has_no_bytes_lets_newcomers_wait_for_its_first_update(start: Start) -> None:
    with SyncManager(timeout_s=60) as manager:
        first = start()
        eventually(lambda: seen(manager, first, "joining", None), "the first one")
        manager.update(source(1), 1)
        assert seen(manager, first, "current", 1)
        manager.close_group()
        assert seen(manager, first, "joining", None)
        manager.update(source(2), 2)
    second = start()
    with SyncManager(timeout_s=60) as successor:
        assert states(successor) == {first.replica: ("joining", None), second.replica: ("joining", None)}
        report = successor.update(source(2), 2)
        assert {r.replica: r.status for r in report.replicas} == dict.fromkeys(
            [first.replica, second.replica], "committed"
        )
        third = start()
        eventually(lambda: seen(successor, third, "current", 2), "the third one caught up")
    assert all(holds(rig, 2) for rig in (first, second, third))


# --- what can go wrong with it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "zmq", "nixl"])
def test_bytes_that_are_no_longer_what_the_trainer_wrote_are_not_installed(
    start: Start, directory: Path, transport: str
) -> None:
    with SyncManager(timeout_s=60, transport="shm") as manager:
        check_changed_bytes(start, manager, transport)


def check_changed_bytes(start: Start, manager: SyncManager, transport: str) -> None:
    first = start()
    manager.update(source(1), 1)
    for segment in manager.context.writer.senders["shm"].owned.values():  # type: ignore[attr-defined]
        segment.tensor[0] ^= 1
    manager.settings.transports = [transport_named(transport)]
    second = start()
    words = "embed.weight[0:48, 0:16] is not what the trainer"
    eventually(lambda: words in {s.replica: s.reason for s in manager.replicas()}.get(second.replica, ""), words)
    assert seen(manager, second, "joining", None) and holds(second, 0) and installed(second) == []
    manager.settings.transports = [transport_named("shm"), transport_named("zmq")]
    assert manager.update(source(2), 2).failed == ()
    eventually(lambda: seen(manager, second, "current", 2), "the next version")  # it may just be tried again meanwhile
    assert holds(first, 2) and holds(second, 2)


@pytest.mark.parametrize("end", ["killed", "leaves"])
def test_a_replica_that_ends_while_it_is_caught_up_is_lost_and_nobody_else_is_harmed(
    start: Start, manager: SyncManager, end: str
) -> None:
    first = start()
    manager.update(source(1), 1)
    manager.settings.in_flight = "drain"
    doomed = start(tp=2)
    eventually(paused(doomed), "the newcomer's commit, which waits for its requests")
    manager.settings.in_flight = "keep"
    pending = manager.update_async(source(2), 2)
    if end == "killed":
        kill(doomed.pid)
    else:
        doomed.ask("stop")
    assert pending.result(600).failed == () and holds(first, 2)
    eventually(lambda: states(manager)[doomed.replica][0] == "lost", "the loss")
    assert manager.update(source(3), 3).failed == ()


def test_a_manager_that_is_closed_while_it_catches_up_leaves_the_old_version_or_the_new_one(start: Start) -> None:
    first = start()
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        second = start()
        eventually(lambda: second.replica in states(manager), "the newcomer")
    assert holds(first, 1) and (holds(second, 0) or holds(second, 1))
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(source(2), 2).failed == ()
    assert holds(first, 2) and holds(second, 2)


class Obstacle:
    """Something that fails in the threads that catch up, a few times."""

    def __init__(self, times: int, error: BaseException) -> None:
        self.left = times
        self._error = error

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = getattr(arguments[0], "name", "") if isinstance(arguments[0], threading.Thread) else ""
            if self.left and "catch-up" in (started + threading.current_thread().name):
                self.left -= 1
                raise self._error
            return function(*arguments, **options)

        return call


NO_DESCRIPTOR = zmq.ZMQError(errno.EMFILE)
OBSTACLES: dict[str, tuple[Any, str, BaseException]] = {
    "no thread": (threading.Thread, "start", RuntimeError("can't start new thread")),
    "no descriptor": (zmq.Context, "socket", NO_DESCRIPTOR),
    "no descriptor for a trace": (Trace, "begun", OSError(errno.EMFILE, "Too many open files")),
    "no memory": (Transaction, "agree", MemoryError("no memory is left")),
    "an exit": (Transaction, "commit", SystemExit(1)),
    "bookkeeping": (Fleet, "caught_up", KeyError("a bug of ours")),
    "a request that can't be made": (ReplicaSession, "ask_of_coordinator", OSError(errno.EBADF, "Bad file descriptor")),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_whatever_ends_a_catch_up_its_bytes_are_given_back_and_it_is_tried_again(
    start: Start, manager: SyncManager, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    monkeypatch.setattr(machine, "RETRY_S", 0.1)
    start()
    manager.update(source(1), 1)
    manager.update(source(2), 2)
    place, name, error = OBSTACLES[obstacle]
    fails = Obstacle(2, error)
    reasons: list[str] = []
    pinned: list[frozenset[str]] = []

    def noted(status: Any, **_: Any) -> None:
        if status.state in ("joining", "behind") and status.reason:
            reasons.append(status.reason)
            pinned.append(manager.fleet.machine.segments_read())  # type: ignore[union-attr]

    manager.on("replica_state", noted)
    wrapped = fails.around(getattr(place, name))
    monkeypatch.setattr(place, name, staticmethod(wrapped) if place is Trace else wrapped)
    second = start(tp=2)
    eventually(lambda: seen(manager, second, "current", 2), "the newcomer caught up")
    assert fails.left == 0, "it was tried again each time"
    assert reasons and all(str(error) in reason for reason in reasons)
    assert pinned[0] == frozenset()
    assert holds(second, 2) and manager.update(source(3), 3).failed == ()


# --- what is known of them --------------------------------------------------------------------------------------------


class Heard:
    """A plug-in: what it was told of each replica."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}

    @hookimpl
    def weightwire_replica_state(self, status: Any) -> None:
        self.states.setdefault(status.replica, []).append(status.state)


def test_states_are_known_without_asking_and_told_as_they_change(start: Start, asked: list[str]) -> None:
    plugin, called = Heard(), Heard()
    plugin_manager().register(plugin)
    try:
        with SyncManager(timeout_s=60) as manager:
            manager.on("replica_state", lambda group, status: called.weightwire_replica_state(status))
            rig, other = start(tp=2), start()
            eventually(lambda: len(plugin.states) == 2, "both, before any update")
            manager.update(source(1), 1)
            rig.ask("fault", rank=1, step="install")
            rig.ask("fault", rank=0, step="undo")
            with pytest.raises(TornReplica):
                manager.update(source(2), 2).raise_failed()
            asked.clear()
            torn = {status.replica: status for status in manager.replicas()}[rig.replica]
            assert (torn.state, torn.engine, torn.version) == ("torn", "plain", None)
            assert "the roll-back failed" in torn.reason
            assert seen(manager, other, "current", 2) and asked == []
            manager.update(source(3), 3)
            assert states(manager) == {rig.replica: ("current", 3), other.replica: ("current", 3)}
            kill(rig.pid)
            eventually(lambda: plugin.states[rig.replica][-1] == "lost", "the end of its process, with no update")
            other.ask("stop")
            eventually(lambda: plugin.states[other.replica][-1] == "lost", "that it left")
    finally:
        plugin_manager().unregister(plugin)
    assert plugin.states[rig.replica] == ["joining", "current", "torn", "current", "lost"]
    assert plugin.states[other.replica] == ["joining", "current", "lost"]
    assert called.states == plugin.states


def test_a_manager_that_was_dropped_brings_its_model_into_no_engine_that_starts_later(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    manager, told = SyncManager(timeout_s=60), list[str]()
    first = start()
    manager.update(source(1), 7)
    manager.on("replica_state", lambda **facts: told.append(facts["status"].replica))
    del manager
    gc.collect()
    assert "was dropped without close()" in caplog.text
    first.end()
    newcomer, last = start(), start()
    eventually(lambda: last.replica in told, "that its thread has looked at the last one, and so at the one before")
    with SyncManager(timeout_s=60) as another:
        assert not another.update(source(2), 1).failed, "none serves version 7"
    assert holds(newcomer, 2) and holds(last, 2)


def test_an_update_whose_replicas_are_all_being_caught_up_is_a_timeout_that_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    with SyncManager(timeout_s=1) as manager:
        monkeypatch.setattr(machine.FleetMachine, "free", lambda *_: set())
        with pytest.raises(SyncTimeout, match="all replicas are still being caught up"):
            manager.update(source(1), 1)
