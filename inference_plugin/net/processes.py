"""Processes of this host: which one a pid means, and whether it still runs.

The kernel reuses the pid of a process that is gone, so a process is identified by its pid and its start: field 22 of
`/proc/<pid>/stat`, in clock ticks since boot. A start of 0 is unknown; then the pid alone counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ProcessId", "ProcessWatch", "ancestors_of", "has_ended", "parent_of", "start_ticks"]

ProcessId = tuple[int, int]
"""A process of this host: its pid and its `start_ticks`."""

LOOK_EVERY_S = 0.5
"""How often a process without a pidfd is looked up in /proc."""


def start_ticks(pid: int | None = None) -> int:
    """When a process started, by default this one, in clock ticks since boot; 0 if that can't be read."""
    try:
        return int(_fields(os.getpid() if pid is None else pid)[19])
    except OSError:
        return 0


def parent_of(pid: int) -> int:
    """The process that started `pid`, or that took it over; 0 if that can't be read or lies in another pid namespace."""
    try:
        return int(_fields(pid)[1])
    except OSError:
        return 0


def ancestors_of(pid: int) -> Iterator[int]:
    """The process that started `pid`, the one that started that, and so on, as far as can be read."""
    while (pid := parent_of(pid)) > 0:
        yield pid


def has_ended(pid: int, started: int = 0) -> bool:
    """Whether the process that has had `pid` since `started` is gone or a zombie. A process that can't be inspected (no
    permission, no free descriptor, no /proc) counts as alive, and so does one whose main thread alone has ended: the others
    still hold its memory and its sockets, as a pidfd says too."""
    if not 0 < pid < 1 << 31:
        return True
    try:
        fields = _fields(pid)
    except OSError:
        return not _takes_signals(pid)
    state, threads, since = fields[0], int(fields[17]), int(fields[19])
    return (state in (b"Z", b"X") and threads <= 1) or (started != 0 and since != started)


class ProcessWatch:
    """Watches one process of this host for its end. It belongs to one thread, and must be closed.

    Poll `fd`: it becomes readable when the process ends. Where the kernel gives no pidfd (EPERM, EMFILE, ENOSYS), `fd` is None
    and /proc is read instead: call `ended` again at `look_at_s`.
    """

    def __init__(self, pid: int, started: int = 0) -> None:
        self.fd: int | None = None
        self._pid = pid
        self._ended = False
        with contextlib.suppress(OSError, OverflowError):
            self.fd = os.pidfd_open(pid)
        # Read after the pidfd was opened, so that both are of the process that has the pid now.
        self._started = started or start_ticks(pid)
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        if has_ended(pid, self._started):
            self._end()

    @property
    def look_at_s(self) -> float:
        """When to call `ended` even without news of `fd`, on `time.monotonic()`'s clock; 0 once the process has ended."""
        if self._ended:
            return 0.0
        return math.inf if self.fd is not None else self._look_at_s

    def ended(self) -> bool:
        """Whether the process is known to have ended; from then on `fd` is None."""
        if not self._ended:
            self._look_at_s = time.monotonic() + LOOK_EVERY_S
            if has_ended(self._pid, self._started) if self.fd is None else _is_readable(self.fd):
                self._end()
        return self._ended

    def close(self) -> None:
        """Gives the descriptor back; may be called twice."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _end(self) -> None:
        self._ended = True
        self.close()


def _fields(pid: int) -> list[bytes]:
    """`/proc/<pid>/stat` from field 3, the state, on. Raises OSError."""
    # The process's name is in parentheses and may hold any bytes, parentheses too.
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # there is a process, and it is not ours
    return True


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
