"""From finished rollouts to the rows that each trainer rank learns from.

Rank 0 is the controller too. It sees metadata and one reward per row; all other bytes go from the process that made them
straight to the rank that reads them, on one host through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import FetchFailed, RolloutFailed
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.nested import remotize
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.store import Store

WAIT_S = 300.0
MOST_FAILURES = 100
"""Tasks that failed at their worker are replaced, up to this number of them."""


class Controller:
    """Rank 0: submits tasks, and makes a batch of the first `tasks` that complete.

    `new_task` makes a task: its id, unique over a whole training, and its payload. `batch` is the batch at work, REMOTE.
    `seen_bytes` is what came and went through this process, beside the pool's own messages; `data_bytes` what it stood for.
    """

    def __init__(self, new_task: Callable[[], tuple[str, Any]], *, tasks: int, staleness: int) -> None:
        self.pool = RolloutPool()
        self.tasks, self.staleness = tasks, staleness
        self.batch = self.drawn = DistributedBatch()
        self.seen_bytes = self.data_bytes = self.failed = self.lost_later = 0
        self._new_task = new_task
        self._kept: list[DistributedBatch] = []
        self._stop_replacing = self.pool.on_complete(self._replace)

    def submit(self, tasks: int) -> None:
        for _ in range(tasks):
            self.pool.submit(*self._new_task())

    def draw(self) -> None:
        self.batch = self.drawn = self.pool.next_batch(self.tasks, WAIT_S, self.staleness)
        self._kept = [self.drawn]

    def split(self, ranks: int) -> list[DistributedBatch | None]:
        """A part of the batch for each rank, with about as many tokens in each. None: too few rows are left."""
        if len(self.batch) < ranks:
            return [None] * ranks
        parts = self.batch.split(ranks, by="token_ids")
        self.batch = DistributedBatch.concat(parts)  # in the order of the ranks' rows
        self.seen_bytes += sum(len(part.to_bytes()) for part in parts[1:])
        return list(parts)

    def drop(self, lost: set[str]) -> None:
        """Leaves out the rows of tasks whose owner has died. Raises where the rows that are missing are the trainer's own."""
        if not lost <= set(self.batch.row_tasks("token_ids")):
            raise RuntimeError(f"rows of the trainer's own ranks are lost: {sorted(lost)[:3]}")
        self.batch = self.batch.filter([task not in lost for task in self.batch.row_tasks("token_ids")])
        self.lost_later += len(lost)

    def join(self, recomputed: list[DistributedBatch]) -> None:
        """Adds what the ranks computed from their rows, in the order of the ranks."""
        self.seen_bytes += sum(len(part.to_bytes()) for part in recomputed[1:])
        self.batch = self.batch.union(DistributedBatch.concat(recomputed))
        self._kept += recomputed

    def add_advantages(self, store: Store, task_id: str) -> None:
        """The reward of each row, less the mean of its group: the rows of one task."""
        while lost := fetch(rewarded := self.batch.select(["rewards"])):
            self.drop(lost)
        rewards, tasks = rewarded.dense("rewards"), self.batch.row_tasks("token_ids")
        groups = torch.tensor([list(dict.fromkeys(tasks)).index(task) for task in tasks], dtype=torch.int64)
        sums = torch.zeros(len(tasks)).index_add(0, groups, rewards)
        advantages = rewards - (sums / groups.bincount(minlength=len(tasks)))[groups]
        self._kept.append(remotize(DistributedBatch({"advantages": advantages}), store, task_id))
        self.batch.union_(self._kept[-1])
        self.seen_bytes += rewards.nbytes
        self.data_bytes += self.batch.nbytes

    def clear(self) -> None:
        """Nobody keeps anything of the batch, nor of what was left out of it: rollout workers, ranks."""
        for batch in self._kept:
            batch.clear(timeout_s=WAIT_S)

    @property
    def lost(self) -> int:
        """Tasks whose rollout worker died while it ran them, or while it kept their rows."""
        return self.pool.stats().lost + self.lost_later

    @property
    def share_seen(self) -> float:
        """All bytes that came and went through this process as the controller, as a share of the data."""
        stats = self.pool.stats()
        return (self.seen_bytes + stats.received_bytes + stats.sent_bytes) / max(1, self.data_bytes)

    def close(self) -> None:
        self._stop_replacing()
        self.pool.close()

    def _replace(self, done: Any) -> None:
        """Another task takes the place of one that failed, became too stale, or was lost with its worker."""
        if (error := done.exception()) is not None and self.failed < MOST_FAILURES:
            self.failed += isinstance(error, RolloutFailed)
            self.submit(1)


class RankRows:
    """A rank's share of each batch; `store` keeps what this rank computes. All methods are collective."""

    def __init__(self, store: Store, controller: Controller | None) -> None:
        self._store, self._controller = store, controller
        self._batches = 0

    def next(self, recompute: Callable[[DistributedBatch], dict[str, Any]]) -> DistributedBatch:
        """This rank's rows of the next batch, LOCAL, with what the ranks' `recompute` made of them, and advantages."""
        while True:
            if self._controller:
                self._controller.draw()
            if (rows := self._share()) is not None:
                self._recompute(rows, recompute)
                rows = None  # gives the leases back
                if (rows := self._share()) is not None:
                    return rows
            if self._controller:  # another batch in its place
                self._controller.clear()
                self._controller.submit(self._controller.tasks)

    def _recompute(self, rows: DistributedBatch, recompute: Callable[[DistributedBatch], dict[str, Any]]) -> None:
        self._batches += 1
        task_id = f"{self._store.owner.id}/{self._batches}"
        mine = remotize(DistributedBatch(recompute(rows)), self._store, task_id)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, parts if self._controller else None)
        if self._controller:
            self._controller.join(parts)
            self._controller.add_advantages(self._store, f"{task_id}/advantages")

    def _share(self) -> DistributedBatch | None:
        """This rank's rows of the batch, fetched. None: too few are left without those whose owner has died."""
        ranks = dist.get_world_size()
        while True:
            received: list[Any] = [None]
            dist.scatter_object_list(received, self._controller.split(ranks) if self._controller else None)
            rows: DistributedBatch | None = received[0]
            if rows is None:
                return None
            lost: list[Any] = [None] * ranks
            dist.all_gather_object(lost, fetch(rows))
            if not any(lost):
                return rows
            if self._controller:
                self._controller.drop(set().union(*lost))


def fetch(rows: DistributedBatch) -> set[str]:
    """Fetches rows; the tasks that could not be fetched."""
    try:
        rows.fetch(timeout_s=WAIT_S)
    except FetchFailed as error:
        return {failure.task_id for failure in error.failures}
    return set()
