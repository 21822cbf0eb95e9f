"""A thread that does queued jobs, one after the other."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

from inference_plugin.devices import in_use, start_thread

__all__ = ["Lane"]

logger = logging.getLogger(__name__)


class Lane:
    """`device` is the accelerator that the thread uses, as for `Device.use`.

    `put` and `end` never block, so both may be called while a lock is held. A job that raises is logged; one that hangs holds up
    only its own lane. When the process ends, `cancel` is called, so that the running job ends soon, and queued jobs are dropped.
    """

    def __init__(self, name: str, device: int | None = None, cancel: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._device = device
        self._cancel = cancel
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins with the jobs. Raises RuntimeError if no thread can be started."""
        self._thread = start_thread(self._run, name=self._name, stop=self._stop)

    def put(self, job: Callable[[], object]) -> None:
        """Queues `job`."""
        self._jobs.put(job)

    def waiting(self) -> int:
        """How many jobs are queued behind the running one."""
        return self._jobs.qsize()

    def end(self) -> None:
        """Ends the thread once the jobs that are queued now are done."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the thread's end. Returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self, timeout_s: float) -> None:
        """As `end`, and waits for that up to `timeout_s`. May be called twice."""
        self.end()
        self.join(timeout_s)

    def _stop(self) -> None:
        self._cancel()
        with contextlib.suppress(queue.Empty):  # what has not begun never will
            while True:
                self._jobs.get_nowait()
        self.end()

    def _run(self) -> None:
        in_use().use(self._device)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # the lane goes on with the next job
                logger.exception("weightwire: a job of %s failed", self._name)
            del job  # an idle lane must not keep a payload alive
