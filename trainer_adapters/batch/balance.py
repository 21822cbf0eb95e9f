"""Balanced partition: rows over data-parallel ranks, so that each rank has about as many tokens.

Longest processing time first (R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969): the
longest row goes to the rank that has the fewest tokens. The most loaded rank has at most 4/3 - 1/(3 * ranks) times the tokens
of the best partition. With equal row counts, a rank that has all its rows takes no more (the k_i-partitioning of Babel,
Kellerer and Kotov, "The k-partitioning problem", Math. Methods of OR 47, 1998).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inference_plugin.wire.errors import BatchError
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.padding import is_mask
from trainer_adapters.batch.records import Kind
from trainer_adapters.batch.rows import Ints

__all__ = ["bounds", "check_parts", "partition", "token_counts", "whole_numbers"]


def bounds(rows: int, parts: int) -> Ints:
    """`[parts + 1]` row numbers that cut `rows` rows into `parts` runs; their sizes differ by at most 1, longer ones first."""
    check_parts(parts)
    sizes = np.full(parts, rows // parts, dtype=np.int64)
    sizes[: rows % parts] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


def partition(
    tokens: Ints, ranks: int, *, equal_rows: bool = False, groups: Sequence[str | None] | None = None
) -> list[Ints]:
    """The row numbers of each rank, ascending, by each row's number of tokens. Deterministic.

    `equal_rows`: every rank gets the same number of rows. `groups`: the group of each row; rows of a group stay together. Raises
    `BatchError` if that can't be, or for negative tokens.
    """
    if groups is not None:
        return _partition_groups(tokens, ranks, groups, equal_rows=equal_rows)
    check_parts(ranks)
    if len(tokens) and int(tokens.min()) < 0:
        raise BatchError(f"row {int(tokens.argmin())} has {int(tokens.min())} tokens")
    room, left_over = divmod(len(tokens), ranks)
    if equal_rows and left_over:
        raise BatchError(
            f"{len(tokens)} rows can't be split equally over {ranks} ranks",
            hint=f"filter {left_over} rows away, or add {ranks - left_over}, or allow unequal counts",
        )
    order = np.argsort(-tokens, kind="stable")
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, 0, rank) for rank in range(ranks)]  # tokens, then rows, so that rows without tokens spread too
    for row, count in zip(order.tolist(), tokens[order].tolist(), strict=True):
        load, rows, rank = heap[0]
        chosen[rank].append(row)
        if equal_rows and len(chosen[rank]) == room:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (load + count, rows + 1, rank))
    return [np.sort(np.asarray(mine, dtype=np.int64)) for mine in chosen]


def _partition_groups(tokens: Ints, ranks: int, groups: Sequence[str | None], *, equal_rows: bool) -> list[Ints]:
    if None in groups:
        raise BatchError(
            f"{sum(group is None for group in groups)} of {len(groups)} rows belong to no task, so tasks can't be kept whole",
            hint="split without whole_tasks, or split the batch that the rows came from",
        )
    numbers: dict[str | None, int] = {}
    number = np.fromiter((numbers.setdefault(group, len(numbers)) for group in groups), np.int64, len(groups))
    sizes = np.bincount(number, minlength=len(numbers))
    if equal_rows and len(found := np.unique(sizes)) > 1:
        raise BatchError(
            f"tasks have {int(found[0])} to {int(found[-1])} rows: whole tasks can't make equal numbers of rows",
            hint="leave out equal_rows, or whole_tasks",
        )
    of_group = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(of_group, number, tokens)
    return [np.flatnonzero(np.isin(number, mine)) for mine in partition(of_group, ranks, equal_rows=equal_rows)]


def token_counts(column: Column) -> Ints:
    """Tokens of each row: the numbers themselves where a row is one number, the set items of a dense mask, else the row's
    length, which needs no fetch. Raises `BatchError`, and `NotFetched` where the rows are needed for it."""
    schema = column.schema
    if schema.kind is Kind.JAGGED or (schema.kind is Kind.DENSE and schema.item_shape and not is_mask(column.key)):
        return column.lengths()
    value = column.value()
    if schema.kind is Kind.DENSE:
        value = (value != 0).flatten(1).sum(1) if schema.item_shape else value
    return whole_numbers(f"key {column.key!r}", value)


def whole_numbers(what: str, numbers: Any) -> Ints:
    """Numbers of rows or tokens as int64 `[n]`. Raises `BatchError`."""
    try:
        array = np.asarray(numbers.detach().cpu() if isinstance(numbers, torch.Tensor) else numbers)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BatchError(f"{what}: not a list of whole numbers: {error}") from None
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise BatchError(f"{what}: need a list of whole numbers, not {array.dtype} of shape {list(array.shape)}")
    return array.astype(np.int64)


def check_parts(parts: Any) -> None:
    """Raises `BatchError` unless rows can be cut into `parts` parts."""
    if isinstance(parts, bool) or not isinstance(parts, (int, np.integer)) or parts <= 0:
        raise BatchError(f"rows can't be cut into {parts!r} parts", hint="give a whole number of at least 1")
