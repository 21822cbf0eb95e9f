"""Two ranks that share a batch out, one of which fails in the middle: what each of them was told."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import WeightwireError
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.ranks import RankBatch
from trainer_adapters.batch.store import Store

GROUP_TIMEOUT_S = 600.0
"""Longer than the test waits for the ranks."""
ROWS = [{"ids": [torch.full((3,), i), torch.full((i + 1,), 10 + i)]} for i in range(4)]


def run_rank(rank: int, meeting: str, what: str, told: str) -> None:
    """Writes the kind and the text of the error into `told`, and how many tasks this rank's store holds after it."""
    limit = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{meeting}", limit, rank=rank, world_size=2)
    with Store(budget_bytes=1 << 24, name="made") as made, Store(budget_bytes=1 << 24, name="own") as own:
        entries = [entry for i, rows in enumerate(ROWS) for entry in made.put(f"t{i}", rows)] if rank == 0 else []
        whole = DistributedBatch.of_entries(entries, [made.owner]) if rank == 0 else None
        batch = RankBatch(whole, own, by="nonsense" if what == "share" else "ids", timeout_s=60)
        try:
            _fail(batch, own, what, fails=rank == 1)
            said: dict[str, Any] = {"kind": "none"}
        except WeightwireError as error:
            said = {"kind": type(error).__name__, "text": error.message, "rank": error.rank}
        Path(told).write_text(json.dumps(said | {"tasks": own.stats().tasks}))
        if what != "read":
            dist.barrier()
    dist.destroy_process_group()


def _fail(batch: RankBatch, own: Store, what: str, *, fails: bool) -> None:
    rows = batch.fetch()
    assert rows is not None
    sums = torch.zeros(len(rows))
    if what == "put":
        batch.add({"sums": sums, **({"bad": object()} if fails else {})})
    if what == "join":
        batch.add({"other sums" if fails else "sums": sums})
    if what == "rows":  # as many in all as there are
        batch.add({"sums": torch.zeros(len(rows) + (1 if fails else -1))})
    batch.add({"sums": sums})
    if fails:
        own.clear(own.tasks)
    if what == "read":
        dist.barrier()
        if not fails:
            batch.read(["sums"])
    batch.fetch()
