"""Connections of this process to owners on its host, kept from one fetch to the next."""

from __future__ import annotations

import math
import threading
import time
from collections import deque

from inference_plugin.net.channel import Channel
from inference_plugin.net.gate import has_room
from trainer_adapters.batch.records import Owner

__all__ = ["Connections"]

KEPT_S = 300.0
"""Seconds after which a connection that nobody takes is closed."""

SPARE_DESCRIPTORS = 256
"""Free descriptors below which no connection is kept: somebody may need them."""

MOST_KEPT = 16
"""Largest number of connections that nobody uses; each takes a few descriptors here, and one at its owner."""


class Connections:
    """The connections that are not in use. All methods may be called on any thread; a channel belongs to whoever took it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Owner, Channel, float]] = deque()
        """Owner, channel and when to close it, in the order of that time."""
        self._lock = threading.Lock()

    def take(self, owner: Owner) -> Channel | None:
        """A connection to the owner, if there is one."""
        with self._lock:
            if (found := next((each for each in self._kept if each[0] == owner), None)) is None:
                return None
            self._kept.remove(found)
            return found[1]

    def keep(self, owner: Owner, channel: Channel) -> bool:
        """Takes over a channel on which no request is open; where descriptors are scarce, it closes the channel. Returns whether
        it is the only one that is kept: nobody may be waiting for `due_s` then."""
        channel.payload = None
        if not has_room(SPARE_DESCRIPTORS):
            channel.close()
            return False
        with self._lock:
            self._kept.append((owner, channel, time.monotonic() + KEPT_S))
            over = self._kept.popleft() if len(self._kept) > MOST_KEPT else None
            is_only = len(self._kept) == 1
        if over is not None:
            over[1].close()
        return is_only

    def close_all(self) -> None:
        """Closes the connections that nobody uses: their descriptors are needed."""
        with self._lock:
            unused = list(self._kept)
            self._kept.clear()
        for _, channel, _ in unused:
            channel.close()

    @property
    def due_s(self) -> float:
        """When to call `close_late`, on `time.monotonic()`'s clock; infinity where nothing is kept."""
        with self._lock:
            return self._kept[0][2] if self._kept else math.inf

    def close_late(self) -> None:
        """Closes the connections that nobody took for `KEPT_S`."""
        now_s = time.monotonic()
        while True:
            with self._lock:
                if not self._kept or self._kept[0][2] > now_s:
                    return
                late = self._kept.popleft()
            late[1].close()
