"""The events that `PoolMachine` takes, the actions that it returns, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Body, Take
from inference_plugin.wire.messages.rollout import TaskRef
from trainer_adapters.batch.records import Entry, Owner, Tags, VersionSpan

__all__ = [
    "Action",
    "AnnounceCame",
    "BatchAsked",
    "BatchGivenUp",
    "BatchReturned",
    "CancelAsked",
    "ClearAsked",
    "Cleared",
    "Closed",
    "Drop",
    "Event",
    "FailBatch",
    "Finish",
    "GiveBatch",
    "Log",
    "PoolStats",
    "ProcessesEnded",
    "Reply",
    "Result",
    "Rollout",
    "Submitted",
    "TakeCame",
    "Tick",
    "VersionSet",
    "WorkerLeft",
]


@dataclass(frozen=True)
class Rollout:
    """A finished task. Its rows lie in the store of `owner`, one entry for each key; `tags` is what the worker said besides."""

    task_id: str
    entries: tuple[Entry, ...]
    owner: Owner
    tags: Tags

    @property
    def versions(self) -> VersionSpan | None:
        """The weight versions that its rows were generated with; None if the worker did not say."""
        spans = [entry.versions for entry in self.entries if entry.versions is not None]
        if not spans:
            return None
        return VersionSpan(min(span.first for span in spans), max(span.last for span in spans))

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return sum(entry.nbytes for entry in self.entries)


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds now, and what it has counted since it was made.

    `queued`, `running` and `ready` are tasks: not handed out yet, at a worker, completed and not taken into a batch.
    `failed` counts every failed future; `timed_out`, `stale` and `lost` say why some failed. `stale` and `lost` also count
    rollouts that were dropped after they had completed. `reruns`: tasks of lost workers that were handed out again.
    `handed_again`: tasks whose hand-out was lost. `duplicates`, `late` and `unknown` are announcements without effect.
    `takes` and `announces` are requests of workers: nobody polls, so these two are all there are. `received_bytes` and
    `sent_bytes` are those of all messages between the pool and its workers, payloads of tasks among them.
    """

    workers: int = 0
    slots: int = 0
    queued: int = 0
    running: int = 0
    ready: int = 0
    version: int | None = None
    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    timed_out: int = 0
    stale: int = 0
    lost: int = 0
    cleared: int = 0
    reruns: int = 0
    handed_again: int = 0
    duplicates: int = 0
    late: int = 0
    unknown: int = 0
    takes: int = 0
    announces: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submitted:
    """The user submits a task. `payload` as in `AssignedTask`. Raises `BatchError` for an id that the pool knows already."""

    task_id: str
    payload: bytes
    deadline_s: float | None = None


@dataclass(frozen=True)
class TakeCame:
    """A worker asks for work. `process`: its pid and start, if it runs on this host."""

    asker: Any
    take: Take
    owner: Owner
    process: tuple[int, int] | None


@dataclass(frozen=True)
class Result:
    """One finished task of an announcement: entries, or the error. `is_refused`: the error is the pool's own, and the worker may
    hold rows."""

    ref: TaskRef
    entries: tuple[Entry, ...] = ()
    tags: Tags | None = None
    error: WeightwireError | None = None
    is_refused: bool = False


@dataclass(frozen=True)
class AnnounceCame:
    """A worker announces what has finished."""

    asker: Any
    worker: str
    results: tuple[Result, ...]


@dataclass(frozen=True)
class WorkerLeft:
    """A worker says that it ends."""

    worker: str


@dataclass(frozen=True)
class ProcessesEnded:
    """Processes of this host have ended."""

    processes: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class CancelAsked:
    """The user cancels a task."""

    task_id: str


@dataclass(frozen=True)
class ClearAsked:
    """The user does not need these tasks any more."""

    task_ids: tuple[str, ...]


@dataclass(frozen=True)
class BatchAsked:
    """The user waits for the first `count` rollouts."""

    waiter: int
    count: int
    max_staleness: int | None


@dataclass(frozen=True)
class BatchGivenUp:
    """The user no longer waits for a batch."""

    waiter: int


@dataclass(frozen=True)
class BatchReturned:
    """Rollouts that were given as a batch to a user who did not take them; they come first again."""

    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class VersionSet:
    """The weights have a new version."""

    version: int


@dataclass(frozen=True)
class Tick:
    """Time has passed; every message that arrived before has been handled."""


@dataclass(frozen=True)
class Closed:
    """The user closes the pool."""


Event: TypeAlias = (
    Submitted
    | TakeCame
    | AnnounceCame
    | WorkerLeft
    | ProcessesEnded
    | CancelAsked
    | ClearAsked
    | BatchAsked
    | BatchGivenUp
    | BatchReturned
    | VersionSet
    | Tick
    | Closed
)


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """Answer a worker's request."""

    asker: Any
    body: Body


@dataclass(frozen=True)
class Finish:
    """End a task's future: with a rollout, with an error, or cancelled (None). Once for each task."""

    task_id: str
    outcome: Rollout | WeightwireError | None


@dataclass(frozen=True)
class Drop:
    """Tell listeners that a completed rollout was dropped."""

    task_id: str
    error: WeightwireError


@dataclass(frozen=True)
class GiveBatch:
    """Give a waiting user the batch."""

    waiter: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True)
class FailBatch:
    """Tell a waiting user that there will be no batch."""

    waiter: int
    error: WeightwireError


@dataclass(frozen=True)
class Cleared:
    """What a `ClearAsked` found: tasks that are forgotten here and cleared at their owners, and ids that were unknown."""

    cleared: int
    unknown: int


@dataclass(frozen=True)
class Log:
    """Write to the log; `warning` false: for information."""

    text: str
    warning: bool = True


Action: TypeAlias = Reply | Finish | Drop | GiveBatch | FailBatch | Cleared | Log
