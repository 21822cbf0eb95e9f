"""One worker process of a replica: the real machine and engine side, with simulated memory, work and installer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.wire.errors import CommitFailed, DigestMismatch, ProtocolError, VersionConflict, WeightwireError
from inference_plugin.wire.messages import Body, Describe, GroupOpened, GroupStatus, Sealed, WorkerCard
from inference_plugin.worker import actions as do
from inference_plugin.worker.engine_side import EngineSide, Left
from inference_plugin.worker.events import CloseAll, Event, Request, Tear, TearAll, Tick, WorkEnded
from inference_plugin.worker.machine import WorkerGroups
from tests.simulation.network import Asker, Network
from tests.simulation.world import HOST, STARTED, Fault, FaultKind, Process, World

if TYPE_CHECKING:
    from tests.simulation.replica import Replica

__all__ = ["COLD", "Live", "Segment", "SimulatedWorker"]


@dataclass(frozen=True)
class Live:
    """What the live parameters of a rank hold: the weights' digest, and the transaction that brought them."""

    digest: str
    txn: str


COLD = Live("the checkpoint", "")
"""What an engine starts with."""


class Segment:
    """Memory of a trainer into which each of its ranks writes its part. `parts`: by rank, the digest of what lies there."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.parts = ["empty"] * ranks  # of what is streamed: what has come, by rank
        self.fingerprint = ""
        self.writers: set[int] = set()
        """Ranks that may still write."""

    @property
    def content(self) -> str:
        return self.parts[0] if len(set(self.parts)) == 1 else "mixed"


@dataclass(eq=False)
class Staging:
    """What a worker has mapped of a transaction, and `Update` of it. `offered`: buckets that the engine's thread has not placed,
    each with its group and the number of its work."""

    txn: str
    worker: SimulatedWorker
    segment: Segment
    streams: bool = False
    digest: str = ""
    checked: str = ""
    cancelled: bool = False
    stage: int = 0
    offered: list[tuple[int, int, do.ReceiveBucket]] = field(default_factory=list)
    is_told: bool = False
    is_installed: bool = False
    trace: None = None
    wanted: tuple[()] = ()

    @property
    def staging(self) -> _Bytes:
        return _Bytes(self.txn, self)

    def place(self, put: Any, _limit_s: float) -> None:
        """As `StreamStaging.place`; whoever calls it comes again when there is news."""
        if self.cancelled:
            raise VersionConflict("the transaction was dropped")
        while self.offered:
            member, number, work = self.offered.pop(0)
            failed: WeightwireError | None = None
            digest, ranks = work.bucket.lies_at.decode().split("|")
            try:
                put(self.txn, digest)
                self.segment.parts = self.segment.parts or ["empty"] * int(ranks)
                self.segment.parts[work.bucket.rank] = digest
            except WeightwireError as error:
                failed = error
                raise
            finally:
                self.worker.end_soon(member, number, work, failed)

    def check(self, *_: Any) -> int:
        """Raises `DigestMismatch` where the bytes are not those of the version."""
        if self.segment.content != self.digest:
            raise DigestMismatch(f"the bytes are {self.segment.content}, not {self.digest}")
        return 1


class SimulatedWork:
    """Stands for `GroupWork`, `Update` and the installer of one group of one worker."""

    def __init__(self, worker: SimulatedWorker, install: str) -> None:
        self.worker = worker
        self.updates: dict[str, Staging] = {}
        self.installer = SimulatedInstaller(worker, install)
        self.manifest: Any = None
        self._candidate: Any = None

    def update(self, txn: str) -> Any:
        if txn not in self.updates:
            raise ProtocolError(f"no transaction {txn} is open")
        return self.updates[txn]

    def trace(self, txn: str) -> None:
        return None

    def do(self, work: do.Work) -> Any:
        """What `GroupWork` does for this work."""
        match work:
            case do.CheckPieces() | do.SettleStaging():
                pass
            case do.AgreeOnTerms(request):
                self._candidate = request.manifest
                policy: Any = self.installer.policy
                opened = GroupOpened((request.manifest.whole(0),), "plan", policy)
                return do.Terms(opened, frozenset({"w"}), whole=not request.partial)
            case do.PutInForce(previous):
                self.manifest, self._candidate = self._candidate, None
                self.updates.pop(previous, None)
            case do.MapStaging(txn, _, _) if self.installer.policy == "streaming":
                self.updates[txn] = Staging(txn, self.worker, Segment(f"stream of {txn}", 0), True)
                return do.Mapped(f"stream of {txn}", False, b"", True)
            case do.MapStaging(txn, _, segment):
                name = self.worker.replica.segment_named(segment)
                self.updates[txn] = Staging(txn, self.worker, name)
                return do.Mapped(name.name, False)
            case do.Stage(txn, digest):
                staging = self.update(txn)
                if staging.cancelled:
                    raise VersionConflict("the transaction was dropped")
                staging.digest = digest
                staging.check()
                self.installer.prepare(Live(digest, txn))
                return Sealed(done=True, digest=digest, checked_bytes=1)
            case do.CleanUp(txn):
                self.updates.pop(txn, None)
                self.installer.discard()
            case do.DropStaging(txn, _):
                self.updates.pop(txn, None)
            case do.FreeMemory(previous) | do.CloseWork(previous):
                self.updates.pop(previous, None)
                self.installer.forget()
        return None


@dataclass(slots=True)
class _Bytes:
    txn: str
    staging: Staging

    @property
    def segment(self) -> _Bytes:
        return self

    @property
    def streams(self) -> bool:
        return self.staging.streams

    def place(self, put: Any, limit_s: float) -> None:
        self.staging.place(put, limit_s)

    def check(self, *_: Any) -> int:
        return self.staging.check()


class SimulatedInstaller:
    """Writes the live parameters: over them (`copy`), by a swap with a second set (`standby`), or part by part (`streaming`)."""

    def __init__(self, worker: SimulatedWorker, policy: str) -> None:
        self._worker = worker
        self.policy = policy
        self._standby = policy == "standby"
        self._prepared: Live | None = None
        self._touched = False
        """Whether an installation has begun to write, and is not finished or undone."""
        self._before: Live | None = None
        """`standby`: what the second set holds after the swap."""

    @property
    def scales_cache(self) -> bool:
        return False

    @property
    def needs_previous(self) -> bool:
        return self.policy == "copy"

    def prepare(self, live: Live) -> None:
        self._prepared = live

    def discard(self) -> None:
        self._prepared = None

    def forget(self) -> None:
        self._before = None

    def check_terms(self) -> None:
        """A simulated engine moves nothing."""

    def check_model(self) -> None:
        """And derives nothing."""

    def read_back(self) -> Any:
        return iter(())

    def place(self, txn: str, digest: str) -> None:
        self._touched = True
        self._worker.live = Live("half of " + digest, txn)
        if self._worker.fault("fail install") is not None:
            raise CommitFailed("a piece could not be placed")

    def share(self) -> bytes:
        return f"rank {self._worker.rank} of {self._prepared.txn}".encode() if self._prepared is not None else b""

    def install(self, new: _Bytes, shares: Sequence[bytes] = ()) -> None:
        worker = self._worker
        all_ranks = {f"rank {rank} of {new.txn}".encode() for rank in range(len(worker.replica.workers))}
        if set(shares) != all_ranks and not new.streams:
            raise CommitFailed(f"the ranks' shares are {shares}")
        if self._prepared is None or self._prepared.txn != new.txn:
            raise CommitFailed("nothing is prepared")
        self._before = worker.live if self._standby else None
        self._touched = True
        installed = Live(new.staging.segment.content, new.txn)
        if worker.fault("fail install") is not None:
            worker.live = Live("half of " + installed.digest, new.txn)
            raise CommitFailed("the installation failed half way")
        worker.live = self._prepared if self._standby else installed

    def finish(self) -> None:
        if self._worker.fault("fail finish") is not None:
            raise CommitFailed("finishing failed")
        self._prepared, self._touched = None, False

    def undo(self, old: _Bytes | None) -> None:
        worker = self._worker
        if worker.fault("fail undo") is not None:
            worker.live = Live("nobody knows", "")
            raise CommitFailed("the roll-back failed")
        if not self._touched:
            return
        self._touched = False
        if self.policy == "streaming":
            raise CommitFailed("the streamed bytes have overwritten the previous version")
        if self._standby:
            worker.live, self._before = self._before or worker.live, None
        elif old is None:
            raise CommitFailed("the previous version's bytes are gone")
        else:
            worker.live = Live(old.staging.segment.content, old.txn)


class SimulatedWorker:
    """One rank. `live`: what it computes with."""

    def __init__(self, replica: Replica, network: Network, process: Process, rank: int, address: str) -> None:
        self.replica = replica
        self.process = process
        self.rank = rank
        self.address = address
        self.live = COLD
        self.machine = WorkerGroups(rank, HOST)
        self.works: dict[int, SimulatedWork] = {}
        self._world: World = process.world
        self._readings: dict[int, Any] = {}
        self._tick_at_s = math.inf
        self._awaiting: Callable[[], None] | None = None
        network.serve(address, process, self._handle)

    def card(self) -> WorkerCard:
        return WorkerCard(
            self.replica.name, self.rank, self.rank, 0, self.process.pid, HOST, self.address, "cpu", 0,
            start_ticks=STARTED,
        )  # fmt: skip

    def statuses(self) -> tuple[GroupStatus, ...]:
        return self.machine.statuses()

    def fault(self, kind: FaultKind, longest_s: float = 0.0) -> Fault | None:
        return self.replica.fault(kind, longest_s) if self._world.armed_faults else None

    def holds(self) -> list[str]:
        """What a worker holds that has nothing to do."""
        found = [f"work of {group.name}" for group in self.machine.closing]
        for group in self.machine.groups.values():
            if group.busy:
                found.append(f"a transaction of {group.name}, {group.state}")
        kept = {txn for work in self.works.values() for txn in work.updates}
        kept -= {
            group.installed.txn for group in self.machine.groups.values() if group.installed and group.installed.keeps
        }
        return found + [f"staging of {txn}" for txn in sorted(kept)]

    # --- events ------------------------------------------------------------------------------------------------------

    def _handle(self, asker: Asker, body: Body) -> None:
        if self._world.lines is not None:
            self._world.note(f"{self.process.name} takes {_short(body)}")
        if isinstance(body, Describe):
            asker.reply(self.card())
        else:
            self.post(Request(asker, body))

    def process_ended(self, pid: int) -> None:
        """As the reply server's watch of processes tells."""
        if (pid, STARTED) in self.machine.processes():
            self.post(Tick({(pid, STARTED)}))

    def close(self) -> None:
        self.post(CloseAll())

    def post(self, event: Event) -> None:
        for action in self.machine.on(event, self._world.now_s):
            if isinstance(action, do.Reply):
                action.asker.reply(action.body)
            elif isinstance(action, do.StartWork):
                self._start(action)
            else:
                self._perform(action)
        self._set_tick(self.machine.wakes_at_s)

    def _set_tick(self, due_s: float) -> None:
        if due_s < self._tick_at_s:
            self._tick_at_s = due_s
            self._world.at_time(due_s, self.process, self._tick, due_s)

    def _tick(self, at_s: float) -> None:
        if at_s != self._tick_at_s:
            return
        self._tick_at_s = math.inf
        if (due_s := self.machine.wakes_at_s) <= self._world.now_s:
            # After a long stop the messages that wait are read first (`ReplyServer`): they have an earlier place in the queue.
            self.post(Tick())
        else:
            self._set_tick(due_s)

    def _perform(self, action: do.Action) -> None:
        match action:
            case do.StateChanged():
                pass
            case do.Fail(asker, error):
                asker.fail(error.at(side="worker", replica=self.replica.name, rank=self.rank))
            case do.Cancel(member, txn):
                if (work := self.works.get(member)) is not None and (staging := work.updates.get(txn)) is not None:
                    staging.cancelled = True
                    for pending in staging.offered:
                        self.end_soon(*pending, VersionConflict("the transaction was dropped"))
                    staging.offered.clear()
                    self._news()
                    if staging.stage:
                        self._world.at(
                            self._world.soon(), self.process, self._end, member, staging.stage, staging, None
                        )

    def _start(self, action: do.StartWork) -> None:
        world = self._world
        if (work := self.works.get(action.member)) is None:
            work = self.works[action.member] = SimulatedWork(self, self.replica.install)
        delay_s = world.soon()
        error: WeightwireError | None = None
        if world.armed_faults:
            if self.fault("fail work") is not None:
                error = WeightwireError(f"{type(action.work).__name__} failed: no space left on device")
            elif (slow := self.fault("slow work", 100)) is not None:
                delay_s = 100 * slow.size**2
        if isinstance(action.work, do.ReceiveBucket) and error is None:
            world.at(delay_s, self.process, self._offer, action.member, action.number, action.work)
            return
        if isinstance(action.work, do.Stage) and (staging := work.updates.get(action.work.txn)) is not None:
            staging.stage = action.number
        world.at(delay_s, self.process, self._end, action.member, action.number, action.work, error)

    def _offer(self, member: int, number: int, work: do.ReceiveBucket) -> None:
        """As `StreamStaging.receive`: the work ends once the engine's thread has placed the bucket."""
        staging = self.works[member].updates.get(work.txn)
        if staging is None or staging.cancelled:
            self._end(member, number, work, VersionConflict("the transaction was dropped"))
            return
        staging.offered.append((member, number, work))
        self._news()

    def end_soon(self, member: int, number: int, work: do.Work, error: WeightwireError | None) -> None:
        self._world.at(0.0001, self.process, self._end, member, number, work, error)

    def await_news(self, act: Callable[[], None], until_s: float) -> None:
        """Has the engine's thread go on where there is something to place, or nothing more to come; or at that time."""
        self._awaiting = act
        self._world.at_time(until_s, self.process, lambda: self._news() if self._awaiting is act else None)

    def _news(self) -> None:
        act, self._awaiting = self._awaiting, None
        if act is not None:
            self._world.at(0.0, self.process, act)

    def _end(self, member: int, number: int, what: do.Work | Staging, error: WeightwireError | None) -> None:
        if number not in self.machine.shared.under_way:
            return  # a stage that was cancelled has ended before
        result: Any = None
        try:
            if isinstance(what, Staging):
                raise VersionConflict("the transaction was dropped")
            if error is not None and not isinstance(
                what, do.PutInForce | do.CleanUp | do.DropStaging | do.SettleStaging
            ):
                raise error
            result = self.works[member].do(what)
        except WeightwireError as failed:
            self.post(WorkEnded(number, error=failed))
        else:
            self.post(WorkEnded(number, result))
        if isinstance(what, do.Stage):
            self._news()

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def operate(self, operation: RankOperation) -> RankReply:
        """What `RankRuntime.call` does."""
        name, commit, share = operation.name, None, b""
        left: Left = ""
        self.replica.changed()
        try:
            if name == "tear":
                self.post(Tear(operation.group, operation.txn, operation.reason))
            elif name == "tear_all":
                self.post(TearAll(operation.reason))
            else:
                # To release is to set one field: nothing in it can fail.
                if name != "release" and self.fault("fail check") is not None:
                    raise CommitFailed("a check failed")
                group = self._engine_side(operation.group)
                if name == "check":
                    commit = group.check_sealed(operation.txn, operation.version)
                    share = group.share() if commit is None else b""
                elif name == "release":
                    group.release()
                elif name == "install":
                    left = group.install(operation.txn, operation.shares)
                elif name == "undo":
                    group.undo(operation.reason)
                else:
                    commit = group.finish(operation.txn, operation.install_s)
                    self.replica.finished(self, operation.txn)
        except Exception as error:  # noqa: BLE001 -- it is the answer
            where = {"side": "worker", "replica": self.replica.name, "rank": self.rank}
            return RankReply(operation.nonce, self.rank, error=WeightwireError.wrap(error).at(**where).info())
        return RankReply(operation.nonce, self.rank, commit=commit, share=share, left=left)

    def _engine_side(self, name: str) -> EngineSide:
        group = self.machine.named(name)
        work: Any = self.works[group.member]
        return EngineSide(group, work, self.rank, self._ask, self._readings)

    def _ask(self, event: Any, *fields: Any) -> Any:
        answer = _Local()
        self.post(event(answer, *fields))
        if answer.error is not None:
            raise answer.error
        return answer.body


class _Local:
    body: Any = None
    error: WeightwireError | None = None

    def reply(self, body: Any) -> None:
        self.body = body

    def fail(self, error: WeightwireError) -> None:
        self.error = error


def _short(body: Body) -> str:
    text = f"{type(body).__name__} {getattr(body, 'txn', '')}"
    return f"{text} of v{body.version}" if hasattr(body, "version") else text
