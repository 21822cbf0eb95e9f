"""Plans of vLLM's own model classes, against its own loaders: see `vllm_skeletons` for how they are made."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.install.vllm_apart import told_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MODELS = ("qwen3-moe", "llama", "llama-tied", "qwen2", "qwen3")
PADDED_ROWS = (320 - 257) * 64  # vLLM pads a vocabulary of 257 to the next multiple of 64; hidden size 64


@pytest.fixture(scope="module")
def studies() -> dict[str, Any]:
    """What the script found, per model; one process for all: importing vLLM takes most of the time."""
    found = told_by("tests.install.vllm_skeletons")
    assert tuple(found) == MODELS
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_replay_is_bit_for_bit_what_vllm_loads(studies: dict[str, Any], model: str) -> None:
    study = studies[model]
    assert study["refusal"] is None
    assert study["refused"] == {}
    assert study["uncovered"] == {}
    assert study["doubled"] == []
    assert study["unused"] == []
    assert study["differs"] == []
    assert study["names_agree"]


@pytest.mark.parametrize("model", MODELS)
def test_the_proof_holds_in_one_go_and_in_parts(studies: dict[str, Any], model: str) -> None:
    assert studies[model]["proof"] == ["", ""]


@pytest.mark.parametrize("model", MODELS)
def test_the_proof_finds_a_lost_placement(studies: dict[str, Any], model: str) -> None:
    wrong = "model.layers.1.self_attn.qkv_proj.weight: the replay differs from the real load"
    assert studies[model]["bad_plan"] == wrong


@pytest.mark.parametrize("model", MODELS)
def test_a_wrong_dtype_is_named_and_not_cast(studies: dict[str, Any], model: str) -> None:
    assert studies[model]["cast"] == ["model.norm.weight", "model.norm.weight"]


@pytest.mark.parametrize("model", MODELS)
def test_live_parameters_are_read_back_in_checkpoint_boxes(studies: dict[str, Any], model: str) -> None:
    assert studies[model]["read_back"] == [studies[model]["placements"], True]


@pytest.mark.parametrize("model", MODELS)
def test_the_order_of_names_does_not_matter(studies: dict[str, Any], model: str) -> None:
    assert studies[model]["same_plan_reversed"]


@pytest.mark.parametrize("model", MODELS)
def test_a_skeleton_takes_no_memory_and_leaves_no_trace(studies: dict[str, Any], model: str) -> None:
    assert studies[model]["skeleton_on_meta"]
    assert studies[model]["context_untouched"]
    assert studies[model]["live_ropes_are_real"]


def test_an_odd_vocabulary_is_padded_with_zeros(studies: dict[str, Any]) -> None:
    embedding = ["model.embed_tokens.weight", 257 * 64, PADDED_ROWS, 0]
    assert studies["llama"]["fills"] == [embedding, ["lm_head.weight", 257 * 64, PADDED_ROWS, 0]]
    assert studies["llama-tied"]["fills"] == [embedding]
    assert studies["qwen2"]["fills"] == []


@pytest.mark.parametrize(("model", "unused"), [("llama-tied", ["lm_head.weight"]), ("qwen3", ["lm_head.weight"])])
def test_a_tied_head_sent_under_both_names_is_unused(studies: dict[str, Any], model: str, unused: list[str]) -> None:
    assert studies[model]["tied_alias"] == {"unused": unused, "doubled": [], "same": True, "proof": ""}
