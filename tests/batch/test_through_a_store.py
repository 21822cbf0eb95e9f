"""Batches on the store and client that move bytes between processes: the same rows as in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from inference_plugin.wire.errors import WeightwireError
from tests.batch.test_same_rows import KEYS, OPERATIONS, Three, cut_rows, made_rows, put, rows_of
from trainer_adapters.batch.batch import BatchStatus, DistributedBatch
from trainer_adapters.batch.nested import localize, remotize
from trainer_adapters.batch.records import ClearReport
from trainer_adapters.batch.store import Store


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        with Store(budget_bytes=64 << 20) as one, Store(budget_bytes=64 << 20) as other:
            yield [one, other]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=cut_rows(), operations=OPERATIONS)
def test_any_operations_give_the_same_rows_local_and_in_stores(
    stores: list[Any], made: tuple[int, int, dict[str, list[int]]], operations: list[tuple[str, int]]
) -> None:
    count, seed, cuts = made
    plain, values = made_rows(count, seed)
    three = Three(plain, DistributedBatch(values), put(stores, values, cuts))
    tasks = three.remote.task_ids
    try:
        for operation, argument in operations:
            three.apply(operation, argument)
            three.check()
        assert rows_of(three.remote.fetch()) == three.plain == rows_of(three.local)
    finally:
        for store in stores:
            store.clear(tasks)


def test_a_batch_through_stores_and_back(stores: list[Any]) -> None:
    plain, values = made_rows(10, 3)
    remote = put(stores, values, {key: [4] for key in KEYS})
    assert rows_of(remote.fetch()) == plain and remote.status is BatchStatus.LOCAL
    advantages = DistributedBatch({"adv": torch.arange(10.0)})
    both = remote.select(["ids"]).union(advantages)
    again: dict[str, Any] = localize(remotize({"b": [both], "t": torch.tensor(2.5)}, stores[0], "nested"))
    assert again["t"].item() == 2.5 and again["b"][0]["adv"].tolist() == list(range(10))
    assert rows_of(again["b"][0].select(["ids"])) == [{"ids": row["ids"]} for row in plain]
    report = remote.clear()
    assert report == ClearReport(cleared=len(remote.task_ids)) and remote.clear().unknown == report.cleared
    assert rows_of(remote) == plain, "what was fetched stays"
    assert again["b"][0].clear().cleared == 1 and stores[0].clear(["nested"]).cleared == 1


def test_a_batch_of_cleared_tasks_says_so_and_stays_remote(stores: list[Any]) -> None:
    _, values = made_rows(3, 4)
    batch = put(stores, values, {key: [1] for key in KEYS})
    stores[1].clear(batch.task_ids)
    with pytest.raises(WeightwireError, match="cleared") as raised:
        asyncio.run(batch.afetch())
    assert type(raised.value).__name__ == "FetchFailed"
    assert {failure.owner for failure in raised.value.failures} == {stores[1].owner.id}
    assert batch.status is BatchStatus.REMOTE
    alive = batch.reorder([0])
    assert len(alive.fetch()) == 1
    stores[0].clear(batch.task_ids)
