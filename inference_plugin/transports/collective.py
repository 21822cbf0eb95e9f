"""By `torch.distributed`: each trainer rank broadcasts its buckets to all workers of all replicas.

1. for each transaction every trainer rank makes a process group with all workers (`topology`), of the backend for its device
   or of the one that the user named (`backends`), apart from the trainer's and the engine's own groups;
2. a bucket is a header (bytes of the list of pieces, bytes of payload), then the list, then the payload. Only the sender
   decides where a bucket ends. It packs one of two buffers while the other is in flight;
3. the worker compares each piece with its digest on arrival, as on `zmq`, in a thread of its own.

A peer that dies or stalls ends the groups on all sides, by the backend's own notice or by the deadline; the next update makes
new groups. Collectives authenticate nobody, so by default they don't leave the host: groups meet in a file of the runtime
directory, and gloo listens on loopback. With `collective_interface` the user names a network that is trusted: groups
meet at a store of rank 0 on that interface, for as long as one update takes, and gloo listens there. Digests travel
over the job's own channels, so what a stranger sends there is refused; a stranger can read along and make updates fail.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.devices import in_use, start_thread
from inference_plugin.net.addresses import boot_id, here, new_replica_id, runtime_dir
from inference_plugin.transports.backends import Group, backend_named, chosen_backend
from inference_plugin.transports.base import Delivery, Sender, Target, Transport, WriteStats, digested_pieces
from inference_plugin.transports.bucket_staging import BucketReceiver, BucketStaging
from inference_plugin.transports.interfaces import INTERFACE, own_interface, serve_store
from inference_plugin.transports.pieces import Bytes
from inference_plugin.transports.spread import FanOut
from inference_plugin.transports.topology import SENDER, GroupPlan, Process, plan_groups
from inference_plugin.wire.codec import MAX_PAYLOAD_BYTES, decode_as
from inference_plugin.wire.config import Config, variable_of
from inference_plugin.wire.errors import (
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
)
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tracing import carried, span, span_since

__all__ = ["TRANSPORT"]

END, FAILED = -1, -2
MAX_PIECES_BYTES = 8 << 20
CANCEL_S = 0.1
"""Longest time until a check that waits for broadcasts notices that its transaction was dropped."""


Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Rendezvous(msgspec.Struct, frozen=True):
    """The meeting place of a transaction's groups, the workers' processes in order, the number of trainer ranks that send, and
    the backend. `store`: host and port of rank 0's store; None where `name` is a file in the runtime directory instead."""

    name: Annotated[str, msgspec.Meta(pattern=r"^collective-[0-9]+-[0-9]+-[0-9a-f]+$")]
    receivers: Annotated[tuple[Process, ...], msgspec.Meta(min_length=1, max_length=65536)]
    senders: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    backend: Annotated[str, msgspec.Meta(max_length=40)]
    store: tuple[Annotated[str, msgspec.Meta(max_length=64)], Port] | None = None


class Probe(msgspec.Struct, frozen=True):
    """Facts that trainer and worker must share: the host and the runtime directory (`here`) or an interface each, and a backend.
    A backend that moves device memory also needs them on different devices."""

    here: Annotated[str, msgspec.Meta(max_length=8192)]
    has_interface: bool
    backend: Annotated[str, msgspec.Meta(max_length=40)]
    device: Annotated[str, msgspec.Meta(max_length=200)]


class BroadcastBuffer:
    """A bucket that is packed, then broadcast: pieces in msgpack, then their bytes."""

    def __init__(self, nbytes: int) -> None:
        self.payload = torch.empty(nbytes, dtype=torch.uint8)
        self.pieces: list[Piece] = []
        self.nbytes = 0
        self._in_flight: Callable[[], None] | None = None

    def has_room(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self.payload.numel()

    def add(self, piece: Piece, data: Bytes) -> None:
        self.payload.numpy()[self.nbytes : self.nbytes + data.nbytes] = data
        self.nbytes += data.nbytes
        self.pieces.append(piece)

    def send(self, group: Group) -> None:
        """Broadcasts the bucket; the payload stays in flight until `wait`."""
        pieces = torch.frombuffer(bytearray(msgspec.msgpack.encode(self.pieces)), dtype=torch.uint8)
        group.broadcast(torch.tensor([pieces.numel(), self.nbytes]))()
        group.broadcast(pieces)()
        if self.nbytes:
            self._in_flight = group.broadcast(self.payload[: self.nbytes])
            self._sent_s = time.perf_counter()

    def wait(self) -> None:
        """Waits until the buffer may be packed again."""
        if self._in_flight is not None:
            self._in_flight()
            span_since(self._sent_s, "bucket", "broadcasts", bytes=self.nbytes)
        self._in_flight = None
        self.pieces, self.nbytes = [], 0


class CollectiveStaging(BucketStaging):
    """Filled by a thread that takes part in each sender's broadcasts, one sender after the other."""

    def begin(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._error: WeightwireError | None = None
        self._group: Group | None = None
        self._device = in_use()
        self._queue = self._device.current_queue()
        self._closing = self._is_over = False
        self._ending = threading.Lock()
        self._thread = start_thread(carried(self._run), name="weightwire-collective", stop=self.close)

    def check(self, manifest: Manifest, pieces: Any, between: Any, threads: int = 1) -> int:
        while self._thread.is_alive():  # it ends by the groups' own time limit
            self._thread.join(CANCEL_S)
            between()
        if self._error is not None:
            raise self._error
        return super().check(manifest, pieces, between, threads)

    def close(self) -> None:
        with self._ending:
            self._closing = True
            if self._is_over:
                super().close()
                return
        if (group := self._group) is not None:
            group.abort()  # the thread, which may still wait for somebody, gives the memory back when it ends

    def _run(self) -> None:
        rendezvous = self._rendezvous
        try:
            self._device.enter(self._queue)  # beside the engine's own, as all work of this group
            deadline_s = time.monotonic() + rendezvous.timeout_s
            config = Config.from_environment()
            peers = {process: f"the worker of process {process.pid}" for process in rendezvous.receivers}
            for plan in plan_groups(rendezvous.senders, rendezvous.receivers):
                rank = plan.rank_of(_this_process())
                self._group = _join(rendezvous, config, plan, rank, peers, deadline_s)
                if self._closing:
                    raise PeerLost("the transaction was dropped", phase="stage")
                self._take_all(self._group)
                self._group.close()
                self._group = None
        except Exception as error:  # noqa: BLE001 -- raised by `check`, which the trainer asks for
            self._error = _typed(error)
            if self._group is not None:
                self._group.abort()
        finally:
            self._group = None
            with self._ending:
                self._is_over = True
                if self._closing:
                    super().close()

    def _take_all(self, group: Group) -> None:
        buffer = torch.empty(0, dtype=torch.uint8)
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            group.broadcast(header)()
            told, nbytes = (int(value) for value in header)
            if told == END:
                return
            if told == FAILED:
                raise PeerLost("a trainer rank gave the update up", phase="stage")
            if not (0 <= told <= MAX_PIECES_BYTES and 0 <= nbytes <= MAX_PAYLOAD_BYTES):
                raise ProtocolError(f"a bucket of {told} bytes of pieces and {nbytes} of payload", phase="stage")
            pieces = torch.empty(told, dtype=torch.uint8)
            group.broadcast(pieces)()
            if nbytes > buffer.numel():  # the sender alone decides how large a bucket is
                buffer = torch.empty(nbytes, dtype=torch.uint8)
            if nbytes:
                group.broadcast(buffer[:nbytes])()
            with span("receive", bytes=nbytes):
                self.receive_pieces(
                    decode_as(pieces.numpy().tobytes(), tuple[Piece, ...]), buffer[:nbytes].numpy().data
                )


class CollectiveReceiver(BucketReceiver):
    """Takes part in the groups of one transaction at a time."""

    staging = CollectiveStaging

    def check_probe(self, probe: bytes) -> None:
        offered = decode_as(probe, Probe)
        if offered.has_interface:
            own_interface(Config.from_environment())
        elif offered.here != here():
            raise TransportUnavailable(
                "collective: the trainer is on another host or has another runtime directory; collectives authenticate "
                "nobody, and stay on one host by default",
                hint=f"use transport 'zmq', between hosts with a key; on a network that you trust, {INTERFACE} names the "
                "interface, on both sides",
            )
        if backend_named(offered.backend).queues and offered.device and offered.device == in_use().uuid():
            raise TransportUnavailable(
                f"collective: {offered.backend} can't broadcast from a trainer to an engine on the same device",
                hint=f"use transport 'shm', or {variable_of('collective_backend')}=gloo in the trainer",
            )

    def open(self, manifest: Manifest, description: bytes, needs: Sequence[Box]) -> CollectiveStaging:
        rendezvous = decode_as(description, Rendezvous)
        backend_named(rendezvous.backend)
        plan_groups(rendezvous.senders, rendezvous.receivers)[0].rank_of(_this_process())
        staging = super().open(manifest, b"", needs)
        assert isinstance(staging, CollectiveStaging)
        staging.begin(rendezvous)
        return staging


class CollectiveSender(Sender):
    """One group per transaction and trainer rank."""

    def __init__(self) -> None:
        self._met: tuple[tuple[Target, ...], int, float] = ((), 1, 0.0)
        self._paths: list[Path] = []
        self._store: Any = None

    @property
    def _backend(self) -> str:
        return backend_named(chosen_backend(self.config.collective_backend)).name

    def probe(self) -> bytes:
        has_interface = self.config.collective_interface is not None
        return msgspec.msgpack.encode(Probe(here(), has_interface, self._backend, in_use().uuid()))

    def meet(self, targets: Sequence[Target], trainer_ranks: int, timeout_s: float, fan_out: FanOut) -> None:
        self._met = tuple(targets), trainer_ranks, timeout_s

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        targets, senders, timeout_s = self._met
        self._forget()
        receivers = tuple(Process(target.boot_id, target.pid) for target in targets)
        plan_groups(senders, receivers)  # refuses what can't be a group before anybody waits for it
        name = new_replica_id("collective")
        store = None
        if (interface := self.config.collective_interface) is not None:
            self._store, store = serve_store(interface)
        else:
            self._paths = [_path(name, sender) for sender in range(senders)]
        return msgspec.msgpack.encode(Rendezvous(name, receivers, senders, timeout_s, self._backend, store))

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        rendezvous = decode_as(delivery.description, Rendezvous)
        peers = {
            Process(target.boot_id, target.pid): f"rank {target.rank} of replica {target.replica}"
            for target in delivery.targets
        }
        if peers.keys() != set(rendezvous.receivers):
            raise PeerLost(
                "a replica dropped out after the update's groups were laid out",
                hint="update again: the next one makes groups without it",
                phase="stage",
            )
        plan = plan_groups(rendezvous.senders, rendezvous.receivers)[delivery.rank]
        pieces: list[Piece] = []
        stats = WriteStats()
        joined: Group | None = None
        try:
            until_s = min(delivery.deadline_s, time.monotonic() + rendezvous.timeout_s)
            joined = _join(rendezvous, self.config, plan, SENDER, peers, until_s)
            self._send_all(joined, delivery, pieces, stats)
            joined.broadcast(torch.tensor([END, 0]))()
            joined.close()
        except Exception as error:
            if joined is not None:
                with contextlib.suppress(Exception):
                    joined.broadcast(torch.tensor([FAILED, 0]))()
                joined.abort()
            raise (_typed(error) if isinstance(error, RuntimeError) else error) from error
        return pieces, stats

    def _send_all(self, joined: Group, delivery: Delivery, pieces: list[Piece], stats: WriteStats) -> None:
        self.config.warn_if_short_of_memory(2 * self.config.bucket_bytes)
        packed, flying = (BroadcastBuffer(self.config.bucket_bytes) for _ in range(2))
        for piece, part in digested_pieces(delivery, stats):
            if not packed.has_room(part.nbytes):
                flying.wait()
                packed.send(joined)
                packed, flying = flying, packed
                stats.messages += 1
            packed.add(piece, part)
            pieces.append(piece)
            del part  # before the next one is made
        started_s = time.perf_counter()
        flying.wait()
        if packed.pieces:
            packed.send(joined)
            packed.wait()
            stats.messages += 1
        stats.move_s += time.perf_counter() - started_s
        stats.held_bytes = 2 * self.config.bucket_bytes

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths, self._store = [], None


def _this_process() -> Process:
    return Process(boot_id(), os.getpid())


def _path(name: str, sender: int) -> Path:
    return runtime_dir() / f"{name}.{sender}"


def _join(
    rendezvous: Rendezvous, config: Config, plan: GroupPlan, rank: int, peers: Mapping[Process, str], deadline_s: float
) -> Group:
    """This process's end of a sender's group; waits for all its ranks."""
    interface = None if rendezvous.store is None else own_interface(config)

    def meet(limit: timedelta) -> Any:
        if rendezvous.store is None:
            return dist.FileStore(str(_path(rendezvous.name, plan.sender)), plan.size)  # type: ignore[attr-defined]
        store = dist.TCPStore(*rendezvous.store, is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
        return dist.PrefixStore(f"{rendezvous.name}/{plan.sender}", store)  # type: ignore[attr-defined]

    return Group(
        backend_named(rendezvous.backend),
        meet,
        rank,
        plan.size,
        peers={process.pid: name for process, name in peers.items() if process.boot_id == boot_id()},
        interface=interface,
        deadline_s=deadline_s,
    )


def _typed(error: Exception) -> WeightwireError:
    if isinstance(error, WeightwireError):
        return error
    text = str(error).split("\n")[0]
    kind = SyncTimeout if "time" in text.lower() else PeerLost
    return kind(f"collective: {text}", hint="the next update makes new groups", phase="stage")


TRANSPORT = Transport(
    name="collective",
    summary="buckets broadcast by torch.distributed, to all workers at once",
    preference=95,
    why_not=lambda: None if dist.is_available() else "this torch has no torch.distributed",
    sender=CollectiveSender,
    receiver=CollectiveReceiver,
    copies_per_byte=5,  # trainer -> bucket -> socket -> bucket -> staging -> parameter
)
