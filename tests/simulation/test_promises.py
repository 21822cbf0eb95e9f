"""The promises hold in thousands of schedules, and the simulator finds old defects that are put back."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from inference_plugin.engines import commit
from inference_plugin.engines.actions import Ask, Publish, Steps
from inference_plugin.engines.commit import CommitPlan
from inference_plugin.engines.standing import Standing
from inference_plugin.wire.errors import PeerLost
from inference_plugin.worker.engine_side import EngineSide
from inference_plugin.worker.events import StartUndo, Undone
from inference_plugin.worker.group import WeightUpdateGroup
from tests.simulation.job import Result, drawn, run, shrunk
from tests.simulation.many import run_many
from tests.simulation.shell import simulated
from tests.simulation.world import FAULTS, Fault, FaultKind, Process, World
from trainer_adapters.fleet.session import worker_connections
from trainer_adapters.update.leases import Leases
from trainer_adapters.update.machine import TransactionMachine

SCHEDULES = 500_000 if os.environ.get("WEIGHTWIRE_TEST_FULL") else 5_000
"""`make simulate SEEDS=1000000` runs more."""


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with simulated():
        yield
    logging.disable(logging.NOTSET)


def first_violation(seeds: int, kinds: Sequence[FaultKind] = FAULTS) -> Result | None:
    return next((result for seed in range(seeds) if (result := run(drawn(seed, kinds))).violation), None)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 15 minutes of computing on two slow and busy cores; a schedule that hangs is a violation
def test_every_promise_holds_in_each_schedule() -> None:
    outcome = run_many(range(SCHEDULES), len(os.sched_getaffinity(0)), most_violations=1)
    if outcome.violations:
        seed, violation = min(outcome.violations.items())
        fewer = run(shrunk(drawn(seed)), traced=True)
        pytest.fail(f"seed {seed}: {violation}\n{fewer.plan}\n" + "\n".join(fewer.lines))
    assert outcome.schedules == SCHEDULES


def test_several_processes_run_what_one_runs() -> None:
    results = [run(drawn(seed)) for seed in range(5, 25)]
    outcome = run_many(range(5, 25), 2, portion=7)
    assert (outcome.schedules, outcome.violations) == (20, {})
    assert outcome.events == sum(result.events for result in results)


def test_a_seed_determines_everything() -> None:
    for seed in range(20):
        first, second = run(drawn(seed), traced=True), run(drawn(seed), traced=True)
        assert first == second and first.events > 30


# --- defects that are put back ----------------------------------------------------------------------------------------


def test_a_process_that_is_woken_early_does_at_once_what_it_put_off() -> None:
    """It waited on for the end of its standstill, and its update was called too long (seed 900028348)."""
    world = World(Random(0), (Fault("freeze", at=1, pick=0.0, size=0.9),))
    process = Process(world, "worker", "replica")
    ran_at_s: list[float] = []
    world.at(1.0, process, lambda: ran_at_s.append(world.now_s))
    world.at(2.0, None, world.faults_end)
    world.run()
    assert ran_at_s == [102.0]


def publish_before_refusing(plan: CommitPlan, standing: Standing, reason: str) -> Steps[None]:
    standing.torn[plan.group] = reason
    yield Publish()
    yield from standing.refuse_while_torn()
    try:
        yield Ask(plan.operation("tear", reason=reason))
    except PeerLost:
        return


def renew_one_after_the_other(self: Leases, channels: dict[str, Any]) -> None:
    """Waits for each worker's answer before it asks the next."""
    for card in self.renewed:
        for address, connect in worker_connections(card, self.silence_s).items():
            if address not in channels:
                channels[address] = connect()
            if channels[address].is_open:
                return
            channels[address].send(self.request)


def undo_on_the_first_rank_only(self: EngineSide, reason: str, whole: Any = EngineSide.undo) -> None:
    if self.rank == 0:
        whole(self, reason)
    else:
        self.ask(StartUndo, self.group.name)
        self.ask(Undone, self.group.name, reason)


DEFECTS: dict[str, tuple[Any, str, Any, str]] = {
    "a torn replica is published before it refuses": (commit, "tear", publish_before_refusing, "P1"),
    "what raises after a commit makes the update fail": (
        TransactionMachine, "has_committed", property(lambda _self: False), "P8",
    ),
    "leases are renewed one after the other": (Leases, "renew_round", renew_one_after_the_other, "P3"),
    "an undo is left out on one rank": (EngineSide, "undo", undo_on_the_first_rank_only, "P1"),
    "what is streamed outlives its trainer": (
        WeightUpdateGroup, "is_streaming", property(lambda _self: False), "nobody will end",
    ),
    "a rank that fails is not looked at": (commit, "first_error", lambda _replies: None, "P8"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_the_simulator_finds_an_old_defect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, defect, promise = DEFECTS[name]
    monkeypatch.setattr(where, attribute, defect)
    found = first_violation(1000, ("freeze",) if where is Leases else FAULTS)
    assert found is not None
    print(f"{name}: seed {found.plan.seed}: {found.violation}")
    assert promise in found.violation
    fewer = shrunk(found.plan)
    assert run(fewer).violation and 0 < len(fewer.faults) <= len(found.plan.faults)
