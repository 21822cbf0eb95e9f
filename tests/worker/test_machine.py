"""The pure state machine of a worker's groups: events in any order, and after each of them what must hold.

The test is the shell: it keeps the work that was started, ends it when it likes, well or badly, and counts the answers.
"""

from __future__ import annotations

import collections
import math
import os
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from inference_plugin.wire.errors import ProtocolError, SyncTimeout, TornReplica, VersionConflict, WeightwireError
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    Body,
    Bucket,
    CloseGroup,
    Done,
    GroupOpened,
    OpenGroup,
    RankCommit,
    Relay,
    Release,
    Renew,
    Seal,
    Sealed,
    Sender,
)
from inference_plugin.worker.actions import (
    AgreeOnTerms,
    Cancel,
    CleanUp,
    CloseWork,
    DropStaging,
    Fail,
    FreeMemory,
    KeepTerms,
    Mapped,
    MapStaging,
    PutInForce,
    ReceiveBucket,
    Reply,
    Stage,
    StartWork,
    StateChanged,
    Terms,
)
from inference_plugin.worker.events import (
    Awake,
    CheckCommitting,
    CheckSealed,
    CloseAll,
    Event,
    Finished,
    ForgetVersions,
    Install,
    MaySleep,
    ReleaseCheck,
    Request,
    StartUndo,
    Tear,
    TearAll,
    Tick,
    Undone,
    WorkEnded,
)
from inference_plugin.worker.group import FINISHED_KEPT
from inference_plugin.worker.machine import WorkerGroups
from inference_plugin.worker.torn import MODEL

SEEDS = int(os.environ.get("WW_TEST_SEEDS", "100"))
STEPS = 300

HERE = "this host"
TERMS = {
    "ab": (Manifest((TensorSpec("a", "int8", (4,)), TensorSpec("b", "int8", (4,)))), True),
    "a": (Manifest((TensorSpec("a", "int8", (4,)),)), False),
    "b": (Manifest((TensorSpec("b", "int8", (4,)),)), False),
    "c": (Manifest((TensorSpec("c", "int8", (4,)),)), False),
}
"""Manifests by the parameters that they write, and whether that is the whole model."""
SENDERS = (Sender("one", 1, HERE, 1), Sender("two", 2, HERE, 2), Sender("elsewhere", 1, "another host", 1))
INSTALLER_WORK = (AgreeOnTerms, KeepTerms, Stage, CleanUp, FreeMemory, CloseWork)


class Asker:
    """Counts what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Any] = []


class Shell:
    """What is around the machine, reduced to what a test must decide."""

    def __init__(self) -> None:
        self.machine = WorkerGroups(0, HERE)
        self.now_s = 100.0
        self.work: dict[int, StartWork] = {}
        self.askers: list[Asker] = []
        self.mapped: set[tuple[int, str]] = set()
        """Staging that is not freed, by member and transaction."""
        self.received: collections.Counter[tuple[int, str, int, int]] = collections.Counter()
        self.cancelled: set[tuple[int, str]] = set()
        self.states: list[tuple[str, str]] = []

    def do(self, event: Event) -> None:
        for action in self.machine.on(event, self.now_s):
            if isinstance(action, Reply):
                action.asker.answers.append(action.body)
            elif isinstance(action, Fail):
                assert isinstance(action.error, WeightwireError)
                action.asker.answers.append(action.error)
            elif isinstance(action, StartWork):
                assert action.number not in self.work
                self.work[action.number] = action
            elif isinstance(action, Cancel):
                self.cancelled.add((action.member, action.txn))
            elif isinstance(action, StateChanged):
                self.states.append((action.group, action.state))

    def request(self, body: Body, payload: memoryview | None = None) -> Asker:
        asker = Asker()
        self.askers.append(asker)
        self.do(Request(asker, body, payload))
        return asker

    def engine(self, event: Any, *fields: Any) -> Any:
        """The answer to an event of the engine's thread, which must come at once; or its error is raised."""
        asker = Asker()
        self.do(event(asker, *fields))
        assert len(asker.answers) == 1, event
        if isinstance(asker.answers[0], WeightwireError):
            raise asker.answers[0]
        return asker.answers[0]

    def end(self, number: int, error: WeightwireError | None = None) -> None:
        """Ends work: with `error`, or as it ends when all is right."""
        started = self.work.pop(number)
        work, member, result = started.work, started.member, None
        if isinstance(work, AgreeOnTerms):
            names = "".join(work.request.manifest.index)
            whole = TERMS[names][1] and not work.request.partial
            opened = GroupOpened((Box(0, (0,), (4,)),), "plan", "copy", "a test")
            result = Terms(opened, frozenset(names), whole)
        elif isinstance(work, MapStaging):
            result = Mapped(f"segment of {work.txn}", work.segment == b"late", streams=work.segment == b"streams")
        elif isinstance(work, Stage):
            result = Sealed(done=True, digest=work.digest)
        if error is None:
            if isinstance(work, MapStaging):
                self.mapped.add((member, work.txn))
            elif isinstance(work, ReceiveBucket):
                self.received[member, work.txn, work.bucket.rank, work.bucket.seq] += 1
        if isinstance(work, (CleanUp, DropStaging)):
            self.mapped.discard((member, work.txn))
        elif isinstance(work, (PutInForce, FreeMemory, CloseWork)):
            self.mapped.discard((member, work.previous))
        self.do(WorkEnded(number, None if error else result, error))

    def end_all(self) -> None:
        while self.work:
            self.end(next(iter(self.work)))

    # --- an update in single steps, for tests of one thing ------------------------------------------------------------

    def opened(self, group: str = "policy", terms: str = "ab", transport: str = "shm") -> Asker:
        asker = self.request(OpenGroup(group, TERMS[terms][0], transport))
        self.end_all()
        return asker

    def begin(self, txn: str, version: int, group: str = "policy", **other: Any) -> Asker:
        current = self.machine.groups[group].opened
        assert current is not None
        begin = Begin(group, txn, version, SENDERS[0], 60.0, current.manifest.fingerprint, **other)
        return self.request(begin)

    def sealed(self, txn: str, version: int, group: str = "policy") -> None:
        self.begin(txn, version, group)
        self.end_all()
        self.request(Seal(group, txn, f"d{version}", ()))
        self.end_all()

    def committed(self, txn: str, version: int, group: str = "policy", *, keeps: bool = True) -> RankCommit:
        self.sealed(txn, version, group)
        assert self.engine(CheckSealed, group, txn, version) is None
        self.engine(Install, group, txn)
        self.engine(CheckCommitting, group, txn)
        done: RankCommit = self.engine(Finished, group, txn, 0.0, keeps)
        self.end_all()
        return done


GROUPS = ("policy", "critic")


class Walk:
    """Trainers, the engine, time and failing work, in any order that `random` gives; most requests are sensible ones."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.shell = Shell()
        self.machine = self.shell.machine
        self.proven: set[tuple[int, str]] = set()
        """Transactions of which all pieces were checked."""
        self.installing: dict[str, str] = {}
        self.torn: dict[str, frozenset[str] | None] = {}
        self.closed: dict[str, frozenset[str]] = {}
        """What groups that were closed have written, and no group has since."""
        self.served: dict[int, str] = {}
        self.refusing: set[int] = set()
        """Members that tore, and had no commit since."""
        self.counted: collections.Counter[str] = collections.Counter()
        self._steps: dict[Callable[[], None], int] = {
            self.open: 4,
            self.begin: 8,
            self.bucket: 5,
            self.seal: 20,
            self.renew: 3,
            self.relay: 2,
            self.abort: 2,
            self.release: 1,
            self.close: 1,
            self.end_work: 60,
            self.tick: 5,
            self.check: 30,
            self.finish: 8,
            self.undo: 2,
            self.tear: 1,
            self.tear_all: 1,
            self.sleep: 1,
            self.forget: 2,
        }

    def step(self) -> None:
        step = self.random.choices(list(self._steps), list(self._steps.values()))[0]
        step()
        self.check_promises()

    def _group(self) -> str:
        return self.random.choice(GROUPS)

    def _txn(self, group: str) -> str:
        """Mostly the one that is on its way."""
        held = self.machine.groups.get(group)
        if held is not None and held.transaction is not None and self.random.random() < 0.9:
            return held.transaction.txn
        return f"t{self.random.randrange(40)}"

    # --- trainers ---

    def open(self) -> None:
        group = self._group()
        likely = "ab" if group == "policy" else "c"
        terms = likely if self.random.random() < 0.8 else self.random.choice(sorted(TERMS))
        transport = "shm" if self.random.random() < 0.8 else "zmq"
        self.shell.request(OpenGroup(group, TERMS[terms][0], transport, partial=self.random.random() < 0.1))

    def begin(self) -> None:
        group = self._group()
        held = self.machine.groups.get(group)
        manifest = held.opened.manifest if held is not None and held.opened is not None else TERMS["ab"][0]
        version = held.installed.version if held is not None and held.installed is not None else 0
        segment = self.random.choice([b"", b"late"])
        lease_s = self.random.choice([1.0, 60.0])
        sender = self.random.choice(SENDERS)
        digest = self.random.choice("de")
        version = max(0, version + self.random.randrange(-1, 3))
        request = Begin(group, self._txn(group), version, sender, lease_s, manifest.fingerprint, segment, digest)
        self.shell.request(request)

    def bucket(self) -> None:
        group = self._group()
        rank, seq = self.random.randrange(2), self.random.randrange(3)
        self.shell.request(Bucket(group, self._txn(group), rank, seq, ()), memoryview(b""))

    def seal(self) -> None:
        group = self._group()
        pieces = () if self.random.random() < 0.8 else None
        digest = "d" if self.random.random() < 0.8 else "e"
        self.shell.request(Seal(group, self._txn(group), digest, pieces, self.random.choice([0.0, 0.5])))

    def renew(self) -> None:
        group = self._group()
        self.shell.request(Renew(group, self._txn(group)))

    def relay(self) -> None:
        group = self._group()
        self.shell.request(Relay(group, self._txn(group), (), 1))

    def abort(self) -> None:
        group = self._group()
        self.shell.request(Abort(group, self._txn(group)))

    def release(self) -> None:
        self.shell.request(Release(self._group()))

    def close(self) -> None:
        name = self._group()
        held = self.machine.groups.get(name)
        self.shell.request(CloseGroup(name))
        if held is not None and held.closed and (held.installed is not None or held.unknown):
            self.closed[name] = self.closed.get(name, frozenset()) | (held.foreign or held.written)

    # --- work and time ---

    def end_work(self) -> None:
        if not self.shell.work:
            return
        number = self.random.choice(sorted(self.shell.work))
        started = self.shell.work[number]
        error = WeightwireError("the test lets it fail") if self.random.random() < 0.05 else None
        if isinstance(started.work, Stage) and error is None:
            self.proven.add((started.member, started.work.txn))
        if isinstance(started.work, MapStaging):
            self.proven.discard((started.member, started.work.txn))
        self.counted[type(started.work).__name__] += 1
        self.shell.end(number, error)

    def tick(self) -> None:
        self.shell.now_s += self.random.choice([0.0, 0.0, 0.3, 0.6, 2.0] if self.random.random() < 0.9 else [100.0])
        ended = self.random.choice([*[()] * 8, ((1, 1),), ((2, 2),)])
        self.shell.do(Tick(ended))
        for group in self.machine.groups.values():
            if (open_ := group.transaction) is not None and group.state != "committing":
                assert open_.expires_at_s > self.shell.now_s
                assert (open_.sender.pid, open_.sender.start_ticks) not in ended or open_.sender.boot_id != HERE
                assert all(until_s > self.shell.now_s for _, until_s in open_.seal_askers)
        due_s = self.machine.wakes_at_s
        assert due_s > self.shell.now_s, "else the shell would be woken without end"

    # --- the engine ---

    def _ask(self, event: Any, *fields: Any) -> Any:
        try:
            return self.shell.engine(event, *fields)
        except WeightwireError as error:
            return error

    def check(self) -> None:
        group = self._group()
        held = self.machine.groups.get(group)
        current = held.transaction if held is not None else None
        txn = self._txn(group)
        version = current.version if current is not None else 0
        if group in self.installing or self._ask(CheckSealed, group, txn, version) is not None:
            return
        assert held is not None and current is not None
        assert (held.member, txn) in self.proven and current.txn == txn and current.version == version
        if self.random.random() < 0.2:
            assert self._ask(ReleaseCheck, group) is None
        else:
            assert self._ask(Install, group, txn) == version
            self.installing[group] = txn

    def finish(self) -> None:
        if not self.installing:
            return
        group = self.random.choice(sorted(self.installing))
        held, txn = self.machine.groups[group], self.installing.pop(group)
        assert self._ask(CheckCommitting, group, txn) is True
        if held.partial:
            left = {name: None if torn is None else torn - held.claims for name, torn in self.torn.items()}
            self.torn = {name: torn for name, torn in left.items() if torn is None or torn}
        else:
            self.torn = {}
        self.closed = {name: left for name, old in self.closed.items() if held.partial and (left := old - held.claims)}
        done = self._ask(Finished, group, txn, 0.0, self.random.random() < 0.5)
        assert isinstance(done, RankCommit) and set(done.torn) == set(self.torn)
        assert held.state == "idle" and self._ask(CheckSealed, group, txn, done.version) == done
        self.served[held.member] = txn
        self.refusing.discard(held.member)
        self.counted["commit"] += 1

    def undo(self) -> None:
        if not self.installing:
            return
        group = self.random.choice(sorted(self.installing))
        held = self.machine.groups[group]
        del self.installing[group]
        was_torn, fails = held.before_commit == "torn", self.random.random() < 0.3
        back = self._ask(StartUndo, group)
        if held.installed is not None and held.installed.keeps:
            assert (held.member, back.txn) in self.shell.mapped, "the way back is there"
        answer = self._ask(Undone, group, "the test says so", "no way back" if fails else None)
        assert isinstance(answer, TornReplica) == (fails or was_torn)
        assert (held.state == "torn") == (fails or was_torn)
        if fails:
            self._tear(group)
        self.counted["undo"] += 1

    def tear(self) -> None:
        group = self._group()
        if group in self.machine.groups:
            self._tear(group)
            self.installing.pop(group, None)
        self.shell.do(Tear(group, "", "the test says so"))

    def _tear(self, group: str) -> None:
        self.refusing.add(self.machine.groups[group].member)
        before = self.torn.get(group, frozenset())
        self.torn[group] = None if before is None else before | self.machine.groups[group].claims

    def tear_all(self) -> None:
        if self.random.random() < 0.8:
            return
        if all(group.partial for group in self.machine.groups.values()):
            self.torn[MODEL] = None
        for group in self.machine.groups:
            self._tear(group)
        self.installing.clear()
        self.shell.do(TearAll("the test says so"))

    def sleep(self) -> None:
        if self._ask(MaySleep, self.random.random() < 0.5) is None:
            assert not any(isinstance(started.work, INSTALLER_WORK[:4]) for started in self.shell.work.values())
            self.counted["sleep"] += 1
            begin = Begin("policy", "asleep", 1 << 40, SENDERS[0], 60.0, "")
            assert isinstance(self.shell.request(begin).answers[0], WeightwireError)
        self.shell.do(Awake())

    def forget(self) -> None:
        """Somebody else writes the weights, in the middle of whatever is on its way."""
        known = any(group.installed is not None or group.unknown for group in self.machine.groups.values())
        known = known or bool(self.closed)
        assert bool(self._ask(ForgetVersions, "the test says so")) is known
        self.served.clear()
        self.counted["forgotten"] += known

    # --- what must hold after each event ---

    def check_promises(self) -> None:
        assert all(len(asker.answers) <= 1 for asker in self.shell.askers), "somebody was answered twice"
        self.shell.askers = [asker for asker in self.shell.askers if not asker.answers]
        self._check_work()
        for group in self.machine.groups.values():
            installed = group.installed
            assert (installed.txn if installed is not None else None) == self.served.get(group.member)
            if installed is not None:
                assert (group.member, installed.txn) in self.proven, "what is served was checked"
                assert not installed.keeps or (group.member, installed.txn) in self.shell.mapped
            assert len(group.finished) <= FINISHED_KEPT + 1
            assert (group.member in self.refusing) == (group.state == "torn") or group.state == "committing"
        claimed = [name for group in self.machine.groups.values() for name in group.claims]
        assert len(claimed) == len(set(claimed)), "two groups write one parameter"
        assert set(self.machine.torn.groups) == set(self.torn)

    def _check_work(self) -> None:
        """One job at a time for a group, beside one `Stage`; none that uses the installer while the group is committed."""
        running: collections.Counter[tuple[int, bool]] = collections.Counter()
        committing = {group.member for group in self.machine.groups.values() if group.state == "committing"}
        for started in self.shell.work.values():
            running[started.member, isinstance(started.work, Stage)] += 1
            assert started.member not in committing or not isinstance(started.work, INSTALLER_WORK), started
        assert all(count == 1 for count in running.values())
        assert all(times == 1 for times in self.shell.received.values()), "a bucket was received twice"

    def end(self) -> None:
        """In the end nobody waits, and nothing is held."""
        self.shell.do(CloseAll())
        self.shell.end_all()
        assert all(len(asker.answers) == 1 for asker in self.shell.askers), "somebody was never answered"
        assert self.shell.mapped == set(), "memory is still held"
        assert not self.machine.groups and not self.machine.unopened and not self.machine.closing
        assert self.machine.wakes_at_s == math.inf and self.machine.processes() == set()


def test_events_in_any_order_break_no_promise() -> None:
    """`WW_TEST_SEEDS=100000` goes on for longer; a failure names its seed and its step."""
    counted: collections.Counter[str] = collections.Counter()
    for seed in range(SEEDS):
        walk = Walk(Random(seed))
        step = 0
        try:
            for step in range(STEPS):  # noqa: B007
                walk.step()
            walk.end()
        except Exception as error:
            raise AssertionError(f"seed {seed}, step {step}: {type(error).__name__}: {error}") from error
        counted += walk.counted
    seen = {
        "forgotten",
        "commit",
        "undo",
        "sleep",
        "Stage",
        "CleanUp",
        "KeepTerms",
        "FreeMemory",
        "DropStaging",
        "CloseWork",
    }
    assert seen <= set(counted), counted


def test_the_machine_needs_no_torch() -> None:
    """The simulator runs many thousands of them."""
    check = "import sys, inference_plugin.worker.machine; sys.exit('torch' in sys.modules or 'zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=600, check=False).returncode == 0


def test_what_ends_after_its_transaction_was_dropped_changes_nothing() -> None:
    shell = Shell()
    shell.opened()
    begun = shell.begin("t1", 1)
    aborted = shell.request(Abort("policy", "t1"))
    assert isinstance(begun.answers[0], VersionConflict) and aborted.answers == []
    shell.end_all()
    assert aborted.answers == [Done()] and shell.mapped == set()
    assert shell.states == [("policy", "receiving"), ("policy", "idle")]
    assert shell.machine.groups["policy"].transaction is None


def test_an_abort_that_comes_again_or_after_the_drop_is_answered_once_the_memory_is_free_too() -> None:
    shell = Shell()
    shell.opened()
    for txn, drops in (("t1", Abort("policy", "t1")), ("t2", OpenGroup("policy", TERMS["ab"][0], "zmq"))):
        shell.begin(txn, 1)
        shell.request(drops)
        again = shell.request(Abort("policy", txn))
        assert again.answers == [] and shell.machine.groups["policy"].busy
        shell.end_all()
        assert again.answers == [Done()] and shell.mapped == set()


def test_an_abort_of_a_streamed_update_that_comes_again_gets_the_answer_of_the_first() -> None:
    """The engine's thread, which waits for bytes, takes a while to hear of it."""
    shell = Shell()
    shell.opened()
    shell.begin("t1", 1, segment=b"streams")
    shell.end_all()
    shell.engine(CheckSealed, "policy", "t1", 1)
    shell.engine(Install, "policy", "t1")
    aborts = [shell.request(Abort("policy", "t1")) for _ in range(2)]
    with pytest.raises(VersionConflict, match="aborted by the trainer"):
        shell.engine(CheckCommitting, "policy", "t1")
    shell.engine(StartUndo, "policy")
    shell.engine(Undone, "policy", "the stream ended")
    assert [each.answers for each in aborts] == [[], []]
    shell.end_all()
    assert [each.answers for each in aborts] == [[Done()], [Done()]]


def test_a_transaction_is_cleaned_up_once_its_preparation_has_ended_and_the_next_one_waits() -> None:
    shell = Shell()
    shell.opened()
    shell.begin("t1", 1)
    shell.end_all()
    sealing = shell.request(Seal("policy", "t1", "d", ()))
    shell.end(next(iter(shell.work)))
    ((stage, started),) = shell.work.items()
    assert isinstance(started.work, Stage)
    next_one = shell.begin("t2", 2)
    assert isinstance(sealing.answers[0], VersionConflict) and shell.cancelled == {(started.member, "t1")}
    assert list(shell.work) == [stage], "neither the clean-up nor the next mapping"
    shell.now_s += 31
    shell.request(Renew("policy", "t2"))
    shell.do(Tick())
    shell.end(stage, WeightwireError("cancelled"))
    assert [type(each.work) for each in shell.work.values()] == [CleanUp]
    shell.end_all()
    assert next_one.answers == [Begun()] and shell.mapped == {(started.member, "t2")}


def test_a_silent_trainers_lease_ends_at_its_time_and_not_before_and_never_during_a_commit() -> None:
    shell = Shell()
    shell.opened()
    shell.sealed("t1", 1)
    group = shell.machine.groups["policy"]
    assert shell.machine.wakes_at_s < math.inf
    shell.now_s = shell.machine.wakes_at_s - 0.01
    shell.do(Tick())
    assert group.state == "sealed"
    shell.engine(CheckSealed, "policy", "t1", 1)
    shell.now_s += 1000
    shell.do(Tick(((1, 1),)))
    assert group.state == "committing"
    shell.engine(ReleaseCheck, "policy")
    assert shell.machine.wakes_at_s <= shell.now_s
    shell.do(Tick())
    assert group.state == "idle"


def test_repeated_buckets_are_answered_after_the_first_and_received_once() -> None:
    shell = Shell()
    shell.opened()
    shell.begin("t1", 1)
    shell.end_all()
    first = shell.request(Bucket("policy", "t1", 0, 0, ()), memoryview(b""))
    again = shell.request(Bucket("policy", "t1", 0, 0, ()), memoryview(b""))
    early = shell.request(Bucket("policy", "t1", 0, 2, ()), memoryview(b""))
    assert first.answers == again.answers == []
    shell.end_all()
    assert first.answers == again.answers == [Done()]
    assert "bucket 2 of trainer rank 0 came before bucket 1" in early.answers[0].message
    assert list(shell.received.values()) == [1]


def test_a_commit_frees_the_way_back_to_the_version_before_the_last_and_keeps_the_last() -> None:
    shell = Shell()
    shell.opened()
    for version in (1, 2, 3):
        shell.committed(f"t{version}", version)
        assert {txn for _, txn in shell.mapped} == {f"t{version}"}
    shell.committed("t4", 4, keeps=False)
    assert shell.mapped == set()


def test_a_version_that_somebody_else_wrote_over_is_no_way_back_and_may_come_again() -> None:
    shell = Shell()
    shell.opened()
    assert shell.engine(ForgetVersions, "the engine loaded others") == {}, "none was known"
    shell.committed("t1", 1)
    shell.sealed("t2", 2)
    assert shell.engine(ForgetVersions, "the engine loaded others") == {"policy": "the engine loaded others"}
    (status,) = shell.machine.statuses()
    assert (status.version, status.state, status.detail) == (None, "sealed", "the engine loaded others")
    shell.engine(CheckSealed, "policy", "t2", 2)
    shell.engine(Install, "policy", "t2")
    back = shell.engine(StartUndo, "policy")
    assert back.txn == "", "the memory of the way back is not what was served"
    shell.engine(Undone, "policy", "it failed")
    shell.end_all()
    assert shell.mapped == set()
    assert shell.engine(ForgetVersions, "") == {"policy": "the engine loaded others"}
    assert shell.engine(ForgetVersions, "again") == {"policy": "the engine loaded others"}, (
        "the first who wrote is named"
    )
    assert shell.committed("t3", 1).unknown == ()
    assert shell.engine(ForgetVersions, "") == {}, "it only asks"
    (status,) = shell.machine.statuses()
    assert (status.version, status.detail) == (1, "")


def test_what_a_closed_group_wrote_is_of_unknown_version_once_somebody_else_wrote_over_it() -> None:
    shell = Shell()
    for terms in ("a", "b"):
        shell.opened(terms=terms)
        shell.committed(f"t-{terms}", 1 + (terms == "b"))
    shell.request(CloseGroup("policy"))
    shell.end_all()
    assert shell.engine(ForgetVersions, "") == {}, "it only asks"
    assert shell.engine(ForgetVersions, "the engine loaded others") == {"policy": "the engine loaded others"}
    shell.opened(terms="b")
    assert shell.committed("t2", 3).unknown == ("policy",), "what it sent before is still the others'"
    shell.opened(terms="a")
    assert shell.committed("t3", 4).unknown == ()
    assert shell.engine(ForgetVersions, "") == {}


def test_a_version_that_somebody_else_wrote_over_is_known_again_once_all_that_the_group_wrote_was_sent_again() -> None:
    shell = Shell()
    for terms in ("a", "b"):
        shell.opened(terms=terms)
        shell.committed(f"t-{terms}", 1 + (terms == "b"))
    shell.engine(ForgetVersions, "the engine loaded others")
    shell.opened(terms="a")
    assert shell.committed("t2", 3).unknown == ("policy",), "what it sent before is still the others'"
    (status,) = shell.machine.statuses()
    assert (status.version, status.detail) == (None, "the engine loaded others")
    assert shell.committed("t3", 3).unknown == ("policy",), "it is sent again, since nobody knows what is served"
    shell.opened(terms="b")
    assert shell.committed("t4", 4).unknown == ()
    assert shell.machine.statuses()[0].version == 4


def test_an_abort_or_another_update_comes_too_late_once_the_commit_has_begun() -> None:
    shell = Shell()
    shell.opened()
    shell.sealed("t1", 1)
    shell.engine(CheckSealed, "policy", "t1", 1)
    for late in (shell.request(Abort("policy", "t1")), shell.request(CloseGroup("policy"))):
        assert isinstance(late.answers[0], VersionConflict)
    (refused,) = shell.begin("t2", 2).answers
    assert isinstance(refused, SyncTimeout) and "still under way here" in refused.message, "it may come again later"
    shell.engine(Install, "policy", "t1")
    assert shell.engine(Finished, "policy", "t1", 0.0, False).version == 1


def test_a_preparation_that_ends_after_its_drop_seals_nothing_of_the_next_update() -> None:
    shell = Shell()
    shell.opened()
    shell.begin("t1", 1)
    shell.end_all()
    shell.request(Seal("policy", "t1", "d", ()))
    shell.end(next(iter(shell.work)))
    shell.begin("t2", 2)
    shell.end_all()
    assert shell.machine.groups["policy"].state == "receiving"
    with pytest.raises(ProtocolError, match="t2 is not sealed"):
        shell.engine(CheckSealed, "policy", "t2", 2)


def test_a_torn_group_is_healed_by_what_covers_it_and_a_smaller_group_of_its_name_is_refused() -> None:
    shell = Shell()
    shell.opened()
    shell.committed("t1", 1)
    shell.do(Tear("policy", "", "half way"))
    shell.request(CloseGroup("policy"))
    shell.end_all()
    refused = shell.opened(terms="a")
    assert isinstance(refused.answers[0], TornReplica) and "b (1 in all)" in refused.answers[0].message
    shell.opened()
    assert shell.committed("t2", 1).torn == ()
    assert shell.machine.torn.groups == ()


@pytest.mark.parametrize("apart", ["draft", "lora.adapter"])
def test_an_update_of_the_served_model_heals_no_draft_and_no_adapter(apart: str) -> None:
    shell = Shell()
    shell.opened(apart, terms="c")
    shell.do(Tear(apart, "", "half way"))
    shell.opened()
    assert shell.committed("t1", 1).torn == (apart,)
    assert shell.committed("t2", 1, apart).torn == ()
