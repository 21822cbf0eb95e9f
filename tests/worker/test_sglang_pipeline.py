"""SGLang's loop for pipelines (`event_loop_pp`), without SGLang: each stage a thread, each connection a queue. The real
`Pipeline` says when the ranks take a turn. There are more stages and slots than an engine on this host can have.

What a stage receives it waits for, as in SGLang; so a turn that a stage would take too early ends in a timeout.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inference_plugin.engines.sglang.pipeline import Pipeline
from inference_plugin.engines.sglang.turn import Turn

WAIT_S = 30
ROUNDS = 60
TURNS = 12
STEPS = 9
"""Of each request, its prompt's included."""


def pauses(version: int) -> bool:
    """Whether the turn that brings this version leaves the replica paused."""
    return version % 3 == 1


class Batch:
    """What a `ScheduleBatch` is to the loop. A request is a list of the steps that it has taken."""

    chunked_req = None

    def __init__(self, reqs: list[list[int]], *, begins: bool) -> None:
        self.reqs = reqs
        self.forward_mode = SimpleNamespace(is_extend=lambda: begins)

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self, leave: list[list[int]] | None = None) -> None:
        assert not leave
        self.reqs = [request for request in self.reqs if len(request) < STEPS]

    def merge_batch(self, other: Batch) -> None:
        assert not [r for r in other.reqs if any(r is mine for mine in self.reqs)], "a request joined twice"
        self.reqs = [*self.reqs, *other.reqs]


class Job:
    """A pipeline and its connections. `turns`: in which slots, counted from the start, a turn arrives."""

    def __init__(self, stages: int, depth: int, seed: int) -> None:
        chance = random.Random(seed)
        self.stages, self.slots = stages, stages + depth
        self.depth = depth
        self.turns = set(chance.sample(range(ROUNDS * self.slots // 2), TURNS))
        self.arrivals = {at: chance.randrange(3) for at in range(ROUNDS * self.slots // 3)}
        self.asked, self.proxies, self.outputs = ([queue.Queue() for _ in range(stages)] for _ in range(3))  # type: ignore[var-annotated]
        self.meet = threading.Barrier(stages)
        self.taken: list[list[int]] = [[] for _ in range(stages)]
        self.steps: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
        """Of each stage: the version with which it computed each micro-batch, and of how many requests that was."""

    def run_stage(self, stage: int) -> None:
        try:
            Stage(self, stage).run()
        except BaseException:
            self.meet.abort()
            raise


class Stage:
    """A scheduler: its own copy of all requests."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.stage = job, stage
        self.version = 0
        self.now = 0
        self.waiting: list[list[int]] = []
        self.requests: list[list[int]] = []
        slots = job.slots
        self.running_mbs = [Batch([], begins=False) for _ in range(slots)]
        self.mbs: list[Batch | None] = [None] * slots
        self.last_mbs: list[Batch | None] = [None] * slots
        self.running_batch, self.last_batch = self.running_mbs[0], self.last_mbs[0]
        self.chunked_req = None
        self._engine_paused = False
        self.pipeline = Pipeline(self)

    def run(self) -> None:
        job, last = self.job, self.job.stages - 1
        computed: deque[Batch] = deque()
        outputs: Batch | None = None
        for self.now in range(ROUNDS * job.slots):
            slot = self.now % job.slots
            follows = (slot + 1) % job.slots
            self.running_batch, self.last_batch = self.running_mbs[slot], self.last_mbs[slot]
            asked = self.receive_requests()
            if self.stage < last:
                job.asked[self.stage + 1].put(asked)
            plan = self.pipeline.plan(Stage.plan, self.running_batch, self.last_batch)
            self.running_mbs[slot], self.mbs[slot] = plan.running_batch, plan.batch_to_run
            batch = self.mbs[slot]
            if batch is not None and self.stage:
                job.proxies[self.stage].get(timeout=WAIT_S)
            if job.depth:
                received = self.exchange(computed, outputs, (slot + job.stages) % job.slots, follows)
            if batch is not None:
                job.steps[self.stage].append((self.version, len(batch.reqs)))
                computed.append(batch)
            if not job.depth:
                received = self.exchange(computed, outputs, (slot + job.stages) % job.slots, follows)
            if (done := self.mbs[follows]) is not None:
                for request in done.reqs:
                    request.append(self.version)
                self.last_mbs[follows] = done
            if batch is not None and self.stage < last:
                job.proxies[self.stage + 1].put(batch)
            outputs = received

    def receive_requests(self) -> list[Any]:
        if self.stage:
            asked: list[Any] = self.job.asked[self.stage].get(timeout=WAIT_S)
        else:
            asked = ["request"] * self.job.arrivals.get(self.now, 0)
            asked += [Turn()] * (self.now in self.job.turns)
        for one in asked:
            if isinstance(one, Turn):
                self.pipeline.announce(self.take_turn, one)
            else:
                self.waiting.append([])
                self.requests.append(self.waiting[-1])
        return asked

    def exchange(self, computed: deque[Batch], outputs: Batch | None, sent: int, follows: int) -> Batch | None:
        """What the last stage has computed goes round, from the first stage on."""
        if self.stage == self.job.stages - 1:
            if self.mbs[sent] is not None:
                self.job.outputs[0].put(computed.popleft())
        elif outputs is not None:
            self.job.outputs[self.stage + 1].put(outputs)
        if self.mbs[follows] is None:
            return None
        received: Batch = self.job.outputs[self.stage].get(timeout=WAIT_S)
        return received

    def plan(self, running_batch: Batch, last_batch: Batch | None) -> Any:
        """SGLang's: a new batch of what waits, or else the next step of what runs."""
        if last_batch is not None and last_batch.forward_mode.is_extend():
            last_batch.filter_batch()
            if running_batch.is_empty():
                running_batch = last_batch
            elif not last_batch.is_empty():
                running_batch.merge_batch(last_batch)
        running_batch.filter_batch()
        if self.waiting:
            begun, self.waiting = Batch(self.waiting, begins=True), []
            return SimpleNamespace(batch_to_run=begun, running_batch=running_batch)
        if running_batch.is_empty():
            return SimpleNamespace(batch_to_run=None, running_batch=running_batch)
        running_batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
        return SimpleNamespace(batch_to_run=running_batch, running_batch=running_batch)

    def take_turn(self, _: Turn) -> None:
        self.job.meet.wait(WAIT_S)  # all ranks are here, or this times out
        assert all(batch is None for batch in (*self.mbs, *self.last_mbs))
        in_slots = [request for batch in self.running_mbs for request in batch.reqs]
        known = [id(request) for request in (*in_slots, *self.waiting)]
        assert sorted(known) == sorted(id(request) for request in self.requests if len(request) < STEPS)
        self.version += 1
        self._engine_paused = pauses(self.version)
        self.job.taken[self.stage].append(self.now)
        self.job.meet.wait(WAIT_S)


@pytest.fixture(autouse=True)
def plan_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.schedule_batch"]
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].NextBatchPlan = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_all_stages_take_each_turn_in_one_slot_and_compute_each_micro_batch_with_one_version(
    stages: int, depth: int, seed: int
) -> None:
    job = Job(stages, depth, seed)
    with ThreadPoolExecutor(stages) as pool:
        for done in [pool.submit(partial(job.run_stage, stage)) for stage in range(stages)]:
            done.result(4 * WAIT_S)
    assert job.taken[0] and all(taken == job.taken[0] for taken in job.taken)
    assert max(at - max(t for t in job.turns if t <= at) for at in job.taken[0]) <= job.slots, "one round of the slots"
    assert all(steps == job.steps[0] for steps in job.steps)
    versions = {version for version, _ in job.steps[0]}
    assert len(versions) > 3, "steps ran between the turns"
    assert not [version for version in versions if pauses(version)], "none while paused"
