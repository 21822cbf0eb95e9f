"""The processes of `test_storm.py`. They talk through files: what is to be consumed, what was consumed, and how all ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch

from inference_plugin.wire.errors import WeightwireError
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

BUDGET = 24 << 20
TASK_ROWS = 4
BATCH = 6
IN_FLIGHT = 24
TURN_S = 60.0
FETCH_S = 3.0
"""An owner that stands still costs a consumer no more."""
MOST_OPEN = 6
READ_S = 10.0
"""After this time a batch that nobody has read is cleared: its consumer was killed, or stands still."""


def made_rows(task_id: str) -> dict[str, Any]:
    """The rows of a task, which every process can make again; 4 to 500 kB."""
    seed = sum(ord(character) * (i + 1) for i, character in enumerate(task_id))
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 16_000, (TASK_ROWS,), generator=random).tolist()
    return {
        "ids": [torch.randint(0, 1 << 40, (length,), generator=random) for length in lengths],
        "text": [f"{task_id}/{row}" for row in range(TASK_ROWS)],
    }


def wrong_rows(batch: DistributedBatch) -> list[str]:
    """The tasks whose rows are not those that were put."""
    wrong, ids, text = [], batch["ids"].unbind(), batch["text"]
    for row, task in enumerate(batch.row_tasks()):
        made = made_rows(str(task))
        if text[row] != f"{task}/{row % TASK_ROWS}" or not torch.equal(ids[row], made["ids"][row % TASK_ROWS]):
            wrong.append(str(task))
    return wrong


def work(directory: str, name: str) -> None:
    async def generate(task_id: str, payload: Any) -> Generated:
        await asyncio.sleep(payload)
        return Generated(made_rows(task_id), VersionSpan(0, 0))

    root = Path(directory)
    with Store(budget_bytes=BUDGET) as store, RolloutWorker(generate, slots=8, store=store):
        while not (root / "end").exists():
            write(root / f"{name}.stats", {"tasks": store.stats().tasks, "leased": store.stats().leased_bytes})
            time.sleep(0.02)
    (root / f"{name}.closed").touch()


def consume(directory: str, name: str) -> None:
    """Takes batches over, reads them, keeps the last ones, and reads these again before it drops them."""
    root, kept = Path(directory), deque[DistributedBatch]()
    while not (root / "end").exists():
        for path in sorted(root.glob("*.batch")):
            mine = path.with_suffix(f".{name}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(mine)
                batch = DistributedBatch.from_bytes(mine.read_bytes())
                said = "lost"
                with contextlib.suppress(WeightwireError):
                    kept.append(batch.fetch(timeout_s=FETCH_S))
                    said = "wrong" if wrong_rows(batch) else "right"
                if len(kept) > 2 and wrong_rows(kept.popleft()):
                    said = "changed"
                write(mine.with_suffix(".said"), said)
        time.sleep(0.01)
    kept.clear()
    (root / f"{name}.closed").touch()


def control(directory: str, name: str) -> None:
    """Submits, takes batches, hands them out, and clears them once they were read."""
    root, ended = Path(directory), Counter[str]()
    open_batches: dict[Path, tuple[DistributedBatch, float]] = {}
    number = taken = 0
    with RolloutPool(on_lost="rerun", silence_s=1.0) as pool:
        futures = []
        while not (root / "end").exists() and not (root / "drain").exists():
            while pool.stats().queued + pool.stats().running + pool.stats().ready < IN_FLIGHT:
                futures.append(pool.submit(f"{name}-{number}", number % 5 * 0.005, deadline_s=TURN_S))
                number += 1
            if len(open_batches) < MOST_OPEN:
                with contextlib.suppress(WeightwireError):
                    batch = pool.next_batch(BATCH, timeout_s=0.2)
                    taken += 1
                    path = root / f"{name}-{taken}.batch"
                    path.with_suffix(".tmp").write_bytes(batch.to_bytes())
                    open_batches[path] = batch, time.monotonic()
                    path.with_suffix(".tmp").rename(path)
            for path, (batch, since_s) in list(open_batches.items()):
                if path.with_suffix(".said").exists() or time.monotonic() - since_s > READ_S:
                    del open_batches[path]
                    batch.clear(timeout_s=5.0)
            time.sleep(0.005)
        for batch, _ in open_batches.values():
            batch.clear(timeout_s=5.0)
    for future in futures:  # the pool is closed: each has ended
        ended["pending" if not future.done() else "ended"] += 1
    write(root / f"{name}.futures", dict(ended))
    (root / f"{name}.closed").touch()


def write(path: Path, what: Any) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_text(json.dumps(what))
    temporary.replace(path)
