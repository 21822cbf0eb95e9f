"""Consumers are served while another thread of the owner's process sits in a collective of torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.batch.owners import Held, as_bytes, elsewhere, fetched, rows_of, tell
from tests.support.rig import eventually, fork, gone, kill, runtime
from trainer_adapters.batch.client import clear_tasks
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.records import ShardId
from trainer_adapters.batch.store import Store

TASKS = 40


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


def rank(number: int, directory: str) -> None:
    """Runs in a process of its own. Rank 0 owns rows and waits in a collective until rank 1, which is told to, joins it."""
    at = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{at}/meeting", rank=number, world_size=2)
    if number == 0:
        store = Store(budget_bytes=1 << 28)
        tell(at / "held", store.owner, [e for i in range(TASKS) for e in store.put(f"t{i}", rows_of(f"t{i}"))])
    else:
        eventually(lambda: (at / "join").exists(), "the test tells rank 1 to join")
    total = torch.ones(1)
    (at / f"entered{number}").touch()
    dist.all_reduce(total)
    (at / f"left{number}").write_text(str(total.item()))
    threading.Event().wait()


def test_many_requests_are_served_during_a_collective(directory: Path) -> None:
    pids = [fork("tests.batch.test_store_collective:rank", number=i, directory=str(directory)) for i in range(2)]
    try:
        eventually(lambda: (directory / "entered0").exists() or gone(pids[0]), "rank 0 enters the collective")
        held = msgspec.msgpack.decode((directory / "held").read_bytes(), type=Held)

        def fetch(number: int) -> bool:
            owner = elsewhere(held.owner) if number % 2 else held.owner
            have = fetched(held.entries, owner)
            wanted = rows_of(f"t{number}")["tokens"]
            return as_bytes(have[ShardId(f"t{number}", "tokens")]) == as_bytes(local_part(wanted))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(fetch, range(TASKS)))
        report = clear_tasks({held.owner.id: ["t0", "t1"]}, {held.owner.id: held.owner}, timeout_s=60)
        assert report.cleared == 2
        assert not (directory / "left0").exists()  # it still sits there
        (directory / "join").touch()
        eventually(lambda: (directory / "left0").exists() and (directory / "left0").read_text(), "the collective's end")
        assert float((directory / "left0").read_text()) == 2.0
    finally:
        for pid in pids:
            if not gone(pid):
                kill(pid)
