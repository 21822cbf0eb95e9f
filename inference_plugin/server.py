"""The worker's ZMQ socket, served by one thread: one reply per request, in every branch.

To its peers it is a REP: any REQ may ask. It is opened as a ROUTER, which may answer out of turn, so that a `Seal` which
waits for its answer keeps nobody else waiting. The thread never touches the live model. It also lets transactions expire:
at the end of their lease, or at once when the trainer's process ends (a pidfd is polled beside the socket).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from inference_plugin.groups import GroupTable
from inference_plugin.transports.backends import current_device, use_device
from inference_plugin.wire import codec
from inference_plugin.wire.addresses import boot_id
from inference_plugin.wire.channel import open_pidfd
from inference_plugin.wire.errors import ProtocolError, WeightwireError
from inference_plugin.wire.listening import Listener
from inference_plugin.wire.messages import (
    Body,
    Bucket,
    Describe,
    Envelope,
    Failed,
    Seal,
    Sealed,
    Sender,
    WorkerCard,
)

__all__ = ["WorkerServer"]

logger = logging.getLogger(__name__)

LOOK_AGAIN_MS = 1000


@dataclass
class _Waiting:
    """A `Seal` that isn't answered yet."""

    route: list[bytes]
    seq: int
    request: Seal
    until_s: float


class WorkerServer:
    """Serves one worker's groups at `address` (its socket is bound when the constructor returns).

    `card` makes the worker's card anew. `listen` is as for `Listener`.
    """

    def __init__(self, table: GroupTable, listen: str, card: Callable[[], WorkerCard], where: dict[str, Any]) -> None:
        self._table = table
        self._card = card
        self._where = where
        self._listener = Listener(zmq.ROUTER, listen, max_bytes=codec.MAX_PAYLOAD_BYTES)
        self._socket, self.address = self._listener.socket, self._listener.address
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = self._closed = False
        self._waiting: dict[bytes, _Waiting] = {}
        self._pidfds: dict[int, int | None] = {}
        self._device = current_device()
        self._thread = threading.Thread(target=self._serve, name="weightwire-rep", daemon=True)
        table.on_checked = lambda: os.eventfd_write(self._news, 1)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, closes the socket and every group; may be called twice."""
        if self._closed:
            return
        self._stopping = self._closed = True
        if self._thread.is_alive():
            os.eventfd_write(self._news, 1)
            self._thread.join()
        self._listener.close()
        self._table.close()
        os.close(self._news)
        for pidfd in self._pidfds.values():
            if pidfd is not None:
                os.close(pidfd)
        self._pidfds.clear()

    def _serve(self) -> None:
        use_device(self._device)
        while not self._stopping:
            self._watch_senders()
            watched: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._news, zmq.POLLIN)]
            watched += [(fd, zmq.POLLIN) for fd in self._pidfds.values() if fd is not None]
            due_s = [each.until_s for each in self._waiting.values()]
            due_s += [expiry_s] if (expiry_s := self._table.next_expiry_s()) is not None else []
            timeout_ms = max(0, int((min(due_s) - time.monotonic()) * 1000) + 1) if due_s else -1
            if None in self._pidfds.values():  # a process that ended, and a group that can't let go of it just now
                timeout_ms = LOOK_AGAIN_MS if timeout_ms < 0 else min(timeout_ms, LOOK_AGAIN_MS)
            ready = [source for source, _ in zmq.zmq_poll(watched, timeout_ms)]
            if self._news in ready:
                os.eventfd_read(self._news)
            if self._socket in ready:
                self._take()
            for pid, pidfd in self._pidfds.items():
                if pidfd is not None and pidfd in ready:  # it stays readable: polled on, it would keep a core busy
                    os.close(pidfd)
                    self._pidfds[pid] = None
            self._table.expire(self._is_gone)
            now_s = time.monotonic()
            for each in list(self._waiting.values()):
                if self._news in ready or each.until_s <= now_s:
                    self._answer(each.route, each.seq, each.request, None, each.until_s)

    def _take(self) -> None:
        """Takes one request: a peer's route, an empty frame, the message."""
        try:
            frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return
        ends = [i for i, frame in enumerate(frames) if not len(frame)]
        if not ends:
            return  # nobody waits for an answer to it
        route, frames = [frame.bytes for frame in frames[: ends[0] + 1]], frames[ends[0] + 1 :]
        try:
            envelope = self._decode(frames)
        except WeightwireError as error:
            self._send(route, 0, Failed(error.at(**self._where).info()))
            return
        payload = memoryview(frames[1].buffer) if len(frames) == 2 else None
        wait_s = envelope.body.wait_s if isinstance(envelope.body, Seal) else 0.0
        self._answer(route, envelope.seq, envelope.body, payload, time.monotonic() + wait_s)

    def _answer(self, route: list[bytes], seq: int, request: Body, payload: memoryview | None, until_s: float) -> None:
        """Sends the reply, or keeps a `Seal` that may still wait for one; of one peer the last."""
        self._waiting.pop(route[0], None)
        reply: Body
        try:
            reply = self._dispatch(request, payload)
        except WeightwireError as error:
            reply = Failed(error.at(**self._where).info())
        except Exception as error:  # a bug of ours must not end the thread or leave the peer without a reply
            logger.exception("weightwire: a request failed")
            reply = Failed(WeightwireError.wrap(error).at(**self._where).info())
        unfinished = isinstance(reply, Sealed) and not reply.done
        if unfinished and isinstance(request, Seal) and time.monotonic() < until_s:
            self._waiting[route[0]] = _Waiting(route, seq, request, until_s)
        else:
            self._send(route, seq, reply)

    def _send(self, route: list[bytes], seq: int, reply: Body) -> None:
        self._socket.send_multipart([*route, codec.encode(reply, seq)])

    def _decode(self, frames: list[Any]) -> Envelope:
        if not 1 <= len(frames) <= 2:
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
