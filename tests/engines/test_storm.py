"""The storm (`tests/manager/test_storm.py`) on real engines: troubles of every kind, drawn from a seed, beside updates with the
default limits while requests run.

`WEIGHTWIRE_TEST_STORM=100` runs that many troubles for each engine and each seed (`WEIGHTWIRE_TEST_SEEDS=1,2`), long stops
among them; `WEIGHTWIRE_TEST_SOAK=2000` that many updates without end. Both print what they saw.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.engines.conftest import Checkpoint
from tests.support.engine_storm import COUNT, PROMPTS, EngineStorm, expected
from tests.support.engines import Driver
from tests.support.rig import runtime as directory_of_its_own
from tests.support.soak import Soak
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EVENTS = int(os.environ.get("WEIGHTWIRE_TEST_STORM", "0"))
SEEDS = [int(seed) for seed in os.environ.get("WEIGHTWIRE_TEST_SEEDS", "179").split(",")]
FEW = 4
"""Events in the ordinary run; of the default seed: a trainer, a worker and a coordinator killed, a worker stopped, a pause, and
an installation that can't be undone."""
MODELS = 6
EVENT_S = 60
UPDATES = int(os.environ.get("WEIGHTWIRE_TEST_SOAK", "40"))
LOOK_EVERY = 10
"""After so many updates of a soak it is looked whether the engine answers with the last one."""


@pytest.mark.timeout(900 + EVENT_S * EVENTS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_whatever_happens_each_engine_serves_one_version_or_refuses_and_reports_say_which(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, engine: str, seed: int
) -> None:
    models = [checkpoint("qwen3", tied=True, seed=i) for i in range(1, MODELS + 1)]
    with directory_of_its_own(monkeypatch) as directory:
        monkeypatch.setenv("WEIGHTWIRE_JOB", "storm")
        with EngineStorm(
            engine, models, directory, seed, long_stops=bool(EVENTS), say=lambda line: print(line, flush=True)
        ) as storm:
            storm.run(EVENTS or FEW)
    print(f"{engine}, seed {seed}: {dict(storm.seen)}; the longest waits: {storm.said_of_waits()}", flush=True)
    print(f"{storm.crossing} requests ran across a commit; {storm.computed_anew} tokens computed anew", flush=True)
    assert storm.violations == []
    assert storm.crossing, "no request ran across a commit"


@pytest.mark.timeout(900 + UPDATES)
def test_updates_without_end_take_no_more_memory_and_no_more_descriptors_of_an_engine(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    models = [checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2)]
    weights = [load_file(model / "model.safetensors") for model in models]
    with Driver(runtime) as driver:
        driver.open(models[0])
        (card,) = driver.cards
        running: list[str] = []

        def generate(version: int) -> None:
            """Requests run beside the next updates; now and then all of them end, and the engine is asked for known tokens."""
            if version % LOOK_EVERY == 1:
                running.extend(driver.submit(PROMPTS, 100))
            elif version % LOOK_EVERY == 0:
                assert {request["finish_reason"] for request in driver.wait(running)} == {"length"}
                running.clear()
                assert driver.tokens(PROMPTS, COUNT) == expected(models[version % 2])

        gc.collect()  # what earlier tests left to the collector is not of these updates
        soak = Soak([card], lambda version: ModuleAdapter(weights[version % 2]), {"engine": card.pid})
        soak.run(UPDATES, generate)
        soak.assert_flat()
    assert driver.leftovers() == []
