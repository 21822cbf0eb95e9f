"""Tells third parties' listeners of commits, on a thread of its own: a slow listener delays neither the engine's next step
nor the manager's answer."""

from __future__ import annotations

import logging
import queue
import threading

from inference_plugin.plugins import plugin_manager

__all__ = ["CommitListeners"]

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Most commits that wait for a listener that hangs; it is not told of later ones."""
CLOSE_TIMEOUT_S = 2.0


class CommitListeners:
    """Calls `weightwire_committed` of every plug-in, in the order of the commits."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._commits: queue.Queue[tuple[str, int, float] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="weightwire-listeners", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, group: str, version: int, stopped_s: float) -> None:
        """Any thread; returns at once."""
        try:
            self._commits.put_nowait((group, version, stopped_s))
        except queue.Full:
            logger.warning("weightwire: a listener hangs; it is not told of version %d of %s", version, group)

    def close(self) -> None:
        """Waits up to `CLOSE_TIMEOUT_S` for listeners that are running; may be called twice."""
        if self._thread.is_alive():
            try:
                self._commits.put_nowait(None)
            except queue.Full:
                return  # it hangs, and ends with the process
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (commit := self._commits.get()) is not None:
            group, version, stopped_s = commit
            try:
                plugin_manager().hook.weightwire_committed(
                    replica=self._replica, group=group, version=version, stopped_s=stopped_s
                )
            except Exception:  # a third party's
                logger.exception("weightwire: a listener failed")
