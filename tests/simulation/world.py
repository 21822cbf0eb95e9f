"""Simulated time, processes and tasks, and the faults of one schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any, Literal, TypeAlias

__all__ = ["FAULTS", "Fault", "FaultKind", "Process", "Task", "Violation", "World"]

FaultKind: TypeAlias = Literal[
    "lose", "duplicate", "delay", "crash", "freeze", "fail work", "slow work", "fail install", "fail undo", "fail finish",
    "fail check", "fail refuse", "fail caches", "hold boundary", "fail write", "fail report", "second manager", "pause",
]  # fmt: skip

FAULTS: tuple[FaultKind, ...] = (
    "lose", "lose", "duplicate", "delay", "crash", "crash", "freeze", "freeze", "fail work", "slow work", "fail install",
    "fail install", "fail undo", "fail finish", "fail check", "fail refuse", "fail caches", "hold boundary", "fail write",
    "fail report", "second manager", "pause",
)  # fmt: skip

MOST_EVENTS = 10_000
"""A schedule has some hundreds."""

HOST = "this host"
STARTED = 1


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Fault:
    """One fault. It happens before event number `at` of the schedule, or to the first thing of its kind from then on.

    `pick` and `size` are in [0, 1): whom it concerns, and how long it lasts.
    """

    kind: FaultKind
    at: int
    pick: float
    size: float


class Process:
    """One simulated process. It belongs to a replica or to a trainer."""

    __slots__ = ("alive", "frozen_s", "frozen_until_s", "name", "party", "pid", "world")

    def __init__(self, world: World, name: str, party: str) -> None:
        world.last_pid += 1
        self.world = world
        self.name = name
        self.party = party
        """The replica or trainer whose promises its faults excuse."""
        self.pid = world.last_pid
        self.alive = True
        self.frozen_until_s = 0.0
        self.frozen_s = 0.0
        """How long it has stood still in all."""
        world.processes.append(self)


Timer: TypeAlias = tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]
"""One event of the heap: time, number, process, what is to be done, and its arguments."""


class Task:
    """A generator that runs in a process: it yields until when to sleep, and goes on earlier where there is news."""

    __slots__ = ("_again", "_alarm_s", "_running", "_until_s", "over", "process", "steps")

    def __init__(self, process: Process, steps: Generator[float, None, Any]) -> None:
        self.process = process
        self.steps = steps
        self.over = False
        self._running = False
        self._again = False
        self._until_s = self._alarm_s = process.world.now_s
        process.world.at(0.0, process, self._alarm, self._alarm_s)

    def news(self) -> None:
        """Something came that the task may wait for."""
        if self._running:
            self._again = True
        elif not self.over:
            self._resume()

    def _alarm(self, at_s: float) -> None:
        """The task is resumed if it sleeps no longer than until now; else it has been resumed before, and is looked at later."""
        if at_s == self._alarm_s and not self.over:
            self._alarm_s = math.inf
            if self._until_s <= self.process.world.now_s:
                self._resume()
            else:
                self._set_alarm()

    def _set_alarm(self) -> None:
        """One event of the heap is enough: an earlier one sets the next."""
        if self._until_s < self._alarm_s:
            self._alarm_s = self._until_s
            self.process.world.at_time(self._until_s, self.process, self._alarm, self._until_s)

    def _resume(self) -> None:
        world = self.process.world
        before, world.task, self._running = world.task, self, True
        try:
            while True:
                self._again = False
                self._until_s = next(self.steps)
                if not self._again:
                    break
        except StopIteration:
            self.over = True
            return
        finally:
            world.task, self._running = before, False
        self._set_alarm()


class World:
    """One simulated host. Everything that happens is an event at a time, in one order that the seed determines."""

    def __init__(self, chance: Random, faults: tuple[Fault, ...], *, traced: bool = False) -> None:
        self.chance = chance
        self.now_s = 100.0
        self.events = 0
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.task: Task | None = None
        self.last_pid = 1000
        self.touched: dict[str, float] = {}
        """Parties that a fault has concerned since they last took a version, and until when it lasts."""
        self.unchecked: list[Callable[[], None]] = []
        """Checks of what this event has changed."""
        self.crash: Callable[[Process], None] = lambda _process: None
        self.special: Callable[[Fault], None] = lambda _fault: None
        self.lines: list[str] | None = [] if traced else None
        self._faults = sorted(faults, key=lambda fault: fault.at, reverse=True)
        self.armed_faults: list[Fault] = []
        """They happen to the first thing of their kind."""
        self._heap: list[Timer] = []
        self._number = 0
        self._unique = 0

    def at(self, delay_s: float, process: Process | None, act: Callable[..., None], *arguments: Any) -> None:
        """Has `act` called in `process`; not if the process has ended by then, and later if it is frozen."""
        self._number = number = self._number + 1
        heappush(self._heap, (self.now_s + delay_s, number, process, act, arguments))

    def at_time(self, at_s: float, process: Process | None, act: Callable[..., None], *arguments: Any) -> None:
        """As `at`, at exactly that time: a clock that is one rounding error short of it would wake somebody for ever."""
        self._number = number = self._number + 1
        heappush(self._heap, (max(self.now_s, at_s), number, process, act, arguments))

    def soon(self) -> float:
        """A short random time."""
        return 0.0005 + 0.01 * self.chance.random()

    def unique(self, prefix: str) -> str:
        self._unique += 1
        return f"{prefix}{self._unique}"

    def note(self, text: str) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now_s - 100:10.4f} #{self.events:<4} {text}")

    def run(self, until: Callable[[], bool] | None = None, until_s: float = math.inf) -> None:
        """Runs events until `until()` holds after one, or the time has come."""
        heap, faults = self._heap, self._faults
        fault_at = faults[-1].at if faults else MOST_EVENTS
        while heap and heap[0][0] <= until_s:
            timer = heappop(heap)
            at_s, _, process, act, arguments = timer
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen_until_s > at_s:
                    heappush(heap, (process.frozen_until_s, *timer[1:]))
                    continue
            self.now_s = at_s
            self.events = number = self.events + 1
            if number >= fault_at:
                if number > MOST_EVENTS:
                    raise Violation(f"the job does not come to rest: {MOST_EVENTS} events")
                if faults:
                    self._fault(faults.pop())
                    fault_at = faults[-1].at if faults else MOST_EVENTS
                    if process is not None and (not process.alive or process.frozen_until_s > at_s):
                        heappush(heap, timer)
                        continue
            self.current = process
            act(*arguments)
            if self.unchecked:
                for check in self.unchecked:
                    check()
                self.unchecked.clear()
            if until is not None and until():
                return
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)

    # --- faults ------------------------------------------------------------------------------------------------------

    def touch(self, party: str, seconds: float = 0.0) -> None:
        """A fault concerns the party, for that long at least."""
        self.touched[party] = max(self.touched.get(party, 0.0), self.now_s + seconds)

    def recovered(self, party: str) -> None:
        """The party has done what it should; its faults are over, unless one lasts on."""
        if self.touched.get(party, 0.0) <= self.now_s:
            self.touched.pop(party, None)

    def armed(self, kind: FaultKind, party: str, longest_s: float = 0.0) -> Fault | None:
        """The fault of that kind that is due, if there is one: it happens now, to `party`, and lasts `longest_s` at most."""
        for fault in self.armed_faults:
            if fault.kind == kind:
                self.armed_faults.remove(fault)
                self.touch(party, longest_s)
                self.note(f"FAULT {kind} at {party}")
                return fault
        return None

    def faults_end(self) -> None:
        """From now on nothing fails."""
        self._faults.clear()
        self.armed_faults.clear()
        for process in self.processes:
            if process.frozen_until_s > self.now_s:
                self._freeze(process, 0.0)

    def _fault(self, fault: Fault) -> None:
        living = [process for process in self.processes if process.alive]
        process = living[int(fault.pick * len(living))]
        if fault.kind == "crash":
            self.touch(process.party)
            self.note(f"FAULT crash of {process.name}")
            self.crash(process)
        elif fault.kind == "freeze":
            seconds = 200 * fault.size**3
            self.touch(process.party, seconds)
            self.note(f"FAULT {process.name} stands still for {seconds:.1f} s")
            self._freeze(process, seconds)
        elif fault.kind in ("second manager", "pause"):
            self.special(fault)
        else:
            self.armed_faults.append(fault)

    def _freeze(self, process: Process, seconds: float) -> None:
        was_s = process.frozen_until_s
        before_s = max(0.0, was_s - self.now_s)
        process.frozen_until_s = until_s = self.now_s + seconds
        process.frozen_s += seconds - before_s
        if until_s < was_s:  # it wakes sooner, and so does what waits for that in the heap
            heap = self._heap
            heap[:] = [(until_s, *timer[1:]) if timer[2] is process and timer[0] == was_s else timer for timer in heap]
            heapify(heap)
