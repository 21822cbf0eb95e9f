"""The asking side of a socket: one request, one reply, always a deadline, and the peer's death noticed at once."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from inference_plugin.wire import codec, curve
from inference_plugin.wire.addresses import boot_id
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import AuthError, PeerLost, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.link import Link
from inference_plugin.wire.messages import Body, Failed

__all__ = ["Channel", "Outgoing", "fan_out", "open_pidfd", "take_ready"]

RESEND_S = 10.0
"""A request without a reply is sent again after this time, then after twice as long, and so on: requests are idempotent,
and a TCP link may lose one. Only the reply to the last sending counts (REQ_CORRELATE), hence the growing time."""

Reply = TypeVar("Reply")


class Channel:
    """A REQ socket to one peer. It survives lost replies (REQ_RELAXED, REQ_CORRELATE); it belongs to one thread.

    `pid` and `peer_boot_id`, when they name a process of this host, let a wait end with `PeerLost` when it dies.
    `silence_s` is for TCP, default the environment's; see `Config`.
    `resends` false: a request is sent once; for a peer that answers when others are ready, not when it is asked.
    """

    def __init__(
        self,
        address: str,
        *,
        pid: int = 0,
        peer_boot_id: str = "",
        context: zmq.Context[Any] | None = None,
        resends: bool = True,
        silence_s: float | None = None,
        **where: Any,
    ) -> None:
        self.address = address
        self.where = where
        self.sent_messages = 0
        self._resends = resends
        self._seq = 0
        self._pending: list[Any] | None = None
        self._resend_in_s = math.inf
        self._resend_at_s = math.inf
        self._pidfd = open_pidfd(pid) if pid and peer_boot_id == boot_id() else None
        self._watches_process = pid != 0 and peer_boot_id == boot_id()
        self._socket = (context or zmq.Context.instance()).socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._link: Link | None = None
        if address.startswith("tcp://"):
            self._link = Link(self._socket, address, silence_s or Config.from_environment().silence_s)
        self._socket.setsockopt(zmq.REQ_RELAXED, 1)
        self._socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_CONTROL_BYTES)
        self._socket.connect(address)

    def request(self, body: Body, kind: type[Reply], *, timeout_s: float, payload: Any = None) -> Reply:
        """Sends a request and waits for its reply of type `kind`.

        Raises `SyncTimeout`, `PeerLost`, `ProtocolError`, or the error that the peer replied with.
        """
        self.send(body, payload)
        return self.receive(kind, timeout_s=timeout_s)

    def send(self, body: Body, payload: Any = None) -> None:
        """Sends a request; `receive` takes its reply. A request still open is given up. `payload` is not copied."""
        self._seq += 1
        frames: list[Any] = [codec.encode(body, self._seq)]
        if payload is not None:
            frames.append(payload)
        self._pending = frames
        self._resend_in_s = RESEND_S if self._resends else math.inf
        self._transmit(type(body).__name__)

    def receive(self, kind: type[Reply], *, timeout_s: float) -> Reply:
        """The reply to the request that was sent last. Raises as `request` does."""
        if self._pending is None:
            raise ProtocolError("nothing was asked", **self.where)
        deadline_s = time.monotonic() + timeout_s
        while True:
            until_s = min(deadline_s, self._resend_at_s, self._link.lost_at_s if self._link else math.inf)
            ready = self._poll(max(0.0, until_s - time.monotonic()))
            if ready and (reply := self._take()) is not None:
                self._pending = None
                return self._checked(reply, kind)
            if not ready and self.peer_is_gone():
                raise PeerLost(f"the process behind {self.address} is gone", **self.where)
            if self._link is not None:
                self._look_at(self._link)
            if time.monotonic() >= self._resend_at_s:
                self._transmit("again")
            if time.monotonic() >= deadline_s:
                raise SyncTimeout(f"no reply from {self.address} within {timeout_s:g} s", **self.where)

    @property
    def sources(self) -> list[Any]:
        """What to poll for news of an open request: sockets and descriptors."""
        monitor = [self._link.monitor] if self._link is not None else []
        return [self._socket, *monitor, *([self._pidfd] if self._pidfd is not None else [])]

    @property
    def look_at_s(self) -> float:
        """When an open request wants a look without news, on `time.monotonic()`'s clock."""
        if self._watches_process and self._pidfd is None:
            return 0.0
        return min(self._resend_at_s, self._link.lost_at_s if self._link is not None else math.inf)

    @property
    def is_open(self) -> bool:
        """Whether a request waits for its reply."""
        return self._pending is not None

    def has_news(self) -> bool:
        """Whether the reply to the open request may be there: `receive` needn't wait long."""
        return self._poll(0.0)

    def peer_is_gone(self) -> bool:
        """Whether the peer's process is known to have ended."""
        if not self._watches_process:
            return False
        return self._pidfd is None or bool(zmq.zmq_poll([(self._pidfd, zmq.POLLIN)], 0))

    def close(self) -> None:
        """Closes the socket; may be called twice."""
        if self._link is not None:
            self._link.close()
        self._socket.close(linger=0)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
            self._watches_process = False

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look_at(self, link: Link) -> None:
        """Raises for a peer that refuses us or is lost; sends again what a lost connection may have swallowed."""
        if link.look():
            self._transmit("again")
        if link.refused:
            raise AuthError(
                f"{self.address} and this process hold different keys, or only one of them has a key",
                hint=f"set {curve.VARIABLE} to copies of one file on both sides, or on neither",
                **self.where,
            )
        if time.monotonic() >= link.lost_at_s:
            raise PeerLost(f"{self.address} has not been heard of for {link.silence_s:g} s", **self.where)

    def _transmit(self, what: str) -> None:
        assert self._pending is not None
        try:
            self._socket.send_multipart(self._pending, flags=zmq.DONTWAIT, copy=len(self._pending) == 1)
        except zmq.Again:
            raise PeerLost(f"{what}: {self.address} takes no messages", **self.where) from None
        self.sent_messages += 1
        self._resend_at_s = time.monotonic() + self._resend_in_s
        self._resend_in_s *= 2

    def _poll(self, timeout_s: float) -> bool:
        watched: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN)]
        if self._link is not None:
            watched.append((self._link.monitor, zmq.POLLIN))
        if self._pidfd is not None:
            watched.append((self._pidfd, zmq.POLLIN))
        elif self._watches_process:
            timeout_s = 0
        ready = zmq.zmq_poll(watched, int(timeout_s * 1000) + (1 if timeout_s else 0))
        return any(source is self._socket for source, _ in ready)

    def _take(self) -> Body | None:
        """The reply that is there; None for one of an earlier request.

        A REQ socket polls as readable for a reply that it then drops: only a receive that doesn't wait is safe.
        """
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=True)
        except zmq.Again:
            return None
        envelope = codec.decode(frames[0])
        # A peer that couldn't read the request doesn't know its number; REQ_CORRELATE made sure that this answers it.
        unread = isinstance(envelope.body, Failed) and envelope.seq == 0
        return envelope.body if envelope.seq == self._seq or unread else None

    def _checked(self, reply: Body, kind: type[Reply]) -> Reply:
        if isinstance(reply, Failed):
            raise WeightwireError.of(reply.error).at(**self.where)
        if not isinstance(reply, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(reply).__name__}", **self.where)
        return reply


class Outgoing(msgspec.Struct, frozen=True):
    """One request of a fan-out."""

    channel: Channel
    body: Body


def fan_out(requests: Sequence[Outgoing], kind: type[Reply], *, timeout_s: float) -> list[Reply | WeightwireError]:
    """Sends all requests at once and waits for all replies with one deadline. Errors are returned in their places."""
    deadline_s = time.monotonic() + timeout_s
    results: list[Reply | WeightwireError] = []
    sent: list[WeightwireError | None] = []
    for outgoing in requests:
        try:
            outgoing.channel.send(outgoing.body)
            sent.append(None)
        except WeightwireError as error:
            sent.append(error)
    for outgoing, failed in zip(requests, sent, strict=True):
        try:
            if failed is not None:
                raise failed
            results.append(outgoing.channel.receive(kind, timeout_s=max(0.0, deadline_s - time.monotonic())))
        except WeightwireError as error:
            results.append(error)
    return results


def take_ready(
    channels: Sequence[Channel], kind: type[Reply], *, timeout_s: float
) -> list[tuple[Channel, Reply | WeightwireError]]:
    """Replies and errors of open requests as they come: those that are there, or the first within `timeout_s`, or none."""
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
                    continue  # news of the connection, or of an earlier request; the peer may answer one too
                found.append((channel, error))
    return found


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.pidfd_open(pid)
    return None
