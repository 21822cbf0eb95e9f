"""A replica's card: a file in the runtime directory, and what registries are told."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from inference_plugin.net import addresses
from inference_plugin.net.listening import lacks_room
from inference_plugin.net.processes import start_ticks
from inference_plugin.net.registration import Registration
from inference_plugin.wire.errors import ConfigError, WeightwireError
from inference_plugin.wire.messages import ReplicaCard, ReplicaState

__all__ = ["PublishedCard", "replica_card"]

logger = logging.getLogger(__name__)


class PublishedCard:
    """The card as it is now, and as it was written last. Any thread."""

    def __init__(self, card: ReplicaCard, described: Callable[[], tuple[ReplicaState, str, dict[str, str]]]) -> None:
        """`described` gives the replica's state, the reason in words, and whose version is unknown."""
        self.card = card
        self._described = described
        self._lock = threading.Lock()
        self._written: ReplicaCard | None = None
        self._closed = False
        self._registry = addresses.registry_address()  # an invalid one is an error before anybody is told
        self._registration: Registration | None = None

    def start(self) -> None:
        """Writes the card and registers the replica: from now on trainers find it. On a full disk trainers of this host find it
        as soon as there is room."""
        try:
            self._write()
        except (OSError, ConfigError) as error:
            if not lacks_room(error):
                raise
            logger.warning(
                "weightwire: trainers of this host don't find the engine before its card has room: %s", error
            )
        self._registration = Registration(self._registry, self.card, self._write)

    def show(self) -> None:
        """Publishes how the replica stands, if that changed. A card that can't be written now is written later, by the
        registration's thread."""
        with self._lock:
            state, detail, unknown = self._described()
            if (self.card.state, self.card.detail, self.card.unknown) == (state, detail, unknown):
                return
            self.card = msgspec.structs.replace(self.card, state=state, detail=detail, unknown=unknown)
        try:
            self._write()
        except Exception:
            logger.exception("weightwire: the card can't be written; trying on")
        if self._registration is not None:
            self._registration.update(self.card)

    def close(self) -> None:
        """Takes the card away and leaves the registries."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(OSError, WeightwireError):
                addresses.remove_card(self.card)
        if self._registration is not None:
            self._registration.close()

    def _write(self, again: bool = False) -> None:
        """Writes the card if it has changed, or `again`."""
        with self._lock:
            if (again or self.card != self._written) and not self._closed:
                addresses.write_card(self.card)
                self._written = self.card


def replica_card(**fields: Any) -> ReplicaCard:
    """A card of this process, with the fields filled in that are the same for every engine."""
    from inference_plugin import __version__

    return ReplicaCard(
        job=addresses.job_name(),
        pid=os.getpid(),
        start_ticks=start_ticks(),
        boot_id=addresses.boot_id(),
        package_version=__version__,
        **fields,
    )
