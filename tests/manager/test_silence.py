"""A replica that falls silent costs itself the update and the others nothing: at every step of an update, with any of its
processes, by the limits that a test sets and by the default ones. Each test names the longest time that anybody waited."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from inference_plugin.net.channel import Channel
from inference_plugin.wire import codec
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Body,
    Bucket,
    Commit,
    Describe,
    Done,
    OpenGroup,
    Pause,
    Renew,
    Resume,
    Seal,
    Verify,
    WorkerCard,
)
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.support.managers import SyncManager
from tests.support.phases import AtPhase
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import LONG_S, Rig, eventually, stands_still
from trainer_adapters import LocalSlice
from trainer_adapters.fleet.asking import Ask, ask_all

SILENCE_S = 4.2
LEASE_S = 5.0
"""Less than a silence and the signs of life that come before it: whoever waits for one must renew the others' leases."""

TIMEOUT_S = 120.0

WAIT_S = TIMEOUT_S / 2
"""Far above what the limits add up to, far below the operation's deadline."""


def processes(rig: Rig, victim: str) -> list[int]:
    workers = [worker.pid for worker in rig.card.workers]
    return {"replica": [rig.pid, *workers], "coordinator": [rig.pid], "last worker": workers[-1:]}[victim]


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if number == signal.SIGSTOP:
        eventually(lambda: all(stands_still(pid) for pid in pids), "processes standing still")


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Rig, str, type[Body]], None]]:
    """Stops processes of a replica right before a message of that kind is sent to it; they go on at the end of the test."""
    planned: dict[type[Body], list[tuple[set[str], list[int]]]] = {}
    stopped: list[int] = []
    send = Channel.send
    lock = threading.Lock()
    """Catching up sends too, on a thread of its own: it must not stop what is set going again."""

    def sending(channel: Channel, body: Body, payload: Any = None) -> None:
        with lock:
            for addresses, pids in planned.get(type(body), []):
                if channel.address in addresses:
                    signal_all(pids, signal.SIGSTOP)
        send(channel, body, payload)

    def plan(rig: Rig, victim: str, kind: type[Body]) -> None:
        addresses = {rig.card.address, *(worker.address for worker in rig.card.workers)}
        pids = processes(rig, victim)
        stopped.extend(pids)
        planned.setdefault(kind, []).append((addresses, pids))

    def forget() -> None:
        with lock:
            planned.clear()
            signal_all(stopped, signal.SIGCONT)

    monkeypatch.setattr(Channel, "send", sending)
    plan.over = forget  # type: ignore[attr-defined]
    yield plan
    forget()


class Slow(ShardSource):
    """Takes longer than a lease to be read."""

    def __init__(self, seed: int, seconds: float, stall: Callable[[], None]) -> None:
        super().__init__(checkpoint(seed))
        self._seconds = seconds
        self._stall = stall

    def slices(self) -> Iterator[LocalSlice]:
        self._stall()
        time.sleep(self._seconds)  # as a gather that takes long; whether it was enough decides nothing
        yield from super().slices()


def current(manager: SyncManager, rig: Rig, version: int) -> bool:
    return any((s.replica, s.state, s.version) == (rig.replica, "current", version) for s in manager.replicas())


# --- by the limits of the test -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "victim"),
    [(step, "replica") for step in ("connect", "open", "begin", "renew", "stage", "seal", "commit", "abort", "report")]
    + [(step, "last worker") for step in ("open", "seal", "commit")],
)
def test_one_that_is_stopped_at_a_step_fails_alone_and_is_caught_up_when_it_goes_on(
    start: Start, stops: Any, step: str, victim: str
) -> None:
    tp = 2 if victim == "last worker" else 1
    healthy, doomed = start(), start(tp=tp)
    config = Config(timeout_s=TIMEOUT_S, lease_s=LEASE_S, control_timeout_s=SILENCE_S)
    with SyncManager(config=config) as manager, contextlib.ExitStack() as stack:
        if step not in ("connect", "open"):
            manager.update(source(1), 1)
        weights: ShardSource = source(2)
        if step == "connect":
            stops(doomed, victim, Describe)
            signal_all(processes(doomed, victim), signal.SIGSTOP)
        elif step == "stage":
            stops(doomed, victim, Describe)
            weights = Slow(2, 2 * LEASE_S, lambda: signal_all(processes(doomed, victim), signal.SIGSTOP))
        elif step == "report":
            stops(doomed, victim, Describe)
            at_report = AtPhase("report", lambda: signal_all(processes(doomed, victim), signal.SIGSTOP))
            stack.enter_context(at_report.registered())
        else:
            if step == "renew":
                weights = Slow(2, LEASE_S, lambda: None)
            kinds: dict[str, type[Body]] = {
                "open": OpenGroup, "begin": Begin, "renew": Renew, "seal": Seal, "commit": Commit, "abort": Abort
            }  # fmt: skip
            stops(doomed, victim, kinds[step])
        if step == "abort":
            doomed.ask("fault", step="install", rank=tp - 1)
        began_s = time.monotonic()
        report = manager.update(weights, 2)
        waited_s = time.monotonic() - began_s
        assert waited_s < WAIT_S, f"the longest wait was of {waited_s:.1f} s"
        assert holds(healthy, 2)
        if step == "report":
            assert report.failed == ()
            return
        assert {r.replica: r.status for r in report.replicas} == {
            healthy.replica: "committed", doomed.replica: "failed"
        }  # fmt: skip
        (failed,) = report.failed
        assert failed.error is not None and failed.error.hint
        if step != "abort":
            error = WeightwireError.of(failed.error)
            assert isinstance(error, SyncTimeout) and error.replica == doomed.replica
        stops.over()
        eventually(lambda: current(manager, doomed, 2), "the one that was silent caught up")
        assert holds(doomed, 2)


def test_one_that_stays_silent_costs_the_next_updates_nothing(start: Start, stops: Any) -> None:
    """It is left to catching up, and no longer waited for."""
    healthy, doomed = start(), start()
    config = Config(timeout_s=TIMEOUT_S, lease_s=LEASE_S, control_timeout_s=SILENCE_S)
    with SyncManager(config=config) as manager:
        manager.update(source(1), 1)
        stops(doomed, "replica", Begin)
        assert [r.replica for r in manager.update(source(2), 2).failed] == [doomed.replica]
        for version in range(3, 9):
            report = manager.update(source(version), version)
            assert [(r.replica, r.status) for r in report.replicas] == [(healthy.replica, "committed")]
        statuses = {status.replica: status for status in manager.replicas()}
        assert statuses[doomed.replica].state == "behind" and statuses[doomed.replica].reason
        stops.over()
        eventually(lambda: current(manager, doomed, 8), "the one that was silent caught up")


def test_leases_are_renewed_whatever_the_managers_thread_waits_for_and_no_longer_than_the_update(start: Start) -> None:
    """A source, a listener, a step boundary: each may take longer than a lease."""
    rigs = [start(), start(tp=2)]
    lease_s = 6.0
    with SyncManager(timeout_s=TIMEOUT_S, lease_s=lease_s) as manager:
        manager.on("staged", lambda **_: time.sleep(2 * lease_s))
        rigs[0].ask("hold")
        boundary = threading.Timer(6 * lease_s, rigs[0].ask, ("go on",))
        boundary.start()
        report = manager.update(Slow(1, 2 * lease_s, lambda: None), 1)
        boundary.join()
        assert report.failed == () and all(holds(rig, 1) for rig in rigs)
        assert "weightwire-leases" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("transport", ["zmq", "nixl"])
def test_one_that_takes_no_more_buckets_costs_the_others_no_longer_than_a_silence(
    start: Start, stops: Any, transport: str
) -> None:
    healthy, doomed = start(), start(tp=2)
    config = Config(timeout_s=TIMEOUT_S, lease_s=LEASE_S, control_timeout_s=SILENCE_S)
    with SyncManager(transport=transport, config=config) as manager:
        manager.update(source(1), 1)
        stops(doomed, "last worker", Bucket)
        began_s = time.monotonic()
        report = manager.update(source(2), 2)
        assert time.monotonic() - began_s < WAIT_S
        assert [failed.replica for failed in report.failed] == [doomed.replica] and holds(healthy, 2)
        stops.over()
        assert manager.update(source(3), 3).failed == () and holds(doomed, 3)


@pytest.mark.parametrize("then", ["verify", "update"])
def test_one_that_is_lost_in_its_commit_installs_what_it_was_sent_whatever_its_manager_does_then(
    start: Start, stops: Any, then: str
) -> None:
    """Its link is taken for dead, and it goes on: the bytes that it was told to install must still be there.

    Its lease is long: one that ran out while it stood would let it drop what it was told to install. So is the limit for
    its answer: after that one it is told to abort.
    """
    doomed = start(WEIGHTWIRE_LISTEN="tcp://127.0.0.1:*")
    config = Config(timeout_s=TIMEOUT_S, lease_s=LONG_S, control_timeout_s=TIMEOUT_S, silence_s=SILENCE_S)
    with SyncManager(config=config, transport="shm", install="copy", catch_up="never") as manager:
        manager.update(source(1), 1)
        manager.update(source(2), 2)
        healthy = start() if then == "update" else None
        stops(doomed, "replica", Commit)
        with contextlib.suppress(PeerLost):
            report = manager.update(source(3), 3)
            assert [failed.replica for failed in report.failed] == [doomed.replica]
        assert {status.state for status in manager.replicas() if status.replica == doomed.replica} == {"lost"}
        if healthy is None:
            assert not manager.verify(source(8)).ok
        else:
            for version in (4, 5, 6):
                manager.update(source(version), version)
                assert holds(healthy, version)
        stops.over()
        eventually(lambda: doomed.ask("state")["log"][-2:] == ["installed:policy:3", "resume"], "version 3 in force")
        assert holds(doomed, 3)
        assert manager.update(source(7), 7).failed == () and holds(doomed, 7)


@pytest.mark.parametrize("victim", ["replica", "last worker"])
def test_pauses_verifications_and_the_end_of_a_group_wait_for_nobody_who_is_silent(
    start: Start, stops: Any, victim: str
) -> None:
    healthy, doomed = start(), start(tp=2)
    config = Config(timeout_s=TIMEOUT_S, lease_s=LEASE_S, control_timeout_s=SILENCE_S)
    with SyncManager(config=config, catch_up="never") as manager:
        manager.update(source(1), 1)
        for call, kind in (
            (lambda: manager.verify(source(1)), Verify),
            (manager.pause, Pause),
            (manager.resume, Resume),
        ):
            stops(doomed, victim, kind)
            began_s = time.monotonic()
            replicas = {each.replica: each for each in call().replicas}
            waited_s = time.monotonic() - began_s
            assert waited_s < WAIT_S, f"{kind.__name__} waited for {waited_s:.1f} s"
            silent = replicas[doomed.replica].error
            if victim == "last worker" and kind is not Verify:
                assert silent is None, "the coordinator answers by itself"
            else:
                assert silent is not None and silent.kind == "SyncTimeout"
            assert replicas[healthy.replica].error is None
            stops.over()
            eventually(lambda: manager.versions() == {healthy.replica: 1, doomed.replica: 1}, "both answering")
            if kind is Verify:  # what the coordinator was asked for before is over
                assert manager.verify(source(1)).ok
        signal_all(processes(doomed, victim), signal.SIGSTOP)
        began_s = time.monotonic()
        assert manager.versions() == {healthy.replica: 1, doomed.replica: None}
        with pytest.raises(SyncTimeout):
            manager.close_group()
        assert time.monotonic() - began_s < WAIT_S
        with Channel(healthy.card.workers[0].address) as worker:
            assert worker.request(Describe(), WorkerCard, timeout_s=LONG_S).groups == ()
        signal_all(processes(doomed, victim), signal.SIGCONT)


def test_a_pause_outlives_its_lease_while_another_replica_is_waited_for(start: Start) -> None:
    """One drains for longer than the lease; the one that stands already must not go on meanwhile."""
    ready, drains = start(), start()
    drains.ask("hold")
    lease_s = 6.0
    with SyncManager(timeout_s=TIMEOUT_S, lease_s=lease_s) as manager:
        pausing = threading.Thread(target=manager.pause)
        pausing.start()
        eventually(lambda: "hold" in ready.ask("state")["log"], "the first one standing")
        time.sleep(3 * lease_s)  # what must not happen is seen only when there was time for it
        assert ready.ask("state")["log"][-1] == "hold"
        drains.ask("go on")
        pausing.join(LONG_S)
        assert manager.resume().failed == ()


# --- by the default limits -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_the_default_limits_one_replica_stopped_at_each_step_leaves_the_healthy_one_its_commit(
    start: Start, stops: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All silences in one update, one after the other: open, begin, seal, commit. Together they last longer than a lease."""
    caplog.set_level(logging.INFO)
    healthy = start(tp=2)
    kinds: tuple[type[Body], ...] = (OpenGroup, Begin, Seal, Commit)
    doomed = {kind: start() for kind in kinds}
    with SyncManager() as manager:
        for kind, rig in doomed.items():
            stops(rig, "replica", kind)
        began_s = time.monotonic()
        report = manager.update(source(1), 1)
        waited_s = time.monotonic() - began_s
        statuses = {r.replica: r.status for r in report.replicas}
        assert statuses == {healthy.replica: "committed"} | {rig.replica: "failed" for rig in doomed.values()}
        assert manager.settings.lease_s < waited_s < 0.6 * manager.settings.timeout_s, f"waited for {waited_s:.1f} s"
        assert holds(healthy, 1)
        report = manager.update(source(2), 2)
        assert [(r.replica, r.status) for r in report.replicas] == [(healthy.replica, "committed")], (
            "who is silent is not asked again"
        )
        stops.over()
        for rig in doomed.values():
            eventually(lambda rig=rig: current(manager, rig, 2), "the one that was silent caught up")  # type: ignore[misc]


# --- who is silent, and who is only at work ------------------------------------------------------------------------------


class Peer:
    """A process's socket, in a thread: answers `Describe` (or not), and every other request once it `may_answer`."""

    def __init__(self, address: str, *, gives_signs_of_life: bool) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._lives = gives_signs_of_life
        self.may_answer = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        waiting: list[tuple[list[bytes], int]] = []
        while not self._ended.is_set():
            if self._socket.poll(20):
                *route, content = self._socket.recv_multipart()
                envelope = codec.decode(content)
                if not isinstance(envelope.body, Describe):
                    waiting.append((route, envelope.seq))
                elif self._lives:
                    self._socket.send_multipart([*route, codec.encode(Done(), envelope.seq)])
            while waiting and self.may_answer.is_set():
                route, seq = waiting.pop()
                self._socket.send_multipart([*route, codec.encode(Done(), seq)])
        self._socket.close(linger=0)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def test_one_that_is_at_work_is_waited_for_and_one_that_is_silent_is_not(directory: Any) -> None:
    """One that works answers only when the silent one has been given up."""
    silence_s = 5
    addresses = [f"ipc://{directory}/{name}" for name in ("works", "silent", "answers")]
    peers = [Peer(address, gives_signs_of_life=place == 0) for place, address in enumerate(addresses)]
    peers[2].may_answer.set()
    heard: list[int] = []

    def hear(place: int, _: object) -> None:
        heard.append(place)
        if place == 1:
            peers[0].may_answer.set()

    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(Channel(address)) for address in addresses]
        asks = [
            Ask(channel, Renew("policy", "t"), (lambda address=address: Channel(address),))  # type: ignore[misc]
            for channel, address in zip(channels, addresses, strict=True)
        ]
        works, silent, answers = ask_all(asks, Done, timeout_s=LONG_S, silence_s=silence_s, heard=hear)
    for peer in peers:
        peer.end()
    assert isinstance(works, Done) and isinstance(answers, Done)
    assert isinstance(silent, SyncTimeout) and "no sign of life for 5 s" in silent.message
    assert heard == [2, 1, 0]
