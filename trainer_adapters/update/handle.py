"""The future of a running update, which the training program gets."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from inference_plugin.wire.errors import ArgumentError, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.reports import UpdateReport

__all__ = ["GRACE_S", "PendingUpdate", "called_from_inside", "still_running", "wait_for"]

logger = logging.getLogger(__name__)

GRACE_S = 15.0
"""An operation ends by its deadline. Its caller waits this much longer for the answer, because the other trainer ranks are told
and listeners are called first. Only a source or a listener that hangs takes longer."""

Result = TypeVar("Result")


class PendingUpdate(concurrent.futures.Future[UpdateReport]):
    """The future of an update; `asyncio.wrap_future` makes it awaitable.

    `wait_released` returns when this rank has written its part and the weights may change, long before the replicas have
    installed it. An update cannot be cancelled: other ranks take part in it. `result()` and `exception()` without a time limit
    raise `SyncTimeout` a little after `deadline_s` (of `time.monotonic()`). In the manager's own thread (`inside` returns True)
    they raise `ProtocolError` rather than wait for themselves. An error for which nobody has asked is logged when the future is
    dropped. `failure_of`: the error that a report means, if any.
    """

    def __init__(
        self,
        deadline_s: float,
        inside: Callable[[], bool],
        failure_of: Callable[[UpdateReport], WeightwireError | None],
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._deadline_s = deadline_s
        self._inside = inside
        self._failure_of = failure_of
        self._answer: UpdateReport | None = None
        self._is_asked = False
        self._released = threading.Event()
        self.add_done_callback(lambda _: self._released.set())

    def result(self, timeout: float | None = None) -> UpdateReport:
        """The report; raises what the update raised. `timeout`: as for any future."""
        if (early := self._waited("result()", timeout)) is None:
            return super().result(timeout or 0)
        logger.warning(
            "weightwire: the update to version %d is over; a listener, or the disk of its report, hangs", early.version
        )
        if (error := self._failure_of(early)) is not None:
            raise error
        return early

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the update raised, or None."""
        if (early := self._waited("exception()", timeout)) is None:
            return super().exception(timeout or 0)
        return self._failure_of(early)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[UpdateReport]], object]) -> None:
        """As for any future. Raises `ArgumentError` at once if `fn` can't be called, where the future would log it in the end."""
        if not callable(fn):
            raise ArgumentError(
                f"callback={fn!r} is a {type(fn).__name__}", hint="a callback takes the finished future"
            )
        super().add_done_callback(fn)

    @property
    def released(self) -> bool:
        """Whether the weights may change."""
        return self._released.is_set()

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Waits until the weights may change, or the update has failed (then `result()` raises). Raises `SyncTimeout` after
        `timeout_s`, by default the manager's."""
        if not self.released and self._inside():
            raise called_from_inside("wait_released()")
        limit_s = max(0.0, self._deadline_s - time.monotonic()) + GRACE_S if timeout_s is None else timeout_s
        if not self._released.wait(min(limit_s, threading.TIMEOUT_MAX)):
            raise SyncTimeout(f"the weights are still being read after {limit_s:g} s", side="trainer", phase="stage")

    def __del__(self) -> None:
        if self.done() and not self._is_asked and (error := super().exception(0)) is not None:
            logger.error("weightwire: an update failed, and nobody asked for its result: %s", error)

    def release(self) -> None:
        """For the manager: this rank has written its part."""
        self._released.set()

    def answer(self, report: UpdateReport) -> None:
        """For the manager: sets the update's report. It is final, even if a listener fails or hangs afterwards."""
        self._answer = report

    def run(self, work: Callable[[], UpdateReport]) -> None:
        """For the manager's thread: does the work, and finishes the future with its result or error."""
        try:
            report = work()
        except BaseException as error:
            if self._answer is not None:
                logger.exception(
                    "weightwire: the update to version %d is over, and then something failed", self._answer.version
                )
                self._finish(self._answer)
            else:
                self.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._finish(report)

    def _finish(self, report: UpdateReport) -> None:
        if (error := self._failure_of(report)) is not None:
            self.set_exception(error)
        else:
            self.set_result(report)

    def _waited(self, what: str, timeout: float | None) -> UpdateReport | None:
        """Waits unless there is a `timeout`. Returns the report of an update that is over while a listener still runs."""
        self._is_asked = True
        if timeout is not None or self.done():
            return None
        if self._inside():
            raise called_from_inside(what)
        if wait_for(self, self._deadline_s):
            return None
        if self._answer is None:
            raise still_running()
        return self._answer


def wait_for(future: concurrent.futures.Future[Any], deadline_s: float) -> bool:
    """Waits until the future is done, at most until `GRACE_S` after the deadline. The grace starts when the deadline is noticed,
    so that a process that stood still beyond it still gets its answer. Returns whether the future is done."""
    concurrent.futures.wait([future], max(0.0, deadline_s - time.monotonic()))
    concurrent.futures.wait([future], GRACE_S)
    return future.done()


def still_running() -> WeightwireError:
    """The error of an operation whose caller no longer waits."""
    return SyncTimeout(
        "the operation is still running in the manager's thread after its deadline",
        hint="a source, a listener or a callback hangs there; replicas keep what they serve, `versions()` asks them",
        side="manager",
    )


def called_from_inside(what: str) -> ProtocolError:
    """The error of a call that would wait for its own thread."""
    return ProtocolError(
        f"{what} was called in the manager's own thread (by a callback, a listener or a source) and would wait for itself",
        hint="use update_async there, or hand the call to another thread",
        side="manager",
    )
