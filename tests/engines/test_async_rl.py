"""Fully asynchronous RL with a real engine, as its example does it: rollouts come back by reference, and none is staler than
it may be. Then with a part of it killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.engines.conftest import Checkpoint
from tests.support.engines import ENGINE_ARGUMENTS, ROOT, Server, eventually
from tests.support.visible import samples
from trainer_adapters import ModuleAdapter, SyncManager
from trainer_adapters.batch.engine_clients import from_vllm
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.futures import RolloutFuture
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import Generated, RolloutWorker
from trainer_adapters.batch.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, STALENESS, TOKENS = 6, 2, 100
LONG = 1000
"""Tokens of an answer that takes seconds: an update is committed before it ends."""
TIMEOUT_S = 600.0


class TokenServer(Server):
    """Answers `/inference/v1/generate` too, in the precision that the example sends."""

    def start(self) -> None:
        options = ENGINE_ARGUMENTS | {"max_num_seqs": 64, "dtype": "bfloat16", "max_model_len": 1024}
        arguments = ["--model", str(self.model), "--enable-scale-out"]
        self.serve("vllm.entrypoints.openai.api_server", arguments, options)


class Loop:
    """The example in a process of its own. Every line that it prints is an object."""

    def __init__(self, server: TokenServer, log: Path) -> None:
        settings = {"steps": STEPS, "max-staleness": STALENESS, "lr": 1e-2, "max-tokens": TOKENS}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "examples" / "async_rl" / "run.py"), "--model", str(server.model),
                 "--server", f"http://127.0.0.1:{server.port}", *(f"--{name}={value}" for name, value in settings.items())],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )  # fmt: skip
        self.steps: list[dict[str, Any]] = []

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in (self.process, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def next(self, name: str) -> dict[str, Any]:
        """The next line that has this field; steps before it are noted."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "version" in said:
                self.steps.append(said)
            if name in said:
                return said
        raise AssertionError(f"the example ended without {name!r}\n{self.log.read_text()[-8000:]}")

    def end(self) -> dict[str, Any]:
        """Everything that it says at its end, in one object."""
        said = {}
        for name in ("verified", "rollout_stores"):
            said |= self.next(name)
        assert self.process.wait(TIMEOUT_S) == 0
        return said


@pytest.fixture(scope="module")
def server(runtime: Path, checkpoint: Checkpoint) -> Iterator[TokenServer]:
    with TokenServer(runtime, checkpoint("llama", tied=False, seed=1)) as server:
        yield server


def running(server: Server) -> float:
    """Requests that the engine works on."""
    found = samples(server.text("/metrics"))
    return sum(value for (name, _), value in found.items() if name == "vllm:num_requests_running")


def is_empty(store: dict[str, int]) -> bool:
    return not store["tasks"] and not store["shards"] and not store["nbytes"]


def test_rollouts_and_training_overlap_and_staleness_stays_within_its_bound(
    server: TokenServer, tmp_path: Path
) -> None:
    with Loop(server, tmp_path / "log") as loop:
        first = loop.next("first_version")["first_version"]
        end = loop.end()
    assert [step["version"] for step in loop.steps] == list(range(first + 1, first + 1 + STEPS))
    for step in loop.steps:
        assert 0 <= step["staleness"] <= STALENESS
        assert all(first <= oldest <= newest < step["version"] for oldest, newest in step["spans"]), step
        assert 0 < step["reward"] < 1
        assert len(step["tokens"]) == 2 and min(step["tokens"]) > 0.8 * max(step["tokens"]), "shared out by tokens"
        assert step["lost"] == 0
    assert loop.steps[-1]["spans"][-1][1] > first, "later samples are made with later versions"
    assert loop.steps[-1]["controller_share"] < 0.005, "the controller sees metadata"
    assert (end["verified"], end["served"]) == (True, [first + STEPS])
    assert end["trainer_stores"] == [0, 0] and all(map(is_empty, end["rollout_stores"])), "nothing is left behind"


def test_a_batch_holds_rollouts_of_several_versions_and_none_staler_than_it_may(
    server: TokenServer, checkpoint: Checkpoint
) -> None:
    """A task that an update is committed under has both versions in its span, and its batch a task of the new one alone. One
    that two updates are committed under is too stale for a batch that allows one."""
    weights = load_file(checkpoint("llama", tied=False, seed=2) / "model.safetensors")
    source = ModuleAdapter(weights, dtype_rules={"*": torch.bfloat16})

    async def generate(task_id: str, tokens: int) -> Generated:
        sampling = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": [3, 4, 5], "sampling_params": sampling, "return_token_ids": True}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT_S) as http:
            return from_vllm((await http.post("/inference/v1/generate", json=body)).raise_for_status().json())

    with (
        Store(budget_bytes=16 << 20) as store,
        RolloutPool() as pool,
        RolloutWorker(generate, slots=4, store=store, pool=pool.addresses[-1]),
        SyncManager(timeout_s=TIMEOUT_S) as manager,
    ):
        manager.wait_for_replicas(1, timeout_s=TIMEOUT_S)
        first = manager.update(source).version

        def submit_and_update_meanwhile(task_id: str, versions: Sequence[int]) -> RolloutFuture:
            future = pool.submit(task_id, LONG)
            eventually(lambda: running(server) == 1, what=f"the engine to begin with {task_id}")
            manager.pause(in_flight="keep")  # so that it is in flight, however long the updates take
            for version in versions:
                manager.update(source, version)
                pool.set_version(version)
            manager.resume()
            return future

        submit_and_update_meanwhile("two versions", [first + 1])
        pool.submit("the new version", 4)
        batch = pool.next_batch(2, TIMEOUT_S, max_staleness=1)
        spans = {entry.shard.task_id: entry.versions for entry in batch.entries()}
        assert spans == {
            "two versions": VersionSpan(first, first + 1),
            "the new version": VersionSpan(first + 1, first + 1),
        }
        assert sorted(batch.fetch().lengths("token_ids").tolist()) == [4, LONG]

        submit_and_update_meanwhile("too stale", [first + 2, first + 3]).result(TIMEOUT_S)
        pool.submit("the newest version", 4)
        newest = pool.next_batch(1, TIMEOUT_S, max_staleness=1)
        assert (newest.task_ids, newest.versions) == (("the newest version",), VersionSpan(first + 3, first + 3))
        assert pool.stats().stale == 1
        for done in (batch, newest):
            done.clear()
        eventually(lambda: store.stats().tasks == 0, what="the end of the rows, also of those that were too stale")


def test_a_rollout_worker_that_is_killed_loses_its_samples_and_the_loop_goes_on(
    server: TokenServer, tmp_path: Path
) -> None:
    with Loop(server, tmp_path / "log") as loop:
        victim, _ = loop.next("rollout_workers")["rollout_workers"]
        first = loop.next("first_version")["first_version"]
        assert loop.next("version")["lost"] == 0
        os.kill(victim, signal.SIGKILL)
        end = loop.end()
    assert [step["version"] for step in loop.steps] == list(range(first + 1, first + 1 + STEPS))
    assert loop.steps[-1]["lost"] > 0, "the tasks that it ran, or kept the rows of, are reported"
    assert (end["verified"], end["served"]) == (True, [first + STEPS])
    dead, living = end["rollout_stores"]
    assert dead is None and is_empty(living) and end["trainer_stores"] == [0, 0]


def test_a_controller_that_is_killed_leaks_nothing_and_a_new_one_goes_on(server: TokenServer, tmp_path: Path) -> None:
    with Loop(server, tmp_path / "log") as loop:
        before = loop.next("first_version")
        loop.next("version")
        os.kill(before["ranks"][0], signal.SIGKILL)  # the controller, with all that it had asked for
        after = loop.next("first_version")
        assert set(after["ranks"]).isdisjoint(before["ranks"]), "torchrun has started both ranks again"
        assert after["first_version"] > max(step["version"] for step in loop.steps) - 1
        loop.steps.clear()
        end = loop.end()
    first = after["first_version"]
    assert [step["version"] for step in loop.steps] == list(range(first + 1, first + 1 + STEPS))
    assert (end["verified"], end["served"]) == (True, [first + STEPS])
    # Nobody but the workers themselves could have cleared what the first controller had asked for.
    assert all(map(is_empty, end["rollout_stores"])) and end["trainer_stores"] == [0, 0]
