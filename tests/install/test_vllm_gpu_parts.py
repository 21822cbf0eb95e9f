"""Parts of vLLM that only a GPU's engine has, with its own classes on the CPU's memory: see `vllm_gpu_parts`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.install.vllm_apart import told_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by("tests.install.vllm_gpu_parts")


def test_what_captured_graphs_read_of_a_kernel_for_experts_stays_in_place_and_follows_each_update(
    found: dict[str, Any],
) -> None:
    assert found["stale"] == []


def test_a_second_model_is_made_where_vllm_keeps_weights_in_the_hosts_memory(found: dict[str, Any]) -> None:
    assert found["uva"] == {"kept": True, "refused": None}
    assert found["counted by uva"] == 0


def test_weights_that_vllm_fetches_layer_by_layer_refuse_updates_by_name(found: dict[str, Any]) -> None:
    assert found["prefetch"]["kept"] and "fetches them layer by layer" in found["prefetch"]["refused"]


def test_attention_that_took_the_next_layers_scale_as_a_number_refuses_updates_by_name(found: dict[str, Any]) -> None:
    assert found["fused"].startswith("model.layers.0.self_attn.attn quantises what it gives to the next layer")


def test_attention_whose_sinks_lie_in_the_kv_cache_refuses_updates_by_name(found: dict[str, Any]) -> None:
    assert found["sinks"] == "sinks writes its sinks into the KV cache in its first step, and never again"


def test_weights_in_a_cache_that_engines_share_refuse_updates_by_name(found: dict[str, Any]) -> None:
    first, second, own = found["shared cache"]
    assert first == second and "weight cache" in first and own is None


def test_ranks_that_share_the_tokens_of_prompts_are_told_apart(found: dict[str, Any]) -> None:
    assert found["ranks"] == [[0, 2], [1, 2]]


@pytest.mark.parametrize("speculator", ["StandaloneARSpeculator", "EagleSpeculator"])
def test_the_draft_of_the_second_model_runner_is_updated(found: dict[str, Any], speculator: str) -> None:
    assert found["drafts"][speculator] == "a draft, complete: True"


def test_a_draft_of_which_more_is_computed_beforehand_is_refused_and_the_served_model_is_not(
    found: dict[str, Any],
) -> None:
    assert found["drafts"]["Gemma4Speculator"] == "what Gemma4Speculator computes from the draft's weights is not known"
