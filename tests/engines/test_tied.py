"""Tied embeddings that are larger than what a plan's proof loads at once, on real engines of one rank and of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.engines.transformers import TransformersEngine
from inference_plugin.install import proof
from tests.engines.conftest import Checkpoint
from tests.engines.test_transformers_engine import TransformersDriver
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import Driver
from tests.support.managers import SyncManager
from tests.support.rig import runtime as runtime_directory
from tests.support.sglang_engines import SglangDriver
from tests.support.small_batches_plugin import BATCH_BYTES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Tied = tuple[Driver | SglangDriver | TransformersDriver, Path, Path]

POLICIES = {"standby": "auto", "copy": "zmq", "streaming": "auto"}
"""Each with a transport."""


@pytest.fixture(scope="module", params=["vllm-1", "vllm-2", "sglang-1", "sglang-2", "transformers-1"])
def tied(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Tied]:
    """A running engine, the checkpoint that it was started from, and another one."""
    engine, _, tp = request.param.partition("-")
    models = checkpoint("qwen3", tied=True, seed=1), checkpoint("qwen3", tied=True, seed=2)
    plugin = {"WEIGHTWIRE_PLUGINS": "tests.support.small_batches_plugin:plugin"}
    if engine == "transformers":
        with pytest.MonkeyPatch.context() as patch, runtime_directory(patch):
            patch.setattr(proof, "BUDGET_BYTES", BATCH_BYTES)
            with TransformersEngine(models[0]) as running:
                yield TransformersDriver(running), *models
        return
    with SglangDriver(runtime, tp=int(tp), **plugin) if engine == "sglang" else Driver(runtime, **plugin) as driver:
        if isinstance(driver, SglangDriver):
            driver.open(models[0])
        else:
            driver.open(models[0], tensor_parallel_size=int(tp), max_model_len=1024)
        yield driver, *models
    assert driver.leftovers() == []


def test_a_tied_embedding_larger_than_a_batch_is_proven_and_updated_by_its_plan(tied: Tied) -> None:
    """Under every policy: the engine holds the trainer's bytes, and says what a fresh engine says."""
    driver, *models = tied
    for version, (install, transport) in enumerate(POLICIES.items(), 1):
        sent = models[version % 2]
        with SyncManager(install=install, transport=transport, timeout_s=120) as manager:  # type: ignore[arg-type]
            report = manager.update(source(sent), version)
            assert {(r.mechanism, r.install) for r in report.replicas} == {("plan", install)}, report
            assert manager.verify(source(sent)).ok
        assert driver.tokens(PROMPTS, COUNT) == reference(sent)
