"""What every store promises, whatever its rows lie in: each store's tests inherit these, and give a `store`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import BatchError, FetchFailed, ProtocolError, StoreFull
from tests.batch.owners import as_bytes, elsewhere, fetched, rows_of
from tests.batch.row_promises import ROWS, RowPromises, Rows, StoreRows
from tests.support.rig import eventually
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.client import clear_tasks
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.ray_store import RayStore
from trainer_adapters.batch.records import ShardId, VersionSpan
from trainer_adapters.batch.store import Store

AnyStore = Store | RayStore

SMALL = 64_000
"""Bytes of the budget of `small`."""


def taken_bytes(store: AnyStore) -> int:
    """What counts against the budget."""
    if isinstance(store, Store):
        return store.taken_bytes
    numbers = store.ask("numbers")
    return int(numbers.nbytes + numbers.reserved)


def waiting_puts(store: AnyStore) -> int:
    return len(store.waiting) if isinstance(store, Store) else int(store.ask("numbers").waiting)


class StorePromises(RowPromises):
    """`store` has room for everything, `small` a budget of `SMALL` bytes. Both are empty."""

    @pytest.fixture
    def rows(self, store: AnyStore) -> Rows:
        return StoreRows(store, store.stats().budget_bytes)

    @pytest.mark.parametrize("name", ROWS)
    def test_rows_of_every_kind_come_back_byte_for_byte_in_every_way(self, store: AnyStore, name: str) -> None:
        (entry,) = store.put("t", {"k": ROWS[name]}, VersionSpan(2, 5))
        wanted = as_bytes(local_part(ROWS[name]))
        assert as_bytes(store.get(entry.shard)) == wanted
        assert as_bytes(fetched([entry], store.owner)[entry.shard]) == wanted
        assert as_bytes(fetched([entry], elsewhere(store.owner))[entry.shard]) == wanted
        assert (entry.versions, entry.owner) == (VersionSpan(2, 5), store.owner.id)

    @pytest.mark.parametrize("task_id", ["a/b:c d", "../../etc/passwd", "é\U0001f600\u2028", "\0", " ", "x" * 512, ":"])
    def test_ids_of_any_characters_are_kept_apart(self, store: AnyStore, task_id: str) -> None:
        entries = [*store.put(task_id, {"k:/": [1], task_id: [2]}), *store.put(task_id[:-1] + "-", {"k:/": [3]})]
        have = fetched(entries, store.owner)
        assert [have[entry.shard].values for entry in entries] == [[1], [2], [3]]
        assert (store.clear([task_id]).cleared, store.stats().tasks) == (1, 1)

    @pytest.mark.parametrize(
        ("task_id", "data", "text"),
        [
            ("t", {}, "no keys"),
            ("t", {"a": [1, 2], "b": torch.zeros(3)}, "different numbers of rows: 'a': 2, 'b': 3"),
            ("t", {"a": object()}, "is not rows"),
            ("t", {"a": [object()]}, "not a plain value"),
            ("", {"a": [1]}, "task id has 0 characters"),
            ("t" * 513, {"a": [1]}, "task id has 513 characters"),
            ("t", {"": [1]}, "key has 0 characters"),
            ("\ud800", {"a": [1]}, "surrogate"),
        ],
    )
    def test_what_can_t_be_held_is_refused_and_nothing_is_stored(
        self, store: AnyStore, task_id: str, data: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(BatchError, match=text):
            store.put(task_id, {"first": torch.zeros(3)} | data if text == "is not rows" else data)
        assert (store.stats().shards, store.stats().nbytes) == (0, 0)
        assert taken_bytes(store) == 0

    def test_a_later_key_of_a_task_has_the_tasks_number_of_rows(self, store: AnyStore) -> None:
        store.put("t", {"a": [1, 2]})
        with pytest.raises(BatchError, match="task 't' has 2 rows of 'a', but was put 3 rows of 'b'"):
            store.put("t", {"b": [1, 2, 3]})
        store.put("t", {"b": torch.zeros(2, 9)})
        assert (store.stats().shards, taken_bytes(store)) == (2, store.stats().nbytes)

    def test_the_caller_s_memory_is_not_kept(self, store: AnyStore) -> None:
        tensor, values = torch.arange(1000), [[1], [2]]
        entries = store.put("t", {"a": tensor.reshape(2, 500), "b": values})
        tensor.zero_()
        values[0].append(3)
        assert torch.equal(store.get(entries[0].shard).tensor, torch.arange(1000).reshape(2, 500))
        assert store.get(entries[1].shard).values == [[1], [2]]

    def test_numbers_are_right_after_a_shard_was_put_again(self, store: AnyStore) -> None:
        (first,) = store.put("t", {"a": torch.zeros(2, 100)})
        (second,) = store.put("t", {"a": torch.ones(2, 300)})
        stats = store.stats()
        assert (stats.tasks, stats.shards, stats.nbytes, stats.leased_bytes) == (1, 1, 2400, 0)
        assert taken_bytes(store) == 2400
        assert torch.equal(fetched([second], store.owner)[second.shard].tensor, torch.ones(2, 300))
        for owner in (store.owner, elsewhere(store.owner)):
            with pytest.raises(FetchFailed, match="it was replaced: other rows were put under its name"):
                fetched([first], owner)

    def test_clear_is_idempotent_and_counts(self, store: AnyStore) -> None:
        for i in range(4):
            store.put(f"t{i}", rows_of(f"t{i}"))
        report = store.clear(["t0", "t1", "t1", "never"])
        assert (report.cleared, report.unknown, report.failed) == (2, 1, ())
        report = store.clear(["t0", "t1"])
        assert (report.cleared, report.unknown) == (0, 2)
        assert (store.stats().tasks, store.stats().shards) == (2, 8)
        with pytest.raises(ProtocolError, match="'t0':'text' was cleared"):
            store.get(ShardId("t0", "text"))
        with pytest.raises(ProtocolError, match="'never':'text' is unknown"):
            store.get(ShardId("never", "text"))
        with pytest.raises(BatchError, match="a list of task ids, not the text 't3'"):
            store.clear("t3")
        assert store.stats().tasks == 2
        store.clear([f"t{i}" for i in range(4)])
        assert (store.stats().shards, store.stats().nbytes, taken_bytes(store)) == (0, 0, 0)

    def test_puts_of_many_threads_are_all_kept(self, store: AnyStore) -> None:
        entries: list[Any] = []

        def put(number: int) -> None:
            for i in range(30):
                entries.extend(store.put(f"t{number}.{i}", rows_of(f"t{number}.{i}")))

        threads = [threading.Thread(target=put, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        have = fetched(entries, store.owner)
        for number in range(6):
            for i in range(30):
                for key, value in rows_of(f"t{number}.{i}").items():
                    assert as_bytes(have[ShardId(f"t{number}.{i}", key)]) == as_bytes(local_part(value))

    def test_who_has_fetched_rows_keeps_them_when_they_are_replaced_and_cleared(self, store: AnyStore) -> None:
        (first,) = store.put("t", {"a": torch.zeros(2, 1000)})
        have = fetched([first], store.owner)
        (second,) = store.put("t", {"a": torch.ones(2, 1000)})
        assert not have[first.shard].tensor.any() and fetched([second], store.owner)[second.shard].tensor.all()
        store.clear(["t"])
        for i in range(20):  # nothing of what comes later is written over it
            store.put(f"later{i}", {"a": torch.ones(2, 1000)})
        assert not have[first.shard].tensor.any()

    def test_a_fetch_that_fails_in_part_keeps_what_arrived_and_names_the_rest(self, store: AnyStore) -> None:
        entries = [entry for i in range(4) for entry in store.put(f"t{i}", {"a": [i]})]
        store.clear(["t1"])
        have: dict[ShardId, LocalPart] = {}
        with pytest.raises(FetchFailed, match="1 of 4 shards could not be fetched") as raised:
            fetched(entries, store.owner, have=have)
        (failure,) = raised.value.failures
        assert (failure.task_id, failure.key, failure.owner) == ("t1", "a", store.owner.id)
        assert isinstance(failure.error, ProtocolError) and "it was cleared" in str(failure.error)
        assert {shard.task_id: part.values for shard, part in have.items()} == {"t0": [0], "t2": [2], "t3": [3]}

    def test_a_batch_of_its_rows_is_fetched_with_the_same_rows_and_cleared(self, store: AnyStore) -> None:
        entries = [entry for i in range(3) for entry in store.put(f"t{i}", rows_of(f"t{i}"), VersionSpan(i, i + 1))]
        batch = DistributedBatch.from_bytes(DistributedBatch.of_entries(entries, [store.owner]).to_bytes())
        batch = batch.reorder([8, 0, 4]).fetch()
        assert batch["text"] == [rows_of(f"t{task}")["text"][row] for task, row in ((2, 2), (0, 0), (1, 1))]
        wanted = torch.stack([rows_of(f"t{task}")["tokens"][row] for task, row in ((2, 2), (0, 0), (1, 1))])
        assert torch.equal(batch["tokens"], wanted) and batch.versions == VersionSpan(0, 3)
        report = batch.clear()
        assert (report.cleared, report.unknown, report.failed, store.stats().shards) == (3, 0, (), 0)
        again = clear_tasks(["t0", "never"], {store.owner.id: store.owner}, timeout_s=60)
        assert (again.cleared, again.unknown, again.failed) == (0, 2, ())

    def test_a_task_is_in_the_store_until_it_is_cleared(self, store: AnyStore) -> None:
        assert "t" not in store
        store.put("t", {"a": [1]})
        assert "t" in store
        assert store.held(["u", "t"]) == store.held({"t"}) == {"t"}
        store.clear(["t"])
        assert "t" not in store

    def test_a_put_larger_than_the_budget_is_refused_at_once_with_both_numbers(self, small: AnyStore) -> None:
        with pytest.raises(StoreFull, match=f"task 'big' has 64004 bytes, the whole budget is {SMALL}") as raised:
            small.put("big", {"k": torch.zeros(16_001)}, timeout_s=3600)
        assert "budget_bytes" in raised.value.hint
        assert small.stats().shards == 0

    def test_a_put_waits_for_room_and_goes_on_when_a_task_is_cleared(self, small: AnyStore) -> None:
        small.put("old", {"k": torch.zeros(1, 15_000)})
        order: list[str] = []

        def put(name: str, items: int) -> None:
            small.put(name, {"k": torch.zeros(1, items)}, timeout_s=60)
            order.append(name)

        big = threading.Thread(target=put, args=("big", 14_000))
        big.start()
        eventually(lambda: waiting_puts(small) == 1, "the large put waits")
        little = threading.Thread(target=put, args=("little", 500))
        little.start()
        eventually(lambda: waiting_puts(small) == 2, "the small put waits")  # there is room, but it isn't its turn
        with pytest.raises(StoreFull, match=r"of 64000 bytes 60000 are held.*3 puts wait"):
            small.put("impatient", {"k": [1]})
        assert order == []
        small.clear(["old"])
        big.join(600)
        little.join(600)
        assert sorted(order) == ["big", "little"] and small.stats().tasks == 2
        assert taken_bytes(small) == small.stats().nbytes == 58_000

    def test_a_put_that_waits_in_vain_says_so_and_leaves_nothing(self, small: AnyStore) -> None:
        small.put("old", {"k": torch.zeros(1, 15_000)})
        with pytest.raises(StoreFull, match=r"'new' needs 8000 bytes, and within 0\.05 s no room came free"):
            small.put("new", {"k": torch.zeros(1, 2000)}, timeout_s=0.05)
        assert (taken_bytes(small), waiting_puts(small), "new" in small) == (60_000, 0, False)

    def test_a_put_that_waits_ends_when_the_store_closes(self, small: AnyStore) -> None:
        small.put("old", {"k": torch.zeros(1, 15_000)})
        failed: list[BaseException] = []

        def put() -> None:
            try:
                small.put("new", {"k": torch.zeros(1, 15_000)}, timeout_s=3600)
            except ProtocolError as error:
                failed.append(error)

        waiting = threading.Thread(target=put)
        waiting.start()
        eventually(lambda: waiting_puts(small) == 1, "the put waits")
        small.close()
        small.close()
        waiting.join(600)
        assert "is closed" in str(failed[0])
        with pytest.raises(ProtocolError, match="is closed"):
            small.put("later", {"k": [1]})
