"""The arithmetic of LoRA, for PEFT's adapters and Megatron-Bridge's: products merged into a weight, and B scaled.

`scaling * B @ A` has the same bits in every box of the weight: it is computed tile by tile, on a grid of the whole weight.
Sums and products are in float32 (float64 if the weight is), and cast once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

__all__ = ["add_product", "exact_copy", "saved_name", "scaled"]

TILE = (256, 1024)
"""Rows and columns of a product that are computed at a time: a tile fits in the cache."""


def exact_copy(values: torch.Tensor) -> torch.Tensor:
    """A copy to which products are added: float64 if `values` are, else float32."""
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True)


def scaled(b: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """`scaling * b`, computed in float32 or wider and cast to `dtype`. An adapter travels with its B scaled: the engine needs no
    alpha, and its slots can be compared with what was sent, bit for bit."""
    return (b.to(torch.promote_types(b.dtype, torch.float32)) * scaling).to(dtype)


def saved_name(layer: str, factor: Literal["lora_A", "lora_B"]) -> str:
    """The name in PEFT's checkpoints of A or B, for the base model's layer of this name."""
    return f"base_model.model.{layer}.{factor}.weight"


def add_product(total: torch.Tensor, starts: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """Adds a box of `scaling * b @ a` to `total`, in place: the box of `total`'s shape that begins at `starts` of the whole
    weight. `a` is (rank, columns of the weight), `b` (rows of the weight, rank), both in `total`'s dtype."""
    (rows, columns), (first_row, first_column) = total.shape, starts
    for row, row_end in _tiles(first_row, rows, TILE[0]):
        for column, column_end in _tiles(first_column, columns, TILE[1]):
            tile = (b[row : row + TILE[0]] @ a[:, column : column + TILE[1]]) * scaling
            top, left = max(row, first_row), max(column, first_column)
            total[top - first_row : row_end - first_row, left - first_column : column_end - first_column] += tile[
                top - row : row_end - row, left - column : column_end - column
            ]


def _tiles(first: int, count: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and end of each tile of the grid that `first:first + count` touches, cut off where the range ends."""
    for start in range(first // size * size, first + count, size):
        yield start, min(start + size, first + count)
