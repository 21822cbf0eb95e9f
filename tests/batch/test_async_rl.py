"""The way back as `examples/async_rl` uses it, without an engine: 200 steps in which no process grows, and a worker that dies."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from inference_plugin.wire.errors import PoolClosed
from tests.batch.async_rl_processes import LOOKED_EVERY
from tests.support.engines import eventually
from tests.support.rig import fork, gone, kill, runtime
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

ROOT = Path(__file__).resolve().parents[2]
STEPS, WARM_UP = 200, 60
MIB = 1 << 20
MOST_GROWTH = {"own": 8 * MIB, "mapped": 8 * MIB, "segments": 8 * MIB, "descriptors": 8, "threads": 4}
"""Of the median, from the first looks after the warm-up to the last ones. More than 96 MiB of rows pass meanwhile: if they
leak, it shows."""


def run(directory: Path, steps: int, **options: Any) -> list[dict[str, Any]]:
    """Two workers and two ranks, from beginning to end; what rank 0 told."""
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
    module, told = "tests.batch.async_rl_processes", directory / "told"
    theres = [directory / f"worker-{number}" for number in range(2)]
    workers = [fork(f"{module}:run_worker", environment, there=str(there)) for there in theres]
    common: dict[str, Any] = {"meeting": str(directory / "meeting"), "told": str(told)}
    common |= {"steps": steps, "workers": workers, **options}
    ranks: list[int] = []
    try:
        eventually(lambda: all(there.exists() for there in theres), timeout_s=300, what="the workers")
        ranks += [fork(f"{module}:run_rank", environment, rank=rank, **common) for rank in range(2)]
        eventually(lambda: all(map(gone, ranks)), timeout_s=600, what="the end of the ranks")
    finally:
        for pid in (*workers, *ranks):
            if not gone(pid):
                kill(pid)
    return [json.loads(line) for line in told.read_text().splitlines()]


@pytest.mark.slow
def test_memory_is_flat_in_every_process_over_200_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with runtime(monkeypatch) as directory:
        *looks, end = run(directory, STEPS)
    assert [look["step"] for look in looks] == list(range(0, STEPS, LOOKED_EVERY))
    assert end["version"] == STEPS and end["lost"] == end["failed"] == end["tasks"] == 0
    assert end["share"] < 0.005, "the controller sees metadata"
    settled = [look for look in looks if look["step"] >= WARM_UP]
    assert settled[-1]["data_bytes"] - settled[0]["data_bytes"] > 12 * MOST_GROWTH["own"]
    few = len(settled) // 4
    for name in settled[0]["use"]:
        for what, most in MOST_GROWTH.items():
            first, last = (median(look["use"][name][what] for look in part) for part in (settled[:few], settled[-few:]))
            assert last - first <= most, f"{what} of {name} grows: {[look['use'][name][what] for look in looks]}"


@pytest.mark.parametrize("tasks", [4, 1], ids=["some of a batch", "a whole batch"])
def test_rows_whose_worker_dies_in_the_middle_of_a_step_are_left_out_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch, tasks: int
) -> None:
    with runtime(monkeypatch) as directory:
        (end,) = run(directory, 12, tasks=tasks, kill_at=4)
    assert end["version"] == 12 and end["failed"] == end["tasks"] == 0
    assert end["lost"] >= end["lost_later"] > 0, (
        "tasks of the batch at work, beside those that the worker ran or had ready"
    )


@pytest.mark.slow
def test_a_rank_of_the_example_that_meets_no_other_ends_within_its_limit() -> None:
    """torchrun then starts all ranks again; before, such a rank waited for ten minutes."""
    program = "import train; train.START_S = 2; train.main()"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = f"{ROOT}:{ROOT / 'examples' / 'async_rl'}"
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": paths}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | alone,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Timeout (0:00:02)!" in ended.stderr and "train.py" in ended.stderr


def test_the_example_s_controller_replaces_tasks_that_fail_and_ends_when_they_all_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "async_rl"))
    import train as example

    sys.modules.pop("train")  # a name that others have too
    left = iter(range(5))
    more = threading.Event()

    async def generate(task_id: str, task: dict[str, Any]) -> Generated:
        if next(left, None) is not None:
            raise OSError("the engine is away")
        if not more.is_set():
            return Generated({"k": [1]}, VersionSpan(0, 0))
        raise OSError("the engine has ended")

    arguments = argparse.Namespace(max_staleness=1, samples=1, max_tokens=1)
    with runtime(monkeypatch), Store(budget_bytes=1 << 20) as store, RolloutWorker(generate, slots=2, store=store):
        controller = example.Controller(arguments, 512, 0)
        with controller.pool:
            assert len(controller.draw()) == len(controller.draw()) == example.TASKS
            more.set()
            controller.submit(1)
            with pytest.raises(PoolClosed):
                controller.draw()
