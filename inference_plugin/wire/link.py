"""A TCP connection as its client sees it: encrypted, heard of regularly, and known to be lost when it is.

libzmq reconnects by itself and says nothing, and a host that vanished sends no FIN. So libzmq's own heartbeats are on, and
its monitor tells what becomes of the connection. The peer's threads needn't do anything for it: libzmq answers.
"""

from __future__ import annotations

import math
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from inference_plugin.wire.curve import secure_client

__all__ = ["Link"]

HEARTBEATS = 5
"""In the time after which a silent peer is lost."""

EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Link:
    """Watches a client socket that is about to connect to a `tcp://` address; belongs to the socket's thread.

    A peer that isn't heard of for `silence_s` is lost, and one that can't be connected to. It must be above what a bucket
    takes on a slow link: heartbeats queue behind it.
    `monitor` is readable when there is news; `look()` takes it. `refused`: the two sides' keys are not the same.
    """

    def __init__(self, socket: zmq.Socket[Any], address: str, silence_s: float) -> None:
        socket.setsockopt(zmq.IPV6, 1 if address.startswith("tcp://[") else 0)
        secure_client(socket)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(silence_s / HEARTBEATS * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silence_s * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.silence_s = silence_s
        self._socket = socket
        self.monitor = socket.get_monitor_socket(EVENTS)
        self.refused = False
        self.down_since_s = time.monotonic()
        self._connected_once = False

    def look(self) -> bool:
        """Takes the news. True: the connection is there again after it was gone."""
        again = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                again = self._connected_once
                self._connected_once = True
                self.down_since_s = math.inf
            elif event == zmq.EVENT_DISCONNECTED:
                self.down_since_s = min(self.down_since_s, time.monotonic())
            else:
                self.refused = True
        return again

    @property
    def lost_at_s(self) -> float:
        """When the peer counts as lost, on `time.monotonic()`'s clock; infinity while it is connected."""
        return self.down_since_s + self.silence_s

    def close(self) -> None:
        """Before the socket closes; may be called twice."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
