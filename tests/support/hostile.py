"""Peers that mean no good, or are gone before they are answered: for live sockets of a worker or a coordinator."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from inference_plugin.wire import codec
from inference_plugin.wire.messages import Commit, Describe, ReplicaCard, Resume, Verify
from tests.support.rig import LONG_S, gone
from tests.worker.test_extremes import EXTREMES, REQUESTS, places, put, travelling

LOOK_EVERY_MS = 100

TO_A_FRONT = (Describe(), Commit("policy", "t", 1), Verify("policy", 5.0), Resume("s", ("weights",)))
GARBAGE = (b"", b"\xc1", b"\x91" * 100_000, b"\x81\xa1a" * 50_000, bytes(range(256)) * 16)


class Peer:
    """A socket that sends what it likes."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, frame: bytes) -> None:
        self._socket.send_multipart([b"", frame])

    def is_answered(self, frame: bytes, pid: int) -> bool:
        """Whether process `pid` answers; at its end, no."""
        self.send(frame)
        deadline_s = time.monotonic() + LONG_S
        while not self._socket.poll(LOOK_EVERY_MS):
            if gone(pid) or time.monotonic() > deadline_s:
                return False
        self._socket.recv_multipart()
        return True

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger=linger_ms)


def extreme_frames(chance: random.Random, requests: tuple[Any, ...], count: int) -> Iterator[bytes]:
    """Right requests in which up to three values are others, and frames that are no request."""
    for _ in range(count):
        if chance.random() < 0.2:
            yield chance.choice(GARBAGE)
            continue
        message = travelling(chance.choice(requests))
        for path in chance.sample(list(places(message)), k=chance.randint(0, 3)):
            put(message, path, chance.choice(EXTREMES))
        yield msgspec.msgpack.encode(message)


def pester(card: ReplicaCard, chance: random.Random, count: int) -> list[str]:
    """Sends that many extreme frames to the coordinator and to each worker; the addresses at which one was not answered."""
    silent = []
    workers = [(worker.address, worker.pid, REQUESTS) for worker in card.workers]
    for address, pid, requests in ((card.address, card.pid, TO_A_FRONT), *workers):
        peer = Peer(address)
        if not all(peer.is_answered(frame, pid) for frame in extreme_frames(chance, requests, count)):
            silent.append(address)
        peer.close()
    return silent


def verify_and_leave(card: ReplicaCard, count: int) -> None:
    """Asks for verifications whose answers nobody takes."""
    for _ in range(count):
        peer = Peer(card.address)
        peer.send(codec.encode(Verify("policy", 0.5), 1))
        peer.close(linger_ms=1000)


@contextlib.contextmanager
def idle_peers(addresses: list[str], count: int) -> Iterator[None]:
    """Connections that never say a word, spread over the addresses (`ipc://`)."""
    with contextlib.ExitStack() as stack:
        for i in range(count):
            idle = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):  # refused, or its process is gone
                idle.connect(addresses[i % len(addresses)].removeprefix("ipc://"))
        yield
