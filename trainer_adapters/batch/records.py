"""The metadata of distributed rows: what travels through the controller instead of the rows.

All structs encode as arrays: an `Entry` takes about 60 bytes. They are frozen and hashable, and hold no location, no training
step and no offset into a batch. They refuse impossible contents: `BatchError` when they are made, `ProtocolError` when they are
decoded from a peer's bytes. The garbage collector passes over them (gc=False): they can't refer to themselves.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from inference_plugin.wire.errors import BatchError, WeightwireError, first_few
from inference_plugin.wire.manifest import DTYPE_BYTES
from inference_plugin.wire.messages.common import Address, BootId, Pid, StartTicks, Version

__all__ = [
    "ClearReport",
    "Entry",
    "Kind",
    "Owner",
    "OwnerId",
    "ShardId",
    "StoreStats",
    "TagValue",
    "Tags",
    "VersionSpan",
    "is_unicode",
    "listed_tasks",
]

MAX_ID_CHARS = 512
MAX_ROWS = 1 << 20
"""Rows of one entry: samples of one prompt."""
MAX_DIMS = 16
MAX_DIM = 1 << 40
MAX_ENTRY_BYTES = 1 << 44
MAX_VERSION = 1 << 62

TagValue: TypeAlias = bool | int | float | str | None
Tags: TypeAlias = Mapping[str, TagValue]
"""A few small values that a worker says of a task besides its rows, by name."""

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_CHARS)]
OwnerId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
RowCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
Dim = Annotated[int, msgspec.Meta(ge=0, le=MAX_DIM)]
Dims = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_DIMS)]
Lengths = Annotated[tuple[Dim, ...], msgspec.Meta(max_length=MAX_ROWS)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_ENTRY_BYTES)]


class Kind(enum.IntEnum):
    """How the rows of an entry lie in its bytes."""

    DENSE = 0
    """One tensor `[rows, *item_shape]`."""
    JAGGED = 1
    """Row i is a tensor `[lengths[i], *item_shape]`; the rows follow each other without padding."""
    VALUES = 2
    """A msgpack list of `rows` plain values: None, bool, int, float, str, bytes, lists and dicts of them."""


_JAGGED, _VALUES = Kind.JAGGED, Kind.VALUES  # an enum's own attributes are slow, and batches have many entries


class ShardId(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """The rows of one task under one key. Unique over a whole training; any characters, 1 to 512 each."""

    task_id: Id
    key: Id

    def __post_init__(self) -> None:
        task_id, key = self.task_id, self.key
        is_text = type(task_id) is str and type(key) is str
        if (
            is_text
            and 0 < len(task_id) <= MAX_ID_CHARS
            and 0 < len(key) <= MAX_ID_CHARS
            and task_id.isascii()
            and key.isascii()
        ):
            return
        for name, text in (("task id", task_id), ("key", key)):
            if not isinstance(text, str):
                raise BatchError(f"the {name} {text!r:.300} is a {type(text).__name__}, not a text")
            if not 0 < len(text) <= MAX_ID_CHARS:
                raise BatchError(f"a {name} has {len(text)} characters; allowed are 1 to {MAX_ID_CHARS}")
            if not is_unicode(text):
                raise BatchError(f"the {name} {text!r} holds a surrogate, which no message can carry")

    def __str__(self) -> str:
        return f"{self.task_id!r}:{self.key!r}"

    @staticmethod
    def checked(given: object) -> ShardId:
        """What a user gave as a shard. Raises `BatchError` for anything else."""
        if not isinstance(given, ShardId):
            hint = "give a ShardId, such as an entry's `shard`"
            raise BatchError(f"shard={given!r:.300} is a {type(given).__name__}", hint=hint)
        return given


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Weight versions that rows were generated with: the first and the last, both included."""

    first: Version
    last: Version

    def __post_init__(self) -> None:
        are_ints = type(self.first) is int and type(self.last) is int  # what a message can carry; True and 1.0 it can't
        if not are_ints or not 0 <= self.first <= self.last < MAX_VERSION:
            raise BatchError(f"versions {self.first} to {self.last} are no span: need ints, 0 <= first <= last < 2**62")

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"

    def joined(self, other: VersionSpan) -> VersionSpan:
        """The span that covers both."""
        return VersionSpan(min(self.first, other.first), max(self.last, other.last))


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One shard's metadata. `nbytes` is checked against shape and dtype.

    `item_shape` and `dtype` (torch's name) are of the tensor kinds, `lengths` of `Kind.JAGGED`; else they are empty.
    `digest` is the xxh3-64 of the bytes (`inference_plugin.wire.digest`). `owner` is the id of an `Owner`.
    """

    shard: ShardId
    rows: RowCount
    kind: Kind
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    item_shape: Dims
    lengths: Lengths
    nbytes: ByteCount
    digest: int
    versions: VersionSpan | None
    owner: OwnerId

    def __post_init__(self) -> None:
        rows, kind, lengths, itemsize = self.rows, self.kind, self.lengths, DTYPE_BYTES.get(self.dtype, 0)
        items = sum(lengths) if lengths else rows
        if (
            0 < rows <= MAX_ROWS
            and 0 <= self.digest < 1 << 64
            and self.nbytes <= MAX_ENTRY_BYTES
            and len(lengths) == (rows if kind is _JAGGED else 0)
            and (
                (itemsize and self.nbytes == items * math.prod(self.item_shape) * itemsize)
                if kind is not _VALUES
                else not (self.dtype or self.item_shape)
            )
        ):
            return
        raise BatchError(f"entry {self.shard}: {self._problem()}")

    def _problem(self) -> str:
        """What is wrong with an entry that can't be."""
        if not 0 < self.rows <= MAX_ROWS:
            return f"has {self.rows} rows; allowed are 1 to {MAX_ROWS}"
        if not 0 <= self.digest < 1 << 64:
            return f"its digest {self.digest} is not a 64-bit number"
        if self.kind is Kind.VALUES and (self.dtype or self.item_shape or self.lengths):
            return "plain values have no dtype, shape or lengths"
        if self.kind is not Kind.VALUES and self.dtype not in DTYPE_BYTES:
            return f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}"
        if len(self.lengths) != (self.rows if self.kind is Kind.JAGGED else 0):
            return f"{len(self.lengths)} lengths for {self.rows} rows; a jagged entry has one for each, any other none"
        return f"says {self.nbytes} bytes (at most {MAX_ENTRY_BYTES}), but its shape and dtype make another number"


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """The process that holds rows, and how to reach it. A batch carries each of its owners once.

    The scheme of `address` says what kind of owner it is: `ipc://` and `tcp://` are stores of this package.
    `boot_id`, `pid` and `start_ticks` name the process, so that a consumer on its host notices its end.
    """

    id: OwnerId
    address: Address
    boot_id: BootId = ""
    pid: Pid = 0
    start_ticks: StartTicks = 0


@dataclass(frozen=True)
class StoreStats:
    """What a store holds. `nbytes`: bytes of rows that can be fetched. `leased_bytes`: bytes of rows that were cleared or
    replaced while somebody still reads them. `spare_bytes`: memory that is kept for later rows. The budget bounds the sum of
    all three; spare memory gives way to rows."""

    tasks: int
    shards: int
    nbytes: int
    leased_bytes: int
    budget_bytes: int
    spare_bytes: int = 0


@dataclass(frozen=True)
class ClearReport:
    """What became of tasks that were to be cleared. `unknown`: ids that no owner had (or had cleared before).

    `failed` lists the owners that could not be asked, each with its error; their tasks may still be held.
    """

    cleared: int = 0
    unknown: int = 0
    failed: tuple[tuple[str, WeightwireError], ...] = ()

    def __str__(self) -> str:
        text = f"{self.cleared} cleared, {self.unknown} unknown"
        if self.failed:
            text += f"; not reached: {first_few([f'{owner} ({error})' for owner, error in self.failed])}"
        return text


def check_versions(versions: object) -> None:
    """Raises `BatchError` for anything but a `VersionSpan` or None."""
    if versions is not None and not isinstance(versions, VersionSpan):
        raise BatchError(f"versions={versions!r:.300}: give a VersionSpan(first, last), or None")


def listed_tasks(task_ids: Iterable[str]) -> list[str]:
    """Task ids, each once, in their order. Raises `BatchError` for one text, whose characters would each be taken for an id."""
    if isinstance(task_ids, str | bytes):
        raise BatchError(f"need a list of task ids, not the text {task_ids!r}", hint=f"use [{task_ids!r}]")
    given: Any = task_ids
    listed = list(given) if isinstance(given, Iterable) else [given]
    for task_id in listed:
        if not isinstance(task_id, str):
            raise BatchError(
                f"need a list of task ids, which are texts; {task_id!r:.300} is a {type(task_id).__name__}"
            )
    return list(dict.fromkeys(listed))


def is_unicode(text: str) -> bool:
    """Whether a text has no surrogates: only then can it travel."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
