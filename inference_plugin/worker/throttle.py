"""Background work gives way to decoding."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

from inference_plugin.install.row_copies import helped_s
from inference_plugin.wire.errors import VersionConflict

__all__ = ["DecodingThrottle", "TeamTime"]

SPINNING_S = 0.5
"""A team's threads may look for more work for as long after its last operation."""


class DecodingThrottle:
    """Called after each stretch of background work, by the thread that did it. While the engine decodes, the thread then rests,
    so that all `threads` together, also those of other processes, work for `share` of the time. Raises `VersionConflict` once
    `cancelled` is set.

    A stretch counts by the processor time that it took, `worked_s` of its thread. By the clock, a thread that a busy host kept
    waiting would rest for that wait as well, and the busier the host, the longer.
    """

    def __init__(
        self,
        share: float,
        threads: int,
        decoding: Callable[[], bool],
        cancelled: threading.Event,
        worked_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._rest_factor = threads / share - 1
        self._decoding = decoding
        self._cancelled = cancelled
        self._worked_s = worked_s
        self._of_thread = threading.local()
        self._of_thread.counted_s = worked_s()  # a thread that starts with the work has counted 0

    def __call__(self) -> None:
        worked_s = self._worked_s() - getattr(self._of_thread, "counted_s", 0.0)
        rest_s = worked_s * self._rest_factor if self._decoding() else 0.0
        if self._cancelled.wait(rest_s) if rest_s else self._cancelled.is_set():
            raise VersionConflict("the transaction was dropped")
        self._of_thread.counted_s = self._worked_s()


class TeamTime:
    """The processor time of the thread that makes it, of those that help it to copy, and of those among which torch divides its
    operations.

    OpenMP starts them with the first operation on many elements, and some of its libraries hand them on to later teams. So they
    are the threads that began after this one and are not Python's, and those of earlier teams that have been idle since.
    """

    _earlier_s: Mapping[int, float] = {}
    """The threads of the latest team of this process, and what each had worked by then."""

    def __init__(self) -> None:
        idle = {thread for thread, then_s in self._earlier_s.items() if 0.0 <= _worked_s(thread) - then_s < SPINNING_S}
        self._listed = _native_threads()
        self._others = self._listed - idle
        self._before_s = self._seen_s = {thread: _worked_s(thread) for thread in idle}

    def __call__(self) -> float:
        """Seconds so far. A thread counts once two calls have seen it: one of Python's looks like it while it starts or ends."""
        before, self._listed = self._listed, _native_threads()
        team = (self._listed & before) - self._others
        self._seen_s = self._seen_s | {t: max(_worked_s(t), self._seen_s.get(t, 0.0)) for t in team}
        TeamTime._earlier_s = self._seen_s
        return time.thread_time() + helped_s() + sum(self._seen_s.values()) - sum(self._before_s.values())


def _native_threads() -> frozenset[int]:
    """The threads of this process that Python did not start."""
    own = {thread.native_id for thread in threading.enumerate()}
    return frozenset(map(int, os.listdir("/proc/self/task"))) - own  # noqa: PTH208 -- `Path` makes an object for each


def _worked_s(thread: int) -> float:
    """The processor time of a thread of this process; -1 if it has ended."""
    try:
        return time.clock_gettime(~thread << 3 | 6)  # Linux's number of that clock
    except OSError:
        return -1.0
