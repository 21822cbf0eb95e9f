"""Times, counts and sizes that can't be meant are refused by typed errors, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import ArgumentError, BatchError, ConfigError, StoreFull
from tests.batch.owners import MIB
from tests.support.rig import runtime
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.client import clear_tasks, fetch_entries
from trainer_adapters.batch.nested import localize, remotize
from trainer_adapters.batch.ranks import RankBatch
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import RolloutWorker
from trainer_adapters.batch.store import Store


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(budget_bytes=MIB) as one:
        yield one


NO_TIMES: list[Any] = [float("nan"), -1, float("inf"), "5", None, True, 1e12]


@pytest.mark.parametrize("wrong", NO_TIMES, ids=repr)
def test_a_time_limit_that_is_none_is_refused_everywhere(store: Store, wrong: Any) -> None:
    entries = store.put("t", {"k": torch.ones(2)})
    batch = DistributedBatch.of_entries(entries, [store.owner])
    owners = {store.owner.id: store.owner}

    async def never(task_id: str, payload: Any) -> dict[str, Any]:
        return {}

    with RolloutPool() as pool:
        calls: list[Any] = [
            lambda: store.put("u", {"k": [1]}, timeout_s=wrong),
            lambda: batch.fetch(timeout_s=wrong),
            lambda: asyncio.run(batch.afetch(timeout_s=wrong)),
            lambda: batch.clear(timeout_s=wrong),
            lambda: fetch_entries(entries, owners, timeout_s=wrong, have={}),
            lambda: clear_tasks(["t"], owners, timeout_s=wrong),
            lambda: localize(batch, timeout_s=wrong),
            lambda: remotize({"a": torch.ones(1)}, store, "v", timeout_s=wrong),
            lambda: pool.next_batch(1, wrong),
            lambda: asyncio.run(pool.anext_batch(1, wrong)),
            lambda: RolloutWorker(never, slots=1, store=store, put_timeout_s=wrong),
        ]
        if wrong is not None:
            calls += [
                lambda: pool.submit("t", 1, deadline_s=wrong),
                lambda: RolloutPool(silence_s=wrong),
                lambda: RolloutWorker(never, slots=1, store=store, silence_s=wrong),
            ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"seconds"):
                call()
        assert (store.stats().tasks, pool.stats().submitted) == (1, 0)


@pytest.mark.parametrize("wrong", [0.5, "1", float("nan"), -1, True], ids=repr)
def test_a_count_that_is_none_is_refused_everywhere(store: Store, wrong: Any) -> None:
    with RolloutPool() as pool:
        for call in (
            lambda: pool.next_batch(wrong, 0),
            lambda: pool.next_batch(1, 0, max_staleness=wrong),
            lambda: pool.set_version(wrong),
            lambda: RolloutWorker(print, slots=wrong, store=store),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError, match="give a whole number"):
                call()


def test_arguments_of_another_kind_are_refused_where_they_are_given(store: Store) -> None:
    """Not later, by the process that reads the rows or runs the task."""
    wrong: Any
    rows = {"k": [1]}
    for wrong in (3, (3, 3), "3"):
        with pytest.raises(BatchError, match=r"give a VersionSpan\(first, last\), or None"):
            store.put("t", rows, wrong)
    for wrong in (1.0, True, None, "1"):
        with pytest.raises(BatchError, match="need ints"):
            VersionSpan(wrong, wrong)
    for wrong in (7, b"t", None):
        with pytest.raises(BatchError, match=r"the task id .* not a text"):
            store.put(wrong, rows)
        with pytest.raises(BatchError, match=r"the key .* not a text"):
            store.put("t", {wrong: [1]})
    with pytest.raises(BatchError, match="the data of task 't' is a Tensor"):
        store.put("t", torch.ones(2))  # type: ignore[arg-type]
    batch = DistributedBatch({"k": torch.ones(2, 3)})
    refused: dict[str, Callable[[Any], Any]] = {
        "the tasks are a": store.put_tasks,
        "need a list of task ids": store.clear,
        "need a list of task": batch.without,
        "can't travel": lambda wrong: store.empty((2,), dtype=wrong),
        "unpadded takes": lambda wrong: batch.unpadded(wrong, "k"),
        "owners=|no owner": lambda wrong: DistributedBatch.of_entries((), wrong),
        "store=": lambda wrong: remotize(batch, wrong, "t"),
    }
    for words, call in refused.items():
        for wrong in (5, None, [1]):
            with pytest.raises(BatchError, match=words):
                call(wrong)
    for named in ({"address": 5}, {"name": None}):
        with pytest.raises(ValueError, match=r"5 is a int|use lower-case letters"):
            Store(budget_bytes=1, **named)  # type: ignore[arg-type]
    for words, arguments in {
        "batch=5": (5, store),
        "store=5": (None, 5),
        "init_process_group first": (None, store),
    }.items():
        with pytest.raises(BatchError, match=words):
            RankBatch(*arguments, by="k")  # type: ignore[arg-type]
    with RolloutPool() as pool:
        for named in ({"generate": None}, {"pool": pool}, {"store": None}):
            arguments: dict[str, Any] = {"generate": print, "slots": 1, "store": store} | named
            with pytest.raises(ArgumentError, match=f"^{next(iter(named))}="):
                RolloutWorker(**arguments)
        with pytest.raises(BatchError, match="the task id 7 is a int, not a text"):
            pool.submit(7, None)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="callback=None"):
            pool.on_complete(None)  # type: ignore[arg-type]
        assert (store.stats().tasks, pool.stats().submitted) == (0, 0)


def test_a_function_that_is_not_async_fails_its_task_and_says_so(store: Store) -> None:
    def plain(task_id: str, payload: Any) -> dict[str, Any]:
        return {"k": [1]}

    unusable: Any = plain
    with (
        RolloutPool() as pool,
        RolloutWorker(unusable, slots=1, store=store),
        pytest.raises(BatchError, match=r"returned a dict, not an awaitable.*async def"),
    ):
        pool.submit("t", None).result(60)


def test_rows_that_no_memory_could_hold_are_refused_before_they_are_copied(store: Store) -> None:
    with pytest.raises(BatchError, match="has 1099511627776 rows; allowed are 1 to 1048576"):
        store.put("t", {"k": torch.ones(1).expand(1 << 40)})
    with pytest.raises(StoreFull, match="the whole budget is 1048576"):
        store.put("t", {"k": torch.ones(1, 1).expand(4, 1 << 38)})
    with Store(budget_bytes=1 << 50) as large, pytest.raises(BatchError, match="can't be copied to contiguous memory"):
        large.put("t", {"k": torch.ones(1, 1).expand(1 << 10, 1 << 36)})
    assert store.stats().tasks == 0 and store.taken_bytes == 0


def test_a_meta_tensor_has_no_values_to_put(store: Store) -> None:
    rows = [torch.empty(3, device="meta"), torch.empty(5, device="meta")]
    for value in (torch.nested.nested_tensor(rows, layout=torch.jagged, device="meta"), rows, rows[0]):
        with pytest.raises(BatchError, match="meta device has a shape, but no values"):
            store.put("t", {"k": value})


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), 1e9, "1000", True], ids=repr)
def test_a_budget_that_is_no_number_of_bytes_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget_bytes=.* give a whole number, 1 or more"):
        Store(budget_bytes=wrong)


def test_a_version_that_no_message_can_carry_is_refused() -> None:
    with pytest.raises(BatchError, match=r"versions 0 to 4611686018427387904 are no span"):
        VersionSpan(0, 1 << 62)
