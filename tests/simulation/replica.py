"""One replica: the real machine of its coordinator around a simulated engine, and its workers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec

from inference_plugin.engines.actions import (
    AnnounceCommit,
    Ask,
    EngineAction,
    Finish,
    Hold,
    NoteSpan,
    Publish,
    Refuse,
    ResumeSteps,
    StopSteps,
    TellListeners,
)
from inference_plugin.engines.events import (
    AllRead,
    Asked,
    Command,
    Event,
    ManagerEnded,
    Perform,
    Performed,
    PublishCard,
    Reply,
    Submit,
    Turn,
)
from inference_plugin.engines.machine import ReplicaMachine
from inference_plugin.engines.operations import RankReply
from inference_plugin.wire.errors import PeerLost, TornReplica
from inference_plugin.wire.messages import Body, Describe, ReplicaCard
from tests.simulation.network import Asker, Network
from tests.simulation.worker import Live, Segment, SimulatedWorker
from tests.simulation.world import HOST, STARTED, Fault, FaultKind, Process, Violation, World

__all__ = ["Replica"]

RANK_TIMEOUT_S = 300.0

PLACING_S = 5.0
"""Longest turn of a replica into which nothing is streamed. Not `engine_side.PLACING_S`: that would be too many events."""


class Replica:
    """One engine instance. `stopped`: no step may run; `refusal`: why it refuses every request."""

    def __init__(self, network: Network, name: str, ranks: int, install: str, segments: dict[str, Segment]) -> None:
        self.world: World = network.world
        self.name = name
        self.install = install
        self.coordinator = Process(self.world, f"{name}.coordinator", name)
        self.processes = [self.coordinator]
        self.workers: list[SimulatedWorker] = []
        for rank in range(ranks):
            process = Process(self.world, f"{name}.{rank}", name)
            self.processes.append(process)
            self.workers.append(SimulatedWorker(self, network, process, rank, f"{name}/{rank}"))
        self.machine = ReplicaMachine({"side": "coordinator", "replica": name}, HOST)
        self.is_whole = True
        """Whether all of its processes live."""
        self.stopped = False
        self.refusal: str | None = None
        self.lost: str | None = None
        """Why the executor is not asked any more."""
        self.installed: dict[str, set[int]] = {}
        """By transaction: the ranks that have finished it."""
        self.forbidden: dict[str, str] = {}
        """Transactions that a report calls failed, and that must therefore never be installed."""
        self._segments = segments
        self._busy = False
        self._turns: list[Command] = []
        self._wakes_at_s = math.inf
        self._told_of: Any = None
        network.serve(name, self.coordinator, self._handle)
        state = self.machine.standing.described()
        workers = tuple(worker.card() for worker in self.workers)
        self.card = ReplicaCard(
            name, "simulated", "1", "model", "default", self.coordinator.pid, HOST, name, workers, state=state[0],
            start_ticks=STARTED,
        )  # fmt: skip

    @property
    def steps(self) -> bool:
        """Whether a decoding step may run now."""
        return not self.stopped and self.refusal is None and self.is_whole

    def fault(self, kind: FaultKind, longest_s: float = 0.0) -> Fault | None:
        """The fault of that kind that is due here, if there is one."""
        return self.world.armed(kind, self.name, longest_s) if self.world.armed_faults else None

    def segment_named(self, description: bytes) -> Segment:
        return self._segments[msgspec.msgpack.decode(description)["segment_id"]]

    # --- promises ------------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """What it computes with may have changed in this event, or it may step again: `check` follows the event."""
        self.world.unchecked.append(self.check)

    def check(self) -> None:
        """P1: a step that ran now would be computed with one committed version on all ranks."""
        if not self.steps:
            return
        first = self.workers[0].live
        for worker in self.workers:
            if worker.live is not first and worker.live != first:
                held = ", ".join(f"rank {each.rank} holds {each.live}" for each in self.workers)
                raise Violation(f"P1: {self.name} may step, and {held}")
            if first.txn and worker.rank not in self.installed.get(first.txn, ()):
                raise Violation(f"P1: {self.name} may step with {first}, which rank {worker.rank} has not committed")
        if first.digest.startswith(("half", "nobody", "mixed", "empty")):
            raise Violation(f"P1: {self.name} may step with {first}")

    def finished(self, worker: SimulatedWorker, txn: str) -> None:
        """A rank has made the transaction its installed one."""
        self.installed.setdefault(txn, set()).add(worker.rank)
        if txn in self.forbidden:
            raise Violation(f"P8: {self.name} installs {txn}, which was reported: {self.forbidden[txn]}")

    @property
    def serves(self) -> Live | None:
        """What the replica computes with; None if it does not generate."""
        return self.workers[0].live if self.refusal is None and self.is_whole else None

    # --- the coordinator's thread --------------------------------------------------------------------------------------

    def _handle(self, asker: Asker, body: Body) -> None:
        if self.world.lines is not None:
            self.world.note(f"{self.coordinator.name} takes {type(body).__name__} {getattr(body, 'txn', '')}")
        if isinstance(body, Describe):
            asker.reply(self.card)
        else:
            self.on(Asked(asker.reply, body, asker.peer))

    def process_ended(self, pid: int) -> None:
        held = self.machine.standing.held
        if held is not None and held.sender.pid == pid and held is not self._told_of:
            self._told_of = held
            self.on(ManagerEnded(held))

    def on(self, event: Event | None) -> None:
        """As `ReplicaCoordinator._on`; but what the engine's ranks do takes simulated time."""
        while event is not None:
            actions, event = self.machine.on(event, self.world.now_s), None
            perform: Perform | None = None
            for action in actions:
                if isinstance(action, Perform):
                    perform = action
                elif isinstance(action, Reply):
                    action.asker(action.body)
                elif isinstance(action, Submit):
                    self._submit(action.command)
                elif isinstance(action, PublishCard):
                    self._publish()
            if perform is not None:
                event = self._perform(perform.command, perform.action)
        wakes_at_s = self.machine.wakes_at_s()
        if wakes_at_s < self._wakes_at_s:
            self._wakes_at_s = wakes_at_s
            self.world.at_time(wakes_at_s, self.coordinator, self._look, wakes_at_s)

    def _look(self, due_s: float) -> None:
        if due_s == self._wakes_at_s:
            self._wakes_at_s = math.inf
            self.on(AllRead())

    def _publish(self) -> None:
        standing = self.machine.standing
        could = standing.refusal is not None and standing.held is None and not standing.must_stand
        if could and self.refusal is None:
            raise Violation(f"P1: {self.name} publishes that it is torn before it refuses")
        state, detail = standing.described()
        self.card = msgspec.structs.replace(self.card, state=state, detail=detail)

    # --- the engine's thread -------------------------------------------------------------------------------------------

    def _submit(self, command: Command) -> None:
        delay_s = self.world.soon()
        if (held := self.fault("hold boundary", 200)) is not None:
            delay_s = 200 * held.size**2
        self.world.at(delay_s, self.coordinator, self._turn, command)

    def _turn(self, command: Command) -> None:
        if self._busy:
            self._turns.append(command)
        else:
            self.on_thread(Turn(command))

    def on_thread(self, event: Event) -> None:
        self._busy = False
        self.on(event)
        while self._turns and not self._busy:
            self.on(Turn(self._turns.pop(0)))

    def _perform(self, command: Command, action: EngineAction) -> Performed | None:
        """Performs an action; None where its result comes later."""
        try:
            match action:
                case NoteSpan() | TellListeners():
                    pass
                case Ask() | Finish():
                    self._busy = True
                    self._round = _Round(self, command, action)
                    self._round.begin()
                    return None
                case AnnounceCommit() if self.lost is not None:
                    raise PeerLost(self.lost, phase="check")
                case StopSteps("drain") if not self.stopped:
                    self.world.at(3 * self.world.chance.random(), self.coordinator, self._drained, command, action)
                    return None
                case StopSteps():
                    self.stopped = True
                case Hold():
                    self.stopped = True
                case ResumeSteps():
                    self.stopped = False
                case Refuse(reason):
                    if self.fault("fail refuse") is not None:
                        raise RuntimeError("the scheduler could not be told")
                    self.refusal = reason
                    self.world.note(f"{self.name} refuses: {reason}")
                case Publish():
                    self._publish()
        except Exception as error:
            if isinstance(error, Violation):
                raise
            return Performed(command, action, error=error)
        if isinstance(action, ResumeSteps | Refuse):
            self.changed()
        return Performed(command, action)

    def _drained(self, command: Command, action: EngineAction) -> None:
        if command.awaits is action:
            self.stopped = True
            self.on_thread(Performed(command, action, True))

    def worker_ended(self) -> None:
        """A process of it is gone; the executor notices, whatever it waits for."""
        self.is_whole = False
        if self.coordinator.alive and self._busy:
            self.world.at(0.1, self.coordinator, self._round.lose_worker)


class _Round:
    """One operation on every rank of a replica. The engine's thread waits for all answers."""

    __slots__ = ("_action", "_answers", "_command", "_over", "_replica", "_until_s")

    def __init__(self, replica: Replica, command: Command, action: Ask | Finish) -> None:
        self._replica = replica
        self._command = command
        self._action = action
        self._answers: dict[int, RankReply] = {}
        self._over = False
        self._until_s = replica.world.now_s + PLACING_S

    def begin(self) -> None:
        replica, world = self._replica, self._replica.world
        if replica.lost is not None:
            world.at(0.0, replica.coordinator, self._end, PeerLost(replica.lost, phase=self._action.operation.name))
            return
        for worker in replica.workers:
            world.at(0.004 * world.chance.random(), worker.process, self._run, worker)
        if not all(worker.process.alive for worker in replica.workers):
            world.at(0.1, replica.coordinator, self.lose_worker)
        world.at(RANK_TIMEOUT_S, replica.coordinator, self.lose_worker)

    def lose_worker(self) -> None:
        self._end(PeerLost("the engine lost a worker", phase=self._action.operation.name))

    def _run(self, worker: SimulatedWorker) -> None:
        world, operation = self._replica.world, self._action.operation
        reply = worker.operate(operation)
        if reply.left == "more" and world.now_s < self._until_s:
            worker.await_news(partial(self._run, worker), self._until_s)
            return
        if world.lines is not None:
            said = f": {reply.error.kind} {reply.error.message}" if reply.error else ""
            world.note(f"{worker.process.name} did {operation.name} {operation.txn}{said}")
        world.at(0.001 * world.chance.random(), self._replica.coordinator, self._answered, reply)

    def _answered(self, reply: RankReply) -> None:
        self._answers[reply.rank] = reply
        if len(self._answers) == len(self._replica.workers):
            self._end()

    def _end(self, error: PeerLost | None = None) -> None:
        if self._over:
            return
        self._over = True
        replica, replies = self._replica, [self._answers[rank] for rank in sorted(self._answers)]
        if error is not None:
            replica.lost = replica.lost or error.message
        elif isinstance(self._action, Finish) and replica.fault("fail caches") is not None:
            told = TornReplica("RuntimeError: the caches could not be dropped").info()
            replies = [msgspec.structs.replace(reply, error=told) for reply in replies]
        replica.on_thread(Performed(self._command, self._action, None if error else replies, error))
