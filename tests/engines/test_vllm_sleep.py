"""Sleep with each scheme: weights that vLLM derives, quantises or keeps by experts come back, or are made anew where they were.

A CPU has no allocator that could release memory. The one of these tests overwrites every tensor that the model's modules reach:
level 1 brings all of them back, level 2 only buffers, as vLLM does. Layers are plain, as on a GPU: in oneDNN's packed form nobody
could overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from inference_plugin.wire.errors import ReplicaAsleep
from tests.support.engines import Driver, eventually
from tests.support.families import FAMILIES, make_versions
from tests.support.quantised import that_start
from tests.support.reachable import differences
from tests.support.trials import COUNT, PROMPTS, whole
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCHEMES = [
    "llama",
    "qwen3_moe",
    "deepseek_v2",
    "llama-fp8-by-the-engine",
    "llama-w8a8-int8",
    "llama-w4a16",
    "llama-gptq",
    "gpt_oss",
    "bloom",
]


@pytest.fixture(scope="module")
def driver(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime, in_process=True) as one:
        yield one
    assert one.leftovers() == []


@pytest.mark.parametrize("name", that_start(SCHEMES))
def test_after_each_level_of_sleep_weights_are_those_of_a_fresh_engine_at_their_old_addresses(
    driver: Driver, tmp_path: Path, name: str
) -> None:
    family, fresh = FAMILIES[name], {}
    model_a, model_b = make_versions(family, tmp_path)
    for model in (model_b, model_a):
        driver.call("close")
        driver.open(model, plain=True, dtype=family.dtype, **family.vllm)
        fresh[model] = driver.tokens(PROMPTS, COUNT), *driver.rpc("ext_state")
    driver.rpc("ext_give_allocator", True)
    addresses = driver.rpc("ext_addresses")
    with SyncManager(timeout_s=60) as manager:

        def check(model: Path) -> None:
            assert differences(*driver.rpc("ext_state"), fresh[model][1]) == []
            assert driver.tokens(PROMPTS, COUNT) == fresh[model][0]
            assert driver.rpc("ext_addresses") == addresses

        (replica,) = manager.update(whole(model_b), 1).replicas
        assert replica.install == ("standby" if name == "bloom" else "copy")  # bloom goes through its own loader
        check(model_b)
        manager.sleep(1)
        manager.wake_up()
        check(model_b)
        manager.sleep(2)
        manager.wake_up(["weights"])
        manager.update(whole(model_a), 2)
        manager.wake_up()
        check(model_a)
        driver.call("own_sleep", level=2)
        driver.call("own_wake_up")
        manager.update(whole(model_b), 3)
        check(model_b)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_that_vllm_read_from_files_are_in_their_slots_again_after_level_2(
    runtime: Path, tmp_path: Path, ranks: int
) -> None:
    """Several ranks also have a table beside the slots, which puts their logits in order."""
    family, directory = FAMILIES["llama"], tmp_path / "adapter"
    model, _ = make_versions(family, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model)
    adapter = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapter.save_pretrained(directory)
    with Driver(runtime, in_process=ranks == 1) as driver:
        slots = {"enable_lora": True, "max_lora_rank": 8, "tensor_parallel_size": ranks}
        driver.open(model, plain=True, dtype=family.dtype, **family.vllm, **slots)

        def said() -> list[list[list[int]]]:
            asked = driver.wait(driver.submit(PROMPTS, COUNT, ("from a file", 1, str(directory))))
            return [driver.tokens(PROMPTS, COUNT), [request["tokens"] for request in asked]]

        before = said()
        assert before[0] != before[1]
        driver.rpc("ext_give_allocator", True)
        with SyncManager(timeout_s=60) as manager:
            manager.sleep(2)
            manager.wake_up(["weights"])
            manager.update(whole(model))
            manager.wake_up()
            assert said() == before
            driver.call("own_sleep", level=2)
            driver.call("own_wake_up")
            manager.update(whole(model))
            assert said() == before


@pytest.mark.parametrize("name", that_start(["llama", "qwen3_moe"]))
def test_the_user_s_own_sleep_waits_for_a_group_that_is_being_opened_and_reads_the_weights(
    driver: Driver, tmp_path: Path, name: str
) -> None:
    """On a GPU reading released memory ends the engine, and so it does here."""
    family, held = FAMILIES[name], tmp_path / "held"
    model_a, model_b = make_versions(family, tmp_path)
    driver.call("close")
    driver.open(model_a, plain=True, dtype=family.dtype, **family.vllm)
    driver.rpc("ext_give_pool")
    driver.rpc("ext_hold_an_opening", str(held))
    with SyncManager(timeout_s=60) as manager:
        update = manager.update_async(whole(model_b), 1)
        eventually(held.exists, what="the opening to begin")
        driver.call("own_sleep", level=1)
        with pytest.raises(ReplicaAsleep, match="a command of the engine's own has released"):
            update.result(600)
        with pytest.raises(ReplicaAsleep):
            manager.update(whole(model_b), 2)
        driver.call("own_wake_up")
        manager.update(whole(model_b), 3)
        assert manager.verify(whole(model_b)).ok
