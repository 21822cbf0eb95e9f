"""Real SGLang engines, updated while they live: what `test_vllm_tokens` asks of vLLM, with the same trainer's code.

The tests that are imported here run with this module's `live`: an SGLang engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import (  # noqa: F401 -- collected here once more
    COUNT,
    IN_FLIGHT,
    PROMPTS,
    Live,
    check_life,
    check_requests_in_flight,
    reference,
    source,
    test_a_cached_prefix_of_the_old_weights_is_not_used_after_an_idle_update,
    test_a_conversation_that_keeps_its_cache_finds_it_after_an_update_and_nobody_else_does,
    test_a_manifest_that_does_not_fit_is_refused_with_names_before_anything_changes,
    test_a_number_that_is_served_is_taken_again_with_its_weights_alone,
    test_an_older_version_is_refused_and_changes_nothing,
    weights,
)
from tests.support.rig import eventually
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DP_ATTENTION = {"enable_dp_attention": True, "dp_size": 2}
"""Two ranks that share the experts, each with attention and requests of its own: one replica."""

CASES: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    "qwen3-tied-tp1": ("qwen3", True, 1, {}),
    "llama-untied-tp2": ("llama", False, 2, {}),
    "llama-tied-tp1": ("llama", True, 1, {}),
    "qwen3_moe-tp1": ("qwen3_moe", False, 1, {}),
    "qwen3_moe-tp2-dp-attention": ("qwen3_moe", False, 2, DP_ATTENTION),
}
ENGINES: dict[str, dict[str, Any]] = {
    "tp1": {"kind": "qwen3", "tied": True, "tp": 1, "kwargs": {}},
    "tp2": {"kind": "llama", "tied": False, "tp": 2, "kwargs": {}},
    "dp-attention": {"kind": "qwen3_moe", "tied": False, "tp": 2, "kwargs": DP_ATTENTION},
}


@pytest.mark.parametrize("case", CASES)
def test_an_updated_engine_is_a_fresh_engine(runtime: Path, checkpoint: Checkpoint, case: str) -> None:
    kind, tied, tp, kwargs = CASES[case]
    model_a, model_b = (checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2))
    with SglangDriver(runtime, tp=tp) as driver:
        driver.open(model_a, **kwargs)
        assert [len(card.workers) for card in driver.cards] == [tp]
        check_life(driver.tokens, model_a, model_b, zones=True)
    assert driver.leftovers() == []
    with SglangDriver(runtime, tp=tp) as driver:
        driver.open(model_b, **kwargs)
        assert driver.tokens(PROMPTS, COUNT) == reference(model_b), "a fresh engine with B"


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Live]:
    case = ENGINES[request.param]
    model_a, model_b = (checkpoint(case["kind"], tied=case["tied"], seed=seed) for seed in (1, 2))
    with SglangDriver(runtime, tp=case["tp"]) as driver:
        driver.open(model_a, **case["kwargs"])
        yield Live(driver, case["tp"], model_a, model_b)
    assert driver.leftovers() == [] and driver.family() == []


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("live", list(ENGINES), indirect=True)
def test_requests_in_flight_follow_the_policy_and_their_keys_serve_no_new_request(live: Live, in_flight: str) -> None:
    check_requests_in_flight(live, in_flight)


@pytest.mark.parametrize("live", ["tp1"], indirect=True)
def test_twenty_times_there_and_back(live: Live) -> None:
    with SyncManager(timeout_s=180) as manager:
        for _ in range(20):
            for which in ("B", "A"):
                live.update(which, manager)
                live.assert_serves(which)


@pytest.mark.parametrize("live", ["tp1"], indirect=True)
def test_weights_that_are_nan_leave_nothing_behind_once_others_are_served(live: Live) -> None:
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights(live.models["A"]).items()}
    with SyncManager(timeout_s=180) as manager:
        live.version += 1
        manager.update(ModuleAdapter(broken), live.version)
        live.driver.generate(PROMPTS, COUNT)
        live.update("B", manager)
    live.assert_serves("B")


@pytest.mark.parametrize("tp", [1, 2], ids=["tp1", "dp-attention"])
def test_a_commit_wakes_ranks_that_sleep_on_idle(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path, tp: int
) -> None:
    model_a, model_b = (checkpoint("qwen3_moe", tied=False, seed=seed) for seed in (1, 2))
    plugin = {
        "WEIGHTWIRE_PLUGINS": "tests.support.sleepy_plugin:plugin",
        "WEIGHTWIRE_TEST_ASLEEP": f"{tmp_path}/asleep",
    }
    with SglangDriver(runtime, tp=tp, **plugin) as driver, SyncManager(timeout_s=180) as manager:
        driver.open(model_a, **(DP_ATTENTION if tp == 2 else {}))
        for version, model in enumerate((model_b, model_a, model_b), 1):
            report = manager.update(source(model), version)  # the first one loads the plug-in, on every rank
            assert [r.status for r in report.replicas] == ["committed"]
            eventually(
                lambda: len(list(tmp_path.glob("asleep.*"))) == tp, "all ranks asleep, until a socket wakes them"
            )
        assert driver.tokens(PROMPTS, COUNT) == reference(model_b)
