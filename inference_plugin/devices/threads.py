"""Threads that run torch, and the end of the process.

When a process ends, Python ends each daemon thread at the moment at which the thread asks for the interpreter's lock. In torch
a thread does so in a destructor that must not be left in this way: the whole process then aborts (SIGABRT). Therefore a process
that ends first stops these threads, and waits for them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["start_thread"]

logger = logging.getLogger(__name__)

END_S = 5.0
"""How long the end of the process waits for all of these threads together."""

_running: dict[threading.Thread, Callable[[], object]] = {}


def start_thread(
    run: Callable[[], object], *, name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Starts a daemon thread that may run torch. `stop`, which must not block, is called when the process ends, so that the
    thread ends soon; the process waits for it, `END_S` at most. Raises `RuntimeError` if no thread can be started."""

    def run_and_forget() -> None:
        nonlocal run
        try:
            run()
        finally:
            # What these two keep is freed while the end of the process still waits for this thread.
            _running[thread] = run = lambda: None
            del _running[thread]

    thread = threading.Thread(target=run_and_forget, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException:
        del _running[thread]
        raise
    return thread


@atexit.register
def _end() -> None:
    until_s = time.monotonic() + END_S
    stopped: set[threading.Thread] = set()
    while alive := [thread for thread in list(_running) if thread.is_alive()]:  # a fork has its parent's, which are not
        for thread in alive:
            if thread not in stopped and (stop := _running.get(thread)) is not None:
                with contextlib.suppress(Exception):  # the others are stopped all the same
                    stop()
                stopped.add(thread)
        if (left_s := until_s - time.monotonic()) <= 0:
            logger.warning("weightwire: the process ends while %s still runs", alive[0].name)
            return
        alive[0].join(left_s)
