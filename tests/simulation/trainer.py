"""A trainer: rank 0 with leader and fleet, and ranks that follow. Drivers take the place of the product's blocking lines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from inference_plugin.transports.zmq import ANSWER_SHARE
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import CommitFailed, SyncTimeout, WeightwireError
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import Body, Bucket, Go, GoTransport, Outcome, Ready, Release, Wrote
from tests.simulation.network import Asker, Network, SimulatedChannel
from tests.simulation.transaction import SimulatedTransaction, Steps
from tests.simulation.worker import Segment
from tests.simulation.world import Process, Task
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.fleet.machine_io import CatchUp, RetainedVersion, UpdateBegan, UpdateEnded
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.settings import Quorum, Settings
from trainer_adapters.update.machine_io import (
    CommitAll,
    Dropped,
    LeaveBehind,
    SealAll,
)
from trainer_adapters.update.ranks_machine import (
    EnterOperation,
    FailAll,
    Gather,
    Gone,
    RanksMachine,
    Said,
    SendGo,
    SendOutcome,
)
from trainer_adapters.update.ranks_machine import Event as RanksEvent
from trainer_adapters.update.ranks_machine import Tick as RanksTick
from trainer_adapters.update.trainer_ranks import ANSWER_S
from trainer_adapters.update.transaction import segment_id

__all__ = ["CONFIG", "SHM", "STREAM", "Operation", "Trainer"]

CONFIG = Config()
MANIFEST = Manifest((TensorSpec("w", "float32", (2,)),), {}).check()
SHM: Any = SimpleNamespace(name="shm", lands_in_zone=False, streams=False)
STREAM: Any = SimpleNamespace(name="stream", lands_in_zone=False, streams=True)
SENDER: Any = SimpleNamespace(probe=lambda: b"", without=lambda _replica: None)


@dataclass(eq=False)
class Operation:
    """One update as its caller sees it. `transaction`: None until it began."""

    trainer: Trainer
    version: int
    digest: str
    began_s: float
    deadline_s: float
    transaction: SimulatedTransaction | None = None
    error: WeightwireError | None = None
    over: bool = False
    waits: dict[int, bool] = field(default_factory=dict)
    """By trainer rank: whether its caller still waits."""


class Trainer:
    """One training job's manager, on `size` ranks."""

    def __init__(self, network: Network, name: str, size: int, settings: Settings, job: Any) -> None:
        self.network = network
        self.world = network.world
        self.name = name
        self.settings = settings
        self.job = job
        self.processes = [Process(self.world, f"{name}.{rank}", name) for rank in range(size)]
        self.ranks = RanksMachine(size)
        self.fleet = Fleet(settings, job)
        self.fleet.poke = self.poke  # type: ignore[method-assign]
        self.segments: list[Segment] = []
        self.main: Task | None = None
        self.catching: Task | None = None
        self.catch_ups = 0
        self.digests: dict[int, str] = {}
        self.closed = False
        self._to_manager: list[Any] = [None] * size
        self._count = 0
        network.serve(name, self.processes[0], self._said)
        self.world.at(0.0, self.processes[0], self._begin)

    def _begin(self) -> None:
        if self.settings.catch_up != "never":
            self.catching = Task(self.processes[0], self._catching_up())

    @property
    def is_whole(self) -> bool:
        return all(process.alive for process in self.processes)

    # --- an update -----------------------------------------------------------------------------------------------------

    def update(self, version: int, digest: str) -> Operation:
        """Has all ranks call `update(version)`."""
        self._count += 1
        operation = Operation(self, version, digest, self.world.now_s, self.world.now_s + self.settings.timeout_s)
        for rank, process in enumerate(self.processes):
            operation.waits[rank] = True
            self.world.at(0.0, process, self._call, process, rank, operation)
        return operation

    def _call(self, process: Process, rank: int, operation: Operation) -> None:
        task = Task(process, self._follow(operation, rank) if rank else self._lead(operation))
        if not rank:
            self.main = task

    def _lead(self, operation: Operation) -> Steps:
        """As `leader.lead`, within `Fleet.updating`."""
        self.fleet.on(UpdateBegan())
        self._ranks(EnterOperation(f"update:{operation.version}", operation.deadline_s))
        try:
            yield from self._update(operation)
        except WeightwireError as error:
            operation.error = error.with_traceback(None)  # its frames hold the job
            self._ranks(FailAll(error))
            while self.ranks.state == "failing":
                yield self.ranks.wakes_at_s or math.inf
                self._ranks(RanksTick())
        else:
            self._ranks(SendOutcome(Outcome(b"")))
        self.fleet.on(UpdateEnded())
        self.fleet.poke()
        operation.over, operation.waits[0] = True, False
        self.job.update_ended(operation)

    def _update(self, operation: Operation) -> Steps:
        """As `leader.update` with `Transaction.running`."""
        if self.world.armed_faults and self.world.armed("fail write", self.name) is not None:
            raise WeightwireError("the model could not be scanned")
        one = SimulatedTransaction(
            "update", self.settings, self._offers(), MANIFEST, operation.version, trainer=self.name,
            deadline_s=operation.deadline_s, stragglers=self.settings.stragglers, lost=self.fleet.lose,
        )  # fmt: skip
        operation.transaction = one
        try:
            try:
                ways = yield from self._run_steps(operation, one)
            except WeightwireError as error:
                if not one.machine.has_committed:
                    yield from one.aborted(error.message)
                if not one.machine.has_committed:
                    self._close(one)
                    raise
                ways = ()
        except WeightwireError:
            self.fleet.settle(operation.version, one.errors)
            raise
        one.do(LeaveBehind())
        yield from one.waiting()
        self._close(one)
        self.fleet.settle(operation.version, one.errors)
        if None in one.errors.values() and ways and ways[0].segment and self.settings.catch_up != "never":
            described = ways[0].segment
            self.digests[operation.version] = operation.digest
            self.fleet.retain(
                RetainedVersion(operation.version, MANIFEST, (), "shm", b"", described, segment_id(described), None)  # type: ignore[arg-type]
            )
        if all(error is not None for error in one.errors.values()):
            raise next(iter(one.errors.values()), None) or CommitFailed("no replica took the version")

    def _offers(self) -> list[tuple[Any, Any]]:
        return [(each, SENDER) for each in self.settings.offered()]

    def _run_steps(self, operation: Operation, one: SimulatedTransaction) -> Steps:
        self._ranks(Gather())
        yield from self._heard()
        policy, world = self.settings.stragglers, self.world
        needed = policy.count if isinstance(policy, Quorum) else math.inf if policy == "all" else 1
        names = {card.replica for card in self.fleet.cards()}
        until_s = world.now_s + (operation.deadline_s - world.now_s) / 2
        while len(self.fleet.machine.free(names, needed)) < min(needed, len(names)) and world.now_s < until_s:
            yield until_s
        part = self.fleet.take_part(needed, 0)
        ways = yield from one.agree_on(part.sessions, lambda: self._allocate(operation), part.unreached)
        self._ranks(SendGo(Go(one.txn, ways, max(0.0, operation.deadline_s - world.now_s))))
        writes_until_s = world.now_s + world.soon()
        while world.now_s < writes_until_s:
            yield writes_until_s
        lost = yield from self._write(0, ways, one.txn, operation)
        yield from self._heard()
        for replica, error in lost.items():
            yield from one.run(Dropped(replica, error))
        for said in self.ranks.heard:
            if isinstance(said, Wrote):
                for replica, info in said.lost.items():
                    yield from one.run(Dropped(replica, WeightwireError.of(info)))
        yield from one.run(SealAll((), operation.digest))
        yield from one.run(CommitAll())
        if world.armed_faults and world.armed("fail report", self.name) is not None:
            raise CommitFailed("a listener failed after the commit")
        return ways

    def _close(self, one: SimulatedTransaction) -> None:
        one.leases.close()
        one.inquiry.close()

    def _allocate(self, operation: Operation) -> bytes:
        """A segment that no replica holds and no silent rank may still write into."""
        busy = self.fleet.segments_in_use()
        free = [each for each in self.segments if each.name not in busy and not each.writers]
        segment = free[0] if free else self._new_segment()
        segment.writers = set(range(len(self.processes)))
        self.fleet.segment_taken("shm", segment.name, busy, MANIFEST.fingerprint)
        return msgspec.msgpack.encode({"segment_id": segment.name})

    def _new_segment(self) -> Segment:
        segment = Segment(self.world.unique(f"{self.name}.segment"), len(self.processes))
        self.segments.append(segment)
        self.job.segments[segment.name] = segment
        return segment

    def _write(self, rank: int, ways: tuple[GoTransport, ...], txn: str, operation: Operation) -> Steps:
        """The replicas that could not be written to, with the reason."""
        lost: dict[str, WeightwireError] = {}
        for way in ways:
            if way.name == "stream":
                lost |= yield from self._stream(rank, way, txn, operation)
                continue
            segment = self.job.segments[segment_id(way.segment)]
            segment.parts[rank] = operation.digest
            segment.writers.discard(rank)
        return lost

    def _stream(self, rank: int, way: GoTransport, txn: str, operation: Operation) -> Steps:
        """One bucket to each worker, as `Lane` sends it."""
        left_s = operation.deadline_s - self.world.now_s
        until_s = self.world.now_s + min(CONFIG.control_timeout_s, ANSWER_SHARE * max(0.0, left_s))
        lies_at = f"{operation.digest}|{len(self.processes)}".encode()
        channels: dict[Any, str] = {}
        for target in way.targets:
            channel = SimulatedChannel(target.address, side="trainer", replica=target.replica, rank=target.rank)
            channel.send(Bucket("policy", txn, rank, 0, (), lies_at))
            channels[channel] = target.replica
        while any(channel.news is None for channel in channels) and self.world.now_s < until_s:
            yield until_s
        lost: dict[str, WeightwireError] = {}
        for channel, replica in channels.items():
            if channel.news is None:
                lost[replica] = SyncTimeout("a bucket was not answered in time", phase="stage")
            elif isinstance(channel.news, WeightwireError):
                lost[replica] = channel.news
            channel.close()
        return lost

    # --- the trainer's ranks ---------------------------------------------------------------------------------------------

    def _said(self, asker: Asker, body: Body) -> None:
        assert isinstance(body, Ready | Wrote)
        self._ranks(Said(body, asker))
        if self.main is not None:
            self.main.news()

    def _ranks(self, event: RanksEvent) -> None:
        for reply in self.ranks.on(event, self.world.now_s):
            asker: Any = reply.asker
            asker.reply(reply.body)

    def _heard(self) -> Steps:
        """As `TrainerRanks._gather`."""
        ranks = self.ranks
        while ranks.error is None and not ranks.all_heard:
            yield ranks.wakes_at_s or math.inf
            self._ranks(RanksTick())
        if ranks.error is not None:
            raise ranks.error

    def rank_ended(self, process: Process) -> None:
        """`ProcessWatch` of rank 0."""
        if self.processes[0].alive and process in self.processes[1:]:
            self._ranks(Gone(self.processes.index(process)))
            if self.main is not None:
                self.main.news()

    def _follow(self, operation: Operation, rank: int) -> Steps:
        """As `follower.follow`."""
        world = self.world
        name = f"update:{operation.version}"
        scanned_s = world.now_s + world.soon()
        while world.now_s < scanned_s:
            yield scanned_s
        if self._to_manager[rank] is None:
            self._to_manager[rank] = SimulatedChannel(self.name, resends=False)
        channel = self._to_manager[rank]
        ready = Ready(self._count, name, rank, MANIFEST.fingerprint)
        awaited = True
        try:
            go: Go = yield from self._ask(channel, ready, operation)
            wrote_s = world.now_s + world.soon()
            while world.now_s < wrote_s:
                yield wrote_s
            wrote = Wrote(go.txn, rank)
            if world.armed_faults and world.armed("fail write", self.name) is not None:
                wrote = Wrote(go.txn, rank, error=WeightwireError("a slice could not be written").info())
            lost = yield from self._write(rank, go.transports, go.txn, operation)
            if lost and wrote.error is None:
                wrote = msgspec.structs.replace(wrote, lost={name: error.info() for name, error in lost.items()})
            yield from self._ask(channel, wrote, operation)
            awaited = False
        except WeightwireError as error:
            awaited = channel.is_open or world.now_s > operation.deadline_s
            world.note(f"{self.name}.{rank} ends its update: {error}")
        if awaited:
            channel.send(msgspec.structs.replace(ready, given_up=True))
        operation.waits[rank] = False

    def _ask(self, channel: Any, body: Body, operation: Operation) -> Steps:
        world = self.world
        if world.now_s > operation.deadline_s:
            raise SyncTimeout("this rank came too late to report")
        channel.send(body)
        until_s = operation.deadline_s + ANSWER_S
        while channel.news is None:
            if world.now_s >= until_s:
                raise SyncTimeout("no reply from rank 0")
            yield until_s
        news, channel.news = channel.news, None
        if isinstance(news, WeightwireError):
            raise news
        return news

    # --- catching up, and the end ------------------------------------------------------------------------------------------

    def poke(self) -> None:
        for task in (self.catching, self.main):
            if task is not None and not task.over:
                self.world.at(0.0, self.processes[0], task.news)

    def _catching_up(self) -> Steps:
        while not self.fleet.machine.closed:
            self.fleet.look()
            self.fleet.to_tell()
            for due in self.fleet.due():
                self.catch_ups += 1
                Task(self.processes[0], self._catch_up(due))
            yield self.fleet.machine.wakes_at_s or math.inf

    def _catch_up(self, due: CatchUp) -> Steps:
        connected: ReplicaSession | None = None
        try:
            connected = ReplicaSession.connect(due.card, self.settings.config)
            yield from self._bring_up(connected, due.retained)
        except WeightwireError as error:
            self.fleet.not_caught_up(due.card.replica, error, connected)
        else:
            self.fleet.caught_up(connected)
        self.catch_ups -= 1

    def _bring_up(self, connected: ReplicaSession, retained: RetainedVersion) -> Steps:
        digest, replica = self.digests[retained.version], connected.card.replica
        one = SimulatedTransaction(
            "catch_up", self.settings, self._offers(), MANIFEST, retained.version, trainer=self.name,
            deadline_s=self.world.now_s + self.settings.timeout_s, digest=digest,
        )  # fmt: skip
        try:
            yield from one.agree_on([connected], lambda: retained.segment, [])
            yield from one.run(SealAll((), digest))
            yield from one.run(CommitAll())
        except WeightwireError as error:
            if not one.machine.has_committed:
                yield from one.aborted(error.message)
            if not one.machine.has_committed:
                self._close(one)
                raise
        one.do(LeaveBehind())
        yield from one.waiting()
        self._close(one)
        if (failed := one.errors[replica]) is not None:
            raise failed

    def close(self) -> None:
        """As `Fleet.close` and `Fleet.release`."""
        self.main = Task(self.processes[0], self._closing())

    def _closing(self) -> Steps:
        self.fleet.close()
        self.fleet.adopt()
        sessions = list(self.fleet.sessions.values())
        channels: list[Any] = [channel for each in sessions for channel in each.workers]
        for channel in channels:
            channel.send(Release(self.settings.group))
        until_s = self.world.now_s + 2.0
        while any(channel.is_open for channel in channels) and self.world.now_s < until_s:
            yield until_s
        for each in sessions:
            each.close()
        self.fleet.sessions.clear()
        self.closed = True
