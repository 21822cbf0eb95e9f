"""A batch's metadata as bytes: msgpack, column by column, each string written once.

Task ids, owners and version spans stand in tables; what all entries of a column share is written once; an index of all rows in
order is left out. So an entry costs its digest and a few bytes. Decoding checks everything: bytes of a peer give a batch or
`ProtocolError`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import BatchError, ProtocolError
from inference_plugin.wire.manifest import DTYPE_BYTES
from inference_plugin.wire.messages.common import Count
from inference_plugin.wire.messages.rollout import TaskTags
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.records import (
    ByteCount,
    Dims,
    Entry,
    Id,
    Kind,
    Lengths,
    Owner,
    RowCount,
    ShardId,
    Tags,
    TagValue,
    VersionSpan,
)
from trainer_adapters.batch.rows import PartRows, RowIndex
from trainer_adapters.batch.schemas import Schema

__all__ = ["pack", "unpack"]

T = TypeVar("T")

FORMAT = 1
MAX_BATCH_ROWS = 1 << 24
MAX_INDEXED_ROWS = 1 << 26
"""Largest number of rows in all indices of a batch together: it bounds what a few bytes of a peer make this process
allocate."""
MAX_REPEATED_LENGTHS = 1 << 27
"""Largest number of lengths that are written once and meant for many entries, in all columns together: it bounds the time that a
few bytes of a peer take."""


class PackedIndex(msgspec.Struct, frozen=True, array_like=True):
    """A `RowIndex`, as little-endian uint32. Empty: all rows of all parts, in order."""

    part: bytes = b""
    row: bytes = b""


class PackedColumn(msgspec.Struct, frozen=True, array_like=True):
    """One key. A list has an item for each entry, or a single item for all; `tasks` is empty if it would be 0, 1, 2, ..."""

    key: Id
    kind: Kind
    dtype: str
    item_shape: Dims
    index: Count
    digests: bytes
    tasks: tuple[Count, ...]
    owners: tuple[Count, ...]
    versions: tuple[Count, ...]
    rows: tuple[RowCount, ...]
    kinds: tuple[Kind, ...]
    shapes: tuple[Dims, ...]
    lengths: tuple[Lengths, ...]
    value_bytes: tuple[ByteCount, ...]


class PackedBatch(msgspec.Struct, frozen=True, array_like=True):
    format: int
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_BATCH_ROWS)]
    owners: tuple[Owner, ...]
    tasks: tuple[Id, ...]
    versions: tuple[VersionSpan | None, ...]
    indices: tuple[PackedIndex, ...]
    columns: tuple[PackedColumn, ...]
    tags: dict[Id, TaskTags] = {}


def pack(columns: Collection[Column], owners: Mapping[str, Owner], rows: int, tags: Mapping[str, Tags]) -> bytes:
    """Columns that hold no data, those of `owners` that they name, and tags by task id. Raises `BatchError` for what `unpack`
    would refuse."""
    entries = [column.all_entries() for column in columns]
    task_ids = [[entry.shard.task_id for entry in mine] for mine in entries]
    owner_ids = [[entry.owner for entry in mine] for mine in entries]
    spans = [_once([entry.versions for entry in mine]) for mine in entries]
    tasks, owner_numbers, versions = _numbered(task_ids), _numbered(owner_ids), _numbered(spans)
    indices: dict[PackedIndex, int] = {}
    packed_as: dict[tuple[int, tuple[int, ...]], PackedIndex] = {}
    packed: list[PackedColumn] = []
    for number, (column, mine) in enumerate(zip(columns, entries, strict=True)):
        counts = [entry.rows for entry in mine]
        if (like := (id(column.index), tuple(counts))) not in packed_as:  # columns of one batch often share their index
            packed_as[like] = _packed_index(column.index, counts)
        values = column.schema.kind is Kind.VALUES
        task_numbers = [tasks[task_id] for task_id in task_ids[number]]
        packed.append(
            PackedColumn(
                key=column.key,
                kind=column.schema.kind,
                dtype=column.schema.dtype,
                item_shape=column.schema.item_shape,
                index=indices.setdefault(packed_as[like], len(indices)),
                digests=np.array([entry.digest for entry in mine], "<u8").tobytes(),
                tasks=() if task_numbers == list(range(len(mine))) else tuple(task_numbers),
                owners=_once([owner_numbers[owner_id] for owner_id in owner_ids[number]]),
                versions=tuple([versions[span] for span in spans[number]]),
                rows=_once(counts),
                kinds=_once([entry.kind for entry in mine]),
                shapes=_once([entry.item_shape for entry in mine]),
                lengths=_once([entry.lengths for entry in mine]),
                value_bytes=_once([entry.nbytes if values else 0 for entry in mine]),
            )
        )
    built = len({(column.index, column.rows) for column in packed})
    if rows > MAX_BATCH_ROWS or rows * built > MAX_INDEXED_ROWS or _repeated(packed) > MAX_REPEATED_LENGTHS:
        raise BatchError(
            f"a batch of {rows} rows with {built} indices, which repeats {_repeated(packed)} lengths, is too large to travel",
            hint="send parts of it: `batch.chunk(2)`",
        )
    return msgspec.msgpack.encode(
        PackedBatch(
            format=FORMAT,
            rows=rows,
            owners=tuple(owners[owner] for owner in owner_numbers),
            tasks=tuple(tasks),
            versions=tuple(versions),
            indices=tuple(indices),
            columns=tuple(packed),
            tags={task: _checked(task, said) for task, said in tags.items()},
        )
    )


def unpack(data: bytes) -> tuple[dict[str, Column], tuple[Owner, ...], dict[str, TaskTags]]:
    """The columns, owners and tags that `pack` wrote. Raises `ProtocolError`."""
    batch = decode_as(data, PackedBatch)
    if batch.format != FORMAT:
        raise ProtocolError(
            f"a batch of format {batch.format}; this side reads {FORMAT}",
            hint="install the same weightwire version on both sides",
        )
    if (repeated := _repeated(batch.columns)) > MAX_REPEATED_LENGTHS:
        raise ProtocolError(f"a batch that repeats {repeated} lengths is too large")
    built: dict[tuple[int, tuple[int, ...]], RowIndex] = {}
    columns: dict[str, Column] = {}
    try:
        for packed in batch.columns:
            if packed.key in columns:
                raise ProtocolError(f"key {packed.key!r} occurs twice")
            columns[packed.key] = _column(batch, packed, built)
    except (BatchError, IndexError, ValueError) as error:
        raise ProtocolError(f"not the metadata of a batch: {error}") from error
    return columns, batch.owners, batch.tags


def _checked(task: str, tags: Tags) -> dict[str, TagValue]:
    for name, value in tags.items():
        if type(value) not in (type(None), bool, int, float, str):
            raise BatchError(
                f"tag {name!r} of task {task!r} is a {type(value).__name__}; allowed are None, bool, int, float and str",
                hint="give the number of a tensor or of numpy with .item()",
            )
    return dict(tags)


def _repeated(columns: Iterable[PackedColumn]) -> int:
    """How many lengths a reader repeats."""
    return sum(len(packed.lengths[0]) * (len(packed.digests) // 8) for packed in columns if len(packed.lengths) == 1)


def _column(batch: PackedBatch, packed: PackedColumn, built: dict[tuple[int, tuple[int, ...]], RowIndex]) -> Column:
    schema = Schema(packed.kind, packed.dtype, packed.item_shape)
    if (schema.dtype not in DTYPE_BYTES) if schema.kind is not Kind.VALUES else (schema != Schema(Kind.VALUES)):
        raise ProtocolError(f"key {packed.key!r} has no valid type: {schema}")
    digests = np.frombuffer(packed.digests, "<u8").tolist()
    rows = _each(packed.rows, len(digests))
    index = built.get((packed.index, packed.rows))
    if index is None or index.parts != len(digests):
        if batch.rows * (len(built) + 1) > MAX_INDEXED_ROWS:
            raise ProtocolError(f"a batch of {batch.rows} rows with more than {len(built)} indices is too large")
        index = built[packed.index, packed.rows] = _index(batch.indices[packed.index], rows, batch.rows)
    entries = _entries(batch, packed, rows, digests)
    for found in Schema.all_of(entries):
        if schema.joined(found) != schema:
            raise ProtocolError(f"key {packed.key!r} is {schema}, but an entry of it {found}")
    return Column(packed.key, schema, entries=PartRows.of(entries, index))


def _entries(batch: PackedBatch, packed: PackedColumn, rows: Sequence[int], digests: Sequence[int]) -> list[Entry]:
    """Every list has an item for each entry; `map` stops at the shortest, so lengths are compared first."""
    count = len(digests)
    kinds, shapes, lengths, value_bytes, owners, versions = (
        _each(items, count)
        for items in (packed.kinds, packed.shapes, packed.lengths, packed.value_bytes, packed.owners, packed.versions)
    )
    tasks = packed.tasks or range(count)
    for name, items in (("tasks", tasks), ("owners", owners), ("versions", versions), ("rows", rows), ("kinds", kinds)):
        _check_count(packed.key, name, items, count)
    for name, items in (("shapes", shapes), ("lengths", lengths), ("sizes", value_bytes)):
        _check_count(packed.key, name, items, count)
    if itemsize := DTYPE_BYTES.get(packed.dtype, 0):
        value_bytes = [
            (sum(each) if each else row_count) * math.prod(shape) * itemsize
            for each, row_count, shape in zip(lengths, rows, shapes, strict=True)
        ]
    return list(
        map(
            Entry,
            map(ShardId, [batch.tasks[task] for task in tasks], itertools.repeat(packed.key)),
            rows,
            kinds,
            itertools.repeat(packed.dtype),
            shapes,
            lengths,
            value_bytes,
            digests,
            [batch.versions[number] for number in versions],
            [batch.owners[number].id for number in owners],
        )
    )


def _check_count(key: str, name: str, items: Sequence[Any], count: int) -> None:
    if len(items) != count:
        raise ProtocolError(f"key {key!r} has {count} entries and {len(items)} {name}")


def _numbered(things: Iterable[Iterable[T]]) -> dict[T, int]:
    """The different things in all lists, in the order of their first occurrence, with their numbers."""
    return {thing: number for number, thing in enumerate(dict.fromkeys(itertools.chain.from_iterable(things)))}


def _packed_index(index: RowIndex, rows: Sequence[int]) -> PackedIndex:
    if index.is_all_in_order(rows):
        return PackedIndex()
    return PackedIndex(index.part.astype("<u4").tobytes(), index.row.astype("<u4").tobytes())


def _index(packed: PackedIndex, rows: Sequence[int], total: int) -> RowIndex:
    """The index of `total` rows over parts that have `rows` rows."""
    if not packed.part and not packed.row:
        if sum(rows) != total:
            raise ProtocolError(f"entries of {sum(rows)} rows in a batch of {total}")
        return RowIndex.of_parts(rows)
    part, row = (np.frombuffer(data, "<u4").astype(np.int64) for data in (packed.part, packed.row))
    if len(part) != total or len(row) != total:
        raise ProtocolError(f"an index of {len(part)} and {len(row)} rows in a batch of {total}")
    counts = np.asarray(rows, dtype=np.int64)
    if int(part.max()) >= len(counts) or bool((row >= counts[part]).any()):
        raise ProtocolError("an index points outside of its entries")
    if len(np.unique(part)) != len(counts):
        raise ProtocolError("an entry without rows in the batch")
    return RowIndex(part, row, len(counts))


def _once(items: list[Any]) -> tuple[Any, ...]:
    return tuple(items[:1]) if items and items.count(items[0]) == len(items) else tuple(items)


def _each(items: tuple[Any, ...], count: int) -> Sequence[Any]:
    return items * count if len(items) == 1 else items
