"""LoRA from an FSDP2 trainer of two ranks into real SGLang engines: what `test_vllm_lora` asks of vLLM.

The tests that are imported here run with this module's `trained`: an SGLang engine, started with an adapter that changes
nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.messages import InstallPolicy
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_lora import (  # noqa: F401 -- collected here once more
    PLUGIN,
    TARGETS,
    Trained,
    engines,
    test_adapters_in_their_slots_say_what_peft_says_and_the_base_is_not_touched,
    test_an_adapter_that_does_not_fit_is_refused_with_names_and_the_old_one_serves,
    test_an_installation_that_fails_on_one_rank_is_undone_on_all,
    test_base_and_adapter_are_groups_of_their_own,
    test_merged_while_streaming_an_engine_serves_what_peft_says,
    test_requests_in_flight_follow_the_policy,
)
from tests.support.families import FAMILIES, make_versions
from tests.support.family_trials import SglangHost, run_trial
from tests.support.lora_trainer import LoRATrainer
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLOTS = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "max_loras_per_batch": 2,
    "lora_backend": "torch_native",
}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    runtime: Path,
    checkpoint: Checkpoint,
    lora_trainer: LoRATrainer,
    tmp_path_factory: Any,
) -> Iterator[Trained]:
    kind, ranks = request.param
    base = checkpoint(kind, tied=False, seed=1)
    out = tmp_path_factory.mktemp("lora")
    faults = out / "faults"
    faults.write_text("[]")
    idle = faults.with_name("idle")
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS)).save_pretrained(idle)
    variables = {
        "WEIGHTWIRE_PLUGINS": PLUGIN,
        "WEIGHTWIRE_TEST_FAULTS": str(faults),
        "WEIGHTWIRE_TEST_UNPINNED": "1",
    }
    with SglangDriver(runtime, tp=ranks, **variables) as driver:
        driver.open(base, lora_paths={"policy": str(idle)}, **SLOTS)
        yield Trained(driver, lora_trainer, ranks, base, faults)
    assert driver.leftovers() == []


@pytest.mark.parametrize("trained", [("qwen3", 1)], ids=["tp1"], indirect=True)
def test_an_adapter_that_was_unloaded_and_read_again_is_as_the_update_made_it(trained: Trained) -> None:
    said = trained.train(seed=13)
    assert trained.adapted() == said["tokens"] != trained.plain()
    trained.driver.rpc("unload_lora_adapter", "policy")
    trained.driver.rpc("load_lora_adapter", "policy", str(trained.faults.with_name("idle")))
    assert trained.adapted() == said["tokens"], "not what is on disk"
    trained.driver.rpc("unload_lora_adapter", "policy")
    trained.driver.call("load_adapter", name="policy", directory=str(trained.faults.with_name("idle")))
    assert trained.adapted() == said["tokens"], "not what a user sent"
    said = trained.train(seed=14)
    assert trained.adapted() == said["tokens"]


@pytest.mark.parametrize("install", ["standby", "copy"])
def test_what_latent_attention_derives_from_its_weights_follows_the_updates_of_an_engine_with_slots(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: InstallPolicy
) -> None:
    """SGLang wraps projections below the attention module that keeps the derived weights."""
    faults = tmp_path / "faults"
    faults.write_text("[]")
    for name, value in {"PLUGINS": PLUGIN, "TEST_FAULTS": str(faults), "TEST_UNPINNED": "1"}.items():
        monkeypatch.setenv(f"WEIGHTWIRE_{name}", value)
    slots = SLOTS | {"lora_target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}
    family = FAMILIES["minicpm3"]
    family = dataclasses.replace(family, sglang={**family.sglang, **slots})
    host = SglangHost(runtime)
    try:
        trial = run_trial(host, family, make_versions(family, tmp_path), plain=False, install=install)
    finally:
        host.close()
    assert (trial.outcome, trial.updates) == ("right", 5), trial


@engines
def test_an_adapter_that_sglang_does_not_know_is_refused_with_what_to_do(trained: Trained) -> None:
    error = trained.train(seed=3, group="lora.other")["error"]
    assert error["kind"] == "EngineUnsupported" == EngineUnsupported.__name__
    assert "no LoRA adapter named 'other'" in error["text"] and "--lora-paths other=DIRECTORY" in error["text"]
