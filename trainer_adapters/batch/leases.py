"""The leases of consumers on the owner's host: which process reads which shards. Bookkeeping only, under the store's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from inference_plugin.net.processes import ProcessId
from inference_plugin.wire.errors import BatchError, ProtocolError
from inference_plugin.wire.messages.batch import LeaseEnd, RefusedShard
from inference_plugin.wire.messages.common import Sender
from trainer_adapters.batch.memory import Block
from trainer_adapters.batch.records import Entry

__all__ = ["Holding", "Lease", "Leases", "check_rows", "with_shards"]

MAX_CONSUMERS = 4096
"""Largest number of consumers with leases."""

MAX_LEASES = 1 << 16
"""Largest number of open leases of one consumer."""

MAX_ENDED = 4096
"""Number of ended leases remembered for each consumer: a late copy of a request must not begin its lease again."""


class Holding(msgspec.Struct, eq=False, gc=False):
    """One shard in the store's memory. `readers` counts the leases and replies that read it; `is_current` until it is
    cleared or replaced. Its block is freed once it is neither current nor read."""

    entry: Entry
    block: Block
    readers: int = 0
    is_current: bool = True
    is_freed: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """What a consumer reads: `held`, without the shards that it has given back. `given` and `refused` are the answer to its
    request, which is the same whenever the request comes again."""

    given: Sequence[Holding]
    refused: Sequence[RefusedShard]
    held: list[Holding | None]


@dataclass(slots=True)
class _Consumer:
    process: ProcessId | None = None
    leases: dict[int, Lease] = field(default_factory=dict)
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))


class Leases:
    """The leases of all consumers, by session and number."""

    def __init__(self) -> None:
        self.consumers: dict[str, _Consumer] = {}

    def begun(self, consumer: Sender, number: int) -> Lease | None:
        """The lease that the consumer has under this number, if it has one.

        The first answer may be on its way to the consumer, so a request that comes again must not change what is leased.
        Raises `ProtocolError` for a lease that has ended, or ends already.
        """
        if (known := self.consumers.get(consumer.session)) is None:
            return None
        if known.process is not None and known.process != (consumer.pid, consumer.start_ticks):
            raise ProtocolError(f"session {consumer.session} belongs to another process, {known.process[0]}")
        lease = known.leases.get(number)
        if number in known.ended or (lease is not None and None in lease.held):
            raise ProtocolError(f"lease {number} has ended", hint="this is a late copy of a request that was given up")
        return lease

    def begin(
        self, consumer: Sender, number: int, holdings: Sequence[Holding], refused: Sequence[RefusedShard]
    ) -> Lease:
        """A new lease, which `begun` did not find; counts a reader for each of `holdings`. Raises `ProtocolError` where the
        consumer has too many."""
        known = self.consumers.get(consumer.session)
        if known is None:
            self._make_room()
            known = self.consumers[consumer.session] = _Consumer()
        known.process = (consumer.pid, consumer.start_ticks)
        if len(known.leases) >= MAX_LEASES:
            raise ProtocolError(
                f"the consumer has {MAX_LEASES} leases already",
                hint="drop rows that are no longer needed before the next fetch",
            )
        lease = known.leases[number] = Lease(holdings, refused, list(holdings))
        for holding in holdings:
            holding.readers += 1
        return lease

    def end(self, session: str, ends: Iterable[LeaseEnd]) -> list[Holding]:
        """Ends leases or parts of them. Returns the holdings whose readers became fewer."""
        freed: list[Holding] = []
        if (known := self.consumers.get(session)) is None:
            # The request for its first lease may come yet, on another connection.
            self._make_room()
            known = self.consumers[session] = _Consumer()
        for end in ends:
            lease = known.leases.get(end.number)
            if not end.indexes:
                known.leases.pop(end.number, None)
                known.ended.append(end.number)
                freed += _without(lease.held if lease is not None else ())
            elif lease is not None:
                for index in end.indexes:
                    if index < len(lease.held) and (holding := lease.held[index]) is not None:
                        lease.held[index] = None
                        freed += _without((holding,))
                if not any(lease.held):
                    del known.leases[end.number]
                    known.ended.append(end.number)
        return freed

    def end_of(self, processes: Collection[ProcessId]) -> list[Holding]:
        """Ends all leases of processes that are gone. Returns the holdings whose readers became fewer."""
        freed: list[Holding] = []
        for session in [session for session, known in self.consumers.items() if known.process in processes]:
            for lease in self.consumers.pop(session).leases.values():
                freed += _without(lease.held)
        return freed

    def processes(self) -> set[ProcessId]:
        """Processes that hold leases."""
        return {known.process for known in self.consumers.values() if known.process is not None}

    def _make_room(self) -> None:
        if len(self.consumers) < MAX_CONSUMERS:
            return
        idle = next((session for session, known in self.consumers.items() if not known.leases), None)
        if idle is None:
            raise ProtocolError(f"{MAX_CONSUMERS} consumers hold leases already")
        del self.consumers[idle]


def _without(holdings: Iterable[Holding | None]) -> list[Holding]:
    """Subtracts one reader from each, and returns them."""
    fewer = [holding for holding in holdings if holding is not None]
    for holding in fewer:
        holding.readers -= 1
    return fewer


def check_rows(tasks: Mapping[str, Mapping[str, Holding]], entries: Sequence[Entry]) -> None:
    """The shards of a task that a put replaces none of have as many rows as those that were put. Raises `BatchError`."""
    put: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        if entry.shard.task_id in tasks:
            put.setdefault(entry.shard.task_id, {})[entry.shard.key] = entry
    for task_id, mine in put.items():
        first = next(iter(mine.values()))
        for key, holding in tasks[task_id].items():
            if key not in mine and holding.entry.rows != first.rows:
                raise BatchError(
                    f"task {task_id!r} has {holding.entry.rows} rows of {key!r}, but was put {first.rows} rows of "
                    f"{first.shard.key!r}"
                )


def with_shards(
    tasks: Mapping[str, Mapping[str, Holding]], put: Iterable[Holding]
) -> tuple[dict[str, dict[str, Holding]], list[Holding]]:
    """The shards of the tasks that a put changes, with its own among them; and those that it replaces."""
    now: dict[str, dict[str, Holding]] = {}
    replaced: list[Holding] = []
    for holding in put:
        task_id, key = holding.entry.shard.task_id, holding.entry.shard.key
        if (shards := now.get(task_id)) is None:
            shards = now[task_id] = dict(tasks.get(task_id, ()))
        if key in shards:
            replaced.append(shards[key])
        shards[key] = holding
    return now, replaced
