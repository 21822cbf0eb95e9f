"""`python -m tests.simulation --seeds 100000`, or `--seed 1234` to replay one; see the package's docstring."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

from tests.simulation.job import Result, drawn, run, shrunk
from tests.simulation.many import run_many
from tests.simulation.shell import simulated

SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay one schedule and print its events")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with simulated():
        if arguments.seed is not None:
            result = run(drawn(arguments.seed), traced=True)
            show(result)
            return bool(result.violation)
        seeds = range(arguments.first, arguments.first + arguments.seeds)
        return bool(run_all(seeds, arguments.processes))


def run_all(seeds: range, processes: int) -> int:
    """Runs the schedules; prints how fast, and what failed. Returns the number of violations."""
    began_s = time.monotonic()
    outcome = run_many(seeds, processes)
    failed = sorted(outcome.violations.items())
    print(
        f"{outcome.schedules} schedules, {outcome.events} events, {len(failed)} violations; "
        f"{outcome.schedules / outcome.cpu_s:.0f} schedules per second of CPU, "
        f"{outcome.schedules / (time.monotonic() - began_s):.0f} per second in {processes} processes"
    )
    for seed, violation in failed[:20]:
        print(f"  seed {seed}: {violation}")
    for seed, _ in failed[:SHOWN]:
        show(run(shrunk(drawn(seed)), traced=True))
    return len(failed)


def show(result: Result) -> None:
    plan = result.plan
    print(f"seed {plan.seed}: {result.violation or 'every promise held'}")
    print(
        f"  {len(plan.replicas)} replicas of {plan.replicas} ranks, {plan.trainer_ranks} trainer ranks, {plan.settings}"
    )
    for fault in plan.faults:
        print(f"  {fault}")
    for line in result.lines:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
