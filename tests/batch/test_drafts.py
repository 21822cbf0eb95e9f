"""Rows that are built in a store's memory: a put takes them as they lie, and no write after it reaches a reader."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.errors import BatchError, ConfigError, FetchFailed, ProtocolError, StoreFull
from tests.batch.owners import elsewhere, fetched
from tests.batch.store_promises import waiting_puts
from tests.batch.test_killed_puts import holders
from tests.support.engines import segments_of
from tests.support.rig import eventually, fork, kill, runtime
from trainer_adapters.batch.records import Entry
from trainer_adapters.batch.store import Store

ITEMS = 100_000
BUDGET_BYTES = 8 * ITEMS
"""Of `full`: as many bytes as one draft has. A copy would not fit beside it."""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def full(directory: Path) -> Iterator[Store]:
    with Store(budget_bytes=BUDGET_BYTES) as store:
        yield store


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    with Store(budget_bytes=64 << 20) as store:
        yield store


def built(store: Store) -> torch.Tensor:
    rows = store.empty((ITEMS,), dtype=torch.int64)
    rows.copy_(torch.arange(ITEMS))
    return rows


def values(store: Store, entry: Entry) -> list[Any]:
    """The values of a shard, as a reader of this host gets them, one of another host, and the store itself."""
    parts = [fetched([entry], owner)[entry.shard] for owner in (store.owner, elsewhere(store.owner))]
    return [part.tensor.flatten().tolist() for part in (*parts, store.get(entry.shard))]


@pytest.mark.parametrize(
    "rows_in",
    [
        lambda rows: [rows],
        lambda rows: list(rows.split([ITEMS // 4, 0, ITEMS - ITEMS // 4])),
        lambda rows: rows.view(10, -1),
        lambda rows: list(rows.view(10, -1).unbind()),
        lambda rows: torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 7, ITEMS])),
    ],
    ids=["one row", "split", "dense", "unbound", "nested"],
)
def test_a_put_of_rows_that_were_built_in_the_store_copies_nothing(full: Store, rows_in: Any) -> None:
    rows = built(full)
    (entry,) = full.put("t", {"k": rows_in(rows)})
    assert full.stats().nbytes == BUDGET_BYTES
    assert values(full, entry) == [list(range(ITEMS))] * 3


@pytest.mark.parametrize(
    "rows_in",
    [lambda rows: [rows[1:]], lambda rows: [rows[:-1]], lambda rows: [rows[5:], rows[:5]], lambda rows: [rows, rows]],
    ids=["not its beginning", "not its end", "in another order", "twice"],
)
def test_rows_that_are_not_all_of_a_draft_in_order_are_copied(full: Store, store: Store, rows_in: Any) -> None:
    with pytest.raises(StoreFull):
        full.put("t", {"k": rows_in(built(full))})
    rows = built(store)
    (entry,) = store.put("t", {"k": rows_in(rows)})
    rows.zero_()
    wanted = torch.cat(rows_in(torch.arange(ITEMS))).tolist()
    assert values(store, entry) == [wanted] * 3


def test_what_is_written_after_the_put_is_seen_by_the_writer_alone(store: Store) -> None:
    rows = built(store)
    (entry,) = store.put("t", {"k": [rows]})
    before = fetched([entry], store.owner)[entry.shard]
    rows.fill_(-1)
    assert before.tensor.flatten().tolist() == list(range(ITEMS))
    assert values(store, entry) == [list(range(ITEMS))] * 3
    assert rows.unique().tolist() == [-1]


def test_a_draft_serves_one_shard_and_a_second_put_of_it_copies(store: Store) -> None:
    rows = built(store)
    first, second = store.put("t", {"a": [rows], "b": [rows]})
    (third,) = store.put("again", {"a": [rows]})
    assert values(store, first) == values(store, second) == values(store, third) == [list(range(ITEMS))] * 3
    assert store.clear(["t"]).cleared == 1
    assert values(store, third) == [list(range(ITEMS))] * 3


def test_a_draft_keeps_its_memory_when_its_rows_were_cleared(full: Store) -> None:
    rows = built(full)
    (entry,) = full.put("t", {"k": [rows]})
    full.clear(["t"])
    with pytest.raises(StoreFull):
        full.put("other", {"k": torch.zeros(ITEMS, dtype=torch.int64)})
    with pytest.raises(FetchFailed, match="cleared"):
        fetched([entry], full.owner)
    assert rows.tolist() == list(range(ITEMS))
    assert (full.stats().nbytes, full.stats().leased_bytes) == (0, BUDGET_BYTES)


@pytest.mark.parametrize("is_put", [True, False])
def test_the_end_of_a_draft_makes_room_for_a_put_that_waits(full: Store, is_put: bool) -> None:
    rows = [built(full)]
    if is_put:
        full.put("t", {"k": rows})
        full.clear(["t"])
    done: list[tuple[Entry, ...]] = []
    other = torch.ones(ITEMS, dtype=torch.int64)
    waiting = threading.Thread(target=lambda: done.append(full.put("other", {"k": other}, timeout_s=300)))
    waiting.start()
    eventually(lambda: waiting_puts(full), "a put that waits")
    assert not done
    rows.clear()
    gc.collect()
    waiting.join(600)
    assert values(full, done[0][0]) == [other.tolist()] * 3


def test_a_put_that_fails_leaves_the_draft_to_the_next_one(full: Store) -> None:
    rows = built(full)
    with pytest.raises(StoreFull):
        full.put("t", {"k": [rows], "more": [torch.zeros(1)]})
    (entry,) = full.put("t", {"k": [rows]})
    assert values(full, entry) == [list(range(ITEMS))] * 3


def test_rows_that_do_not_fit_their_task_are_refused_and_stay_the_callers(store: Store) -> None:
    store.put("t", {"other": [1, 2]})
    rows = built(store)
    with pytest.raises(BatchError, match="2 rows"):
        store.put("t", {"k": [rows]})
    assert rows.tolist() == list(range(ITEMS)) and store.stats().shards == 1
    (entry,) = store.put("t", {"k": list(rows.split([3, ITEMS - 3]))})
    assert values(store, entry) == [list(range(ITEMS))] * 3
    del rows
    store.clear(["t"])
    eventually(lambda: not store.stats().leased_bytes, "the end of the leases")


def test_a_child_that_ends_takes_nothing_from_its_parents_draft(full: Store) -> None:
    rows = [built(full)]
    if not (child := os.fork()):
        rows.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(StoreFull):
        full.empty((1,), dtype=torch.int64)
    (entry,) = full.put("t", {"k": rows})
    assert values(full, entry) == [list(range(ITEMS))] * 3


def test_an_owner_killed_before_the_put_leaves_nothing(directory: Path) -> None:
    told = directory / "told"
    pid = fork("tests.batch.dying_owner:draft", {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}, told=str(told))
    eventually(told.exists, "the draft")
    segments = set(segments_of(psutil.Process(pid)))
    assert segments and holders(segments) == [pid]
    kill(pid)
    assert not holders(segments)


def test_what_no_store_can_hold_is_refused(store: Store) -> None:
    with pytest.raises(StoreFull, match="whole budget"):
        store.empty((1 << 40,), dtype=torch.int64)
    with pytest.raises(ConfigError, match="shape"):
        store.empty((-1,), dtype=torch.int64)
    with pytest.raises(BatchError):
        store.empty((1,), dtype=torch.quint8)
    nothing = store.empty((0, 5), dtype=torch.float32)
    (entry,) = store.put("t", {"k": [nothing, torch.ones(1, 5)]})
    assert entry.lengths == (0, 1)
    store.close()
    with pytest.raises(ProtocolError, match="closed"):
        store.empty((1,), dtype=torch.int64)


def test_a_draft_outlives_its_store(directory: Path) -> None:
    with Store(budget_bytes=BUDGET_BYTES) as store:
        rows = built(store)
    with pytest.raises(ProtocolError, match="closed"):
        store.put("t", {"k": [rows]})
    assert rows.tolist() == list(range(ITEMS))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.bool, torch.int16, torch.bfloat16, torch.float64]),
)
def test_entries_and_rows_are_those_of_a_put_that_copies(lengths: list[int], dtype: torch.dtype) -> None:
    with runtime(pytest.MonkeyPatch()), Store(budget_bytes=1 << 20) as store:
        plain = torch.arange(sum(lengths)).to(dtype)
        rows = store.empty((len(plain),), dtype=dtype)
        rows.copy_(plain)
        (by_copy,) = store.put("t", {"k": list(plain.split(lengths))})
        (in_place,) = store.put("t", {"k": list(rows.split(lengths))})
        assert in_place == by_copy
        assert torch.equal(fetched([in_place], store.owner)[in_place.shard].tensor.flatten(), plain)
