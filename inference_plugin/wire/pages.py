"""Has pages of mapped memory exist before anybody reads or writes them, on several threads.

A page fault finds, clears and maps one page of 4 KiB at a time, on the thread that touches it: about 1 GB/s, where a copy into
pages that exist takes a tenth of the time. Threads that ask for different pages hardly wait for each other, unlike `fallocate`,
which holds the file's lock, and leaves the page tables to be built.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from inference_plugin.wire.compiled import FUNCTIONS

__all__ = ["MADV_POPULATE_WRITE", "populate"]

MOST_THREADS = 8

BYTES_PER_THREAD = 2 << 20
"""Fewer are not worth a thread; a page of 2 MiB is made by one thread."""

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""Linux 5.14. Python's mmap has no names for them."""

CPUS, NODES = Path("/sys/devices/system/cpu"), Path("/sys/devices/system/node")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(memory: Any, start: int, end: int, *, for_writing: bool = True) -> None:
    """Maps the pages of bytes `start:end` of a C-contiguous buffer, and has them exist; `start` is at the beginning of a page.

    Runs on half of the cores on which this thread may run, and not on more than `MOST_THREADS`. The pages lie on the NUMA node
    of this thread, as if it touched them. Releases the GIL, and keeps the buffer meanwhile. `for_writing`: False for memory that
    is mapped read-only. Raises OSError: EFAULT or ENOMEM where the system has no memory for the pages, EINVAL before Linux 5.14.
    """
    if end <= start:
        return
    advice = MADV_POPULATE_WRITE if for_writing else MADV_POPULATE_READ
    cores = os.sched_getaffinity(0)
    threads = min(MOST_THREADS, len(cores) // 2, (end - start) // BYTES_PER_THREAD)
    if FUNCTIONS is None:
        error = _populate_alone(memory, start, end, advice)
    elif threads <= 1:
        error = FUNCTIONS.populate(memory, start, end, advice, 1)
    else:
        with _near_this_thread(cores):
            error = FUNCTIONS.populate(memory, start, end, advice, threads)
    if error:
        raise OSError(error, os.strerror(error))


def _populate_alone(memory: Any, start: int, end: int, advice: int) -> int:
    held = np.frombuffer(memory, dtype=np.uint8)
    return ctypes.get_errno() if _libc.madvise(held.ctypes.data + start, end - start, advice) else 0


@contextlib.contextmanager
def _near_this_thread(cores: set[int]) -> Iterator[None]:
    """Inside, this thread and those that it starts run on one NUMA node: memory comes from the node of the thread that touches it
    first."""
    near = cores & node_of(_libc.sched_getcpu())
    if not near or near == cores:
        yield
        return
    with contextlib.suppress(OSError):  # not permitted: some pages will lie on other nodes
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # cores were taken from the process meanwhile, and the system chose others
            os.sched_setaffinity(0, cores)


@functools.cache
def node_of(core: int) -> frozenset[int]:
    """The cores of the NUMA node of a core; none where the system doesn't say."""
    for node in (CPUS / f"cpu{core}").glob("node*"):
        with contextlib.suppress(OSError, ValueError):
            ranges = (NODES / node.name / "cpulist").read_text().strip().split(",")
            ends = [(each.partition("-")[0], each.rpartition("-")[2]) for each in ranges if each]
            return frozenset(i for first, last in ends for i in range(int(first), int(last) + 1))
    return frozenset()
