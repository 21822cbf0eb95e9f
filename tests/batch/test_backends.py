"""Owners of other kinds in a fetch or clear: one that blocks or fails keeps nobody, and what comes late changes nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import FetchFailed, ProtocolError, SyncTimeout, TransportUnavailable
from tests.batch.owners import fetched
from tests.support.rig import eventually, runtime
from trainer_adapters.batch import backends
from trainer_adapters.batch.client import clear_tasks
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.parts import entry_of
from trainer_adapters.batch.records import Entry, Owner, ShardId
from trainer_adapters.batch.store import Store

FAR = Owner("far", "odd://far")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with runtime(monkeypatch), Store(budget_bytes=1 << 20) as one:
        yield one


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has owners at odd:// served by the given functions."""

    def serve(**functions: Any) -> None:
        monkeypatch.setitem(sys.modules, "tests.batch.odd", SimpleNamespace(**functions))  # type: ignore[misc]
        monkeypatch.setitem(backends.BACKENDS, "odd", "tests.batch.odd")

    return serve


def far_entry(task_id: str = "theirs") -> Entry:
    return entry_of(ShardId(task_id, "k"), local_part(torch.ones(2)), FAR.id, digest=1)


def test_a_backend_that_blocks_ends_at_the_deadline_and_keeps_no_other_owner_waiting(
    store: Store, backend: Callable[..., None]
) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def fetch(wanted: Any, arrivals: Any, until: Any) -> None:
        go_on.wait(600)
        for entry in wanted[0][1]:
            arrivals.accept(entry.shard, local_part(torch.ones(2)))
        ended.set()

    def clear(asked: Any, until: Any) -> list[Any]:
        go_on.wait(600)
        return [[]]

    backend(fetch=fetch, clear=clear)
    (mine,) = store.put("mine", {"k": torch.zeros(2)})
    have: dict[ShardId, Any] = {}
    with pytest.raises(FetchFailed, match="1 of 2 shards") as raised:
        fetched([far_entry(), mine], FAR, store.owner, timeout_s=3, have=have)
    assert isinstance(raised.value.failures[0].error, SyncTimeout) and list(have) == [mine.shard]
    report = clear_tasks(["mine"], {FAR.id: FAR, store.owner.id: store.owner}, timeout_s=3)
    assert (report.cleared, [who for who, _ in report.failed]) == (1, [FAR.id])
    go_on.set()
    assert ended.wait(600) and list(have) == [mine.shard]


def test_whatever_a_backend_raises_fails_its_shards_with_a_typed_error(
    store: Store, backend: Callable[..., None]
) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("a bug of the library")

    backend(fetch=breaks, clear=breaks)
    (mine,) = store.put("mine", {"k": torch.zeros(2)})
    have: dict[ShardId, Any] = {}
    with pytest.raises(FetchFailed, match="ZeroDivisionError: a bug of the library") as raised:
        fetched([far_entry(), mine], FAR, store.owner, have=have)
    assert isinstance(raised.value.failures[0].error, ProtocolError) and list(have) == [mine.shard]
    ((who, error),) = clear_tasks(["theirs"], {FAR.id: FAR}, timeout_s=60).failed
    assert who == FAR.id and isinstance(error, ProtocolError)


def test_what_a_backend_neither_keeps_nor_fails_is_late(backend: Callable[..., None]) -> None:
    def fetch(wanted: Any, arrivals: Any, until: Any) -> None:
        first, *_ = wanted[0][1]
        arrivals.accept(first.shard, local_part(torch.ones(2)))

    backend(fetch=fetch)
    have: dict[ShardId, Any] = {}
    with pytest.raises(FetchFailed, match="1 of 2 shards"):
        fetched([far_entry("a"), far_entry("b")], FAR, have=have)
    assert [shard.task_id for shard in have] == ["a"]


def test_an_owner_of_an_unknown_kind_is_named() -> None:
    with pytest.raises(FetchFailed, match=r"'odd://far'; known are ipc://, tcp:// and ray://") as raised:
        fetched([far_entry()], FAR)
    assert isinstance(raised.value.failures[0].error, TransportUnavailable)


def test_a_fetch_that_is_cancelled_lets_its_backend_know(backend: Callable[..., None]) -> None:
    import asyncio

    told, begun = threading.Event(), threading.Event()

    def fetch(wanted: Any, arrivals: Any, until: Any) -> None:
        begun.set()
        eventually(lambda: until.left_s() == 0, "the word that nobody waits")
        told.set()

    backend(fetch=fetch)

    async def cancel() -> None:
        from trainer_adapters.batch.client import afetch_entries

        task = asyncio.create_task(afetch_entries([far_entry()], {FAR.id: FAR}, timeout_s=3600, have={}))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert told.wait(600)
