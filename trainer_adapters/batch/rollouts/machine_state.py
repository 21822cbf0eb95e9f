"""What `PoolMachine` knows: of each task and worker, and of the rollouts that have completed."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_plugin.wire.errors import StaleRollout
from inference_plugin.wire.messages import Take, Work
from inference_plugin.wire.messages.rollout import TaskRef
from trainer_adapters.batch.records import Owner
from trainer_adapters.batch.rollouts.machine_io import Rollout

__all__ = ["Completed", "Deadlines", "Task", "Worker", "staleness"]

KEPT = 1 << 15
"""This many ids of taken tasks, and of ended ones, stay known: for `clear`, and to tell late announcements from unknown
ones."""


@dataclass
class Task:
    """A task whose future has not ended. `ref` and `worker`: the attempt that runs, if one does."""

    task_id: str
    payload: bytes
    deadline_s: float
    ref: TaskRef | None = None
    worker: str = ""
    lost_workers: int = 0


@dataclass
class Deadlines:
    """When tasks time out. A task that has ended, or that was submitted again with another deadline, is passed over."""

    tasks: Mapping[str, Task]
    heap: list[tuple[float, str]] = field(default_factory=list)

    def add(self, task_id: str) -> None:
        """Notes the deadline of a task, if it has one."""
        if (deadline_s := self.tasks[task_id].deadline_s) != math.inf:
            heapq.heappush(self.heap, (deadline_s, task_id))

    @property
    def next_s(self) -> float:
        """The next deadline; infinity if no task has one."""
        while self.heap:
            deadline_s, task_id = self.heap[0]
            if (task := self.tasks.get(task_id)) is not None and task.deadline_s == deadline_s:
                return deadline_s
            heapq.heappop(self.heap)
        return math.inf

    def pop(self) -> str:
        """Removes the task of the deadline that `next_s` returned."""
        return heapq.heappop(self.heap)[1]


@dataclass
class Worker:
    """One worker. `seq`, `running`: of its last `Take`; `asker`: where to answer that, None once `sent` is the answer.

    `assigned`: attempts that it is to run. `accepted`: attempts that have ended here, and of which the worker may not know yet.
    `unwanted`: attempts that it runs and should not, which still take slots. `told`: those of them that it knows of.
    `clears`: tasks that it is to clear.
    """

    name: str
    owner: Owner
    process: tuple[int, int] | None
    slots: int
    heard_s: float
    seq: int = 0
    asker: Any = None
    sent: Work | None = None
    running: frozenset[TaskRef] = frozenset()
    assigned: set[TaskRef] = field(default_factory=set)
    accepted: set[TaskRef] = field(default_factory=set)
    unwanted: set[TaskRef] = field(default_factory=set)
    told: set[TaskRef] = field(default_factory=set)
    clears: dict[str, None] = field(default_factory=dict)
    silent: bool = False

    def takes(self, take: Take) -> list[TaskRef]:
        """A new `Take`, which answers the last `Work` too. Returns attempts whose hand-out was lost, the latest first."""
        if self.sent is not None and take.received == self.seq:
            self.told.update(self.sent.cancel)
            for task_id in self.sent.clear:
                self.clears.pop(task_id, None)
        self.seq, self.sent, self.slots = take.seq, None, take.slots
        self.running = frozenset(take.running)
        self.accepted &= self.running
        self.told &= self.running
        lost = self.assigned - self.running
        self.assigned -= lost
        self.unwanted = set(self.running) - self.assigned - self.accepted
        return sorted(lost, key=lambda ref: ref.attempt, reverse=True)

    def end(self, ref: TaskRef) -> None:
        """The worker no longer has to run an attempt."""
        self.assigned.discard(ref)
        if ref in self.running and ref not in self.accepted:
            self.unwanted.add(ref)

    @property
    def free(self) -> int:
        """Slots for more tasks."""
        return self.slots - len(self.assigned) - len(self.unwanted)


@dataclass
class Completed:
    """Rollouts in order of completion, each with its worker, until a batch takes them; and the ids of those before.

    `taken`: the worker of each task that is part of a batch. `ended`: tasks of which nothing is left.
    """

    ready: OrderedDict[str, tuple[Rollout, str]] = field(default_factory=OrderedDict)
    taken: OrderedDict[str, str] = field(default_factory=OrderedDict)
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def __contains__(self, task_id: str) -> bool:
        """Whether the task is known, whatever became of it."""
        return task_id in self.ready or task_id in self.taken or task_id in self.ended

    def of_worker(self, name: str) -> list[str]:
        """Ready tasks whose rows a worker holds."""
        return [task_id for task_id, (_, worker) in self.ready.items() if worker == name]

    def take(self, count: int) -> tuple[Rollout, ...]:
        """The first ones, which are a batch from now on."""
        given = [self.ready.popitem(last=False) for _ in range(count)]
        for task_id, (_, worker) in given:
            self.taken[task_id] = worker
        while len(self.taken) > KEPT:
            self.taken.popitem(last=False)
        return tuple(rollout for _, (rollout, _) in given)

    def put_back(self, rollout: Rollout, worker: str) -> None:
        """A rollout whose batch nobody took is the first one again."""
        self.ready[rollout.task_id] = rollout, worker
        self.ready.move_to_end(rollout.task_id, last=False)

    def forget(self, task_id: str) -> str:
        """Forgets a task that is ready or taken; returns the worker that has its rows."""
        worker = self.ready.pop(task_id)[1] if task_id in self.ready else self.taken.pop(task_id)
        self.end(task_id)
        return worker

    def end(self, task_id: str) -> None:
        """Remembers that nothing is left of a task."""
        self.ended[task_id] = None
        while len(self.ended) > KEPT:
            self.ended.popitem(last=False)

    def stale(self, version: int | None, limit: int | None) -> Iterator[tuple[str, StaleRollout]]:
        """Ready tasks that are too stale, each with the reason."""
        for task_id, (rollout, _) in list(self.ready.items()):
            if (error := staleness(rollout, version, limit)) is not None:
                yield task_id, error


def staleness(rollout: Rollout, version: int | None, limit: int | None) -> StaleRollout | None:
    """Why a rollout is too stale for the weights of `version`; None if it is not."""
    if limit is None or version is None:
        return None
    spans = rollout.versions
    if spans is None:
        return StaleRollout(
            f"the weight versions of task {rollout.task_id!r} are unknown, and max_staleness is {limit}",
            hint="have the worker's function return Generated(data, versions=VersionSpan(first, last)), as from_vllm and "
            "from_sglang do, or set no max_staleness",
        )
    if version - spans.first <= limit:
        return None
    return StaleRollout(
        f"task {rollout.task_id!r} was generated with version {spans}; the weights are at {version}, "
        f"and max_staleness is {limit}",
        hint="version 0 is what an engine started with: update it before it generates" if not spans.first else "",
    )
