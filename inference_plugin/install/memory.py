"""Gives the memory of replaced weights back without holding the engine up."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading

from inference_plugin.install.standby import StandbyWeights

__all__ = ["free_later", "return_freed_memory"]

FREE_AFTER_S = 0.2
"""Replaced modules are freed this long after the commit, which must not wait for it."""

FREE_REST_S = 0.002
"""Pause between two of them, in which the engine's thread runs."""


def free_later(weights: StandbyWeights) -> None:
    """Frees `weights` in a thread: a packed model takes tens of milliseconds, in which the engine can decode.

    The caller must keep no reference to it.
    """
    if not weights.modules and not weights.moves:
        return
    with contextlib.suppress(RuntimeError):  # no thread can be started: it is freed here
        threading.Thread(target=_free, args=([weights],), name="weightwire-free", daemon=True).start()


def return_freed_memory() -> None:
    """Gives freed memory back to the system: without it the heap of a packed standby grows with every update."""
    gc.collect(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _free(owned: list[StandbyWeights]) -> None:
    """Drops the only reference to what `owned` holds, bit by bit: freeing holds the interpreter up."""
    rest = threading.Event()
    rest.wait(FREE_AFTER_S)
    for weights in owned:
        while weights.modules:
            weights.modules.pop()
            rest.wait(FREE_REST_S)
    owned.clear()
    return_freed_memory()
