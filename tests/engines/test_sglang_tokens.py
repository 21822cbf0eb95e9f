"""Real SGLang engines, updated while they live: as `test_vllm_tokens`, with the same trainer's code on the other side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, check_life, reference
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = {
    "qwen3-tied-tp1": ("qwen3", True, 1),
    "llama-untied-tp2": ("llama", False, 2),
    "llama-tied-tp1": ("llama", True, 1),
    "qwen3_moe-tp1": ("qwen3_moe", False, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_an_updated_engine_is_a_fresh_engine(runtime: Path, checkpoint: Checkpoint, case: str) -> None:
    kind, tied, tp = CASES[case]
    model_a, model_b = (checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2))
    with SglangDriver(runtime, tp=tp) as driver:
        driver.open(model_a)
        check_life(driver.tokens, model_a, model_b)
    assert driver.leftovers() == []
    with SglangDriver(runtime, tp=tp) as driver:
        driver.open(model_b)
        assert driver.tokens(PROMPTS, COUNT) == reference(model_b), "a fresh engine with B"
