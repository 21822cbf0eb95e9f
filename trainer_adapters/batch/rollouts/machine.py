"""The decisions of `RolloutPool`, without sockets, threads or clocks: which worker runs which task, which announcement counts,
who is lost, and when a batch is ready.

    queued --> running --> ready --> taken        by hand-out, announcement, batch
       any --> ended                              failed, cancelled, timed out, stale, lost; its future has ended by then

A task that was handed out is an *attempt*, and attempts are numbered over the whole pool. An announcement counts only for the
attempt that its worker is to run, so late, duplicate and unknown announcements change nothing. What a worker runs and
should not run is derived from its last `Take`: cancels need no queue, and a lost one is told again.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

from inference_plugin.wire.errors import (
    BatchError,
    ConfigError,
    PeerLost,
    PoolClosed,
    SyncTimeout,
    WeightwireError,
)
from inference_plugin.wire.messages import Announced, Work
from inference_plugin.wire.messages.rollout import MAX_CLEARED
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
    Event,
    FailBatch,
    Finish,
    GiveBatch,
    Log,
    PoolStats,
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
from trainer_adapters.batch.rollouts.machine_state import Completed, Deadlines, Task, Worker, staleness
from trainer_adapters.batch.rollouts.task_queue import TaskQueue

__all__ = ["PoolMachine"]

ATTEMPTS = 3
"""A task that lost this many workers fails: it may be what kills them."""

SILENT_KEPT = 64
"""This many silent workers stay known: one that comes back must be told what to clear."""


class PoolMachine:
    """`on` takes one event and returns the actions to perform. `wakes_at_s`: when the next `Tick` is due. `last_failure`: of the
    task that failed last, or whose rollout was dropped."""

    def __init__(self, pool: str, *, silence_s: float, rerun: bool) -> None:
        self.pool = pool
        self.tasks: dict[str, Task] = {}
        self.queue = TaskQueue(self.tasks)
        self.completed = Completed()
        self.workers: dict[str, Worker] = {}
        self.waiters: OrderedDict[int, BatchAsked] = OrderedDict()
        self.version: int | None = None
        self.closed = False
        self.last_failure: WeightwireError | None = None
        self._silence_s = silence_s
        self._rerun = rerun
        self._deadlines = Deadlines(self.tasks)
        self._counts: Counter[str] = Counter()
        self._actions: list[Action] = []

    def on(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case Submitted():
                self._submit(event, now_s)
            case TakeCame():
                self._take(event, now_s)
            case AnnounceCame():
                self._announce(event, now_s)
            case WorkerLeft():
                if (worker := self.workers.get(event.worker)) is not None:
                    self._lose(worker, "left the pool", comes_back=False)
            case ProcessesEnded():
                for worker in [each for each in self.workers.values() if each.process in event.processes]:
                    self._lose(worker, "has ended", comes_back=False)
            case CancelAsked():
                self._cancel(event.task_id)
            case ClearAsked():
                self._clear(event.task_ids)
            case BatchAsked():
                self._ask_batch(event)
            case BatchGivenUp():
                self.waiters.pop(event.waiter, None)
            case BatchReturned():
                self._return(event.rollouts)
            case VersionSet():
                self.version = event.version
            case Tick():
                self._tick(now_s)
            case Closed():
                self._close()
        self._give_batches()
        self._hand_out()
        actions, self._actions = self._actions, []
        return actions

    # --- what can be asked -------------------------------------------------------------------------------------------

    @property
    def wakes_at_s(self) -> float:
        silent_s = (worker.heard_s + self._silence_s for worker in self.workers.values() if not worker.silent)
        return min(self._deadlines.next_s, min(silent_s, default=math.inf))

    @property
    def stats(self) -> PoolStats:
        there = [worker for worker in self.workers.values() if not worker.silent]
        return PoolStats(
            workers=len(there),
            slots=sum(worker.slots for worker in there),
            queued=len(self.queue),
            running=len(self.tasks) - len(self.queue),
            ready=len(self.completed.ready),
            version=self.version,
            **self._counts,
        )

    # --- the user's side ---------------------------------------------------------------------------------------------

    def _submit(self, event: Submitted, now_s: float) -> None:
        task_id = event.task_id
        if self.closed:
            raise PoolClosed("the pool is closed and takes no task")
        state = "pending" if task_id in self.tasks else "completed" if task_id in self.completed.ready else ""
        if state or task_id in self.completed.taken:
            raise BatchError(
                f"task id {task_id!r} is {state or 'part of a batch'} already",
                hint="task ids are unique over a training; one that failed, or that pool.clear() cleared, may be submitted again",
            )
        self._counts["submitted"] += 1
        self.completed.ended.pop(task_id, None)
        until_s = math.inf if event.deadline_s is None else now_s + event.deadline_s
        self.tasks[task_id] = Task(task_id, event.payload, until_s)
        self.queue.add(self.tasks[task_id])
        self._deadlines.add(task_id)

    def _cancel(self, task_id: str) -> None:
        if task_id in self.tasks:
            self._end(task_id, None)

    def _clear(self, task_ids: Iterable[str]) -> None:
        cleared = unknown = 0
        for task_id in dict.fromkeys(task_ids):
            cleared += 1
            if task_id in self.tasks:
                self._end(task_id, None)
            elif task_id in self.completed.ready or task_id in self.completed.taken:
                self._have_cleared(task_id)
            else:
                cleared, unknown = cleared - 1, unknown + 1
        self._counts["cleared"] += cleared
        self._actions.append(Cleared(cleared, unknown))

    def _ask_batch(self, event: BatchAsked) -> None:
        if self.closed:
            self._actions.append(FailBatch(event.waiter, PoolClosed("the pool is closed")))
        elif event.max_staleness is not None and self.version is None:
            self._actions.append(
                FailBatch(
                    event.waiter,
                    ConfigError("max_staleness needs the version of the weights", hint="call set_version(v) first"),
                )
            )
        else:
            self.waiters[event.waiter] = event

    def _return(self, rollouts: tuple[Rollout, ...]) -> None:
        for rollout in reversed(rollouts):
            worker = self.completed.taken.get(rollout.task_id)
            if worker is None:
                continue  # it was cleared meanwhile
            if self.closed or worker not in self.workers:
                self._have_cleared(rollout.task_id)
            else:
                del self.completed.taken[rollout.task_id]
                self.completed.put_back(rollout, worker)

    def _close(self) -> None:
        if self.closed:
            return
        for task_id in list(self.tasks):
            self._fail(task_id, PoolClosed("the pool was closed before the task had finished"))
        self.closed = True
        for task_id in list(self.completed.ready):
            self._have_cleared(task_id)
        for waiter in self.waiters:
            self._actions.append(FailBatch(waiter, PoolClosed("the pool was closed while a batch was waited for")))
        self.waiters.clear()

    # --- the workers' side -------------------------------------------------------------------------------------------

    def _take(self, event: TakeCame, now_s: float) -> None:
        self._counts["takes"] += 1
        take = event.take
        if take.pool != self.pool:
            self._actions.append(Reply(event.asker, self._work(take.seq)))
            return  # it must know whom it works for; nothing of what it says is about this pool
        worker = self.workers.get(take.worker)
        if worker is None:
            if self.closed:
                self._actions.append(Reply(event.asker, self._work(take.seq, stop=True)))
                return
            worker = Worker(take.worker, event.owner, event.process, take.slots, now_s)
            self.workers[take.worker] = worker
            self._actions.append(Log(f"rollout worker {take.worker} joined with {take.slots} slots", warning=False))
        elif worker.silent:
            self._actions.append(Log(f"rollout worker {take.worker} was silent and is back"))
        worker.silent, worker.heard_s = False, now_s
        if take.seq < worker.seq:
            self._actions.append(Reply(event.asker, self._work(take.seq)))  # overtaken by a later one
            return
        if take.seq > worker.seq:
            for ref in worker.takes(take):
                self._counts["handed_again"] += 1
                self.queue.add_first(self.tasks[ref.task_id])
        worker.asker = event.asker
        if worker.sent is not None:  # asked again: its answer was lost
            self._actions.append(Reply(event.asker, worker.sent))
            worker.asker = None

    def _announce(self, event: AnnounceCame, now_s: float) -> None:
        self._counts["announces"] += 1
        worker = self.workers.get(event.worker)
        if worker is not None:
            worker.heard_s = now_s
        dropped = tuple(result.ref for result in event.results if not self._accept(worker, result))
        self._actions.append(Reply(event.asker, Announced(dropped)))

    def _accept(self, worker: Worker | None, result: Result) -> bool:
        """Whether the pool keeps what was announced."""
        ref = result.ref
        if worker is None or (ref not in worker.assigned and ref not in worker.accepted):
            late = ref.task_id in self.tasks or ref.task_id in self.completed
            self._counts["late" if late else "unknown"] += 1
            self._actions.append(
                Log(f"an announcement of {'an ended' if late else 'an unknown'} attempt at {ref.task_id!r} is dropped")
            )
            return False
        if ref in worker.accepted:
            self._counts["duplicates"] += 1
            return True
        worker.accepted.add(ref)
        if result.error is not None:
            if result.is_refused:
                worker.accepted.discard(ref)
            self._fail(ref.task_id, result.error)
            return not result.is_refused
        rollout = Rollout(ref.task_id, result.entries, worker.owner, dict(result.tags or {}))
        limit = next((waiter.max_staleness for waiter in self.waiters.values()), None)
        if (stale := staleness(rollout, self.version, limit)) is not None:
            worker.accepted.discard(ref)
            self._counts["stale"] += 1
            self._fail(ref.task_id, stale)
            return False
        self._counts["completed"] += 1
        self.completed.ready[ref.task_id] = rollout, worker.name
        self._end(ref.task_id, rollout)
        return True

    def _tick(self, now_s: float) -> None:
        while self._deadlines.next_s <= now_s:
            task_id = self._deadlines.pop()
            self._counts["timed_out"] += 1
            self._fail(task_id, SyncTimeout(f"task {task_id!r} did not finish by its deadline", hint=_AGAIN))
        for worker in list(self.workers.values()):
            if not worker.silent and worker.heard_s + self._silence_s <= now_s:
                self._lose(worker, f"has been silent for {self._silence_s:g} s", comes_back=True)
        silent = [worker.name for worker in self.workers.values() if worker.silent]
        for name in silent[:-SILENT_KEPT]:
            del self.workers[name]

    def _lose(self, worker: Worker, why: str, *, comes_back: bool) -> None:
        """Its tasks fail or run elsewhere, and what it completed can no longer be fetched."""
        text = f"rollout worker {worker.name} {why}"
        if not self.closed and not worker.silent:
            self._actions.append(Log(text))
        assigned, worker.assigned = worker.assigned, set()
        for ref in sorted(assigned, key=lambda ref: ref.attempt, reverse=True):
            task = self.tasks[ref.task_id]
            task.lost_workers += 1
            if self._rerun and task.lost_workers < ATTEMPTS:
                self._counts["reruns"] += 1
                self.queue.add_first(task)
            else:
                self._counts["lost"] += 1
                more = f", the last of {task.lost_workers} lost workers" if task.lost_workers > 1 else ""
                self._fail(ref.task_id, PeerLost(f"task {ref.task_id!r}: {text}{more}", hint=_AGAIN))
        for task_id in self.completed.of_worker(worker.name):
            self._counts["lost"] += 1
            self._drop(task_id, PeerLost(f"the rows of task {task_id!r} are lost: {text}", hint=_AGAIN))
        worker.asker, worker.silent = None, True
        # The last one lost is the last one listed, so that the first ones are forgotten first.
        del self.workers[worker.name]
        if comes_back:
            self.workers[worker.name] = worker

    # --- parts of them -----------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Answers each parked `Take` for which there is something to do, the idlest worker's first."""
        parked = [worker for worker in self.workers.values() if worker.asker is not None]
        for worker in sorted(parked, key=lambda worker: worker.free, reverse=True):
            cancel = tuple(sorted(worker.unwanted - worker.told, key=lambda ref: ref.attempt))
            clear = tuple(worker.clears)[:MAX_CLEARED]
            if not (self.queue and worker.free > 0) and not cancel and not clear and not self.closed:
                continue
            stop = self.closed and len(clear) == len(worker.clears)
            # A task that is submitted again must not begin before its earlier rows are cleared.
            tasks = self.queue.assign(worker) if len(clear) == len(worker.clears) else ()
            work = self._work(worker.seq, tasks=tasks, cancel=cancel, clear=clear, stop=stop)
            self._actions.append(Reply(worker.asker, work))
            worker.asker, worker.sent = None, work

    def _work(self, seq: int, **what: Any) -> Work:
        return Work(self.pool, seq, silence_s=self._silence_s, **what)

    def _give_batches(self) -> None:
        """First come, first served: a later user waits until the earlier one has a batch."""
        while self.waiters:
            waiter = next(iter(self.waiters.values()))
            if len(self.completed.ready) < waiter.count:
                return
            for task_id, stale in self.completed.stale(self.version, waiter.max_staleness):
                self._counts["stale"] += 1
                self._drop(task_id, stale)
            if len(self.completed.ready) < waiter.count:
                return
            del self.waiters[waiter.waiter]
            self._actions.append(GiveBatch(waiter.waiter, self.completed.take(waiter.count)))

    def _fail(self, task_id: str, error: WeightwireError) -> None:
        self._counts["failed"] += 1
        self.last_failure = error
        self._end(task_id, error)

    def _drop(self, task_id: str, error: WeightwireError) -> None:
        """Drops a completed rollout."""
        self.last_failure = error
        self._have_cleared(task_id)
        self._actions.append(Drop(task_id, error))

    def _end(self, task_id: str, outcome: Rollout | WeightwireError | None) -> None:
        """The one place where a task's future ends."""
        task = self.tasks.pop(task_id)
        self.queue.discard(task_id)
        if task.ref is not None and (worker := self.workers.get(task.worker)) is not None:
            worker.end(task.ref)
        if outcome is None:
            self._counts["cancelled"] += 1
        if task_id not in self.completed.ready:
            self.completed.end(task_id)
        self._actions.append(Finish(task_id, outcome))

    def _have_cleared(self, task_id: str) -> None:
        """The worker that has the rows of a completed task is to clear them."""
        if (worker := self.workers.get(self.completed.forget(task_id))) is not None:
            worker.clears[task_id] = None


_AGAIN = "submit the task again if it is still wanted"
