"""Copies of bytes in rows, with their digests: in C where the package was built with a compiler, else by numpy and the xxhash
library, with the same result."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from inference_plugin.wire.compiled import FUNCTIONS, WHY_NOT
from inference_plugin.wire.digest import Digest, digest_bytes

__all__ = [
    "COPY",
    "copy_groups_and_digest",
    "copy_rows",
    "copy_rows_and_digest",
    "copy_table",
    "digest_rows",
    "digest_spans",
    "how_copies_are_made",
    "places_at",
    "places_in",
]

CACHED_BYTES = 512 << 10
"""Bytes that stay in a core's own cache between being digested and being copied."""

SPANS_AT_ONCE = 64
"""Most spans that the compiled `digest_rows` reads in one call."""

SHORTEST_STRIPED = 241
"""From this number of bytes on xxh3 works in stripes, as the compiled code does."""

ALIGNED_BYTES = 32
"""The compiled copies write vectors of so many bytes around the cache: in one pass with the digest only to multiples of them."""

PLACE = struct.Struct("@PN")
"""Where bytes lie in this process's memory, and how many: as C reads it."""

COPY = np.dtype(
    [
        (name, np.int64)
        for name in (
            "target", "target_start", "target_stride", "source", "source_start", "source_stride", "rows", "row_bytes",
        )
    ]
)  # fmt: skip
"""One entry of a table of copies: `target` and `source` number its buffers, the rest is as in `copy_rows`, and none is empty."""


def places_at(addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
    """`sizes[i]` bytes at each of `addresses`, as places: what the copies of many places take."""
    return b"".join([PLACE.pack(*place) for place in zip(addresses, sizes, strict=True)])


def places_in(places: bytes) -> list[tuple[int, int]]:
    """The address and the number of bytes of each place."""
    return list(PLACE.iter_unpack(places))


def copy_rows_by_numpy(
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

Copies `rows` times `row_bytes` bytes between C-contiguous buffers; strides are in bytes, from row to row. `streaming`
copies around the cache, for bytes that nobody reads soon. Releases the GIL. Raises ValueError, and writes nothing, if the
rows don't lie within both buffers. The buffers must not overlap.
"""


def copy_table_by_numpy(table: Any, targets: list[Any], sources: list[Any]) -> None:
    pairs: list[tuple[Any, Any]] = []
    for to, start, stride, of, source_start, apart, rows, nbytes in table.tolist():
        if not (0 <= to < len(targets) and 0 <= of < len(sources) and rows > 0 and nbytes > 0):
            raise ValueError(f"copy {len(pairs)} of a table doesn't lie within its buffers")
        source = _rows_of(sources[of], source_start, apart, rows, nbytes)
        pairs.append((_rows_of(targets[to], start, stride, rows, nbytes), source))
    for target, source in pairs:
        target[...] = source


copy_table: Callable[[Any, list[Any], list[Any]], None]
"""`copy_table(table, targets, sources)`: makes all copies of a contiguous array of `COPY` between C-contiguous buffers, around
the cache, and without the GIL. Raises ValueError, and writes nothing, if one doesn't lie within its buffers. No target may
overlap a source or another target."""


def _not_in_one_pass(*_: Any) -> None:
    return None


copy_and_digest_in_one_pass: Callable[..., int | None]
"""As `copy_rows_and_digest`; None, and nothing written, where it takes more than one pass."""
_digest_in_one_pass: Callable[[Any, int, int, list[tuple[int, int]]], list[int] | None]
_copy_groups: Callable[[list[tuple[Any, int, bytes]]], list[int | None]] | None
if FUNCTIONS is None:
    copy_rows, copy_table = copy_rows_by_numpy, copy_table_by_numpy
    copy_and_digest_in_one_pass = _digest_in_one_pass = _not_in_one_pass
    _copy_groups = None
else:
    copy_rows, copy_table, _copy_groups = FUNCTIONS.copy_rows, FUNCTIONS.copy_table, FUNCTIONS.copy_groups
    copy_and_digest_in_one_pass, _digest_in_one_pass = FUNCTIONS.copy_rows_and_digest, FUNCTIONS.digest_rows


def copy_rows_and_digest(
    target: Any, target_start: int, target_stride: int, source: Any, rows: int, row_bytes: int, source_stride: int = 0
) -> int:
    """Copies all of `source`, `rows` times `row_bytes` bytes, around the cache; returns its `digest_bytes`. With a
    `source_stride`, only these rows of `source` are read, from its start on; the digest is that of the rows packed.

    One pass over memory. Rows that can't be digested in the registers that copy them (short rows, some odd lengths or
    places, processors without AVX2) are digested and copied by turns, and stay cached in between. Otherwise as
    `copy_rows`.
    """
    where = target, target_start, target_stride, source, rows, row_bytes, source_stride
    digest = copy_and_digest_in_one_pass(*where)
    return copy_rows_and_digest_by_turns(*where) if digest is None else digest


def digest_rows(source: Any, stride: int, rows: int, spans: list[tuple[int, int]]) -> list[int]:
    """The `digest_bytes` of each span, whose `rows` rows count as contiguous.

    A span is (start, bytes of a row); `stride` is the distance between rows of every span. Spans side by side are read in
    one pass over memory. Releases the GIL. Raises ValueError if one doesn't lie within the buffer.
    """
    digests = _digest_in_one_pass(source, stride, rows, spans)
    return [digest_packed(source, stride, rows, *span) for span in spans] if digests is None else digests


def copy_groups_and_digest(groups: list[tuple[Any, int, bytes]]) -> list[int]:
    """For each group (target, start, places) copies the memory at `places` (`places_at`), one after the other, to
    `target[start:]`; returns the `digest_bytes` of all of it.

    One pass over memory, around the cache, where the digest can be made in registers. Releases the GIL. Raises ValueError if
    the bytes of a group don't lie within its target. The caller keeps the memory at `places` alive.
    """
    if _copy_groups is None:
        return [copy_joined_by_turns(*group) for group in groups]
    digests = _copy_groups(groups)
    if None not in digests:
        return cast("list[int]", digests)
    return [
        digest_bytes(memoryview(target)[start : start + _bytes_at(places)]) if digest is None else digest
        for (target, start, places), digest in zip(groups, digests, strict=True)
    ]


def digest_spans(source: Any, spans: list[tuple[int, int]]) -> list[int]:
    """The `digest_bytes` of each span (start, bytes) of a buffer. Releases the GIL."""
    memory = memoryview(source)
    long = [span for span in spans if span[1] >= SHORTEST_STRIPED]
    if len(long) == len(spans) <= SPANS_AT_ONCE and (in_one := _digest_in_one_pass(memory, 0, 1, spans)) is not None:
        return in_one
    digests: dict[tuple[int, int], int] = {}
    for first in range(0, len(long), SPANS_AT_ONCE):
        some = long[first : first + SPANS_AT_ONCE]
        digests.update(zip(some, _digest_in_one_pass(memory, 0, 1, some) or (), strict=False))
    return [
        found if (found := digests.get(span)) is not None else digest_bytes(memory[span[0] : span[0] + span[1]])
        for span in spans
    ]


def _bytes_at(places: bytes) -> int:
    return sum(nbytes for _, nbytes in places_in(places))


def copy_joined_by_turns(target: Any, start: int, places: bytes) -> int:
    flat = np.frombuffer(target, dtype=np.uint8)
    if len(places) % PLACE.size or any(nbytes and not address for address, nbytes in places_in(places)):
        raise ValueError("no memory lies at one of the places")
    if not 0 <= start <= flat.size - _bytes_at(places):
        raise ValueError(f"{_bytes_at(places)} bytes don't lie within the buffer")
    stream = Digest()
    for part in _parts_at(places):
        flat[start : start + part.size] = part
        stream.update(part.data)
        start += part.size
    return stream.intdigest()


def _parts_at(places: bytes) -> Iterator[Any]:
    """The memory at `places`, in parts that stay cached."""
    for address, nbytes in places_in(places):
        for done in range(0, nbytes, CACHED_BYTES):
            size = min(CACHED_BYTES, nbytes - done)
            yield np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address + done)), dtype=np.uint8)


def copy_rows_and_digest_by_turns(
    target: Any, target_start: int, target_stride: int, source: Any, rows: int, row_bytes: int, source_stride: int = 0
) -> int:
    flat = np.frombuffer(source, dtype=np.uint8)
    if rows < 1 or row_bytes < 1 or (not source_stride and flat.size != rows * row_bytes):
        raise ValueError(f"{flat.size} bytes aren't {rows} rows of {row_bytes}")
    _rows_of(target, target_start, target_stride, rows, row_bytes)  # all or nothing
    lying = _rows_of(source, 0, source_stride or row_bytes, rows, row_bytes)
    stream = Digest()
    if rows == 1:
        for done in range(0, row_bytes, CACHED_BYTES):
            part = lying[0, done : done + CACHED_BYTES]
            stream.update(part.data)
            copy_rows(target, target_start + done, part.size, part, 0, part.size, 1, part.size, True)
        return stream.intdigest()
    at_once = max(1, CACHED_BYTES // row_bytes)
    for first in range(0, rows, at_once):
        packed = np.ascontiguousarray(lying[first : first + at_once])
        stream.update(packed.data)
        start = target_start + first * target_stride
        copy_rows(target, start, target_stride, packed, 0, row_bytes, len(packed), row_bytes, True)
    return stream.intdigest()


def digest_packed(source: Any, stride: int, rows: int, start: int, row_bytes: int) -> int:
    if rows < 1 or row_bytes < 1:
        raise ValueError(f"{rows} rows of {row_bytes} bytes don't lie within the buffer")
    lying = _rows_of(source, start, stride, rows, row_bytes)
    if rows == 1:
        return digest_bytes(lying)
    stream = Digest()
    at_once = max(1, CACHED_BYTES // row_bytes)
    for first in range(0, rows, at_once):
        stream.update(np.ascontiguousarray(lying[first : first + at_once]).data)
    return stream.intdigest()


def how_copies_are_made() -> str:
    """For `weightwire doctor`."""
    if not WHY_NOT:
        return "C, around the cache"
    return f"numpy ({WHY_NOT}): install with a C compiler for updates that take two thirds of the time"
