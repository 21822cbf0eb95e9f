"""What a batch is and refuses: status, items, keys, rows."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from inference_plugin.wire.errors import BatchError, NotFetched, UnknownKey
from tests.batch.memory_owner import MemoryOwner
from trainer_adapters.batch.batch import BatchStatus, DistributedBatch
from trainer_adapters.batch.merging import merge
from trainer_adapters.batch.records import Owner, VersionSpan


def jagged(*rows: list[Any]) -> torch.Tensor:
    dtype = torch.tensor(rows[0]).dtype
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


@pytest.fixture
def remote(owner: MemoryOwner) -> DistributedBatch:
    """Two tasks of two rows."""
    entries = owner.put("a", {"ids": jagged([1], [2, 3]), "tag": ["x", None]}, VersionSpan(3, 4))
    entries += owner.put("b", {"ids": jagged([4, 5, 6], []), "tag": ["y", {"n": 1}]}, VersionSpan(4, 6))
    return DistributedBatch.of_entries(entries, [owner.owner])


def test_the_truth_table_of_the_status(remote: DistributedBatch) -> None:
    assert DistributedBatch().status is BatchStatus.EMPTY
    assert DistributedBatch({"x": torch.zeros(2)}).status is BatchStatus.LOCAL
    assert DistributedBatch({"x": torch.zeros(0, 3)}).status is BatchStatus.LOCAL
    assert DistributedBatch({"x": torch.zeros(2)}).chunk(3)[2].status is BatchStatus.LOCAL
    assert remote.status is BatchStatus.REMOTE
    assert [chunk.status for chunk in remote.chunk(5)] == [BatchStatus.REMOTE] * 4 + [BatchStatus.EMPTY]
    assert remote.select([]).status is BatchStatus.EMPTY and remote.select([]).keys() == ()
    assert remote.fetch().status is BatchStatus.LOCAL
    assert remote.chunk(5)[4].status is BatchStatus.LOCAL


def test_items_of_a_remote_batch_say_how_to_fetch_and_change_nothing(remote: DistributedBatch) -> None:
    for use in (
        lambda: remote["ids"],
        lambda: remote.__setitem__("ids", torch.zeros(4)),
        lambda: remote.__setitem__("new", torch.zeros(4)),
        lambda: remote.__delitem__("ids"),
        lambda: remote.dense("ids"),
        lambda: remote.padded(0),
        lambda: dict(remote.items()),
        lambda: remote.chunk(5)[4]["ids"],
    ):
        with pytest.raises(NotFetched, match=r"call batch.fetch\(\) first, or `await batch.afetch\(\)`"):
            use()
    assert remote.status is BatchStatus.REMOTE and remote.keys() == ("ids", "tag")


def test_after_a_fetch_assignment_works_and_the_tasks_are_still_known(remote: DistributedBatch) -> None:
    remote.fetch()
    remote["reward"] = torch.arange(4)
    remote["ids"] = jagged([1], [2], [3], [4])
    del remote["tag"]
    assert remote["reward"].tolist() == [0, 1, 2, 3] and remote.keys() == ("ids", "reward")
    assert remote.select(["reward"]).task_ids == ("a", "b") == remote.select(["ids"]).task_ids
    assert remote.chunk(2)[1].task_ids == ("b",) and remote.chunk(2)[1].versions == VersionSpan(4, 6)
    joined = DistributedBatch.concat([remote, DistributedBatch({"ids": jagged([9]), "reward": torch.tensor([9])})])
    assert joined.task_ids == ("a", "b") and joined["reward"].tolist() == [0, 1, 2, 3, 9]
    assert joined.reorder([4]).task_ids == ()


def test_every_row_knows_its_task(remote: DistributedBatch) -> None:
    first, second = remote.task_ids
    tasks = remote.row_tasks()
    assert tasks == [first] * tasks.count(first) + [second] * tasks.count(second) and len(tasks) == len(remote)
    order = list(range(len(remote)))[::-1]
    assert remote.reorder(order).row_tasks("ids") == tasks[::-1]
    kept = remote.filter([task != first for task in tasks])
    assert kept.task_ids == (second,) and set(kept.row_tasks()) == {second}
    assert DistributedBatch({"made here": [1, 2]}).row_tasks() == [None, None] and DistributedBatch().row_tasks() == []
    with pytest.raises(UnknownKey):
        remote.row_tasks("other")


def test_an_empty_chunk_is_fetched_to_rows_of_the_right_type(remote: DistributedBatch) -> None:
    empty = remote.chunk(5)[4].fetch()
    assert empty["ids"].dtype == torch.int64 and empty["ids"].shape[0] == 0 and empty["tag"] == []
    empty["reward"] = torch.zeros(0)
    assert len(empty) == 0 and empty.keys() == ("ids", "tag", "reward")


def test_a_batch_without_keys_takes_its_rows_from_the_first_assignment() -> None:
    batch = DistributedBatch()
    with pytest.raises(UnknownKey):
        batch["x"]
    batch["x"] = np.arange(3)
    assert batch.status is BatchStatus.LOCAL and len(batch) == 3
    with pytest.raises(BatchError, match="key 'y' would have 2 rows, the batch has 3"):
        batch["y"] = torch.zeros(2)
    with pytest.raises(BatchError, match="keys have different numbers of rows: a: 1, b: 2"):
        DistributedBatch({"a": torch.zeros(1), "b": torch.zeros(2)})


def test_unknown_and_impossible_keys_are_refused() -> None:
    batch = DistributedBatch({"x": torch.zeros(2)})
    with pytest.raises(UnknownKey, match=r"no key 'y'; the batch has x \(1 in all\)") as raised:
        batch["y"]
    assert isinstance(raised.value, KeyError)
    with pytest.raises(UnknownKey):
        batch.select(["x", "y"])
    with pytest.raises(UnknownKey):
        del batch["y"]
    for key in (3, None, ("a",), slice(0, 1), "", "k" * 513):
        with pytest.raises(BatchError, match="key"):
            batch[key] = torch.zeros(2)  # type: ignore[index]
        with pytest.raises(BatchError, match="key"):
            batch[key]  # type: ignore[index]
    with pytest.raises(BatchError, match="keys='xy' is a str -- give a list"):
        batch.select("xy")
    assert 3 not in batch and "x" in batch and list(batch) == ["x"]


def test_nothing_merges_by_accident() -> None:
    batch = DistributedBatch({"x": torch.zeros(2)})
    with pytest.raises(BatchError, match="union_"):
        batch["y"] = DistributedBatch({"y": torch.zeros(2)})
    with pytest.raises(BatchError, match="a dict is not rows"):
        batch["y"] = {"z": torch.zeros(2)}
    assert batch.keys() == ("x",)


def test_repr_tells_everything_and_fetches_nothing(remote: DistributedBatch, owner: MemoryOwner) -> None:
    owner.held.clear()
    assert repr(remote) == (
        "DistributedBatch(REMOTE, 4 rows, {ids: int64[*], tag: values}, 4 shards, 59 bytes, versions 3..6)"
    )
    assert repr(remote.chunk(5)[4]) == (
        "DistributedBatch(EMPTY, 0 rows, {ids: int64[*], tag: values}, 0 shards, 0 bytes)"
    )
    assert repr(DistributedBatch({"x": torch.zeros(2, 3 << 20, dtype=torch.int8)})) == (
        "DistributedBatch(LOCAL, 2 rows, {x: int8[3145728]}, 0 shards, 6.0 MiB)"
    )
    assert repr(DistributedBatch()) == "DistributedBatch(EMPTY, 0 rows, {}, 0 shards, 0 bytes)"


def test_chunks_keep_order_and_differ_by_one_row_at_most() -> None:
    batch = DistributedBatch({"x": torch.arange(7)})
    assert [chunk["x"].tolist() for chunk in batch.chunk(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [chunk["x"].tolist() for chunk in batch.chunk(9)] == [[i] for i in range(7)] + [[], []]
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(BatchError, match="can't be cut into"):
            batch.chunk(wrong)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match="can't be cut into"):
            batch.split(wrong, [1] * 7)  # type: ignore[arg-type]


def test_empty_chunks_take_part_in_everything(remote: DistributedBatch) -> None:
    chunks = remote.chunk(7)
    assert len(DistributedBatch.concat(chunks)) == 4 and DistributedBatch.concat(chunks[4:]).status is BatchStatus.EMPTY
    empty = chunks[6]
    assert [len(b) for b in (*empty.chunk(2), empty.reorder([]), empty.filter([]), *empty.split(2, "ids"))] == [0] * 6
    assert empty.select(["tag"]).union(empty.select(["ids"])).keys() == ("tag", "ids")
    assert DistributedBatch.concat([empty, remote.fetch()])["tag"] == ["x", None, "y", {"n": 1}]


def test_a_run_of_rows_is_a_view_and_scattered_rows_are_copied_once() -> None:
    x = torch.arange(40).view(10, 4)
    batch = DistributedBatch({"x": x})
    assert batch["x"] is x
    assert batch.chunk(2)[1]["x"].data_ptr() == x[5].data_ptr()
    assert DistributedBatch.concat(batch.chunk(3))["x"].data_ptr() == x.data_ptr()
    scattered = batch.reorder([3, 1])
    assert scattered["x"].tolist() == x[[3, 1]].tolist() and scattered["x"].data_ptr() == scattered["x"].data_ptr()
    ragged = DistributedBatch({"r": jagged([1], [2, 3], [4, 5, 6], [7])})
    assert ragged.chunk(2)[1]["r"].values().data_ptr() == ragged["r"].values()[3:].data_ptr()


def test_ragged_keys_of_equal_lengths_compute_with_each_other() -> None:
    mine = jagged([1], [2, 3])
    batch = DistributedBatch({"a": mine, "b": [torch.tensor([10]), torch.tensor([20, 30])]})
    for total in (batch["a"] + batch["b"], mine + batch["b"], batch.chunk(1)[0]["b"] + batch["a"]):
        assert [row.tolist() for row in total.unbind()] == [[11], [22, 33]]


def test_a_nested_tensor_that_begins_inside_its_values_keeps_its_rows() -> None:
    late = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([2, 4, 9]))
    short = torch.nested.nested_tensor_from_jagged(torch.arange(9), torch.tensor([0, 2, 7], dtype=torch.int32))
    for nested, rows in ((late, [[2, 3], [4, 5, 6, 7, 8]]), (short, [[0, 1], [2, 3, 4, 5, 6]])):
        value = DistributedBatch({"x": nested})["x"]
        assert [row.tolist() for row in value.unbind()] == rows and value.offsets().tolist() == [0, 2, 7]
    again = DistributedBatch({"x": [torch.arange(2), torch.arange(5)]})
    assert [row.tolist() for row in again["x"].unbind()] == [[0, 1], [0, 1, 2, 3, 4]]


def test_keys_that_are_cut_alike_share_one_index(remote: DistributedBatch) -> None:
    """So an operation on many keys computes once."""
    for batch in (remote, remote.reorder([3, 1, 0]), *remote.chunk(2), copy.copy(remote).fetch().filter([True] * 4)):
        assert len({id(column.index) for column in batch.columns().values()}) == 1


def test_reorder_and_filter_refuse_what_is_not_rows() -> None:
    batch = DistributedBatch({"x": torch.arange(3)})
    assert batch.reorder(torch.tensor([2, 2]))["x"].tolist() == [2, 2]
    for wrong, text in (
        ([3], "no row 3"),
        ([-1], "no row -1"),
        ([0.5], "whole numbers"),
        ([[0]], "whole numbers"),
        (["a"], "whole"),
    ):
        with pytest.raises(BatchError, match=text):
            batch.reorder(wrong)  # type: ignore[arg-type]
    for mask in ([True], [1, 0, 1], [[True, False, True]], [0.5] * 3, [[True], [True, False], True]):
        with pytest.raises(BatchError, match="need 3 bools"):
            batch.filter(mask)


def test_concat_refuses_what_does_not_belong_together(remote: DistributedBatch) -> None:
    one = DistributedBatch({"x": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="concat of no batches"):
        DistributedBatch.concat([])
    with pytest.raises(
        BatchError, match=r"batch 1 has other keys than batch 0: only one of them has x, y \(2 in all\)"
    ):
        DistributedBatch.concat([one, DistributedBatch({"y": torch.zeros(2)})])
    for value in (torch.zeros(2, 3, 1), torch.zeros(2), torch.zeros(2, 3).double(), ["a", "b"], torch.zeros(2, 4, 2)):
        with pytest.raises(BatchError, match=r"key 'x': batch 1 has rows"):
            DistributedBatch.concat([one, DistributedBatch({"x": value})])
    local = copy.copy(remote).fetch()
    with pytest.raises(BatchError, match="LOCAL and REMOTE batches don't join"):
        DistributedBatch.concat([local, remote])
    other = DistributedBatch.of_entries(remote.entries(), [Owner(next(iter(remote.owners)), "tcp://elsewhere")])
    with pytest.raises(BatchError, match="two different owners"):
        DistributedBatch.concat([remote, other])


def test_what_is_no_batch_is_refused() -> None:
    batch = DistributedBatch({"x": [1]})
    for wrong in ({"y": [1]}, None, [1]):
        with pytest.raises(BatchError, match=f"a {type(wrong).__name__}, not a batch"):
            batch.union(wrong)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match=f"item 1 is a {type(wrong).__name__}, not a batch"):
            DistributedBatch.concat([batch, wrong])  # type: ignore[list-item]
    with pytest.raises(BatchError, match="rows by key, not of a list"):
        DistributedBatch([1])  # type: ignore[arg-type]
    for nothing in (5, None, "x"):
        for takes_a_list in (DistributedBatch.concat, batch.select, merge):
            with pytest.raises(BatchError, match=f"is a {type(nothing).__name__} -- give a list"):
                takes_a_list(nothing)  # type: ignore[operator]
        with pytest.raises(BatchError, match=f"data is a {type(nothing).__name__} -- give the bytes"):
            DistributedBatch.from_bytes(nothing)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"tags=\[1\] are a list"):
        DistributedBatch({"x": [1]}, tags=[1])  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="column of key 'x' can't stand under key 'y'"):
        DistributedBatch({"y": batch.columns()["x"]})


def test_an_empty_chunk_and_a_local_one_do_not_mix_their_keys(remote: DistributedBatch) -> None:
    local, empty = DistributedBatch({"new": torch.zeros(0)}), remote.chunk(5)[4]
    with pytest.raises(BatchError, match="fetch the others first"):
        local.union_(empty)
    assert local.keys() == ("new",) and local.union(empty.fetch()).keys() == ("new", "ids", "tag")


def test_union_is_new_and_leaves_both_as_they_were() -> None:
    rows = [1, 2]
    one, other = DistributedBatch({"a": torch.arange(2), "l": rows}), DistributedBatch({"b": ["x", "y"]})
    both = one.union(other)
    assert both.keys() == ("a", "l", "b") and both["b"] == ["x", "y"]
    both["c"] = torch.zeros(2)
    both["l"].append(3)
    both["a"] = torch.zeros(2)
    assert (one.keys(), other.keys(), rows) == (("a", "l"), ("b",), [1, 2])
    assert one["a"].tolist() == [0, 1] and one["l"] == [1, 2] == both["l"] and other["b"] == ["x", "y"]
    assert one.union_(other) is one and one.keys() == ("a", "l", "b") and other.keys() == ("b",)


@pytest.mark.parametrize("where", [BatchStatus.LOCAL, BatchStatus.REMOTE])
def test_union_refuses_common_keys_and_other_counts_and_another_order(
    remote: DistributedBatch, where: BatchStatus
) -> None:
    if where is BatchStatus.LOCAL:
        remote.fetch()
    ids, tags = remote.select(["ids"]), remote.select(["tag"])
    with pytest.raises(BatchError, match=r"both batches have tag \(1 in all\)"):
        remote.union(tags)
    with pytest.raises(BatchError, match="a batch of 4 rows and one of 3"):
        ids.union(tags.reorder([0, 1, 2]))
    with pytest.raises(BatchError, match="row 0 is row 0 of task 'a' in one batch and row 0 of task 'b' in the other"):
        ids.union(tags.reorder([2, 1, 0, 3]))
    with pytest.raises(BatchError, match="row 0 is row 0 of task 'a' in one batch and row 1 of task 'a'"):
        ids.union_(tags.reorder([1, 0, 2, 3]))
    assert ids.keys() == ("ids",) and tags.keys() == ("tag",)
    mixed = DistributedBatch({"n": torch.zeros(4)}) if where is BatchStatus.REMOTE else None
    if mixed is not None:
        with pytest.raises(BatchError, match="LOCAL and REMOTE"):
            ids.union_(mixed)
    assert ids.union(tags).task_ids == ("a", "b")


def test_entries_are_aligned_by_task_or_refused(owner: MemoryOwner) -> None:
    a, b = owner.put("a", {"x": [1], "y": [10]}), owner.put("b", {"x": [2, 3], "y": [20, 30]})
    batch = DistributedBatch.of_entries([a[0], b[1], b[0], a[1]], [owner.owner]).fetch()
    assert (batch["x"], batch["y"]) == ([1, 2, 3], [10, 20, 30])
    with pytest.raises(BatchError, match="keys have different numbers of rows: x: 3, y: 2"):
        DistributedBatch.of_entries([a[0], b[0], b[1]], [owner.owner])
    with pytest.raises(BatchError, match="two entries of task 'a'"):
        DistributedBatch.of_entries([a[0], a[0]], [owner.owner])
    with pytest.raises(BatchError, match="not among the given owners"):
        DistributedBatch.of_entries(a, [])
    wrong = owner.put("a", {"y": [1, 2]})
    with pytest.raises(BatchError, match="task 'a' has 1 rows of one key and 2 of key 'y'"):
        DistributedBatch.of_entries([a[0], *wrong], [owner.owner])
    with pytest.raises(BatchError, match=r"key 'x' has rows float32\[\] and rows values"):
        DistributedBatch.of_entries(
            [*owner.put("a", {"x": [1]}), *owner.put("b", {"x": torch.zeros(1)})], [owner.owner]
        )


def test_keys_that_share_some_tasks_have_each_at_the_same_rows_or_are_refused(owner: MemoryOwner) -> None:
    x = [*owner.put("a", {"x": [1]}), *owner.put("b", {"x": [2]})]
    y, other = owner.put("b", {"y": [20]})[0], owner.put("c", {"y": [0]})[0]
    with pytest.raises(BatchError, match="task 'b' begins at row 1 of one key, and at row 0 of key 'y'"):
        DistributedBatch.of_entries([*x, y, other], [owner.owner])
    batch = DistributedBatch.of_entries([*x, other, y], [owner.owner]).fetch()
    assert (batch["x"], batch["y"]) == ([1, 2], [0, 20])
    like_y = [*owner.put("b", {"w": [200]}), *owner.put("c", {"w": [100]})]
    batch = DistributedBatch.of_entries([*x, other, y, *like_y], [owner.owner]).fetch()
    assert (batch["y"], batch["w"]) == ([0, 20], [100, 200])


def test_mixed_inputs_of_one_column_become_one_ragged_column(owner: MemoryOwner) -> None:
    entries = owner.put("a", {"x": torch.ones(2, 3)}) + owner.put("b", {"x": jagged([1.0], [2.0, 3.0])})
    entries += owner.put("c", {"x": torch.zeros(1, 2)})
    batch = DistributedBatch.of_entries(entries, [owner.owner])
    assert batch.lengths("x").tolist() == [3, 3, 1, 2, 2]
    assert [row.tolist() for row in batch.fetch()["x"].unbind()] == [[1] * 3, [1] * 3, [1], [2, 3], [0, 0]]
    assert batch.reorder([0, 1])["x"].is_nested, "a key keeps its type whatever rows it loses"


def test_gradients_flow_through_a_local_batch() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    batch = DistributedBatch({"x": x})
    (batch["x"].sum() + batch.reorder([2, 0])["x"].sum() + batch.chunk(2)[0]["x"].sum()).backward()
    assert x.grad is not None and x.grad.tolist() == [[3, 3], [2, 2], [2, 2]]
    ragged = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    first, second = DistributedBatch({"ragged": ragged}).rows("ragged")
    (first.sum() * 2 + second.sum()).backward()
    assert [row.grad.tolist() for row in ragged if row.grad is not None] == [[2, 2], [1]]


def grouped(owner: MemoryOwner, sizes: list[int]) -> DistributedBatch:
    """Tasks "t0", "t1", ... of these numbers of rows; row lengths are 1, 2, 3, ..."""
    entries, length = [], 0
    for number, size in enumerate(sizes):
        rows = [torch.ones(length + i + 1) for i in range(size)]
        length += size
        entries += owner.put(f"t{number}", {"ids": rows, "score": torch.arange(size)})
    return DistributedBatch.of_entries(entries, [owner.owner], {"t0": {"solved": True}, "gone": {"solved": False}})


@pytest.mark.parametrize("is_local", [False, True])
def test_a_split_by_whole_tasks_keeps_the_samples_of_a_prompt_together(owner: MemoryOwner, is_local: bool) -> None:
    batch = grouped(owner, [3, 2, 4, 1])
    if is_local:
        batch.fetch()
    parts = batch.split(2, by="ids", whole_tasks=True)
    assert sorted(task for part in parts for task in part.task_ids) == ["t0", "t1", "t2", "t3"]
    assert [len(part) for part in parts] == [4, 6]  # t2 with 6 + 7 + 8 + 9 tokens; 6 + 9 + 10 for the others
    for part in parts:
        assert part.row_tasks() == sorted(part.row_tasks())  # type: ignore[type-var]  # rows stay in order
    assert [len(part) for part in batch.split(2, by="ids")] != [4, 6]
    with pytest.raises(BatchError, match="tasks have 1 to 4 rows"):
        batch.split(2, by="ids", equal_rows=True, whole_tasks=True)
    even = grouped(owner, [2, 2, 2, 2])
    assert [len(part) for part in even.split(2, by="ids", equal_rows=True, whole_tasks=True)] == [4, 4]
    assert [len(part) for part in even.split(8, by="ids", whole_tasks=True)].count(0) == 4
    with pytest.raises(BatchError, match="2 of 2 rows belong to no task"):
        DistributedBatch({"ids": torch.ones(2, 3)}).split(2, by="ids", whole_tasks=True)


@pytest.mark.parametrize("is_local", [False, True])
def test_without_leaves_the_rows_of_tasks_out(owner: MemoryOwner, is_local: bool) -> None:
    batch = grouped(owner, [2, 1, 2])
    if is_local:
        batch.fetch()
    left = batch.without(["t1", "never heard of"])
    assert (
        left.row_tasks() == ["t0", "t0", "t2", "t2"]
        and len(batch) == 5
        and left.fetch()["score"].tolist() == [0, 1, 0, 1]
    )
    assert len(batch.without([])) == 5 and len(batch.without(["t0", "t1", "t2"])) == 0
    made_here = DistributedBatch({"x": torch.ones(3)})
    assert len(made_here.without(["t0"])) == 3
    with pytest.raises(BatchError, match="need a list of task ids"):
        batch.without("t0")


def test_tags_stay_with_their_tasks_through_every_operation(owner: MemoryOwner) -> None:
    batch = grouped(owner, [2, 1])
    tags = {"t0": {"solved": True}}
    assert batch.tags == tags  # and none of a task that it does not have
    assert batch.without(["t0"]).tags == {} and batch.chunk(2)[0].tags == tags and batch.select(["score"]).tags == tags
    assert DistributedBatch.from_bytes(batch.to_bytes()).tags == tags
    assert DistributedBatch.concat(batch.chunk(3)).tags == tags and copy.copy(batch).tags == tags
    assert batch.select(["ids"]).union(batch.select(["score"])).tags == tags
    assert batch.fetch().tags == tags
    solved = [batch.tags.get(task or "", {}).get("solved") for task in batch.row_tasks()]
    assert solved == [True, True, None]
