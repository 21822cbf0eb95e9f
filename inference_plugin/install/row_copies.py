"""Placements as a table of copies of rows, which threads on all cores work through without Python's lock."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from inference_plugin.install.plan import Placement
from inference_plugin.wire.copying import COPY, copy_table
from inference_plugin.wire.tensors import bytes_view

__all__ = ["BoundRows", "RowTable", "helped_s", "row_table"]

PART_BYTES = 4 << 20
MOST_THREADS = 16
"""More threads don't copy any faster."""
START_S = 5.0
"""Longest time until all threads of a pool have started."""

_helped = threading.local()


class RowTable(NamedTuple):
    """Copies of rows, each of about `PART_BYTES` at most, which may run in any order: an array of `COPY`. `targets`, `sources`:
    the names of the memory that its numbers mean."""

    copies: Any
    targets: tuple[str, ...]
    sources: tuple[str, ...]

    def bound(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> BoundRows:
        """The table for contiguous tensors in the host's memory."""
        return BoundRows(
            self.copies, [_bytes_of(targets[n]) for n in self.targets], [_bytes_of(sources[n]) for n in self.sources]
        )


class BoundRows(NamedTuple):
    """A table of copies, or a part of it, and its memory."""

    copies: Any
    targets: list[Any]
    sources: list[Any]

    @property
    def nbytes(self) -> int:
        return int(self.copies["rows"] @ self.copies["row_bytes"])

    def steps(self, nbytes: int) -> list[BoundRows]:
        """Parts of about so many bytes each, in order."""
        ends = np.cumsum(self.copies["rows"] * self.copies["row_bytes"])
        cuts = np.flatnonzero(np.diff(ends // nbytes)) + 1
        edges = [0, *cuts.tolist(), len(self.copies)]
        return [self._replace(copies=self.copies[a:b]) for a, b in itertools.pairwise(edges) if a < b]

    def copy(self) -> None:
        """Makes the copies with non-temporal stores, with all cores if they are large. Once it returns or raises, no thread
        copies any more: what is written next, such as the way back, is not overwritten."""
        parts = min(MOST_THREADS, len(self.copies), 1 + self.nbytes // PART_BYTES)
        threads = min(parts, len(usable_cores())) if parts > 1 else 1
        helpers = _helpers_or_none(threads) if threads > 1 else None
        if helpers is None:
            copy_table(self.copies, self.targets, self.sources)
            return
        shares = [self._replace(copies=np.ascontiguousarray(self.copies[i::threads])) for i in range(threads)]
        running: list[Future[float]] = []
        try:
            for share in shares:
                running.append(helpers.submit(copy_share, share))
        finally:
            wait(running)
        _helped.seconds = helped_s() + sum(each.result() for each in running)


def helped_s() -> float:
    """The processor time of the threads that have helped this one to copy."""
    return getattr(_helped, "seconds", 0.0)


def row_table(placements: Sequence[Placement]) -> RowTable | None:
    """The placements as a table. None if one of them is not made of rows, or if two may overlap."""
    ends: dict[str, int] = {}
    targets: dict[str, int] = {}
    sources: dict[str, int] = {}
    copies: list[tuple[int, ...]] = []
    for placement in sorted(placements, key=lambda p: (p.dest.tensor, p.dest.offset)):
        source, dest = placement.source, placement.dest
        if (
            len(dest.sizes) > 2
            or any(region.strides[-1:] not in ((), (1,)) for region in (source, dest))
            or (len(dest.sizes) == 2 and min(source.strides[0], dest.strides[0]) < dest.sizes[1])
            or dest.offset < ends.get(dest.tensor, 0)
        ):
            return None
        ends[dest.tensor] = dest.end
        item_bytes = placement.dtype.itemsize
        rows, length = (1, 1, *dest.sizes)[-2:]
        row_bytes = length * item_bytes
        to, by, of, apart = (
            number * item_bytes for region in (dest, source) for number in (region.offset, (0, 0, *region.strides)[-2])
        )
        target = targets.setdefault(dest.tensor, len(targets))
        origin = sources.setdefault(source.tensor, len(sources))
        if rows == 1:
            copies += (
                (target, to + at, 0, origin, of + at, 0, 1, min(PART_BYTES, row_bytes - at))
                for at in range(0, row_bytes, PART_BYTES)
            )
        else:
            at_once = max(1, PART_BYTES // row_bytes) if row_bytes else 1
            copies += (
                (target, to + at * by, by, origin, of + at * apart, apart, min(at_once, rows - at), row_bytes)
                for at in range(0, rows if row_bytes else 0, at_once)
            )
    return RowTable(np.array(copies, dtype=COPY), tuple(targets), tuple(sources))


def copy_share(share: BoundRows) -> float:
    """Returns the processor time that it took."""
    began_s = time.thread_time()
    copy_table(*share)
    return time.thread_time() - began_s


def _bytes_of(tensor: torch.Tensor) -> Any:
    return bytes_view(tensor.detach()).numpy()


def usable_cores() -> frozenset[int]:
    """All cores on which threads of this process may run. An engine may have bound each of its threads to one core."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found |= os.sched_getaffinity(int(task.name))
    return frozenset(found or os.sched_getaffinity(0))


def _helpers_or_none(threads: int) -> ThreadPoolExecutor | None:
    """None where the system starts no more threads."""
    try:
        return helper_pool(threads)
    except RuntimeError:
        return None


@functools.cache
def helper_pool(threads: int) -> ThreadPoolExecutor:
    """A pool that stays. Its threads run on all of `usable_cores`; by default they would inherit the binding of their creator.

    All of them have started once it returns. A thread that can't start would fail a copy while others are writing, and what was
    queued for it would be written later. Raises RuntimeError if one can't.
    """
    cores = usable_cores()
    pool = ThreadPoolExecutor(
        threads, thread_name_prefix="weightwire-copy", initializer=lambda: os.sched_setaffinity(0, cores)
    )
    all_started = threading.Barrier(threads, timeout=START_S)
    try:
        for waiting in [pool.submit(all_started.wait) for _ in range(threads)]:
            waiting.result()
    except RuntimeError:
        all_started.abort()
        pool.shutdown(wait=False)
        raise
    return pool


os.register_at_fork(after_in_child=helper_pool.cache_clear)  # a fork has none of its parent's threads
