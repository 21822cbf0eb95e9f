"""A replica registers with the trainers' managers: those of this host, which it finds in the runtime directory, and the one
at `WEIGHTWIRE_REGISTRY`, where it holds a lease.

A heartbeat is the same registration again: after one round a restarted manager knows every replica, and a lost heartbeat
costs nothing. Managers of this host need none: one that starts later reads the card, and all watch the process. If the card,
or the whole runtime directory, is removed, the card is written again. A thread of its own does all of this, and tries again
what failed until it is closed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel, Outgoing, fan_out
from inference_plugin.net.listening import MEND_EVERY_S
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Body, Done, Leave, Register, ReplicaCard

__all__ = ["Registration"]

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0


class Registration:
    """Keeps `card` registered from construction to `close`. `address`: a registry besides those of this host, or None.
    `publish(again)` writes the card if it is not written yet, or in any case if `again`; it is called until it succeeds.
    Without `publish` there is no card on this host."""

    def __init__(self, address: str | None, card: ReplicaCard, publish: Callable[[bool], None] | None = None) -> None:
        self._address = address
        self._silence_s = Config.from_environment().silence_s
        self._card = card
        self._publish = publish
        self._unpublished = publish is not None and not addresses.is_published(card)
        self._news = threading.Event()
        self._closing = False
        self._channels: dict[str, Channel] = {}
        self._told: dict[str, ReplicaCard] = {}
        self._silent: dict[str, set[type[Exception]]] = {}
        self._thread = threading.Thread(target=self._run, name="weightwire-registration", daemon=True)
        self._thread.start()

    def update(self, card: ReplicaCard) -> None:
        """Any thread: the card changed (torn, healed), and the registries are told now."""
        self._card = card
        self._news.set()

    def close(self) -> None:
        """Leaves the registries that can be reached; may be called twice."""
        self._closing = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        due_s = 0.0
        while not self._closing:
            news = self._news.is_set()
            self._news.clear()
            try:
                if self._publish_again() or news or time.monotonic() >= due_s:
                    self._register()
                    heartbeats = self._address is not None or self._silent
                    due_s = time.monotonic() + (self._silence_s / 3 if heartbeats else math.inf)
            except Exception as error:  # noqa: BLE001 -- the next attempt may succeed
                self._failed("the runtime directory", error)
                due_s = time.monotonic() + self._silence_s / 3
            self._news.wait(max(0.0, min(due_s - time.monotonic(), MEND_EVERY_S)))
        self._leave()

    def _publish_again(self) -> bool:
        """Writes the card if it is not written yet or was removed. Returns whether there was none."""
        if self._publish is None:
            return False
        missing, removed = not addresses.is_published(self._card), not self._unpublished
        try:
            self._publish(missing)
        except Exception as error:  # noqa: BLE001 -- a full disk, say; it is logged once, and tried again
            if not self._unpublished:
                logger.warning("weightwire: the card of %s can't be written: %s; trying on", self._card.replica, error)
            self._unpublished = True
            return False
        self._unpublished = False
        if missing:
            why = "was removed while in use; it is there again" if removed else "is written now"
            logger.warning("weightwire: the card of %s %s", self._card.replica, why)
            self._told.clear()
        return missing

    def _leave(self) -> None:
        """Tells every registry that exists now: a manager of this host that started later has read the card by itself."""
        try:
            here = addresses.local_registries()
            for address in set(here) - set(self._channels):
                self._channels[address] = self._connect(address, here[address])
            replies = self._tell(list(self._channels), Leave(self._card.replica), timeout_s=1.0)
        except Exception as error:  # noqa: BLE001 -- the process ends anyway, which its managers notice
            replies = {"the runtime directory": WeightwireError.wrap(error)}
        for address, failure in replies.items():
            if failure is not None:
                logger.info("weightwire: %s could not leave %s: %s", self._card.replica, address, failure)
        for channel in self._channels.values():
            channel.close()

    def _register(self) -> None:
        """One round: tells the registries that do not know this card yet, and sends the heartbeat."""
        here = addresses.local_registries()
        known = {*here, *([self._address] if self._address else [])}
        for gone in set(self._channels) - known:
            self._channels.pop(gone).close()
        self._told = {address: card for address, card in self._told.items() if address in known}
        self._silent = {address: why for address, why in self._silent.items() if address in known}
        card = self._card
        due = [address for address in known if address == self._address or self._told.get(address) != card]
        for address in due:
            if address not in self._channels:
                try:
                    self._channels[address] = self._connect(address, here.get(address, (0, 0)))
                except Exception as error:  # noqa: BLE001 -- an unreadable key costs this registry only
                    self._failed(address, error)
        for address, failure in self._tell(due, Register(card, self._silence_s), timeout_s=ASK_TIMEOUT_S).items():
            if failure is not None:
                self._failed(address, failure)
                continue
            if address not in self._told or address in self._silent:
                logger.info("weightwire: %s is registered at %s", card.replica, address)
            self._silent.pop(address, None)
            self._told[address] = card

    def _connect(self, address: str, process: tuple[int, int]) -> Channel:
        pid, started = process
        where = addresses.boot_id() if pid else ""
        named: dict[str, Any] = {"side": "manager", "replica": self._card.replica}
        return Channel(address, pid=pid, start_ticks=started, peer_boot_id=where, **named)

    def _tell(self, registries: list[str], body: Body, *, timeout_s: float) -> dict[str, WeightwireError | None]:
        """Sends `body` to all registries at once. Returns each one's error, or None."""
        asked = [address for address in registries if address in self._channels]
        replies = fan_out([Outgoing(self._channels[address], body) for address in asked], Done, timeout_s=timeout_s)
        return {
            address: reply if isinstance(reply, WeightwireError) else None
            for address, reply in zip(asked, replies, strict=True)
        }

    def _failed(self, address: str, error: Exception) -> None:
        why: object = error
        kind = type(error)
        if isinstance(error, PeerLost | SyncTimeout):
            # Engines often start before the trainer does: nobody who reads this has called anything.
            why, kind = f"no manager answers ({error.message})", PeerLost
        if kind not in (told := self._silent.setdefault(address, set())):
            logger.warning("weightwire: %s can't register at %s yet: %s; trying on", self._card.replica, address, why)
        told.add(kind)
        if address in self._channels:
            self._channels.pop(address).close()
