"""What every place for rows promises to who puts, fetches and clears: the embedded store, the one on Ray, TransferQueue.

The tests of each inherit these, and give `rows`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from inference_plugin.wire.errors import BatchError, FetchFailed, StoreFull
from tests.batch.owners import elsewhere
from tests.support.rig import eventually
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.ray_store import RayStore
from trainer_adapters.batch.status import BatchStatus
from trainer_adapters.batch.store import Store

ROWS: dict[str, Any] = {
    "bfloat16": torch.randn(3, 5).to(torch.bfloat16),
    "fp8": torch.randn(3, 700).to(torch.float8_e4m3fn),
    "bool": torch.tensor([[True], [False]]),
    "one number a row": torch.arange(7),
    "complex, lazily conjugated": torch.randn(2, 3, dtype=torch.complex64).conj(),
    "no bytes": torch.empty(4, 0, 3),
    "transposed": torch.randn(50, 40).t(),
    "every second": torch.arange(20_000)[::2].reshape(100, 100),
    "broadcast": torch.ones(1, 3).expand(5, 3),
    "rows of one shape": [torch.full((2, 2), float(i)) for i in range(3)],
    "rows of several lengths, one of them 0": [torch.randn(n, 3) for n in (4, 0, 2)],
    "nested": torch.nested.nested_tensor([torch.arange(3.0), torch.arange(900.0)], layout=torch.jagged),
    "long rows": [torch.randn(n) for n in (300_000, 5, 200_001)],
    "numpy": np.arange(12, dtype=np.int16).reshape(4, 3),
    "values": [None, True, 1, -0.5, "é\0", b"\xff", [1, ["a"]], {"k": [None]}],
    "with a gradient": torch.randn(2, 2, requires_grad=True),
}

NAMES = ["a/b:c d", "../../etc/passwd", "é\U0001f600\u2028", " ", "x" * 200, ":"]


class Rows(Protocol):
    """A place for rows. `budget_bytes`: of this process."""

    budget_bytes: int

    def put(self, task_id: str, data: Mapping[str, Any]) -> DistributedBatch:
        """Puts rows, and waits for room for a second at most; the REMOTE batch of what was put."""

    def clear(self, task_ids: Iterable[str]) -> None: ...

    def shards(self) -> int:
        """What is held by this process."""


class StoreRows:
    """A store of ours as a place for rows."""

    def __init__(self, store: Store | RayStore, budget_bytes: int) -> None:
        self._store, self.budget_bytes = store, budget_bytes

    def put(self, task_id: str, data: Mapping[str, Any]) -> DistributedBatch:
        return DistributedBatch.of_entries(self._store.put(task_id, data, timeout_s=1.0), [self._store.owner])

    def clear(self, task_ids: Iterable[str]) -> None:
        self._store.clear(task_ids)

    def shards(self) -> int:
        return self._store.stats().shards


def each(rows: Any) -> list[Any]:
    """Rows one by one, comparable: bytes of tensors (NaN and fp8 have no equality), and plain values."""
    if isinstance(rows, np.ndarray):
        rows = torch.from_numpy(rows)
    listed = list(rows.unbind()) if isinstance(rows, torch.Tensor) else list(rows)
    return [comparable(row) if isinstance(row, torch.Tensor) else row for row in listed]


def comparable(row: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    row = row.detach().resolve_conj().contiguous()
    return row.dtype, row.shape, row.reshape(-1).view(torch.uint8).numpy().tobytes()


def pulled(batch: DistributedBatch) -> DistributedBatch:
    """The batch as a process of another host has it."""
    owners = [elsewhere(owner) for owner in batch.owners.values()]
    return DistributedBatch.of_entries(batch.entries(), owners)


class RowPromises:
    @pytest.mark.parametrize("name", ROWS)
    def test_rows_of_every_kind_come_back_one_by_one_byte_for_byte(self, rows: Rows, name: str) -> None:
        batch = rows.put("t", {"k": ROWS[name]})
        wanted = each(ROWS[name])
        assert (batch.status, len(batch), batch.keys()) == (BatchStatus.REMOTE, len(wanted), ("k",))
        far = pulled(batch)
        assert each(batch.fetch().rows("k")) == wanted
        assert each(far.fetch().rows("k")) == wanted

    @pytest.mark.parametrize("name", NAMES)
    def test_names_of_any_characters_are_kept_apart(self, rows: Rows, name: str) -> None:
        first = rows.put(name, {name: [1, 2], name + "-": [3, 4]})
        second = rows.put(name + "-", {name: [5, 6]})
        first.fetch()
        assert (first[name], first[name + "-"], second.fetch()[name]) == ([1, 2], [3, 4], [5, 6])
        third = rows.put(name + "/", {name: [7]})
        rows.clear([name, name + "-"])
        assert third.fetch()[name] == [7]

    def test_what_is_no_row_is_refused_by_name_and_nothing_is_stored(self, rows: Rows) -> None:
        with pytest.raises(BatchError, match="a set is not a plain value"):
            rows.put("t", {"good": torch.ones(2, 3), "bad": [{"x"}, {"y"}]})
        assert rows.shards() == 0

    def test_the_memory_of_the_caller_is_not_kept(self, rows: Rows) -> None:
        tensor = torch.arange(1000).reshape(2, 500)
        batch = rows.put("t", {"k": tensor})
        tensor.zero_()
        assert torch.equal(batch.fetch()["k"], torch.arange(1000).reshape(2, 500))

    def test_keys_that_come_later_join_the_task_and_are_cleared_with_it(self, rows: Rows) -> None:
        first = rows.put("t", {"a": torch.arange(2)})
        later = rows.put("t", {"b": torch.arange(2) + 5}).select(["b"])
        assert later.fetch()["b"].tolist() == [5, 6] and first.fetch()["a"].tolist() == [0, 1]
        rows.clear(["t"])
        assert rows.shards() == 0

    def test_rows_that_were_put_again_are_the_later_ones_and_the_earlier_are_said_to_be_replaced(
        self, rows: Rows
    ) -> None:
        first = rows.put("t", {"k": torch.zeros(2, 100)})
        held = rows.shards()
        second = rows.put("t", {"k": torch.ones(2, 300)})
        assert rows.shards() == held
        assert torch.equal(second.fetch()["k"], torch.ones(2, 300))
        for batch in (first, pulled(first)):
            with pytest.raises(FetchFailed, match="it was replaced: other rows were put under its name"):
                batch.fetch()
            assert batch.status is BatchStatus.REMOTE

    def test_a_clear_may_be_repeated_and_leaves_other_tasks_alone(self, rows: Rows) -> None:
        kept, gone = rows.put("kept", {"k": [1, 2]}), rows.put("gone", {"k": [3, 4]})
        rows.clear(["gone", "never"])
        rows.clear(["gone"])
        with pytest.raises(FetchFailed, match="it was cleared"):
            gone.fetch()
        assert kept.fetch()["k"] == [1, 2]
        rows.clear(["kept"])
        assert rows.shards() == 0

    def test_rows_that_were_fetched_stay_when_their_task_is_put_again_or_cleared(self, rows: Rows) -> None:
        batch = rows.put("t", {"k": torch.zeros(2, 1000)}).fetch()
        rows.put("t", {"k": torch.ones(2, 1000)})
        rows.clear(["t"])
        for i in range(10):  # nothing of what comes later is written over them
            rows.put(f"later{i}", {"k": torch.ones(2, 1000)})
        assert not batch["k"].any()

    def test_a_fetch_that_fails_in_part_names_the_rest_and_the_batch_stays_remote(self, rows: Rows) -> None:
        batches = [rows.put(f"t{i}", {"k": [i]}) for i in range(4)]
        rows.clear(["t1"])
        whole = DistributedBatch.concat(batches)
        with pytest.raises(FetchFailed, match="1 of 4 shards could not be fetched") as raised:
            whole.fetch()
        assert len(raised.value.failures) == 1 and whole.status is BatchStatus.REMOTE
        rest = DistributedBatch.concat([batches[0], *batches[2:]])
        assert rest.fetch()["k"] == [0, 2, 3]

    def test_puts_of_many_threads_are_all_kept(self, rows: Rows) -> None:
        batches: dict[str, DistributedBatch] = {}

        def put(number: int) -> None:
            for i in range(5):
                batches[f"t{number}.{i}"] = rows.put(f"t{number}.{i}", {"k": torch.full((2, 50), 10 * number + i)})

        threads = [threading.Thread(target=put, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(4):
            for i in range(5):
                assert batches[f"t{number}.{i}"].fetch()["k"].eq(10 * number + i).all()

    def test_metadata_that_travelled_fetches_the_rows_in_any_order(self, rows: Rows) -> None:
        data = {"ids": [torch.arange(3), torch.arange(9)], "reward": torch.tensor([0.5, 1.5])}
        batch = DistributedBatch.from_bytes(rows.put("t", data).to_bytes()).reorder([1, 0]).fetch()
        assert [row.tolist() for row in batch.rows("ids")] == [list(range(9)), list(range(3))]
        assert batch["reward"].tolist() == [1.5, 0.5]

    def test_rows_larger_than_the_whole_budget_are_refused(self, rows: Rows) -> None:
        large = torch.zeros(1, rows.budget_bytes + 4, dtype=torch.uint8)
        with pytest.raises(StoreFull, match=f"the whole budget is {rows.budget_bytes}"):
            rows.put("t", {"small": torch.ones(1), "large": large})
        assert rows.shards() == 0

    def test_a_put_without_room_says_so_and_works_once_there_is_room(self, rows: Rows) -> None:
        row = torch.zeros(1, rows.budget_bytes * 3 // 4, dtype=torch.uint8)
        rows.put("old", {"k": row})
        held = rows.shards()
        with pytest.raises(StoreFull, match=f"needs {row.numel()} bytes, and within 1 s no room came free"):
            rows.put("new", {"k": row})
        assert rows.shards() == held
        done: list[DistributedBatch] = []
        rows.clear(["old"])
        eventually(lambda: rows.shards() == 0, "the end of the old rows")
        done.append(rows.put("new", {"k": row + 1}))
        assert done[0].fetch()["k"].all()
