"""Fetch and clear as a batch sees them: all or REMOTE, retryable, never in an event loop's way."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from inference_plugin.wire.errors import BatchError, PeerLost, ProtocolError
from tests.batch.memory_owner import MemoryClient, MemoryOwner
from trainer_adapters.batch.batch import BatchStatus, DistributedBatch
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.records import ClearReport, ShardId


@pytest.fixture
def remote(client: MemoryClient, owner: MemoryOwner) -> DistributedBatch:
    """Four tasks of one row, on two owners."""
    second = MemoryOwner(client)
    entries = [
        entry
        for i in range(4)
        for entry in (owner, second)[i % 2].put(f"t{i}", {"x": torch.tensor([i]), "tag": [f"row {i}"]})
    ]
    return DistributedBatch.of_entries(entries, [owner.owner, second.owner])


def test_a_half_failed_fetch_leaves_the_batch_remote_and_asks_for_the_rest_only(
    client: MemoryClient, remote: DistributedBatch
) -> None:
    client.broken = {ShardId("t1", "x"), ShardId("t2", "tag")}
    for _ in range(2):
        with pytest.raises(PeerLost, match="not fetched"):
            remote.fetch()
        assert remote.status is BatchStatus.REMOTE and len(remote) == 4
    client.broken = set()
    assert remote.fetch()["x"].tolist() == [0, 1, 2, 3]
    assert remote["tag"] == [f"row {i}" for i in range(4)]
    assert [len(asked) for asked in client.asked] == [8, 2, 2]


def test_what_arrived_before_serves_chunks_and_copies_too(client: MemoryClient, remote: DistributedBatch) -> None:
    client.broken = {ShardId("t3", "x")}
    with pytest.raises(PeerLost):
        remote.fetch()
    assert remote.chunk(2)[0].fetch()["x"].tolist() == [0, 1]
    assert len(client.asked) == 1, "all of it had arrived"
    client.broken = set()
    assert copy.copy(remote).fetch()["x"].tolist() == [0, 1, 2, 3] and client.asked[1:] == [[ShardId("t3", "x")]]


def test_joined_batches_keep_what_each_of_them_had_got(client: MemoryClient, remote: DistributedBatch) -> None:
    client.broken = {ShardId("t0", "x"), ShardId("t3", "tag")}
    chunks, sides = remote.chunk(2), [remote.select(["x"]), remote.select(["tag"])]
    for half in (*chunks, *sides):
        with pytest.raises(PeerLost):
            half.fetch()
    client.broken, client.asked = set(), []
    for joined, missing in (
        (DistributedBatch.concat(chunks), [ShardId("t0", "x"), ShardId("t3", "tag")]),
        (sides[0].union(sides[1]), [ShardId("t0", "x"), ShardId("t3", "tag")]),
    ):
        assert joined.fetch()["x"].tolist() == [0, 1, 2, 3]
        assert client.asked.pop() == missing


def test_a_fetched_batch_is_not_fetched_again(client: MemoryClient, remote: DistributedBatch) -> None:
    assert remote.fetch() is remote
    remote.fetch()
    DistributedBatch.concat(remote.chunk(3)).reorder([1, 0]).fetch()
    DistributedBatch().fetch()
    assert len(client.asked) == 1


def test_a_shard_that_many_rows_need_is_fetched_once(client: MemoryClient, owner: MemoryOwner) -> None:
    batch = DistributedBatch.of_entries(owner.put("t", {"x": torch.arange(4)}), [owner.owner])
    again = DistributedBatch.from_bytes(batch.to_bytes())
    both = DistributedBatch.concat([*batch.chunk(2), again]).fetch()
    assert both["x"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and client.asked == [[ShardId("t", "x")]]


def test_two_different_entries_of_one_shard_are_refused(owner: MemoryOwner) -> None:
    old, new = owner.put("t", {"x": [1]}), owner.put("t", {"x": [2]})
    batches = [DistributedBatch.of_entries(entries, [owner.owner]) for entries in (old, new)]
    with pytest.raises(BatchError, match="two different entries of shard 't':'x'"):
        DistributedBatch.concat(batches).fetch()


def test_fetch_inside_an_event_loop_points_to_afetch(client: MemoryClient, remote: DistributedBatch) -> None:
    async def both() -> list[int]:
        with pytest.raises(BatchError, match=r"use `await batch.afetch\(\)`"):
            remote.fetch()
        assert remote.status is BatchStatus.REMOTE and client.asked == []
        await remote.afetch()
        return list(remote["x"].tolist())

    assert asyncio.run(both()) == [0, 1, 2, 3]


def test_no_failure_of_a_fetch_is_reported_as_an_event_loop(
    client: MemoryClient, remote: DistributedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the wire broke")

    monkeypatch.setattr(client, "fetch_entries", fail)
    with pytest.raises(RuntimeError, match="the wire broke"):
        remote.fetch()
    with pytest.raises(RuntimeError, match="the wire broke"):
        asyncio.run(remote.afetch())
    assert remote.status is BatchStatus.REMOTE


def test_a_fetch_that_was_cancelled_leaves_the_batch_remote_and_retryable(
    client: MemoryClient, remote: DistributedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.ensure_future(remote.afetch())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with monkeypatch.context() as patch:
        patch.setattr(client, "afetch_entries", never)
        asyncio.run(cancelled())
    assert remote.status is BatchStatus.REMOTE and remote.fetch()["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [None, [1, 2], torch.tensor([[1]]), torch.tensor([1.0]), torch.tensor([1, 2])])
def test_a_client_that_brings_something_else_is_found_out(
    client: MemoryClient, remote: DistributedBatch, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    def wrong(entries: object, owners: object, *, timeout_s: float, have: dict[ShardId, object]) -> None:
        if value is not None:
            have |= {ShardId(f"t{i}", key): local_part(value) for i in range(4) for key in ("x", "tag")}

    monkeypatch.setattr(client, "fetch_entries", wrong)
    with pytest.raises(ProtocolError, match="'t0':'x'"):
        remote.fetch()
    assert remote.status is BatchStatus.REMOTE


def test_clear_tells_each_owner_its_own_tasks_and_may_be_repeated(
    client: MemoryClient, owner: MemoryOwner, remote: DistributedBatch
) -> None:
    remote.filter([False, True, True, True]).fetch().clear()
    first, second = client.stores
    assert client.cleared == [{second: ["t1", "t3"], first: ["t2"]}]
    assert remote.clear() == ClearReport(cleared=1, unknown=3)
    assert all(not store.held for store in client.stores.values())
    with pytest.raises(PeerLost, match="not fetched"):
        remote.fetch()
    assert DistributedBatch({"x": [1]}).clear() == ClearReport()


def test_clear_reaches_every_owner_of_a_task(client: MemoryClient, owner: MemoryOwner) -> None:
    """Also where two owners hold one shard, which no fetch would take."""
    second = MemoryOwner(client)
    batches = [
        DistributedBatch.of_entries(store.put("t", {"x": [i]}), [store.owner])
        for i, store in enumerate((owner, second))
    ]
    assert DistributedBatch.concat(batches).clear().cleared == 1
    assert not owner.held and not second.held


def test_rows_that_were_fetched_stay_after_the_clear(remote: DistributedBatch) -> None:
    remote.fetch().clear()
    assert remote["x"].tolist() == [0, 1, 2, 3] and remote.task_ids == ("t0", "t1", "t2", "t3")


def test_rows_that_arrived_for_an_entry_never_stand_for_a_later_put_of_its_shard(
    client: MemoryClient, owner: MemoryOwner
) -> None:
    old = DistributedBatch.of_entries(owner.put("t", {"x": [1], "y": [2]}), [owner.owner])
    client.broken = {ShardId("t", "y")}
    with pytest.raises(PeerLost):
        old.fetch()
    client.broken = set()
    later = DistributedBatch.of_entries(owner.put("t", {"x": [3]}), [owner.owner])
    joined = old.select(["y"]).union_(later).fetch()
    assert (joined["x"], joined["y"]) == ([3], [2])
