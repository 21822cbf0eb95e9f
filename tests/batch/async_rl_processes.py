"""The way back as `examples/async_rl` uses it, without an engine: two ranks, beside workers that make random rows."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import PeerLost, RolloutFailed, StaleRollout
from tests.support.rig import gone, kill
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.ranks import RankBatch
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

TASKS, SAMPLES, MOST_TOKENS = 4, 4, 16_000
LOOKED_EVERY = 5


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


async def random_rows(task_id: str, version: int) -> Generated:
    await asyncio.sleep(0.001)
    lengths = torch.randint(1, MOST_TOKENS, (SAMPLES,)).tolist()
    data = {
        "token_ids": jagged([torch.randint(0, 1000, (n,)) for n in lengths]),
        "logprobs": jagged([torch.randn(n) for n in lengths]),
        "rewards": torch.rand(SAMPLES),
    }
    return Generated(data, VersionSpan(version, version))


def run_worker(there: str) -> None:
    with Store(budget_bytes=64 << 20) as store, RolloutWorker(random_rows, slots=4, store=store):
        Path(there).touch()
        signal.sigwait({signal.SIGTERM})


def run_rank(
    rank: int, meeting: str, steps: int, workers: list[int], told: str, tasks: int = TASKS, kill_at: int = -1
) -> None:
    """Rank 0 writes what every process uses into `told`, a line for each look. At a step it kills a worker, when the
    ranks have fetched rows of it, and before the rewards are fetched."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    controller = Controller(tasks) if rank == 0 else None
    with Store(budget_bytes=64 << 20, name="trainer") as store, Path(told).open("a") as file:
        version = 0
        while version < steps:
            batch = RankBatch(controller.draw() if controller else None, store, by="token_ids", timeout_s=60)
            if (rows := batch.fetch()) is not None:
                computed = {"old_logprobs": [row * 2 for row in rows.rows("logprobs")]}
                rows = None
                if controller and version == kill_at and not any(map(gone, workers)):
                    kill(batch.whole.owners[batch.whole.entries()[0].owner].pid)
                batch.add(computed)
                if controller:
                    rewards = batch.read(["rewards"]).dense("rewards")
                    batch.add_whole({"advantages": rewards - rewards.mean()})
                if (rows := batch.fetch()) is not None:
                    assert torch.equal(rows["old_logprobs"].values(), rows["logprobs"].values() * 2)
                    assert rows["advantages"].shape == (len(rows),)
                    version += 1
            if controller:
                controller.done(batch, version)
                if rows is not None and version % LOOKED_EVERY == 1 and kill_at < 0:
                    processes = {f"worker {i}": pid for i, pid in enumerate(workers)}
                    processes |= {f"rank {i}": pid for i, pid in enumerate(pids)}
                    look = {"step": version - 1, "use": {name: used(pid) for name, pid in processes.items()}}
                    print(json.dumps(look | {"data_bytes": controller.data_bytes}), file=file, flush=True)
            del rows
        dist.barrier()
        if controller is not None:
            stats = controller.pool.stats()
            controller.pool.close()
            end = {"version": version, "share": controller.share(), "failed": controller.failed}
            end |= {"lost": stats.lost + controller.lost_later, "lost_later": controller.lost_later}
            print(json.dumps(end | {"tasks": store.stats().tasks}), file=file, flush=True)
        dist.barrier()
    dist.destroy_process_group()


class Controller:
    """Rank 0's side: tasks, batches, and what passed through it."""

    def __init__(self, tasks: int) -> None:
        self.pool = RolloutPool()
        self.pool.set_version(0)
        self.pool.on_complete(self._replace)
        self.tasks, self.version = tasks, 0
        self.moved_bytes = self.data_bytes = self.lost_later = self.failed = 0
        self._numbers = itertools.count()
        self.submit(3 * tasks)

    def submit(self, tasks: int) -> None:
        for _ in range(tasks):
            self.pool.submit(f"task-{next(self._numbers)}", self.version)

    def draw(self) -> DistributedBatch:
        return self.pool.next_batch(self.tasks, 60, 3)

    def done(self, batch: RankBatch, version: int) -> None:
        batch.clear()
        self.moved_bytes += batch.moved_bytes
        self.data_bytes += batch.whole.nbytes
        self.lost_later += len(batch.lost)
        self.version = version
        self.pool.set_version(version)
        self.submit(self.tasks)

    def share(self) -> float:
        stats = self.pool.stats()
        return (self.moved_bytes + stats.received_bytes + stats.sent_bytes) / self.data_bytes

    def _replace(self, done: Any) -> None:
        error = done.exception()
        self.failed += isinstance(error, RolloutFailed)
        if isinstance(error, StaleRollout | PeerLost):
            self.submit(1)


def used(pid: int) -> dict[str, int]:
    """Bytes of its own, bytes of shared segments that it maps, bytes of those that it has open, and its descriptors and threads.

    How much of what is mapped is resident says nothing: the kernel reclaims pages that rest.
    """
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    segments, descriptors = {}, list(Path(f"/proc/{pid}/fd").iterdir())
    for descriptor in descriptors:
        try:
            if "memfd:" in str(descriptor.readlink()):
                found = descriptor.stat()
                segments[found.st_ino] = found.st_blocks * 512
        except FileNotFoundError:  # closed meanwhile
            continue
    spans = [
        line.split()[0].split("-") for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:" in line
    ]
    return {
        "own": int(fields["RssAnon"].split()[0]) * 1024,
        "mapped": sum(int(end, 16) - int(start, 16) for start, end in spans),
        "segments": sum(segments.values()),
        "descriptors": len(descriptors),
        "threads": int(fields["Threads"]),
    }
