"""A rollout worker in the process of an engine's own client (vLLM's `AsyncLLM`, SGLang's `Engine`), on real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engines.conftest import Checkpoint
from tests.support.engines import ENGINE_ARGUMENTS, START_TIMEOUT_S, Engine, eventually
from tests.support.greedy import greedy_batch
from tests.support.sglang_engines import ENGINE_ARGUMENTS as SGLANG_ARGUMENTS
from tests.support.sglang_engines import PYTHON, SglangDriver, environment
from trainer_adapters import ModuleAdapter, SyncManager
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.pool import RolloutPool

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TIMEOUT_S = 600.0
PROMPTS = ([3, 4, 5], [9, 8, 7, 6], [11, 5])
TOKENS = 8


class InVllm(Engine):
    """The worker beside an `AsyncLLM`, in one process."""

    kind = "vllm"

    def __init__(self, runtime: Path, model: Path) -> None:
        super().__init__(runtime)
        self.options: dict[str, Any] = {"model": str(model), **ENGINE_ARGUMENTS}
        self.told = self.log.with_suffix(".told")

    def start(self) -> None:
        arguments = [self.kind, str(self.told), json.dumps(self.options)]
        self.process = process = self._run("tests.support.rollout_engine", arguments)
        eventually(
            lambda: self.told.exists() or process.poll() is not None, timeout_s=START_TIMEOUT_S, what="the worker"
        )
        assert self.told.exists(), "it ended as it started"

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)


class InSglang(InVllm):
    """The worker beside an `sgl.Engine`, in one process."""

    kind = "sglang"
    python, preloads, constants = str(PYTHON), SglangDriver.preloads, SglangDriver.constants

    def __init__(self, runtime: Path, model: Path) -> None:
        super().__init__(runtime, model)
        self.environment |= environment()
        self.options = {"model_path": str(model), **SGLANG_ARGUMENTS}


@pytest.mark.parametrize("engine", [InVllm, InSglang], ids=["vllm", "sglang"])
def test_a_worker_in_the_engines_own_process_generates_keeps_and_announces(
    runtime: Path, checkpoint: Checkpoint, engine: type[InVllm]
) -> None:
    """Rows lie in the engine's process, and are those of the weights that it serves; it takes updates and tasks in turn."""
    first, second = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    with engine(runtime, first) as running, RolloutPool() as pool, SyncManager(timeout_s=TIMEOUT_S) as manager:
        manager.wait_for_replicas(1, timeout_s=TIMEOUT_S)
        pool.set_version(0)
        for version, model in ((0, first), (1, second)):
            if version:
                manager.update(ModuleAdapter(load_file(model / "model.safetensors")), version)
                pool.set_version(version)
            payloads = [{"prompt": prompt, "tokens": TOKENS + number} for number, prompt in enumerate(PROMPTS)]
            for future in [pool.submit(f"{version}/{number}", payload) for number, payload in enumerate(payloads)]:
                future.result(TIMEOUT_S)
            batch = pool.next_batch(len(PROMPTS), TIMEOUT_S, max_staleness=0)
            assert {owner.pid for owner in batch.owners.values()} == {running.process and running.process.pid}
            assert batch.versions == VersionSpan(version, version) and len(batch) == len(PROMPTS)
            expected = greedy_batch(model, PROMPTS)
            batch.fetch()
            rows = zip(batch.row_tasks(), batch.rows("token_ids"), batch.rows("logprobs"), strict=True)
            for task, tokens, logprobs in rows:
                number = int(str(task).rpartition("/")[2])
                assert tokens.tolist() == expected[number][: TOKENS + number]
                assert logprobs.shape == tokens.shape and bool((logprobs <= 0).all())
            assert batch.clear().cleared == len(PROMPTS)
    assert json.loads(running.told.read_text())["tasks"] == 0, "nothing is left in the engine's process"
