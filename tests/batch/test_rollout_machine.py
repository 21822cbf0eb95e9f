"""The pool's and the worker's decisions, without sockets: seeded schedules in which messages are lost, repeated and
overtaken, and workers are lost, silent and back again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from inference_plugin.wire.errors import BatchError, PeerLost, PoolClosed, StaleRollout, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Announce, Announced, Body, Take, Work
from inference_plugin.wire.messages.rollout import Finished, TaskRef
from trainer_adapters.batch.records import Entry, Kind, Owner, ShardId, VersionSpan
from trainer_adapters.batch.rollouts import machine, machine_state
from trainer_adapters.batch.rollouts.link import Orders, PoolLink
from trainer_adapters.batch.rollouts.machine import PoolMachine
from trainer_adapters.batch.rollouts.machine_io import (
    Action,
    AnnounceCame,
    BatchAsked,
    BatchGivenUp,
    BatchReturned,
    CancelAsked,
    ClearAsked,
    Cleared,
    Closed,
    Drop,
    FailBatch,
    Finish,
    GiveBatch,
    ProcessesEnded,
    Reply,
    Result,
    Rollout,
    Submitted,
    TakeCame,
    Tick,
    VersionSet,
    WorkerLeft,
)

SILENCE_S = 10.0


def entry(task_id: str, owner: str, version: int | None = 0) -> Entry:
    span = None if version is None else VersionSpan(version, version)
    return Entry(ShardId(task_id, "ids"), 1, Kind.DENSE, "int64", (), (), 8, 7, span, owner)


class Pool:
    """A machine, and what became of everything that it said."""

    def __init__(self, rerun: bool = False) -> None:
        self.machine = PoolMachine("pool-1-1-aa", silence_s=SILENCE_S, rerun=rerun)
        self.now_s = 100.0
        self.ended: dict[str, list[Any]] = {}
        self.dropped: dict[str, WeightwireError] = {}
        self.batches: dict[int, tuple[Rollout, ...] | WeightwireError] = {}
        self.replies: dict[Any, Body] = {}

    def on(self, event: Any) -> list[Action]:
        actions = self.machine.on(event, self.now_s)
        for action in actions:
            match action:
                case Finish():
                    self.ended.setdefault(action.task_id, []).append(action.outcome)
                case Drop():
                    self.dropped[action.task_id] = action.error
                case GiveBatch():
                    self.batches[action.waiter] = action.rollouts
                case FailBatch():
                    self.batches[action.waiter] = action.error
                case Reply():
                    self.replies[action.asker] = action.body
        return actions

    def submit(self, *task_ids: str, deadline_s: float | None = None) -> None:
        for task_id in task_ids:
            self.on(Submitted(task_id, b"\x91\x01", deadline_s))

    def outcome(self, task_id: str) -> Any:
        (outcome,) = self.ended[task_id]
        return outcome


class Hand:
    """A worker by hand: one message at a time, none of which is lost unless the test says so."""

    def __init__(self, pool: Pool, name: str = "rollout-1-1-bb", slots: int = 2, process: int = 0) -> None:
        self.pool = pool
        self.link = PoolLink(name, "job", b"", slots, pool=pool.machine.pool)
        self.owner = Owner(f"store-of-{name}", "ipc:///s")
        self.process = (process, 1) if process else None
        self.cleared: list[str] = []

    def send(self, take: Take | None = None) -> int:
        """Sends a `Take`; returns its asker."""
        asker = object()
        self.pool.on(TakeCame(id(asker), take or self.link.take(), self.owner, self.process))
        self.asker = asker
        return id(asker)

    def take(self) -> Orders:
        """Sends a `Take`, which is answered at once."""
        work = self.pool.replies.pop(self.send())
        assert isinstance(work, Work)
        return self.receive(work)

    def receive(self, work: Work) -> Orders:
        orders = self.link.on_work(work)
        self.cleared += orders.clear
        return orders

    def parked(self, asker: int) -> Work | None:
        body = self.pool.replies.pop(asker, None)
        assert body is None or isinstance(body, Work)
        return body

    def finish(self, ref: TaskRef, version: int | None = 0, error: WeightwireError | None = None) -> None:
        self.cleared += self.link.on_end(
            ref, self.link.era, Finished(ref, error=error.info() if error is not None else None)
        ).clear
        self._version, self._error = version, error

    def announce(self, *, lost: bool = False) -> Announced | None:
        announce = self.link.announce()
        assert announce is not None
        asker = object()
        results = tuple(
            Result(one.ref, (entry(one.ref.task_id, self.owner.id, self._version),), {}, self._error)
            for one in announce.finished
        )
        self.pool.on(AnnounceCame(id(asker), announce.worker, results))
        reply = self.pool.replies.pop(id(asker))
        assert isinstance(reply, Announced)
        if lost:
            return None
        self.cleared += self.link.on_announced(reply).clear
        return reply


def refs(orders: Orders) -> list[TaskRef]:
    return [TaskRef(task.task_id, task.attempt) for task in orders.begin]


def test_a_parked_take_is_answered_when_a_task_comes_and_never_beyond_the_slots() -> None:
    pool = Pool()
    hand = Hand(pool, slots=2)
    asker = hand.send()
    assert hand.parked(asker) is None
    pool.submit("a")
    work = hand.parked(asker)
    assert work is not None and [task.task_id for task in work.tasks] == ["a"]
    hand.receive(work)
    pool.submit("b", "c")
    assert [ref.task_id for ref in refs(hand.take())] == ["b"]
    asker = hand.send()
    assert hand.parked(asker) is None and pool.machine.stats.queued == 1


def test_an_idle_worker_gets_a_task_before_a_busier_one() -> None:
    pool = Pool()
    busy, idle = Hand(pool, "rollout-1-1-b1"), Hand(pool, "rollout-2-1-b2")
    busy_asker = busy.send()
    pool.submit("a")
    work = busy.parked(busy_asker)
    assert work is not None
    busy.receive(work)
    busy_asker, idle_asker = busy.send(), idle.send()
    pool.submit("b")
    assert busy.parked(busy_asker) is None and idle.parked(idle_asker) is not None


def test_a_lost_answer_is_given_again_and_a_lost_task_is_handed_out_again() -> None:
    pool = Pool()
    hand = Hand(pool)
    pool.submit("a")
    take = hand.link.take()
    first = hand.parked(hand.send(take))
    again = hand.parked(hand.send(take))  # the same request, sent again
    assert first is not None and first == again and pool.machine.stats.handed_again == 0
    (lost,) = first.tasks
    (ref,) = refs(hand.take())  # a new request: the answers above never arrived
    assert ref.task_id == "a" and ref.attempt != lost.attempt and pool.machine.stats.handed_again == 1
    hand.finish(ref)
    assert hand.announce() == Announced()
    assert isinstance(pool.outcome("a"), Rollout)


def test_a_request_that_was_overtaken_changes_nothing() -> None:
    pool = Pool()
    hand = Hand(pool)
    pool.submit("a")
    old = hand.link.take()
    (ref,) = refs(hand.take())
    asker = hand.send(hand.link.take())
    late = hand.send(old)  # says that nothing runs
    assert hand.parked(late) == Work("pool-1-1-aa", old.seq, silence_s=SILENCE_S) and hand.parked(asker) is None
    hand.finish(ref)
    assert hand.announce() == Announced() and isinstance(pool.outcome("a"), Rollout)


def test_a_repeated_announcement_is_harmless_and_an_unknown_one_is_cleared_and_counted() -> None:
    pool = Pool()
    hand = Hand(pool)
    pool.submit("a")
    (ref,) = refs(hand.take())
    hand.finish(ref)
    hand.announce(lost=True)
    assert hand.announce() == Announced() and hand.link.held == {"a"} and hand.cleared == []
    assert len(pool.ended["a"]) == 1 and pool.machine.stats.duplicates == 1

    strange = TaskRef("never-heard-of", 99)
    hand.link.running.add(strange)
    hand.finish(strange)
    assert hand.announce() == Announced((strange,)) and hand.cleared == ["never-heard-of"]
    assert pool.machine.stats.unknown == 1 and pool.machine.stats.late == 0


@pytest.mark.parametrize("how", ["cancel", "deadline", "clear"])
def test_a_task_that_nobody_wants_is_cancelled_at_its_worker_and_its_rows_are_cleared(how: str) -> None:
    pool = Pool()
    hand = Hand(pool, slots=1)
    pool.submit("a", deadline_s=5.0)
    (ref,) = refs(hand.take())
    asker = hand.send()
    if how == "cancel":
        pool.on(CancelAsked("a"))
    elif how == "clear":
        assert Cleared(1, 1) in pool.on(ClearAsked(("a", "b")))
    else:
        assert pool.machine.wakes_at_s == 105.0
        pool.now_s = 105.0
        pool.on(Tick())
    outcome = pool.outcome("a")
    assert isinstance(outcome, SyncTimeout) if how == "deadline" else outcome is None
    work = hand.parked(asker)
    assert work is not None and work.cancel == (ref,) and work.tasks == ()
    assert hand.receive(work).cancel == (ref,)
    pool.submit("b")
    asker = hand.send()
    assert hand.parked(asker) is None  # told once, and the slot is not free yet
    assert hand.link.on_end(ref, hand.link.era, Finished(ref)).clear == ("a",) and hand.link.dirty
    assert [one.task_id for one in refs(hand.take())] == ["b"]


def test_an_announcement_that_comes_after_the_cancel_is_dropped_and_cleared() -> None:
    pool = Pool()
    hand = Hand(pool)
    pool.submit("a")
    (ref,) = refs(hand.take())
    hand.finish(ref)
    pool.on(CancelAsked("a"))
    assert hand.announce() == Announced((ref,)) and hand.cleared == ["a"]
    assert pool.outcome("a") is None and pool.machine.stats.late == 1 and not hand.link.held


@pytest.mark.parametrize("how", ["process", "silence", "leave"])
@pytest.mark.parametrize("rerun", [False, True])
def test_a_lost_workers_tasks_fail_or_run_elsewhere_and_nothing_stays_with_it(how: str, rerun: bool) -> None:
    pool = Pool(rerun)
    first, second = Hand(pool, "rollout-1-1-b1", process=77), Hand(pool, "rollout-2-1-b2")
    pool.submit("a", "b")
    done, running = refs(first.take())
    first.finish(done)
    first.announce()
    first.send()
    pool.now_s += SILENCE_S / 2
    second_asker = second.send()
    if how == "silence":
        assert pool.machine.wakes_at_s == 100.0 + SILENCE_S
        pool.now_s = 100.0 + SILENCE_S
        pool.on(Tick())
    else:
        pool.on(ProcessesEnded(frozenset({(77, 1)})) if how == "process" else WorkerLeft(first.link.worker))
    assert isinstance(pool.dropped["a"], PeerLost) and not pool.machine.completed.ready  # its rows can't be fetched
    if not rerun:
        error = pool.outcome("b")
        assert isinstance(error, PeerLost) and first.link.worker in error.message
    else:
        work = second.parked(second_asker)
        assert work is not None and "b" not in pool.ended
        (ref,) = refs(second.receive(work))
        second.finish(ref)
        assert second.announce() == Announced()
        assert pool.outcome("b").owner == second.owner and pool.machine.stats.reruns == 1
    if how == "silence":  # it is back: what it did meanwhile counts for nothing, and nothing stays in its store
        first.finish(running)
        assert first.announce() == Announced((running,))
        assert first.take().clear == ("a",) and sorted(first.cleared) == ["a", "b"]
        assert pool.machine.stats.workers == 2 and len(pool.ended["b"]) == 1


def test_a_task_that_has_lost_three_workers_fails() -> None:
    pool = Pool(rerun=True)
    pool.submit("deadly")
    for number in range(3):
        assert "deadly" not in pool.ended
        hand = Hand(pool, f"rollout-{number}-1-b")
        assert len(refs(hand.take())) == 1
        pool.on(WorkerLeft(hand.link.worker))
    error = pool.outcome("deadly")
    assert isinstance(error, PeerLost) and "the last of 3" in error.message


def test_batches_come_in_order_of_completion_first_asked_first_served() -> None:
    pool = Pool()
    hand = Hand(pool, slots=8)
    pool.submit(*"abcde")
    given = refs(hand.take())
    pool.on(BatchAsked(1, 2, None))
    pool.on(BatchAsked(2, 1, None))
    for index in (3, 1, 0, 2):
        hand.finish(given[index])
        hand.announce()
    pool.on(BatchAsked(3, 2, None))
    assert [one.task_id for one in pool.batches[1]] == ["d", "b"]  # type: ignore[union-attr]
    assert [one.task_id for one in pool.batches[2]] == ["a"]  # type: ignore[union-attr]
    assert 3 not in pool.batches
    pool.on(BatchGivenUp(3))
    assert list(pool.machine.completed.ready) == ["c"]
    pool.on(BatchReturned(pool.batches[1]))  # type: ignore[arg-type]
    assert list(pool.machine.completed.ready) == ["d", "b", "c"]


@pytest.mark.parametrize("clears", [True, False])
def test_what_a_pool_remembers_of_tasks_that_are_over_is_bounded(monkeypatch: pytest.MonkeyPatch, clears: bool) -> None:
    """Also of those that were cleared at their owners, of which the pool never hears."""
    monkeypatch.setattr(machine_state, "KEPT", 10)
    pool = Pool()
    hand = Hand(pool)
    for number in range(200):
        pool.submit(task_id := f"t{number}")
        (ref,) = refs(hand.take())
        hand.finish(ref)
        hand.announce()
        pool.on(BatchAsked(number, 1, None))
        assert [rollout.task_id for rollout in pool.batches.pop(number)] == [task_id]  # type: ignore[union-attr]
        if clears:
            pool.on(ClearAsked((task_id,)))
    machine, worker = pool.machine, next(iter(pool.machine.workers.values()))
    assert not machine.tasks and not machine.queue and not machine.completed.ready and not machine.waiters
    assert len(machine.completed.taken) == (0 if clears else 10) and len(machine.completed.ended) <= 10
    assert not worker.assigned and not worker.unwanted and len(worker.accepted) <= 1 and len(worker.clears) <= 2
    assert Cleared(0, 1) in pool.on(ClearAsked(("t0",)))  # forgotten
    assert len(hand.cleared) == (199 if clears else 0)  # the last one is told with the next work


def test_what_is_too_stale_is_cleared_and_fails_and_unknown_versions_pass_only_without_a_limit() -> None:
    pool = Pool()
    hand = Hand(pool, slots=8)
    pool.submit("old", "new", "unknown", "late")
    old, new, unknown, late = refs(hand.take())
    pool.on(VersionSet(7))
    for ref, version in ((old, 4), (new, 5), (unknown, None)):
        hand.finish(ref, version)
        assert hand.announce() == Announced()
    asker = hand.send()
    pool.on(BatchAsked(1, 2, 2))
    assert 1 not in pool.batches
    assert isinstance(pool.dropped["old"], StaleRollout) and "max_staleness is 2" in pool.dropped["old"].message
    assert "VersionSpan(first, last)" in pool.dropped["unknown"].hint
    assert "unknown" in pool.dropped["unknown"].message and pool.machine.stats.stale == 2
    work = hand.parked(asker)
    assert work is not None and sorted(work.clear) == ["old", "unknown"]
    hand.receive(work)
    hand.finish(late, 4)  # too stale for the batch that is waited for: its future fails
    assert hand.announce() == Announced((late,)) and isinstance(pool.outcome("late"), StaleRollout)
    assert sorted(hand.cleared) == ["late", "old", "unknown"]
    pool.on(BatchGivenUp(1))
    pool.on(BatchAsked(2, 1, None))
    assert [one.task_id for one in pool.batches[2]] == ["new"]  # type: ignore[union-attr]


def test_an_id_that_is_in_use_is_refused_and_one_that_failed_or_was_cleared_is_not() -> None:
    pool = Pool()
    hand = Hand(pool)
    pool.submit("a")
    with pytest.raises(BatchError, match="'a' is pending already"):
        pool.submit("a")
    (ref,) = refs(hand.take())
    hand.finish(ref)
    hand.announce()
    with pytest.raises(BatchError, match="'a' is completed already"):
        pool.submit("a")
    pool.on(BatchAsked(1, 1, None))
    with pytest.raises(BatchError, match="'a' is part of a batch already"):
        pool.submit("a")
    assert Cleared(1, 0) in pool.on(ClearAsked(("a",)))
    pool.submit("a")
    pool.on(CancelAsked("a"))
    pool.submit("a")


def test_close_fails_what_is_pending_and_has_every_worker_clear_and_stop() -> None:
    pool = Pool()
    hand = Hand(pool, slots=2)
    pool.submit("ready", "running")
    ready, running = refs(hand.take())
    hand.finish(ready)
    hand.announce()
    pool.submit("more")
    (more,) = refs(hand.take())
    asker = hand.send()
    pool.submit("queued")
    pool.on(BatchAsked(1, 5, None))
    pool.on(Closed())
    pool.on(Closed())
    assert isinstance(pool.outcome("running"), PoolClosed) and isinstance(pool.outcome("queued"), PoolClosed)
    assert isinstance(pool.batches[1], PoolClosed)
    work = hand.parked(asker)
    assert work is not None and work.stop
    orders = hand.receive(work)
    assert orders.leave and orders.clear == ("ready",) and orders.cancel == (running, more)
    with pytest.raises(PoolClosed):
        pool.submit("another")
    pool.on(BatchAsked(2, 1, None))
    assert isinstance(pool.batches[2], PoolClosed)


def test_a_worker_that_knows_another_pool_is_told_whom_it_works_for_and_clears_that_ones_rows() -> None:
    pool = Pool()
    hand = Hand(pool)
    hand.link.pool = "pool-of-before"
    hand.link.held = {"old"}
    hand.link.running = {TaskRef("older", 1)}
    orders = hand.take()
    assert orders.clear == ("old",) and orders.cancel == (TaskRef("older", 1),) and hand.link.pool == pool.machine.pool
    assert hand.link.on_end(TaskRef("older", 1), 0, Finished(TaskRef("older", 1))).clear == ("older",)


# --- seeded schedules ------------------------------------------------------------------------------------------------


@dataclass
class SimulatedWorker:
    """A worker around the real `PoolLink`: a store, functions that run, and two channels as `Channel` has them, of which each
    takes only the answer to the last message sent."""

    link: PoolLink
    owner: Owner
    process: tuple[int, int]
    store: set[str] = field(default_factory=set)
    running: dict[tuple[int, TaskRef], None] = field(default_factory=dict)
    take_number: int = 0
    announce_number: int = 0
    take_open: bool = False
    announce_open: bool = False
    alive: bool = True
    stopped: bool = False


class Schedule:
    """One seed: a pool, some workers, and a network that loses, repeats and delays."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = Pool(rerun=self.random.random() < 0.5)
        self.faults = self.random.choice((0.0, 0.05, 0.3))
        self.workers: list[SimulatedWorker] = []
        self.net: list[tuple[str, int, Any, Any]] = []
        self.submitted: list[str] = []
        self.owed: dict[str, int] = {}
        self.users: dict[str, str] = {}
        self.cleared_by_user: set[str] = set()
        self.waiters = 0
        for _ in range(self.random.randint(1, 4)):
            self.start_worker()

    def start_worker(self) -> None:
        number = len(self.workers)
        link = PoolLink(f"rollout-{number}-1-c", "job", b"", self.random.randint(1, 4))
        self.workers.append(SimulatedWorker(link, Owner(f"store-{number}", "ipc:///s"), (1000 + number, 1)))

    # each of these is one step

    def submit(self) -> None:
        again = [task_id for task_id in self.submitted if task_id in self.pool.ended and self.random.random() < 0.1]
        task_id = self.random.choice(again) if again and self.random.random() < 0.3 else f"task-{len(self.submitted)}"
        machine = self.pool.machine
        if task_id in machine.tasks or task_id in machine.completed.ready or task_id in machine.completed.taken:
            return
        self.submitted.append(task_id)
        self.owed[task_id] = self.owed.get(task_id, 0) + 1
        self.cleared_by_user.discard(task_id)
        self.pool.submit(task_id, deadline_s=self.random.choice((None, None, None, 3.0, 30.0)))

    def send(self, worker: SimulatedWorker) -> None:
        if not worker.alive or worker.stopped:
            return
        index = self.workers.index(worker)
        if self.random.random() < 0.5 and (not worker.take_open or worker.link.dirty or self.random.random() < 0.2):
            worker.take_number += 1
            worker.take_open = True
            self.net.append(("take", index, worker.take_number, worker.link.take()))
        elif worker.link.finished and (not worker.announce_open or self.random.random() < 0.2):
            worker.announce_number += 1
            worker.announce_open = True
            self.net.append(("announce", index, worker.announce_number, worker.link.announce()))

    def deliver(self) -> None:
        """Any message that is under way: messages overtake each other, except that a worker's own requests of one kind keep
        their order, as on one connection."""
        if not self.net:
            return
        at = self.random.randrange(len(self.net))
        kind, index, number, body = self.net[at]
        if kind in ("take", "announce"):
            at = next(i for i, one in enumerate(self.net) if one[:2] == (kind, index))
            kind, index, number, body = self.net[at]
        if self.random.random() < self.faults:
            if self.random.random() < 0.7:
                del self.net[at]  # lost
                if kind in ("take", "announce"):
                    return
            return
        if self.random.random() >= self.faults / 2:
            del self.net[at]  # else it comes once more
        worker = self.workers[index]
        if kind == "take":
            self.pool.on(TakeCame(("work", index, number), body, worker.owner, worker.process))
        elif kind == "announce":
            self.pool.on(AnnounceCame(("announced", index, number), body.worker, self.results(worker, body)))
        elif kind == "work" and worker.alive and worker.take_open and number == worker.take_number:
            worker.take_open = False
            self.perform(worker, worker.link.on_work(body))
        elif kind == "announced" and worker.alive and worker.announce_open and number == worker.announce_number:
            worker.announce_open = False
            self.perform(worker, worker.link.on_announced(body))
        self.collect()

    def results(self, worker: SimulatedWorker, announce: Announce) -> tuple[Result, ...]:
        return tuple(
            Result(one.ref, error=WeightwireError("the function failed"))
            if one.error is not None
            else Result(one.ref, (entry(one.ref.task_id, worker.owner.id, len(one.ref.task_id) % 3),), {})
            for one in announce.finished
        )

    def perform(self, worker: SimulatedWorker, orders: Orders) -> None:
        worker.store.difference_update(orders.clear)
        for task in orders.begin:
            worker.running[worker.link.era, TaskRef(task.task_id, task.attempt)] = None
        if orders.leave:
            worker.stopped = True
            self.pool.on(WorkerLeft(worker.link.worker))

    def end_function(self, worker: SimulatedWorker) -> None:
        if not worker.running or not worker.alive:
            return
        era, ref = self.random.choice(list(worker.running))
        first = next(one for one in worker.running if one[1].task_id == ref.task_id)
        if first != (era, ref) or ref.task_id in {one.task_id for one in worker.link.finished}:
            return  # attempts at one task take turns
        del worker.running[era, ref]
        if self.random.random() < 0.2:
            finished = Finished(ref, error=WeightwireError("the function failed").info())
        else:
            worker.store.add(ref.task_id)
            finished = Finished(ref)
        self.perform(worker, worker.link.on_end(ref, era, finished))
        if finished.error is not None:
            worker.store.discard(ref.task_id)

    def use(self) -> None:
        """The user does something."""
        machine, choice = self.pool.machine, self.random.random()
        if choice < 0.3 and self.submitted:
            self.pool.on(CancelAsked(self.random.choice(self.submitted)))
        elif choice < 0.5 and self.submitted:
            task_id = self.random.choice(self.submitted)
            self.pool.on(ClearAsked((task_id,)))
            self.users.pop(task_id, None)
        elif choice < 0.8:
            self.waiters += 1
            stale = self.random.choice((None, None, 1)) if machine.version is not None else None
            self.pool.on(BatchAsked(self.waiters, self.random.randint(1, 3), stale))
            if self.waiters not in self.pool.batches and self.random.random() < 0.7:
                self.pool.on(BatchGivenUp(self.waiters))
        else:
            self.pool.on(VersionSet((machine.version or 0) + 1))
        self.collect()

    def lose(self) -> None:
        self.pool.now_s += self.random.choice((0.1, 1.0, 4.0))
        choice = self.random.random()
        if choice < 0.1 and len(self.workers) < 12:
            worker = self.random.choice(self.workers)
            worker.alive = False
            self.pool.on(ProcessesEnded(frozenset({worker.process})))
            self.start_worker()
        elif choice < 0.2 and self.faults:
            self.pool.now_s += SILENCE_S + 1  # all of them are silent for too long
        self.pool.on(Tick())
        self.collect()

    def collect(self) -> None:
        """Puts the pool's answers on the net, and batches into the user's hands."""
        for asker, body in self.pool.replies.items():
            self.net.append((*asker, body))
        self.pool.replies.clear()
        for given in self.pool.batches.values():
            if isinstance(given, tuple):
                self.users.update({one.task_id: one.owner.id for one in given})
        self.pool.batches.clear()
        self.check()

    def check(self) -> None:
        machine = self.pool.machine
        for task_id, outcomes in self.pool.ended.items():
            assert len(outcomes) + (task_id in machine.tasks) == self.owed[task_id], f"{task_id} ended twice"
        queued = set(machine.queue)
        assigned = {ref: worker for worker in machine.workers.values() for ref in worker.assigned}
        for worker in machine.workers.values():
            assert not (worker.silent and worker.assigned), "something stays assigned to a lost worker"
            assert len(worker.assigned) <= worker.slots
        for task_id, task in machine.tasks.items():
            assert (task_id in queued) != (task.ref in assigned), f"{task_id} is neither queued nor running, or both"
        assert len(assigned) == len(machine.tasks) - len(queued)

    def run(self) -> None:
        for _ in range(self.random.randint(50, 300)):
            step = self.random.random()
            worker = self.random.choice(self.workers)
            if step < 0.1:
                self.submit()
            elif step < 0.4:
                self.send(worker)
            elif step < 0.75:
                self.deliver()
            elif step < 0.9:
                self.end_function(worker)
            elif step < 0.97:
                self.use()
            else:
                self.lose()
        if self.random.random() < 0.5:
            self.settle()

    def settle(self) -> None:
        """Faults end; everything that is under way arrives, and everything that runs ends."""
        self.faults = 0.0
        machine = self.pool.machine
        for _ in range(500):
            for worker in self.workers:
                if worker.alive:
                    for asking in ("take_open", "announce_open"):
                        lost = not any(one[1] == self.workers.index(worker) for one in self.net)
                        if lost and getattr(worker, asking):
                            setattr(worker, asking, False)  # it is sent again in time
                    self.send(worker)
                    self.end_function(worker)
            while self.net:
                self.deliver()
            # A message that comes after its process has ended: the process is watched again, and has ended again.
            self.pool.on(ProcessesEnded(frozenset(w.process for w in self.workers if not w.alive)))
            self.collect()
            alive = [worker for worker in self.workers if worker.alive]
            quiet = not any(w.running or w.link.finished or (w.link.dirty and not w.stopped) for w in alive)
            quiet = quiet and (not machine.closed or all(worker.stopped for worker in alive))
            if quiet and not machine.tasks and not any(worker.clears for worker in machine.workers.values()):
                break
        else:
            raise AssertionError(
                f"it never comes to rest: {self.net}, {machine.tasks}, {machine.workers}, {self.workers}"
            )
        for task_id, count in self.owed.items():
            assert len(self.pool.ended[task_id]) == count, f"{task_id} never ended"
        held = {task_id: name for task_id, (_, name) in machine.completed.ready.items()}
        for worker in self.workers:
            if worker.alive:
                mine = {task_id for task_id, name in held.items() if name == worker.link.worker}
                assert mine <= worker.store, "rows that the pool has are gone"
                assert worker.store <= mine | self.users.keys(), (
                    f"rows that nobody has stay: {worker.store - mine - self.users.keys()}"
                )
                batches = {task_id for task_id, owner in self.users.items() if owner == worker.owner.id}
                assert batches <= worker.store, "rows of a batch that the user has are gone"
                assert worker.link.held <= worker.store, "tasks are held whose rows were cleared"

    def close(self) -> None:
        self.pool.on(Closed())
        self.settle()
        for worker in self.workers:
            assert not worker.alive or worker.store <= self.users.keys(), "rows of a closed pool stay"


@pytest.mark.parametrize("block", range(8))
def test_any_schedule_ends_every_future_once_and_leaves_no_rows_behind(block: int) -> None:
    for seed in range(block * 300, (block + 1) * 300):
        try:
            schedule = Schedule(seed)
            schedule.run()
            schedule.close()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_task_that_is_submitted_again_never_begins_before_its_earlier_rows_are_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "MAX_CLEARED", 4)
    pool = Pool()
    names = [f"t{i}" for i in range(6)]
    hand = Hand(pool, slots=len(names))
    pool.submit(*names)
    for ref in refs(hand.take()):
        pool.on(AnnounceCame(0, hand.link.worker, (Result(ref, (entry(ref.task_id, hand.owner.id),)),)))
    hand.link.running.clear()
    pool.on(ClearAsked(tuple(names)))
    pool.submit(names[-1])
    orders = hand.take()
    assert len(orders.clear) == 4 and not orders.begin
    orders = hand.take()
    assert orders.clear == tuple(names[-2:]) and [task.task_id for task in orders.begin] == names[-1:]
