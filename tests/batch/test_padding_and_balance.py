"""Padding as RL trainers need it, and partitions by tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.errors import BatchError
from inference_plugin.wire.manifest import DTYPE_BYTES
from tests.batch.memory_owner import MemoryClient, MemoryOwner
from trainer_adapters.batch.balance import partition
from trainer_adapters.batch.batch import DistributedBatch


def made(*lengths: int) -> DistributedBatch:
    return DistributedBatch(
        {
            "input_ids": [torch.arange(1, n + 1) for n in lengths],
            "attention_mask": [torch.ones(n, dtype=torch.bool) for n in lengths],
            "states": [torch.ones(n, 2) for n in lengths],
            "reward": torch.ones(len(lengths)),
            "score": torch.ones(len(lengths), dtype=torch.bfloat16),
            "tag": ["x"] * len(lengths),
        }
    )


def test_masks_are_padded_with_0_others_with_the_pad_and_only_dimension_1() -> None:
    padded = made(1, 3).padded(7)
    assert padded["input_ids"].tolist() == [[1, 7, 7], [1, 2, 3]]
    assert padded["attention_mask"].tolist() == [[True, False, False], [True] * 3]
    assert padded["states"].tolist() == [[[1, 1], [7, 7], [7, 7]], [[1, 1]] * 3] and padded["states"].shape == (2, 3, 2)
    assert padded["reward"].tolist() == [1, 1] and padded["tag"] == ["x", "x"]


def test_pads_by_key_and_concat_of_other_lengths() -> None:
    pads = {"input_ids": 50256, "states": -1.5}
    with pytest.raises(BatchError, match=r"no pad for key 'input_ids'; there is one for states \(1 in all\)"):
        made(1, 2).padded({"states": 0})
    one, other = made(2, 2), made(1, 3)
    ragged = DistributedBatch.concat([one, other])
    assert [row.tolist() for row in ragged["input_ids"].unbind()] == [[1, 2], [1, 2], [1], [1, 2, 3]]
    dense = DistributedBatch.concat([one, other], pad_value=pads)
    assert dense["input_ids"].tolist() == [[1, 2, 50256]] * 2 + [[1, 50256, 50256], [1, 2, 3]]
    assert dense["attention_mask"].sum(1).tolist() == [2, 2, 1, 3]
    assert dense["states"][2].tolist() == [[1, 1], [-1.5, -1.5], [-1.5, -1.5]]
    narrow, wide = (DistributedBatch({"x": torch.full((2, n), n)}) for n in (2, 3))
    assert DistributedBatch.concat([narrow, wide], pad_value=0)["x"].tolist() == [[2, 2, 0]] * 2 + [[3, 3, 3]] * 2
    assert DistributedBatch.concat([narrow, wide])["x"].is_nested


def test_what_was_computed_from_padded_rows_is_as_long_as_they_are(client: MemoryClient, owner: MemoryOwner) -> None:
    rows = {"input_ids": [torch.arange(1, 2), torch.arange(1, 4)], "reward": torch.ones(2)}
    batch = DistributedBatch.of_entries(owner.put("t", rows), [owner.owner])
    computed = torch.arange(16).reshape(2, 4, 2)
    assert [row.tolist() for row in batch.unpadded(computed, "input_ids")] == [[[0, 1]], [[8, 9], [10, 11], [12, 13]]]
    again = batch.fetch().unpadded(batch.padded(0)["input_ids"], "input_ids")
    assert [row.tolist() for row in again] == [[1], [1, 2, 3]]
    for wrong in (torch.ones(3, 4), torch.ones(2, 2), torch.ones(2)):
        with pytest.raises(BatchError, match=r"has no padded rows like key 'input_ids': need \[2, 3 or more"):
            batch.unpadded(wrong, "input_ids")
    with pytest.raises(BatchError, match="rows without length"):
        batch.unpadded(torch.ones(2, 4), "reward")


def test_a_padded_batch_still_knows_its_tasks(client: MemoryClient, owner: MemoryOwner) -> None:
    batch = DistributedBatch.of_entries(owner.put("t", {"x": [torch.ones(1), torch.ones(2)]}), [owner.owner])
    assert batch.fetch().padded(0).task_ids == ("t",)


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if hasattr(torch, name)])
def test_every_dtype_is_padded(dtype: str) -> None:
    rows = [torch.ones(n).to(getattr(torch, dtype)) for n in (1, 3)]
    padded = DistributedBatch({"x": rows}).padded(1)["x"]
    assert padded.dtype == rows[0].dtype
    assert padded.view(torch.uint8).tolist() == torch.ones(2, 3).to(rows[0].dtype).view(torch.uint8).tolist()
    assert DistributedBatch({"x": rows}).reorder([1, 0])["x"].dtype == rows[0].dtype


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 0.5),
        (torch.bool, 2),
        (torch.uint8, -100),
        (torch.int8, 1000),
        (torch.int64, float("nan")),
        (torch.int64, "0"),
        (torch.float16, 70_000.0),
        (torch.float16, -1e300),
        (torch.complex64, 1e300),
        (torch.float8_e4m3fn, 500.0),  # would be 448
        (torch.float8_e4m3fn, float("inf")),
        (torch.float8_e4m3fnuz, 300.0),  # would be nan
    ],
)
def test_a_pad_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, pad: Any) -> None:
    batch = DistributedBatch({"x": [torch.ones(n).to(dtype) for n in (1, 2)]})
    with pytest.raises(BatchError, match=r"pad .* of key 'x'"):
        batch.padded(pad)


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="this torch lacks the dtype")
@pytest.mark.parametrize(("key", "pad"), [("x", 0), ("x", -1.0), ("x_mask", 1)])
def test_a_dtype_without_zero_and_sign_is_not_padded_with_them(key: str, pad: Any) -> None:
    batch = DistributedBatch({key: [torch.ones(n).to(torch.float8_e8m0fnu) for n in (1, 2)]})
    with pytest.raises(BatchError, match=f"pad .* of key '{key}'"):
        batch.padded(pad)


@pytest.mark.parametrize("pad", [0, -0.0, 0.1, -65504.0, 1e-30, float("inf"), float("-inf"), float("nan")])
def test_a_pad_is_rounded_to_what_the_dtype_holds(pad: float) -> None:
    padded = DistributedBatch({"x": [torch.ones(n, dtype=torch.float16) for n in (1, 2)]}).padded(pad)["x"]
    assert torch.equal(padded[0, 1:].view(torch.int16), torch.tensor([pad], dtype=torch.float16).view(torch.int16))


def test_gradients_flow_through_padding() -> None:
    rows = [torch.ones(n, requires_grad=True) for n in (1, 3)]
    (DistributedBatch({"x": rows}).padded(9.0)["x"] * 2).sum().backward()
    assert [row.grad.tolist() for row in rows if row.grad is not None] == [[2], [2, 2, 2]]


def test_dense_never_pads() -> None:
    batch = made(1, 3)
    with pytest.raises(BatchError, match="key 'input_ids' is ragged: its rows have 1 to 3 items"):
        batch.dense("input_ids")
    with pytest.raises(BatchError, match="plain values"):
        batch.dense("tag")
    assert batch.dense("reward").tolist() == [1, 1]
    assert batch.reorder([1, 1]).dense("states").shape == (2, 3, 2)
    assert batch.reorder([]).dense("states").shape == (0, 0, 2) == batch.reorder([]).padded(0)["states"].shape


def test_split_counts_tokens_by_key_by_number_and_by_mask(client: MemoryClient, owner: MemoryOwner) -> None:
    batch = made(9, 1, 1, 8, 7, 2)
    batch["tokens"] = [9, 1, 1, 8, 7, 2]
    batch["counts"] = torch.tensor([9, 1, 1, 8, 7, 2])
    expected = [[0, 2, 5], [1, 3], [4]]
    lengths = [9, 1, 1, 8, 7, 2]
    expected = [rows.tolist() for rows in partition(np.array(lengths), 3)]
    padded = batch.padded(0)
    remote = DistributedBatch.of_entries(owner.put("t", {"input_ids": batch["input_ids"]}), [owner.owner])
    batch["row"] = padded["row"] = list(range(6))
    for ranks in (
        batch.split(3, "input_ids"),
        batch.split(3, "states"),
        batch.split(3, "tokens"),
        batch.split(3, "counts"),
        padded.split(3, "attention_mask"),
        batch.split(3, torch.tensor(lengths)),
    ):
        assert [rank["row"] for rank in ranks] == expected
    assert [rank.lengths("input_ids").tolist() for rank in remote.split(3, "input_ids")] == [
        [lengths[i] for i in rows] for rows in expected
    ]
    assert sorted(sum(lengths[i] for i in rows) for rows in expected) == [9, 9, 10] and not client.asked


@pytest.mark.parametrize(
    ("by", "text"),
    [
        ([1, 2], "2 token counts for 6 rows"),
        ([1.5] * 6, "whole numbers"),
        ([-1] * 6, "row 0 has -1 tokens"),
        ("tag", "whole numbers"),
        ("reward", "whole numbers"),
        ("score", "whole numbers"),
    ],
)
def test_split_refuses_what_is_not_token_counts(by: Any, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        made(1, 2, 3, 4, 5, 6).split(2, by)


def test_equal_rows_are_equal_or_refused() -> None:
    batch = made(9, 1, 1, 8, 7, 2)
    assert [len(rank) for rank in batch.split(3, "input_ids", equal_rows=True)] == [2, 2, 2]
    with pytest.raises(BatchError, match=r"6 rows can't be split equally over 4 ranks .*filter 2 rows away, or add 2"):
        batch.split(4, "input_ids", equal_rows=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 4))
def test_no_rank_has_more_than_the_published_bound(tokens: list[int], ranks: int) -> None:
    chosen = partition(np.array(tokens, dtype=np.int64), ranks)
    assert sorted(itertools.chain(*(rows.tolist() for rows in chosen))) == list(range(len(tokens)))
    assert all((np.diff(rows) > 0).all() for rows in chosen), "rows stay in order"
    best = min(
        max(sum(t for t, rank in zip(tokens, ways, strict=True) if rank == r) for r in range(ranks))
        for ways in itertools.product(range(ranks), repeat=len(tokens))
    )
    worst = max(sum(tokens[i] for i in rows) for rows in chosen)
    assert worst <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@given(st.lists(st.integers(0, 1 << 14), min_size=1, max_size=64), st.integers(1, 8))
@settings(deadline=None)
def test_equal_counts_stay_balanced(tokens: list[int], ranks: int) -> None:
    tokens = tokens * ranks
    chosen = partition(np.array(tokens, dtype=np.int64), ranks, equal_rows=True)
    assert {len(rows) for rows in chosen} == {len(tokens) // ranks}
    loads = [sum(tokens[i] for i in rows) for rows in chosen]
    assert max(loads) - min(loads) <= max(tokens)
    assert [rows.tolist() for rows in chosen] == [
        rows.tolist() for rows in partition(np.array(tokens, dtype=np.int64), ranks, equal_rows=True)
    ]


def test_rows_without_tokens_spread_too() -> None:
    assert [len(rows) for rows in partition(np.zeros(8, dtype=np.int64), 4)] == [2, 2, 2, 2]
