"""What must be so after each trouble of a storm, on whatever engine: what replicas hold, serve and say, and what reports said.

All ranks of a replica hold one committed version, or it refuses; each report says of it what it holds; who had no trouble
took the update; each call returned by its deadline. What is not so becomes a line of `violations`; nothing is raised, so that
a storm goes on.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import psutil

from inference_plugin.net.channel import Channel
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Describe, ReplicaCard, WorkerCard
from inference_plugin.wire.reports import UpdateReport, VerifyReport
from tests.support.rig import LONG_S, gone

UNKNOWN = ("SyncTimeout", "PeerLost")
"""Errors in the commit after which a report does not say what is served."""

CLOSE_S = 30.0
"""Closing a manager may take so long beyond the limit of its last operation."""


class Replica(Protocol):
    """What a storm needs of a replica."""

    replica: str
    card: ReplicaCard
    tp: int
    pid: int
    """Of its coordinator."""

    def worker_pid(self, rank: int = 0) -> int: ...

    def end(self) -> None: ...


R = TypeVar("R", bound=Replica)

Outcome = tuple[int, dict[str, str], str]
"""Of one update: the seed of its weights, what the report says of each replica, the error."""


STREAMED = "the streamed bytes have overwritten the previous version"
"""Why a replica is torn into which an update was streamed that came to nothing."""


class StormChecks(Generic[R]):
    """What is known of a storm so far, and the comparison of that with its replicas.

    A seed stands for one set of weights; `versions` says which version it was sent as. Two seeds may have one version: of
    two managers at the same time.
    """

    no_answer: tuple[type[Exception], ...] = (OSError, ValueError, WeightwireError)
    """What `look_at` raises if the replica does not answer."""

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        self.seed, self.say = seed, say
        self.chance = random.Random(seed)
        self.replicas: list[R] = []
        self.versions: dict[int, int | None] = {0: None}
        self.number = 0
        self.kind = ""
        self.options: dict[str, Any] = {}
        self.longest: dict[str, tuple[float, str]] = {}
        """By what was called: the longest wait in seconds, and in which event."""
        self.violations: list[str] = []
        self.killed: Counter[str] = Counter()
        """How many of its processes were killed."""
        self.hurt: set[str] = set()
        self.may_tear: set[str] = set()
        self.failing: set[str] = set()
        self.torn: set[str] = set()
        self.returning: set[str] = set()
        self.late: Counter[str] = Counter()
        self.rivals = False
        self.others: list[Outcome] = []

    # --- of each kind of replica ------------------------------------------------------------------------------------------

    def look_at(self, replica: R) -> tuple[str | None, int | None]:
        """Why it refuses to generate, if it does; and the seed of the one version that it holds on all ranks, if it does."""
        raise NotImplementedError

    def clear_faults(self, replica: R) -> None:
        """Those that were ordered and did not happen."""
        raise NotImplementedError

    def verify_by_manager(self, seed: int) -> VerifyReport:
        raise NotImplementedError

    # --- after a trouble --------------------------------------------------------------------------------------------------

    def timed(self, what: str, call: Callable[[], Any], limit_s: float | None = None) -> Any:
        """`call()`, which must end by its deadline: by default that of an operation of a manager."""
        limit_s = Config().timeout_s if limit_s is None else limit_s
        began_s = time.monotonic()
        try:
            return call()
        finally:
            waited_s = time.monotonic() - began_s
            if waited_s > self.longest.get(what, (0.0, ""))[0]:
                self.longest[what] = waited_s, f"event {self.number}, {self.kind}"
            if waited_s > limit_s:
                self.violated(f"{what} took {waited_s:.1f} s, and has {limit_s:g} s")

    def said_of_waits(self) -> str:
        waits = sorted(self.longest.items(), key=lambda item: -item[1][0])
        return "; ".join(f"{what} {seconds:.1f} s ({where})" for what, (seconds, where) in waits)

    def violated(self, what: str) -> None:
        line = f"seed {self.seed}, event {self.number} ({self.kind}, {self.options}): {what}"
        self.violations.append(line)
        self.say(f"VIOLATION {line}")

    def left(self) -> list[R]:
        """Replicas that have all their processes."""
        return [r for r in self.replicas if not gone(r.pid) and not any(gone(w.pid) for w in r.card.workers)]

    def bury(self, replica: R) -> None:
        replica.end()
        self.replicas.remove(replica)
        self.late.pop(replica.replica, None)

    def check(self, seed: int) -> None:
        """After an update of the manager's own."""
        _, said, error = self.others[-1]
        left = self.left()
        for replica in self.replicas:
            if replica not in left and replica.replica not in self.killed:
                self.violated(f"{replica.replica} lost a process, and nobody killed one of its")
        for replica in left:
            if replica.replica in said:
                self.late.pop(replica.replica, None)
            elif said and replica.replica in self.late:
                self.late[replica.replica] -= 1
            took = said.get(replica.replica) == "committed"
            if said.get(replica.replica) == "?":
                self.returning.discard(replica.replica)
            if took or self.rivals or replica.replica in self.hurt or self.late[replica.replica] > 0:
                continue
            if replica.replica not in said and said and self.options["catch_up"] == "auto":
                continue  # it is being caught up
            self.violated(f"{replica.replica} had no trouble and did not take v{self.versions[seed]}: {said} {error}")
        self.look(left)
        if self.chance.random() < 0.3:
            self._verify(seed)
        if self.rivals:
            self.returning.clear()
        else:
            self.returning |= {name for name, status in said.items() if status == "committed"}

    def check_between(self, seed: int, note: Path) -> None:
        """After an update of somebody else's process, whose note says how it went for that process."""
        self.others.append((seed, *noted_in(note)))
        self.look(self.left())
        self.others.clear()

    def look(self, replicas: list[R]) -> None:
        for replica in replicas:
            try:
                served, (refusal, held) = self._served(replica), self.look_at(replica)
                while (later := self._served(replica)) != served:  # a commit that went on late came between
                    served, (refusal, held) = later, self.look_at(replica)
                self.clear_faults(replica)
            except self.no_answer as error:
                self.violated(f"{replica.replica} does not answer: {error!r}; {processes_of(replica)}")
                self.bury(replica)
                continue
            was_streamed = STREAMED in (refusal or "")
            may_be_torn = self.may_tear | self.torn | self._without_a_way_back(refusal or "")
            if refusal is not None and not was_streamed and replica.replica not in may_be_torn:
                self.violated(f"{replica.replica} is torn: {refusal}")
            (self.torn.discard if refusal is None else self.torn.add)(replica.replica)
            if refusal is None and held is None:
                self.violated(f"{replica.replica} holds no version, or several, and does not refuse")
                self.bury(replica)
                continue
            if refusal is None:
                assert held is not None
                self._compare(replica, held, served)
            elif served is not None and self.options["catch_up"] != "auto":
                self.violated(f"{replica.replica} is torn and says that it serves v{served}")
            elif was_streamed and len(self.others) > 1:
                pass  # one manager's version was committed, and then another one's was streamed over it
            elif any(said.get(replica.replica) == "committed" for _, said, _ in self.others):
                self.violated(f"{replica.replica} is torn and was reported as committed: {self.others}")

    def _verify(self, seed: int) -> None:
        """A verification says of each replica whether it holds these weights."""
        if self.options["catch_up"] == "auto":
            return
        holding = {}
        for replica in self.left():
            if replica.replica not in self.torn:
                holding[replica.replica] = self.look_at(replica)[1] == seed
        try:
            report = self.timed("verify", lambda: self.verify_by_manager(seed))
        except WeightwireError as error:
            self.violated(f"verify: {error}")
            return
        for replica in report.replicas:
            if replica.replica in holding and replica.ok != holding[replica.replica]:
                self.violated(f"{holding}, and a verification says {replica}")

    def _without_a_way_back(self, refusal: str) -> set[str]:
        """Replicas of which an installation was made to fail, and whose version is another manager's: under `copy` its bytes
        went with that one (docs/how-it-works.md, "Roll-back, and torn")."""
        return self.failing - self.returning if "the previous version's bytes are gone" in refusal else set()

    def _compare(self, replica: R, held: int, served: int | None) -> None:
        """What one replica holds with what is said of it."""
        version = self.versions[held]
        caught_up = self.options["catch_up"] == "auto"
        if served != version and not caught_up:
            self.violated(f"{replica.replica} holds v{version} and says v{served}")
        took = [
            (self.versions[seed] or 0, seed)
            for seed, said, _ in self.others
            if said.get(replica.replica) == "committed"
        ]
        if took and len({seed for number, seed in took if number == max(took)[0]}) > 1:
            self.violated(f"{replica.replica} is said to serve two sets of weights of v{max(took)[0]}")
        elif took and held != max(took)[1]:
            self.violated(f"{replica.replica} is said to serve v{max(took)[0]} and holds v{version}")
        failed = [seed for seed, said, _ in self.others if said.get(replica.replica) == "failed"]
        raised = [seed for seed, said, error in self.others if not said and error and not error.startswith(UNKNOWN)]
        if held in failed + raised and not caught_up:
            self.violated(f"{replica.replica} holds v{version}, which was reported as failed there: {self.others}")

    def _served(self, replica: R) -> int | None:
        """By every worker itself, once all answer: the version, None while torn or without one."""
        held = set()
        for worker in replica.card.workers:
            with Channel(worker.address) as channel:
                card = channel.request(Describe(), WorkerCard, timeout_s=LONG_S)
            groups = [group for group in card.groups if group.group == "policy"]
            held.add(groups[0].version if groups and groups[0].state != "torn" else None)
        return held.pop() if len(held) == 1 else None


def processes_of(replica: Replica) -> str:
    """Whether its processes run, sleep, are stopped or gone."""
    pids = {"coordinator": replica.pid} | {f"rank {w.rank}": w.pid for w in replica.card.workers}
    said = []
    for what, pid in pids.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            said.append(f"{what} {psutil.Process(pid).status()}")
    return "its processes: " + ", ".join(said)


def statuses_of(report: UpdateReport) -> dict[str, str]:
    """By replica; "?" where the report says that it may be served or not."""
    return {
        r.replica: "?" if r.error is not None and r.error.phase == "commit" and r.error.kind in UNKNOWN else r.status
        for r in report.replicas
    }


def noted_in(note: Path) -> tuple[dict[str, str], str]:
    """What a trainer's process has noted of its update, if it came so far: what its report says of each replica, the error."""
    if not note.exists():
        return {}, ""
    noted = json.loads(note.read_text())
    if (report := noted.get("ok")) is None:
        return {}, f"{noted['error']}: {noted['text']}"
    return statuses_of(msgspec.convert(report, UpdateReport)), ""
