"""Renews a transaction's leases from a thread of its own.

Whatever the manager's thread waits for (a source that gathers, a listener, a silent replica, a step boundary), the workers of
the transaction hear of this process every third of a lease. A renewal is sent without waiting for its answer, so a silent
worker delays no other. The answer to `Seal` shows whether the transaction still exists.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from inference_plugin.net.channel import Channel
from inference_plugin.wire.messages import Renew, ReplicaCard
from trainer_adapters.fleet.session import worker_connections

__all__ = ["Leases"]

logger = logging.getLogger(__name__)

END_S = 5.0
"""How long `close` waits for the thread. It never waits for a worker, but a machine under load may need a moment to end it."""


class Leases:
    """Renews the leases of the replicas in `renewed`, until `close` or the operation's deadline."""

    def __init__(self, request: Renew, *, lease_s: float, silence_s: float, until_s: float) -> None:
        self.request = request
        self.every_s = lease_s / 3
        self.silence_s = silence_s
        self.until_s = until_s
        self.renewed: tuple[ReplicaCard, ...] = ()
        self.ended = threading.Event()
        self._complained = False
        self._thread: threading.Thread | None = None
        self.sent_messages = 0

    def renew(self, cards: Iterable[ReplicaCard]) -> None:
        """From now on the leases of exactly these replicas are renewed. Raises RuntimeError if no thread can be started."""
        self.renewed = tuple(cards)
        if self.renewed and self._thread is None:
            thread = threading.Thread(target=self._run, name="weightwire-leases", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Ends the thread; may be called twice."""
        self.ended.set()
        if self._thread is not None:
            self._thread.join(END_S)

    def _run(self) -> None:
        channels: dict[str, Channel] = {}
        due_s = time.monotonic() + self.every_s
        while not self.ended.wait(max(0.0, due_s - time.monotonic())) and time.monotonic() < self.until_s:
            due_s = time.monotonic() + self.every_s
            self.renew_round(channels)
        for channel in channels.values():
            channel.close()

    def renew_round(self, channels: dict[str, Channel]) -> None:
        for card in self.renewed:
            for address, connect in worker_connections(card, self.silence_s).items():
                try:
                    if address not in channels:
                        channels[address] = connect()
                    channels[address].send(self.request)
                    self.sent_messages += 1
                except Exception as error:  # noqa: BLE001 -- one worker's trouble, or no free descriptor: the others go on
                    if not self._complained:
                        self._complained = True
                        logger.warning("weightwire: a lease of %s was not renewed: %s", card.replica, error)
