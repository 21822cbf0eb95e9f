"""How a replica's ranks tell each other something in the middle of a turn, while generation stands."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.net import addresses
from inference_plugin.wire.codec import MAX_CONTROL_BYTES, decode_as
from inference_plugin.wire.errors import PeerLost, WeightwireError

__all__ = ["INLINE_BYTES", "Ranks"]

INLINE_BYTES = 4096
"""Longest message that travels in one collective of gloo."""

_LENGTH_BYTES = 8
_TOKEN_BYTES = 16
_START_TIMEOUT_S = 600.0


class _Way(Protocol):
    """How bytes get from rank to rank. What fails in it leaves SGLang's own groups in step."""

    def broadcast(self, data: bytes) -> bytes: ...

    def gather(self, data: bytes) -> list[bytes]: ...


class Ranks:
    """This replica's ranks. `collectives` counts what they have told each other.

    On one host they are connected to the first one by sockets. Over several hosts, or where the sockets can't be made, they use a
    gloo group that nobody else uses. Of two ranks on two busy cores a gathering takes 0.02 ms by sockets and 0.5 ms by gloo,
    whose messages pass through several threads on either side.
    """

    def __init__(self, parallel: Any) -> None:
        self.rank, self.size = int(parallel.tp_rank), int(parallel.tp_size)
        self.leads = self.rank == 0
        self.collectives = 0
        self._way: _Way | None = None
        if self.size > 1:
            group = _Gloo(parallel.tp_group.ranks, self.rank)
            self._way = _sockets_of(group, self.rank, self.size) or group
            group.timeout_s = rank_timeout_s()

    def broadcast(self, data: bytes = b"") -> bytes:
        """The first rank's bytes, on all ranks."""
        if self._way is None:
            return data
        self.collectives += 1
        return self._way.broadcast(data)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        if self._way is None:
            return [data]
        self.collectives += 1
        return self._way.gather(data)


class _Gloo:
    """A process group of the ranks. A message up to `INLINE_BYTES` costs one collective of gloo, a longer one a second."""

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.timeout_s = _START_TIMEOUT_S
        self._leads, self._size = rank == 0, len(ranks)
        self._group: Any = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=_START_TIMEOUT_S), use_local_synchronization=True
        )

    def broadcast(self, data: bytes) -> bytes:
        frame = _frame(data)
        self._broadcast(frame)
        length = _length(frame)
        if length <= INLINE_BYTES:
            return _content(frame, length)
        rest = torch.empty(length, dtype=torch.uint8)
        if self._leads:
            rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._broadcast(rest)
        return rest.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        frames = self._all_gather(_frame(data))
        lengths = [_length(frame) for frame in frames]
        if max(lengths) <= INLINE_BYTES:
            return [_content(frame, length) for frame, length in zip(frames, lengths, strict=True)]
        padded = bytearray(data.ljust(max(lengths), b"\0"))
        contents = self._all_gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [content.numpy().tobytes()[:length] for content, length in zip(contents, lengths, strict=True)]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        source = dist.get_global_rank(self._group, 0)
        self._done(dist.broadcast(tensor, source, group=self._group, async_op=True))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._size)]
        self._done(dist.all_gather(gathered, tensor, group=self._group, async_op=True))
        return gathered

    def _done(self, work: Any) -> None:
        work.wait(timedelta(seconds=self.timeout_s))


def _frame(data: bytes) -> torch.Tensor:
    """The length of `data`, and `data` itself where it is short enough."""
    content = data if len(data) <= INLINE_BYTES else b""
    return torch.frombuffer(
        bytearray(len(data).to_bytes(_LENGTH_BYTES) + content.ljust(INLINE_BYTES, b"\0")), dtype=torch.uint8
    )


def _length(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:_LENGTH_BYTES].numpy().tobytes())


def _content(frame: torch.Tensor, length: int) -> bytes:
    return frame[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes()


class _Sockets:
    """Unix sockets between the first rank and each of the others. `peers`, by rank: on the first one all others, on them the
    first.

    A rank that fails or is late once is lost: its late answer would be taken for the answer to the next question.
    """

    def __init__(self, peers: dict[int, socket.socket]) -> None:
        self._peers = peers
        self._leads = 0 not in peers
        self._lost: PeerLost | None = None

    def broadcast(self, data: bytes) -> bytes:
        deadline_s = time.monotonic() + rank_timeout_s()
        if not self._leads:
            return self._receive(0, deadline_s)
        self._tell_all(data, deadline_s)
        return data

    def gather(self, data: bytes) -> list[bytes]:
        deadline_s = time.monotonic() + rank_timeout_s()
        if not self._leads:
            self._send(0, data, deadline_s)
            return decode_as(self._receive(0, deadline_s), list[bytes])
        told = [data, *(self._receive(rank, deadline_s) for rank in self._peers)]
        self._tell_all(msgspec.msgpack.encode(told), deadline_s)
        return told

    def _tell_all(self, data: bytes, deadline_s: float) -> None:
        for rank in self._peers:
            self._send(rank, data, deadline_s)

    def _send(self, rank: int, data: bytes, deadline_s: float) -> None:
        with self._losing(rank) as peer:
            peer.settimeout(_left_s(deadline_s))
            peer.sendall(len(data).to_bytes(_LENGTH_BYTES) + data)

    def _receive(self, rank: int, deadline_s: float) -> bytes:
        with self._losing(rank) as peer:
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
                why = f"rank {rank} was silent for {rank_timeout_s():g} s"
            elif isinstance(error, EOFError | ConnectionError):
                why = f"rank {rank} has ended, or has left the others"
            self._lost = PeerLost(why, rank=rank)
            for peer in self._peers.values():
                peer.close()
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


def _sockets_of(group: _Gloo, rank: int, size: int) -> _Sockets | None:
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
        where = group.broadcast(where)
        token, name = where[:_TOKEN_BYTES], where[_TOKEN_BYTES:]
        mine = _connected(name, token, rank) if name and rank > 0 else None
        reached = group.gather(b"reached" if mine is not None or (name and rank == 0) else b"")
        if mine is not None and all(reached):
            return _Sockets({0: mine})
        if listener is not None and all(reached):
            return _Sockets(_accepted(listener, token, size))
        if mine is not None:
            mine.close()
        return None


def _connected(name: bytes, token: bytes, rank: int) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.settimeout(_START_TIMEOUT_S)
        peer.connect(name)
        peer.sendall(token + rank.to_bytes(_LENGTH_BYTES))
    except OSError:
        peer.close()
        return None
    return peer


def _accepted(listener: socket.socket, token: bytes, size: int) -> dict[int, socket.socket]:
    """The other ranks, all of which have connected; whoever else did has no token."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
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
