"""FSDP2 shards, on real gloo ranks: what all ranks write together is the unsharded model, bit for bit.

All cases of one world size run in one launch (`fsdp_worker.py`); each test below looks at one case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.trainers.launching import Ranks, assert_is_gold, launch, of, on, written
from trainer_adapters.sources.sharing import MIN_CUT_BYTES


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ranks]:
    """What a number of ranks saw, launched once."""
    return functools.cache(lambda count: launch("fsdp_worker.py", count, tmp_path_factory.mktemp("fsdp")))


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, launched: Callable[[int], Ranks]) -> Ranks:
    return launched(request.param)


TIE = {"lm_head.weight": "model.embed_tokens.weight"}


def test_uneven_shards_equal_the_unsharded_gold_bit_for_bit(ranks: Ranks) -> None:
    seen = of(ranks, "tied_model_after_training")
    manifest, values, _ = written(seen)
    assert manifest.tied == TIE
    assert {spec.dtype for spec in manifest.tensors} == {"float32"}
    assert_is_gold(values, seen[0]["gold"], manifest.tied)
    assert values["model.embed_tokens.weight"].shape == (251, 36)


def test_dtype_rules_give_bf16_with_fp32_norms_from_fp32_shards(ranks: Ranks) -> None:
    seen = of(ranks, "untied_model_after_training_in_mixed_precision")
    manifest, values, _ = written(seen)
    assert {spec.dtype for spec in manifest.tensors if spec.name.endswith("norm.weight")} == {"float32"}
    assert {spec.dtype for spec in manifest.tensors if not spec.name.endswith("norm.weight")} == {"bfloat16"}
    assert all(tensor.dtype == torch.float32 for rank in seen for _, tensor in rank["slices"])
    assert "lm_head.weight" in values
    assert_is_gold(values, seen[0]["gold"], {})


@on("case", both=["odd_parts", "odd_parts_offloaded"], four=["copies_and_shards", "one_model_on_each_half"])
def test_few_rows_mixed_dtypes_frozen_ignored_and_buffers_arrive_once(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], {})
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    assert (dtypes["three_rows.weight"], dtypes["one_row.weight"]) == ("bfloat16", "float32")
    assert dtypes["batch_norm.num_batches_tracked"] == "int64"
    assert {"frozen.weight", "ignored", "scalar", "empty"} <= set(dtypes)
    assert "passing" not in dtypes


def test_what_every_rank_holds_is_divided_by_bytes(ranks: Ranks) -> None:
    for case in ("odd_parts", "replicated_dtensors", "data_parallel_module"):
        manifest, _, sent = written(of(ranks, case))
        whole = [spec.nbytes for spec in manifest.tensors if spec.nbytes < MIN_CUT_BYTES]
        assert max(sent) <= manifest.nbytes / len(sent) + max(whole) + 4096, (case, sent)
        assert min(sent) > 0


@pytest.mark.parametrize("ranks", [4], ids=["4 ranks"], indirect=True)
def test_the_copies_of_a_shard_are_divided_by_bytes_each_box_sent_by_one(ranks: Ranks) -> None:
    seen = of(ranks, "copies_and_shards")
    manifest, _, sent = written(seen)
    frozen = manifest.index["frozen.weight"]
    counts = [sum(box[0] == frozen for box, _ in rank["slices"]) for rank in seen]
    assert (counts[0] + counts[2], counts[1] + counts[3]) == (1, 1)
    assert max(sent) <= manifest.nbytes / 4 + 4096


@pytest.mark.parametrize("case", ["sharded_by_columns", "replicated_dtensors"])
def test_column_shards_and_replicated_dtensors_equal_the_gold(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    _, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], {})


def test_a_column_shard_is_a_region_of_every_row(ranks: Ranks) -> None:
    seen = of(ranks, "sharded_by_columns")
    width = 8 // len(seen)
    assert [rank["slices"][0][0] for rank in seen] == [[0, (0, width * i), (5, width)] for i in range(len(seen))]


def test_compile_and_activation_checkpointing_leave_no_trace(ranks: Ranks) -> None:
    seen = of(ranks, "wrapped_in_compile_and_checkpointing")
    manifest, values, _ = written(seen)
    assert manifest.tied == TIE
    assert_is_gold(values, seen[0]["gold"], TIE)


def test_a_value_head_is_left_out_and_the_rest_renamed(ranks: Ranks) -> None:
    seen = of(ranks, "renamed_without_the_value_head")
    manifest, values, _ = written(seen)
    assert manifest.tied == TIE
    assert_is_gold(values, seen[0]["gold"], TIE)


@pytest.mark.parametrize("case", ["stacked_experts", "stacked_experts_by_columns"])
def test_stacked_experts_arrive_one_by_one_without_a_gather(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    _, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], {})
    assert values["model.layers.1.mlp.experts.4.up_proj.weight"].shape == (14, 20)


def test_shards_of_any_transformers_model_arrive_as_save_pretrained_writes_it_without_a_gather(ranks: Ranks) -> None:
    seen = of(ranks, "models_that_memory_holds_otherwise")
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], {})
    assert sorted(values) == sorted(seen[0]["gold"]), manifest.tied


def test_filters_leave_tensors_out_of_manifest_and_slices(ranks: Ranks) -> None:
    seen = of(ranks, "filtered")
    _, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], {})


def test_data_parallel_copies_are_sent_once(ranks: Ranks) -> None:
    seen = of(ranks, "data_parallel_module")
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


def test_slices_are_the_shards_own_memory_and_follow_training(ranks: Ranks) -> None:
    for seen in of(ranks, "several_updates"):
        assert seen["views"], "a slice is a copy"
        assert seen["same_manifest"]
        assert all(seen["changed"])
        assert seen["changed"]


def test_a_parameter_that_appears_is_noticed(ranks: Ranks) -> None:
    for seen in of(ranks, "several_updates"):
        assert seen["error"] == "ManifestMismatch"
        assert "extra appeared" in seen["text"]
        assert seen["appeared"]


def test_unsharded_parameters_are_refused_until_they_are_resharded(ranks: Ranks) -> None:
    for seen in of(ranks, "refuse_after_a_forward_pass_alone"):
        assert seen["error"] == seen["slices"]["error"] == "ManifestMismatch"
        assert "unsharded at the moment in the root" in seen["text"]
        assert "reshard()" in seen["text"]
        assert seen["after_reshard"] is None


@on(
    "case,error,parts",
    both=[
        (
            "refuse_while_a_layer_is_unsharded",
            "ManifestMismatch",
            ["unsharded at the moment in model.layers.1 (1 in"],
        ),
        ("refuse_pending_sums", "ManifestMismatch", ["sum has placements (Partial", "redistribute"]),
        (
            "refuse_tied_weights_that_were_sharded_apart",
            "ManifestMismatch",
            ["lm_head.weight and model.embed_tokens.weight", "one fully_shard group"],
        ),
        ("refuse_a_model_on_the_meta_device", "ManifestMismatch", ["weight is on the meta device"]),
        ("refuse_a_module_that_is_not_sharded", "ArgumentError", ["use ModuleAdapter"]),
        ("refuse_a_sharded_module_in_a_module_adapter", "ArgumentError", ["use FSDPAdapter"]),
        ("refuse_a_rank_outside_the_mesh", "ManifestMismatch", ["far lives on ranks [", "but this is rank"]),
    ],
    four=[
        ("refuse_two_sharded_dimensions", "ManifestMismatch", ["0.weight has placements", "DTensorAdapter"]),
        (
            "refuse_tensor_parallel_below_fsdp",
            "ManifestMismatch",
            ["0.weight has placements", "DTensorAdapter"],
        ),
        (
            "refuse_parameters_on_other_sets_of_ranks",
            "ManifestMismatch",
            ["0.weight on ranks [0, 1, 2, 3]", "1.weight on ranks", "DTensorAdapter"],
        ),
    ],
)
def test_what_cannot_be_sliced_rightly_is_refused_on_every_rank(
    ranks: Ranks, case: str, error: str, parts: list[str]
) -> None:
    for seen in of(ranks, case):
        assert seen["error"] == error, seen
        assert [part for part in parts if part not in seen["text"]] == [], seen["text"]


def test_a_sharded_state_dict_is_refused_by_name(ranks: Ranks) -> None:
    for seen in of(ranks, "refuse_a_sharded_module_in_a_module_adapter"):
        assert "weight is a DTensor" in seen["state_dict"]["text"]
