"""The replicas that a manager knows of: those of this host by the runtime directory, others by their registration.

All of them tell the registry when they come, change or leave; the end of a process of this host is seen by its pidfd, the
silence of another host by the end of a lease. So nobody need look again and again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from inference_plugin.wire import addresses, codec
from inference_plugin.wire.channel import open_pidfd
from inference_plugin.wire.errors import AuthError, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.listening import Listener
from inference_plugin.wire.messages import Body, Done, Failed, Leave, Register, ReplicaCard

__all__ = ["Registry", "give_back", "take"]

logger = logging.getLogger(__name__)

MAX_CARD_BYTES = 1 << 20


class Registry:
    """Listens in the runtime directory, and at `listen` (None: for this host only). A card from another host is kept for as
    long as its lease is renewed."""

    def __init__(self, listen: str | None = None) -> None:
        self._cards: dict[str, tuple[ReplicaCard, float]] = {}
        self._heard_s: dict[str, float] = {}
        self._changed = threading.Condition()
        self._changes = 0
        self._listeners: list[Callable[[], None]] = []
        self._pidfds: dict[int, int] = {}
        self._sockets: list[Listener] = []
        local = addresses.new_registry_address()
        self._path = Path(local.removeprefix("ipc://"))
        try:
            for address in filter(None, (local, listen)):
                self._sockets.append(Listener(zmq.ROUTER, address, max_bytes=MAX_CARD_BYTES))
        except BaseException:
            self._close_sockets()
            raise
        self.address = self._sockets[-1].address
        context = self._sockets[0].context
        self._wake = context.socket(zmq.PAIR)
        self._wake.bind("inproc://stop")
        self._stop = context.socket(zmq.PAIR)
        self._stop.connect("inproc://stop")
        self._thread = threading.Thread(target=self._serve, name="weightwire-registry", daemon=True)
        self._thread.start()

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
        """When a replica said last that it is there, on `time.monotonic()`'s clock; 0 if it never did."""
        with self._changed:
            return self._heard_s.get(replica, 0.0)

    def wait(self, count: int, timeout_s: float) -> list[ReplicaCard]:
        """`cards()` once there are at least `count`. Raises `SyncTimeout`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                changes = self._changes
            if len(found := self.cards()) >= count:
                return found
            with self._changed:
                if not self._changed.wait_for(lambda: self._changes > changes, deadline_s - time.monotonic()):  # noqa: B023
                    raise SyncTimeout(
                        f"{len(found)} of {count} replicas of job {addresses.job_name()!r} are there after {timeout_s:g} s",
                        side="manager",
                        phase="discover",
                    )

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Has `listener` called, in the registry's thread, when a replica comes, changes, is heard of or goes; it must
        be quick. Returns what removes it again."""
        with self._changed:
            self._listeners.append(listener)

        def remove() -> None:
            with self._changed:
                self._listeners.remove(listener)

        return remove

    def close(self) -> None:
        """Ends the thread and closes the sockets; may be called twice."""
        if self._stop.closed:
            return
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)
        self._wake.close(linger=0)
        self._close_sockets()
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def _close_sockets(self) -> None:
        while self._sockets:
            self._sockets.pop().close()
        self._path.unlink(missing_ok=True)

    # --- the registry's own thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        sockets = [one.socket for one in self._sockets]
        self._watch_processes()
        while True:
            watched: list[tuple[Any, int]] = [(source, zmq.POLLIN) for source in (*sockets, self._wake)]
            watched += [(pidfd, zmq.POLLIN) for pidfd in self._pidfds.values()]
            ready: list[Any] = [source for source, _ in zmq.zmq_poll(watched, self._ms())]
            if self._wake in ready:
                return
            for socket in sockets:
                if socket in ready:
                    self._answer(socket)
            ended = [pid for pid, fd in self._pidfds.items() if fd in ready]
            for pid in ended:
                os.close(self._pidfds.pop(pid))
            if self._expire() or ended:
                self._tell()

    def _answer(self, socket: zmq.Socket[Any]) -> None:
        frames = socket.recv_multipart()
        if b"" not in frames:
            return  # not a REQ peer: there is nobody to answer
        cut = frames.index(b"") + 1
        seq = 0
        reply: Body = Done()
        try:
            if len(frames) != cut + 1:
                raise ProtocolError(f"a message of {len(frames) - cut} frames; one is expected")
            envelope = codec.decode(frames[cut])
            seq = envelope.seq
            self._take(envelope.body)
        except WeightwireError as error:
            reply = Failed(error.at(side="manager", phase="register").info())
        except Exception as error:  # a bug of ours must not end the thread or leave the peer without a reply
            logger.exception("weightwire: a registration failed")
            reply = Failed(WeightwireError.wrap(error).at(side="manager", phase="register").info())
        with contextlib.suppress(zmq.ZMQError):
            socket.send_multipart([*frames[:cut], codec.encode(reply, seq)])

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
        for address in (card.address, *(worker.address for worker in card.workers)):
            if not address.startswith("tcp://") and card.boot_id != addresses.boot_id():
                raise AuthError(
                    f"replica {card.replica} listens at {address}, which can't be reached from here",
                    hint="set the engine's WEIGHTWIRE_LISTEN to tcp:// and an address or interface of its host",
                )
        now_s = time.monotonic()
        local = {found.replica for found in addresses.discover()}  # these need no lease: their processes are watched
        with self._changed:
            if not self._heard_s.get(card.replica):
                logger.info("weightwire: replica %s registered", card.replica)
            if card.replica not in local:
                self._cards[card.replica] = card, now_s + body.lease_s
            self._heard_s[card.replica] = now_s
        self._watch_processes()
        self._tell()

    def _watch_processes(self) -> None:
        """Keeps one pidfd per replica of this host."""
        try:
            cards = self.cards()
        except WeightwireError as error:  # a card that can't be read; the next update says so
            logger.warning("weightwire: %s", error)
            return
        with self._changed:
            self._heard_s = {card.replica: self._heard_s.get(card.replica, 0.0) for card in cards}
        here = {card.pid for card in cards if card.boot_id == addresses.boot_id()}
        for pid in here - set(self._pidfds):
            if (pidfd := open_pidfd(pid)) is not None:
                self._pidfds[pid] = pidfd

    def _tell(self) -> None:
        with self._changed:
            self._changes += 1
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _expire(self) -> bool:
        now_s = time.monotonic()
        with self._changed:
            expired = [name for name, (_, until_s) in self._cards.items() if until_s <= now_s]
            for name in expired:
                del self._cards[name]
                logger.warning("weightwire: replica %s is lost: its lease was not renewed", name)
        return bool(expired)

    def _ms(self) -> int:
        with self._changed:
            until_s = min((until_s for _, until_s in self._cards.values()), default=None)
        return -1 if until_s is None else max(0, int((until_s - time.monotonic()) * 1000) + 1)


def _has_died(card: ReplicaCard) -> bool:
    return card.boot_id == addresses.boot_id() and not addresses.process_is_alive(card.pid)


_shared: dict[tuple[str | None, Path], tuple[Registry, int]] = {}
_sharing = threading.Lock()


def take() -> Registry:
    """This process's registry at `WEIGHTWIRE_REGISTRY`, which all its managers share. Raises `AuthError`."""
    place = addresses.registry_address(), addresses.runtime_dir()
    with _sharing:
        registry, users = _shared.get(place) or (Registry(place[0]), 0)
        _shared[place] = registry, users + 1
    return registry


def give_back(registry: Registry) -> None:
    """A manager needs it no longer; the last one closes it."""
    with _sharing:
        for place, (shared, users) in list(_shared.items()):
            if shared is registry and users > 1:
                _shared[place] = shared, users - 1
            elif shared is registry:
                del _shared[place]
                registry.close()
