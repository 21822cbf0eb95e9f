"""Results of any shape: to references and back, and those of several workers as one."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import pytest
import torch

from inference_plugin.wire.errors import BatchError, PeerLost
from tests.batch.memory_owner import MemoryClient, MemoryOwner
from trainer_adapters.batch.batch import BatchStatus, DistributedBatch
from trainer_adapters.batch.merging import merge
from trainer_adapters.batch.nested import RemoteTensor, alocalize, localize, remotize
from trainer_adapters.batch.records import Kind, ShardId, VersionSpan


class Pair(NamedTuple):
    loss: Any
    batch: Any


def jagged(*rows: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def result() -> dict[str, Any]:
    return {
        "a/b": [torch.tensor(1.5), torch.zeros(0, 3), "text", None],
        "a": {"b": torch.arange(3).to(torch.bfloat16), 7: (jagged([1], [2, 3]),)},
        "pair": Pair(torch.ones(2, 2), DistributedBatch({"x": jagged([4, 5], [6]), "t": ["p", "q"]})),
    }


def check(found: dict[str, Any]) -> None:
    scalar, empty, text, nothing = found["a/b"]
    assert scalar.item() == 1.5 and scalar.shape == () and empty.shape == (0, 3) and (text, nothing) == ("text", None)
    assert found["a"]["b"].dtype == torch.bfloat16 and found["a"]["b"].tolist() == [0, 1, 2]
    assert [row.tolist() for row in found["a"][7][0].unbind()] == [[1], [2, 3]]
    assert isinstance(found["pair"], Pair) and found["pair"].loss.tolist() == [[1, 1], [1, 1]]
    assert [row.tolist() for row in found["pair"].batch["x"].unbind()] == [[4, 5], [6]]
    assert found["pair"].batch["t"] == ["p", "q"]


def test_any_nesting_goes_to_references_and_back_with_one_fetch(client: MemoryClient, owner: MemoryOwner) -> None:
    before = result()
    remote = remotize(before, owner, "task", versions=VersionSpan(1, 2))
    check(before)
    assert isinstance(remote["a/b"][0], RemoteTensor) and remote["a/b"][2:] == ["text", None]
    assert remote["pair"].batch.status is BatchStatus.REMOTE and remote["pair"].batch.versions == VersionSpan(1, 2)
    assert {shard.task_id for shard in owner.held} == {"task", "task/a/7/0", "task/pair/1"}
    assert ShardId("task", "a~1b/0") in owner.held and ShardId("task", "a/b") in owner.held
    check(localize(remote))
    assert len(client.asked) == 1
    check(asyncio.run(alocalize(remote)))
    assert remote["pair"].batch.status is BatchStatus.REMOTE, "localize leaves what it was given as it is"


def test_a_tensor_alone_and_what_is_neither(owner: MemoryOwner) -> None:
    remote = remotize(torch.arange(3), owner, "t")
    assert remote.entry.shard == ShardId("t", ".") and localize(remote).tolist() == [0, 1, 2]
    assert remotize({"x": 1, "y": ["z"]}, owner) == {"x": 1, "y": ["z"]} == localize({"x": 1, "y": ["z"]})
    with pytest.raises(BatchError, match="give remotize a task_id"):
        remotize([torch.zeros(1)], owner)
    with pytest.raises(BatchError, match="two things at '7'"):
        remotize({7: torch.zeros(1), "7": torch.ones(1)}, owner, "t")


def test_a_batch_becomes_one_task_or_stays_the_tasks_that_it_came_from(
    client: MemoryClient, owner: MemoryOwner
) -> None:
    trainer = MemoryOwner(client)
    entries = owner.put("a", {"x": [1, 2]}, VersionSpan(1, 1)) + owner.put("b", {"x": [3]}, VersionSpan(2, 3))
    rollouts = DistributedBatch.of_entries(entries, [owner.owner])
    batch = rollouts.reorder([2, 1, 0]).fetch()
    batch["advantage"] = jagged([30, 3], [20], [10])
    advantages = remotize(batch.select(["advantage"]), trainer)
    assert advantages.status is BatchStatus.REMOTE and advantages.task_ids == ("a", "b")
    assert advantages.versions == VersionSpan(1, 3)
    both = rollouts.reorder([2, 1, 0]).union(advantages).fetch()
    assert both["x"] == [3, 2, 1] and [r.tolist() for r in both["advantage"].unbind()] == [[30, 3], [20], [10]]
    assert both.clear().cleared == 2 and not owner.held and not trainer.held

    one = remotize(batch, trainer, "all")
    assert one.task_ids == ("all",) and one.versions == VersionSpan(1, 3) and one.fetch()["x"] == [3, 2, 1]


def test_tasks_that_are_not_there_whole_need_an_id_of_their_own(client: MemoryClient, owner: MemoryOwner) -> None:
    rollouts = DistributedBatch.of_entries(owner.put("a", {"x": [1, 2]}), [owner.owner]).fetch()
    for part in (rollouts.reorder([0]), rollouts.reorder([0, 0]), rollouts.reorder([0, 1, 1])):
        with pytest.raises(BatchError, match=r"task 'a' has 2 rows; .* give remotize a task_id"):
            remotize(part, owner)
        assert remotize(part, owner, "own").fetch()["x"] == part["x"]
    for made_here in (DistributedBatch({"x": [1]}), DistributedBatch.concat([rollouts, DistributedBatch({"x": [3]})])):
        with pytest.raises(BatchError, match="rows that were made here come from no task"):
            remotize(made_here, owner)


def test_what_is_remote_or_empty_is_not_put_again(owner: MemoryOwner) -> None:
    remote = remotize(DistributedBatch({"x": torch.arange(2)}), owner, "t")
    held = dict(owner.held)
    assert remotize([remote], owner, "u")[0] is remote and owner.held == held
    empty = remotize(DistributedBatch({"x": torch.zeros(0, 2)}), owner, "u")
    assert empty.status is BatchStatus.EMPTY and owner.held == held
    assert DistributedBatch.from_bytes(empty.to_bytes()).fetch()["x"].shape == (0, 2)
    assert DistributedBatch.concat([remotize(DistributedBatch({"x": torch.arange(0)}), owner), remote]).fetch()[
        "x"
    ].tolist() == [0, 1]


def test_a_localize_that_fails_keeps_what_arrived(client: MemoryClient, owner: MemoryOwner) -> None:
    remote = [remotize(DistributedBatch({"x": [i]}), owner, f"t{i}") for i in range(3)]
    client.broken = {ShardId("t1", "x")}
    with pytest.raises(PeerLost):
        localize(remote)
    assert [batch.status for batch in remote] == [BatchStatus.REMOTE] * 3
    client.broken = set()
    assert [batch["x"] for batch in localize(remote)] == [[0], [1], [2]]
    assert client.asked[1] == [ShardId("t1", "x")]


def test_localize_inside_an_event_loop_points_to_the_awaitable(owner: MemoryOwner) -> None:
    remote = remotize(torch.zeros(1), owner, "t")

    async def inside() -> None:
        with pytest.raises(BatchError, match="event loop"):
            localize(remote)
        assert (await alocalize(remote)).tolist() == [0]

    asyncio.run(inside())


def test_merge_joins_what_workers_returned_in_their_order(owner: MemoryOwner) -> None:
    assert merge([None, None]) is None and merge([]) is None
    assert merge([None, 3, None, 4]) == [3, 4]
    assert merge([torch.tensor([1]), None, torch.tensor([2, 3])]).tolist() == [1, 2, 3]
    assert merge([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    assert [row.tolist() for row in merge([jagged([1]), jagged([2, 3], [4])]).unbind()] == [[1], [2, 3], [4]]
    merged = merge(
        [
            {"p": Pair(torch.tensor(float(i)), DistributedBatch({"x": [i]})), "l": [i], "n": None, "s": "x"}
            for i in range(3)
        ]
    )
    assert merged["p"].loss.tolist() == [0, 1, 2] and merged["p"].batch["x"] == [0, 1, 2]
    assert (merged["l"], merged["n"], merged["s"]) == ([0, 1, 2], None, ["x", "x", "x"])
    remote = merge([remotize(DistributedBatch({"x": [i]}), owner, f"t{i}") for i in range(3)])
    assert remote.status is BatchStatus.REMOTE and remote.task_ids == ("t0", "t1", "t2")
    assert remote.fetch()["x"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([torch.zeros(1), [1]], "differ in type: Tensor, list"),
        ([{"a": 1}, {"b": 2}], "differ in keys: only some have a, b"),
        (
            [{"a": {"x": (1, 2)}}, {"a": {"x": (1,)}}],
            r"the results\['a'\]\['x'\] of the workers are tuples of different lengths",
        ),
        (
            [{"a": torch.zeros(1)}, {"a": torch.zeros(1, 2)}],
            r"the results\['a'\]: the tensors of the workers don't join",
        ),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.int64)], "don't join"),
        ([torch.tensor(1), torch.zeros(1)], "don't join"),
        ([DistributedBatch({"a": [1]}), DistributedBatch({"b": [1]})], "has other keys"),
    ],
)
def test_merge_refuses_what_differs(results: list[Any], text: str) -> None:
    with pytest.raises(BatchError, match=text):
        merge(results)


def test_references_are_plain_metadata(owner: MemoryOwner) -> None:
    remote = remotize({"x": torch.zeros(3)}, owner, "t")["x"]
    assert remote.entry.kind is Kind.DENSE and remote.entry.item_shape == (3,) and hash(remote)
