"""A process that may start no more threads, as at the limit of `ulimit -u`."""

from __future__ import annotations

import threading

import pytest

__all__ = ["Starts"]


class Starts:
    """The threads that this process starts from now on, by name. The `lacks`-th can't be started; 0: all can."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.lacks = 0
        start = threading.Thread.start

        def starting(thread: threading.Thread) -> None:
            self.names.append(thread.name)
            if len(self.names) == self.lacks:
                raise RuntimeError("can't start new thread")  # what CPython says at RLIMIT_NPROC
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", starting)

    def but(self, lacks: int) -> None:
        """Counts anew, and lets the `lacks`-th from now on fail."""
        self.names.clear()
        self.lacks = lacks
