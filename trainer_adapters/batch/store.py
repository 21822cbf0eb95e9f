"""The store of an owner: what a process keeps of its rows for the consumers of distributed batches.

A put copies the rows once, into shared memory; the same pass makes their digests. Rows that were built there (`drafts`) it takes
as they lie. Bytes never move: a shard that is cleared or replaced lives on under the leases of those who read it. Then its memory
is spare: later rows are written to it, and where the budget has no room for it, it goes back to the system (`memory` says what is
never written to again). One lock guards the bookkeeping; bytes are copied, and memory is given back, outside of it.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Condition, Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from inference_plugin.net.addresses import boot_id, listen_address, new_replica_id
from inference_plugin.net.processes import ProcessId, start_ticks
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.errors import ProtocolError, StoreFull
from inference_plugin.wire.messages.batch import Cut, LeaseEnd, RefusedShard, WantedShard
from inference_plugin.wire.messages.common import Sender
from trainer_adapters.batch.drafts import Draft, Drafts
from trainer_adapters.batch.filling import back, fill
from trainer_adapters.batch.inputs import checked_dtype, parts_of_tasks
from trainer_adapters.batch.leases import Holding, Leases, check_rows, with_shards
from trainer_adapters.batch.limits import asker, check_budget, check_process, checked_count, checked_seconds
from trainer_adapters.batch.memory import Block, BlockMemory, Freeing, GivenBack, warn_of_budget
from trainer_adapters.batch.parts import LocalPart, entry_of, part_of, sources_of
from trainer_adapters.batch.records import ClearReport, Entry, Owner, ShardId, StoreStats, VersionSpan, listed_tasks
from trainer_adapters.batch.server import StoreServer

__all__ = ["Store", "StoreStats"]

MIN_SEGMENT_BYTES = 8 << 20
"""A segment is used again once it is empty: large ones would hold much more than the rows in use."""

SEGMENTS_PER_BUDGET = 128
"""A full store has about this many segments; each takes two descriptors."""

REMEMBERED = 1 << 16
"""Ids of cleared tasks that a store remembers; older ones count as unknown."""


class Store(Closing):
    """Keeps rows of this process in shared memory, and serves them. All methods may be called on any thread.

    `address` is where it listens (`ipc://PATH`, `tcp://HOST:PORT`); by default what `WEIGHTWIRE_LISTEN` says, else a socket
    in the runtime directory. `name`, of lower-case letters, begins the owner's id. Close it, or use it as a context manager. A
    process that is forked from this one needs a store of its own: this one refuses it.
    """

    def __init__(self, *, budget_bytes: int, address: str | None = None, name: str = "store") -> None:
        budget_bytes = checked_count("budget_bytes", budget_bytes, 1)
        if type(name) is not str or not (name.isascii() and name.isalpha() and name.islower()):
            raise ValueError(f"name={name!r}: use lower-case letters")
        self._budget_bytes = budget_bytes
        warn_of_budget(budget_bytes)
        self._memory = BlockMemory(max(MIN_SEGMENT_BYTES, budget_bytes // SEGMENTS_PER_BUDGET))
        self.leases = Leases()
        self.tasks: dict[str, dict[str, Holding]] = {}
        self._cleared: dict[str, None] = {}
        self.taken_bytes = self._current_bytes = self._leased_bytes = 0
        self._lock = Lock()
        self._has_room = Condition(self._lock)
        self.waiting: deque[object] = deque()
        self._is_closed = False
        owner_id = new_replica_id(name)
        self._server = StoreServer(self, address or listen_address(owner_id, "b"), owner_id)
        (listens_at,) = self._server.addresses
        self.owner = Owner(owner_id, listens_at, boot_id(), os.getpid(), start_ticks())
        try:
            self._drafts = Drafts(self._server.waker())
            self._server.start()
        except BaseException:
            self.close()
            raise

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, timeout_s: float = 0.0) -> torch.Tensor:
        """A tensor in the store's memory, for rows that are to be put: like `torch.empty`, with any values.

        A `put` whose rows under one key are all of this tensor, in order (itself, or the views that `split` or `unbind` make of
        it), takes them as they lie, without a copy. The tensor stays readable; what is written to it after the put is seen by
        this process alone. Rows that fill only a part of it are copied. Its bytes count against the budget until it is gone
        and its shard is cleared. Waits and raises as `put`. A process that is forked from this one must not touch it.
        """
        check_process(self.owner, self.owner.pid)
        given: Any = shape
        sizes = [checked_count("shape", size, 0) for size in (given if isinstance(given, Iterable) else [given])]
        nbytes = math.prod(sizes) * checked_dtype(dtype).itemsize
        if not nbytes:
            return torch.empty(sizes, dtype=dtype, device="cpu")
        check_budget((), nbytes, self._budget_bytes)
        draft = Draft(self._drafts)
        (block,) = self._reserve((), [nbytes], checked_seconds("timeout_s", timeout_s))
        try:
            back(block)
            with self._lock:
                self._check_open()
                fd = block.descriptor()
            draft.map(block, fd)
        except BaseException:
            if not draft.is_mapped:
                with Freeing(self._memory) as freed, self._lock:
                    self._free(block, freed)
            raise
        return torch.from_numpy(draft.array()).view(dtype).view(sizes)

    def put(
        self, task_id: str, data: Mapping[str, Any], versions: VersionSpan | None = None, timeout_s: float = 0.0
    ) -> tuple[Entry, ...]:
        """Copies the rows of a task, by key, and returns their entries in the order of `data`.

        `data` values are rows as `local_part` takes them: tensors `[rows, ...]`, nested tensors, lists of tensors or of plain
        values; all keys of a task have equally many rows. A key that the task has already is replaced. Either all of `data`
        is stored or nothing. While the budget has no room, the call waits up to `timeout_s`, in the order of the calls; then it
        raises `StoreFull`. Raises `BatchError` for values that are not rows, `ConfigError` for a `timeout_s` that is no time.
        """
        return self.put_tasks({ShardId(task_id, "-").task_id: data}, versions, timeout_s)

    def put_tasks(
        self, tasks: Mapping[str, Mapping[str, Any]], versions: VersionSpan | None = None, timeout_s: float = 0.0
    ) -> tuple[Entry, ...]:
        """As `put`, of several tasks: either all of their rows are stored or nothing."""
        check_process(self.owner, self.owner.pid)
        timeout_s = checked_seconds("timeout_s", timeout_s)
        given = parts_of_tasks(tasks, versions)
        sizes = [one.nbytes for one in given.values()]
        check_budget(tasks, sum(sizes), self._budget_bytes)  # before a strided tensor is copied
        sources = [one.sources or sources_of(one.part) for one in given.values()]
        drafts = self._drafts.claim(sources)
        try:
            to_copy = [0 if i in drafts else nbytes for i, nbytes in enumerate(sizes)] if drafts else sizes
            blocks = self._reserve(tasks, to_copy, timeout_s)
        except BaseException:
            self._drafts.put_back(drafts)
            raise
        is_written = False
        try:
            digests = fill(blocks, sources)
            for i, draft in drafts.items():
                digests[i] = draft.seal()
            is_written = True
            owner, stored = self.owner.id, zip(given.items(), digests, strict=True)
            entries = tuple(
                [entry_of(shard, one.part, owner, digest, versions, one.nbytes) for (shard, one), digest in stored]
            )
            with Freeing(self._memory) as freed, self._lock:
                self._check_open()
                check_rows(self.tasks, entries)
                put = zip(entries, blocks, strict=True)
                holdings = [
                    drafts[i].held(one) if i in drafts else Holding(one, block) for i, (one, block) in enumerate(put)
                ]
                now, replaced = with_shards(self.tasks, holdings)
                nbytes = sum(sizes)
                # All at once, without a call after which Ctrl-C could raise: what the store holds is not freed below.
                blocks = []
                self._current_bytes += nbytes
                self.tasks.update(now)
                for task_id in now:
                    self._cleared.pop(task_id, None)
                for holding in replaced:
                    self._outdate(holding, freed)
        finally:
            if blocks:  # nothing was stored
                with Freeing(self._memory) as freed, self._lock:
                    if not is_written:
                        self._memory.retire(blocks)
                    for block in blocks:
                        self._free(block, freed)
        return entries

    def get(self, shard: ShardId) -> LocalPart:
        """The rows of a shard, copied. Raises `ProtocolError` for one that the store doesn't hold."""
        check_process(self.owner, self.owner.pid)
        with self._lock:
            self._check_open()
            held = self.tasks.get(ShardId.checked(shard).task_id, {}).get(shard.key)
            if held is None:
                why = "was cleared" if shard.task_id in self._cleared else "is unknown"
                raise ProtocolError(f"shard {shard} {why} at {self.owner.id}")
            held.readers += 1
        try:
            copied = torch.empty(held.block.nbytes, dtype=torch.uint8, device="cpu")
            copied.numpy()[:] = held.block.memory
        finally:
            with Freeing(self._memory) as freed, self._lock:
                self._unread((held,), freed)
        return part_of(held.entry, copied)

    def __contains__(self, task_id: str) -> bool:
        """Whether it holds rows of a task."""
        return bool(self.held((task_id,)))

    def held(self, task_ids: Iterable[str]) -> set[str]:
        """Those of `task_ids` of which it holds rows."""
        with self._lock:
            return self.tasks.keys() & listed_tasks(task_ids)

    def clear(self, task_ids: Iterable[str]) -> ClearReport:
        """Drops all shards of tasks; those that are leased live on for their readers. Unknown ids are counted."""
        check_process(self.owner, self.owner.pid)
        asked = listed_tasks(task_ids)
        unknown = self.drop(asked)
        return ClearReport(cleared=len(asked) - len(unknown), unknown=len(unknown))

    def stats(self) -> StoreStats:
        with self._lock:
            shards = sum(len(held) for held in self.tasks.values())
            current, leased, budget = self._current_bytes, self._leased_bytes, self._budget_bytes
            return StoreStats(len(self.tasks), shards, current, leased, budget, self._memory.spare_bytes)

    def close(self) -> None:
        """Stops serving and drops everything; may be called twice. Readers on this host keep what they have mapped."""
        if os.getpid() != self.owner.pid:
            return  # a forked child: all of it is its parent's
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._has_room.notify_all()
        self._server.close()
        if self.owner.address.startswith("ipc://"):
            Path(self.owner.address.removeprefix("ipc://")).unlink(missing_ok=True)
        with self._lock:
            self.tasks.clear()
            self.leases = Leases()  # with the holdings go the descriptors of their memory
            self.taken_bytes = self._current_bytes = self._leased_bytes = 0
            self._memory.close()

    # --- for the server --------------------------------------------------------------------------------------------------

    def lease(
        self, consumer: Sender, number: int, wanted: Sequence[WantedShard]
    ) -> tuple[list[Block], Sequence[RefusedShard]]:
        """Begins a lease on the shards that are not refused; their blocks, in order. The same number gets the same answer."""
        with self._lock:
            lease = self.leases.begun(consumer, number)
            if lease is None:
                lease = self.leases.begin(consumer, number, *self._find(wanted))
            return [holding.block for holding in lease.given], lease.refused

    def end_leases(self, session: str, ends: Iterable[LeaseEnd]) -> None:
        with Freeing(self._memory) as freed, self._lock:
            self._unread(self.leases.end(session, ends), freed, counted=True)

    def end_leases_of(self, processes: Collection[ProcessId]) -> None:
        """Ends the leases of processes that are gone. A child that such a process had forked may still map what it read."""
        with Freeing(self._memory) as freed, self._lock:
            holdings = self.leases.end_of(processes)
            self._memory.retire(holding.block for holding in holdings)
            self._unread(holdings, freed, counted=True)

    def consumers(self) -> set[ProcessId]:
        """Processes that hold leases."""
        with self._lock:
            return self.leases.processes()

    def read(self, cuts: Sequence[Cut]) -> tuple[npt.NDArray[np.uint8], list[RefusedShard]]:
        """The bytes of the cuts that are not refused, copied one after the other."""
        with self._lock:
            found, refused = self._find([cut.shard for cut in cuts])
            for holding in found:
                holding.readers += 1
        try:
            indexes = {one.index for one in refused}
            spans = [(cut.start, cut.end) for i, cut in enumerate(cuts) if i not in indexes]
            data = np.empty(sum(end - start for start, end in spans), dtype=np.uint8)
            at = 0
            for holding, (start, end) in zip(found, spans, strict=True):
                data[at : at + end - start] = holding.block.memory[start:end]
                at += end - start
            return data, refused
        finally:
            with Freeing(self._memory) as freed, self._lock:
                self._unread(found, freed)

    def drop(self, task_ids: Iterable[str]) -> list[str]:
        """Drops all shards of tasks; returns the ids of which nothing was held."""
        unknown = []
        with Freeing(self._memory) as freed, self._lock:
            for task_id in task_ids:
                if (held := self.tasks.pop(task_id, None)) is None:
                    unknown.append(task_id)
                    continue
                self._cleared[task_id] = None
                for holding in held.values():
                    self._outdate(holding, freed)
            while len(self._cleared) > REMEMBERED:
                del self._cleared[next(iter(self._cleared))]
        return unknown

    def free_drafts(self) -> None:
        """Frees what drafts held that have ended."""
        with Freeing(self._memory) as freed, self._lock:
            self._take_ended(freed)

    # --- under the lock --------------------------------------------------------------------------------------------------

    def _reserve(self, tasks: Collection[str], sizes: Sequence[int], timeout_s: float) -> list[Block]:
        """Blocks for a put, or for an empty tensor, counted against the budget. Raises `StoreFull`."""
        needed = sum(sizes)
        with Freeing(self._memory) as freed, self._lock:
            self._check_open()
            self._take_ended(freed)
            if self.waiting or self.taken_bytes + needed > self._budget_bytes:
                self._wait_for_room(tasks, needed, timeout_s)
            blocks: list[Block] = []
            try:
                for nbytes in sizes:
                    block = self._memory.allocate(nbytes)
                    self.taken_bytes += nbytes
                    blocks.append(block)
                if (excess := self.taken_bytes + self._memory.spare_bytes - self._budget_bytes) > 0:
                    freed += self._memory.trim(excess)
            except BaseException:  # no segment could be made
                self._memory.retire(blocks)
                for block in blocks:
                    self._free(block, freed)
                raise
            return blocks

    def _wait_for_room(self, tasks: Collection[str], needed: int, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        mine = object()
        self.waiting.append(mine)
        try:
            while self.waiting[0] is not mine or self.taken_bytes + needed > self._budget_bytes:
                if not self._has_room.wait(max(0.0, deadline_s - time.monotonic())) and time.monotonic() >= deadline_s:
                    raise self._full(tasks, needed, timeout_s)
                self._check_open()
        finally:
            self.waiting.remove(mine)
            self._has_room.notify_all()  # the next one's turn

    def _full(self, tasks: Collection[str], needed: int, timeout_s: float) -> StoreFull:
        return StoreFull(
            f"{asker(tasks)} needs {needed} bytes, and within {timeout_s:g} s no room came free: of {self._budget_bytes} "
            f"bytes {self._current_bytes} are held, {self._leased_bytes} are cleared but still read, "
            f"{self.taken_bytes - self._current_bytes - self._leased_bytes} are being written, {len(self.waiting)} puts wait"
        )

    def _find(self, wanted: Sequence[WantedShard]) -> tuple[list[Holding], list[RefusedShard]]:
        self._check_open()
        found, refused = [], []
        for i, one in enumerate(wanted):
            if (held := self.tasks.get(one.task_id)) is None:
                refused.append(RefusedShard(i, "cleared" if one.task_id in self._cleared else "unknown"))
            elif (holding := held.get(one.key)) is None:
                refused.append(RefusedShard(i, "unknown"))
            elif holding.entry.digest != one.digest or holding.block.nbytes != one.nbytes:
                refused.append(RefusedShard(i, "replaced"))
            else:
                found.append(holding)
        return found, refused

    def _outdate(self, holding: Holding, freed: list[GivenBack]) -> None:
        """The holding was cleared or replaced."""
        holding.is_current = False
        self._current_bytes -= holding.block.nbytes
        self._leased_bytes += holding.block.nbytes
        self._unread((holding,), freed, counted=True)

    def _unread(self, holdings: Iterable[Holding], freed: list[GivenBack], *, counted: bool = False) -> None:
        """Frees those of `holdings` that nobody needs any more; unless `counted`, each has one reader less first."""
        for holding in holdings:
            if not counted:
                holding.readers -= 1
            if not (holding.readers or holding.is_current or holding.is_freed or self._is_closed):
                holding.is_freed = True
                self._leased_bytes -= holding.block.nbytes
                self._free(holding.block, freed)

    def _free(self, block: Block, freed: list[GivenBack]) -> None:
        self.taken_bytes -= block.nbytes
        freed += self._memory.free(block)
        if self.waiting:
            self._has_room.notify_all()

    def _take_ended(self, freed: list[GivenBack]) -> None:
        """Frees what drafts held that have ended."""
        while self._drafts.ended:
            ended = self._drafts.ended.popleft()
            if isinstance(ended, Block):
                self._free(ended, freed)
            else:
                self._unread((ended,), freed)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ProtocolError(f"the store {self.owner.id} is closed")
