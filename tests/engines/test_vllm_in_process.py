"""A vLLM engine in the process of its caller, who alone steps it: nothing that the caller's thread does costs an update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import Faulty, engine_with_faults
from tests.engines.test_vllm_tokens import PROMPTS
from tests.support.checkpoints import load
from tests.support.engines import Driver
from trainer_adapters import SyncManager

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    with engine_with_faults(runtime, checkpoint, "in-process", in_process=True) as engine:
        yield engine


def update_while(engine: Faulty, requests: int) -> list[str]:
    """An update that waits for the requests that run, 8 at most. Once none is left, nobody steps the engine. Returns the names
    of the requests."""
    assert isinstance(engine.engine, Driver)
    sent = engine.engine.submit(PROMPTS[:1] * requests, 200)
    engine.engine.wait_for_tokens(sent[:1], 2)
    with SyncManager(in_flight="drain", timeout_s=60) as sync:
        engine.update(sync=sync)
    return sent


def test_an_update_that_waits_for_requests_is_committed_when_the_last_one_ends(engine: Faulty) -> None:
    (sent,) = update_while(engine, 1)
    assert isinstance(engine.engine, Driver)
    (done,) = engine.engine.wait([sent])
    assert len(done["tokens"]) == 200
    engine.assert_serves()


def test_a_batch_that_vllm_planned_ahead_and_nobody_steps_any_more_delays_no_update_that_waits_for_requests(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    """Asynchronous scheduling, vLLM's default on a GPU: when the last request ends, a batch is left."""
    old, new = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    with Driver(runtime, in_process=True, WEIGHTWIRE_TEST_ASYNC="1") as engine:
        engine.open(old, async_scheduling=True)
        before = engine.tokens(PROMPTS[:1])
        with SyncManager(in_flight="drain", timeout_s=120) as manager:
            manager.update(load(new), 1)  # nothing runs
            assert engine.tokens(PROMPTS[:1]) != before
            names = engine.submit(PROMPTS[:1], 200)
            engine.wait_for_tokens(names, 2)
            manager.update(load(old), 2)
            assert len(engine.wait(names)[0]["tokens"]) == 200
            assert engine.tokens(PROMPTS[:1]) == before


def test_ctrl_c_while_weights_are_installed_ends_no_installation(engine: Faulty) -> None:
    engine.order({"rank": 0, "step": "install", "when": "interrupt"})
    for _ in range(3):
        update_while(engine, 12)  # their answers may be lost: vLLM hands on what a step made only after the step
    engine.order()
    engine.assert_serves()
