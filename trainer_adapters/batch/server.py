"""The owner's socket: answers the consumers of a store, on a thread of its own.

It touches no process group and waits for no other thread of the process, so consumers are answered while a collective runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from inference_plugin.net.addresses import boot_id
from inference_plugin.net.processes import ProcessId
from inference_plugin.net.reply_server import Asker, ReplyServer, Service
from inference_plugin.wire.errors import ProtocolError
from inference_plugin.wire.messages import Body, ClearTasks, Done, EndLeases, Lease, Leased, Pull, Pulled, TasksCleared
from inference_plugin.wire.messages.batch import MAX_PULL_BYTES, Cut, LeaseEnd, Place, RefusedShard, WantedShard
from inference_plugin.wire.messages.common import Sender
from trainer_adapters.batch.memory import Block, Segment

__all__ = ["ServedStore", "StoreServer"]

MAX_REQUEST_BYTES = 128 << 20
"""Largest request: `MAX_WANTED` shards with the longest ids fit."""

MAX_OPEN = 256
"""Requests of one peer that wait for their reply."""

CLEARS_REMEMBERED = 256
"""Answers to clears that are kept, for requests that are sent again."""


class ServedStore(Protocol):
    """What the server asks of a `Store`."""

    def lease(
        self, consumer: Sender, number: int, wanted: Sequence[WantedShard]
    ) -> tuple[list[Block], Sequence[RefusedShard]]: ...
    def end_leases(self, session: str, ends: Iterable[LeaseEnd]) -> None: ...
    def end_leases_of(self, processes: Collection[ProcessId]) -> None: ...
    def consumers(self) -> set[ProcessId]: ...
    def free_drafts(self) -> None: ...
    def read(self, cuts: Sequence[Cut]) -> tuple[npt.NDArray[np.uint8], list[RefusedShard]]: ...
    def drop(self, task_ids: Iterable[str]) -> list[str]: ...


class StoreServer(ReplyServer):
    """Serves `store` at `address`. `owner_id` is in the errors that it answers with."""

    def __init__(self, store: ServedStore, address: str, owner_id: str) -> None:
        super().__init__(
            StoreService(store),
            [address],
            name="weightwire-store",
            where={"side": "owner", "replica": owner_id},
            max_bytes=MAX_REQUEST_BYTES,
            most_open=MAX_OPEN,
        )


class StoreService(Service):
    """The answers of a store. Nothing here waits."""

    def __init__(self, store: ServedStore) -> None:
        self._store = store
        self._cleared: OrderedDict[tuple[str, int], TasksCleared] = OrderedDict()

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body | None:
        match body:
            case Lease():
                return self._lease(body)
            case EndLeases():
                self._store.end_leases(body.session, body.ends)
                return Done()
            case Pull():
                _check(body)
                data, refused = self._store.read(body.cuts)
                asker.reply(Pulled(tuple(refused)), data)
                return None
            case ClearTasks():
                return self._clear(body)
        raise ProtocolError(f"a store takes no {type(body).__name__}")

    def processes(self) -> Collection[ProcessId]:
        self._store.free_drafts()  # asked for whenever the thread was woken
        return self._store.consumers()

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        if ended:
            self._store.end_leases_of(ended)

    def _lease(self, request: Lease) -> Leased:
        consumer = request.consumer
        if not consumer.pid or consumer.boot_id != boot_id():
            raise ProtocolError("a lease is for processes of the owner's host", hint="pull the bytes instead")
        blocks, refused = self._store.lease(consumer, request.number, request.wanted)
        indexes: dict[Segment, int] = {}
        places = []
        for block in blocks:
            if block.segment is None:  # no bytes, no memory
                places.append(Place(0, 0))
            else:
                places.append(Place(indexes.setdefault(block.segment, len(indexes)), block.offset))
        segments = tuple(msgspec.msgpack.encode(segment.address) for segment in indexes)
        return Leased(segments, tuple(places), tuple(refused))

    def _clear(self, request: ClearTasks) -> TasksCleared:
        key = (request.session, request.number)
        if (answer := self._cleared.get(key)) is None:
            answer = TasksCleared(tuple(self._store.drop(dict.fromkeys(request.task_ids))))
            self._cleared[key] = answer
            while len(self._cleared) > CLEARS_REMEMBERED:
                self._cleared.popitem(last=False)
        return answer


def _check(request: Pull) -> None:
    for cut in request.cuts:
        if not cut.start <= cut.end <= cut.shard.nbytes:
            shard = f"{cut.shard.task_id!r}:{cut.shard.key!r}"
            raise ProtocolError(f"bytes {cut.start} to {cut.end} of the {cut.shard.nbytes} of shard {shard}")
    if (nbytes := sum(cut.end - cut.start for cut in request.cuts)) > MAX_PULL_BYTES:
        raise ProtocolError(
            f"{nbytes} bytes are asked for in one reply, allowed are {MAX_PULL_BYTES}", hint="ask for them in parts"
        )
