"""The answering side of a socket: one thread reads requests, and each request gets one reply, at once or later.

To its peers the socket is a REP: any REQ may ask. It is a ROUTER, so that replies may be sent out of turn: a request
whose answer takes time keeps no other request waiting. A `Service` decides what the answers are.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import zmq

from inference_plugin.net.gate import no_thread
from inference_plugin.net.listening import Listener
from inference_plugin.net.processes import ProcessId, ProcessWatch
from inference_plugin.wire import codec
from inference_plugin.wire.errors import ProtocolError, WeightwireError
from inference_plugin.wire.messages import Body, Envelope, Failed

__all__ = ["Asker", "ReplyServer", "Service"]

logger = logging.getLogger(__name__)

MAX_TAKEN = 1024
"""Requests read from one socket before leases and replies have their turn. A ROUTER reads its peers in turn, so a flood
from one peer cannot keep another peer's renewal out of these."""

LATE_S = 0.1
"""A thread that wakes this much later than planned was stopped. libzmq's reading thread may have been stopped too, so
`Service.look` is put off by this time: requests that came meanwhile are read first."""

LOOK_AGAIN_S = 1.0
"""A process that has ended, but that the service still names, is reported again after this time."""

REST_S = 0.1
"""Rest after an error of the loop itself, which might otherwise repeat without end."""

COMPLAIN_S = 10.0
"""Errors of the loop are logged at most this often."""

CLOSE_S = 5.0
"""Longest time that `close` waits for the thread."""


class Asker:
    """Where the reply to one request goes. `peer` identifies the peer's connection."""

    def __init__(self, server: ReplyServer, socket: zmq.Socket[bytes], route: Sequence[bytes]) -> None:
        self.peer = route[0]
        self._server = server
        self._socket = socket
        self._route = route
        self._seq = 0
        self._answered = False

    def reply(self, body: Body, payload: Any = None) -> None:
        """Sends the reply; may be called on any thread. A second reply has no effect.

        `payload` (anything with the buffer protocol) is not copied, and must not change afterwards.
        """
        self._server._answer(self, body, payload)

    def fail(self, error: BaseException) -> None:
        """Replies with `error`, as `reply`."""
        self._server._answer(self, self._server._failed(error))


class Service:
    """What a `ReplyServer` serves. The server calls all of these methods on its own thread."""

    def started(self) -> None:
        """Called first, before any request is read."""

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body | None:
        """The reply; None if `asker.reply` sends it later. Whatever this raises is the reply.

        Only a `Bucket` comes with a payload, and it may come without one.
        """
        raise NotImplementedError

    def processes(self) -> Collection[ProcessId]:
        """Processes of this host whose end the service wants to hear of at once."""
        return ()

    def wakes_at_s(self) -> float:
        """When `look` is due at the latest, on `time.monotonic()`'s clock."""
        return math.inf

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        """Called after each pass: every request that came before `now_s` was read. `ended`: those of `processes()` that
        have ended."""

    def mended(self) -> None:
        """A socket's file was removed and made again: a peer that started meanwhile has not found it."""


class ReplyServer:
    """Serves `service` at each address of `listen`, which are as for `Listener`, as is `waits_for_room`; sockets are bound on
    return.

    `addresses` is where peers connect. `received_bytes` and `sent_bytes` count messages with their payloads. `name` is the
    thread's, `where` are the fields of every error that it answers with. With `most_open`, a peer that has this many
    unanswered requests gets an error for the next one.
    """

    def __init__(
        self,
        service: Service,
        listen: Sequence[str],
        *,
        name: str,
        where: Mapping[str, Any],
        max_bytes: int,
        most_open: int | None = None,
        waits_for_room: bool = False,
    ) -> None:
        self._service = service
        self._where = where
        self._most_open = most_open
        self.unanswered: dict[bytes, list[Asker]] = {}
        self._replies: collections.deque[tuple[Asker, list[Any]]] = collections.deque()
        self.processes: dict[ProcessId, ProcessWatch] = {}
        self.received_bytes = self.sent_bytes = 0
        self._looked_s = self._judges_from_s = self._complains_from_s = 0.0
        self._stopping = threading.Event()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._lock = threading.Lock()
        self._news: int | None = None
        self._listeners: list[Listener] = []
        try:
            for address in listen:
                self._listeners.append(
                    Listener(zmq.ROUTER, address, max_bytes=max_bytes, waits_for_room=waits_for_room)
                )
            self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._close_sockets()
            raise
        self.addresses = [listener.address for listener in self._listeners]

    def start(self) -> None:
        """Raises `TransportUnavailable` where no thread can be started; the sockets are closed then."""
        try:
            self.thread.start()
        except RuntimeError as error:
            self._close_sockets()
            raise no_thread(error) from error

    def wake(self) -> None:
        """Has the thread ask `wakes_at_s` again, and send what there is to send; may be called on any thread. The server's own
        thread does both after each pass anyway."""
        if threading.get_ident() == self.thread.ident:
            return
        with self._lock:
            if self._news is not None:
                os.eventfd_write(self._news, 1)

    def waker(self) -> int:
        """An eventfd, to be closed by the caller: writing to it is `wake`, and needs no lock."""
        assert self._news is not None
        return os.dup(self._news)

    def close(self) -> None:
        """Ends the thread and closes the sockets; may be called twice. Waits at most `CLOSE_S`; a thread that hangs closes
        the sockets when it ends."""
        self._stopping.set()
        self.wake()
        if self.thread.is_alive():
            self.thread.join(CLOSE_S)
        if self.thread.is_alive():
            logger.error("weightwire: the thread %s hangs; its socket stays open until it ends", self.thread.name)
        else:
            self._close_sockets()

    def _answer(self, asker: Asker, body: Body, payload: Any = None) -> None:
        """Any thread."""
        try:
            message = codec.encode(body, asker._seq)
            codec.check_payload(body, payload)
        except Exception as error:  # noqa: BLE001 -- a reply that cannot be encoded: the peer must not wait in vain
            said = ProtocolError(f"the reply could not be written: {error!a}")
            message, payload = codec.encode(self._failed(said), asker._seq), None
        with self._lock:
            if asker._answered:
                return
            asker._answered = True
            frames = [*asker._route, message]
            self._replies.append((asker, frames if payload is None else [*frames, payload]))
        self.wake()

    # --- the server's thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._guarded(self._service.started)
        while not self._stopping.is_set():
            for step in (self._watch_processes, self._wait, self._take_all, self._look, self._send_replies):
                self._guarded(step)
        self._send_replies()
        self._close_sockets()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # a bug of ours, or a peer that found one: the service must go on answering
            if time.monotonic() >= self._complains_from_s:
                self._complains_from_s = time.monotonic() + COMPLAIN_S
                logger.exception("weightwire: an error in the thread %s, which goes on", self.thread.name)
            self._stopping.wait(REST_S)

    def _watch_processes(self) -> None:
        wanted = set(self._service.processes())
        for process in set(self.processes) - wanted:
            self.processes.pop(process).close()
        for process in wanted - set(self.processes):
            self.processes[process] = ProcessWatch(*process)

    def _wait(self) -> None:
        """Waits for requests, replies, the end of a process, or until something is due."""
        if sum(listener.mend() for listener in self._listeners):  # all of them: no `any`
            self._service.mended()
        watched: list[tuple[Any, int]] = [(listener.socket, zmq.POLLIN) for listener in self._listeners]
        watched.append((self._news, zmq.POLLIN))
        watched += [(watch.fd, zmq.POLLIN) for watch in self.processes.values() if watch.fd is not None]
        now_s = time.monotonic()
        due_s = max(self._service.wakes_at_s(), self._judges_from_s)
        due_s = min([due_s, *(watch.look_at_s or now_s + LOOK_AGAIN_S for watch in self.processes.values())])
        due_s = max(now_s, min([due_s, *(listener.mend_at_s for listener in self._listeners)]))
        timeout_ms = -1 if due_s == math.inf else int((due_s - now_s) * 1000) + 1
        ready = [source for source, _ in zmq.zmq_poll(watched, timeout_ms)]
        if time.monotonic() > due_s + LATE_S:
            self._judges_from_s = time.monotonic() + LATE_S
        if self._news in ready and self._news is not None:
            os.eventfd_read(self._news)
        for watch in self.processes.values():
            watch.ended()  # which closes its descriptor: polling one that stays readable would keep a core busy

    def _take_all(self) -> None:
        self._looked_s = time.monotonic()
        for listener in self._listeners:
            for _ in range(MAX_TAKEN):
                if not self._take(listener.socket):
                    break

    def _take(self, socket: zmq.Socket[bytes]) -> bool:
        """Answers one request: the peer's route, an empty frame, the message. False if there is none."""
        try:
            frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        end = next((i for i, frame in enumerate(frames) if not len(frame)), None)
        if end is None:
            return True  # the peer is no REQ: it waits for no reply
        route, frames = [frame.bytes for frame in frames[: end + 1]], frames[end + 1 :]
        self.received_bytes += sum(len(frame) for frame in frames)
        asker = Asker(self, socket, route)
        try:
            envelope = _decode(frames)
            asker._seq = envelope.seq
            self._admit(asker)
            reply = self._service.answer(asker, envelope.body, _payload(frames))
        except Exception as error:  # noqa: BLE001 -- whatever a peer sends, it is answered
            reply = self._failed(error)
        if reply is not None:
            self._answer(asker, reply)
        return True

    def _admit(self, asker: Asker) -> None:
        """Counts the request. Raises `ProtocolError` where its peer has too many that are unanswered."""
        if self._most_open is None:
            return
        waiting = [other for other in self.unanswered.get(asker.peer, ()) if not other._answered]
        if len(waiting) >= self._most_open:
            raise ProtocolError(
                f"{self._most_open} requests of this peer are not answered yet",
                hint="wait for the answers to earlier requests",
            )
        self.unanswered[asker.peer] = [*waiting, asker]

    def _look(self) -> None:
        if self._looked_s >= self._judges_from_s:
            ended = [process for process, watch in self.processes.items() if watch.ended()]
            self._service.look(self._looked_s, ended)

    def _send_replies(self) -> None:
        """A peer that is gone, or that does not read, asks again if it still wants its reply."""
        while self._replies:
            asker, frames = self._replies.popleft()
            if all(other._answered for other in self.unanswered.get(asker.peer, ())):
                self.unanswered.pop(asker.peer, None)
            try:
                asker._socket.send_multipart(frames, zmq.DONTWAIT, copy=len(frames) == len(asker._route) + 1)
                self.sent_bytes += sum(memoryview(frame).nbytes for frame in frames[len(asker._route) :])
            except zmq.ZMQError as error:
                logger.info("weightwire: a reply was not sent: %s", error)

    def _failed(self, error: BaseException) -> Failed:
        if not isinstance(error, WeightwireError):
            logger.error("weightwire: a request to %s failed", self.thread.name, exc_info=error)
        return Failed(WeightwireError.wrap(error).at(**self._where).info())

    def _close_sockets(self) -> None:
        """Closes sockets and descriptors, once: on the thread at its end, or in `close` where the thread never ran."""
        with self._lock:  # nobody may write to a descriptor that is somebody else's by then
            news, self._news = self._news, None
            listeners, self._listeners = self._listeners, []
        if news is not None:
            os.close(news)
        for listener in listeners:
            listener.close()
        while self.processes:
            self.processes.popitem()[1].close()


def _decode(frames: Sequence[zmq.Frame]) -> Envelope:
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message of {len(frames)} frames; one or two are expected")
    envelope = codec.decode(memoryview(frames[0].buffer))
    codec.check_payload(envelope.body, _payload(frames))
    return envelope


def _payload(frames: Sequence[zmq.Frame]) -> memoryview | None:
    return memoryview(frames[1].buffer) if len(frames) == 2 else None
