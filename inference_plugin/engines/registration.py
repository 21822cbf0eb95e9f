"""A replica registers itself with the trainer's manager and keeps its lease, where the two don't share a runtime directory.

The heartbeat is the registration again: a manager that was restarted knows everybody after one of them, and a lost one
costs nothing. It runs in a thread of its own; what it can't reach it tries again until it is closed.
"""

from __future__ import annotations

import logging
import threading

from inference_plugin.wire.channel import Channel
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Done, Leave, Register, ReplicaCard

__all__ = ["Registration"]

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0


class Registration:
    """Keeps `card` registered at `address` (`tcp://HOST:PORT`) from construction to `close`."""

    def __init__(self, address: str, card: ReplicaCard) -> None:
        self._address = address
        self._silence_s = Config.from_environment().silence_s
        self._card = card
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="weightwire-registration", daemon=True)
        self._thread.start()

    def update(self, card: ReplicaCard) -> None:
        """Any thread: the card changed (torn, healed); the registry hears of it now."""
        self._card = card
        self._news.set()

    def close(self) -> None:
        """Leaves the registry, if it can be reached; may be called twice."""
        self._closing = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        reached: bool | None = None
        channel: Channel | None = None
        while not self._closing:
            try:
                channel = channel or Channel(self._address, side="manager", replica=self._card.replica)
                channel.request(Register(self._card, self._silence_s), Done, timeout_s=ASK_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 -- whatever it is, it may be over the next time
                if reached is not False:
                    logger.warning("weightwire: %s can't register: %s; trying on", self._card.replica, error)
                reached = False
                if channel is not None:
                    channel.close()
                    channel = None
            else:
                if not reached:
                    logger.info("weightwire: %s is registered at %s", self._card.replica, self._address)
                reached = True
            self._news.wait(self._silence_s / 3)
            self._news.clear()
        if channel is not None:
            try:
                channel.request(Leave(self._card.replica), Done, timeout_s=1.0)
            except WeightwireError as error:
                logger.info("weightwire: %s could not leave: %s", self._card.replica, error)
            channel.close()
