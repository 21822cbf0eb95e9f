"""Tasks that wait for a worker, and the attempts at them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inference_plugin.wire.messages.rollout import AssignedTask, TaskRef
from trainer_adapters.batch.rollouts.machine_state import Task, Worker

__all__ = ["TaskQueue"]

WORK_BYTES = 64 << 20
"""Payloads of one `Work`, unless a single one is larger."""


@dataclass
class TaskQueue:
    """The ids of queued tasks, in the order in which they are handed out. `tasks`: all whose future has not ended."""

    tasks: Mapping[str, Task]
    _waiting: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _attempts: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def add(self, task: Task) -> None:
        self._waiting[task.task_id] = None

    def add_first(self, task: Task) -> None:
        """A task that was handed out is the next one again; its attempt no longer counts."""
        task.ref, task.worker = None, ""
        self._waiting[task.task_id] = None
        self._waiting.move_to_end(task.task_id, last=False)

    def discard(self, task_id: str) -> None:
        self._waiting.pop(task_id, None)

    def assign(self, worker: Worker) -> tuple[AssignedTask, ...]:
        """Takes tasks for the free slots of a worker, as many as one message holds: a new attempt each."""
        assigned: list[AssignedTask] = []
        nbytes = 0
        for _ in range(worker.free):
            if not self._waiting:
                break
            task = self.tasks[next(iter(self._waiting))]
            nbytes += len(task.payload)
            if assigned and nbytes > WORK_BYTES:
                break
            self._waiting.popitem(last=False)
            self._attempts += 1
            task.ref, task.worker = TaskRef(task.task_id, self._attempts), worker.name
            worker.assigned.add(task.ref)
            assigned.append(AssignedTask(task.task_id, self._attempts, task.payload))
        return tuple(assigned)
