"""FSDP1's flat parameters, on real gloo ranks: what all ranks write together is the unsharded model, bit for bit.

All cases of one world size run in one launch (`fsdp1_worker.py`); each test below looks at one case.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.geometry import Box
from tests.trainers.launching import Ranks, assert_is_gold, launch, of, written
from tests.trainers.test_fsdp_adapter import TIE
from trainer_adapters.sources.plan import PlannedSlice, shards_of_run


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("fsdp1_worker.py", request.param, tmp_path_factory.mktemp("fsdp1"))


@pytest.mark.parametrize("kind", ["own parameters", "flat parameters"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"])
def test_every_strategys_shards_equal_the_unsharded_gold_after_training(ranks: Ranks, strategy: str, kind: str) -> None:
    seen = of(ranks, f"{strategy} {kind}")
    manifest, values, sent = written(seen)
    assert manifest.tied == TIE
    assert [spec.name for spec in manifest.tensors] == [name for name in seen[0]["gold"] if name not in TIE]
    assert_is_gold(values, seen[0]["gold"], TIE)
    assert all(rank["as summoned"] for rank in seen)
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        assert max(sent) - min(sent) <= 64
    else:  # copies are divided between whole tensors of this size
        largest = max(spec.nbytes for spec in manifest.tensors)
        assert max(sent) <= manifest.nbytes / len(sent) + largest and min(sent) > 0


@pytest.mark.parametrize(
    "case",
    [
        "one_unit",
        "before_the_first_forward_pass",
        "while_parameters_are_unsharded",
        "offloaded",
        "checkpointed_and_frozen",
        "stacked_experts",
        "models_that_memory_holds_otherwise",
    ],
)
def test_shards_are_sent_from_where_they_are(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


def test_master_weights_are_sent_as_the_rules_say(ranks: Ranks) -> None:
    seen = of(ranks, "mixed_precision")
    manifest, values, _ = written(seen)
    assert {spec.dtype for spec in manifest.tensors if spec.name.endswith("norm.weight")} == {"float32"}
    assert {spec.dtype for spec in manifest.tensors if not spec.name.endswith("norm.weight")} == {"bfloat16"}
    assert all(tensor.dtype == torch.float32 for rank in seen for _, tensor in rank["slices"])
    assert_is_gold(values, seen[0]["gold"], {})


@pytest.mark.parametrize("case", ["not_contiguous", "not_contiguous_flat"])
def test_a_unit_with_channels_last_weights_is_summoned_and_no_other_is(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    _, values, _ = written(seen, collectives=1)
    assert_is_gold(values, seen[0]["gold"], {})


def test_a_model_that_was_summoned_before_its_first_forward_pass_trains_on(ranks: Ranks) -> None:
    seen = of(ranks, "trained_after_it_was_summoned")
    _, values, _ = written(seen, collectives=1)
    assert_is_gold(values, seen[0]["gold"], {})


def test_a_rank_whose_slices_are_closed_early_summons_the_rest_with_the_others(ranks: Ranks) -> None:
    for rank, seen in enumerate(of(ranks, "nobody_takes_all")):
        assert seen["next"] == seen["all"] and seen["taken"] == (seen["all"] if rank else 1), seen


def test_slices_are_the_shards_own_memory_and_follow_training(ranks: Ranks) -> None:
    for seen in of(ranks, "several_updates"):
        assert seen == {"same": True, "changed": 1.0, "views": True, "grad": False}


@pytest.mark.parametrize(
    ("case", "error", "parts"),
    [
        (
            "refuse_while_summoned",
            "ManifestMismatch",
            ["summoned at the moment in 3 units", "leave summon_full_params"],
        ),
        ("refuse_memory_that_fsdp_has_not_taken_over", "ManifestMismatch", ["was given other memory", "update after"]),
        ("refuse_both_kinds_of_fsdp", "ArgumentError", ["shard all of it with fully_shard"]),
        ("refuse_tied_weights_in_two_units", "ManifestMismatch", ["lm_head.weight and model.embed_tokens.weight"]),
        ("refuse_a_module_adapter", "ArgumentError", ["use FSDPAdapter"]),
    ],
)
def test_what_cannot_be_sliced_rightly_is_refused_on_every_rank(
    ranks: Ranks, case: str, error: str, parts: list[str]
) -> None:
    for seen in of(ranks, case):
        assert seen["error"] == error, seen
        assert [part for part in parts if part not in seen["text"]] == [], seen["text"]


def test_after_summoning_an_update_works_again(ranks: Ranks) -> None:
    assert {seen["after"] for seen in of(ranks, "refuse_while_summoned")} == {None}


def test_memory_that_was_replaced_between_manifest_and_slices_is_noticed(ranks: Ranks) -> None:
    case = of(ranks, "refuse_memory_that_fsdp_has_not_taken_over")
    assert {seen["slices"] for seen in case} == {"ManifestMismatch"}


def test_an_object_in_a_parameters_place_is_refused_by_the_ranks_that_hold_it_until_fsdp_takes_it_over(
    ranks: Ranks,
) -> None:
    seen = of(ranks, "refuse_a_parameter_that_fsdp_has_not_taken_over")
    assert seen[-1]["error"] == "ManifestMismatch" and "lm_head.weight was given other memory" in seen[-1]["text"]
    assert {rank["after"] for rank in seen} == {None}


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_a_run_of_elements_is_a_few_boxes_that_hold_it_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    count = data.draw(st.integers(0, whole.numel() - start))
    memory = torch.cat([torch.full((3,), -1), whole.reshape(-1)[start : start + count]])
    parts = shards_of_run(shape, start, count, 3)
    assert len(parts) <= max(2 * len(shape) - 1, 1)
    seen = []
    for part in parts:
        box = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        local = PlannedSlice(
            Box(0, part.offsets, part.sizes), part, (0,) * len(shape), part.sizes, tuple(range(len(shape)))
        ).view_of(memory)
        assert torch.equal(local, whole[box])
        seen.append(local.reshape(-1))
    assert torch.equal(torch.cat(seen) if seen else memory[:0], whole.reshape(-1)[start : start + count])
