"""Knows the replicas of the job: those of this host by the runtime directory, others by their registration.

Replicas tell the registry when they start, change or leave. It notices the end of a process of this host at once, and the
silence of another host when its lease ends. Nothing is polled.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from inference_plugin import __version__
from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.listening import remove_socket
from inference_plugin.net.processes import ProcessId, has_ended
from inference_plugin.net.reply_server import Asker, ReplyServer, Service
from inference_plugin.wire.errors import AuthError, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Body, Done, Leave, Register, ReplicaCard

__all__ = ["Registry", "give_back", "take"]

logger = logging.getLogger(__name__)

MAX_CARD_BYTES = 1 << 20


class Registry(Service):
    """Listens in the runtime directory, and at `listen` (None: for this host only). A card from another host is kept for as
    long as its lease is renewed."""

    def __init__(self, listen: str | None = None) -> None:
        self._cards: dict[str, tuple[ReplicaCard, float]] = {}
        self._heard_s: dict[str, float] = {}
        self._changed = threading.Condition()
        self.changes = 0
        self._listeners: list[Callable[[], None]] = []
        self._processes: set[ProcessId] = set()
        self._strangers: set[str] = set()
        """Replicas of another release of Weightwire, which were warned about."""
        local = addresses.new_registry_address()
        self._path = Path(local.removeprefix("ipc://"))
        try:
            self._server = ReplyServer(
                self,
                list(filter(None, (local, listen))),
                name="weightwire-registry",
                where={"side": "manager", "phase": "register"},
                max_bytes=MAX_CARD_BYTES,
            )
            self._server.start()
        except BaseException:
            remove_socket(self._path)
            raise
        self.address = self._server.addresses[-1]

    def cards(self) -> list[ReplicaCard]:
        """Living replicas of the job, by id."""
        now_s = time.monotonic()
        with self._changed:
            registered = {
                name: card for name, (card, until_s) in self._cards.items() if until_s > now_s and not _has_died(card)
            }
        local = {card.replica: card for card in addresses.discover()}
        return [card for _, card in sorted((registered | local).items())]

    def heard_s(self, replica: str) -> float:
        """When the replica last registered, on `time.monotonic()`'s clock; 0 if it never did."""
        with self._changed:
            return self._heard_s.get(replica, 0.0)

    def wait(
        self, count: int, timeout_s: float, look: Callable[[], list[ReplicaCard]] | None = None
    ) -> list[ReplicaCard]:
        """What `look` sees, by default `cards()`, once there are at least `count`. Raises `SyncTimeout`."""
        look = look or self.cards
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                changes = self.changes
            if len(found := look()) >= count:
                return found
            with self._changed:
                has_changed = self._changed.wait_for(
                    lambda: self.changes > changes,  # noqa: B023
                    deadline_s - time.monotonic(),
                )
            if not has_changed:
                raise SyncTimeout(
                    f"{len(found)} of {count} replicas of job {addresses.job_name()!r} are there after {timeout_s:g} s; "
                    f"{diagnosis.looked()}",
                    hint="`weightwire status` shows this host's replicas; an engine that can't register says in its log why: "
                    "another key, another registry; wait longer if it still starts",
                    side="manager",
                    phase="discover",
                )

    def wake(self) -> None:
        """Has all calls of `wait` look again."""
        with self._changed:
            self.changes += 1
            self._changed.notify_all()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Adds a listener, which the registry's thread calls when a replica appears, changes, is heard of or disappears. It must
        be quick. Returns a function that removes it."""
        with self._changed:
            self._listeners.append(listener)

        def remove() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return remove

    def close(self) -> None:
        """Ends the thread and closes the sockets; may be called twice."""
        self._server.close()
        remove_socket(self._path)

    # --- the registry's own thread -----------------------------------------------------------------------------------

    def started(self) -> None:
        self._watch_processes()

    def mended(self) -> None:
        self._watch_processes()  # replicas that started in between did not find this registry
        self._tell()

    def processes(self) -> Collection[ProcessId]:
        return self._processes

    def wakes_at_s(self) -> float:
        with self._changed:
            return min((until_s for _, until_s in self._cards.values()), default=math.inf)

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        self._processes.difference_update(ended)
        if self._expire(now_s) or ended:
            self._tell()

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body:
        self._take(body)
        return Done()

    def _take(self, body: Body) -> None:
        if isinstance(body, Leave):
            with self._changed:
                if self._cards.pop(body.replica, None) is not None:
                    logger.info("weightwire: replica %s left", body.replica)
                self._heard_s.pop(body.replica, None)
            self._tell()
            return
        if not isinstance(body, Register):
            raise ProtocolError(f"a registry takes no {type(body).__name__}")
        card = body.card
        if card.job != addresses.job_name():
            raise AuthError(
                f"replica {card.replica} is of job {card.job!r}, this is {addresses.job_name()!r}",
                hint="give engine and trainer the same WEIGHTWIRE_JOB",
            )
        now_s = time.monotonic()
        with self._changed:
            known = self._cards.get(card.replica)
            if is_heartbeat := known is not None and known[0] == card and known[1] > now_s:
                self._cards[card.replica] = known[0], now_s + body.lease_s
                self._heard_s[card.replica] = now_s
        if is_heartbeat:  # of hundreds of replicas each second: no directory is read
            self._tell()
            return
        local = {found.replica for found in addresses.discover()}  # these need no lease: it is seen when they are gone
        is_here = card.replica in local or card.boot_id == addresses.boot_id()
        for address in (card.address, *(worker.address for worker in card.workers)):
            if not is_here and not address.startswith("tcp://"):
                raise AuthError(
                    f"replica {card.replica} listens at {address}, which can't be reached from here",
                    hint="set the engine's WEIGHTWIRE_LISTEN to tcp:// and an address or interface of its host",
                )
        with self._changed:
            if not self._heard_s.get(card.replica):
                logger.info("weightwire: replica %s registered", card.replica)
            if card.replica not in local:
                self._cards[card.replica] = card, now_s + body.lease_s
            self._heard_s[card.replica] = now_s
        self._watch_processes()
        self._tell()

    def _watch_processes(self) -> None:
        """Keeps one watch per replica of this host."""
        try:
            cards = self.cards()
        except WeightwireError as error:  # a card that can't be read; the next update says so
            logger.warning("weightwire: %s", error)
            return
        with self._changed:
            self._heard_s = {card.replica: self._heard_s.get(card.replica, 0.0) for card in cards}
            strangers = [card for card in cards if card.package_version not in ("", __version__)]
            told, self._strangers = self._strangers, {card.replica for card in strangers}
        for card in strangers:
            if card.replica not in told:
                logger.warning(
                    "weightwire: replica %s runs weightwire %s, this trainer %s; they speak the same protocol or refuse each "
                    "other, but install the same version on both sides",
                    card.replica,
                    card.package_version,
                    __version__,
                )
        self._processes |= {(card.pid, card.start_ticks) for card in cards if card.boot_id == addresses.boot_id()}

    def _tell(self) -> None:
        self.wake()
        with self._changed:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _expire(self, now_s: float) -> bool:
        with self._changed:
            expired = [name for name, (_, until_s) in self._cards.items() if until_s <= now_s]
            for name in expired:
                del self._cards[name]
                logger.warning("weightwire: replica %s is lost: its lease was not renewed", name)
        return bool(expired)


def _has_died(card: ReplicaCard) -> bool:
    return card.boot_id == addresses.boot_id() and has_ended(card.pid, card.start_ticks)


_shared: dict[tuple[int, str | None, Path], tuple[Registry, int]] = {}
_sharing = threading.Lock()


def take() -> Registry:
    """This process's registry at `WEIGHTWIRE_REGISTRY`, which all its managers share. A fork makes one of its own: its parent's
    thread and sockets are not in it. Raises `AuthError`."""
    place = os.getpid(), addresses.registry_address(), addresses.runtime_dir()
    with _sharing:
        registry, users = _shared.get(place) or (Registry(place[1]), 0)
        _shared[place] = registry, users + 1
    return registry


def _after_fork_in_child() -> None:
    global _sharing
    _sharing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def give_back(registry: Registry) -> None:
    """A manager no longer needs the registry; the last one closes it."""
    with _sharing:
        for place, (shared, users) in list(_shared.items()):
            if shared is registry and users > 1:
                _shared[place] = shared, users - 1
            elif shared is registry:
                del _shared[place]
                registry.close()
