"""From the end of a task at a rollout worker to the controller's callback, and to a controller that polls every 100 ms.

The worker's function returns the rows of 8 samples (about 1.1 MB); it notes the time when it does, in a tag. Until the callback
the worker puts them into its store and announces them, and the pool takes the announcement. One task at a time.

Usage of the worker: python -m benchmarks.batches.latency
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.batches.data import Case, now_s
from benchmarks.processes import Process
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.generated import Generated
from trainer_adapters.batch.rollouts.pool import Rollout, RolloutPool
from trainer_adapters.batch.rollouts.worker import RolloutWorker
from trainer_adapters.batch.store import Store

POLL_S = 0.1
TIMEOUT_S = 60
WARM_UPS = 10
ROWS = 8
LONGEST_TASK_S = 0.1


def measure_latency(scratch: Path, tasks: int, polled: int) -> list[dict[str, Any]]:
    """A row for callbacks (of `tasks` tasks) and one for polling (of `polled`), in seconds."""
    os.environ["WEIGHTWIRE_RUNTIME_DIR"] = str(scratch)
    worker = Process([sys.executable, "-m", "benchmarks.batches.latency"], scratch / "rollout-worker.log", {})
    try:
        with RolloutPool() as pool:
            called = [_called(pool, f"called-{i}") for i in range(WARM_UPS + tasks)][WARM_UPS:]
            seen = [_polled(pool, f"polled-{i}") for i in range(polled)]
    finally:
        worker.stop()
    return [_row("callback", called), _row(f"polling every {POLL_S * 1e3:.0f} ms", seen)]


def _called(pool: RolloutPool, task_id: str) -> float:
    came: Future[tuple[float, Any]] = Future()
    remove = pool.on_complete(lambda future: came.set_result((now_s(), future)))
    pool.submit(task_id, None)
    at_s, future = came.result(TIMEOUT_S)
    remove()
    pool.clear([task_id])
    return at_s - _returned_s(future.result())


def _polled(pool: RolloutPool, task_id: str) -> float:
    future = pool.submit(task_id, None)
    deadline_s = now_s() + TIMEOUT_S
    while not future.done():
        if now_s() > deadline_s:
            raise SystemExit(f"{task_id} does not end")
        time.sleep(POLL_S)
    latency_s = now_s() - _returned_s(future.result())
    pool.clear([task_id])
    return latency_s


def _returned_s(rollout: Rollout) -> float:
    at_s = rollout.tags["returned_s"]
    assert isinstance(at_s, float)
    return at_s


def _row(way: str, latencies_s: list[float]) -> dict[str, Any]:
    ordered = sorted(latencies_s)
    return {
        "kind": "completion",
        "way": way,
        "tasks": len(ordered),
        "median_s": statistics.median(ordered),
        "p95_s": ordered[int(0.95 * (len(ordered) - 1))],
        "max_s": ordered[-1],
    }


def main() -> None:
    ((_, rows),) = Case(ROWS, ROWS).make(0).items()
    lengths = random.Random(0)

    async def generate(task_id: str, payload: object) -> Generated:
        await asyncio.sleep(lengths.uniform(0.0, LONGEST_TASK_S))
        return Generated(rows, VersionSpan(1, 1), {"returned_s": now_s()})

    with Store(budget_bytes=1 << 30) as store, RolloutWorker(generate, slots=4, store=store):
        time.sleep(600)  # the benchmark ends this process


if __name__ == "__main__":
    main()
