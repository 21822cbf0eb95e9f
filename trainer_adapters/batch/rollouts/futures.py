"""Futures of rollouts, and the threads that run the user's callbacks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from inference_plugin.wire.errors import ArgumentError, WeightwireError

if TYPE_CHECKING:
    from trainer_adapters.batch.rollouts.machine_io import Rollout

__all__ = ["CallbackThread", "RolloutFuture", "in_loop"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CallbackThread:
    """Runs callbacks in order, on a thread of its own: a slow one keeps only those behind it waiting."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._ends = False
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, callback: Callable[[Any], Any], argument: Any) -> None:
        """Any thread: has `callback(argument)` called; after `end` on the calling thread."""
        with self._lock:
            if not self._ends:
                self._calls.put((callback, argument))
                return
        _run_one(callback, argument)

    def end(self) -> None:
        """The thread ends after the callbacks that wait."""
        with self._lock:
            if not self._ends:
                self._calls.put(None)
            self._ends = True

    def close(self, timeout_s: float) -> None:
        """As `end`, and waits for it; a callback that hangs is left behind after `timeout_s`."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, timeout_s))
            if self._thread.is_alive():
                logger.error(
                    "weightwire: a callback on the thread %s still runs; close() does not wait for it any longer",
                    self._thread.name,
                )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            _run_one(*call)
            del call  # it must not keep its argument alive until the next one comes


def _run_one(callback: Callable[[Any], Any], argument: Any) -> None:
    try:
        callback(argument)
    except BaseException:  # the user's code, a SystemExit too; other callbacks still have their turn
        logger.exception("weightwire: the callback %r raised an error", callback)


class RolloutFuture(Future["Rollout"]):
    """The future of one task. It ends exactly once: with a `Rollout`, with a typed error, or cancelled.

    `cancel` cancels the task at its worker too. Callbacks run on a thread of the pool's own, so they may take their time.
    """

    def __init__(self, task_id: str, cancel: Callable[[RolloutFuture], bool], callbacks: CallbackThread) -> None:
        super().__init__()
        self.task_id = task_id
        self._cancel_task = cancel
        self._callbacks = callbacks

    def cancel(self) -> bool:
        """Whether the task is cancelled now; false where it had ended."""
        return self._cancel_task(self) or self.cancelled()

    def add_done_callback(self, fn: Callable[[Future[Rollout]], object]) -> None:
        given: object = fn
        if not callable(given):
            raise ArgumentError(
                f"callback={given!r:.300} is a {type(given).__name__}", hint="a callback takes a future"
            )
        super().add_done_callback(lambda future: self._callbacks.call(fn, future))

    def on_end(self, quick: Callable[[Future[Rollout]], object]) -> None:
        """As `add_done_callback`, but on the pool's own thread: `quick` must neither wait nor raise."""
        super().add_done_callback(quick)

    def end(self, outcome: Rollout | WeightwireError | None) -> None:
        """Ends the future; None cancels it. Only the pool calls this."""
        if outcome is None:
            super().cancel()
            self.set_running_or_notify_cancel()
        elif isinstance(outcome, WeightwireError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


async def in_loop(future: Future[T], add: Callable[[Callable[[Future[T]], object]], None]) -> T:
    """Waits in asyncio for a future. `add` adds a quick callback to it, which does not queue behind the user's callbacks."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    add(tell)
    await ended.wait()
    try:
        return future.result(0)
    except CancelledError:
        raise asyncio.CancelledError from None
