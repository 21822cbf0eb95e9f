"""A store whose rows lie in Ray's object store (extra `ray`), with the face of `Store`.

A put copies the rows once, into the shared memory of this node's Ray, as arrays of bytes. An actor of the store's own, its
directory, has the references to them; consumers ask it by its name, which is the owner's address: `ray://NAME`. Ray moves and
frees the bytes. A store lives as long as its process: Ray ends the directory together with it, and the rows are lost then.

How Ray carries them: a `uint8` numpy array is a small pickle (made by Ray, of nothing but its shape) beside a raw buffer; no
object of the user's is pickled, and what comes out is checked to be such an array. Whoever is in a Ray cluster may run code in
all of it, so this store protects against mistakes, not against members of the cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from inference_plugin.net.addresses import new_replica_id
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import BatchError, PeerLost, ProtocolError, StoreFull, WeightwireError
from trainer_adapters.batch.inputs import parts_of_task
from trainer_adapters.batch.limits import check_process, checked_count, checked_seconds
from trainer_adapters.batch.parts import LocalPart, buffers_of, entry_of, part_of
from trainer_adapters.batch.ray_directory import Numbers, RowDirectory
from trainer_adapters.batch.ray_rows import NAMESPACE, SCHEME, bytes_of, ray_errors, ray_library, wanted
from trainer_adapters.batch.records import ClearReport, Entry, Owner, ShardId, VersionSpan, listed_tasks
from trainer_adapters.batch.store import StoreStats

__all__ = ["RayStore"]

CALL_S = 60.0
"""Longest wait for an answer of the directory, which answers at once."""

START_S = 120.0
"""Longest start of the directory's process."""


class RayStore(Closing):
    """Keeps rows of this process in Ray's object store. Any process of the cluster fetches them. Any thread may call it.

    The process must have joined Ray. `budget_bytes` bounds what is put and not cleared; choose it well below the node's
    `object_store_memory`, for Ray also holds what was cleared and is still read, and frees the rest only each second.
    Close it, or use it as a context manager.
    Raises `TransportUnavailable` where Ray is missing.
    """

    def __init__(self, *, budget_bytes: int, name: str = "store") -> None:
        budget_bytes = checked_count("budget_bytes", budget_bytes, 1)
        if not (name.isascii() and name.isalpha() and name.islower()):
            raise ValueError(f"name={name!r}: use lower-case letters")
        self._ray = ray_library()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._budget_bytes = budget_bytes
        self._is_closed = False
        self._pid = os.getpid()
        self._tickets = itertools.count()
        owner_id = new_replica_id(name)
        self.owner = Owner(owner_id, SCHEME + owner_id)
        here = self._ray.get_runtime_context().get_node_id()
        self._directory = (
            self._ray.remote(RowDirectory)
            .options(
                name=owner_id,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=1000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(budget_bytes)
        )
        try:
            self.ask("numbers", timeout_s=START_S)
        except BaseException:
            self.close()
            raise

    def put(
        self,
        task_id: str,
        data: Mapping[str, Any],
        versions: VersionSpan | None = None,
        timeout_s: float = 0.0,
    ) -> tuple[Entry, ...]:
        """As `Store.put`: copies the rows of a task, by key, and returns their entries in the order of `data`."""
        timeout_s = checked_seconds("timeout_s", timeout_s)
        parts = {shard: given.part for shard, given in parts_of_task(task_id, data, versions).items()}
        arrays = [_joined(buffers_of(part)) for part in parts.values()]
        entries = tuple(
            entry_of(shard, part, self.owner.id, digest_bytes(array), versions)
            for (shard, part), array in zip(parts.items(), arrays, strict=True)
        )
        ticket = self._reserve(task_id, sum(array.size for array in arrays), timeout_s)
        try:
            references = [self._put_bytes(task_id, array) for array in arrays]
            refused, replaces = self.ask(
                "keep",
                ticket,
                entries[0].rows,
                [wanted(entry) for entry in entries],
                [msgspec.msgpack.encode(entry) for entry in entries],
                references,
            )
        except BaseException:
            self._give_up(ticket, task_id)
            raise
        if refused:
            raise BatchError(refused)
        if replaces:
            with contextlib.suppress(WeightwireError):  # the put stands; the next one under these keys drops them
                self.ask("settle", ticket, task_id)
        return entries

    def get(self, shard: ShardId) -> LocalPart:
        """The rows of a shard, copied. Raises `ProtocolError` for a shard that the store doesn't hold."""
        why, encoded, reference = self.ask("look_up", shard.task_id, shard.key)
        if why:
            raise ProtocolError(
                f"shard {shard} {'was cleared' if why == 'cleared' else 'is unknown'} at {self.owner.id}"
            )
        entry = decode_as(encoded, Entry)
        copied = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
        if reference is not None:
            with ray_errors(self.owner):
                copied.numpy()[:] = bytes_of(self._ray.get(reference, timeout=CALL_S), entry)
        return part_of(entry, copied)

    def __contains__(self, task_id: str) -> bool:
        """Whether it holds rows of a task."""
        return bool(self.held((task_id,)))

    def held(self, task_ids: Iterable[str]) -> set[str]:
        """Those of `task_ids` of which it holds rows. One question to the directory, however many there are."""
        return set(self.ask("held", list(task_ids)))

    def clear(self, task_ids: Iterable[str]) -> ClearReport:
        """Drops all shards of tasks; their readers keep what they have. Unknown ids are counted."""
        asked = listed_tasks(task_ids)
        unknown = self.ask("clear", asked)
        return ClearReport(cleared=len(asked) - len(unknown), unknown=len(unknown))

    def stats(self) -> StoreStats:
        """What it holds. `leased_bytes` is 0: only Ray knows which cleared rows are still read."""
        numbers = Numbers(*self.ask("numbers"))
        return StoreStats(numbers.tasks, numbers.shards, numbers.nbytes, 0, self._budget_bytes)

    def close(self) -> None:
        """Ends the directory and drops everything; may be called twice. Readers keep what they have fetched. In a forked child it
        does nothing: Ray has no connection there."""
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        if self._ray.is_initialized():
            self._ray.kill(self._directory)

    def ask(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """What the directory answers."""
        self._check_open()
        try:
            with ray_errors(self.owner):
                return self._ray.get(getattr(self._directory, method).remote(*arguments), timeout=timeout_s)
        except PeerLost:
            self._check_open()  # it was closed meanwhile
            raise

    def _check_open(self) -> None:
        check_process(self.owner, self._pid)
        if self._is_closed:
            raise ProtocolError(f"the store {self.owner.id} is closed")

    def _reserve(self, task_id: str, needed: int, timeout_s: float) -> int:
        """Room for a put: its ticket. Raises `StoreFull`."""
        if needed > self._budget_bytes:
            raise StoreFull(
                f"task {task_id!r} has {needed} bytes, the whole budget is {self._budget_bytes}",
                hint="give the store a larger budget_bytes, or put smaller tasks",
            )
        ticket = next(self._tickets)
        try:
            refused = self.ask("reserve", ticket, needed, timeout_s, timeout_s=timeout_s + CALL_S)
        except BaseException:  # late, or Ctrl-C: a ticket that nobody is behind would take the next room
            self._give_up(ticket, task_id)
            raise
        if refused is None:
            return ticket
        numbers = Numbers(*refused)
        raise StoreFull(
            f"task {task_id!r} needs {needed} bytes, and within {timeout_s:g} s no room came free: of {self._budget_bytes} "
            f"bytes {numbers.nbytes} are held, {numbers.reserved} are being written, {numbers.waiting} puts wait"
        )

    def _give_up(self, ticket: int, task_id: str) -> None:
        if not self._is_closed:
            self._directory.release.remote(ticket, task_id)

    def _put_bytes(self, task_id: str, array: npt.NDArray[np.uint8]) -> Any:
        """A reference to a copy of the bytes; None for no bytes."""
        from ray import exceptions

        if not array.size:
            return None
        try:
            return self._ray.put(array)
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            raise StoreFull(
                f"Ray's object store on this node has no room for {array.size} bytes of task {task_id!r}: {error}",
                hint="start Ray with more object_store_memory, or give the stores of its nodes smaller budgets",
            ) from error


def _joined(buffers: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """Buffers as one array; a single one is not copied."""
    if not buffers:
        return np.empty(0, dtype=np.uint8)
    return buffers[0] if len(buffers) == 1 else np.concatenate(buffers)
