"""The manager's thread: it runs one operation after the other, each with a deadline that counts from its call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from inference_plugin.devices import Device, Mark, in_use
from inference_plugin.net.gate import no_thread
from inference_plugin.wire.errors import ManagerClosed, ProtocolError, SyncTimeout
from trainer_adapters.serial import SerialExecutor
from trainer_adapters.settings import Settings
from trainer_adapters.update.handle import called_from_inside, still_running, wait_for

__all__ = ["OperationThread"]

CLOSE_S = 20.0
"""How long closing may take after earlier operations: it ends pauses, catch-ups and segments in turn, each in a few seconds."""

SILENT_S = 2.0
"""After this time a warning says what closing waits for."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class OperationThread:
    """Any thread may submit an operation."""

    def __init__(self, settings: Settings) -> None:
        self.is_closing = False
        self.last_deadline_s = 0.0
        self._settings = settings
        self._closed: concurrent.futures.Future[None] | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._works_on: tuple[Device, int | None] | None = None
        try:
            if _program_ends:
                raise RuntimeError("interpreter shutdown")
            self._calls = SerialExecutor("weightwire-manager")
        except RuntimeError as error:
            raise no_thread(error, "a manager") from error
        self._calls.submit(self._begin)
        _of_process.add(self)

    @property
    def is_this_thread(self) -> bool:
        """Whether the calling thread is the manager's."""
        return threading.current_thread() is self._thread

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that made the manager: sockets and threads are the parent's."""
        return os.getpid() != self._pid

    def submit(
        self, deadline_s: float, work: Callable[..., Result], *arguments: Any, reads: bool = False
    ) -> concurrent.futures.Future[Result]:
        """Runs `work(*arguments)` after earlier operations. `reads`: it reads the trainer's tensors. Then it runs after the work
        that the calling thread has queued on its device so far (the step that made the tensors), and has read them when it ends.
        Raises as `check_open` does."""
        with self._lock:
            self.check_open()
            if _program_ends:
                raise ManagerClosed(
                    "no operation can begin while the program ends",
                    hint="call it at the end of the program's own code; close() works here too",
                    side="manager",
                )
            self.last_deadline_s = max(self.last_deadline_s, deadline_s)
            if not reads:
                return self._calls.submit(work, *arguments)
            device = in_use()
            return self._calls.submit(self._read, device, device.current(), device.record(), work, *arguments)

    def check_open(self) -> None:
        """Raises `ManagerClosed` once the manager is being closed, and `ProtocolError` in a fork of its process."""
        if self.is_foreign:
            raise ProtocolError(
                "this manager belongs to the process that made it, and this one is a fork of it",
                hint="make a SyncManager in this process",
                side="manager",
            )
        if self.is_closing:
            raise ManagerClosed("the manager is closed", side="manager")

    def warn_if_open(self, whose: str) -> None:
        """Logs that a manager was dropped and not closed. It is not closed in its place: a pause of it goes on, and
        closing waits for locks that the thread which collects the manager may hold. Python shows no `ResourceWarning` unless
        told to, and what stays may be as large as the model."""
        if not (self.is_closing or self.is_foreign or sys.is_finalizing()):
            logger.warning(
                "weightwire: %s was dropped without close(): its shared memory, threads and sockets stay until this process ends",
                whose,
            )

    def call(
        self,
        what: str,
        work: Callable[[float], Result],
        *,
        inside: bool = False,
        reads: bool = False,
        deadline_s: float = 0.0,
    ) -> Result:
        """Runs `work(deadline_s)` after earlier operations, and waits for it; `reads` as for `submit`. If it is called in the
        manager's thread itself, it runs at once if `inside` allows that, else it raises `ProtocolError`."""
        deadline_s = max(time.monotonic() + self._settings.timeout_s, deadline_s)
        if self.is_this_thread:
            if not inside:
                raise called_from_inside(what)
            return work(deadline_s)
        future = self.submit(deadline_s, work, deadline_s, reads=reads)
        try:
            if not wait_for(future, deadline_s):
                raise still_running()
        except BaseException:  # Ctrl-C as well: nobody would resume what pauses later
            future.cancel()  # if it has not begun; else it ends by itself
            raise
        return future.result()

    def close(self, work: Callable[[], None], *, wait: bool) -> None:
        """Runs `work` as the last operation, once. `wait`: returns when it is over; raises `SyncTimeout` if the current operation
        does not end by its deadline."""
        with self._lock:
            self.is_closing = True
            if (closed := self._closed) is None:
                closed = self._closed = self._last(work)
        if not wait or self.is_this_thread:
            return
        concurrent.futures.wait([closed], SILENT_S)
        if not closed.done():
            left_s = max(self.last_deadline_s - time.monotonic(), 0.0) + CLOSE_S
            logger.warning("weightwire: the manager closes after the operation under way, in %.0f s at most", left_s)
        if not wait_for(closed, max(self.last_deadline_s, time.monotonic()) + CLOSE_S):
            raise still_running()

    def _begin(self) -> None:
        self._thread = threading.current_thread()

    def last(self) -> concurrent.futures.Future[None]:
        """Done once all operations that were submitted so far are over, and the manager is closed if it is being closed."""
        with self._lock:
            return self._closed or self._calls.submit(lambda: None)

    def _last(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        if self._thread is None or self._thread.is_alive():
            closed = self._calls.submit(work)
            with contextlib.suppress(SyncTimeout):
                self._calls.close(0)  # after that
        else:  # the program ends, and has ended the thread
            work()
            closed = concurrent.futures.Future()
            closed.set_result(None)
        return closed

    def _read(
        self, device: Device, index: int | None, step: Mark, work: Callable[..., Result], *arguments: Any
    ) -> Result:
        if self._works_on != (device, index):
            device.use(index)  # sources that gather on a device need the device of this rank
            device.enter(device.new_queue())
            self._works_on = device, index
        device.wait(step)
        try:
            return work(*arguments)
        finally:
            device.synchronise()


_of_process: weakref.WeakSet[OperationThread] = weakref.WeakSet()
_program_ends = False


def _await_operations() -> None:
    """When the program ends: no operation begins, and those that were submitted end, by their deadlines. A source or a listener
    that hangs does not keep the process from ending."""
    global _program_ends
    _program_ends = True
    for last, deadline_s in [(one.last(), one.last_deadline_s) for one in _of_process if not one.is_foreign]:
        wait_for(last, deadline_s)


threading._register_atexit(_await_operations)  # type: ignore[attr-defined] # `atexit` knows no process of `multiprocessing`
