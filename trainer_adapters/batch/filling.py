"""Copies rows into a block of a store's memory, and makes their digest on the way.

Pages that exist are written through the mapping: one buffer in one pass over memory, several buffers in groups that stay in the
cache between being copied and being digested. Pages that do not exist yet are written through the descriptor: a first write
through a mapping takes a page fault, and zeros the page, for every 4 KiB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from inference_plugin.wire.copying import CACHED_BYTES, copy_rows_and_digest
from inference_plugin.wire.digest import Digest, digest_bytes
from inference_plugin.wire.errors import TransportUnavailable
from trainer_adapters.batch.memory import Block, Segment

__all__ = ["MOST_BUFFERS", "fill"]

MOST_BUFFERS = 512
"""Buffers that one write takes."""

ONE_PASS_BYTES = 4096
"""Bytes from this number on are copied and digested in one pass."""

Bytes = npt.NDArray[np.uint8]


def fill(block: Block, buffers: Sequence[Bytes]) -> int:
    """Copies buffers (1-D, contiguous, `block.nbytes` in all) one after the other into a block; returns the digest of its bytes.

    Raises `TransportUnavailable` where the system has no memory for it.
    """
    if block.segment is None:
        return digest_bytes(b"")
    if not block.is_warm:
        return _through_descriptor(block.segment, block.offset, buffers)
    target = block.memory
    if len(buffers) > 1:
        return _in_groups(target, buffers)
    (data,) = buffers
    if data.size >= ONE_PASS_BYTES:
        return copy_rows_and_digest(target, 0, data.size, data, 1, data.size)
    target[:] = data
    return digest_bytes(data)


def _in_groups(target: Bytes, arrays: Sequence[Bytes]) -> int:
    at, digest = 0, Digest()
    for group in _groups(arrays):
        part = target[at : at + sum(data.size for data in group)]
        np.concatenate(group, out=part)
        digest.update(part.data)
        at += part.size
    return digest.intdigest()


def _through_descriptor(segment: Segment, offset: int, arrays: Sequence[Bytes]) -> int:
    digest = Digest()
    try:
        for group in _groups(arrays):
            left = [data.data for data in group]
            for data in left:
                digest.update(data)
            while left:
                written = os.pwritev(segment.file.fileno(), left, offset)
                offset += written
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
    except OSError as error:
        raise TransportUnavailable(f"shm: rows can't be written to shared memory: {error}") from error
    return digest.intdigest()


def _groups(arrays: Iterable[Bytes]) -> Iterator[list[Bytes]]:
    """The bytes of arrays, in groups of about `CACHED_BYTES`."""
    group: list[Bytes] = []
    room = CACHED_BYTES
    for array in arrays:
        for start in range(0, array.size, CACHED_BYTES):
            group.append(array[start : start + CACHED_BYTES])
            room -= group[-1].size
            if room <= 0 or len(group) == MOST_BUFFERS:
                yield group
                group, room = [], CACHED_BYTES
    if group:
        yield group
