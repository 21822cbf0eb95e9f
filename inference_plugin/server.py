"""The worker's ZMQ REP socket, served by one thread: one reply per request, in every branch.

The thread never touches the live model. It also lets transactions expire: at the end of their lease, or at once when
the trainer's process ends (a pidfd is polled beside the socket).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from inference_plugin.groups import GroupTable
from inference_plugin.transports.backends import current_device, use_device
from inference_plugin.wire import codec
from inference_plugin.wire.addresses import boot_id
from inference_plugin.wire.channel import open_pidfd
from inference_plugin.wire.errors import ProtocolError, WeightwireError
from inference_plugin.wire.listening import Listener
from inference_plugin.wire.messages import Body, Bucket, Describe, Envelope, Failed, Sender, WorkerCard

__all__ = ["WorkerServer"]

logger = logging.getLogger(__name__)

LOOK_AGAIN_MS = 1000


class WorkerServer:
    """Serves one worker's groups at `address` (its socket is bound when the constructor returns).

    `card` makes the worker's card anew. `listen` is as for `Listener`.
    """

    def __init__(self, table: GroupTable, listen: str, card: Callable[[], WorkerCard], where: dict[str, Any]) -> None:
        self._table = table
        self._card = card
        self._where = where
        self._listener = Listener(zmq.REP, listen, max_bytes=codec.MAX_PAYLOAD_BYTES)
        self._socket, self.address = self._listener.socket, self._listener.address
        self._context = self._listener.context
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.connect("inproc://wake")
        self._pidfds: dict[int, int | None] = {}
        self._device = current_device()
        self._thread = threading.Thread(target=self._serve, name="weightwire-rep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, closes the socket and every group; may be called twice."""
        if self._stop.closed:
            return
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        self._stop.close(linger=0)
        self._wake.close(linger=0)
        self._listener.close()
        self._table.close()
        for pidfd in self._pidfds.values():
            if pidfd is not None:
                os.close(pidfd)
        self._pidfds.clear()

    def _serve(self) -> None:
        use_device(self._device)
        while True:
            self._watch_senders()
            watched: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._wake, zmq.POLLIN)]
            watched += [(fd, zmq.POLLIN) for fd in self._pidfds.values() if fd is not None]
            expiry_s = self._table.next_expiry_s()
            timeout_ms = -1 if expiry_s is None else max(0, int((expiry_s - time.monotonic()) * 1000) + 1)
            if None in self._pidfds.values():  # a process that ended, and a group that can't let go of it just now
                timeout_ms = LOOK_AGAIN_MS if timeout_ms < 0 else min(timeout_ms, LOOK_AGAIN_MS)
            ready = [source for source, _ in zmq.zmq_poll(watched, timeout_ms)]
            if self._wake in ready:
                return
            if self._socket in ready:
                self._answer()
            for pid, pidfd in self._pidfds.items():
                if pidfd is not None and pidfd in ready:  # it stays readable: polled on, it would keep a core busy
                    os.close(pidfd)
                    self._pidfds[pid] = None
            self._table.expire(self._is_gone)

    def _answer(self) -> None:
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return  # it polls as readable for a message without a REQ envelope, and then drops it
        seq = 0
        try:
            envelope = self._decode(frames)
            seq = envelope.seq
            payload = memoryview(frames[1].buffer) if len(frames) == 2 else None
            reply = self._dispatch(envelope.body, payload)
        except WeightwireError as error:
            reply = Failed(error.at(**self._where).info())
        except Exception as error:  # a bug of ours must not end the thread or leave the peer without a reply
            logger.exception("weightwire: a request failed")
            reply = Failed(WeightwireError.wrap(error).at(**self._where).info())
        self._socket.send(codec.encode(reply, seq))

    def _decode(self, frames: list[Any]) -> Envelope:
        if len(frames) > 2:
            raise ProtocolError(f"a message of {len(frames)} frames; one or two are expected")
        envelope = codec.decode(memoryview(frames[0].buffer))
        if len(frames) == 2 and not isinstance(envelope.body, Bucket):
            raise ProtocolError(f"a {type(envelope.body).__name__} takes no payload frame")
        return envelope

    def _dispatch(self, body: Body, payload: memoryview | None) -> Body:
        return self._card() if isinstance(body, Describe) else self._table.handle(body, payload)

    def _watch_senders(self) -> None:
        """Keeps one pidfd per trainer process of this host that has a transaction open."""
        here = boot_id()
        pids = {sender.pid for sender in self._table.senders() if sender.pid and sender.boot_id == here}
        for pid in pids - set(self._pidfds):
            self._pidfds[pid] = open_pidfd(pid)
        for pid in set(self._pidfds) - pids:
            if (pidfd := self._pidfds.pop(pid)) is not None:
                os.close(pidfd)

    def _is_gone(self, sender: Sender) -> bool:
        if sender.pid not in self._pidfds or sender.boot_id != boot_id():
            return False
        pidfd = self._pidfds[sender.pid]
        return pidfd is None or bool(zmq.zmq_poll([(pidfd, zmq.POLLIN)], 0))
