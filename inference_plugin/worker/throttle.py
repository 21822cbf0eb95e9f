"""Background work gives way to decoding."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from inference_plugin.wire.errors import VersionConflict

__all__ = ["DecodingThrottle"]


class DecodingThrottle:
    """Called after each stretch of background work, by the thread that did it. While the engine decodes, the thread then rests,
    so that all `threads` together work for `share` of the time. Raises `VersionConflict` once `cancelled` is set.

    A stretch counts by the processor time that it took. By the clock, a thread that a busy host kept waiting would rest for that
    wait as well, and the busier the host, the longer.
    """

    def __init__(self, share: float, threads: int, decoding: Callable[[], bool], cancelled: threading.Event) -> None:
        self._rest_factor = threads / share - 1
        self._decoding = decoding
        self._cancelled = cancelled
        self._of_thread = threading.local()
        self._of_thread.counted_s = time.thread_time()  # a thread that starts with the work has counted 0

    def __call__(self, nbytes: int) -> None:
        worked_s = time.thread_time() - getattr(self._of_thread, "counted_s", 0.0)
        rest_s = worked_s * self._rest_factor if self._decoding() else 0.0
        if self._cancelled.wait(rest_s) if rest_s else self._cancelled.is_set():
            raise VersionConflict("the transaction was dropped")
        self._of_thread.counted_s = time.thread_time()
