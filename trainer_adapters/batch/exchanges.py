"""The requests of a fetch, and how their replies become parts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence

import numpy as np
import torch

from inference_plugin.wire.copying import SPANS_AT_ONCE, copy_rows_and_digest, digest_spans
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    BatchError,
    DigestMismatch,
    ProtocolError,
    SyncTimeout,
    WeightwireError,
)
from inference_plugin.wire.host_memory import PROMISED
from inference_plugin.wire.messages import Body, Lease, Leased, Pull, Pulled
from inference_plugin.wire.messages.batch import MAX_WANTED, Cut, RefusedShard, WantedShard
from trainer_adapters.batch.consumer import LeasedBytes, consumer
from trainer_adapters.batch.parts import LocalPart, leased_part, part_of
from trainer_adapters.batch.records import Entry, Owner, ShardId

__all__ = ["LATE", "Arrivals", "Exchange", "LeaseExchange", "PullExchange", "pull_exchanges"]

ONE_PASS_BYTES = 4096
"""Shards of at least this many bytes are copied and digested in one pass."""

CHECKED_BYTES = 64 << 20
"""Bytes that are checked between two looks at the deadline."""

LATE = "fetch again, with more time: what arrived is kept"

WHY = {
    "unknown": ("the owner does not have it", "the owner never had it, or cleared it long ago"),
    "cleared": ("it was cleared", "clear a task only when every consumer of it is done"),
    "replaced": ("it was replaced: other rows were put under its name", "fetch by the entries of the later put"),
}


class Arrivals:
    """The shards that have arrived or failed. When a fetch ends, every shard is one of the two."""

    def __init__(self, have: MutableMapping[ShardId, LocalPart]) -> None:
        self.failed: dict[ShardId, WeightwireError] = {}
        self._have = have
        self._buffers: dict[ShardId, tuple[torch.Tensor, int]] = {}
        self._promised_bytes = 0

    def missing(self, entries: Iterable[Entry]) -> list[Entry]:
        if not self._have and not self.failed:
            return list(entries)
        return [entry for entry in entries if entry.shard not in self._have and entry.shard not in self.failed]

    def admit(self, entries: Iterable[Entry]) -> list[Entry]:
        """Fails the entries for whose bytes this process has no memory, and returns the others. For bytes that are copied to this
        process: an entry may claim any size, and the owner has not confirmed it yet."""
        if not (asked := self.missing(entries)):
            return []
        refused = PROMISED.promise([entry.nbytes for entry in asked])
        admitted = [entry for number, entry in enumerate(asked) if number not in refused]
        self._promised_bytes += sum(entry.nbytes for entry in admitted)
        for number, left in refused.items():
            self.fail((asked[number],), _no_room(asked[number], max(0, left)))
        return admitted

    def end(self) -> None:
        """Nothing more arrives: memory that was to be filled is free for other fetches."""
        self._fulfilled(self._promised_bytes)

    def _fulfilled(self, nbytes: int) -> None:
        PROMISED.fulfilled(nbytes)
        self._promised_bytes -= nbytes

    def fail(self, entries: Iterable[Entry], error: WeightwireError) -> None:
        for entry in self.missing(entries):
            self.failed[entry.shard] = error
            self._buffers.pop(entry.shard, None)

    def keep(self, entry: Entry, data: torch.Tensor | LeasedBytes, digest: int) -> None:
        """Keeps a shard's bytes if their `digest` is the entry's, else fails the shard."""
        if digest != entry.digest:
            error = DigestMismatch(
                f"the bytes of shard {entry.shard} from {entry.owner} have the digest {digest:016x}, "
                f"their entry says {entry.digest:016x}",
                hint="fetch again; if it comes back, the memory of a host is bad, or somebody wrote into the rows",
            )
            self.fail((entry,), error)
            return
        try:
            part = leased_part(entry, data) if isinstance(data, LeasedBytes) else part_of(entry, data)
            self._have[entry.shard] = part
        except WeightwireError as error:
            self.fail((entry,), error)

    def accept(self, shard: ShardId, part: LocalPart) -> None:
        """Keeps a part that was checked already."""
        self._have[shard] = part

    def add(self, entry: Entry, start: int, data: memoryview) -> None:
        """Adds some bytes of a shard; the shard is kept once it is complete."""
        if entry.shard in self.failed or entry.shard in self._have:
            return
        if len(data) == entry.nbytes:
            buffer = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
            digest = _copy(data, buffer)
            self._fulfilled(len(data))
            self.keep(entry, buffer, digest)
            return
        buffer, arrived = self._buffers.get(entry.shard) or (
            torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu"),
            0,
        )
        buffer.numpy()[start : start + len(data)] = data
        self._fulfilled(len(data))
        if (arrived := arrived + len(data)) < entry.nbytes:
            self._buffers[entry.shard] = (buffer, arrived)
        else:
            self._buffers.pop(entry.shard, None)
            self.keep(entry, buffer, digest_bytes(buffer.numpy()))

    def refuse(self, entry: Entry, why: str) -> None:
        text, hint = WHY[why]
        self.fail((entry,), ProtocolError(text, hint=hint, side="owner", replica=entry.owner))


class Exchange:
    """One request to an owner, and its reply."""

    entries: Sequence[Entry]
    request: Body

    def take(self, reply: object, payload: memoryview | None, arrivals: Arrivals, deadline_s: float) -> None:
        """Hands the reply's shards to `arrivals`. Raises for a reply of another kind. `give_up` follows in any case."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Nobody waits for the reply any more: it was taken, or an error, or never came."""


class LeaseExchange(Exchange):
    """Maps shards of an owner of this host."""

    def __init__(self, owner: Owner, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._owner = owner
        self._consumer = consumer()
        self._number = self._consumer.next_number()
        self._ends: set[int] | None = None
        """The shards whose leases this exchange ends, by their index; None: the lease as a whole. Other shards end their own."""
        self.request = Lease(self._consumer.sender, self._number, tuple(map(_wanted, entries)))

    def take(self, reply: object, payload: memoryview | None, arrivals: Arrivals, deadline_s: float) -> None:
        if not isinstance(reply, Leased):
            raise ProtocolError(f"{self._owner.id} answered a lease with {type(reply).__name__}")
        leased = _accepted(self.entries, reply.refused, arrivals)
        if len(leased) != len(reply.places):
            raise ProtocolError(f"{self._owner.id} leased {len(reply.places)} shards, not {len(leased)}")
        segments = [self._consumer.map(segment, self._owner, self._number) for segment in reply.segments]
        sizes = [segment.memory.size for segment in segments]
        in_segment: list[list[int]] = [[] for _ in segments]
        empty: list[int] = []
        for index, (entry, place) in enumerate(zip(leased, reply.places, strict=True)):
            if not entry.nbytes:
                empty.append(index)
            elif place.segment < len(sizes) and place.offset + entry.nbytes <= sizes[place.segment]:
                in_segment[place.segment].append(index)
            else:
                raise ProtocolError(
                    f"{self._owner.id} places shard {entry.shard} outside of the segments that it named"
                )
        ends = set(range(len(leased)))
        self._ends = ends or None
        for index in empty:
            arrivals.keep(leased[index], torch.empty(0, dtype=torch.uint8, device="cpu"), digest_bytes(b""))
        for segment, indexes in zip(segments, in_segment, strict=True):
            for some in _in_groups(indexes, leased):
                if time.monotonic() > deadline_s:
                    late = SyncTimeout("the deadline passed before it was checked", hint=LATE)
                    arrivals.fail([leased[index] for index in some], late)
                    continue
                spans = [(reply.places[index].offset, leased[index].nbytes) for index in some]
                digests = digest_spans(segment.memory, spans)
                for index, (start, nbytes), digest in zip(some, spans, digests, strict=True):
                    data = LeasedBytes(segment, start, nbytes, index)
                    ends.discard(index)
                    arrivals.keep(leased[index], data, digest)

    def give_up(self) -> None:
        if self._ends is None:
            self._consumer.end(self._owner, self._number)
        for index in self._ends or ():
            self._consumer.end(self._owner, self._number, index)


class PullExchange(Exchange):
    """Copies bytes of shards of any owner."""

    def __init__(self, cuts: Sequence[tuple[Entry, int, int]]) -> None:
        self.entries = [entry for entry, _, _ in cuts]
        self._cuts = cuts
        self.request = Pull(tuple(Cut(_wanted(entry), start, end) for entry, start, end in cuts))

    def take(self, reply: object, payload: memoryview | None, arrivals: Arrivals, deadline_s: float) -> None:
        if not isinstance(reply, Pulled) or payload is None:
            raise ProtocolError(f"a pull was answered with {type(reply).__name__}, without bytes")
        _accepted(self.entries, reply.refused, arrivals)
        refused = {one.index for one in reply.refused}
        cuts = [cut for i, cut in enumerate(self._cuts) if i not in refused]
        if (expected := sum(end - start for _, start, end in cuts)) != len(payload):
            raise ProtocolError(f"{len(payload)} bytes came where {expected} were asked for")
        at = 0
        for entry, start, end in cuts:
            arrivals.add(entry, start, payload[at : at + end - start])
            at += end - start


def _in_groups(indexes: Sequence[int], entries: Sequence[Entry]) -> Iterator[list[int]]:
    """Cuts indexes of entries into groups; the deadline is looked at before each group is checked."""
    group: list[int] = []
    room = CHECKED_BYTES
    for index in indexes:
        group.append(index)
        room -= entries[index].nbytes
        if room <= 0 or len(group) == SPANS_AT_ONCE:
            yield group
            group, room = [], CHECKED_BYTES
    if group:
        yield group


def _no_room(entry: Entry, room: int) -> BatchError:
    return BatchError(
        f"shard {entry.shard} has {entry.nbytes} bytes by its entry; {room} bytes of memory are left for it here",
        hint="fetch fewer rows at a time, or on a host with more memory; if no worker made so large a row, the metadata is wrong",
        side="consumer",
        replica=entry.owner,
    )


def pull_exchanges(entries: Iterable[Entry], bucket_bytes: int) -> list[Exchange]:
    """Cuts shards into requests for at most `bucket_bytes` each: small shards together, large ones in parts."""
    exchanges: list[Exchange] = []
    cuts: list[tuple[Entry, int, int]] = []
    room = bucket_bytes
    for entry in entries:
        start = 0
        while True:
            end = min(entry.nbytes, start + room)
            cuts.append((entry, start, end))
            room -= end - start
            if not room or len(cuts) == MAX_WANTED:
                exchanges.append(PullExchange(cuts))
                cuts, room = [], bucket_bytes
            if end == entry.nbytes:
                break
            start = end
    return [*exchanges, PullExchange(cuts)] if cuts else exchanges


def _accepted(entries: Sequence[Entry], refused: Sequence[RefusedShard], arrivals: Arrivals) -> list[Entry]:
    """The entries that were not refused; the others fail."""
    why: Mapping[int, str] = {one.index: one.why for one in refused}
    for index in why:
        if index >= len(entries):
            raise ProtocolError(f"the owner refuses shard {index} of {len(entries)}")
        arrivals.refuse(entries[index], why[index])
    return [entry for i, entry in enumerate(entries) if i not in why]


def _wanted(entry: Entry) -> WantedShard:
    return WantedShard(entry.shard.task_id, entry.shard.key, entry.nbytes, entry.digest)


def _copy(data: memoryview, buffer: torch.Tensor) -> int:
    """Copies all of `data`; returns its digest."""
    target = buffer.numpy()
    if len(data) >= ONE_PASS_BYTES:
        return copy_rows_and_digest(target, 0, len(data), data, 1, len(data))
    target[:] = np.frombuffer(data, dtype=np.uint8)
    return digest_bytes(target)
