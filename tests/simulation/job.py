"""One schedule: a job with its faults, what must hold of it, and how a failing schedule is shrunk."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from inference_plugin.wire.errors import PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Pause, RenewPause, ReplicaCard, Resume, Sender
from tests.simulation.network import Network, SimulatedChannel
from tests.simulation.replica import Replica
from tests.simulation.shell import enter
from tests.simulation.trainer import CONFIG, SHM, STREAM, Operation, Trainer
from tests.simulation.worker import Segment, SimulatedWorker
from tests.simulation.world import FAULTS, HOST, STARTED, Fault, FaultKind, Process, Task, Violation, World
from trainer_adapters.settings import BestEffort, Quorum, Settings
from trainer_adapters.update.machine_io import INSTALLING_S
from trainer_adapters.update.transaction import ABORT_TIMEOUT_S

__all__ = ["Plan", "Result", "drawn", "run", "shrunk"]

GRACE_S = INSTALLING_S + ABORT_TIMEOUT_S + 1.0
"""An update may end this much after its deadline: an installation that has begun, then telling of an abort."""

SHORT_LEASES = CONFIG.but(lease_s=6.0)

STREAMING = 0.2
"""Share of jobs that stream into the live parameters."""

LONG_S = 1000.0
"""Every lease, operation and rank's time limit is over after this."""


@dataclass(frozen=True)
class Plan:
    """A job and what happens to it."""

    seed: int
    replicas: tuple[int, ...]
    """How many ranks each has."""
    trainer_ranks: int
    updates: int
    install: str
    settings: dict[str, Any]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Result:
    """`violation`: the promise that was broken, "" if none. `lines`: what happened, if the schedule was traced."""

    plan: Plan
    violation: str
    events: int
    lines: tuple[str, ...]


def drawn(seed: int, kinds: Sequence[FaultKind] = FAULTS) -> Plan:
    """The schedule of a seed, with faults of these kinds."""
    chance = Random(seed)
    # Small jobs find more in the same time: each old defect as often, most of them twice as often.
    is_small = chance.random() < 7 / 8
    replicas = tuple(chance.choice((1, 2, 2)) for _ in range(chance.choice((1, 1, 1, 2) if is_small else (1, 2, 2, 3))))
    updates = 1 if is_small else chance.choice((1, 1, 2))
    length = updates * (12 + 18 * sum(replicas))  # about as many events as come before the faults end
    faults = tuple(
        Fault(chance.choice(kinds), int(length * chance.random()), chance.random(), chance.random())
        for _ in range(chance.choice((1, 1, 2, 2, 3) if is_small else (0, 1, 1, 2, 2, 3)))
    )
    if any(fault.kind == "fail install" for fault in faults) and chance.random() < 0.5:  # what tears a replica
        faults += tuple(replace(fault, kind="fail undo") for fault in faults if fault.kind == "fail install")
    settings = {
        "stragglers": chance.choice(("report", "report", "report", "all", Quorum(1), BestEffort(5.0))),
        "in_flight": chance.choice(("keep", "keep", "abort", "drain")),
        "catch_up": chance.choice(("never", "auto")),
        "config": chance.choice((CONFIG, CONFIG, SHORT_LEASES)),
    }
    trainer_ranks, install = chance.choice((1, 1, 2)), "standby" if chance.random() < 0.4 else "copy"
    if chance.random() < STREAMING:
        install = settings["install"] = "streaming"
        settings["stragglers"] = chance.choice(("report", "report", BestEffort(5.0)))
    return Plan(seed, replicas, trainer_ranks, updates, install, settings, faults)


def run(plan: Plan, *, traced: bool = False) -> Result:
    """Runs a schedule to its end, or to the first violation."""
    world = World(Random(plan.seed + (1 << 40)), plan.faults, traced=traced)
    job = Job(plan, world)
    violation = ""
    try:
        job.run()
    except Violation as found:
        violation = str(found)
    except Exception as error:  # noqa: BLE001 -- the product's machine has raised: a violation as well
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"raised {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        if traced:
            world.lines = [*(world.lines or ()), traceback.format_exc()]
    result = Result(plan, violation, world.events, tuple(world.lines or ()))
    job.let_go()
    return result


def shrunk(plan: Plan) -> Plan:
    """The plan with the fewest faults that still breaks a promise, found by leaving them out one after another."""
    for fault in plan.faults:
        fewer = replace(plan, faults=tuple(each for each in plan.faults if each is not fault))
        if run(fewer).violation:
            return shrunk(fewer)
    return plan


class Job:
    """Replicas, trainers, and whoever starts and ends them."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world
        self.network = Network(world)
        self.segments: dict[str, Segment] = {}
        self.replicas: list[Replica] = []
        self.trainers: list[Trainer] = []
        self.rivals: list[Operation] = []
        self.paused: set[str] = set()
        self.version = 0
        self.calm = False
        """Whether faults have ended."""
        enter(world, self.network)
        world.crash = self.crash
        world.special = self._special
        for ranks in plan.replicas:
            self._start_replica(ranks)

    def run(self) -> None:
        for _ in range(self.plan.updates):
            self._update()
        self._quiet()
        self._replenish()
        self.calm = True
        self._update()
        self._end()

    def let_go(self) -> None:
        """Breaks the cycles of a job that has ended: its objects go at once, and little is left to the collector of garbage."""
        serving = [handle.__self__ for _, handle in self.network.servers.values()]
        machines = [each.machine for each in serving if isinstance(each, SimulatedWorker)]
        for each in (*machines, *serving, *self.network.channels, self.network, self.world, self):
            vars(each).clear()

    # --- what a trainer finds: `Registry` --------------------------------------------------------------------------------

    def cards(self) -> list[ReplicaCard]:
        return [replica.card for replica in self.replicas if replica.coordinator.alive]

    def heard_s(self, _replica: str) -> float:
        return 0.0

    def wake(self) -> None:
        """Nobody waits for replicas."""

    # --- processes -------------------------------------------------------------------------------------------------------

    def _start_replica(self, ranks: int) -> None:
        name = self.world.unique("r")
        self.replicas.append(Replica(self.network, name, ranks, self.plan.install, self.segments))
        self.poke()

    def _start_trainer(self, size: int) -> Trainer:
        settings = Settings("policy", [SHM, STREAM], **self.plan.settings)
        trainer = Trainer(self.network, self.world.unique("trainer"), size, settings, self)
        self.trainers.append(trainer)
        return trainer

    def crash(self, process: Process) -> None:
        """A process ends; whoever watches it notices, and its supervisor ends the rest of it."""
        if not process.alive:
            return
        process.alive = False
        self.network.ended(process)
        for replica in self.replicas:
            if process in replica.processes:
                replica.worker_ended()
                self.world.at(2.0, None, self._end_party, replica.processes)
            for worker in replica.workers:
                self.world.at(0.001, worker.process, worker.process_ended, process.pid)
            self.world.at(0.001, replica.coordinator, replica.process_ended, process.pid)
        for trainer in self.trainers:
            if process in trainer.processes:
                self.world.at(2.0, None, self._end_party, trainer.processes)
                self.world.at(0.001, trainer.processes[0], trainer.rank_ended, process)
        self.poke()

    def _end_party(self, processes: Sequence[Process]) -> None:
        for process in processes:
            self.crash(process)

    def poke(self) -> None:
        for trainer in self.trainers:
            if trainer.processes[0].alive:
                trainer.poke()

    def _special(self, fault: Fault) -> None:
        if fault.kind == "second manager":
            self.world.note("FAULT a second manager updates")
            rival = self._start_trainer(1)
            version = max(0, self.version + int(3 * fault.size) - 1)
            self.rivals.append(rival.update(version, f"d{version}.{rival.name}"))
            self._watch(self.rivals[-1])
            return
        replica = self.replicas[int(fault.pick * len(self.replicas))]
        if replica.is_whole:
            self.world.note(f"FAULT somebody pauses {replica.name}")
            process = Process(self.world, self.world.unique("pauser"), "pauser")
            self.paused.add(replica.name)
            Task(process, self._pausing(process, replica, fault.size))

    def _pausing(self, process: Process, replica: Replica, size: float) -> Any:
        """Pauses, renews, and resumes; or goes silent, or ends."""
        channel = SimulatedChannel(replica.name)
        me = Sender(process.name, process.pid, HOST, STARTED)
        bodies = [Pause(me, 10.0), *[RenewPause(me.session)] * int(8 * size)]
        bodies += [Resume(me.session)] if size < 0.7 else []
        for body in bodies:
            channel.send(body)
            until_s = self.world.now_s + 3.0
            while self.world.now_s < until_s:
                yield until_s
        channel.close()
        if size > 0.85:
            self.crash(process)

    # --- updates ---------------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """One update of the job's own trainer, which is started anew if it is gone."""
        world = self.world
        trainer = next((each for each in self.trainers if each.is_whole and each.name not in self._rival_names()), None)
        if trainer is None:
            trainer = self._start_trainer(self.plan.trainer_ranks)
        if self.calm:
            trainer.settings.stragglers = "report"
        self.version = max([self.version, *(each.version for each in self.rivals)]) + 1
        operation = trainer.update(self.version, f"d{self.version}.{trainer.name}")
        self._watch(operation)
        world.run(lambda: operation.over or not trainer.processes[0].alive)
        if operation.over:
            world.run(lambda: not any(operation.waits.values()) or not trainer.is_whole, world.now_s + LONG_S)
        self._check_all()

    def _check_all(self) -> None:
        """After an event only what the event has changed is checked (`World.unchecked`)."""
        for replica in self.replicas:
            replica.check()

    def _rival_names(self) -> set[str]:
        return {each.trainer.name for each in self.rivals}

    def _watch(self, operation: Operation) -> None:
        """P3: no caller waits past the deadline and the grace, but for the time in which its own process stood still."""
        for rank, process in enumerate(operation.trainer.processes):
            limit_s = operation.deadline_s + GRACE_S + (1.0 if rank else 0.0) - self.world.now_s
            stands_still_s = max(0.0, process.frozen_until_s - self.world.now_s)
            self.world.at(limit_s, process, self._look, operation, rank, process, process.frozen_s - stands_still_s)

    def _look(self, operation: Operation, rank: int, process: Process, frozen_s: float) -> None:
        if not operation.waits.get(rank, True):
            return
        if process.frozen_s > frozen_s:
            self.world.at(process.frozen_s - frozen_s, process, self._look, operation, rank, process, process.frozen_s)
            return
        waited_s = self.world.now_s - operation.began_s
        raise Violation(f"P3: rank {rank} of {operation.trainer.name} waits in its update since {waited_s:.1f} s")

    def update_ended(self, operation: Operation) -> None:
        """P8, and P3: what is reported is so, and a party in trouble costs only its own replica."""
        world, one = self.world, operation.transaction
        by = operation.trainer
        world.note(f"{by.name} reports v{operation.version}: {operation.error or 'ok'}")
        if operation.error is not None and operation.error.__cause__ is not None:
            raise operation.error.__cause__
        if one is None:
            if by.name not in world.touched and not self._disturbed(by):
                raise Violation(f"P3: the update failed before it began: {operation.error}")
            return
        participants = one.machine.participants
        serving = [name for name, each in participants.items() if each.state == "committed"]
        if operation.error is not None and serving:
            raise Violation(f"P8: the update of {serving} is committed, and raises {operation.error}")
        undisturbed = by.name not in world.touched and not self._disturbed(by)
        for replica in self.replicas:
            participant = participants.get(replica.name)
            if participant is None:
                continue
            state, error = participant.state, participant.error
            world.note(f"  {replica.name}: {state} {error or ''}")
            if state == "committed":
                if len(replica.installed.get(one.txn, ())) < len(replica.workers):
                    raise Violation(f"P8: {replica.name} is reported as committed, and not all ranks have installed it")
                serves = replica.serves
                if serves is not None and undisturbed and serves.txn != one.txn:
                    raise Violation(f"P8: {replica.name} is reported as committed, and serves {serves}")
                world.recovered(replica.name)
            elif state in ("failed", "aborted") and not _unknown(error):
                if any(worker.live.txn == one.txn for worker in replica.workers) and replica.steps:
                    raise Violation(f"P8: {replica.name} is reported as {state} ({error}), and serves the version")
                replica.forbidden[one.txn] = f"{state}: {error}"
            if error is not None and "still under way here" in error.message:
                world.touch(replica.name)  # a crashed trainer's commit waits there for its step boundary
            spared = replica.name not in world.touched and replica.name not in self.paused and replica.is_whole
            is_patient = self.plan.settings["stragglers"] == "report" or self.calm
            if spared and undisturbed and is_patient and state not in ("committed", "already"):
                raise Violation(f"P3: {replica.name} had no trouble and is {state}: {error or operation.error}")
        if operation.error is None:
            world.recovered(by.name)

    def _disturbed(self, by: Trainer) -> bool:
        """Whether another manager worked at the same time, or nobody was there to update."""
        others = any(each.trainer is not by for each in self.rivals) or (self.rivals and by.name in self._rival_names())
        return bool(others) or not any(replica.is_whole for replica in self.replicas)

    # --- the end -----------------------------------------------------------------------------------------------------------

    def _quiet(self) -> None:
        """Faults end, and all that waits for a time limit comes to its end."""
        self.world.faults_end()
        self.world.run(until_s=self.world.now_s + LONG_S)
        self._check_all()
        for trainer in self.trainers:
            if trainer.is_whole and trainer.catch_ups:
                raise Violation(f"P3: {trainer.name} still catches up {trainer.catch_ups} replicas")
        for replica in self.replicas:
            for worker in replica.workers if replica.is_whole else ():
                if busy := [group.name for group in worker.machine.groups.values() if group.busy]:
                    raise Violation(f"{worker.process.name} has a transaction of {busy} that nobody will end")
            held = replica.machine.standing.held
            if replica.is_whole and replica.lost is None and (held is not None or replica.machine.commands):
                raise Violation(f"{replica.name} is held by {held}, or works on {replica.machine.commands}")

    def _replenish(self) -> None:
        """Replicas that lost a process, or whose executor did, are replaced; rivals and pausers end."""
        for replica in list(self.replicas):
            if not replica.is_whole or replica.lost is not None:
                self._end_party(replica.processes)
                self.replicas.remove(replica)
        for ranks in self.plan.replicas[len(self.replicas) :]:
            self._start_replica(ranks)
        self.version = max([self.version, *(each.version for each in self.rivals)])
        for rival in self.rivals:
            self._end_party(rival.trainer.processes)
        self.rivals.clear()
        self.paused.clear()
        self.world.run(until_s=self.world.now_s + 10)
        self.world.touched.clear()

    def _end(self) -> None:
        """The next update has succeeded everywhere, and nothing is held once the trainer is closed."""
        trainer = self.trainers[-1] if self.trainers[-1].is_whole else None
        self.world.run(until_s=self.world.now_s + 30)  # late replicas are caught up
        for replica in self.replicas:
            if replica.serves is None or not replica.serves.digest.startswith(f"d{self.version}."):
                raise Violation(
                    f"{replica.name} serves {replica.serves} after the last update, which was v{self.version}"
                )
        for each in self.trainers:
            if each.is_whole:
                trainer = each
                each.close()
        assert trainer is not None
        self.world.run(until_s=self.world.now_s + 200)
        for replica in self.replicas:
            for worker in replica.workers:
                if held := worker.holds():
                    raise Violation(f"{worker.process.name} still holds {held}")
        if not trainer.closed:
            raise Violation(f"P3: {trainer.name} does not close")
        left = [channel.address for channel in self.network.channels if channel.owner in trainer.processes[:1]]
        if left:
            raise Violation(f"{trainer.name} is closed and has open channels to {left}")


def _unknown(error: WeightwireError | None) -> bool:
    """Whether a report says that it does not know which version is served."""
    return error is not None and error.phase == "commit" and isinstance(error, SyncTimeout | PeerLost)
