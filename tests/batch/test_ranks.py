"""A batch on the ranks of a trainer, mostly on one, whose group is real. `test_async_rl.py` has two ranks and kills owners."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from inference_plugin.wire.errors import BatchError
from tests.support.engines import eventually
from tests.support.rig import fork, gone, kill, runtime
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.ranks import RankBatch
from trainer_adapters.batch.records import ClearReport
from trainer_adapters.batch.store import Store


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Store]]:
    """The store of who made the rows, and that of the rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with runtime(monkeypatch), Store(budget_bytes=1 << 24) as owner, Store(budget_bytes=1 << 24) as mine:
            yield owner, mine
    finally:
        dist.destroy_process_group()


def drawn(owner: Store, tasks: int) -> DistributedBatch:
    rows = [
        {"ids": [torch.full((3,), i), torch.full((i + 1,), 10 + i)], "rewards": torch.tensor([float(i), i + 0.5])}
        for i in range(tasks)
    ]
    entries = [entry for i, data in enumerate(rows) for entry in owner.put(f"t{i}", data)]
    return DistributedBatch.of_entries(entries, [owner.owner])


def test_what_a_rank_and_what_rank_0_computes_belongs_to_the_rows_and_is_cleared_with_them(
    stores: tuple[Store, Store],
) -> None:
    owner, mine = stores
    batch = RankBatch(drawn(owner, 4), mine, by="ids")
    rows = batch.fetch()
    assert rows is not None and len(rows) == 8
    batch.add({"sums": torch.stack([row.sum() for row in rows.rows("ids")])})
    rewards = batch.read(["rewards"])["rewards"]
    batch.add_whole({"advantages": rewards - rewards.mean()})
    rows = batch.fetch()
    assert rows is not None and set(rows.keys()) == {"ids", "rewards", "sums", "advantages"}
    assert rows["sums"].tolist() == [int(row.sum()) for row in rows.rows("ids")]
    assert torch.equal(rows["advantages"], rows["rewards"] - rows["rewards"].mean())
    assert mine.stats().tasks == 2
    assert batch.clear() == ClearReport(cleared=6)
    assert (owner.stats().tasks, mine.stats().tasks, batch.lost) == (0, 0, set())


def test_rows_lie_on_the_host_whatever_the_trainers_default_device_is(stores: tuple[Store, Store]) -> None:
    """Such as `torch.set_default_device("cuda")`; a tensor of ours that was made there has no bytes on the host."""
    owner, mine = stores
    drawn_rows = drawn(owner, 4)
    with torch.device("meta"):
        batch = RankBatch(drawn_rows, mine, by="ids")
        rows = batch.fetch()
        assert rows is not None
        batch.add({"sums": [int(row.sum()) for row in rows.rows("ids")]})
        rewards = batch.read(["rewards"]).dense("rewards")
        batch.add_whole({"advantages": rewards})
        rows = batch.fetch()
        assert rows is not None and sorted(rows["advantages"].tolist()) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
        assert rows.padded(0)["ids"].shape == (8, 4)
        read = owner.get(drawn_rows.entries()[0].shard)
        draft = owner.empty((0, 3), dtype=torch.float32)
    assert (read.rows, draft.device.type) == (2, "cpu")


def test_tasks_whose_rows_are_gone_are_left_out_and_named_until_no_rows_are_left(stores: tuple[Store, Store]) -> None:
    owner, mine = stores
    batch = RankBatch(drawn(owner, 3), mine, by="ids")
    owner.clear(["t1"])
    rows = batch.fetch()
    assert rows is not None and set(rows.row_tasks()) == {"t0", "t2"} and batch.lost == {"t1"}
    batch.add({"sums": torch.zeros(len(rows))})
    owner.clear(["t2"])
    assert batch.read(["rewards"]).dense("rewards").tolist() == [0.0, 0.5] and batch.lost == {"t1", "t2"}
    owner.clear(["t0"])
    assert batch.fetch() is None and batch.lost == {"t0", "t1", "t2"}
    batch.clear()
    assert mine.stats().tasks == 0, "what was added to lost rows too"


def test_rows_that_arrive_wrong_are_an_error_and_not_left_out(stores: tuple[Store, Store]) -> None:
    owner, mine = stores
    whole = drawn(owner, 2)
    owner.tasks["t1"]["ids"].block.memory[0] ^= 1
    batch = RankBatch(whole, mine, by="ids")
    with pytest.raises(BatchError, match=r"rank 0: .*digest"):
        batch.fetch()
    assert batch.lost == set()


def test_rows_that_a_rank_has_no_means_to_fetch_are_an_error_and_not_left_out(stores: tuple[Store, Store]) -> None:
    """Their owner lives: a rank that has not joined Ray, say, would leave all rows out on all ranks."""
    made, mine = stores
    whole = drawn(made, 2)
    elsewhere = msgspec.structs.replace(made.owner, address="ray://nobody-joined")
    batch = RankBatch(DistributedBatch.of_entries(whole.entries(), [elsewhere]), mine, by="ids", timeout_s=60)
    with pytest.raises(BatchError, match=r"rank 0: .*TransportUnavailable: .*Ray"):
        batch.fetch()
    assert batch.lost == set()
    ((owner, error),) = batch.clear().failed
    assert owner == elsewhere.id and "Ray" in error.message, "rows that stay are reported"


def test_rows_of_the_ranks_themselves_that_are_lost_are_an_error(stores: tuple[Store, Store]) -> None:
    owner, mine = stores
    batch = RankBatch(drawn(owner, 2), mine, by="ids", timeout_s=60)
    rows = batch.fetch()
    assert rows is not None
    batch.add({"sums": torch.zeros(len(rows))})
    mine.clear(mine.tasks)
    with pytest.raises(BatchError, match="rows that the ranks computed are lost"):
        batch.fetch()


def test_a_dtensor_is_refused_and_the_error_says_what_to_give_instead(stores: tuple[Store, Store]) -> None:
    spread = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    for rows in (spread, [spread, spread]):
        with pytest.raises(BatchError, match=r"a DTensor lies on several ranks.*to_local\(\)"):
            stores[0].put("t", {"x": rows})


@pytest.mark.parametrize(
    ("what", "kind", "text", "rank", "tasks"),
    [
        ("share", "UnknownKey", "no key 'nonsense'", 0, [0, 0]),
        ("put", "BatchError", "key 'bad'", 1, [0, 0]),
        ("join", "BatchError", "other keys", 0, [0, 0]),
        ("lost", "BatchError", "rows that the ranks computed are lost", 0, [1, 0]),
    ],
)
def test_where_one_rank_fails_all_ranks_raise_its_error_at_once_and_keep_no_rows_of_it(
    monkeypatch: pytest.MonkeyPatch, what: str, kind: str, text: str, rank: int, tasks: list[int]
) -> None:
    said = run_ranks(monkeypatch, what)
    assert [(each["kind"], each["rank"]) for each in said] == [(kind, rank)] * 2, said
    assert all(text in each["text"] for each in said), said
    assert [each["tasks"] for each in said] == tasks


def test_rows_that_one_rank_adds_too_many_and_another_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run_ranks(monkeypatch, "rows")
    assert [each["kind"] for each in said] == ["BatchError"] * 2, said
    assert [each["text"] for each in said] == [f"{n} rows are added, but this rank fetched 4" for n in (3, 5)], said
    assert [each["tasks"] for each in said] == [0, 0]


def test_where_rank_0_ends_of_an_error_of_its_own_the_others_are_told_at_once_that_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`read` is for rank 0 alone; the other one waits in `fetch`."""
    said = run_ranks(monkeypatch, "read")
    assert [each["kind"] for each in said] == ["BatchError", "PeerLost"], said
    assert "rows that the ranks computed are lost" in said[0]["text"] and "a rank ended" in said[1]["text"], said


def run_ranks(monkeypatch: pytest.MonkeyPatch, what: str) -> list[dict[str, Any]]:
    """What the two ranks of `failing_ranks` were told."""
    with runtime(monkeypatch) as directory:
        told = [directory / f"told-{number}" for number in range(2)]
        common = {"meeting": str(directory / "meeting"), "what": what}
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
        ranks = [
            fork("tests.batch.failing_ranks:run_rank", environment, rank=number, told=str(path), **common)
            for number, path in enumerate(told)
        ]
        try:
            eventually(lambda: all(map(gone, ranks)), timeout_s=300, what="the end of both ranks")
        finally:
            for pid in ranks:
                if not gone(pid):
                    kill(pid)
        return [json.loads(path.read_text()) for path in told]
