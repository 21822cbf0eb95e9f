"""Copies in rows: C and numpy give the same bytes, and neither leaves its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.wire import copying

WAYS = [
    pytest.param(copying._copy_rows_by_numpy, id="numpy"),
    pytest.param(
        copying.copy_rows,
        id="C",
        marks=pytest.mark.skipif(bool(copying._why_numpy), reason=f"not compiled: {copying._why_numpy}"),
    ),
]


@pytest.mark.parametrize("copy_rows", WAYS)
@given(data=st.data())
def test_rows_land_where_they_belong_and_nothing_else_changes(copy_rows: Callable[..., None], data: Any) -> None:
    rows = data.draw(st.integers(0, 5))
    row_bytes = data.draw(st.one_of(st.integers(0, 200), st.integers(500, 3000)))
    streaming = data.draw(st.booleans())
    starts = [data.draw(st.integers(0, 70)) for _ in range(2)]
    strides = [row_bytes + data.draw(st.integers(0, 70)) for _ in range(2)]
    sizes = [
        start + max(rows - 1, 0) * stride + row_bytes + data.draw(st.integers(0, 70))
        for start, stride in zip(starts, strides, strict=True)
    ]
    random = np.random.default_rng(0)
    target, source = (random.integers(0, 256, size, dtype=np.uint8) for size in sizes)
    expected = target.copy()
    for row in range(rows):
        to, at = (start + row * stride for start, stride in zip(starts, strides, strict=True))
        expected[to : to + row_bytes] = source[at : at + row_bytes]
    copy_rows(target, starts[0], strides[0], source, starts[1], strides[1], rows, row_bytes, streaming)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("copy_rows", WAYS)
@pytest.mark.parametrize(
    ("target", "source"),
    [
        ((1, 10), (0, 10)),
        ((0, 10), (1, 10)),
        ((-1, 10), (0, 10)),
        ((0, 11), (0, 10)),
        ((0, 10), (0, 9)),
        ((31, 1), (0, 1)),
    ],
)
def test_rows_outside_of_a_buffer_are_refused(
    copy_rows: Callable[..., None], target: tuple[int, int], source: tuple[int, int]
) -> None:
    to, of = np.zeros(30, dtype=np.uint8), np.ones(30, dtype=np.uint8)
    with pytest.raises(ValueError, match="3 rows of 10 bytes don't lie within both buffers"):
        copy_rows(to, *target, of, *source, 3, 10, True)
    assert not to.any()


@pytest.mark.parametrize("copy_rows", WAYS)
def test_a_buffer_that_is_read_only_is_not_written(copy_rows: Callable[..., None]) -> None:
    of = np.ones(8, dtype=np.uint8)
    with pytest.raises((ValueError, TypeError, BufferError)):
        copy_rows(bytes(8), 0, 8, of, 0, 8, 1, 8, True)
