"""A replica tells the trainers' managers that it is there: those of this host, found in the runtime directory, and the one
at `WEIGHTWIRE_REGISTRY`, where it keeps a lease.

The heartbeat is the registration again: a manager that was restarted knows everybody after one of them, and a lost one
costs nothing. On this host there is none: a manager that starts later finds the card, and it watches the process. All of it
runs in a thread of its own; what it can't reach it tries again until it is closed.
"""

from __future__ import annotations

import logging
import threading

from inference_plugin.wire import addresses
from inference_plugin.wire.channel import Channel, Outgoing, fan_out
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Body, Done, Leave, Register, ReplicaCard

__all__ = ["Registration"]

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0


class Registration:
    """Keeps `card` registered from construction to `close`. `address`: a registry besides those of this host, or None."""

    def __init__(self, address: str | None, card: ReplicaCard) -> None:
        self._address = address
        self._silence_s = Config.from_environment().silence_s
        self._card = card
        self._news = threading.Event()
        self._closing = False
        self._channels: dict[str, Channel] = {}
        self._told: dict[str, ReplicaCard] = {}
        self._silent: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="weightwire-registration", daemon=True)
        self._thread.start()

    def update(self, card: ReplicaCard) -> None:
        """Any thread: the card changed (torn, healed); the registries hear of it now."""
        self._card = card
        self._news.set()

    def close(self) -> None:
        """Leaves the registries that can be reached; may be called twice."""
        self._closing = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._register()
            except Exception as error:  # noqa: BLE001 -- whatever it is, it may be over the next time
                self._failed("the runtime directory", error)
            heartbeats = self._address is not None or self._silent
            self._news.wait(self._silence_s / 3 if heartbeats else None)
            self._news.clear()
        self._leave()

    def _leave(self) -> None:
        """Tells all registries there are now: a manager of this host that started later found the card by itself."""
        try:
            here = addresses.local_registries()
            for address in set(here) - set(self._channels):
                self._channels[address] = self._connect(address, here[address])
            replies = self._tell(list(self._channels), Leave(self._card.replica), timeout_s=1.0)
        except Exception as error:  # noqa: BLE001 -- it ends anyway, and is found to have ended
            replies = {"the runtime directory": WeightwireError.wrap(error)}
        for address, failure in replies.items():
            if failure is not None:
                logger.info("weightwire: %s could not leave %s: %s", self._card.replica, address, failure)
        for channel in self._channels.values():
            channel.close()

    def _register(self) -> None:
        """One round: whoever doesn't know this card yet, and the heartbeat."""
        here = addresses.local_registries()
        known = {*here, *([self._address] if self._address else [])}
        for gone in set(self._channels) - known:
            self._channels.pop(gone).close()
        self._told = {address: card for address, card in self._told.items() if address in known}
        self._silent &= known
        card = self._card
        due = [address for address in known if address == self._address or self._told.get(address) != card]
        for address in due:
            if address not in self._channels:
                try:
                    self._channels[address] = self._connect(address, here.get(address, 0))
                except Exception as error:  # noqa: BLE001 -- a key that can't be read costs this one only
                    self._failed(address, error)
        for address, failure in self._tell(due, Register(card, self._silence_s), timeout_s=ASK_TIMEOUT_S).items():
            if failure is not None:
                self._failed(address, failure)
                continue
            if address not in self._told or address in self._silent:
                logger.info("weightwire: %s is registered at %s", card.replica, address)
            self._silent.discard(address)
            self._told[address] = card

    def _connect(self, address: str, pid: int) -> Channel:
        where = addresses.boot_id() if pid else ""
        return Channel(address, pid=pid, peer_boot_id=where, side="manager", replica=self._card.replica)

    def _tell(self, registries: list[str], body: Body, *, timeout_s: float) -> dict[str, WeightwireError | None]:
        """What became of `body`, by registry; all are asked at once."""
        asked = [address for address in registries if address in self._channels]
        replies = fan_out([Outgoing(self._channels[address], body) for address in asked], Done, timeout_s=timeout_s)
        return {
            address: reply if isinstance(reply, WeightwireError) else None
            for address, reply in zip(asked, replies, strict=True)
        }

    def _failed(self, address: str, error: Exception) -> None:
        if address not in self._silent:
            logger.warning("weightwire: %s can't register at %s: %s; trying on", self._card.replica, address, error)
        self._silent.add(address)
        if address in self._channels:
            self._channels.pop(address).close()
