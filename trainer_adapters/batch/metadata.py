"""What a REMOTE batch knows of its rows: their number, keys, tasks, owners, versions and tags."""

from __future__ import annotations

from collections.abc import Iterator

from inference_plugin.wire.errors import UnknownKey, first_few
from trainer_adapters.batch.alignment import checked_key
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.records import Entry, Owner, Tags, VersionSpan
from trainer_adapters.batch.rows import Ints, PartRows
from trainer_adapters.batch.status import BatchStatus

__all__ = ["BatchMetadata"]


class BatchMetadata:
    """The part of a `DistributedBatch` that needs no fetch."""

    _columns: dict[str, Column]
    _owners: dict[str, Owner]
    _tags: dict[str, Tags]

    @property
    def status(self) -> BatchStatus:
        if any(column.is_local for column in self._columns.values()):
            return BatchStatus.LOCAL
        return BatchStatus.REMOTE if len(self) else BatchStatus.EMPTY

    def __len__(self) -> int:
        """Rows."""
        return next((len(column) for column in self._columns.values()), 0)

    def keys(self) -> tuple[str, ...]:
        return tuple(self._columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    @property
    def task_ids(self) -> tuple[str, ...]:
        """The ids of the tasks that its rows came from, each once, not in the order of rows. Rows made here have no task."""
        return tuple(dict.fromkeys(entry.shard.task_id for entry in self.entries()))

    def row_tasks(self, key: str | None = None) -> list[str | None]:
        """The task of each row under `key` (default: the first key that has tasks); None for a row that was made here.

        `batch.without(task_ids)` leaves out the rows of tasks.
        """
        record = self.record() if key is None else self._column(key).entries
        if record is None:
            return [None] * len(self)
        tasks = [None if entry is None else entry.shard.task_id for entry in record]
        return [tasks[part] for part in record.index.part.tolist()]

    @property
    def tags(self) -> dict[str, Tags]:
        """What the workers said of its tasks besides rows, by task id (`Generated.tags`); a task without tags is left out.

        The tag of each row: `[batch.tags[task]["score"] for task in batch.row_tasks()]`.
        """
        return {task: self._tags[task] for task in self.task_ids if task in self._tags} if self._tags else {}

    @property
    def versions(self) -> VersionSpan | None:
        """The weight versions that the rows were generated with; None if no entry says."""
        span: VersionSpan | None = None
        for versions in dict.fromkeys(entry.versions for entry in self.entries()):
            if versions is not None:
                span = versions if span is None else span.joined(versions)
        return span

    @property
    def nbytes(self) -> int:
        """LOCAL: bytes of the rows' tensors (plain values are not counted). REMOTE: bytes that a fetch brings here."""
        return sum(column.nbytes for column in self._columns.values())

    @property
    def owners(self) -> dict[str, Owner]:
        """The owners of its entries, by id."""
        return dict(self._owners)

    def entries(self) -> list[Entry]:
        """The entries of its rows, each once, by key. A LOCAL batch keeps the entries that it was fetched with."""
        found = (entry for column in self._columns.values() for entry in column.all_entries())
        return list(dict.fromkeys(found))

    def columns(self) -> dict[str, Column]:
        """The columns by key."""
        return dict(self._columns)

    def record(self, key: str = "") -> PartRows[Entry | None] | None:
        """The entry behind each row of `key`, or else of the first key that has entries; None if no key has any."""
        known = {name: column.entries for name, column in self._columns.items() if column.entries is not None}
        return known.get(key) or next(iter(known.values()), None)

    def lengths(self, key: str) -> Ints:
        """int64 `[rows]`: the first dimension of each row. Needs no fetch. Raises `BatchError` for rows that have none."""
        return self._column(key).lengths()

    def __repr__(self) -> str:
        keys = ", ".join(f"{key}: {column.schema}" for key, column in self._columns.items())
        text = f"{self.status.name}, {len(self)} rows, {{{keys}}}, {len(self.entries())} shards, {_size(self.nbytes)}"
        versions = "" if self.versions is None else f", versions {self.versions}"
        return f"DistributedBatch({text}{versions})"

    def _column(self, key: str) -> Column:
        checked_key(key)
        if (column := self._columns.get(key)) is None:
            raise UnknownKey(f"no key {key!r}; the batch has {first_few(list(self._columns))}")
        return column


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
