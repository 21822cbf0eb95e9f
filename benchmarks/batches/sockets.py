"""A controller with a ZMQ socket, and its owners and consumers as processes: two of "weightwire" and two of "msgpack over zmq".

All do the same: the controller tells the owners to put, collects what they send, and hands each consumer its
half. With "weightwire" these messages hold metadata, with "msgpack over zmq" the rows themselves: packed and unpacked by the
msgpack package, rows being `bytes`; or, as "views", by msgspec, which copies only where it encodes. Every frame that the
controller sends or receives between "put" and the last "consumed" is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from benchmarks.batches.data import CONSUMERS, OWNERS, Case, Times, now_s
from benchmarks.batches.peer import WAYS
from benchmarks.processes import Process

TIMEOUT_MS = 120_000
PEERS = [*(f"owner {i}" for i in range(OWNERS)), *(f"consumer {i}" for i in range(CONSUMERS))]
OWNER_NAMES, CONSUMER_NAMES = PEERS[:OWNERS], PEERS[OWNERS:]


class SocketWay:
    """One of these ways."""

    def __init__(self, way: str, scratch: Path) -> None:
        self._controller = WAYS[way].controller()
        self._counted = 0
        name = way.replace(",", "").replace(" ", "-")
        address = f"ipc://{scratch}/{name}"
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._socket.bind(address)
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(scratch), "OMP_NUM_THREADS": "1"}
        self._processes = [
            Process(
                [sys.executable, "-m", "benchmarks.batches.peer", way, peer, address],
                scratch / f"{name}-{peer.replace(' ', '-')}.log",
                environment,
            )
            for peer in PEERS
        ]

    def start(self) -> None:
        """Returns when all processes are there."""
        for _ in PEERS:
            self._receive(b"ready")

    def prepare(self, case: Case) -> dict[int, list[int]]:
        """Has the owners make their rows; the digests, by task."""
        for name in PEERS:
            self._send(name, b"prepare", msgspec.msgpack.encode(case))
        found: dict[int, list[int]] = {}
        for _ in PEERS:
            found |= msgspec.msgpack.decode(self._receive(b"prepared"), type=dict[int, list[int]])
        return found

    def run(self, case: Case) -> Times:
        for name in OWNER_NAMES:
            self._send(name, b"build")
        for _ in OWNER_NAMES:
            self._receive(b"built")
        self._counted = 0
        start_s = now_s()
        for name in OWNER_NAMES:
            self._send(name, b"put")
        self._controller.begin()
        left = case.tasks
        while left:
            left -= self._controller.take(self._receive(b"tasks"))
        put_s = now_s()
        for i, name in enumerate(CONSUMER_NAMES):
            for message in self._controller.hand_out(case, i):
                self._send(name, b"rows", message)
            self._send(name, b"consume")
        for _ in CONSUMER_NAMES:
            self._receive(b"consumed")
        return Times(start_s, put_s, now_s(), self._counted)

    def digests(self) -> list[list[int]]:
        """What each consumer has."""
        found = []
        for name in CONSUMER_NAMES:
            self._send(name, b"digests")
            found.append(msgspec.msgpack.decode(self._receive(b"digests"), type=list[int]))
        return found

    def clear(self) -> None:
        self._controller.begin()
        for names in (CONSUMER_NAMES, OWNER_NAMES):
            for name in names:
                self._send(name, b"clear")
            for _ in names:
                self._receive(b"cleared")

    def close(self) -> None:
        for process in self._processes:
            process.stop()
        self._socket.close()

    def _send(self, name: str, kind: bytes, body: Any = b"") -> None:
        self._counted += len(kind) + len(body)
        self._socket.send_multipart([name.encode(), kind, body], copy=False)

    def _receive(self, kind: bytes) -> memoryview:
        """The body of the next message, which is of this kind."""
        try:
            _, came, body = self._socket.recv_multipart(copy=False)
        except zmq.Again:
            raise SystemExit(f"no {kind.decode()!r} came; the logs:\n" + "\n".join(self._logs())) from None
        if came.bytes != kind:
            raise SystemExit(f"{came.bytes!r} came instead of {kind!r}; the logs:\n" + "\n".join(self._logs()))
        self._counted += len(kind) + len(body)
        return memoryview(body.buffer)

    def _logs(self) -> Iterator[str]:
        return (process.log.read_text()[-2000:] for process in self._processes)


@contextmanager
def socket_way(way: str, scratch: Path) -> Iterator[SocketWay]:
    made = SocketWay(way, scratch)
    try:
        made.start()
        yield made
    finally:
        made.close()
