"""Copies of bytes in rows: in C where the package was built with a compiler, else by numpy, which gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["copy_rows", "how_copies_are_made"]


def _copy_rows_by_numpy(
    target: Any,
    target_start: int,
    target_stride: int,
    source: Any,
    source_start: int,
    source_stride: int,
    rows: int,
    row_bytes: int,
    streaming: bool,
) -> None:
    if not rows or not row_bytes:
        return
    _rows_of(target, target_start, target_stride, rows, row_bytes)[...] = _rows_of(
        source, source_start, source_stride, rows, row_bytes
    )


def _rows_of(buffer: Any, start: int, stride: int, rows: int, row_bytes: int) -> Any:
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if start < 0 or start + (rows - 1) * stride + row_bytes > flat.size or (rows > 1 and stride < row_bytes):
        raise ValueError(f"{rows} rows of {row_bytes} bytes don't lie within both buffers")
    return np.lib.stride_tricks.as_strided(flat[start:], (rows, row_bytes), (stride, 1), writeable=flat.flags.writeable)


copy_rows: Callable[[Any, int, int, Any, int, int, int, int, bool], None]
"""`copy_rows(target, target_start, target_stride, source, source_start, source_stride, rows, row_bytes, streaming)`.

Copies `rows` times `row_bytes` bytes, from and to where they start in C-contiguous buffers; strides are in bytes, from
row to row. `streaming` rows go around the cache: for what nobody reads soon. Releases the GIL. Raises ValueError if they
don't lie within both buffers; then nothing is written. The buffers must not overlap.
"""
try:
    from inference_plugin.wire._copying import copy_rows
except ImportError as error:
    copy_rows = _copy_rows_by_numpy
    _why_numpy = str(error)
else:
    _why_numpy = ""


def how_copies_are_made() -> str:
    """For `weightwire doctor`."""
    if not _why_numpy:
        return "C, around the cache"
    return f"numpy ({_why_numpy}): install with a C compiler for updates that take two thirds of the time"
