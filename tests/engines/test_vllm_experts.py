"""A mixture of experts in vLLM, each rank with experts of its own (`enable_expert_parallel`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.errors import EngineUnsupported
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, weights
from tests.support.engines import Driver
from tests.support.managers import SyncManager
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def driver(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime) as one:
        yield one
    assert one.leftovers() == [] and one.family() == []


def test_experts_of_two_ranks_are_updated_and_a_plan_is_never_used_after_they_moved(
    driver: Driver, checkpoint: Checkpoint
) -> None:
    a, b = (checkpoint("qwen3_moe", tied=False, seed=seed) for seed in (1, 2))
    driver.open(a, tensor_parallel_size=2, enable_expert_parallel=True)
    assert driver.tokens(PROMPTS, COUNT) == reference(a)
    driver.rpc("ext_say_that_experts_are_balanced", True)
    with SyncManager(timeout_s=60) as manager, pytest.raises(EngineUnsupported, match="moves experts"):
        manager.update(ModuleAdapter(weights(b)), 1)
    driver.rpc("ext_say_that_experts_are_balanced", False)
    assert driver.tokens(PROMPTS, COUNT) == reference(a)
    version = 0
    for install in ("standby", "copy"):
        with SyncManager(install=install, timeout_s=60) as manager:  # type: ignore[arg-type]
            for target in (b, a):
                version += 1
                if target == a:  # as a balancer does, without the weights: until the update the engine talks nonsense
                    before = driver.rpc("ext_expert_maps")
                    assert driver.rpc("ext_swap_experts") != before
                    assert driver.tokens(PROMPTS, COUNT) != reference(b)
                (report,) = manager.update(ModuleAdapter(weights(target)), version).replicas
                assert (report.status, report.mechanism) == ("committed", "plan"), report
                assert driver.tokens(PROMPTS, COUNT) == reference(target), (install, target)
                assert manager.verify(ModuleAdapter(weights(target))).ok
