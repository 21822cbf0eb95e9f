"""The way back of `examples/async_rl` without an engine: its own code on two ranks, beside workers that make random rows."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.rig import ROOT, gone, kill
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

TASKS, SAMPLES, MOST_TOKENS = 4, 4, 8000
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
    rank: int, port: int, steps: int, workers: list[int], told: str, tasks: int = TASKS, kill_at: int = -1
) -> None:
    """Rank 0 writes what every process uses into `told`, a line for each look. At a step it kills a worker, when the
    ranks have fetched rows of it, and before the rewards are fetched."""
    sys.path.insert(0, str(ROOT / "examples" / "async_rl"))
    way_back: Any = importlib.import_module("way_back")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    version = 0
    numbers = iter(range(1 << 30))
    controller = None
    if rank == 0:
        controller = way_back.Controller(lambda: (f"task-{next(numbers)}", version), tasks=tasks, staleness=3)
        controller.pool.set_version(version)
        controller.submit(3 * tasks)

    def recompute(rows: DistributedBatch) -> dict[str, Any]:
        if controller is not None and version == kill_at and not any(map(gone, workers)):
            batch = controller.batch
            kill(batch.owners[batch.entries()[0].owner].pid)
        return {"old_logprobs": jagged([row * 2 for row in rows["logprobs"].unbind()])}

    with Store(budget_bytes=64 << 20, name="trainer") as store, Path(told).open("a") as file:
        shares = way_back.RankRows(store, controller)
        for step in range(steps):
            rows = shares.next(recompute)
            assert torch.equal(rows["old_logprobs"].values(), rows["logprobs"].values() * 2)
            del rows
            version += 1
            if controller is not None:
                controller.clear()
                controller.pool.set_version(version)
                controller.submit(tasks)
                if step % LOOKED_EVERY == 0 and kill_at < 0:
                    processes = {f"worker {i}": pid for i, pid in enumerate(workers)}
                    processes |= {f"rank {i}": pid for i, pid in enumerate(pids)}
                    use = {name: used(pid) for name, pid in processes.items()}
                    print(
                        json.dumps({"step": step, "use": use, "data_bytes": controller.data_bytes}),
                        file=file,
                        flush=True,
                    )
        dist.barrier()
        if controller is not None:
            controller.close()
            end = {
                "version": version,
                "share": controller.share_seen,
                "failed": controller.failed,
                "tasks": store.stats().tasks,
            }
            end |= {"lost": controller.lost, "lost_later": controller.lost_later}
            print(json.dumps(end), file=file, flush=True)
        dist.barrier()
    dist.destroy_process_group()


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
