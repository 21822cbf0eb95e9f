"""The replicas that a manager knows of: those of this host by the runtime directory, others by their registration."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import zmq

from inference_plugin.wire import addresses, codec
from inference_plugin.wire.errors import AuthError, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.listening import Listener
from inference_plugin.wire.messages import Body, Done, Failed, Leave, Register, ReplicaCard

__all__ = ["Registry", "give_back", "take"]

logger = logging.getLogger(__name__)

MAX_CARD_BYTES = 1 << 20
LOOK_AT_DIRECTORY_S = 0.5
"""How often a wait for replicas looks at the runtime directory, which tells nobody of its news."""


class Registry:
    """Listens at `listen` (None: nobody registers) and keeps a card for as long as its lease is renewed."""

    def __init__(self, listen: str | None = None) -> None:
        self._cards: dict[str, tuple[ReplicaCard, float]] = {}
        self._changed = threading.Condition()
        self._listener: Listener | None = None
        self._stop: zmq.Socket[Any] | None = None
        self.address = ""
        if listen is None:
            return
        self._listener = Listener(zmq.ROUTER, listen, max_bytes=MAX_CARD_BYTES)
        self.address = self._listener.address
        self._wake = self._listener.context.socket(zmq.PAIR)
        self._wake.bind("inproc://stop")
        self._stop = self._listener.context.socket(zmq.PAIR)
        self._stop.connect("inproc://stop")
        self._thread = threading.Thread(target=self._serve, name="weightwire-registry", daemon=True)
        self._thread.start()

    def cards(self) -> list[ReplicaCard]:
        """Living replicas of the job, by id."""
        now_s = time.monotonic()
        with self._changed:
            registered = {name: card for name, (card, until_s) in self._cards.items() if until_s > now_s}
        local = {card.replica: card for card in addresses.discover()}
        return [card for _, card in sorted((registered | local).items())]

    def wait(self, count: int, timeout_s: float) -> list[ReplicaCard]:
        """`cards()` once there are at least `count`. Raises `SyncTimeout`."""
        deadline_s = time.monotonic() + timeout_s
        while len(found := self.cards()) < count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise SyncTimeout(
                    f"{len(found)} of {count} replicas of job {addresses.job_name()!r} are there after {timeout_s:g} s",
                    side="manager",
                    phase="discover",
                )
            with self._changed:
                self._changed.wait(min(left_s, LOOK_AT_DIRECTORY_S))
        return found

    def close(self) -> None:
        """Ends the thread and closes the socket; may be called twice."""
        if self._listener is None or self._stop is None or self._stop.closed:
            return
        self._stop.send(b"")
        self._thread.join()
        self._stop.close(linger=0)
        self._wake.close(linger=0)
        self._listener.close()

    # --- the registry's own thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._listener is not None
        socket = self._listener.socket
        while True:
            ready = [source for source, _ in zmq.zmq_poll([(socket, zmq.POLLIN), (self._wake, zmq.POLLIN)], self._ms())]
            if self._wake in ready:
                return
            if socket in ready:
                self._answer(socket)
            self._expire()

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
        with self._changed:
            if card.replica not in self._cards:
                logger.info("weightwire: replica %s registered", card.replica)
            self._cards[card.replica] = card, time.monotonic() + body.lease_s
            self._changed.notify_all()

    def _expire(self) -> None:
        now_s = time.monotonic()
        with self._changed:
            for name in [name for name, (_, until_s) in self._cards.items() if until_s <= now_s]:
                del self._cards[name]
                logger.warning("weightwire: replica %s is lost: its lease was not renewed", name)

    def _ms(self) -> int:
        with self._changed:
            until_s = min((until_s for _, until_s in self._cards.values()), default=None)
        return -1 if until_s is None else max(0, int((until_s - time.monotonic()) * 1000) + 1)


_shared: dict[str | None, tuple[Registry, int]] = {}
_sharing = threading.Lock()


def take() -> Registry:
    """This process's registry at `WEIGHTWIRE_REGISTRY`, which all its managers share. Raises `AuthError`."""
    listen = addresses.registry_address()
    with _sharing:
        registry, users = _shared.get(listen) or (Registry(listen), 0)
        _shared[listen] = registry, users + 1
    return registry


def give_back(registry: Registry) -> None:
    """A manager needs it no longer; the last one closes it."""
    with _sharing:
        for listen, (shared, users) in list(_shared.items()):
            if shared is registry and users > 1:
                _shared[listen] = shared, users - 1
            elif shared is registry:
                del _shared[listen]
                registry.close()
