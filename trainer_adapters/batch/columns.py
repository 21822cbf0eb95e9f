"""Columns: the rows of one key, over parts that are in memory or entries that are elsewhere.

A column is immutable but for one thing: rows that lie scattered are put together the first time they are read, and stay so.
Batches share columns, and each may have a thread of its own: whoever reads rows takes `data` once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from inference_plugin.wire.errors import BatchError, NotFetched
from inference_plugin.wire.tensors import torch_dtype
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.parts import LeasedPart, LocalPart
from trainer_adapters.batch.records import Entry, Kind
from trainer_adapters.batch.rows import Ints, PartRows, RowIndex, Taken
from trainer_adapters.batch.schemas import Schema, schema_of
from trainer_adapters.batch.values import PlainValue

__all__ = ["Column"]

_offsets_by_lengths: weakref.WeakValueDictionary[tuple[str, bytes], torch.Tensor] = weakref.WeakValueDictionary()
"""torch takes two nested tensors for equally ragged only if they share one offsets tensor; so columns of equal lengths do."""


class Column:
    """The rows of one key.

    `data`: its parts in memory; None if it has to be fetched. `entries`: the entries that its rows came from. A column in
    memory keeps them as the record of its rows' tasks and weight versions; None stands for rows that were made here.
    """

    __slots__ = ("data", "device", "entries", "key", "schema")

    def __init__(
        self,
        key: str,
        schema: Schema,
        *,
        data: PartRows[LocalPart] | None = None,
        entries: PartRows[Entry | None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        assert data is not None or entries is not None
        self.key = key
        self.schema = schema
        self.data = data
        self.entries = entries
        self.device = device or torch.device("cpu")

    @staticmethod
    def of_value(key: str, value: Any) -> Column:
        """A column of the rows of `value` (see `local_part`). Raises `BatchError`."""
        try:
            part = local_part(value)
        except BatchError as error:
            raise BatchError(f"key {key!r}: {error.message}", hint=error.hint) from None
        device = part.pieces[0].device if part.pieces else None
        if isinstance(value, torch.Tensor) and value.is_nested and part.offsets is not None:
            _share_offsets(value, np.diff(part.offsets))
        index = RowIndex.of_parts([part.rows] if part.rows else [])
        return Column(key, Schema.of(part), data=PartRows.of([part] if part.rows else [], index), device=device)

    @staticmethod
    def of_entries(key: str, entries: Sequence[Entry], index: RowIndex) -> Column:
        """A column of rows that are elsewhere. `entries` is not empty. Raises `BatchError` if they don't fit together."""
        return Column(key, schema_of(key, entries), entries=PartRows.of(entries, index))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def is_local(self) -> bool:
        return self.data is not None

    @property
    def index(self) -> RowIndex:
        return self._rows.index

    @property
    def nbytes(self) -> int:
        """Bytes of its rows in memory (plain values not counted), or bytes that a fetch brings here."""
        if self.data is None:
            return sum(entry.nbytes for entry in self.all_entries())
        if self.schema.kind is Kind.VALUES:
            return 0
        items = len(self) if self.schema.kind is Kind.DENSE else int(self.lengths().sum())
        return items * math.prod(self.schema.item_shape) * torch_dtype(self.schema.dtype).itemsize

    def all_entries(self) -> list[Entry]:
        """The entries that its rows came from, each once, in order; for a column that has to be fetched: all of them."""
        return [entry for entry in self.entries or () if entry is not None]

    def take(self, take: Callable[[RowIndex], Taken]) -> Column:
        """Some rows, as `take` chooses them from an index; it is called with the index of the data and of the entries."""
        data = self.data
        return Column(
            self.key,
            self.schema,
            data=None if data is None else data.take(take(data.index)),
            entries=None if self.entries is None else self.entries.take(take(self.entries.index)),
            device=self.device,
        )

    @staticmethod
    def concat(columns: Sequence[Column]) -> Column:
        """All rows in order. All columns are local, or none is. Raises `BatchError` for rows that don't fit together."""
        schema = columns[0].schema
        for number, column in enumerate(columns):
            joined = schema.joined(column.schema)
            if joined is None:
                raise BatchError(
                    f"key {column.key!r}: batch {number} has rows {column.schema}, those before it {schema}",
                    hint="rows of one key have one dtype and may differ in their first dimension only",
                )
            schema = joined
        devices = {column.device for column in columns if column.is_local and len(column)}
        if len(devices) > 1:
            raise BatchError(
                f"key {columns[0].key!r} has rows on different devices: {', '.join(sorted(map(str, devices)))}",
                hint="move the tensors to one device first",
            )
        data = [column.data for column in columns if column.data is not None]
        return Column(
            columns[0].key,
            schema,
            data=PartRows.concat(data) if data else None,
            entries=PartRows.concat(list(map(_record, columns))) if any(c.entries for c in columns) else None,
            device=next(iter(devices), columns[0].device),
        )

    def fetched(self, parts: Iterable[LocalPart]) -> Column:
        """The column with its rows in memory: `parts` are those of `entries`, in order."""
        assert self.entries is not None
        data = PartRows.of(parts, self.entries.index)
        return Column(self.key, self.schema, data=data, entries=self.entries)

    def emptied(self) -> Column:
        """The column without rows, REMOTE: like an empty chunk of a REMOTE column."""
        return Column(self.key, self.schema, entries=PartRows.of([], RowIndex.of_parts([])))

    def value(self) -> Any:
        """The rows: a tensor `[n, *item_shape]`, a nested tensor (layout jagged), or a new list of values.

        One run of rows of one part is a view. Scattered rows are copied together at the first call, not again.
        Raises `NotFetched`.
        """
        if self.schema.kind is not Kind.JAGGED:
            return self._together()
        lengths = self.lengths()
        return torch.nested.nested_tensor_from_jagged(
            self.flat(),
            offsets=_shared_offsets(lengths, self.device),
            min_seqlen=int(lengths.min()) if len(lengths) else 0,
            max_seqlen=int(lengths.max()) if len(lengths) else 0,
        )

    def flat(self) -> torch.Tensor:
        """The rows of a column of tensors, one after the other: `[n, *item_shape]`, or jagged `[sum of lengths, *item_shape]`."""
        rows = self._together()
        assert isinstance(rows, torch.Tensor)
        return rows

    def rows(self) -> list[Any]:
        """Each row by itself: tensors that view the parts in memory, or plain values. Raises `NotFetched`."""
        data = self._data_here()
        if (leased := self._leased_rows(data)) is not None:
            return leased
        rows: list[Any] = []
        for number, start, stop in data.index.runs():
            part = data[number]
            if self.schema.kind is Kind.VALUES:
                rows += part.values[start:stop]
            elif part.kind is Kind.JAGGED:
                lengths = part.lengths
                run = part.tensor
                if (start, stop) != (0, part.rows):
                    before = sum(lengths[:start])
                    lengths = lengths[start:stop]
                    run = run[before : before + sum(lengths)]
                # The unsafe one takes half the time: autograd does not know that its tensors share memory.
                rows += (run.split_with_sizes if run.requires_grad else run.unsafe_split_with_sizes)(lengths)
            elif part.rows == 1:
                rows.append(part.only_row())
            else:
                rows += part.tensor[start:stop].unbind()
        return rows

    def _leased_rows(self, data: PartRows[LocalPart]) -> list[torch.Tensor] | None:
        """The rows, together, where they are those of whole leased parts. None where they are not."""
        shape = self.schema.item_shape if self.schema.kind is Kind.JAGGED else self.schema.item_shape[1:]
        if not len(self) or (self.schema.kind is Kind.DENSE and not self.schema.item_shape):
            return None
        runs = list(data.index.runs())
        parts = data.parts[[number for number, _, _ in runs]].tolist()
        if set(map(type, parts)) != {LeasedPart}:
            return None
        if any(stop - start != part.rows for part, (_, start, stop) in zip(parts, runs, strict=True)):
            return None
        return LeasedPart.rows_of(parts, shape, self.schema.dtype)

    def lengths(self) -> Ints:
        """Each row's first dimension. Needs no fetch. Raises `BatchError` for plain values and for rows of no dimension."""
        if self.schema.kind is Kind.VALUES or (self.schema.kind is Kind.DENSE and not self.schema.item_shape):
            raise BatchError(f"key {self.key!r} has rows without length: {self.schema}")
        if self.schema.kind is Kind.DENSE:
            return np.full(len(self), self.schema.item_shape[0], dtype=np.int64)
        rows = self._rows
        per_part = [_lengths(part) for part in rows]
        starts = np.cumsum([0, *map(len, per_part)])[:-1]
        flat = np.concatenate(per_part) if per_part else np.zeros(0, dtype=np.int64)
        return flat[starts[rows.index.part] + rows.index.row] if len(rows.index) else flat

    @property
    def _rows(self) -> PartRows[Any]:
        return self.data or self.entries  # type: ignore[return-value]  # one of them is there

    def _together(self) -> torch.Tensor | list[PlainValue]:
        """All rows in one piece, which replaces the parts if it had to be copied."""
        data = self._data_here()
        if self.schema.kind is Kind.VALUES:
            return [value for part, start, stop in data.index.runs() for value in data[part].values[start:stop]]
        runs = list(data.index.runs())
        if len(runs) == 1:
            return self._run(data, *runs[0])
        flat = self._gathered(data, runs)
        jagged = self.schema.kind is Kind.JAGGED
        offsets = _starts(self.lengths()) if jagged else None
        part = LocalPart(self.schema.kind, len(self), [flat], offsets=offsets)
        whole = RowIndex.of_parts([len(self)] if runs else [])
        self.data = PartRows.of([part] if runs else [], whole)
        return flat

    def _data_here(self) -> PartRows[LocalPart]:
        if (data := self.data) is None:
            raise NotFetched(f"the rows of key {self.key!r} are not in this process")
        return data

    def _gathered(self, data: PartRows[LocalPart], runs: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        if not runs:
            shape = (0, *self.schema.item_shape)
            return torch.empty(shape, dtype=torch_dtype(self.schema.dtype), device=self.device)
        if self.schema.kind is Kind.DENSE and len(runs) > 2 * data.index.parts:
            tensors = [part.tensor for part in data]
            starts = np.cumsum([0, *map(len, tensors)])[:-1]
            rows = torch.from_numpy(starts[data.index.part] + data.index.row).to(self.device)
            return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).index_select(0, rows)
        return torch.cat([self._run(data, *run) for run in runs])

    def _run(self, data: PartRows[LocalPart], number: int, start: int, stop: int) -> torch.Tensor:
        """Rows of one part, in the column's layout."""
        part = data[number]
        if (offsets := part.offsets) is not None:
            return part.tensor[int(offsets[start]) : int(offsets[stop])]
        rows = part.tensor if (start, stop) == (0, part.rows) else part.tensor[start:stop]
        return rows.reshape(-1, *self.schema.item_shape) if self.schema.kind is Kind.JAGGED else rows


def _lengths(part: LocalPart | Entry) -> Ints:
    if part.kind is Kind.DENSE:
        return np.full(part.rows, part.item_shape[0], dtype=np.int64)
    if isinstance(part, LocalPart):
        offsets = part.offsets
        assert offsets is not None
        return np.diff(offsets)
    return np.asarray(part.lengths, dtype=np.int64)


def _record(column: Column) -> PartRows[Entry | None]:
    if column.entries is not None:
        return column.entries
    nothing: list[Entry | None] = [None] if len(column) else []
    return PartRows.of(nothing, RowIndex.of_parts([len(column)] if len(column) else []))


def _share_offsets(nested: Any, lengths: Ints) -> None:
    """Has columns of these lengths share the offsets of a nested tensor that a user made, so that torch computes with both."""
    offsets = nested.offsets() if nested.layout is torch.jagged and nested.lengths() is None else None
    if (
        offsets is None
        or offsets.dtype != torch.int64
        or not torch.equal(offsets.cpu(), torch.from_numpy(_starts(lengths)))
    ):
        return  # its rows have gaps, or begin inside its values: its offsets are not those of the rows alone
    _offsets_by_lengths.setdefault((str(nested.device), lengths.tobytes()), offsets)


def _shared_offsets(lengths: Ints, device: torch.device) -> torch.Tensor:
    key = (str(device), lengths.tobytes())
    offsets = _offsets_by_lengths.get(key)
    if offsets is None:
        offsets = torch.from_numpy(_starts(lengths)).to(device)
        _offsets_by_lengths[key] = offsets
    return offsets


def _starts(lengths: Ints) -> Ints:
    """Where each row begins when rows follow each other, and the end of the last row."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
