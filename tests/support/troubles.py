"""A storm on whatever engine: updates one after another into a few replicas, and beside each of them a trouble or two.

After each trouble every replica that is left is looked at (`StormChecks`); one that lost a process is replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from inference_plugin.net import addresses
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.reports import VerifyReport
from tests.support.managers import SyncManager
from tests.support.rig import LONG_S, eventually, fork, gone, kill, stands_still
from tests.support.sends import Sends
from tests.support.storm_checks import CLOSE_S, Outcome, R, StormChecks, noted_in, statuses_of
from trainer_adapters import WeightSource

SHORT_STOP_S, LONG_STOP_S = 1.0, 13.0  # below and above the silence that fails a replica (`control_timeout_s`, 10 s)
SENDS = 16  # about so many messages the manager sends in an update

TRAINER_S = 200.0  # for a trainer's process: an update, and closing its manager

OTHER_TRAINERS = frozenset({"trainer_killed", "trainer_rank_fails", "trainer_stopped", "second_manager"})
"""Troubles in which a version may come from another manager."""

CALM = "calm after "  # the kind of an update without a trouble

LONE_TRAINER = "tests.support.lone_trainer:lone_trainer"

STILL_COMMITTING = "another commit of this group is still under way here"

LATE_UPDATES = 3
"""In so many updates a replica that was silent may be left out."""


class Troubles(StormChecks[R]):
    """Used as a context."""

    kinds: tuple[str, ...]
    """Names of methods, each a context around one update; those that need a step boundary to be prepared come before those
    that keep replicas from it."""
    sizes: tuple[int, ...]
    """Ranks of each replica."""
    calm_between = False
    """Whether an update without a trouble follows each: everybody who is left must take it."""

    def __init__(self, directory: Path, seed: int, *, long_stops: bool, say: Callable[[str], None]) -> None:
        super().__init__(seed, say)
        self.directory, self.long_stops = directory, long_stops
        self.version = 0
        self.seen: Counter[str] = Counter()
        self._sends = Sends()
        self._manager: SyncManager | None = None
        self._timers: list[threading.Thread] = []
        self._deck: list[str] = []

    def __enter__(self) -> Any:
        self._sends.__enter__()
        self.learn(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._sends.__exit__()
        if self._manager is not None:
            self._manager.close()
        for replica in self.replicas:
            replica.end()

    # --- of each kind of replica ------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, sizes: list[int]) -> list[R]:
        """New replicas of these numbers of ranks."""

    @abstractmethod
    def learn_weights(self, seed: int) -> None:
        """Nobody has sent them yet."""

    @abstractmethod
    def source(self, seed: int) -> WeightSource: ...

    @abstractmethod
    def weights_for_a_process(self, seed: int) -> int | str:
        """As `lone_trainer` takes them."""

    @abstractmethod
    def order_faults(self, replica: R, *faults: tuple[int, str]) -> None:
        """Ranks and steps ("install", "undo") that are to fail in the next installation."""

    @abstractmethod
    def pause_state(self, replica: R) -> str:
        """By the replica itself: "paused", "serving" or, where it can't be told, ""."""

    # --- the run ----------------------------------------------------------------------------------------------------------

    def run(self, events: int) -> None:
        for self.number in range(events):
            self.chance.seed(
                f"{self.seed} {self.number}"
            )  # what is drawn depends on nothing that came of earlier events
            self._replenish()
            self._one(self._draw())
            if self.calm_between:
                self._one([])

    def _one(self, kinds: list[str]) -> None:
        """One update with these troubles beside it, and the checks after it."""
        self.kind = " + ".join(kinds) or CALM + self.kind
        self.hurt, self.may_tear, self.failing, self.rivals, self.others = set(), set(), set(), False, []
        if not OTHER_TRAINERS.isdisjoint(kinds):
            self.returning.clear()
        began_s = time.monotonic()
        with self.around_event():
            with contextlib.ExitStack() as stack:
                for kind in kinds:
                    stack.enter_context(getattr(self, kind)())
                self._sends.restart()
                seed, replicas, error = self._update(self.manager)
            self.others.append((seed, replicas, error))
            for timer in self._timers:
                timer.join(LONG_S)
            self._timers.clear()
            self.check(seed)
        self.seen.update(kinds)
        statuses = " ".join(f"{n.rpartition('-')[2]}:{s}" for n, s in replicas.items())
        self.say(
            f"{self.number} {self.kind} {self.options} v{self.version} {statuses} {error[:160]} "
            f"{self._sends.count} sends, {time.monotonic() - began_s:.1f} s"
        )

    def around_event(self) -> contextlib.AbstractContextManager[None]:
        """Around an update with its troubles and the checks after it."""
        return contextlib.nullcontext()

    # --- the troubles -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker_killed(self) -> Iterator[None]:
        replica = self._victim()
        pid = replica.worker_pid(self.chance.randrange(replica.tp))
        with self._amid(lambda: kill(pid)):
            yield

    @contextlib.contextmanager
    def coordinator_killed(self) -> Iterator[None]:
        replica = self._victim()
        with self._amid(lambda: kill(replica.pid)):
            yield

    @contextlib.contextmanager
    def worker_stopped(self) -> Iterator[None]:
        replica = self.chance.choice(self.replicas)
        with self._stopped(replica, replica.worker_pid(self.chance.randrange(replica.tp))):
            yield

    @contextlib.contextmanager
    def coordinator_stopped(self) -> Iterator[None]:
        replica = self.chance.choice(self.replicas)
        with self._stopped(replica, replica.pid):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        for call, state in ((self.manager.pause, "paused"), (self.manager.resume, "serving")):
            try:
                self.timed(call.__name__, call).raise_failed()
            except WeightwireError as error:
                if not self.hurt:
                    self.violated(f"{call.__name__}: {error}")
            for replica in self.left():
                if replica.replica not in self.hurt and (found := self.pause_state(replica)) not in (state, ""):
                    self.violated(f"{replica.replica} after {call.__name__}(): {found}")
            if state == "paused":
                yield

    @contextlib.contextmanager
    def installation_fails(self) -> Iterator[None]:
        for replica in self.chance.sample(self.replicas, k=self.chance.choice((1, 1, 2))):
            self.hurt.add(replica.replica)
            self.failing.add(replica.replica)
            self.order_faults(replica, (self.chance.randrange(replica.tp), "install"))
        yield

    @contextlib.contextmanager
    def way_back_fails(self) -> Iterator[None]:
        replica = self._tear()
        card = addresses.runtime_dir() / f"{replica.replica}.card.tmp"
        if unwritable := self.chance.random() < 0.5:
            make_unwritable(card)
        yield
        if unwritable:
            card.rmdir()

    @contextlib.contextmanager
    def second_manager(self) -> Iterator[None]:
        """Another one updates at the same time: with a higher version, a lower one, or the same with other weights."""
        self.rivals = True
        step = self.chance.choice((-1, 0, 1))
        seed = self.learn(self.version + 1 + step)
        if step == 1:
            self.version += 1
        options = self._drawn_options() | {"catch_up": self.options["catch_up"]}
        manager = SyncManager(**options)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self._update, manager, seed)
            yield
            self.others.append(pending.result())
        self.timed("closing the other manager", manager.close, CLOSE_S)

    @contextlib.contextmanager
    def trainer_killed(self) -> Iterator[None]:
        """Before this update, in a process of its own."""
        at = self.chance.randint(1, SENDS)
        with self.beside_a_trainer_to_be_killed():
            pid, seed, out = self._lone_trainer(at, signal.SIGKILL, self._drawn_options())
            self.timed("a trainer of its own", lambda: self.ended([pid]))
        self.check_between(seed, out)
        yield

    @contextlib.contextmanager
    def trainer_stopped(self) -> Iterator[None]:
        """Another process has begun an update and stands still; it goes on when this one is over."""
        self.rivals = True
        options = self._drawn_options() | {"catch_up": self.options["catch_up"]}
        pid, seed, out = self._lone_trainer(self.chance.randint(1, SENDS), signal.SIGSTOP, options)
        eventually(lambda: gone(pid) or stands_still(pid), "the other trainer standing still, or its end")
        yield
        if not gone(pid):
            os.kill(pid, signal.SIGCONT)
        self.timed("a trainer that went on", lambda: self.ended([pid]))
        self.others.append((seed, *noted_in(out)))

    # --- parts of them ------------------------------------------------------------------------------------------------

    def _draw(self) -> list[str]:
        """All in turn, in an order that is drawn; every third time with another one beside it."""
        if not self._deck:
            self._deck = self.chance.sample(self.kinds, k=len(self.kinds))
        drawn = [self._deck.pop()]
        if self.chance.random() < 1 / 3:
            drawn.append(self.chance.choice([kind for kind in self.kinds if kind not in drawn]))
        return sorted(drawn, key=self.kinds.index)

    def _victim(self) -> R:
        replica = self.chance.choice(self.replicas)
        self.hurt.add(replica.replica)
        self.killed[replica.replica] += 1
        return replica

    def _tear(self) -> R:
        replica = self.chance.choice([replica for replica in self.replicas if replica.tp == 2])
        self.hurt.add(replica.replica)
        self.may_tear.add(replica.replica)
        rank = self.chance.randint(0, 1)
        self.order_faults(replica, (rank, "install"), (1 - rank, "undo"))
        return replica

    @contextlib.contextmanager
    def _amid(self, action: Callable[[], None]) -> Iterator[None]:
        """`action` happens right before the manager's n-th message of the update, or a little later; at the end if there are
        not so many."""
        done = threading.Event()

        def act() -> None:
            with contextlib.suppress(ProcessLookupError):  # another trouble was there before
                action()
            done.set()

        delay_s = self.chance.choice((0.0, 0.0, 0.002, 0.01, 0.03))

        def begin() -> None:
            if not delay_s:
                act()
                return
            timer = threading.Timer(delay_s, act)
            timer.start()
            self._timers.append(timer)

        take_back = self._sends.before(self.chance.randint(1, SENDS), begin)
        yield
        if take_back():
            begin()
        assert done.wait(LONG_S)

    @contextlib.contextmanager
    def _stopped(self, replica: R, pid: int) -> Iterator[None]:
        is_long = self.long_stops and self.chance.random() < 0.3
        seconds = LONG_STOP_S if is_long else self.chance.uniform(0.05, SHORT_STOP_S)
        if is_long:
            self.hurt.add(replica.replica)
            self.late[replica.replica] = LATE_UPDATES
        ended = threading.Event()

        def stop() -> None:
            timer = threading.Timer(seconds, go_on)
            try:
                os.kill(pid, signal.SIGSTOP)
            finally:  # and not before: what was told to go on first would stand still for good
                timer.start()
                self._timers.append(timer)

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            ended.set()

        with self._amid(stop):
            yield
        assert ended.wait(LONG_S)

    def _lone_trainer(self, at: int, signal_number: int, options: dict[str, Any]) -> tuple[int, int, Path]:
        """A process that updates to the next version; its pid, the seed of its weights, and where it notes what came of it."""
        seed = self.learn_next()
        out = self.directory / f"lone-{self.number}"
        arguments = {"weights": self.weights_for_a_process(seed), "version": self.versions[seed], "out": str(out)}
        pid = self.fork(LONE_TRAINER, **arguments, at=at, signal_number=signal_number, options=options)
        return pid, seed, out

    def ended(self, pids: list[int]) -> None:
        deadline_s = time.monotonic() + TRAINER_S
        while not all(map(gone, pids)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for pid in pids:
            if not gone(pid):
                self.violated("a trainer's process did not end")
                kill(pid)

    @property
    def manager(self) -> SyncManager:
        assert self._manager is not None
        return self._manager

    def _drawn_options(self) -> dict[str, Any]:
        install = self.chance.choice(("copy", "standby", "auto", "streaming"))
        return {
            "install": install,
            "transport": self.chance.choice(("auto", "shm", "zmq", "delta")) if install != "streaming" else "auto",
            "catch_up": self.chance.choice(("never", "never", "auto")),
        }

    def _replenish(self) -> None:
        """Every replica and the manager are there: replicas that lost a process are replaced, the manager now and then."""
        for replica in list(self.replicas):
            if gone(replica.pid) or any(gone(worker.pid) for worker in replica.card.workers):
                self.bury(replica)
        missing = list(self.sizes)
        for replica in self.replicas:
            missing.remove(replica.tp)
        self.replicas += self.start(missing)
        self.replicas.sort(key=lambda replica: replica.tp)  # choices don't depend on which was replaced
        if self._manager is None or self.chance.random() < 0.25:
            if self._manager is not None:
                self.timed("closing the manager", self._manager.close, CLOSE_S)
            self.options = self._drawn_options()
            self.returning.clear()
            self._manager = SyncManager(**self.options)

    def _update(self, manager: SyncManager, seed: int | None = None) -> Outcome:
        """One update. What the report says of each replica (with "?" where it says that it does not know), and the error."""
        if seed is None:
            seed = self.learn_next()
        version = self.versions[seed]
        assert version is not None
        error = ""
        try:
            report = self.timed("update", lambda: manager.update(self.source(seed), version))
        except WeightwireError as failed:
            error, report = f"{type(failed).__name__}: {failed}", failed.report
        if report is None:
            return seed, {}, error
        if "hostile_messages" in self.kind:  # one of them asked for a commit of the group right before
            self.hurt |= {r.replica for r in report.replicas if r.error and STILL_COMMITTING in r.error.message}
        return seed, statuses_of(report), error

    def learn_next(self) -> int:
        self.version += 1
        return self.learn(self.version)

    def learn(self, version: int) -> int:
        """A seed of weights that nobody has sent yet, for this version."""
        seed = len(self.versions) if version else 0
        if version:
            self.versions[seed] = version
        self.learn_weights(seed)
        return seed

    def verify_by_manager(self, seed: int) -> VerifyReport:
        return self.manager.verify(self.source(seed))

    def fork(self, call: str, **arguments: Any) -> int:
        """A trainer's process, with the runtime directory and the job of this one."""
        names = ("WEIGHTWIRE_RUNTIME_DIR", "WEIGHTWIRE_JOB")
        return fork(call, {name: os.environ[name] for name in names if name in os.environ}, **arguments)

    def beside_a_trainer_to_be_killed(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def make_unwritable(file: Path) -> None:
    """Not even root can write it, until the directory in its place is removed."""

    def is_replaced() -> bool:
        try:
            file.mkdir()
        except FileExistsError:  # somebody writes it just now
            return False
        return True

    eventually(is_replaced, f"no writer of {file.name}")
