"""Checks that rows fit into one batch: keys, numbers of rows, tasks, owners. Every check raises `BatchError`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from inference_plugin.wire.errors import BatchError, first_few
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.records import MAX_ID_CHARS, Entry, Owner
from trainer_adapters.batch.rows import Ints, PartRows
from trainer_adapters.batch.status import BatchStatus

__all__ = ["aligned_entries", "check_aligned", "check_columns", "check_together", "checked_key", "owners_by_id"]


def checked_key(key: object) -> str:
    """Returns `key` if it is a valid key of a batch."""
    if not isinstance(key, str):
        raise BatchError(
            f"a key is a str, not {key!r} of type {type(key).__name__}",
            hint="batch[key] gives all rows of a key; choose rows with reorder, filter or chunk",
        )
    if not 0 < len(key) <= MAX_ID_CHARS:
        raise BatchError(f"a key of {len(key)} characters; allowed are 1 to {MAX_ID_CHARS}")
    return key


def check_columns(columns: Mapping[str, Column]) -> None:
    """All columns have the same number of rows and the same status."""
    if len({len(column) for column in columns.values()}) > 1:
        counts = ", ".join(f"{key}: {len(column)}" for key, column in columns.items())
        raise BatchError(f"keys have different numbers of rows: {counts}")
    if len({column.is_local for column in columns.values()}) > 1:
        here = sorted(key for key, column in columns.items() if column.is_local)
        raise BatchError(f"only some keys have their rows here: {first_few(here)}", hint="fetch the others first")


def check_together(statuses: Sequence[BatchStatus]) -> None:
    """No LOCAL batch beside a REMOTE one; EMPTY batches join either."""
    if len(found := set(statuses) - {BatchStatus.EMPTY}) > 1:
        numbers = [str(i) for i, status in enumerate(statuses) if status is BatchStatus.REMOTE]
        raise BatchError(
            f"{' and '.join(sorted(status.name for status in found))} batches don't join; REMOTE: batch {first_few(numbers)}",
            hint="fetch the REMOTE ones, or remotize the LOCAL ones",
        )


def check_aligned(mine: PartRows[Entry | None] | None, theirs: PartRows[Entry | None] | None) -> None:
    """Two records that share tasks name the same task at every row."""
    if mine is None or theirs is None:
        return
    (tasks, rows), (their_tasks, their_rows) = _tasks_of(mine), _tasks_of(theirs)
    wrong = np.flatnonzero((tasks != their_tasks) | (rows != their_rows))
    if len(wrong) and set(tasks.tolist()) & set(their_tasks.tolist()) - {None}:
        at = int(wrong[0])
        raise BatchError(
            f"row {at} is row {rows[at]} of task {tasks[at]!r} in one batch and row {their_rows[at]} of task "
            f"{their_tasks[at]!r} in the other",
            hint="reorder one of them first",
        )


def aligned_entries(entries: Iterable[Entry], owners: Mapping[str, Owner]) -> dict[str, list[Entry]]:
    """Entries by key. Keys of the same tasks have them in the order of the first of these keys; others are as given, and a task
    has the same rows of the batch under each of its keys."""
    by_key: dict[str, list[Entry]] = {}
    for entry in entries:
        by_key.setdefault(entry.shard.key, []).append(entry)
    orders: list[tuple[list[str], dict[str, int]]] = []
    rows: dict[str, int] = {}
    for key, listed in by_key.items():
        if not owners.keys() >= {entry.owner for entry in listed}:
            stranger = next(entry for entry in listed if entry.owner not in owners)
            raise BatchError(
                f"entry {stranger.shard} is of owner {stranger.owner!r}, who is not among the given owners"
            )
        tasks = [entry.shard.task_id for entry in listed]
        if len(set(tasks)) != len(tasks):
            twice = Counter(tasks).most_common(1)[0][0]
            raise BatchError(f"key {key!r} has two entries of task {twice!r}")
        counts = [entry.rows for entry in listed]
        if counts != (known := list(map(rows.setdefault, tasks, counts))):
            i = next(i for i, count in enumerate(counts) if count != known[i])
            raise BatchError(f"task {tasks[i]!r} has {known[i]} rows of one key and {counts[i]} of key {key!r}")
        if all(tasks != order for order, _ in orders):
            first_rows = _first_rows(orders, key, tasks, rows)
            listed.sort(key=lambda entry: first_rows[entry.shard.task_id])
    return by_key


def _first_rows(
    orders: list[tuple[list[str], dict[str, int]]], key: str, tasks: list[str], rows: Mapping[str, int]
) -> dict[str, int]:
    """The row at which each of `tasks`, those of `key`, begins. `orders`: tasks of other keys, each with its first row; another
    order is added to it."""
    *begins, end = itertools.accumulate((rows[task] for task in tasks), initial=0)
    starts = dict(zip(tasks, begins, strict=True))
    if (same := next((known for _, known in orders if known.keys() == starts.keys()), None)) is not None:
        return same
    for order, known in orders:
        wrong = next((task for task in tasks if known.get(task, starts[task]) != starts[task]), None)
        if wrong is not None and end == sum(rows[task] for task in order):  # other sums are refused as such
            raise BatchError(
                f"task {wrong!r} begins at row {known[wrong]} of one key, and at row {starts[wrong]} of key {key!r}",
                hint="give the entries of each key in one order of tasks",
            )
    orders.append((tasks, starts))
    return starts


def owners_by_id(owners: Iterable[Owner]) -> dict[str, Owner]:
    """Owners by id; one id is one owner."""
    known: dict[str, Owner] = {}
    if not isinstance(owners, Iterable):
        raise BatchError(
            f"owners={owners!r:.300} is a {type(owners).__name__}", hint="give a list of owners, [store.owner]"
        )
    for owner in owners:
        if not isinstance(owner, Owner):
            raise BatchError(
                f"{owner!r:.300} is a {type(owner).__name__}, no owner", hint="give a list of owners, [store.owner]"
            )
        if known.setdefault(owner.id, owner) != owner:
            raise BatchError(f"two different owners have the id {owner.id!r}: {known[owner.id]} and {owner}")
    return known


def _tasks_of(record: PartRows[Entry | None]) -> tuple[npt.NDArray[np.object_], Ints]:
    """The task of each row, and the row's number within its task."""
    tasks = [None if entry is None else entry.shard.task_id for entry in record]
    return np.fromiter(tasks, object, len(tasks))[record.index.part], record.index.row
