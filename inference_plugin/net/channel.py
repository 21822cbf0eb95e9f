"""The asking side of a socket: one request gets one reply, every wait has a deadline, and the peer's death ends it at once."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from inference_plugin.net import curve
from inference_plugin.net.addresses import boot_id
from inference_plugin.net.gate import check_room, check_threads
from inference_plugin.net.link import LastWords, Link
from inference_plugin.net.processes import ProcessWatch
from inference_plugin.wire import codec
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import AuthError, PeerLost, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Body, Failed, Hop, ReplicaCard, Target, WorkerCard

__all__ = [
    "Channel", "Outgoing", "bytes_channel", "context_of_process", "coordinator_channel", "fan_out", "take_ready",
    "worker_channel",
]  # fmt: skip

RESEND_S = 10.0
"""A request without a reply is sent again after this time, then after twice that, and so on: requests are idempotent, and
a TCP link may lose one. The intervals grow because only the reply to the latest sending counts (REQ_CORRELATE)."""

CLOSED_S = 10.0
"""Seconds between two looks at the socket file of a peer that doesn't reply. One whose file is missing both times has closed:
while it is open it makes the file again (`net.listening.MEND_EVERY_S`)."""

Reply = TypeVar("Reply")


class Channel(Closing):
    """A REQ socket to one peer. It survives lost replies (REQ_RELAXED, REQ_CORRELATE); it belongs to one thread.

    Where `pid`, `start_ticks` and `peer_boot_id` name a process of this host, a wait ends with `PeerLost` when that process
    dies; with `may_close` also when the peer has closed its socket and lives on. `silence_s` is used on TCP; the default is the
    environment's (see `Config`). With `resends` false a request is sent only once: for a peer that replies when others are ready,
    not when it is asked. Raises `TransportUnavailable` where too few descriptors are free, or no thread can be started: libzmq
    would abort the process.
    """

    def __init__(
        self,
        address: str,
        *,
        pid: int = 0,
        start_ticks: int = 0,
        peer_boot_id: str = "",
        resends: bool = True,
        may_close: bool = False,
        silence_s: float | None = None,
        **where: Any,
    ) -> None:
        self.address = address
        self.where = where
        self.sent_messages = 0
        self.payload: memoryview | None = None
        """The payload frame of the reply that `receive` returned last."""
        self._resends = resends
        self._seq = 0
        self._pending: list[Any] | None = None
        self._sent_in_vain = False
        self._resend_in_s = math.inf
        self._resend_at_s = math.inf
        self._process: ProcessWatch | None = None
        self._file = Path(address.removeprefix("ipc://")) if may_close and address.startswith("ipc://") else None
        self._file_was_gone = False
        self._look_at_file_s = math.inf
        check_room()
        self.socket = context_of_process().socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._last_words: LastWords | None = None
        self._link: Link | None = None
        if address.startswith("tcp://"):
            self._link = Link(self.socket, address, silence_s or Config.from_environment().silence_s)
        self.socket.setsockopt(zmq.REQ_RELAXED, 1)
        self.socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_CONTROL_BYTES)
        self.socket.connect(address)
        if pid and peer_boot_id == boot_id():
            self._process = ProcessWatch(pid, start_ticks)

    def request(self, body: Body, kind: type[Reply], *, timeout_s: float, payload: Any = None) -> Reply:
        """Sends a request and waits for its reply of type `kind`.

        Raises `SyncTimeout`, `PeerLost`, `ProtocolError`, or the error that the peer replied with.
        """
        self.send(body, payload)
        return self.receive(kind, timeout_s=timeout_s)

    def send(self, body: Body, payload: Any = None) -> None:
        """Sends a request; `receive` returns its reply. A request that is still open is given up. `payload` is not copied."""
        self._seq += 1
        frames: list[Any] = [codec.encode(body, self._seq)]
        if payload is not None:
            frames.append(payload)
        self._pending = frames
        self._sent_in_vain = self.peer_is_gone()
        if self._file is not None:
            self._file_was_gone = False
            self._look_at_file_s = time.monotonic()
        self._resend_in_s = RESEND_S if self._resends else math.inf
        self.transmit(type(body).__name__)

    def receive(self, kind: type[Reply], *, timeout_s: float, whole_s: float | None = None) -> Reply:
        """The reply to the request that was sent last. Raises as `request` does. `whole_s`: the time that a `SyncTimeout` names,
        if some of it was spent before this call."""
        if self._pending is None:
            raise ProtocolError("receive() was called, but no request is open", **self.where)
        deadline_s = time.monotonic() + timeout_s
        while True:
            until_s = min(deadline_s, self.look_at_s)
            ready = self._poll(max(0.0, until_s - time.monotonic()))
            if ready and (reply := self._take()) is not None:
                self._pending, self._look_at_file_s = None, math.inf
                return self._checked(reply, kind)
            if not ready and self.peer_is_gone() and self._has_said_all():
                raise PeerLost(f"the process behind {self.address} is gone", **self.where)
            if self._file is not None and self._is_closed(self._file):
                raise PeerLost(f"{self.address} is closed, although its process lives", **self.where)
            if self._link is not None:
                self._look_at(self._link)
            if time.monotonic() >= self._resend_at_s:
                self.transmit("the repeated request")
            if time.monotonic() >= deadline_s:
                named_s = timeout_s if whole_s is None else whole_s
                raise SyncTimeout(f"no reply from {self.address} within {round(named_s, 3):g} s", **self.where)

    @property
    def sources(self) -> list[Any]:
        """Sockets and descriptors to poll for news of the open request."""
        monitor = [watching.monitor for watching in (self._link, self._last_words) if watching is not None]
        process = [self._process.fd] if self._process is not None and self._process.fd is not None else []
        return [self.socket, *monitor, *process]

    @property
    def look_at_s(self) -> float:
        """When `receive` should be called even without news, on `time.monotonic()`'s clock."""
        process_s = self._process.look_at_s if self._process is not None else math.inf
        if self._last_words is not None:
            process_s = self._last_words.until_s
        link_s = self._link.lost_at_s if self._link is not None else math.inf
        return min(self._resend_at_s, process_s, link_s, self._look_at_file_s)

    @property
    def is_open(self) -> bool:
        """Whether a request waits for its reply."""
        return self._pending is not None

    def has_news(self) -> bool:
        """Whether the reply to the open request may have come: `receive` then does not wait long."""
        return self._poll(0.0)

    def peer_is_gone(self) -> bool:
        """Whether the peer's process is known to have ended."""
        return self._process is not None and self._process.ended()

    def close(self) -> None:
        """Closes the socket; may be called twice."""
        if self._link is not None:
            self._link.close()
        if self._last_words is not None:
            self._last_words.close()
        self.socket.close(linger=0)
        if self._process is not None:
            self._process.close()
            self._process = None

    def _has_said_all(self) -> bool:
        """Whether no reply can come any more from a peer whose process has ended."""
        if self._sent_in_vain:
            return True
        if self._link is not None:
            return self._link.is_down and not self._poll(0.0)
        if self._last_words is None:
            self._last_words = LastWords(self.socket)
        return self._last_words.all_read() and not self._poll(0.0)

    def _is_closed(self, file: Path) -> bool:
        """Whether the peer's socket file is missing, and was so `CLOSED_S` ago."""
        if time.monotonic() < self._look_at_file_s:
            return False
        was_gone, self._file_was_gone = self._file_was_gone, not file.exists()
        self._look_at_file_s = time.monotonic() + CLOSED_S
        return was_gone and self._file_was_gone

    def _look_at(self, link: Link) -> None:
        """Raises for a peer that refuses us or is lost; sends the request again if a lost connection may have lost it."""
        if link.look():
            self.transmit("the repeated request")
        self._check_accepted(link)
        if time.monotonic() >= link.lost_at_s:
            raise PeerLost(f"{self.address} has not been heard of for {link.silence_s:g} s", **self.where)

    def _check_accepted(self, link: Link) -> None:
        if link.refused:
            raise AuthError(
                f"{self.address} and this process hold different keys, or only one of them has a key",
                hint=f"set {curve.VARIABLE} to copies of one file on both sides, or on neither",
                **self.where,
            )

    def transmit(self, what: str) -> None:
        assert self._pending is not None
        try:
            self.socket.send_multipart(self._pending, flags=zmq.DONTWAIT, copy=len(self._pending) == 1)
        except zmq.Again:
            if self._link is not None:
                self._link.look()  # libzmq gives up a connection that its peer refuses, and may have done so by now
                self._check_accepted(self._link)
            raise PeerLost(f"{self.address} takes no messages: {what} was not sent", **self.where) from None
        self.sent_messages += 1
        self._resend_at_s = time.monotonic() + self._resend_in_s
        self._resend_in_s *= 2

    def _poll(self, timeout_s: float) -> bool:
        watched = [(source, zmq.POLLIN) for source in self.sources]
        ready = zmq.zmq_poll(watched, int(timeout_s * 1000) + (1 if timeout_s else 0))
        return any(source is self.socket for source, _ in ready)

    def _take(self) -> Body | None:
        """The reply that has come; None if it answers an earlier request.

        A REQ socket polls as readable for a reply that it then drops: only a receive that doesn't wait is safe.
        """
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        if len(frames) > 2:
            raise ProtocolError(f"a reply of {len(frames)} frames; one or two are expected", **self.where)
        envelope = codec.decode(memoryview(frames[0].buffer))
        self.payload = memoryview(frames[1].buffer) if len(frames) == 2 else None
        codec.check_payload(envelope.body, self.payload)
        # A peer that could not decode the request does not know its number; REQ_CORRELATE ensures that this is its reply.
        unread = isinstance(envelope.body, Failed) and envelope.seq == 0
        return envelope.body if envelope.seq == self._seq or unread else None

    def _checked(self, reply: Body, kind: type[Reply]) -> Reply:
        if isinstance(reply, Failed):
            raise WeightwireError.of(reply.error).at(**self.where)
        if not isinstance(reply, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(reply).__name__}", **self.where)
        return reply


def coordinator_channel(card: ReplicaCard, silence_s: float | None = None) -> Channel:
    """A channel to a replica's coordinator, for the calling thread."""
    return _member(card, card, side="coordinator", silence_s=silence_s)


def worker_channel(card: ReplicaCard, worker: WorkerCard, silence_s: float | None = None) -> Channel:
    """A channel to one of a replica's workers, for the calling thread."""
    return _member(card, worker, side="worker", rank=worker.rank, silence_s=silence_s)


def bytes_channel(worker: Target | Hop, side: str, silence_s: float) -> Channel:
    """A channel for buckets to a worker, for the calling thread. `side`: whose this end is."""
    return Channel(
        worker.address,
        pid=worker.pid,
        start_ticks=worker.start_ticks,
        peer_boot_id=worker.boot_id,
        silence_s=silence_s,
        side=side,
        replica=worker.replica,
        rank=worker.rank,
        phase="stage",
    )


_context: tuple[int, zmq.Context[Any]] | None = None
"""The process whose context this is, and the context. Not pyzmq's shared one: other libraries may destroy that."""
_making = threading.Lock()


def context_of_process() -> zmq.Context[Any]:
    """The context of all asking sockets of this process. Raises `TransportUnavailable` where its threads can't be started."""
    global _context
    if _context is None or _context[0] != os.getpid():
        with _making:
            if _context is None or _context[0] != os.getpid():
                check_threads()
                context: zmq.Context[Any] = zmq.Context()
                # By default 1023: a channel over TCP has three, and an update has two channels to each worker.
                context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
                _context = os.getpid(), context
    return _context[1]


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _member(card: ReplicaCard, peer: ReplicaCard | WorkerCard, **named: Any) -> Channel:
    named |= {"pid": peer.pid, "start_ticks": peer.start_ticks, "peer_boot_id": peer.boot_id, "replica": card.replica}
    return Channel(peer.address, **named)


class Outgoing(msgspec.Struct, frozen=True):
    """One request of a fan-out."""

    channel: Channel
    body: Body


def fan_out(requests: Sequence[Outgoing], kind: type[Reply], *, timeout_s: float) -> list[Reply | WeightwireError]:
    """Sends all requests at once and waits for all replies with one deadline. An error is returned in its request's place."""
    deadline_s = time.monotonic() + timeout_s
    unsent: dict[int, WeightwireError] = {}
    for position, outgoing in enumerate(requests):
        try:
            outgoing.channel.send(outgoing.body)
        except WeightwireError as error:
            unsent[position] = error
    results: list[Reply | WeightwireError] = []
    for position, outgoing in enumerate(requests):
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            results.append(unsent.get(position) or outgoing.channel.receive(kind, timeout_s=left_s, whole_s=timeout_s))
        except WeightwireError as error:
            results.append(error)
    return results


def take_ready(
    channels: Sequence[Channel], kind: type[Reply], *, timeout_s: float
) -> list[tuple[Channel, Reply | WeightwireError]]:
    """The replies and errors of open requests that have come; if none has, the first ones within `timeout_s`, or nothing."""
    watched = [(source, zmq.POLLIN) for channel in channels for source in channel.sources]
    due_s = min((channel.look_at_s for channel in channels), default=math.inf) - time.monotonic()
    ready = [source for source, _ in zmq.zmq_poll(watched, int(max(0.0, min(timeout_s, due_s)) * 1000) + 1)]
    now_s = time.monotonic()
    found: list[tuple[Channel, Reply | WeightwireError]] = []
    for channel in channels:
        if channel.look_at_s <= now_s or any(source in ready for source in channel.sources):
            try:
                found.append((channel, channel.receive(kind, timeout_s=0)))
            except WeightwireError as error:
                if isinstance(error, SyncTimeout) and channel.is_open:
                    continue  # news of the connection, or the reply to an earlier request
                found.append((channel, error))
    return found
