"""A thread that runs calls one after the other, in the order in which they were submitted."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from inference_plugin.devices import start_thread
from inference_plugin.wire.errors import SyncTimeout, WeightwireError

__all__ = ["SerialExecutor"]

T = TypeVar("T")


class SerialExecutor:
    """Runs calls on one thread, in order: for calls that must not overlap, such as collectives on a process group.

    A call that raises fails its future; the thread goes on. Unlike a `ThreadPoolExecutor` of one thread, a call that hangs
    keeps neither `close` nor the end of the process waiting. asyncio's `run_in_executor` takes it.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = start_thread(self._run, name=name, stop=self._stop)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs `fn(*args, **kwargs)` after all calls submitted before. Raises `WeightwireError` once it is closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise WeightwireError(f"{self._thread.name} is closed and takes no call")
            self._calls.put((future, lambda: fn(*args, **kwargs)))
        return future

    def close(self, timeout_s: float) -> None:
        """Takes no more calls, and waits until all that were submitted have run; may be called twice. Raises `SyncTimeout`."""
        with self._lock:
            if not self._closed:
                self._calls.put(None)
            self._closed = True
        if threading.current_thread() is self._thread:
            return
        self._thread.join(max(0.0, timeout_s))
        if self._thread.is_alive():
            raise SyncTimeout(
                f"a call on {self._thread.name} still runs after {timeout_s:g} s",
                hint="the thread ends when that call does; it does not keep the process from ending",
            )

    def _stop(self) -> None:
        with contextlib.suppress(queue.Empty):  # what has not begun never will
            while True:
                self._calls.get_nowait()
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            _run_one(*call)
            del call  # it must not keep its arguments alive until the next one comes


def _run_one(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 -- a SystemExit too is the call's own
        future.set_exception(error)
        del future, call  # the error's traceback holds this frame: the arguments would stay until a garbage collection
    else:
        future.set_result(result)
