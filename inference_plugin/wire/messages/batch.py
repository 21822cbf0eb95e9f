"""Between the consumers of a distributed batch and the store of an owner: the process that holds rows.

A consumer on the owner's host leases shards and maps them; any other consumer pulls their bytes. A shard that was cleared or
replaced is refused from then on, whatever else was asked for in the same request.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from inference_plugin.wire.messages.common import Count, Description, Sender, Session

__all__ = [
    "MAX_PULL_BYTES", "MAX_TASKS", "MAX_WANTED", "ClearTasks", "Cut", "EndLeases", "Lease", "LeaseEnd", "Leased",
    "Place", "Pull", "Pulled", "RefusedShard", "TasksCleared", "WantedShard",
]  # fmt: skip

MAX_WANTED = 1 << 14
"""Shards in one request."""

MAX_TASKS = 1 << 16
"""Tasks in one request."""

MAX_PULL_BYTES = 64 << 20
"""Bytes in one reply."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WANTED)]


class WantedShard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard as its consumer knows it. The owner refuses it as replaced where digest or size are others."""

    task_id: Name
    key: Name
    nbytes: Count
    digest: Annotated[int, msgspec.Meta(ge=0)]
    """Below 2^64: msgpack has no larger integer."""


class RefusedShard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why the shard at `index` of the request is not in the reply."""

    index: Index
    why: Literal["unknown", "cleared", "replaced"]


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Asks where shards lie, for a consumer on the owner's host.

    Until the consumer ends the lease, or its process ends, the memory stays as it is. `number` is the consumer's own; a
    lease that is asked for again under its number is the same lease.
    """

    consumer: Sender
    number: Count
    wanted: Annotated[tuple[WantedShard, ...], msgspec.Meta(max_length=MAX_WANTED)]


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A shard's first byte: `offset` in the segment at index `segment` of the reply."""

    segment: Index
    offset: Count


class Leased(msgspec.Struct, frozen=True, tag="leased"):
    """Answer to `Lease`: segments to map, and the places of the shards that were not refused, in the request's order."""

    segments: Annotated[tuple[Description, ...], msgspec.Meta(max_length=MAX_WANTED)]
    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=MAX_WANTED)]
    refused: Annotated[tuple[RefusedShard, ...], msgspec.Meta(max_length=MAX_WANTED)] = ()


class LeaseEnd(msgspec.Struct, frozen=True, array_like=True):
    """Shards of a lease that are no longer read, by their index among its places; without any, all of them."""

    number: Count
    indexes: Annotated[tuple[Index, ...], msgspec.Meta(max_length=MAX_WANTED)] = ()


class EndLeases(msgspec.Struct, frozen=True, tag="end_leases"):
    """Gives leases back. Unknown leases are answered `Done` as well."""

    session: Session
    ends: Annotated[tuple[LeaseEnd, ...], msgspec.Meta(max_length=MAX_WANTED)]


class Cut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The bytes `start:end` of a shard."""

    shard: WantedShard
    start: Count
    end: Count


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Asks for bytes of shards."""

    cuts: Annotated[tuple[Cut, ...], msgspec.Meta(max_length=MAX_WANTED)]


class Pulled(msgspec.Struct, frozen=True, tag="pulled"):
    """Answer to `Pull`. Its payload has the bytes of the cuts that were not refused, one after the other."""

    refused: Annotated[tuple[RefusedShard, ...], msgspec.Meta(max_length=MAX_WANTED)] = ()


class ClearTasks(msgspec.Struct, frozen=True, tag="clear_tasks"):
    """Drops all shards of tasks. `number` is the consumer's own: a request that is sent again gets the same answer."""

    session: Session
    number: Count
    task_ids: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TASKS)]


class TasksCleared(msgspec.Struct, frozen=True, tag="tasks_cleared"):
    """Answer to `ClearTasks`. `unknown`: ids of which the owner held nothing."""

    unknown: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TASKS)] = ()
