"""Pause, resume, sleep and wake-up of real engines on two ranks, through the manager.

That no step runs while an engine is paused is shown by versions: of two that are committed within one pause no token
carries the first. The memory that sleep releases is a stand-in's: engines on a CPU have no allocator that could.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.engines.transformers import TransformersEngine
from inference_plugin.wire.errors import EngineUnsupported, ReplicaAsleep
from inference_plugin.wire.reports import PauseReport
from tests.engines.conftest import Checkpoint
from tests.engines.test_transformers_engine import TransformersDriver
from tests.engines.test_vllm_one_version import Replay
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import ROOT, Driver, eventually
from tests.support.managers import SyncManager
from tests.support.rig import runtime as directory_of_its_own
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = PROMPTS[1]
LONG = {"vllm": 300, "sglang": 200, "transformers": 300}
"""Tokens of a request that is to run across a pause: more than are made while a test looks for the first of them, mostly."""
TRIES = 20

Met = tuple[PauseReport, list[str]]
"""How the replicas stand, and the requests that run."""


class Pausable:
    """An engine, its two models (A first), and the version that was committed last: odd ones are B."""

    def __init__(self, name: str, driver: Driver, model_a: Path, model_b: Path) -> None:
        self.driver = driver
        self.long = LONG[name]
        self.models = model_a, model_b
        self.version = 0

    def next(self, manager: SyncManager, which: str) -> str:
        """Updates to the next version that is of that model."""
        self.version += 1 + (self.version % 2 == "AB".index(which))
        report = manager.update(source(self.models["AB".index(which)]), self.version)
        assert [r.status for r in report.replicas] == ["committed"]
        return str(self.version)

    def running(self, count: int = 2) -> list[str]:
        """Requests that run."""
        names = self.driver.submit([PROMPT] * count, self.long)
        self.driver.wait_for_tokens(names, 3)
        return names

    @contextlib.contextmanager
    def met(self, stop: Callable[[], AbstractContextManager[PauseReport]], policy: str) -> Iterator[Met]:
        """`stop` while requests run. It is tried again where they had ended before it came, as they may on a slow machine."""
        for _ in range(TRIES):
            running = self.running()
            with stop() as report:
                if policy == "abort":
                    in_time = {r["finish_reason"] for r in self.driver.wait(running)} == {"abort"}
                else:
                    in_time = policy == "drain" or not any(r["finished"] for r in self.driver.look(running))
                if in_time:
                    yield report, running
                    return
        raise AssertionError(f"requests of {self.long} tokens always ended too soon")

    def stands(self) -> tuple[str, str]:
        (card,) = self.driver.cards
        return card.state, card.detail

    def assert_serves(self, which: str) -> None:
        assert self.stands() == ("serving", "")
        assert self.driver.tokens(PROMPTS, COUNT) == reference(self.models["AB".index(which)])


CAN_SLEEP = pytest.mark.parametrize("engine", ["vllm", "sglang"], indirect=True)


@pytest.fixture(scope="module", params=["vllm", "sglang", "transformers"])
def engine(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Pausable]:
    models = checkpoint("qwen3", tied=True, seed=1), checkpoint("qwen3", tied=True, seed=2)
    if request.param == "vllm":
        with Driver(runtime) as driver:
            driver.open(models[0], plain=True, tensor_parallel_size=2, max_model_len=1024)
            with SyncManager(timeout_s=180) as manager, pytest.raises(EngineUnsupported, match="--enable-sleep-mode"):
                manager.sleep(1)
            assert driver.cards[0].state == "serving"
            driver.rpc("ext_give_allocator")
            yield Pausable(request.param, driver, *models)
        assert driver.leftovers() == []
    elif request.param == "transformers":
        with (
            pytest.MonkeyPatch.context() as patch,
            directory_of_its_own(patch),
            TransformersEngine(models[0]) as one,
        ):
            yield Pausable(request.param, TransformersDriver(one), *models)  # type: ignore[arg-type]
    else:
        with SglangDriver(runtime, tp=2, WEIGHTWIRE_TEST_ALLOCATOR="1") as driver:
            driver.open(models[0], enable_weights_cpu_backup=True)
            yield Pausable(request.param, driver, *models)
        assert driver.leftovers() == []


def test_no_step_runs_while_paused_updates_are_taken_and_requests_go_on_with_the_last(engine: Pausable) -> None:
    with SyncManager(timeout_s=180) as manager:
        before = engine.next(manager, "A")
        with engine.met(manager.paused, "keep") as (report, running):
            assert [r.state for r in report.replicas] == ["paused"]
            engine.next(manager, "B")
            assert manager.verify(source(engine.models[1])).ok
            engine.next(manager, "A")
            last = engine.next(manager, "B")
            late = engine.driver.submit([PROMPT], COUNT)
            assert engine.stands()[0] == "paused" and manager.verify(source(engine.models[1])).ok
            assert not any(r["finished"] for r in engine.driver.look([*running, *late]))
        done = engine.driver.wait(running)
        (fresh,) = engine.driver.wait(late)
    assert [(r["finish_reason"], len(r["tokens"])) for r in done] == [("length", engine.long)] * 2
    assert [sorted(set(r["versions"]), key=int) for r in done] == [[before, last]] * 2
    assert all(r["versions"] == sorted(r["versions"], key=int) for r in done)
    replay = Replay(engine.models, "keep")
    replay.check(PROMPT, done[0]["tokens"], done[0]["versions"])
    assert replay.unexplained == 0
    assert (fresh["tokens"], set(fresh["versions"])) == (reference(engine.models[1])[1], {last})
    engine.assert_serves("B")


@pytest.mark.parametrize("in_flight", ["abort", "drain"])
def test_requests_in_flight_follow_the_policy_of_the_pause(engine: Pausable, in_flight: Any) -> None:
    with SyncManager(timeout_s=180, in_flight=in_flight) as manager:
        before = engine.next(manager, "A")
        with engine.met(manager.paused, in_flight) as (_, running):
            late = engine.driver.submit([PROMPT], COUNT)
            after = engine.next(manager, "B")
        done = engine.driver.wait(running)
        assert [set(r["versions"]) for r in engine.driver.wait(late)] == [{after}]
    for request in done:
        assert request["finish_reason"] == ("abort" if in_flight == "abort" else "length")
        assert set(request["versions"]) == {before}
    engine.assert_serves("B")


def test_a_pause_that_keeps_requests_may_hold_an_update_that_aborts_or_recomputes_them(engine: Pausable) -> None:
    for in_flight, reason in (("abort", "abort"), ("recompute", "length")):
        with SyncManager(timeout_s=180, in_flight=in_flight) as manager:  # type: ignore[arg-type]
            before = engine.next(manager, "A")
            with engine.met(partial(manager.paused, "keep"), "keep") as (_, running):
                after = engine.next(manager, "B")
            done = engine.driver.wait(running)
        assert [r["finish_reason"] for r in done] == [reason] * 2
        assert [set(r["versions"]) for r in done] == [{before} if reason == "abort" else {before, after}] * 2
        engine.assert_serves("B")


PAUSE_AND_WAIT = """
import signal
from trainer_adapters import SyncManager
manager = SyncManager(timeout_s=180, lease_s=600)
print(*(replica.state for replica in manager.{verb}().replicas), flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("engine", "verb"),
    [("vllm", "sleep"), ("sglang", "pause"), ("transformers", "pause")],
    indirect=["engine"],
)
def test_a_manager_that_is_killed_leaves_no_engine_standing(engine: Pausable, verb: str) -> None:
    running = engine.running()
    command = [sys.executable, "-c", PAUSE_AND_WAIT.format(verb=verb)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline().split() == ["paused" if verb == "pause" else "asleep"]
        assert engine.stands()[0] in ("paused", "asleep")
        killed.kill()
    eventually(lambda: engine.stands()[0] == "serving", what="the engine to go on")
    assert [r["finish_reason"] for r in engine.driver.wait(running)] == ["length"] * 2
    engine.assert_serves("AB"[engine.version % 2])


@contextlib.contextmanager
def asleep(manager: SyncManager) -> Iterator[PauseReport]:
    try:
        yield manager.sleep(1)
    finally:
        manager.wake_up()


@CAN_SLEEP
def test_asleep_it_takes_no_update_before_its_weights_are_awake_and_goes_on_with_the_new_ones(
    engine: Pausable,
) -> None:
    with SyncManager(timeout_s=180) as manager:
        engine.next(manager, "A")
        with engine.met(partial(asleep, manager), "keep") as (report, running):
            assert [r.asleep for r in report.replicas] == [("kv_cache", "weights")]
            with pytest.raises(ReplicaAsleep, match=r"call wake_up\(tags=\['weights'\]\) first"):
                manager.update(source(engine.models[1]), engine.version + 1)
            manager.wake_up(["weights"])
            assert manager.verify(source(engine.models[0])).ok, "level 1 brings them back"
            after = engine.next(manager, "B")
            manager.wake_up(["kv_cache"])
        done = engine.driver.wait(running)
    assert [(r["finish_reason"], r["versions"][-1]) for r in done] == [("length", after)] * 2
    engine.assert_serves("B")


@CAN_SLEEP
def test_discarded_weights_serve_nobody_until_a_full_update(engine: Pausable) -> None:
    with SyncManager(timeout_s=180) as manager:
        engine.next(manager, "A")
        manager.sleep(2)
        assert [r.state for r in manager.wake_up().replicas] == ["torn"]
        for request in engine.driver.generate([PROMPT], COUNT):
            assert request["finish_reason"] == "error" and "level 2 discarded the weights" in request["reason"], request
        engine.next(manager, "B")
    engine.assert_serves("B")


@pytest.mark.parametrize("engine", ["transformers"], indirect=True)
def test_an_engine_that_cannot_sleep_says_so_and_goes_on(engine: Pausable) -> None:
    with SyncManager(timeout_s=180) as manager:
        engine.next(manager, "A")
        with pytest.raises(EngineUnsupported, match="no sleep mode") as raised:
            manager.sleep()
    assert raised.value.hint == "pause() stops generation on every engine, and releases no memory"
    engine.assert_serves("A")


def test_the_colocated_example_pauses_where_the_engine_cannot_sleep(checkpoint: Checkpoint) -> None:
    model = checkpoint("llama", tied=False, seed=1)
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "colocated" / "run.py"), "--model", str(model), "--steps", "2"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    *steps, end = [json.loads(line) for line in ran.stdout.splitlines()]
    assert steps == [{"version": version, "while training": ["paused"]} for version in (1, 2)]
    assert end == {"verified": True, "answers": 2}
    assert "paused instead of put to sleep: vLLM was started without --enable-sleep-mode" in ran.stderr
