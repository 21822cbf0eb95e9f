"""Real SGLang engines of pipeline stages: what `test_sglang_tokens` and `test_sglang_life` ask of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inference_plugin.wire.errors import EngineUnsupported
from tests.engines.conftest import Checkpoint
from tests.engines.test_sglang_life import check_one_version
from tests.engines.test_sglang_lora import SLOTS
from tests.engines.test_vllm_lora import TARGETS
from tests.engines.test_vllm_tokens import (
    COUNT,
    IN_FLIGHT,
    PROMPTS,
    Live,
    check_kept_caches,
    check_life,
    check_requests_in_flight,
    reference,
    source,
)
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver, SglangServer
from tests.support.visible import check_probe, check_visible_on_sglang
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STAGES = 2
CASES: dict[str, tuple[str, bool, int, int]] = {
    "qwen3-tied-pp2": ("qwen3", True, 1, 2),
    "qwen3_moe-untied-pp2": ("qwen3_moe", False, 1, 2),
    "llama-untied-tp2-pp2": ("llama", False, 2, 2),
    "llama-untied-pp3": ("llama_deep", False, 1, 3),
}
"""Model, whether its head is tied, ranks of a stage, and stages.

The last stage of a tied Qwen3 has a head of its own, which its loader fills from the table of embeddings.
"""


class AnsweringDriver(SglangDriver):
    """Tells the log-probabilities of the likeliest tokens as well."""

    module = "tests.support.sglang_answers"

    def say(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = self.call("say", prompts=PROMPTS, count=COUNT, logprobs=5)
        return said


@pytest.mark.parametrize("case", CASES)
def test_an_updated_pipeline_is_a_fresh_pipeline(runtime: Path, checkpoint: Checkpoint, case: str) -> None:
    kind, tied, tp, pp = CASES[case]
    models = [checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2)]
    fresh = []
    for model in models:
        with AnsweringDriver(runtime, tp=tp, pp=pp) as driver:
            driver.open(model, disable_radix_cache=True)
            fresh.append(driver.say())
            assert [said["tokens"] for said in fresh[-1]] == reference(model)
            if model == models[0]:
                continue
            (card,) = driver.cards
            assert (card.tp, card.pp) == (tp, pp)
            assert [(w.rank, w.pp_rank, w.tp_rank) for w in card.workers] == [
                (stage * tp + rank, stage, rank) for stage in range(pp) for rank in range(tp)
            ]
            version = check_life(driver.tokens, *reversed(models), zones=True)
            with SyncManager(timeout_s=180) as manager:
                for which in (0, 1):
                    manager.update(source(models[which]), version := version + 1)
                    assert driver.say() == fresh[which], "tokens and log-probabilities of a fresh engine"
        assert driver.leftovers() == []


@pytest.fixture(scope="module")
def live(runtime: Path, checkpoint: Checkpoint) -> Iterator[Live]:
    model_a, model_b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    with SglangDriver(runtime, pp=STAGES) as driver:
        driver.open(model_a)
        yield Live(driver, 2, model_a, model_b)
    assert driver.leftovers() == [] and driver.family() == []


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_requests_in_flight_follow_the_policy_and_their_keys_serve_no_new_request(live: Live, in_flight: str) -> None:
    check_requests_in_flight(live, in_flight)


def test_a_conversation_that_keeps_its_cache_finds_it_after_an_update_and_nobody_else_does(live: Live) -> None:
    check_kept_caches(live)


THREE_SLOTS = {"pp_async_batch_depth": 1, "pp_max_micro_batch_size": 1}
LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "three-stages-keep": ("keep", {"pp": 3, "kind": "llama_deep"}),
    "two-slots-keep": ("keep", {}),
    "two-slots-recompute": ("recompute", {}),
    "three-slots-of-one-request-keep": ("keep", THREE_SLOTS),
    "three-slots-of-one-request-in-chunks-recompute": ("recompute", {**THREE_SLOTS, "chunked_prefill_size": 8}),
}
"""With `keep`, a prompt whose chunks are on both sides of an update has keys of two versions, which the replay doesn't follow."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LOADS)
def test_every_token_is_of_exactly_one_version_on_all_stages_while_updates_alternate_under_load(
    runtime: Path, checkpoint: Checkpoint, case: str
) -> None:
    in_flight, options = LOADS[case]
    check_one_version(runtime, checkpoint, in_flight, updates=10, **{"pp": STAGES, **options})


def test_a_server_of_stages_shows_its_version_is_healthy_while_paused_and_heeds_sglang_s_own_pause(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    models = [checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2)]
    with SglangServer(runtime, models[0], pp=STAGES, log_level="info") as server:
        check_life(server.tokens, *models, zones=True)
        with SyncManager(timeout_s=180) as manager:
            manager.update(source(models[1]), 100)
            assert server.tokens(PROMPTS, COUNT) == reference(models[1])
            check_visible_on_sglang(server, PROMPTS[1], source(models[1]), manager, models[1])
            check_probe(server, models[1], models[0])
            with manager.paused():
                assert server.request("GET", "/health")[0] == 200
            assert server.request("POST", "/pause_generation", {"mode": "in_place"})[0] == 200
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(server.tokens, PROMPTS, COUNT)
                assert [r.status for r in manager.update(source(models[0]), 103).replicas] == ["committed"]
                assert server.request("POST", "/continue_generation", {})[0] == 200
                assert asked.result(600) == reference(models[0]), "SGLang's own loop for pipelines ignores its pause"
    assert server.leftovers() == [] and server.family() == []


def test_an_adapter_is_refused_when_its_group_is_opened_and_the_base_is_updated(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    models = [checkpoint("qwen3", tied=False, seed=seed) for seed in (1, 2)]
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(models[0]), LoraConfig(r=4, target_modules=TARGETS))
    adapted.save_pretrained(tmp_path)
    adapter = dict(load_file(tmp_path / "adapter_model.safetensors"))
    with SglangDriver(runtime, pp=STAGES, WEIGHTWIRE_TEST_UNPINNED="1") as driver:
        driver.open(models[0], lora_paths={"policy": str(tmp_path)}, **SLOTS)
        with (
            SyncManager(timeout_s=60, group="lora.policy") as manager,
            pytest.raises(EngineUnsupported, match="LoRA slots of pipeline stages"),
        ):
            manager.update(ModuleAdapter(adapter), 1)
        with SyncManager(timeout_s=180) as manager:
            manager.update(source(models[1]), 1)
        assert driver.tokens(PROMPTS, COUNT) == reference(models[1])
