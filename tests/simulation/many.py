"""Many schedules, shared by several processes."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.job import drawn, run
from tests.simulation.shell import simulated

__all__ = ["Outcome", "run_many"]

PORTION = 250
"""Schedules that a process runs before it reports."""

_entered = contextlib.ExitStack()


@dataclass
class Outcome:
    """What came of schedules: how many ran, their events, seconds of CPU, and by seed the promise that was broken."""

    schedules: int = 0
    events: int = 0
    cpu_s: float = 0.0
    violations: dict[int, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.violations |= other.violations


def run_many(seeds: range, processes: int, *, most_violations: float = math.inf, portion: int = PORTION) -> Outcome:
    """Runs the schedules of these seeds in this many processes; stops soon after `most_violations`."""
    outcome = Outcome()
    with contextlib.closing(_portions(seeds, processes, portion)) as portions:
        for each in portions:
            outcome.add(each)
            if len(outcome.violations) >= most_violations:
                break
    return outcome


def _portions(seeds: range, processes: int, portion: int) -> Iterator[Outcome]:
    portions = [seeds[first : first + portion] for first in range(0, len(seeds), portion)]
    # Not forked: the parent has threads (pytest's, torch's).
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(portions)), initializer=_enter) as pool:
        yield from pool.imap_unordered(_run, portions)


def _enter() -> None:
    logging.disable(logging.CRITICAL)
    _entered.enter_context(simulated())


def _run(seeds: range) -> Outcome:
    began_s = time.process_time()
    outcome = Outcome()
    for seed in seeds:
        result = run(drawn(seed))
        outcome.schedules += 1
        outcome.events += result.events
        if result.violation:
            outcome.violations[seed] = result.violation
    outcome.cpu_s = time.process_time() - began_s
    return outcome
