"""Ragged rows to dense tensors. Padding is made where it is needed, so that it need not travel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from inference_plugin.wire.errors import BatchError, first_few
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.records import Kind

__all__ = ["PadValue", "dense", "is_mask", "padded", "unpadded"]

PadValue = bool | int | float | Mapping[str, bool | int | float]
"""One pad for all keys, or a pad for each key (masks need none)."""


def is_mask(key: str) -> bool:
    """Whether a key holds a mask, whose pad is always 0."""
    return "mask" in key


def padded(column: Column, pad_value: PadValue) -> torch.Tensor:
    """A column of tensors as `[n, longest, *item_shape]`: the first dimension of each row is padded at its end, with 0 if the
    key is a mask's. Dense columns are returned as they are. Raises `BatchError` for a pad that the dtype can't hold."""
    flat = column.flat()
    if column.schema.kind is not Kind.JAGGED:
        return flat
    lengths = column.lengths()
    longest = int(lengths.max()) if len(lengths) else 0
    pad = _scalar(column.key, pad_value, flat.dtype).to(flat.device)
    shape = (len(lengths), longest, *flat.shape[1:])
    if len(lengths) and int(lengths.min()) == longest:
        return flat.view(shape)
    present = torch.from_numpy(np.arange(longest) < lengths[:, None]).to(flat.device)
    if flat.dtype.itemsize == 1 and flat.dtype.is_floating_point:  # torch can't assign some 8-bit floats through a mask
        out = pad.view(torch.uint8).expand(shape).clone()
        out[present] = flat.view(torch.uint8)
        return out.view(flat.dtype)
    out = pad.expand(shape).clone()
    out[present] = flat
    return out


def unpadded(tensor: torch.Tensor, column: Column) -> list[torch.Tensor]:
    """The rows of a tensor `[n, longest, ...]` as views, each as long as the column's. Raises `BatchError` for another shape."""
    if not isinstance(tensor, torch.Tensor):
        raise BatchError(
            f"unpadded takes what a model computed, a tensor [rows, longest, ...], not a {type(tensor).__name__}"
        )
    lengths = column.lengths()
    longest = int(lengths.max()) if len(lengths) else 0
    if tensor.dim() < 2 or len(tensor) != len(lengths) or tensor.shape[1] < longest:
        raise BatchError(
            f"a tensor of shape {list(tensor.shape)} has no padded rows like key {column.key!r}: "
            f"need [{len(lengths)}, {longest} or more, ...]"
        )
    return [row[:length] for row, length in zip(tensor, lengths.tolist(), strict=True)]


def dense(column: Column) -> torch.Tensor:
    """A column of tensors as `[n, ...]`, without padding. Raises `BatchError` where rows differ in length."""
    if column.schema.kind is Kind.VALUES:
        raise BatchError(f"key {column.key!r} holds plain values, not tensors")
    flat = column.flat()
    if column.schema.kind is Kind.DENSE:
        return flat
    lengths = column.lengths()
    if not len(lengths):
        return flat.view(0, 0, *flat.shape[1:])
    if (shortest := int(lengths.min())) != (longest := int(lengths.max())):
        raise BatchError(
            f"key {column.key!r} is ragged: its rows have {shortest} to {longest} items",
            hint="use padded(pad_value), or batch[key] for a nested tensor",
        )
    return flat.view(len(lengths), longest, *flat.shape[1:])


def _scalar(key: str, pad_value: PadValue, dtype: torch.dtype) -> torch.Tensor:
    pad: Any = pad_value
    if is_mask(key):
        pad = 0
    elif isinstance(pad_value, Mapping):
        if key not in pad_value:
            raise BatchError(f"no pad for key {key!r}; there is one for {first_few(sorted(pad_value))}")
        pad = pad_value[key]
    if not isinstance(pad, (bool, int, float)):
        raise BatchError(f"the pad {pad!r} of key {key!r} is not a number")
    try:
        scalar = torch.tensor(pad, dtype=dtype, device="cpu")
        holds = (
            _holds(dtype, float(pad), scalar) if dtype.is_floating_point or dtype.is_complex else scalar.item() == pad
        )
    except (RuntimeError, OverflowError, ValueError) as error:
        raise BatchError(f"{dtype} can't hold the pad {pad!r} of key {key!r}: {error}") from None
    if not holds:
        raise BatchError(f"{dtype} can't hold the pad {pad!r} of key {key!r}")
    return scalar


def _holds(dtype: torch.dtype, pad: float, scalar: torch.Tensor) -> bool:
    """Whether `scalar` is the pad, rounded. Where a dtype has no infinity, nan, sign or 0, torch takes another value."""
    held = float(scalar.real if dtype.is_complex else scalar)
    if not math.isfinite(pad):
        return held == pad or (math.isnan(held) and math.isnan(pad))
    return abs(pad) <= torch.finfo(dtype).max and held * pad >= 0 and (held == 0 or pad != 0)
