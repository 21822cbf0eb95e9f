"""Takes slices that the ranks make together, by collectives, with a deadline.

A collective may wait longer than the operation allows. So such a source runs in a thread of its own, and the thread that takes
its slices waits until the operation's deadline. The source always runs to its end, even if nobody takes its slices any more,
because the other ranks need this one for their slices.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from inference_plugin.devices import in_use, start_thread
from inference_plugin.wire.errors import SyncTimeout
from inference_plugin.wire.tracing import carried
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.sources.left_behind import leave

__all__ = ["SlicesTogether"]

logger = logging.getLogger(__name__)

HINT = (
    "a rank that failed, or skipped an operation, takes no part in the source's collectives: its own error says why; the "
    "process group's timeout ends them"
)

LOOK_S = 0.5
"""How often `meanwhile` is called while a slice is awaited."""


class SlicesTogether:
    """One pass over a source's slices, for one thread, which closes it in the end.

    Taking a slice raises what the source raises, what `meanwhile` raises, and `SyncTimeout` at `deadline_s` (of
    `time.monotonic()`). `meanwhile` is called every `LOOK_S` while a slice is awaited.
    """

    def __init__(self, source: WeightSource, deadline_s: float, meanwhile: Callable[[], None]) -> None:
        self._source = source
        self._meanwhile = meanwhile
        self._deadline_s = deadline_s
        self._made: queue.SimpleQueue[LocalSlice | BaseException | None] = queue.SimpleQueue()
        self._asked = threading.Semaphore(0)
        self._is_taken = True
        self._device = in_use()
        self._queue = self._device.current_queue()
        self._thread = start_thread(carried(self._run), name="weightwire-slices", stop=self._stop_taking)

    def __iter__(self) -> Iterator[LocalSlice]:
        return self

    def __next__(self) -> LocalSlice:
        self._asked.release()  # the last slice is no longer needed
        while True:
            left_s = self._deadline_s - time.monotonic()
            try:
                made = self._made.get(timeout=max(0.0, min(left_s, LOOK_S)))
                break
            except queue.Empty:
                if left_s > LOOK_S:
                    self._meanwhile()
                    continue
            if left_s <= 0:
                raise SyncTimeout(
                    "the ranks did not make the next slice together by the operation's deadline",
                    hint=HINT,
                    side="trainer",
                )
        if isinstance(made, BaseException):
            raise made
        if made is None:
            raise StopIteration
        return made

    def close(self) -> None:
        """Lets the source run to its end, and waits for that until the deadline; then it is left behind. What it raises from now
        on is logged."""
        self._stop_taking()
        if not self.wait(self._deadline_s):
            leave(self._thread)

    def wait(self, deadline_s: float) -> bool:
        """Waits until the source has ended, or the deadline. Returns whether it has ended."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _stop_taking(self) -> None:
        self._is_taken = False
        self._asked.release()

    def _run(self) -> None:
        ended: BaseException | None = None
        try:
            self._device.enter(self._queue)  # so that slices are made before, and after, they are read
            self._asked.acquire()
            for item in self._source.slices():
                if self._is_taken:
                    self._made.put(item)
                    self._asked.acquire()
                del item
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that takes
            ended = error
            if not self._is_taken:
                logger.warning("weightwire: a source failed while it made slices only for the other ranks: %s", error)
        self._made.put(ended)
