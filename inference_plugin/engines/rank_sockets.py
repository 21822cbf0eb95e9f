"""Unix sockets between the processes of one replica: the first one leads, the others are connected to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.net import addresses
from inference_plugin.wire.codec import MAX_CONTROL_BYTES, decode_as
from inference_plugin.wire.errors import PeerLost, WeightwireError

__all__ = ["Gathering", "START_TIMEOUT_S", "RankSockets", "sockets_of"]

_LENGTH_BYTES = 8
_TOKEN_BYTES = 16
START_TIMEOUT_S = 600.0
"""Limit of each step of a start in which ranks wait for each other."""


class Gathering(Protocol):
    """A slower way by which the ranks reach each other before they have sockets: every rank's bytes, on all ranks."""

    def gather(self, data: bytes) -> list[bytes]: ...


class RankSockets:
    """Unix sockets between the first rank and each of the others. `peers`, by rank: on the first one all others, on them the
    first.

    A rank that fails or is late once is lost: its late answer would be taken for the answer to the next question.
    """

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        self.timeout_s = rank_timeout_s()
        self._peers = peers
        self._leads = 0 not in peers
        self._lost: PeerLost | None = None

    def broadcast(self, data: bytes) -> bytes:
        """The first rank's bytes, on all ranks."""
        if not self._leads:
            return self.receive(self.timeout_s)
        self.tell(data)
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        if not self._leads:
            self.answer(data)
            return decode_as(self.receive(self.timeout_s), list[bytes])
        told = [data, *self.answers()]
        self.tell(msgspec.msgpack.encode(told))
        return told

    # the two halves of a question, for ranks that don't all need every answer

    def tell(self, data: bytes) -> None:
        """On the first rank: sends `data` to all others."""
        deadline_s = time.monotonic() + self.timeout_s
        for rank in self._peers:
            self._send(rank, data, deadline_s)

    def answers(self) -> list[bytes]:
        """On the first rank: what each of the others answers, in order of rank."""
        deadline_s = time.monotonic() + self.timeout_s
        return [self._receive(rank, deadline_s) for rank in self._peers]

    def receive(self, timeout_s: float | None) -> bytes:
        """On every other rank: what the first one sends next. None waits for as long as the first one lives."""
        return self._receive(0, None if timeout_s is None else time.monotonic() + timeout_s)

    def answer(self, data: bytes) -> None:
        """On every other rank: sends `data` to the first one."""
        self._send(0, data, time.monotonic() + self.timeout_s)

    def close(self) -> None:
        """Whoever waits for this rank learns that it has left."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, which closing does not
            peer.close()

    def _send(self, rank: int, data: bytes, deadline_s: float) -> None:
        with self._losing(rank) as peer:
            peer.settimeout(_left_s(deadline_s))
            peer.sendall(len(data).to_bytes(_LENGTH_BYTES) + data)

    def _receive(self, rank: int, deadline_s: float | None) -> bytes:
        with self._losing(rank) as peer:
            if deadline_s is None:
                waiting = select.poll()  # not by the socket's timeout: another thread may send meanwhile
                waiting.register(peer, select.POLLIN)
                waiting.poll()
                deadline_s = time.monotonic() + self.timeout_s
            length = int.from_bytes(_read(peer, _LENGTH_BYTES, deadline_s))
            if length > MAX_CONTROL_BYTES:
                raise OSError(f"it announces {length} bytes")
            return _read(peer, length, deadline_s)

    @contextlib.contextmanager
    def _losing(self, rank: int) -> Iterator[socket.socket]:
        """That rank's socket. An error on it raises `PeerLost`, here and at every later call."""
        if self._lost is not None:
            raise PeerLost(f"the ranks have lost each other: {self._lost.message}", rank=self._lost.rank)
        try:
            yield self._peers[rank]
        except Exception as error:
            why = f"rank {rank} was lost: {error}"
            if isinstance(error, TimeoutError):
                why = f"rank {rank} was silent for {self.timeout_s:g} s"
            elif isinstance(error, EOFError | ConnectionError):
                why = f"rank {rank} has ended, or has left the others"
            self._lost = PeerLost(why, rank=rank)
            self.close()
            raise self._lost from error


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())


def _read(peer: socket.socket, length: int, deadline_s: float) -> bytes:
    """Raises `OSError` (`TimeoutError` at the deadline), and `EOFError` where the other side is closed."""
    read = bytearray(length)
    rest = memoryview(read)
    while rest:
        peer.settimeout(_left_s(deadline_s))
        count = peer.recv_into(rest)
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return bytes(read)


# --- how they are made ----------------------------------------------------------------------------------------------------


def sockets_of(group: Gathering, rank: int, size: int) -> RankSockets | None:
    """Sockets between the ranks, which agree over `group`; None on every rank if one of them can't be reached by a socket."""
    if len(set(group.gather(addresses.boot_id().encode()))) > 1:
        return None
    with contextlib.ExitStack() as stack:
        listener: socket.socket | None = None
        where = b""
        if rank == 0:
            with contextlib.suppress(OSError, WeightwireError):
                path = Path(addresses.ipc_address(addresses.new_replica_id("ranks"), "s").removeprefix("ipc://"))
                stack.callback(path.unlink, missing_ok=True)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path))
                listener.listen(size)
                where = secrets.token_bytes(_TOKEN_BYTES) + os.fsencode(path)
        where = group.gather(where)[0]
        token, name = where[:_TOKEN_BYTES], where[_TOKEN_BYTES:]
        mine = _connected(name, token, rank) if name and rank > 0 else None
        reached = group.gather(b"reached" if mine is not None or (name and rank == 0) else b"")
        if mine is not None and all(reached):
            return RankSockets({0: mine})
        if listener is not None and all(reached):
            return RankSockets(_accepted(listener, token, size))
        if mine is not None:
            mine.close()
        return None


def _connected(name: bytes, token: bytes, rank: int) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.settimeout(START_TIMEOUT_S)
        peer.connect(name)
        peer.sendall(token + rank.to_bytes(_LENGTH_BYTES))
    except OSError:
        peer.close()
        return None
    return peer


def _accepted(listener: socket.socket, token: bytes, size: int) -> dict[int, socket.socket]:
    """The other ranks, all of which have connected; whoever else did has no token."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    found: dict[int, socket.socket] = {}
    while len(found) < size - 1:
        listener.settimeout(_left_s(deadline_s))
        peer, _ = listener.accept()
        try:
            said = _read(peer, _TOKEN_BYTES + _LENGTH_BYTES, min(deadline_s, time.monotonic() + 1.0))
        except (OSError, EOFError):
            said = b""
        if said[:_TOKEN_BYTES] == token:
            found[int.from_bytes(said[_TOKEN_BYTES:])] = peer
        else:
            peer.close()
    return dict(sorted(found.items()))
