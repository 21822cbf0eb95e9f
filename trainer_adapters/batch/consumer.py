"""This process as a consumer of owners on its host: it maps their segments, and ends a lease when no tensor uses it any more.

Every shard is a `LeasedBytes`. Its tensors (the whole, or one for each row) have storages of their own over these bytes, which
keep the `LeasedBytes`. That ends with the last tensor that views one of them, however it was made; then the lease of the shard
ends. A thread tells the owner, so that neither the garbage collector nor a fetch waits for it.

A forked child inherits tensors, but can't end leases. So leases that began before a fork end only when the child, and whatever it
forked, has ended or called exec too: all of these hold the writing end of a pipe. What the child fetches itself it leases itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from inference_plugin.net.addresses import boot_id
from inference_plugin.net.channel import Channel, take_ready
from inference_plugin.net.processes import start_ticks
from inference_plugin.transports.segment import SegmentAddress, SharedSegment
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import TransportUnavailable, WeightwireError
from inference_plugin.wire.messages import Done, EndLeases
from inference_plugin.wire.messages.batch import MAX_WANTED, LeaseEnd
from inference_plugin.wire.messages.common import Sender
from trainer_adapters.batch.connections import Connections
from trainer_adapters.batch.records import Owner

__all__ = ["Consumer", "LeasedBytes", "consumer"]

logger = logging.getLogger(__name__)

ALL = -1
"""Stands for all shards of a lease."""

GIVE_UP_S = 3600.0
"""After this many seconds without an answer, an owner is no longer told; it ends the leases when this process ends."""

REST_S = 0.1
"""Pause, in seconds, after an error of the thread itself, so that a repeated error does not spin."""

Memory = npt.NDArray[np.uint8]


@dataclass(eq=False)
class _Fork:
    """Processes that were forked from this one. `fd` is readable when they have ended. `number`: of the last lease before the
    fork; `ended`: leases whose end waits for theirs."""

    fd: int
    number: int
    ended: list[tuple[Owner, int, int]] = field(default_factory=list)


class LeasedBytes:
    """The bytes of one leased shard, within a mapped segment; the lease ends with it. Arrays over the bytes keep it.

    Writing into them copies the pages that are written to; the owner's stay as they were.
    """

    __slots__ = ("__array_interface__", "_index", "_segment", "address", "nbytes")

    def __init__(self, segment: LeasedSegment, offset: int, nbytes: int, index: int) -> None:
        """`index`: of the shard in the lease."""
        self._segment, self._index = segment, index
        self.address, self.nbytes = segment.address + offset, nbytes

    def array(self, typestr: str = "|u1", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """The bytes, without a copy, as an array of numpy's `typestr`; by default uint8, all of them. The caller knows that
        address, size and shape fit."""
        shape = (self.nbytes,) if shape is None else shape
        # numpy's protocol for memory of others: the array keeps this object
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": typestr, "data": (self.address, False)}
        return np.asarray(self)

    def __del__(self) -> None:
        self._segment.end(self._index)


@dataclass(frozen=True, slots=True)
class LeasedSegment:
    """A mapped segment of an owner, and the lease under which it is read. `memory`: uint8, from `address` on."""

    memory: Memory
    address: int
    consumer: Consumer
    owner: Owner
    number: int

    def end(self, index: int) -> None:
        """Ends the lease of the shard at `index`."""
        self.consumer.end(self.owner, self.number, index)


class Consumer:
    """Leases and mappings of this process. `session` names it to owners. All methods may be called on any thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.session = secrets.token_hex(8)
        self.sender = Sender(self.session, self.pid, boot_id(), start_ticks())
        self._numbers = 0
        self._lock = threading.Lock()
        self._connections = Connections()
        self._ended: deque[tuple[Owner, int, int]] = deque()
        self._forks: list[_Fork] = []
        self._is_told = False
        self._rest = threading.Event()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._give_back, name="weightwire-consumer", daemon=True)
        self._thread.start()

    def next_number(self) -> int:
        """A number that no other request of this process has."""
        with self._lock:
            self._numbers += 1
            return self._numbers

    def map(self, segment: bytes, owner: Owner, number: int) -> LeasedSegment:
        """A segment of an owner, mapped for as long as the array or a shard of it lives. The caller has the lease `number`.
        The mapping is of this call alone, so that what its user writes in place (a normalised advantage, say) is seen by no other
        fetch.

        Raises `TransportUnavailable` where this process may not map it.
        """
        shared = SharedSegment.attach(decode_as(segment, SegmentAddress), writable=False, private=True)
        memory: Memory = shared.tensor.numpy()
        shared.close()  # gives its descriptor back; the array keeps the mapping
        return LeasedSegment(memory, memory.ctypes.data, self, owner, number)

    def end(self, owner: Owner, number: int, index: int = ALL) -> None:
        """Ends the lease of one shard, by its index among those leased, or of all. Takes no lock: the garbage collector calls it
        at any point of any thread."""
        self._ended.append((owner, number, index))  # first: Ctrl-C may end this call; in a child nobody looks there
        if not self._is_told and os.getpid() == self.pid:
            self._is_told = True
            os.eventfd_write(self._news, 1)

    def connection(self, owner: Owner) -> Channel | None:
        """A connection to the owner that was kept, if there is one."""
        return self._connections.take(owner)

    def keep_connection(self, owner: Owner, channel: Channel) -> None:
        """Keeps a connection to an owner of this host, on which no request is open, for the next fetch."""
        if self._connections.keep(owner, channel):  # the thread closes it in time
            os.eventfd_write(self._news, 1)

    def close_connections(self) -> None:
        """Gives up the connections that were kept."""
        self._connections.close_all()

    def forked(self, fd: int) -> None:
        """This process was forked. `fd` as in `_Fork`; -1 where no pipe could be made: its leases end with this process then."""
        self._forks.append(_Fork(fd, self._numbers))
        os.eventfd_write(self._news, 1)

    # --- the thread ------------------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        peers: dict[str, _Peer] = {}
        is_told = False
        while True:
            try:
                self._give_back_once(peers)
                is_told = False
            except Exception as error:  # a bug of ours must not leave leases behind for ever
                if not isinstance(error, TransportUnavailable):
                    logger.exception("weightwire: giving leases back failed; it is tried again")
                elif not is_told:  # it may last
                    logger.warning("weightwire: leases can't be given back now: %s; it is tried again", error)
                    is_told = True
                self.close_connections()  # a new one may need their descriptors
                self._rest.wait(REST_S)
                os.eventfd_write(self._news, 1)  # what is pending is tried again, not only with the next news

    def _give_back_once(self, peers: dict[str, _Peer]) -> None:
        """Waits for leases that end, and tells their owners. It waits for a silent owner as long as that process lives, at most
        `GIVE_UP_S`; other owners are told meanwhile."""
        channels = [peer.channel for peer in peers.values() if peer.channel is not None]
        sources = [(source, zmq.POLLIN) for channel in channels for source in channel.sources]
        due_s = min(
            [
                self._connections.due_s,
                *(channel.look_at_s for channel in channels),
                *(peer.given_up_at_s for peer in peers.values()),
            ]
        )
        forks = [fork for fork in self._forks if fork.fd >= 0]
        timeout_ms = -1 if due_s == math.inf else int(max(0.0, due_s - time.monotonic()) * 1000) + 1
        watched = [(self._news, zmq.POLLIN), *((fork.fd, zmq.POLLIN) for fork in forks), *sources]
        ready = {source for source, _ in zmq.zmq_poll(watched, timeout_ms) if isinstance(source, int)}
        self._connections.close_late()
        with contextlib.suppress(BlockingIOError):  # the news is of a channel
            os.eventfd_read(self._news)
        self._is_told = False  # before the queue is read: what ends from here on is told anew
        for fork in forks:
            if fork.fd in ready:
                self._forks.remove(fork)
                os.close(fork.fd)
                self._ended.extend(fork.ended)
        while self._ended:
            owner, number, index = ended = self._ended.popleft()
            if (child := next((fork for fork in self._forks if number <= fork.number), None)) is not None:
                child.ended.append(ended)
            else:
                peers.setdefault(owner.id, _Peer(owner)).note(number, index)
        for channel, reply in take_ready(channels, Done, timeout_s=0.0) if channels else ():
            peer = next(peer for peer in peers.values() if peer.channel is channel)
            if isinstance(reply, WeightwireError):
                logger.info("weightwire: leases could not be given back to %s: %s", peer.owner.id, reply)
                peer.pending.clear()
            peer.answered()
        lacking: TransportUnavailable | None = None
        for owner_id, peer in list(peers.items()):
            peer.give_up_if_late()
            try:
                if not peer.is_asked and not peer.ask(self.session):
                    del peers[owner_id]
            except TransportUnavailable as error:  # no descriptor is free; the next one may have a channel
                lacking = error
        if lacking is not None:
            raise lacking


class _Peer:
    """An owner, and the leases that the next request gives back to it."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.channel: Channel | None = None
        self.is_asked = False
        self.given_up_at_s = math.inf
        self.pending: dict[int, list[int]] = {}

    def note(self, number: int, index: int) -> None:
        self.pending.setdefault(number, []).append(index)

    def ask(self, session: str) -> bool:
        """Sends what is pending. If there is nothing, it closes the channel and returns False."""
        if not self.pending:
            if self.channel is not None:
                self.channel.close()
            return False
        if self.channel is None:
            owner = self.owner
            self.channel = Channel(
                owner.address,
                pid=owner.pid,
                start_ticks=owner.start_ticks,
                peer_boot_id=owner.boot_id,
                may_close=True,
            )
        ends: list[LeaseEnd] = []
        room = MAX_WANTED
        while self.pending and room > 0 and len(ends) < MAX_WANTED:
            number, indexes = self.pending.popitem()
            if ALL in indexes:
                ends.append(LeaseEnd(number))
                continue
            ends.append(LeaseEnd(number, tuple(indexes[:room])))
            if indexes[room:]:
                self.pending[number] = indexes[room:]
            room -= len(indexes)
        try:
            self.channel.send(EndLeases(session, tuple(ends)))
        except WeightwireError as error:
            logger.info("weightwire: leases could not be given back to %s: %s", self.owner.id, error)
            self.pending.clear()
            return self.ask(session)
        self.is_asked = True
        self.given_up_at_s = time.monotonic() + GIVE_UP_S
        return True

    def give_up_if_late(self) -> None:
        """Drops the pending leases of an owner that has not answered for too long."""
        if time.monotonic() >= self.given_up_at_s:
            logger.warning(
                "weightwire: %s does not answer; the leases that this process has there end with the process",
                self.owner.id,
            )
            self.pending.clear()
            self.answered()

    def answered(self) -> None:
        self.is_asked = False
        self.given_up_at_s = math.inf


_consumer: Consumer | None = None
_making = threading.Lock()


def consumer() -> Consumer:
    """The consumer of this process; a forked child gets its own."""
    global _consumer
    with _making:
        if _consumer is None or _consumer.pid != os.getpid():
            _consumer = Consumer()
        return _consumer


class _Forking(threading.local):
    """The pipe of the fork that a thread makes just now. Python may change threads between the hooks below."""

    pipe: tuple[int, int] | None = None


def before_fork() -> None:
    """Makes the pipe that tells when the child has ended, if this process has leases."""
    _forking.pipe = None
    if _consumer is not None and _consumer.pid == os.getpid():
        try:
            _forking.pipe = os.pipe2(os.O_CLOEXEC)
        except OSError:  # no free descriptor
            _forking.pipe = (-1, -1)


def after_fork_in_parent() -> None:
    if _forking.pipe is None or _consumer is None:
        return
    (reading, writing), _forking.pipe = _forking.pipe, None
    if writing >= 0:
        os.close(writing)
    _consumer.forked(reading)


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()
    if _forking.pipe is not None and _forking.pipe[0] >= 0:
        os.close(_forking.pipe[0])  # the other end stays open for as long as this process lives
    _forking.pipe = None


_forking = _Forking()
os.register_at_fork(before=before_fork, after_in_parent=after_fork_in_parent, after_in_child=_after_fork_in_child)
