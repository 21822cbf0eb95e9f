"""Copies with all cores at once, for installations: the engine does not generate meanwhile."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inference_plugin.install.plan import Placement
from inference_plugin.wire.copying import copy_rows
from inference_plugin.wire.tensors import bytes_view

__all__ = ["RowCopy", "copy_on_all_cores", "row_copies"]

PART_BYTES = 4 << 20
MOST_THREADS = 16
"""More threads don't copy any faster."""


class RowCopy(NamedTuple):
    """The arguments of `copying.copy_rows`."""

    target: Any
    target_start: int
    target_stride: int
    source: Any
    source_start: int
    source_stride: int
    rows: int
    row_bytes: int


def row_copies(
    placements: Sequence[Placement], sources: Mapping[str, torch.Tensor], destinations: Mapping[str, torch.Tensor]
) -> list[RowCopy] | None:
    """The placements as copies of rows, each of about `PART_BYTES` at most, which may run in any order. None if a placement is
    not made of rows in CPU memory, or if two placements may overlap."""
    ends: dict[str, int] = {}
    copies: list[RowCopy] = []
    for placement in sorted(placements, key=lambda p: (p.dest.tensor, p.dest.offset)):
        source, dest = placement.source, placement.dest
        target, origin = destinations[dest.tensor], sources[source.tensor]
        if (
            target.device.type != "cpu"
            or origin.device.type != "cpu"
            or len(dest.sizes) > 2
            or any(region.strides[-1:] not in ((), (1,)) for region in (source, dest))
            or (len(dest.sizes) == 2 and min(source.strides[0], dest.strides[0]) < dest.sizes[1])
            or dest.offset < ends.get(dest.tensor, 0)
        ):
            return None
        ends[dest.tensor] = dest.end
        item_bytes = placement.dtype.itemsize
        rows, length = (1, 1, *dest.sizes)[-2:]
        dest_stride, source_stride = ((0, 0, *region.strides)[-2] * item_bytes for region in (dest, source))
        copy = RowCopy(
            _bytes_of(target), dest.offset * item_bytes, dest_stride,
            _bytes_of(origin), source.offset * item_bytes, source_stride,
            rows, length * item_bytes,
        )  # fmt: skip
        copies += _parts(copy)
    return copies


def copy_on_all_cores(copies: Sequence[RowCopy]) -> None:
    """Makes the copies with non-temporal stores; returns once all are made."""
    threads = min(MOST_THREADS, len(_cores()), len(copies))
    if threads <= 1:
        _copy(copies)
    else:
        list(_helpers(threads).map(_copy, [copies[i::threads] for i in range(threads)]))


def _copy(copies: Sequence[RowCopy]) -> None:
    for copy in copies:
        copy_rows(*copy, True)


def _parts(copy: RowCopy) -> list[RowCopy]:
    """A copy in parts of about `PART_BYTES`."""
    if copy.rows == 1:
        return [
            copy._replace(
                target_start=copy.target_start + at,
                source_start=copy.source_start + at,
                row_bytes=min(PART_BYTES, copy.row_bytes - at),
            )
            for at in range(0, copy.row_bytes, PART_BYTES)
        ]
    at_once = max(1, PART_BYTES // copy.row_bytes)
    return [
        copy._replace(
            target_start=copy.target_start + first * copy.target_stride,
            source_start=copy.source_start + first * copy.source_stride,
            rows=min(at_once, copy.rows - first),
        )
        for first in range(0, copy.rows, at_once)
    ]


def _bytes_of(tensor: torch.Tensor) -> Any:
    return bytes_view(tensor.detach()).numpy()


def _cores() -> frozenset[int]:
    """All cores on which threads of this process may run. An engine may have bound each of its threads to one core."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found |= os.sched_getaffinity(int(task.name))
    return frozenset(found or os.sched_getaffinity(0))


@functools.cache
def _helpers(threads: int) -> ThreadPoolExecutor:
    """A pool that stays. Its threads may run on all of `_cores`; by default they would inherit the binding of their creator."""
    cores = _cores()
    return ThreadPoolExecutor(
        threads, thread_name_prefix="weightwire-copy", initializer=lambda: os.sched_setaffinity(0, cores)
    )
