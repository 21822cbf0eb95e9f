"""Row arithmetic: which row of a column is which row of which part.

Every operation on a batch (chunk, split, reorder, filter, concat) is an operation on these indices, whether the parts are in
memory or elsewhere. numpy only; nothing here looks into a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Ints", "PartRows", "RowIndex", "Taken"]

Ints = npt.NDArray[np.int64]
P = TypeVar("P")


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Row i of a column is row `row[i]` of part `part[i]`. Immutable; every one of the `parts` parts has a row here."""

    part: Ints
    row: Ints
    parts: int

    @staticmethod
    def of_parts(rows: Sequence[int] | Ints) -> RowIndex:
        """All rows of parts that have `rows` rows, part by part."""
        counts = np.asarray(rows, dtype=np.int64)
        part = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        starts = np.cumsum(counts) - counts
        return RowIndex(part, np.arange(len(part), dtype=np.int64) - starts[part], len(counts))

    @staticmethod
    def concat(indices: Sequence[RowIndex]) -> RowIndex:
        """The rows of each index after those of the one before it, over all their parts."""
        shifts = np.cumsum([0, *(index.parts for index in indices)])
        counts = [len(index) for index in indices]
        part = np.concatenate([index.part for index in indices]) + np.repeat(shifts[:-1], counts)
        return RowIndex(part, np.concatenate([index.row for index in indices]), int(shifts[-1]))

    def __len__(self) -> int:
        return len(self.part)

    def take(self, rows: Ints | slice) -> Taken:
        """The given rows, in the given order."""
        return _without_unused_parts(self.part[rows], self.row[rows], self.parts)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """`(part, first row, row after the last)` of each longest run of rows that follow each other in one part."""
        if not len(self):
            return
        breaks = np.flatnonzero((np.diff(self.part) != 0) | (np.diff(self.row) != 1)) + 1
        starts = np.concatenate([[0], breaks])
        first = self.row[starts]
        lengths = np.diff(np.concatenate([starts, [len(self)]]))
        yield from zip(self.part[starts].tolist(), first.tolist(), (first + lengths).tolist(), strict=True)

    def is_all_in_order(self, rows: Sequence[int]) -> bool:
        """Whether the index is `RowIndex.of_parts(rows)`."""
        if len(self) != sum(rows):
            return False
        plain = RowIndex.of_parts(rows)
        return bool(np.array_equal(self.part, plain.part) and np.array_equal(self.row, plain.row))


@dataclass(frozen=True, eq=False)
class Taken:
    """Some rows of a `RowIndex`: their own index, and the numbers of the parts that it kept (None: all of them)."""

    index: RowIndex
    kept: Ints | None


@dataclass(frozen=True, eq=False)
class PartRows(Generic[P]):
    """Parts, and rows of them by reference. The parts are a numpy array of objects, so that choosing some costs no Python."""

    index: RowIndex
    parts: npt.NDArray[np.object_]

    @staticmethod
    def of(parts: Iterable[P], index: RowIndex) -> PartRows[P]:
        return PartRows(index, np.fromiter(parts, dtype=object, count=index.parts))

    @staticmethod
    def concat(some: Sequence[PartRows[P]]) -> PartRows[P]:
        """All rows, one after the other. A part that occurs again is the same part, so that cutting a column in pieces
        and putting them together gives the column."""
        index = RowIndex.concat([rows.index for rows in some])
        parts = np.concatenate([rows.parts for rows in some])
        ids = list(map(id, parts.tolist()))
        if len(set(ids)) == len(ids):
            return PartRows(index, parts)
        numbers: dict[int, int] = {}
        first = np.fromiter((numbers.setdefault(part, i) for i, part in enumerate(ids)), np.int64, len(parts))
        kept = np.fromiter(numbers.values(), np.int64, len(numbers))
        return PartRows(RowIndex(np.searchsorted(kept, first)[index.part], index.row, len(kept)), parts[kept])

    def take(self, taken: Taken) -> PartRows[P]:
        """The rows of `self.index.take(...)`."""
        return PartRows(taken.index, self.parts if taken.kept is None else self.parts[taken.kept])

    def __iter__(self) -> Iterator[P]:
        """The parts."""
        return iter(self.parts.tolist())

    def __getitem__(self, part: int) -> P:
        found: Any = self.parts[part]
        return found  # type: ignore[no-any-return]


def _without_unused_parts(part: Ints, row: Ints, parts: int) -> Taken:
    used = np.zeros(parts, dtype=np.bool_)
    used[part] = True
    if used.all():
        return Taken(RowIndex(part, row, parts), None)
    kept = np.flatnonzero(used)
    new_number = np.cumsum(used) - 1
    return Taken(RowIndex(new_number[part], row, len(kept)), kept)
