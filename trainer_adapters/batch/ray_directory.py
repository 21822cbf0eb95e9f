"""The actor of a Ray store: which objects of Ray hold which shards. It has references, never bytes.

Standard library only, so that the actor's process is small and starts quickly. Ray runs the coroutines of an actor on one
thread: nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Held", "Numbers", "RowDirectory", "Wanted"]

REMEMBERED = 1 << 16
"""Cleared tasks whose ids are remembered; older ones are unknown."""


class Wanted(NamedTuple):
    """A shard as its entry describes it."""

    task_id: str
    key: str
    nbytes: int
    digest: int


class Numbers(NamedTuple):
    tasks: int
    shards: int
    nbytes: int
    reserved: int
    waiting: int


@dataclass(slots=True)
class Held:
    """One shard. `entry` is its metadata, encoded; `reference` the `ObjectRef` of its bytes, None where there are none; `ticket`
    is of the put that made it. `before`: what it replaced, until the put is settled."""

    rows: int
    nbytes: int
    digest: int
    entry: bytes
    reference: Any
    ticket: int
    before: Held | None = None


class RowDirectory:
    """What a Ray store holds, and its byte budget. A Ray actor: named, and ended by Ray together with the store's process."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._tasks: dict[str, dict[str, Held]] = {}
        self._cleared: dict[str, None] = {}
        self._nbytes = 0
        self._reserved: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._changed = asyncio.Condition()

    async def reserve(self, ticket: int, nbytes: int, timeout_s: float) -> Numbers | None:
        """Waits for room for a put, in the order of the calls. Returns None; or, after `timeout_s`, what fills the store."""
        self._waiting.append(ticket)
        try:
            if not self._is_settled(ticket, nbytes):
                if timeout_s <= 0:
                    return self._numbers()
                async with asyncio.timeout(timeout_s), self._changed:
                    await self._changed.wait_for(lambda: self._is_settled(ticket, nbytes))
            if ticket not in self._waiting:  # its caller gave up
                return self._numbers()
            self._reserved[ticket] = nbytes
            return None
        except TimeoutError:
            return self._numbers()
        finally:
            await self._leave_queue(ticket)

    async def release(self, ticket: int, task_id: str) -> None:
        """The put failed, or its caller waits no longer: what it has put is dropped, what that replaced is there again, and what
        it is about to put is refused."""
        self._reserved.pop(ticket, None)
        if (task := self._tasks.get(task_id)) is not None:
            for key, held in list(task.items()):
                if (left := self._without(held, ticket)) is None:
                    del task[key]
                else:
                    task[key] = left
            if not task:
                del self._tasks[task_id]
        await self._leave_queue(ticket)

    async def keep(
        self, ticket: int, rows: int, shards: Sequence[Wanted], entries: Sequence[bytes], references: Sequence[Any]
    ) -> tuple[str, bool]:
        """Ends a put: all of its shards are held from here on, or none of them; then it says why. The second value: whether they
        replace others, which are kept until `settle`."""
        task_id = shards[0].task_id
        if self._reserved.pop(ticket, None) is None:  # Ray may bring calls in another order
            return f"the put of task {task_id!r} was given up", False
        task = self._tasks.get(task_id, {})
        keys = {shard.key: None for shard in shards}
        for other in sorted(task.keys() - keys.keys()):
            if (known := task[other].rows) != rows:
                await self._notify()
                key = next(iter(keys))
                return f"task {task_id!r} has {known} rows of {other!r}, but was put {rows} rows of {key!r}", False
        replaces = not keys.keys().isdisjoint(task)
        self._tasks[task_id] = task
        self._cleared.pop(task_id, None)
        for shard, entry, reference in zip(shards, entries, references, strict=True):
            before = task.get(shard.key)
            task[shard.key] = Held(rows, shard.nbytes, shard.digest, entry, reference, ticket, before)
            self._nbytes += shard.nbytes
        await self._notify()
        return "", replaces

    async def settle(self, ticket: int, task_id: str) -> None:
        """The caller of a put has its answer: what the put replaced is dropped."""
        for held in self._tasks.get(task_id, {}).values():
            for each in _with_before(held):
                if each.ticket == ticket:
                    self._nbytes -= sum(old.nbytes for old in _with_before(each.before))
                    each.before = None
        await self._notify()

    async def find(self, wanted: Sequence[Wanted]) -> tuple[list[str], list[Any]]:
        """For each shard "" and its reference, or why it can't be had ("unknown", "cleared", "replaced") and None."""
        whys, references = [], []
        for one in wanted:
            task = self._tasks.get(one.task_id)
            held = task.get(one.key) if task is not None else None
            if held is None:
                why = "cleared" if task is None and one.task_id in self._cleared else "unknown"
            else:
                why = "" if (held.nbytes, held.digest) == (one.nbytes, one.digest) else "replaced"
            whys.append(why)
            references.append(held.reference if held is not None and not why else None)
        return whys, references

    async def look_up(self, task_id: str, key: str) -> tuple[str, bytes, Any]:
        """As `find`, by name alone; and the shard's entry."""
        task = self._tasks.get(task_id)
        if task is None or (held := task.get(key)) is None:
            return "cleared" if task is None and task_id in self._cleared else "unknown", b"", None
        return "", held.entry, held.reference

    async def clear(self, task_ids: Iterable[str]) -> list[str]:
        """Drops the references of tasks. Returns the ids of which nothing was held."""
        unknown = []
        for task_id in task_ids:
            if (task := self._tasks.pop(task_id, None)) is None:
                unknown.append(task_id)
                continue
            self._cleared[task_id] = None
            self._nbytes -= sum(each.nbytes for held in task.values() for each in _with_before(held))
        while len(self._cleared) > REMEMBERED:
            del self._cleared[next(iter(self._cleared))]
        await self._notify()
        return unknown

    async def held(self, task_ids: Sequence[str]) -> list[str]:
        return [task_id for task_id in task_ids if task_id in self._tasks]

    async def numbers(self) -> Numbers:
        return self._numbers()

    def _without(self, held: Held, ticket: int) -> Held | None:
        """A shard, or what it replaced, without that of the put `ticket`."""
        left = [each for each in _with_before(held) if each.ticket != ticket]
        self._nbytes -= sum(each.nbytes for each in _with_before(held) if each.ticket == ticket)
        for each, before in zip(left, [*left[1:], None], strict=False):
            each.before = before
        return left[0] if left else None

    def _is_settled(self, ticket: int, nbytes: int) -> bool:
        """Whether a put need not wait any more: it is its turn and there is room, or its caller gave up."""
        if ticket not in self._waiting:
            return True
        taken = self._nbytes + sum(self._reserved.values())
        return self._waiting[0] == ticket and taken + nbytes <= self._budget_bytes

    async def _leave_queue(self, ticket: int) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        await self._notify()

    def _numbers(self) -> Numbers:
        shards = sum(map(len, self._tasks.values()))
        return Numbers(len(self._tasks), shards, self._nbytes, sum(self._reserved.values()), len(self._waiting))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _with_before(held: Held | None) -> Iterator[Held]:
    while held is not None:
        yield held
        held = held.before
