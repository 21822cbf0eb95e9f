"""Turns nested results (dicts, lists and tuples with tensors and batches in them) into references and back.

worker      return remotize(result, store, task_id)      tensors stay here, references travel
controller  merge(results)                               metadata only
consumer    localize(result)                             one fetch for everything in it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import torch

from inference_plugin.wire.errors import BatchError
from trainer_adapters.batch.alignment import owners_by_id
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.boundary import TIMEOUT_S, client
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.fetching import refuse_in_event_loop
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Kind, Owner, ShardId, VersionSpan
from trainer_adapters.batch.rows import RowIndex
from trainer_adapters.batch.status import BatchStatus

__all__ = ["Putting", "RemoteTensor", "alocalize", "localize", "remotize"]


class Putting(Protocol):
    """What `remotize` needs of a `Store`."""

    @property
    def owner(self) -> Owner: ...

    def put(
        self, task_id: str, data: Mapping[str, Any], versions: VersionSpan | None = None, timeout_s: float = 0
    ) -> tuple[Entry, ...]: ...


class RemoteTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a result, held by its owner. It was put as the only row of its shard (a nested tensor: with its rows)."""

    entry: Entry
    owner: Owner


def remotize(
    result: Any,
    store: Putting,
    task_id: str | None = None,
    *,
    versions: VersionSpan | None = None,
    timeout_s: float = 0,
) -> Any:
    """`result` with its tensors and the rows of its LOCAL batches put into `store`, and references in their place.

    A batch becomes REMOTE: all of its rows as the one task `task_id`; or, without `task_id`, as the tasks that they came from,
    each of which must be there whole, so that what was computed from a rollout is cleared with it. A batch inside a dict, list
    or tuple is the task `task_id/path`. The tensors there are together the task `task_id`, with their paths as keys. Paths are
    JSON pointers (RFC 6901) without the first slash; the path of a tensor alone is ".". Everything else stays as it is.
    `versions` are the batch's own unless given. Raises `BatchError`, and what `store.put` raises; what was put before that
    stays in the store.
    """
    if not hasattr(store, "put"):
        raise BatchError(f"store={store!r:.300} is a {type(store).__name__}", hint="give it a Store(budget_bytes=...)")
    if isinstance(result, DistributedBatch):
        return _remote_batch(result, store, task_id, versions, timeout_s)
    remote = _remote_tensors(_tensors_of(result), store, task_id, versions, timeout_s)

    def reference(path: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return remote[path]
        if isinstance(leaf, DistributedBatch):
            own_task = None if task_id is None else f"{task_id}/{path}"
            return _remote_batch(leaf, store, own_task, versions, timeout_s)
        return leaf

    return _walk(result, reference)


def localize(result: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
    """`result` with the rows of everything in it here: references become tensors, REMOTE batches LOCAL copies.

    One fetch for all. Raises as `DistributedBatch.fetch`; then the batches in `result` keep what arrived for the next time.
    """
    refuse_in_event_loop()
    wanted = _Wanted(result)
    try:
        if entries := wanted.entries():
            client().fetch_entries(entries, wanted.owners, timeout_s=timeout_s, have=wanted.have)
    except BaseException:
        wanted.keep()
        raise
    return wanted.filled()


async def alocalize(result: Any, *, timeout_s: float = TIMEOUT_S) -> Any:
    """`localize` inside an event loop."""
    wanted = _Wanted(result)
    try:
        if entries := wanted.entries():
            await client().afetch_entries(entries, wanted.owners, timeout_s=timeout_s, have=wanted.have)
    except BaseException:
        wanted.keep()
        raise
    return wanted.filled()


def _tensors_of(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result by path. Raises `BatchError` for two things at one path."""
    paths: set[str] = set()
    tensors: dict[str, torch.Tensor] = {}

    def look(path: str, leaf: Any) -> None:
        if isinstance(leaf, (torch.Tensor, DistributedBatch)):
            if path in paths:
                raise BatchError(f"the result has two things at {path!r}", hint="use dict keys that differ as text")
            paths.add(path)
        if isinstance(leaf, torch.Tensor):
            tensors[path] = leaf

    _walk(result, look)
    return tensors


def _remote_tensors(
    tensors: Mapping[str, torch.Tensor],
    store: Putting,
    task_id: str | None,
    versions: VersionSpan | None,
    timeout_s: float,
) -> dict[str, RemoteTensor]:
    """Puts each tensor as the only row of its shard; a nested tensor, which has rows, as a task of its own."""
    if not tensors:
        return {}
    if task_id is None:
        raise BatchError("tensors outside of a batch have no task", hint="give remotize a task_id")
    one_row = {path: tensor.unsqueeze(0) for path, tensor in tensors.items() if not tensor.is_nested}
    entries = list(store.put(task_id, one_row, versions, timeout_s)) if one_row else []
    for path in tensors.keys() - one_row.keys():
        entries += store.put(f"{task_id}/{path}", {path: tensors[path]}, versions, timeout_s)
    return {entry.shard.key: RemoteTensor(entry, store.owner) for entry in entries}


def _remote_batch(
    batch: DistributedBatch, store: Putting, task_id: str | None, versions: VersionSpan | None, timeout_s: float
) -> DistributedBatch:
    if batch.status is not BatchStatus.LOCAL:
        return batch
    if not len(batch):
        return DistributedBatch({key: column.emptied() for key, column in batch.columns().items()})
    if task_id is not None:
        entries = store.put(task_id, dict(batch.items()), versions or batch.versions, timeout_s)
        return DistributedBatch.of_entries(entries, [store.owner])
    index, tasks = _whole_tasks(batch)
    by_key: dict[str, list[Entry]] = {key: [] for key in batch}
    order = index.part.argsort(kind="stable")
    starts = index.part[order].searchsorted(range(index.parts + 1))
    for number, task in enumerate(tasks):
        rows = order[starts[number] : starts[number + 1]]
        rows = rows[index.row[rows].argsort()]
        for entry in store.put(
            task.shard.task_id, dict(batch.reorder(rows).items()), versions or task.versions, timeout_s
        ):
            by_key[entry.shard.key].append(entry)
    columns = {key: Column.of_entries(key, entries, index) for key, entries in by_key.items()}
    return DistributedBatch(columns, owners=[store.owner], tags=batch.tags)


def _whole_tasks(batch: DistributedBatch) -> tuple[RowIndex, list[Entry]]:
    """Where each row comes from, and an entry for each task. Raises `BatchError` unless all rows of all tasks are there once."""
    record = batch.record()
    hint = "give remotize a task_id, for all rows of the batch as one task"
    entries = [entry for entry in record or () if entry is not None]
    if record is None or len(entries) != record.index.parts:
        raise BatchError("rows that were made here come from no task", hint=hint)
    index = record.index
    for number, entry in enumerate(entries):
        rows = index.row[index.part == number]
        if len(rows) != entry.rows or len(set(rows.tolist())) != entry.rows:
            raise BatchError(
                f"task {entry.shard.task_id!r} has {entry.rows} rows; the batch has {len(rows)} of them, or some twice",
                hint=hint,
            )
    return index, entries


class _Wanted:
    """Everything in a result that has to be fetched."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.owners: dict[str, Owner] = {}
        self.have: dict[ShardId, LocalPart] = {}
        self._batches: list[DistributedBatch] = []
        self._tensors: list[RemoteTensor] = []
        _walk(result, self._found)

    def entries(self) -> list[Entry]:
        wanted = [entry for batch in self._batches for entry in batch.missing()]
        wanted += [tensor.entry for tensor in self._tensors]
        by_shard: dict[ShardId, Entry] = {}
        for entry in wanted:
            if by_shard.setdefault(entry.shard, entry) != entry:
                raise BatchError(
                    f"the result has two different entries of shard {entry.shard}",
                    hint="task ids must be unique over a training; a later put of a task makes its older entries void",
                )
        return list(by_shard.values())

    def keep(self) -> None:
        """The batches of the result keep what arrived."""
        for batch in self._batches:
            batch.keep(self.have)

    def filled(self) -> Any:
        return _walk(self.result, self._filled)

    def _found(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, DistributedBatch):
            self._batches.append(leaf)
            self.owners = owners_by_id([*self.owners.values(), *leaf.owners.values()])
        elif isinstance(leaf, RemoteTensor):
            self._tensors.append(leaf)
            self.owners = owners_by_id([*self.owners.values(), leaf.owner])
        return leaf

    def _filled(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, DistributedBatch):
            return copy.copy(leaf).arrived(self.have)
        if isinstance(leaf, RemoteTensor):
            index = RowIndex.of_parts([leaf.entry.rows])
            column = Column.of_entries(leaf.entry.shard.key, [leaf.entry], index).fetched([self.have[leaf.entry.shard]])
            return column.value() if leaf.entry.kind is Kind.JAGGED else column.value()[0]
        return leaf


def _walk(node: Any, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    """`node` with each leaf replaced by `leaf(path, it)`; dicts, lists and tuples are new ones of the same kind."""
    if isinstance(node, dict):
        return {key: _walk(item, leaf, f"{path}/{_escaped(str(key))}") for key, item in node.items()}
    if isinstance(node, (list, tuple)):
        items = [_walk(item, leaf, f"{path}/{i}") for i, item in enumerate(node)]
        if isinstance(node, list):
            return items
        return type(node)(*items) if hasattr(node, "_fields") else tuple(items)
    return leaf(path[1:] or ".", node)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
