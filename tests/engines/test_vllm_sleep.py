"""Sleep with each scheme: weights that vLLM derives, quantises or keeps by experts come back, or are made anew where they were.

A CPU has no allocator that could release memory. The one of these tests overwrites every tensor that the model's modules reach:
level 1 brings all of them back, level 2 only buffers, as vLLM does. Layers are plain, as on a GPU: in oneDNN's packed form nobody
could overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import Driver
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
        assert replica.install == "copy"
        check(model_b)
        manager.sleep(1)
        manager.wake_up()
        check(model_b)
        manager.sleep(2)
        manager.wake_up(["weights"])
        manager.update(whole(model_a), 2)
        manager.wake_up()
        check(model_a)
