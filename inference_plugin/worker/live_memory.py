"""The memory of the engine's weights, which the engine's own commands may release while our threads read it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from inference_plugin.wire.errors import asleep_by_engine

__all__ = ["LiveMemory"]


class LiveMemory:
    """Who reads it beside the engine's own thread. On a GPU reading released memory ends the engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._is_released = False

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Around work that reads it. Raises `ReplicaAsleep` where it is released."""
        with self._changed:
            if self._is_released:
                raise asleep_by_engine()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def release(self, timeout_s: float) -> bool:
        """From now on nobody begins to read. Returns whether everybody has ended, for which it waits up to `timeout_s`."""
        with self._changed:
            self._is_released = True
            return self._changed.wait_for(lambda: not self._readers, timeout_s)

    def take_back(self) -> None:
        """The memory is there again."""
        with self._changed:
            self._is_released = False
