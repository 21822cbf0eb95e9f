"""Whole tensors gathered from slices, on four gloo ranks: element for element what the slices say, in bounded memory."""

from __future__ import annotations

import pytest
import torch

from inference_plugin.wire.tensors import bytes_view
from tests.trainers.launching import Ranks, launch, of, written

MIB = 1 << 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("gather_worker.py", 4, tmp_path_factory.mktemp("gather"))


@pytest.mark.parametrize(
    "case",
    [
        "fsdp_in_small_buckets",
        "odd_parts_in_tiny_buckets",
        "hybrid_in_one_bucket",
        "flat_parameters",
        "two_dimensions_of_shards",
        "stacked_experts_by_columns",
        "summoned_units",
        "one_at_a_time",
        "some_together_and_the_others_in_one_buffer",
        "exported_on_all_ranks",
        "exported_on_rank_0",
        "exported_by_stages",
        "exported_in_the_engines_dtypes",
    ],
)
def test_every_rank_gets_what_the_slices_are_together_bit_for_bit(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    manifest, values, _ = written(seen, collectives=seen[0]["collectives"])
    for rank in seen:
        assert list(rank["gathered"]) == [spec.name for spec in manifest.tensors]
        for name, whole in rank["gathered"].items():
            assert whole.dtype == values[name].dtype and whole.shape == values[name].shape, name
            assert torch.equal(bytes_view(whole), bytes_view(values[name])), name


@pytest.mark.parametrize(
    ("case", "senders"),
    [("exported_on_all_ranks", {0, 1, 2, 3}), ("exported_on_rank_0", {0}), ("exported_by_stages", {0, 1, 2, 3})],
)
def test_an_export_is_sent_by_the_ranks_that_yield_it(ranks: Ranks, case: str, senders: set[int]) -> None:
    seen = of(ranks, case)
    assert {i for i, rank in enumerate(seen) if rank["sent"]} == senders
    assert all(rank["same"] for rank in seen), "names, shapes and dtypes are those of the shards"


def test_an_export_that_is_wrong_on_one_rank_is_an_error_on_all_when_its_adapter_is_made(ranks: Ranks) -> None:
    for rank in of(ranks, "export_is_wrong"):
        assert "a occurs twice" in rank["twice"]["text"] and "rank=1" in rank["twice"]["text"]
        assert "a is on the meta device" in rank["meta"]["text"]
        assert "a is float32 [3] on rank 1, a is float32 [2] on rank 0" in rank["other"]["text"]


def test_an_export_that_changed_is_refused_and_the_next_one_isnt(ranks: Ranks) -> None:
    for rank in of(ranks, "export_is_wrong"):
        assert "it yielded 1 tensors, the first time 2" in rank["less"]["text"]
        assert "tensor 2 is a: torch.float32 [2], the first time it was nothing more" in rank["more"]["text"]
        assert "tensor 0 is a: torch.float32 [4], the first time it was a: torch.float32 [2]" in rank["grown"]["text"]
        assert "the export changed: b has no memory: it was freed" in rank["freed"]["text"]
        assert rank["again"]["error"] is None


def test_a_rank_that_stops_taking_leaves_no_other_waiting_in_an_export(ranks: Ranks) -> None:
    seen = of(ranks, "export_goes_on_when_nobody_takes")
    assert [rank["taken"] for rank in seen] == [1 if i == 1 else rank["all"] for i, rank in enumerate(seen)]
    assert [rank["next"] for rank in seen] == [rank["all"] for rank in seen]


def test_a_rank_that_never_makes_its_adapter_is_named_and_the_next_adapter_is_made(ranks: Ranks) -> None:
    seen = of(ranks, "a_rank_fails_before_its_adapter")
    for alone in (rank["alone"] for i, rank in enumerate(seen) if i != 1):
        assert alone["error"] == "SyncTimeout"
        assert "trainer ranks [1] have not made their adapter within 20 s" in alone["text"]
    assert [rank["together"]["error"] for rank in seen] == [None] * len(seen)


def test_ranks_that_make_an_adapter_and_a_manager_in_different_orders_are_told_so_at_once(ranks: Ranks) -> None:
    """The adapter waited in its collectives for a rank that had never come to them."""
    for rank in of(ranks, "a_rank_makes_its_manager_meanwhile"):
        assert rank["crosswise"]["error"] == "ConfigError"
        assert "trainer rank 1 makes its SyncManager while rank 0 makes its adapter" in rank["crosswise"]["text"]
        assert rank["together"]["error"] is None


def test_a_rank_that_closes_what_it_gathers_leaves_no_other_waiting(ranks: Ranks) -> None:
    seen = of(ranks, "gathering_goes_on_when_nobody_takes")
    assert [rank["taken"] for rank in seen] == [1 if i == 1 else rank["next"] for i, rank in enumerate(seen)]


def test_a_rank_that_raises_in_the_middle_is_an_error_on_all_and_the_next_time_works(ranks: Ranks) -> None:
    seen = of(ranks, "raises")
    assert [(rank["error"], "rank 1 failed while" in rank["text"]) for rank in seen[:1] + seen[2:]] == [
        ("WeightwireError", True)
    ] * 3
    assert "out of memory, says rank 1" in seen[1]["text"]
    assert [rank["next"] for rank in seen] == [15] * 4


def test_a_rank_without_memory_is_the_same_error_on_all_and_the_next_time_works(ranks: Ranks) -> None:
    for rank in of(ranks, "no_memory"):
        assert "out of memory, says rank 1" in rank["text"], rank
        assert rank["next"] == 15


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("another model", "rank 1 has another model than rank 0 (only rank 1 has more (1 in all))"),
        ("claims too little", "written by nobody: t"),
        ("skips", ""),
    ],
)
def test_ranks_that_disagree_are_an_error_on_all_and_the_next_time_works(ranks: Ranks, case: str, text: str) -> None:
    seen = of(ranks, case)
    assert all(rank["error"] and text in rank["text"] for rank in seen), seen
    assert [rank["next"] for rank in seen] == [15] * 4


def test_ranks_with_a_stage_each_are_told_which_tensors_differ_and_what_takes_them(ranks: Ranks) -> None:
    for rank in of(ranks, "stages_as_modules"):
        assert (
            "trainer rank 2 has another model than rank 0 (only rank 0 has layers.0.weight, layers.0.bias"
            in rank["text"]
        )
        assert "only rank 2 has layers.1.weight, layers.1.bias" in rank["text"]
        assert "ExportAdapter(model.named_parameters)" in rank["text"]
        assert rank["as hinted"] == [[2, 3], [2], [3, 3], [3]]


def test_a_bucket_without_bytes_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    assert {rank["text"] for rank in of(ranks, "no_bucket")} == {"bucket_bytes must be positive, not 0"}


def test_gathering_holds_two_buckets_and_the_largest_tensor(ranks: Ranks) -> None:
    for seen in of(ranks, "memory_of_gathering"):
        assert seen["peak"] <= 2 * MIB + 4 * MIB + 8 * MIB < seen["model"] / 4


def test_summoning_holds_one_unit(ranks: Ranks) -> None:
    for seen in of(ranks, "memory_of_summoning"):
        unit = seen["model"] // 20
        assert seen["peak"] <= 3 * unit + 8 * MIB < seen["model"] / 2


def test_flat_slices_hold_nothing_beside_the_model(ranks: Ranks) -> None:
    for seen in of(ranks, "memory_of_flat_slices"):
        assert seen["peak"] <= 4 * MIB
