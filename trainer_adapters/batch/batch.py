"""`DistributedBatch`: rows by key, here or elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from inference_plugin.wire.errors import BatchError, NotFetched, ProtocolError, first_few
from trainer_adapters.batch import packing, padding
from trainer_adapters.batch.alignment import (
    aligned_entries,
    check_aligned,
    check_columns,
    check_together,
    checked_key,
    owners_by_id,
)
from trainer_adapters.batch.balance import bounds, check_parts, partition, token_counts, whole_numbers
from trainer_adapters.batch.boundary import TIMEOUT_S, client
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.fetching import arrived, missing, refuse_in_event_loop
from trainer_adapters.batch.limits import checked_list, checked_seconds
from trainer_adapters.batch.metadata import BatchMetadata
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import ClearReport, Entry, Kind, Owner, ShardId, Tags, listed_tasks
from trainer_adapters.batch.rows import Ints, RowIndex, Taken
from trainer_adapters.batch.status import BatchStatus

__all__ = ["BatchStatus", "DistributedBatch"]


class DistributedBatch(BatchMetadata):
    """Rows by key, with the same number of rows under each key; row i of all keys belongs together.

        batch = await pool.anext_batch(512, timeout_s=600)          # REMOTE: metadata only
        mine = batch.split(dp_ranks, "input_ids")[dp_rank].fetch()  # LOCAL: mapped, or pulled, and checked
        mine["advantages"] = advantages(mine["rewards"])

    A value is a tensor `[rows, ...]`, a nested tensor (rows of different length) or a list of plain values; see `local_part`.
    Operations that choose or join rows return a new batch and leave the old one as it is; they give the same rows whether the
    data is here or not, and move none. What `batch[key]` returns may be memory that other batches, or other processes, read
    too: assign a new tensor instead of writing into it. A batch belongs to one thread at a time.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | None = None,
        *,
        owners: Iterable[Owner] = (),
        tags: Mapping[str, Tags] | None = None,
    ) -> None:
        """`data`: a value, or a `Column`, by key. `owners`: those of all its entries. `tags`: by task id. Raises `BatchError`."""
        if data is not None and not isinstance(data, Mapping):
            raise BatchError(f"a batch is made of rows by key, not of a {type(data).__name__}", hint="give it a dict")
        self._columns = {}
        for key, value in (data or {}).items():
            self._columns[checked_key(key)] = value if isinstance(value, Column) else Column.of_value(key, value)
            if self._columns[key].key != key:
                raise BatchError(f"the column of key {self._columns[key].key!r} can't stand under key {key!r}")
        self._owners = owners_by_id(owners)
        if not isinstance(tags, Mapping | None):
            raise BatchError(f"tags={tags!r:.300} are a {type(tags).__name__}", hint="give a dict of tags by task id")
        self._tags = dict(tags or {})
        self._have: dict[Entry, LocalPart] = {}
        """Parts that arrived in a fetch that failed; the next fetch does not ask for them again."""
        check_columns(self._columns)

    @staticmethod
    def of_entries(
        entries: Iterable[Entry], owners: Iterable[Owner], tags: Mapping[str, Tags] | None = None
    ) -> DistributedBatch:
        """The REMOTE batch of all rows of `entries`, in the given order; `tags` by task id.

        Keys of the same tasks are aligned by task, in the order of the first of them; otherwise each key keeps the order of its
        entries. Raises `BatchError` if keys differ in rows, or if rows of one task would lie beside those of another.
        """
        known = owners_by_id(owners)
        indices: dict[tuple[int, ...], RowIndex] = {}
        columns: dict[str, Column] = {}
        for key, listed in aligned_entries(entries, known).items():
            rows = tuple(entry.rows for entry in listed)
            if rows not in indices:
                indices[rows] = RowIndex.of_parts(rows)
            columns[key] = Column.of_entries(key, listed, indices[rows])
        return DistributedBatch(columns, owners=known.values(), tags=tags)

    # Items

    def items(self) -> Iterator[tuple[str, Any]]:
        """`(key, batch[key])` of all keys. Raises as `batch[key]` does."""
        return ((key, self[key]) for key in self.keys())

    def __getitem__(self, key: str) -> Any:
        """The rows of one key: a tensor `[n, ...]`, a nested tensor (layout jagged), or a new list of plain values.

        Raises `NotFetched` if they are not here, `UnknownKey`.
        """
        return self._column(key).value()

    def rows(self, key: str) -> list[Any]:
        """The rows of one key, each by itself: a tensor for each row, a view of where it lies, or plain values.

        `batch[key]` copies rows that lie scattered together, this copies nothing. Raises as `batch[key]`.
        """
        return self._column(key).rows()

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets the rows of one key. Row i belongs to the same task as row i of the other keys. Raises `BatchError`."""
        checked_key(key)
        if isinstance(value, DistributedBatch):
            raise BatchError(
                "a batch is not the value of one key", hint="use batch.union_(other) to add all of its keys"
            )
        self._need_local("assign to", key)
        column = Column.of_value(key, value)
        if self._columns and len(column) != len(self):
            raise BatchError(f"key {key!r} would have {len(column)} rows, the batch has {len(self)}")
        column.entries = self.record(key)
        self._columns[key] = column

    def __delitem__(self, key: str) -> None:
        self._column(key)
        self._need_local("delete", key)
        del self._columns[key]

    def dense(self, key: str) -> torch.Tensor:
        """The rows of one key as a tensor `[n, ...]`, never padded. Raises `BatchError` where rows are ragged or values."""
        return padding.dense(self._column(key))

    def padded(self, pad_value: padding.PadValue) -> DistributedBatch:
        """The batch with every ragged key padded to its longest row: a tensor `[n, longest, ...]`.

        Rows are padded at their end: keys that contain "mask" with 0, others with `pad_value`, a number or a dict by key.
        Keys that are not ragged stay as they are. Raises `NotFetched`, and `BatchError` for a pad that a dtype can't hold.
        """
        columns = dict(self._columns)
        for key, column in self._columns.items():
            if column.schema.kind is Kind.JAGGED:
                columns[key] = Column.of_value(key, padding.padded(column, pad_value))
                columns[key].entries = column.entries
        return self._like(columns)

    def unpadded(self, tensor: torch.Tensor, like: str) -> list[torch.Tensor]:
        """What was computed from padded rows, `[n, longest, ...]`, as one row for each row of key `like`, as long as that. Views;
        needs no fetch. Raises `BatchError` for a tensor of another shape."""
        return padding.unpadded(tensor, self._column(like))

    # Rows

    def chunk(self, parts: int) -> list[DistributedBatch]:
        """`parts` batches of rows that follow each other; sizes differ by at most 1, and may be 0."""
        cuts = bounds(len(self), parts).tolist()
        return [self._take(slice(start, stop)) for start, stop in itertools.pairwise(cuts)]

    def split(
        self,
        ranks: int,
        by: str | Sequence[int] | Ints | torch.Tensor,
        *,
        equal_rows: bool = False,
        whole_tasks: bool = False,
    ) -> list[DistributedBatch]:
        """One batch for each data-parallel rank, with about as many tokens in each; rows stay in order within a rank.

        `by`: the number of tokens of each row, or a key. A key counts the length of each row (needs no fetch), the number
        itself where a row is one number, or the set items of a dense mask.
        `equal_rows` gives all ranks the same number of rows, or raises `BatchError`. `whole_tasks` keeps all rows of a task (the
        samples of one prompt, a group of GRPO) on one rank; with `equal_rows`, all tasks must have equally many rows. See
        `balance.partition`.
        """
        check_parts(ranks)
        tokens = token_counts(self._column(by)) if isinstance(by, str) else whole_numbers("tokens of each row", by)
        if len(tokens) != len(self):
            raise BatchError(f"{len(tokens)} token counts for {len(self)} rows")
        chosen = partition(tokens, ranks, equal_rows=equal_rows, groups=self.row_tasks() if whole_tasks else None)
        return [self._take(rows) for rows in chosen]

    def reorder(self, rows: Sequence[int] | Ints | torch.Tensor) -> DistributedBatch:
        """The given rows (numbers from 0) in the given order; rows may be left out or come twice."""
        numbers = whole_numbers("rows", rows)
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            wrong = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
            raise BatchError(f"there is no row {wrong}: the batch has {len(self)} rows, counted from 0")
        return self._take(numbers)

    def filter(self, keep: Sequence[bool] | torch.Tensor | Any) -> DistributedBatch:
        """The rows where `keep`, a bool for each row, is true. Clears nothing: `clear` this batch, not the filtered one."""
        try:
            mask = np.asarray(keep.detach().cpu() if isinstance(keep, torch.Tensor) else keep)
        except (ValueError, TypeError, RuntimeError) as error:
            raise BatchError(f"need {len(self)} bools, one for each row: {error}") from None
        if mask.shape != (len(self),) or (mask.dtype != np.bool_ and len(mask)):
            raise BatchError(f"need {len(self)} bools, one for each row, not {mask.dtype} of shape {list(mask.shape)}")
        return self._take(np.flatnonzero(mask))

    def without(self, task_ids: Iterable[str]) -> DistributedBatch:
        """The rows that belong to none of these tasks, under any key. Clears nothing; ids of other tasks have no effect."""
        unwanted = set(listed_tasks(task_ids))
        keep = np.ones(len(self), dtype=np.bool_)
        for record in {id(column.entries): column.entries for column in self._columns.values()}.values():
            if record is not None:
                wanted = [entry is None or entry.shard.task_id not in unwanted for entry in record]
                keep &= np.asarray(wanted, dtype=np.bool_)[record.index.part]
        return self._take(np.flatnonzero(keep))

    @staticmethod
    def concat(batches: Sequence[DistributedBatch], pad_value: padding.PadValue | None = None) -> DistributedBatch:
        """The rows of all batches, in order. Rows of different length make a key ragged; with `pad_value` ragged keys are
        padded (see `padded`). Raises `BatchError` for no batches, other keys, rows that don't fit, or LOCAL beside REMOTE."""
        batches = checked_list("batches", batches, "batches")
        if not batches:
            raise BatchError("concat of no batches", hint="give at least one; DistributedBatch() has no keys")
        first = batches[0]
        for number, batch in enumerate(batches):
            _check_batch(f"item {number}", batch)
            if set(batch.keys()) != set(first.keys()):
                raise BatchError(
                    f"batch {number} has other keys than batch 0: "
                    f"only one of them has {first_few(sorted(set(batch.keys()) ^ set(first.keys())))}"
                )
        check_together([batch.status for batch in batches])
        columns = {key: Column.concat([batch._columns[key] for batch in batches]) for key in first}
        joined = DistributedBatch(columns, owners=(owner for batch in batches for owner in batch._owners.values()))
        for batch in batches:
            joined._have |= batch._have
            joined._tags |= batch._tags
        return joined if pad_value is None else joined.padded(pad_value)

    # Keys

    def select(self, keys: Iterable[str]) -> DistributedBatch:
        """The given keys of all rows. Raises `UnknownKey`."""
        return self._like({key: self._column(key) for key in checked_list("keys", keys, "keys")})

    def union(self, other: DistributedBatch) -> DistributedBatch:
        """A new batch with the keys of both. Raises `BatchError` for keys that both have, for different numbers of rows, for
        LOCAL beside REMOTE, and for rows of the same tasks in another order."""
        return self._like(dict(self._columns)).union_(other)

    def union_(self, other: DistributedBatch) -> DistributedBatch:
        """Adds the keys of `other` to this batch, and returns it. Raises as `union`; then this batch is as it was."""
        _check_batch("the other", other)
        if both := sorted(set(self.keys()) & set(other.keys())):
            raise BatchError(f"both batches have {first_few(both)}", hint="select the keys to take from each first")
        if self._columns and other._columns:
            if len(self) != len(other):
                raise BatchError(f"a batch of {len(self)} rows and one of {len(other)} can't be joined key by key")
            check_together([self.status, other.status])
            check_aligned(self.record(), other.record())
        columns, owners = (
            self._columns | other._columns,
            owners_by_id([*self._owners.values(), *other._owners.values()]),
        )
        check_columns(columns)
        self._columns, self._owners = columns, owners
        self._have |= other._have
        self._tags = other._tags | self._tags
        return self

    # Bytes

    def fetch(self, *, timeout_s: float = TIMEOUT_S) -> DistributedBatch:
        """Brings the rows here, checked, and returns this batch, now LOCAL; one that is LOCAL stays as it is.

        Rows of this host are mapped, not copied. Raises `FetchFailed`, which lists every shard that failed; the batch is REMOTE
        then, and the next fetch asks only for what is missing. Inside an event loop use `afetch`.
        """
        refuse_in_event_loop()
        checked_seconds("timeout_s", timeout_s)
        parts: dict[ShardId, LocalPart] = {}
        if wanted := self.missing():
            try:
                client().fetch_entries(wanted, self._owners, timeout_s=timeout_s, have=parts)
            except BaseException:
                self.keep(parts)
                raise
        return self.arrived(parts)

    async def afetch(self, *, timeout_s: float = TIMEOUT_S) -> DistributedBatch:
        """`fetch` inside an event loop."""
        checked_seconds("timeout_s", timeout_s)
        parts: dict[ShardId, LocalPart] = {}
        if wanted := self.missing():
            try:
                await client().afetch_entries(wanted, self._owners, timeout_s=timeout_s, have=parts)
            except BaseException:
                self.keep(parts)
                raise
        return self.arrived(parts)

    def missing(self) -> list[Entry]:
        """The entries that a fetch has to get: not those that are here, nor those that arrived before."""
        return missing(self._columns.values(), self._have)

    def keep(self, parts: Mapping[ShardId, LocalPart]) -> None:
        """Keeps parts that were fetched for this batch elsewhere, until all of its parts have arrived."""
        self._have |= {entry: parts[entry.shard] for entry in self.missing() if entry.shard in parts}

    def arrived(self, parts: Mapping[ShardId, LocalPart]) -> DistributedBatch:
        """Makes the batch LOCAL once all parts have arrived: `parts`, and those that it kept. Raises `ProtocolError` for a part
        that is missing or not as its entry says."""
        self._columns = arrived(self._columns, parts, self._have)
        self._have = {}
        return self

    def clear(self, *, timeout_s: float = TIMEOUT_S) -> ClearReport:
        """Has the owners drop all tasks of this batch, whole: rows that other batches have of them too. May be repeated.

        Rows that were fetched stay readable here. Blocks until all owners have answered, `timeout_s` at most; the report
        lists owners that could not be reached.
        """
        checked_seconds("timeout_s", timeout_s)
        by_owner: dict[str, dict[str, None]] = {}
        for entry in self.entries():
            by_owner.setdefault(entry.owner, {})[entry.shard.task_id] = None
        self._have = {}
        return client().clear_tasks(by_owner, self._owners, timeout_s=timeout_s)

    def to_bytes(self) -> bytes:
        """The metadata of a REMOTE or EMPTY batch. Raises `BatchError` for a LOCAL one, and for one that is too large for
        `from_bytes`."""
        if self.status is BatchStatus.LOCAL:
            raise BatchError(
                "the rows of a LOCAL batch don't travel with its metadata",
                hint="remotize it first: `remotize(batch, store, task_id)`",
            )
        return packing.pack(self._columns.values(), self._owners, len(self), self.tags)

    @staticmethod
    def from_bytes(data: bytes) -> DistributedBatch:
        """The batch that `to_bytes` wrote. Raises `ProtocolError` for any other bytes, `BatchError` for what is none."""
        given: object = data
        if not isinstance(given, bytes | bytearray | memoryview):
            raise BatchError(f"data is a {type(given).__name__}", hint="give the bytes that to_bytes() returned")
        columns, owners, tags = packing.unpack(data)
        try:
            return DistributedBatch(columns, owners=owners, tags=tags)
        except BatchError as error:
            raise ProtocolError(f"not the metadata of a batch: {error}") from error

    def __reduce__(self) -> tuple[Callable[[bytes], DistributedBatch], tuple[bytes]]:
        return DistributedBatch.from_bytes, (self.to_bytes(),)

    def __copy__(self) -> DistributedBatch:
        return self._like(dict(self._columns))

    # Inside

    def _need_local(self, what: str, key: str) -> None:
        if self._columns and self.status is not BatchStatus.LOCAL:
            raise NotFetched(f"can't {what} key {key!r} of a batch that is {self.status.name}")

    def _like(self, columns: Mapping[str, Column]) -> DistributedBatch:
        batch = DistributedBatch(columns, owners=self._owners.values(), tags=self._tags)
        batch._have = dict(self._have)
        return batch

    def _take(self, rows: Ints | slice) -> DistributedBatch:
        taken: dict[RowIndex, Taken] = {}  # columns that share an index go on to share one, and it is computed once

        def take(index: RowIndex) -> Taken:
            if (found := taken.get(index)) is None:
                found = taken[index] = index.take(rows)
            return found

        return self._like({key: column.take(take) for key, column in self._columns.items()})


def _check_batch(what: str, batch: object) -> None:
    if not isinstance(batch, DistributedBatch):
        raise BatchError(
            f"{what} is a {type(batch).__name__}, not a batch", hint="DistributedBatch(data) makes one of a dict"
        )
