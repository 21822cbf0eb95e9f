"""A TCP connection as its client sees it: encrypted, kept alive by heartbeats, and reported when it is lost.

libzmq reconnects silently, and a host that vanished sends no FIN. So libzmq's own heartbeats are on, and its monitor reports
the connection's events. The peer's threads need not do anything: libzmq answers heartbeats by itself.
"""

from __future__ import annotations

import math
import time
from typing import Any

import zmq

from inference_plugin.net.curve import secure_client

__all__ = ["LastWords", "Link"]

HEARTBEATS = 5
"""Sent within the time after which a silent peer counts as lost."""

EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


REFUSALS = 2
"""Connections in a row that a peer closes without a word before it counts as one with another key. A single one may close for any
reason: the peer ended."""

LAST_WORDS_S = 5.0
"""Longest wait for libzmq's thread, which may get no processor time, to read what a dead peer left."""


class Link:
    """Watches a client socket that is about to connect to a `tcp://` address; belongs to the socket's thread.

    A peer that is silent, or can't be connected to, for `silence_s` counts as lost. That must be longer than a bucket takes on
    a slow link, because heartbeats queue behind it. `monitor` is readable when there is news, which `look()` takes.
    `refused`: the two sides hold different keys.
    """

    def __init__(self, socket: zmq.Socket[Any], address: str, silence_s: float) -> None:
        from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which a command must not wait for

        self._receive = recv_monitor_message
        socket.setsockopt(zmq.IPV6, 1 if address.startswith("tcp://[") else 0)
        secure_client(socket)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(silence_s / HEARTBEATS * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.silence_s = silence_s
        self._socket = socket
        self.monitor = socket.get_monitor_socket(EVENTS)
        self.refused = False
        self._unexplained = 0
        self.down_since_s = time.monotonic()
        self._connected_once = False

    def look(self) -> bool:
        """Takes the news. True: the connection was lost and is there again."""
        again = False
        while self.monitor.poll(0):
            event = self._receive(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                again = self._connected_once
                self._connected_once = True
                self._unexplained = 0
                self.down_since_s = math.inf
            elif event == zmq.EVENT_DISCONNECTED:
                self.down_since_s = min(self.down_since_s, time.monotonic())
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._unexplained += 1
                self.refused |= self._unexplained >= REFUSALS
            else:
                self.refused = True
        return again

    @property
    def is_down(self) -> bool:
        """Whether it is not connected, as far as `look` has seen."""
        return self.down_since_s < math.inf

    @property
    def lost_at_s(self) -> float:
        """When the peer counts as lost, on `time.monotonic()`'s clock; infinity while it is connected."""
        return self.down_since_s + self.silence_s

    def close(self) -> None:
        """To be called before the socket closes; may be called twice."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)


class LastWords:
    """What a peer sent before its process ended may still lie unread in the kernel: libzmq's own thread reads it, and then finds
    the end of the connection. Made when the process is known to have ended; belongs to the socket's thread.

    `monitor` is readable when there is news; `until_s`: nothing is waited for after that, on `time.monotonic()`'s clock.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        # Any of them tells that the connection is over: the latter ones come where it ended before this was made.
        self.monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECT_DELAYED
        )
        self.until_s = time.monotonic() + LAST_WORDS_S

    def all_read(self) -> bool:
        """Whether everything that the peer sent can be received by now."""
        return bool(self.monitor.poll(0)) or time.monotonic() >= self.until_s

    def close(self) -> None:
        """To be called before the socket closes; may be called twice."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
