"""An update under way, as the training program holds it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from inference_plugin.wire.errors import SyncTimeout
from inference_plugin.wire.reports import UpdateReport

__all__ = ["PendingUpdate"]


class PendingUpdate(concurrent.futures.Future[UpdateReport]):
    """The future of an update; `asyncio.wrap_future` makes it awaitable.

    The source is read until this rank has written its part, which is long before the replicas have installed it:
    `wait_released` returns then, and the weights may change. It can't be cancelled: other ranks take part in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._released = threading.Event()
        self.add_done_callback(lambda _: self._released.set())

    @property
    def released(self) -> bool:
        """Whether the weights may change."""
        return self._released.is_set()

    def wait_released(self, timeout_s: float | None = None) -> None:
        """Waits until the weights may change; also where the update failed, which `result()` tells. Raises `SyncTimeout`.

        Without a time limit it ends when the update does, by the manager's `timeout_s`.
        """
        if not self._released.wait(timeout_s):
            raise SyncTimeout(f"the weights are still being read after {timeout_s:g} s", side="trainer", phase="stage")

    def release(self) -> None:
        """For the manager: this rank has written its part."""
        self._released.set()

    def run(self, work: Callable[[], UpdateReport]) -> None:
        """For the manager's thread: does the work, and is finished with what comes of it."""
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):
                raise
