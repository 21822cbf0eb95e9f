"""Engines that pass an update on to each other while they generate."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from inference_plugin.engines.transformers import TransformersEngine
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source, weights
from tests.support.managers import SyncManager
from tests.support.rig import runtime as runtime_directory


@pytest.mark.parametrize("fan_out", ["chain", "tree"])
def test_engines_that_pass_an_update_on_generate_meanwhile_and_end_up_with_the_trainers_tokens(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, fan_out: Any
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    nbytes = sum(tensor.nbytes for tensor in weights(model_b).values())
    largest = max(tensor.nbytes for tensor in weights(model_b).values())
    with ExitStack() as stack:
        stack.enter_context(runtime_directory(monkeypatch))
        engines = [stack.enter_context(TransformersEngine(model_a)) for _ in range(4)]
        manager = stack.enter_context(SyncManager(transport="zmq", fan_out=fan_out, timeout_s=180))
        msgspec.structs.force_setattr(manager.settings.config, "bucket_bytes", largest)
        running = [engine.generate(PROMPTS[0], 60) for engine in engines]
        for version, model in enumerate((model_b, model_a, model_b), start=1):
            report = manager.update(source(model), version)
            assert report.failed == () and report.egress_bytes == nbytes * {"chain": 1, "tree": 2}[fan_out]
            for engine in engines:
                tokens = [engine.generate(prompt, COUNT) for prompt in PROMPTS]
                assert [future.result(600).tokens for future in tokens] == reference(model)
        assert all(len(future.result(600).tokens) == 60 for future in running)
        assert manager.verify(source(model_b)).ok
