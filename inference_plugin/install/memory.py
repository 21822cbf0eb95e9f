"""Memory of second sets: requests large pages, and frees memory without delaying the engine. Keeps Python's garbage collector
from delaying it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from inference_plugin.devices import start_thread
from inference_plugin.install.standby import StandbyWeights

__all__ = ["ReturningMemory", "ask_for_large_pages", "free_later", "return_freed_memory", "without_full_collections"]

LARGE_PAGE_BYTES = 2 << 20

FREE_AFTER_S = 0.2
"""Replaced modules are freed this long after the commit, which must not wait for that."""

FREE_REST_S = 0.002
"""Pause between two modules that are freed, in which the engine's thread runs."""

_NEVER = (1 << 31) - 1
_without_full = threading.Lock()
_thresholds: list[tuple[int, int, int]] = []
"""Those of before, once for each `without_full_collections` that has not ended."""


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Meanwhile Python's garbage collector looks at younger objects only, unless somebody sets its thresholds.

    A full collection looks at all objects of the process, in tens of milliseconds of the engine's own thread. What a trace and a
    proof of tens of thousands of tensors make would set off dozens of them.
    """
    with _without_full:
        before = _thresholds[0] if _thresholds else gc.get_threshold()
        if not _thresholds:
            gc.set_threshold(*before[:2], _NEVER)
        _thresholds.append(before)
    try:
        yield
    finally:
        with _without_full:
            _thresholds.pop()
            if not _thresholds and gc.get_threshold() == (*before[:2], _NEVER):
                gc.set_threshold(*before)


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Before the first write to CPU memory: asks for pages of 2 MiB, which need fewer address translations. No effect if
    `/sys/kernel/mm/transparent_hugepage/enabled` says `never`, nor on any other device."""
    start = -(-tensor.data_ptr() // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    nbytes = (tensor.data_ptr() + tensor.nbytes - start) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if tensor.device.type == "cpu" and nbytes > 0:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)


def free_later(weights: StandbyWeights) -> None:
    """Frees `weights` on a thread: a packed model takes tens of milliseconds, in which the engine can decode.

    The caller must keep no reference to `weights`.
    """
    if not weights.modules and not weights.data:
        return
    owned, hurry = [weights], threading.Event()
    with contextlib.suppress(RuntimeError):  # no thread can be started: the memory is freed on return
        start_thread(lambda: _free(owned, hurry), name="weightwire-free", stop=hurry.set)


def return_freed_memory() -> None:
    """Gives freed memory back to the system; without this, the heap of a packed standby grows with every update."""
    gc.collect(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class ReturningMemory:
    """Called after each module that was made anew: gives freed memory back to the system once this process's resident memory has
    grown by `limit_bytes`.

    Post-processing may take many times a module's own bytes for its intermediate results, and malloc keeps what those leave
    behind. So this goes by what the process holds, not by the size of the modules.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._before = _resident_bytes()

    def __call__(self) -> None:
        if _resident_bytes() - self._before >= self._limit_bytes:
            return_freed_memory()
            self._before = _resident_bytes()


def _resident_bytes() -> int:
    """0 where the system doesn't say."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    return 0


def _free(owned: list[StandbyWeights], hurry: threading.Event) -> None:
    """Drops the only references to the weights in `owned`, module by module: freeing blocks the interpreter."""
    hurry.wait(FREE_AFTER_S)
    for weights in owned:
        while weights.modules:
            weights.modules.pop()
            hurry.wait(FREE_REST_S)
    owned.clear()
    return_freed_memory()
