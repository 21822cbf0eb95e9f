"""A thread that does queued jobs, one after the other."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from inference_plugin.devices import in_use, start_thread

__all__ = ["Lane", "fail", "resolve"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Lane:
    """Starts its daemon thread when it is made. `device` is the accelerator that the thread uses, as for `Device.use`.

    `put` and `end` never block, so both may be called while a lock is held. A job that hangs holds up only its own lane. When the
    process ends, `cancel` is called, so that the running job ends soon, and queued jobs are dropped.
    """

    def __init__(self, name: str, device: int | None = None, cancel: Callable[[], None] = lambda: None) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._device = device
        self._cancel = cancel
        start_thread(self._run, name=name, stop=self._stop)

    def put(self, job: Callable[[], T]) -> Future[T]:
        """Queues `job`; the future gets its result or its error."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def waiting(self) -> int:
        """How many jobs are queued behind the running one."""
        return self._jobs.qsize()

    def end(self) -> None:
        """Ends the thread once the jobs that are queued now are done."""
        self._jobs.put(None)

    def _stop(self) -> None:
        self._cancel()
        with contextlib.suppress(queue.Empty):  # what has not begun never will
            while True:
                self._jobs.get_nowait()
        self.end()

    def _run(self) -> None:
        in_use().use(self._device)
        while (entry := self._jobs.get()) is not None:
            _do(*entry)
            del entry  # an idle lane must not keep a payload alive


def _do(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = job()
    except BaseException as error:  # the future carries the error; the lane goes on with the next job
        if not isinstance(error, Exception):
            logger.exception("weightwire: a job of %s ended the hard way", threading.current_thread().name)
        fail(future, error)
    else:
        resolve(future, result)


def resolve(future: Future[T], result: T) -> None:
    """Sets a result, unless the future has one or has failed."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def fail(future: Future[Any], error: BaseException) -> None:
    """Sets an exception, unless the future has a result or has failed."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
