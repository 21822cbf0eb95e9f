"""Copies in rows, and their digests: C gives what numpy and the xxhash library give, and neither leaves its buffers."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.wire import copying
from inference_plugin.wire.compiled import WHY_NOT
from inference_plugin.wire.copying import places_at, places_in
from inference_plugin.wire.digest import digest_bytes
from tests.support.rig import LONG_S

compiled = pytest.mark.skipif(bool(WHY_NOT), reason=f"not compiled: {WHY_NOT}")

WAYS = [
    pytest.param(copying.copy_rows_by_numpy, id="numpy"),
    pytest.param(copying.copy_rows, id="C", marks=compiled),
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


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("copy_rows", WAYS)
def test_any_number_of_empty_rows_takes_no_time(copy_rows: Callable[..., None], streaming: bool) -> None:
    target, empty = np.zeros(8, dtype=np.uint8), (1 << 62, 0, streaming)
    copying_them = threading.Thread(target=copy_rows, args=(target, 0, 0, bytes(8), 0, 0, *empty), daemon=True)
    copying_them.start()
    copying_them.join(LONG_S)
    assert not copying_them.is_alive()


TABLE_WAYS = [
    pytest.param(copying.copy_table_by_numpy, id="numpy"),
    pytest.param(copying.copy_table, id="C", marks=compiled),
]
CopyTable = Callable[[Any, list[Any], list[Any]], None]


@pytest.mark.parametrize("copy_table", TABLE_WAYS)
@given(data=st.data())
def test_all_copies_of_a_table_are_made_between_the_buffers_that_they_name(copy_table: CopyTable, data: Any) -> None:
    random = np.random.default_rng(0)
    targets = [random.integers(0, 256, 20_000, dtype=np.uint8) for _ in range(2)]
    sources = [random.integers(0, 256, 6000, dtype=np.uint8) for _ in range(3)]
    expected, ends, entries = [target.copy() for target in targets], [0, 0], []
    for _ in range(data.draw(st.integers(0, 6))):
        rows, row_bytes = data.draw(st.integers(1, 3)), data.draw(st.one_of(st.integers(1, 200), st.integers(500, 900)))
        to, of = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
        stride, apart = (row_bytes + data.draw(st.integers(0, 70)) for _ in range(2))
        start, source_start = ends[to] + data.draw(st.integers(0, 70)), data.draw(st.integers(0, 3000))
        ends[to] = start + rows * stride
        entries.append((to, start, stride, of, source_start, apart, rows, row_bytes))
        for row in range(rows):
            at, here = start + row * stride, source_start + row * apart
            expected[to][at : at + row_bytes] = sources[of][here : here + row_bytes]
    copy_table(np.array(entries, dtype=copying.COPY), targets, sources)
    assert all(map(np.array_equal, targets, expected))


@pytest.mark.parametrize("copy_table", TABLE_WAYS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 1}, {"target": -1}, {"source": 2}, {"source": -1}, {"target_start": 21}, {"target_start": -1},
        {"source_start": 1}, {"source_start": -1}, {"target_stride": 9}, {"source_stride": 9}, {"source_stride": -10},
        {"rows": 4}, {"rows": 0}, {"rows": -1}, {"row_bytes": 0}, {"row_bytes": -1}, {"row_bytes": 11}, {"rows": 1 << 62},
        {"target_start": (1 << 63) - 1}, {"source_stride": (1 << 63) - 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_table_with_one_copy_outside_of_its_buffers_is_refused_whole(copy_table: CopyTable, wrong: Any) -> None:
    right = {"target": 0, "target_start": 0, "target_stride": 10, "source": 0, "source_start": 0, "source_stride": 10}
    right |= {"rows": 3, "row_bytes": 10}
    table = np.array([tuple(right.values()), tuple((right | wrong).values())], dtype=copying.COPY)
    target = np.zeros(50, dtype=np.uint8)
    with pytest.raises(ValueError, match="buffer"):
        copy_table(table, [target], [np.ones(30, dtype=np.uint8), np.ones(5, dtype=np.uint8)])
    assert not target.any()


@compiled
@pytest.mark.parametrize(
    ("table", "targets", "sources", "error"),
    [
        (bytes(63), [bytearray(8)], [bytes(8)], ValueError),
        (memoryview(bytes(72))[1:65], [bytearray(8)], [bytes(8)], ValueError),
        (bytes(64), [bytes(8)], [bytes(8)], BufferError),
        (bytes(64), [bytearray(8), 3], [bytes(8)], TypeError),
        (bytes(64), [bytearray(8)], [None], TypeError),
        (bytes(64), (bytearray(8),), [bytes(8)], TypeError),
        (3, [bytearray(8)], [bytes(8)], TypeError),
    ],
)
def test_what_is_no_table_or_no_memory_is_refused(
    table: Any, targets: Any, sources: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        copying.copy_table(table, targets, sources)


BOTH_WAYS = [
    pytest.param(copying.copy_rows_and_digest_by_turns, id="by turns"),
    pytest.param(copying.copy_rows_and_digest, id="at once", marks=compiled),
]


def place(nbytes: int, at: int) -> tuple[Any, int]:
    """Memory for `nbytes`, of known bits, and the first place in it that lies `at` bytes behind a multiple of 64."""
    memory = np.random.default_rng(1).integers(0, 256, nbytes + 128, dtype=np.uint8)
    return memory, -memory.ctypes.data % 64 + at


@st.composite
def rows_of_any_length(draw: st.DrawFn) -> tuple[int, int, int]:
    """`(rows, row_bytes, stride)`: whole stripes of 64 bytes more often than not, around the edges of blocks of 1024."""
    near = st.sampled_from([64, 240, 1024, 2048, 4096]).flatmap(lambda edge: st.integers(edge - 2, edge + 66))
    rows = draw(st.integers(1, 40))
    row_bytes = draw(st.one_of(near, st.integers(1, 40).map(lambda n: 64 * n), st.integers(1, 5000)))
    return rows, row_bytes, row_bytes + draw(st.one_of(st.integers(0, 4).map(lambda n: 32 * n), st.integers(0, 70)))


@pytest.mark.parametrize("copy_and_digest", BOTH_WAYS)
@given(shape=rows_of_any_length(), at=st.sampled_from([0, 32, 1, 16]), source_at=st.integers(0, 63))
def test_what_is_copied_and_its_digest_are_the_sources(
    copy_and_digest: Callable[..., int], shape: tuple[int, int, int], at: int, source_at: int
) -> None:
    rows, row_bytes, stride = shape
    target, start = place(rows * stride, at)
    expected = target.copy()
    memory, first = place(rows * row_bytes, source_at)
    source = memory[::-1].copy()[first : first + rows * row_bytes]
    for row in range(rows):
        to = start + row * stride
        expected[to : to + row_bytes] = source[row * row_bytes : (row + 1) * row_bytes]
    assert copy_and_digest(target, start, stride, source, rows, row_bytes) == digest_bytes(source)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("copy_and_digest", BOTH_WAYS)
@given(
    shape=rows_of_any_length(), at=st.sampled_from([0, 32, 1]), source_at=st.integers(0, 63), apart=st.integers(0, 200)
)
def test_rows_that_lie_apart_land_as_they_would_if_they_were_packed(
    copy_and_digest: Callable[..., int], shape: tuple[int, int, int], at: int, source_at: int, apart: int
) -> None:
    rows, row_bytes, stride = shape
    source_stride = row_bytes + apart
    memory, first = place(rows * source_stride, source_at)
    source = memory[::-1].copy()[first : first + (rows - 1) * source_stride + row_bytes]
    packed = np.concatenate([source[row * source_stride :][:row_bytes] for row in range(rows)])
    target, start = place(rows * stride, at)
    expected = target.copy()
    copying.copy_rows_by_numpy(expected, start, stride, packed, 0, row_bytes, rows, row_bytes, False)
    assert copy_and_digest(target, start, stride, source, rows, row_bytes, source_stride) == digest_bytes(packed)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("copy_and_digest", BOTH_WAYS)
@pytest.mark.parametrize(
    ("source_stride", "rows"), [(319, 3), (-320, 3), (-1, 3), (321, 3), (400, 3), (1 << 62, 2), (640, 3)]
)
def test_rows_that_do_not_lie_apart_within_their_source_are_refused_before_a_byte_is_written(
    copy_and_digest: Callable[..., int], source_stride: int, rows: int
) -> None:
    memory, start = place(4096, 0)
    before, of = memory.copy(), np.ones(960, dtype=np.uint8)
    with pytest.raises(ValueError, match="rows of"):
        copy_and_digest(memory, start, 320, of, rows, 320, source_stride)
    assert np.array_equal(memory, before)


def packed_one_by_one(source: Any, stride: int, rows: int, spans: list[tuple[int, int]]) -> list[int]:
    return [copying.digest_packed(source, stride, rows, *span) for span in spans]


def copy_one_group(target: Any, start: int, places: bytes) -> int:
    return copying.copy_groups_and_digest([(target, start, places)])[0]


JOINING_WAYS = [
    pytest.param(copying.copy_joined_by_turns, id="by turns"),
    pytest.param(copy_one_group, id="at once", marks=compiled),
]


@pytest.mark.parametrize("copy_joined", JOINING_WAYS)
@given(data=st.data(), at=st.sampled_from([0, 32, 1]))
def test_memory_of_many_places_lands_in_order_and_its_digest_is_that_of_the_whole(
    copy_joined: Callable[..., int], data: Any, at: int
) -> None:
    near = st.sampled_from([0, 64, 128, 240, 1024]).flatmap(lambda edge: st.integers(max(0, edge - 2), edge + 2))
    sizes = data.draw(st.lists(st.one_of(near, st.integers(0, 3000), st.just(64)), max_size=40))
    memory = np.random.default_rng(2).integers(0, 256, 8192, dtype=np.uint8)
    starts = [data.draw(st.integers(0, 100)) for _ in sizes]
    wanted = b"".join(memory[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True))
    target, start = place(len(wanted), at)
    before = target.copy()
    digest = copy_joined(target, start, places_at([memory.ctypes.data + one for one in starts], sizes))
    assert digest == digest_bytes(wanted)
    before[start : start + len(wanted)] = np.frombuffer(wanted, np.uint8)
    assert np.array_equal(target, before)


@pytest.mark.parametrize("copy_joined", JOINING_WAYS)
@pytest.mark.parametrize(("start", "sizes"), [(-1, [8, 8]), (49, [8, 8]), (0, [8, 65])])
def test_memory_that_does_not_fit_is_refused_and_nothing_is_written(
    copy_joined: Callable[..., int], start: int, sizes: list[int]
) -> None:
    source, target = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    with pytest.raises(ValueError, match="don't lie within the buffer"):
        copy_joined(target, start, places_at([source.ctypes.data] * 2, sizes))
    assert not target.any()


@pytest.mark.parametrize("copy_joined", JOINING_WAYS)
@pytest.mark.parametrize("places", [places_at([0], [8]), places_at([8], [1 << 63]), places_at([8], [8])[:-1], None])
def test_what_is_no_memory_is_refused(copy_joined: Callable[..., int], places: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        copy_joined(np.zeros(64, dtype=np.uint8), 0, places)


def test_places_are_those_that_they_were_made_of() -> None:
    assert places_in(places_at([], [])) == []
    assert places_in(places_at([64, (1 << 64) - 1], [0, 8])) == [(64, 0), ((1 << 64) - 1, 8)]
    for address, nbytes in ((8, -1), ("x", 1), (1 << 64, 1)):
        with pytest.raises(struct.error):
            places_at([address], [nbytes])  # type: ignore[list-item]


@given(sizes=st.lists(st.one_of(st.integers(0, 300), st.integers(241, 5000)), max_size=150))
def test_digests_of_spans_are_those_of_their_bytes(sizes: list[int]) -> None:
    memory = np.random.default_rng(3).integers(0, 256, 8192, dtype=np.uint8)
    spans = [(i * 7 % 3000, size) for i, size in enumerate(sizes)]
    assert copying.digest_spans(memory, spans) == [digest_bytes(memory[at : at + size].copy()) for at, size in spans]


DIGEST_WAYS = [
    pytest.param(packed_one_by_one, id="packed"),
    pytest.param(copying.digest_rows, id="at once", marks=compiled),
]


@pytest.mark.parametrize("digest_rows", DIGEST_WAYS)
@given(shape=rows_of_any_length(), others=st.lists(st.integers(1, 1500), max_size=4), at=st.integers(0, 63))
def test_the_digest_of_rows_apart_is_that_of_their_bytes_together(
    digest_rows: Callable[..., list[int]], shape: tuple[int, int, int], others: list[int], at: int
) -> None:
    rows, row_bytes, stride = shape
    widths = [row_bytes, *others]
    stride += sum(others)
    source, start = place(rows * stride, at)
    starts = [start + sum(widths[:i]) for i in range(len(widths))]
    digests = digest_rows(source, stride, rows, list(zip(starts, widths, strict=True)))
    for start, width, digest in zip(starts, widths, digests, strict=True):
        together = np.concatenate([source[start + row * stride :][:width] for row in range(rows)])
        assert digest == digest_bytes(together)


def test_as_many_spans_as_anybody_cuts() -> None:
    for count in (64, 65, 200):
        source = np.random.default_rng(count).integers(0, 256, (7, count, 64), dtype=np.uint8)
        digests = copying.digest_rows(source.reshape(-1), count * 64, 7, [(64 * i, 64) for i in range(count)])
        assert digests == [digest_bytes(np.ascontiguousarray(source[:, i])) for i in range(count)]


@pytest.mark.parametrize("digest_rows", DIGEST_WAYS)
@pytest.mark.parametrize(
    ("start", "stride", "rows", "row_bytes"),
    [(-1, 320, 3, 320), (65, 320, 3, 320), (0, 353, 3, 320), (0, 300, 3, 320), (0, 320, 0, 320)],
)
def test_rows_outside_of_a_buffer_have_no_digest(
    digest_rows: Callable[..., list[int]], start: int, stride: int, rows: int, row_bytes: int
) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows of .* bytes don't lie within"):
        digest_rows(np.zeros(1024, dtype=np.uint8), stride, rows, [(0, 64), (start, row_bytes)])


@compiled
def test_every_length_from_the_registers_has_the_librarys_digest() -> None:
    source = np.random.default_rng(2).integers(0, 256, 5 * 1024 + 1, dtype=np.uint8)
    target, start = place(source.size, 0)
    by_registers = 0
    for nbytes in range(1, source.size + 1):
        digest = copying.copy_and_digest_in_one_pass(target, start, 0, source[:nbytes], 1, nbytes)
        assert digest in (None, digest_bytes(source[:nbytes]))
        by_registers += digest is not None
    assert by_registers in (0, source.size - 240), "all, where the processor has AVX2, but the short ones"


@pytest.mark.parametrize("copy_and_digest", BOTH_WAYS)
@pytest.mark.parametrize(
    ("start", "stride", "rows", "row_bytes"),
    [(-1, 320, 3, 320), (0, 320, 4, 320), (0, 320, 3, 319), (65, 320, 3, 320), (0, 353, 3, 320), (0, 300, 3, 320)],
)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    copy_and_digest: Callable[..., int], start: int, stride: int, rows: int, row_bytes: int
) -> None:
    to, of = np.zeros(1024, dtype=np.uint8), np.ones(960, dtype=np.uint8)
    with pytest.raises(ValueError, match="rows of"):
        copy_and_digest(to, start, stride, of, rows, row_bytes)
    assert not to.any()
