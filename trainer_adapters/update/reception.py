"""Rank 0's thread between two operations, when nobody else reads its socket: without it a rank that comes too late would wait for
rank 0's next operation, or for its own deadline."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import zmq

from inference_plugin.net.gate import no_thread

__all__ = ["Reception"]

logger = logging.getLogger(__name__)


class Reception:
    """`answer` is called whenever `socket` may have messages, from construction on, except between `pause` and `resume`. Raises
    `TransportUnavailable` where no thread can be started."""

    def __init__(self, socket: zmq.Socket[bytes], answer: Callable[[], None]) -> None:
        self._socket = socket
        self._answer = answer
        self._reading = threading.Lock()
        self._is_open = threading.Event()
        self._paused = False
        self._ended = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="weightwire-reception", daemon=True)
        self._is_open.set()
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake)
            raise no_thread(error, "a manager") from error

    def pause(self) -> None:
        """Returns when the caller may read the socket, until `resume`. The thread holds it only while it answers."""
        if not self._paused:
            self._is_open.clear()
            os.eventfd_write(self._wake, 1)
            self._reading.acquire()
            self._paused = True

    def resume(self) -> None:
        """Gives the socket back to the thread, if it was taken."""
        if self._paused:
            self._paused = False
            self._reading.release()
            self._is_open.set()

    def close(self) -> None:
        """Ends the thread."""
        self.pause()
        self._ended.set()
        self.resume()
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._is_open.wait()
            with self._reading:
                while self._is_open.is_set() and not self._ended.is_set():
                    try:
                        self._answer()
                    except Exception:  # a bug of ours must not leave late ranks without an answer
                        logger.exception("weightwire: a trainer rank could not be answered between operations")
                    watched: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._wake, zmq.POLLIN)]
                    ready = [source for source, _ in zmq.zmq_poll(watched, -1)]
                    if self._wake in ready:
                        os.eventfd_read(self._wake)
