"""Those who wait for a batch of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from inference_plugin.wire.errors import BatchError, SyncTimeout, WeightwireError, first_few
from trainer_adapters.batch.limits import checked_count, checked_seconds
from trainer_adapters.batch.rollouts.futures import in_loop
from trainer_adapters.batch.rollouts.machine import PoolMachine
from trainer_adapters.batch.rollouts.machine_io import (
    BatchAsked,
    BatchGivenUp,
    BatchReturned,
    PoolStats,
    Rollout,
)

if TYPE_CHECKING:
    from trainer_adapters.batch.batch import DistributedBatch

__all__ = ["BatchWaiters"]

LATE_S = 10.0
"""Longest wait for a batch that is being handed over as the time runs out."""

FAILURE_CHARS = 500
"""Longest text of a task's error within that of a batch that is late."""

Rollouts = tuple[Rollout, ...]


class BatchWaiters:
    """A future for each call that waits. `lock` guards it and the machine; `on` gives the machine an event, without the lock."""

    def __init__(
        self,
        machine: PoolMachine,
        lock: threading.Lock,
        on: Callable[[Any], object],
        stats: Callable[[], PoolStats],
    ) -> None:
        self._machine = machine
        self._lock = lock
        self._on = on
        self._stats = stats
        self._waiting: dict[int, Future[Rollouts]] = {}
        self._numbers = itertools.count()

    def pop(self, waiter: int) -> Future[Rollouts]:
        """Under the lock: the future of a waiter that the machine ends."""
        return self._waiting.pop(waiter)

    def wait(self, n: int, timeout_s: float, max_staleness: int | None) -> DistributedBatch:
        """As `RolloutPool.next_batch`."""
        timeout_s = checked_seconds("timeout_s", timeout_s)
        waiter, future = self._ask(n, max_staleness)
        try:
            rollouts = future.result(timeout_s)
        except TimeoutError as error:
            if isinstance(error, WeightwireError):
                raise
            rollouts = self._last_moment(waiter, future, n, timeout_s)
        except BaseException:  # interrupted: a waiter that nobody is behind would take the next rollouts
            self._give_up(waiter, future)
            raise
        return self._batch(rollouts)

    async def await_(self, n: int, timeout_s: float, max_staleness: int | None) -> DistributedBatch:
        """As `RolloutPool.anext_batch`."""
        timeout_s = checked_seconds("timeout_s", timeout_s)
        waiter, future = self._ask(n, max_staleness)
        try:
            rollouts = await asyncio.wait_for(in_loop(future, future.add_done_callback), timeout_s)
        except TimeoutError as error:
            if isinstance(error, WeightwireError):
                raise
            rollouts = self._last_moment(waiter, future, n, timeout_s)
        except BaseException:  # cancelled, or the loop ends
            self._give_up(waiter, future)
            raise
        return self._batch(rollouts)

    def _ask(self, n: int, max_staleness: int | None) -> tuple[int, Future[Rollouts]]:
        n = checked_count("n", n, 1)
        if max_staleness is not None:
            max_staleness = checked_count("max_staleness", max_staleness, 0)
        future: Future[Rollouts] = Future()
        waiter = next(self._numbers)
        with self._lock:
            self._waiting[waiter] = future
        self._on(BatchAsked(waiter, n, max_staleness))
        return waiter, future

    def _last_moment(self, waiter: int, future: Future[Rollouts], n: int, timeout_s: float) -> Rollouts:
        """The batch, if it became ready as the time ran out. Raises `SyncTimeout`."""
        if self._withdraw(waiter):
            stats, failure = self._stats(), self._machine.last_failure
            failed = f"{stats.failed} have failed" + (
                "" if failure is None else f", the last: {failure.message[:FAILURE_CHARS]}"
            )
            raise SyncTimeout(
                f"{stats.ready} of {n} rollouts are ready after {timeout_s:g} s; {stats.running} tasks run, "
                f"{stats.queued} are queued, {stats.workers} workers are connected; {failed}",
                hint="submit more tasks, start workers, or wait longer; what is ready stays for the next batch",
                side="rollout pool",
            )
        return future.result(LATE_S)

    def _give_up(self, waiter: int, future: Future[Rollouts]) -> None:
        """Nobody takes the batch: its rollouts, if there are any already, are ready again."""
        if not self._withdraw(waiter):
            with contextlib.suppress(WeightwireError):
                self._on(BatchReturned(future.result(LATE_S)))

    def _withdraw(self, waiter: int) -> bool:
        """Whether the waiter still waited."""
        with self._lock:
            if waiter not in self._machine.waiters:
                return False
            self._machine.on(BatchGivenUp(waiter), time.monotonic())
            del self._waiting[waiter]
            return True

    def _batch(self, rollouts: Rollouts) -> DistributedBatch:
        try:
            return batch_of(rollouts)
        except WeightwireError:
            self._on(BatchReturned(rollouts))
            raise


def batch_of(rollouts: Sequence[Rollout]) -> DistributedBatch:
    """The rows of rollouts as a REMOTE batch, in their order. Raises `BatchError` where their keys differ."""
    from trainer_adapters.batch.batch import DistributedBatch

    first = rollouts[0]
    keys = {entry.shard.key for entry in first.entries}
    for rollout in rollouts:
        if (found := {entry.shard.key for entry in rollout.entries}) != keys:
            raise BatchError(
                f"task {rollout.task_id!r} has other keys than task {first.task_id!r}: only one of them has "
                f"{first_few(sorted(found ^ keys))}",
                hint="have the worker's function return the same keys for every task, and clear the tasks that differ",
            )
    owners = {rollout.owner.id: rollout.owner for rollout in rollouts}
    entries = [entry for rollout in rollouts for entry in rollout.entries]
    tags = {rollout.task_id: rollout.tags for rollout in rollouts if rollout.tags}
    return DistributedBatch.of_entries(entries, owners.values(), tags)
