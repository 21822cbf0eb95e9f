"""`scaling * B @ A` for any box of a weight, the same bits whatever the box: computed tile by tile of the whole weight's
grid."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["add_product"]

TILE = (256, 1024)
"""Rows and columns of a product that are computed at a time: a tile stays in the cache."""


def add_product(total: torch.Tensor, starts: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """Adds `scaling * b @ a` to `total`, in place: of the whole weight's product the box of `total`'s shape that begins
    at `starts`. `a` is (rank, columns of the weight), `b` (rows of the weight, rank), both in `total`'s dtype."""
    (rows, columns), (first_row, first_column) = total.shape, starts
    for row, row_end in _tiles(first_row, rows, TILE[0]):
        for column, column_end in _tiles(first_column, columns, TILE[1]):
            tile = (b[row : row + TILE[0]] @ a[:, column : column + TILE[1]]) * scaling
            top, left = max(row, first_row), max(column, first_column)
            total[top - first_row : row_end - first_row, left - first_column : column_end - first_column] += tile[
                top - row : row_end - row, left - column : column_end - column
            ]


def _tiles(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """The tiles of the grid that `first:first + count` touches: where each begins, and where it ends or the range does."""
    for start in range(first // size * size, first + count, size):
        yield start, min(start + size, first + count)
