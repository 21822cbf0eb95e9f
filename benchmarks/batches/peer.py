"""An owner or a consumer of "weightwire" or of the two of "msgpack over zmq": a process that obeys the controller. See `sockets`.

Usage: python -m benchmarks.batches.peer WAY NAME ADDRESS
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import msgpack
import msgspec
import torch
import zmq

from benchmarks.batches.data import KEYS, Case, Rows, digests_of, flat, now_s, read
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.records import Entry, Owner, VersionSpan
from trainer_adapters.batch.store import Store

BUDGET_BYTES = 4 << 30


class ControllerSide(Protocol):
    def begin(self) -> None:
        """Forgets the last run."""

    def take(self, message: memoryview) -> int:
        """What an owner sent; returns the number of tasks in it."""

    def hand_out(self, case: Case, consumer: int) -> Iterator[Any]:
        """The messages for a consumer."""


class PeerSide(Protocol):
    def build(self, made: dict[int, Rows]) -> None:
        """At an owner, before the time counts: makes the rows where `put` takes them."""

    def put(self, made: dict[int, Rows]) -> Iterator[Any]:
        """The messages to the controller."""

    def take(self, message: memoryview) -> None:
        """A message of the controller, at a consumer."""

    def consume(self) -> None:
        """Returns when every row is here as a tensor, and its bytes were read once."""

    def digests(self) -> list[int]: ...

    def clear(self) -> None: ...


# --- weightwire -------------------------------------------------------------------------------------------------------


ANNOUNCED_EVERY_S = 1e-3
"""Tasks that are put within this time are announced in one message. `RolloutWorker` does so too: what finishes while an
announcement is under way goes with the next."""


class Announced(msgspec.Struct, array_like=True):
    owner: Owner
    tasks: dict[int, tuple[Entry, ...]]


class BatchController:
    """Metadata only."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Announced)
        self.begin()

    def begin(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._entries: dict[int, tuple[Entry, ...]] = {}
        self._chunks: list[DistributedBatch] = []

    def take(self, message: memoryview) -> int:
        announced = self._decoder.decode(message)
        self._entries |= announced.tasks
        self._owners[announced.owner.id] = announced.owner
        return len(announced.tasks)

    def hand_out(self, case: Case, consumer: int) -> Iterator[bytes]:
        if not self._chunks:
            entries = [entry for task in range(case.tasks) for entry in self._entries[task]]
            self._chunks = DistributedBatch.of_entries(entries, self._owners.values()).chunk(2)
        yield self._chunks[consumer].to_bytes()


class BatchPeer:
    """An owner's store, or a consumer's batch."""

    def __init__(self, name: str) -> None:
        self._store = Store(budget_bytes=BUDGET_BYTES) if name.startswith("owner") else None
        self._runs = 0
        self._put: list[str] = []
        self._batch: DistributedBatch | None = None
        self._rows: dict[str, list[Any]] = {}

    def build(self, made: dict[int, Rows]) -> None:
        """They are made where torch makes them."""

    def put(self, made: dict[int, Rows]) -> Iterator[bytes]:
        assert self._store is not None
        self._runs += 1
        entries: dict[int, tuple[Entry, ...]] = {}
        due_s = now_s() + ANNOUNCED_EVERY_S
        for task, rows in made.items():
            task_id = f"prompt-{self._runs}-{task}"
            self._put.append(task_id)
            entries[task] = self._store.put(task_id, rows, VersionSpan(self._runs, self._runs))
            if now_s() >= due_s:
                yield msgspec.msgpack.encode(Announced(self._store.owner, entries))
                entries, due_s = {}, now_s() + ANNOUNCED_EVERY_S
        if entries:
            yield msgspec.msgpack.encode(Announced(self._store.owner, entries))

    def take(self, message: memoryview) -> None:
        self._batch = DistributedBatch.from_bytes(bytes(message))

    def consume(self) -> None:
        assert self._batch is not None
        self._batch.fetch()  # maps the rows and checks their digests, which reads them
        self._rows = {key: self._batch.rows(key) for key in KEYS}

    def digests(self) -> list[int]:
        return read(self._rows)

    def clear(self) -> None:
        self._batch, self._rows = None, {}
        gc.collect()
        if self._store is not None:
            self._store.clear(self._put)
            self._put = []


class BuiltPeer(BatchPeer):
    """An owner whose rows are made in its store's memory."""

    def build(self, made: dict[int, Rows]) -> None:
        assert self._store is not None
        self._built = {}
        for task, rows in made.items():
            built: Rows = {}
            for key, of_key in rows.items():
                lengths = [len(row) for row in of_key]
                whole = self._store.empty((sum(lengths),), dtype=of_key[0].dtype)
                built[key] = list(torch.cat(of_key, out=whole).split(lengths))
            self._built[task] = built

    def put(self, made: dict[int, Rows]) -> Iterator[bytes]:
        return super().put(self._built)

    def clear(self) -> None:
        self._built: dict[int, Rows] = {}
        super().clear()


# --- msgpack over zmq -------------------------------------------------------------------------------------------------


class Codec(NamedTuple):
    encode: Callable[[int, dict[str, list[Any]]], bytes]
    """Of a task: its number, and the bytes of its rows by key."""
    decode: Callable[[memoryview], tuple[int, dict[str, list[Any]]]]
    as_bytes: Callable[[Any], Any]


class PackedTask(msgspec.Struct, array_like=True):
    """With msgspec encoding copies the rows once, and decoding makes views of the message."""

    task: int
    rows: dict[str, list[memoryview]]


DTYPES = {"input_ids": torch.int64, "log_probs": torch.float32, "advantages": torch.float32, "loss_mask": torch.bool}


def tensor(row: Any, dtype: torch.dtype) -> torch.Tensor:
    """Without a copy. torch warns of memory that it could write to although it may not; nobody does."""
    return torch.frombuffer(row, dtype=dtype)


def _by_msgspec(message: memoryview) -> tuple[int, dict[str, list[Any]]]:
    packed = _PACKED.decode(message)
    return packed.task, packed.rows


_PACKED = msgspec.msgpack.Decoder(PackedTask)

PLAIN = Codec(
    lambda task, rows: msgpack.packb([task, rows]),
    lambda message: tuple(msgpack.unpackb(message, strict_map_key=False)),
    lambda array: array.tobytes(),
)
"""As most write it: rows become `bytes`, on every hop."""
VIEWS = Codec(
    lambda task, rows: msgspec.msgpack.encode(PackedTask(task, rows)),
    _by_msgspec,
    lambda array: memoryview(array).cast("B"),
)


class PackController:
    """Collects the rows, and sends them on."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.begin()

    def begin(self) -> None:
        self._tasks: dict[int, dict[str, list[Any]]] = {}

    def take(self, message: memoryview) -> int:
        task, rows = self._codec.decode(message)
        self._tasks[task] = rows
        return 1

    def hand_out(self, case: Case, consumer: int) -> Iterator[bytes]:
        return (self._codec.encode(task, self._tasks[task]) for task in case.of_consumer(consumer))


class PackPeer:
    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.clear()

    def build(self, made: dict[int, Rows]) -> None:
        """They are made where torch makes them."""

    def put(self, made: dict[int, Rows]) -> Iterator[bytes]:
        for task, rows in made.items():
            packed = {key: [self._codec.as_bytes(row.numpy()) for row in of_key] for key, of_key in rows.items()}
            yield self._codec.encode(task, packed)

    def take(self, message: memoryview) -> None:
        _, rows = self._codec.decode(message)
        tensors = {key: [tensor(row, DTYPES[key]) for row in of_key] for key, of_key in rows.items()}
        self._rows.append(tensors)
        self._digests.append(read(tensors))

    def consume(self) -> None:
        """They were read as they came."""

    def digests(self) -> list[int]:
        return flat(self._digests)

    def clear(self) -> None:
        self._rows: list[dict[str, list[torch.Tensor]]] = []
        self._digests: list[list[int]] = []


class Way(NamedTuple):
    controller: Callable[[], ControllerSide]
    peer: Callable[[str], PeerSide]


WAYS = {
    "weightwire": Way(BatchController, BatchPeer),
    "weightwire, built in place": Way(BatchController, BuiltPeer),
    "msgpack over zmq": Way(lambda: PackController(PLAIN), lambda _: PackPeer(PLAIN)),
    "msgpack over zmq, views": Way(lambda: PackController(VIEWS), lambda _: PackPeer(VIEWS)),
}


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    way, name, address = sys.argv[1:]
    warnings.filterwarnings("ignore", "The given buffer is not writable")
    peer = WAYS[way].peer(name)
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.connect(address)
    send(socket, b"ready")
    made: dict[int, Rows] = {}
    while True:
        kind, frame = socket.recv_multipart(copy=False)
        body = memoryview(frame.buffer)
        match kind.bytes:
            case b"prepare":
                case = msgspec.msgpack.decode(body, type=Case)
                role, number = name.split()
                made = case.make(int(number)) if role == "owner" else {}
                send(socket, b"prepared", msgspec.msgpack.encode(digests_of(made)))
            case b"build":
                peer.build(made)
                send(socket, b"built")
            case b"put":
                for message in peer.put(made):
                    send(socket, b"tasks", message)
            case b"rows":
                peer.take(body)
            case b"consume":
                peer.consume()
                send(socket, b"consumed")
            case b"digests":
                send(socket, b"digests", msgspec.msgpack.encode(peer.digests()))
            case b"clear":
                peer.clear()
                send(socket, b"cleared")


def send(socket: Any, kind: bytes, body: bytes = b"") -> None:
    socket.send_multipart([kind, body], copy=False)


if __name__ == "__main__":
    main()
