"""Between a rollout worker and the pool that it works for. Every request is the worker's: workers connect outwards only.

A worker keeps one `Take` parked at the pool, which answers it when there is something to do. On another connection it
announces what has finished. Both are sent again until they are answered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from inference_plugin.wire.errors import ErrorInfo
from inference_plugin.wire.messages.common import Count, ReplicaId, Seconds, Word

__all__ = [
    "MAX_ANNOUNCED", "MAX_CLEARED", "MAX_ENTRIES_BYTES", "MAX_SLOTS", "MAX_TAGS", "MAX_TASK_BYTES", "Announce",
    "Announced", "AssignedTask", "Finished", "LeavePool", "Take", "TaskRef", "Work",
]  # fmt: skip

MAX_SLOTS = 1 << 14
"""Tasks that one worker runs at a time."""

MAX_RUNNING = 4 * MAX_SLOTS
"""Tasks in one `Take`: those that run, those that are being cancelled, and those whose announcement is not answered yet."""

MAX_TASK_BYTES = 16 << 20
"""Largest payload of one task, in msgpack."""

MAX_ANNOUNCED = 4096
"""Finished tasks in one announcement."""

MAX_ENTRIES_BYTES = 16 << 20
"""Largest metadata of one finished task, in msgpack."""

MAX_CLEARED = 1 << 14
"""Tasks that one `Work` has cleared."""

MAX_TAGS = 64

TaskId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
PoolId = Annotated[str, msgspec.Meta(max_length=128)]
Tag = Annotated[str, msgspec.Meta(max_length=4096)] | bool | int | float | None
TaskTags = Annotated[dict[Word, Tag], msgspec.Meta(max_length=MAX_TAGS)]


class TaskRef(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at a task. Within a pool no attempt has the number of another, whatever its task."""

    task_id: TaskId
    attempt: Count


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Asks for work, and says where the worker stands. Parked until there is work, something to cancel or to clear.

    `pool`: the pool that the worker knows at this address, or "". `seq` counts the worker's `Take`s from 1; `received` is the
    `seq` of the last `Work` that arrived. `running`: every attempt whose end the pool has not acknowledged. `owner`: msgpack of
    the `Owner` that holds the worker's rows, which also names the worker's process.
    """

    job: Word
    worker: ReplicaId
    pool: PoolId
    seq: Count
    received: Count
    owner: Annotated[bytes, msgspec.Meta(max_length=4096)]
    slots: Annotated[int, msgspec.Meta(ge=1, lt=MAX_SLOTS + 1)]
    running: Annotated[tuple[TaskRef, ...], msgspec.Meta(max_length=MAX_RUNNING)] = ()


class AssignedTask(msgspec.Struct, frozen=True, array_like=True):
    """A task for this worker. `payload`: msgpack of a list whose one item is what the user submitted."""

    task_id: TaskId
    attempt: Count
    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_TASK_BYTES)]


class Work(msgspec.Struct, frozen=True, tag="work"):
    """Answer to the `Take` with the same `seq`. To be done in this order: `clear` from the store, `cancel`, begin `tasks`.

    `stop`: the pool closes. The worker answers with `LeavePool`. `silence_s`: a worker that the pool does not hear of for so
    long is lost.
    """

    pool: PoolId
    seq: Count
    tasks: Annotated[tuple[AssignedTask, ...], msgspec.Meta(max_length=MAX_SLOTS)] = ()
    cancel: Annotated[tuple[TaskRef, ...], msgspec.Meta(max_length=MAX_RUNNING)] = ()
    clear: Annotated[tuple[TaskId, ...], msgspec.Meta(max_length=MAX_CLEARED)] = ()
    stop: bool = False
    silence_s: Seconds = 10.0


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A task that ended: with rows in the worker's store, or with an error.

    `entries`: msgpack of the tuple of its `Entry`s, empty beside an error.
    """

    ref: TaskRef
    entries: Annotated[bytes, msgspec.Meta(max_length=MAX_ENTRIES_BYTES)] = b""
    tags: TaskTags = {}
    error: ErrorInfo | None = None


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """Tells the pool which tasks have finished. Sent again until it is answered."""

    worker: ReplicaId
    pool: PoolId
    finished: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=MAX_ANNOUNCED)]


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """Answer to `Announce`. `dropped`: attempts that the pool does not want (cancelled, timed out, unknown, with wrong metadata);
    the worker clears their rows from its store. All others are the pool's now."""

    dropped: Annotated[tuple[TaskRef, ...], msgspec.Meta(max_length=MAX_ANNOUNCED)] = ()


class LeavePool(msgspec.Struct, frozen=True, tag="leave_pool"):
    """The worker ends, or has stopped for a pool that closes. Answered by `Done`."""

    worker: ReplicaId
    pool: PoolId
