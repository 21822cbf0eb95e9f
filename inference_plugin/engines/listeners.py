"""Tells third parties' listeners of commits, on a thread of its own: a slow listener delays neither the engine's next step
nor the manager's answer."""

from __future__ import annotations

import logging
from functools import partial

from inference_plugin.plugins import plugin_manager
from inference_plugin.worker.lane import Lane

__all__ = ["CommitListeners"]

logger = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Most commits that wait for a listener that hangs; it is not told of later ones."""
CLOSE_TIMEOUT_S = 2.0


class CommitListeners:
    """Calls `weightwire_committed` of every plug-in, in the order of the commits."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._lane = Lane("weightwire-listeners")

    def start(self) -> None:
        self._lane.start()

    def tell(self, group: str, version: int, stopped_s: float) -> None:
        """Any thread; returns at once."""
        if self._lane.waiting() >= MAX_WAITING:
            logger.warning("weightwire: a listener hangs; it is not told of version %d of %s", version, group)
            return
        hook = plugin_manager().hook.weightwire_committed
        self._lane.put(partial(hook, replica=self._replica, group=group, version=version, stopped_s=stopped_s))

    def close(self) -> None:
        """Waits up to `CLOSE_TIMEOUT_S` for listeners that are running; may be called twice."""
        self._lane.close(CLOSE_TIMEOUT_S)
