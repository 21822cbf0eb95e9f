"""SGLang's hierarchical cache, which copies cached keys and values to the host and finds them there again, with the tests' copies
in the place of a GPU's."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.messages import InFlight
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import weights
from tests.support.greedy import greedy_batch
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver
from tests.support.sglang_host_cache import OPTIONS, VARIABLE
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COPY_S, COUNT, LONG = "0.05", 6, 60
PROMPTS = [[random.Random(seed).randrange(5, 500) for _ in range(LONG)] for seed in range(5)]
OTHERS = [[seed + 5, 9] * 10 for seed in range(2)]
ROOM = {"max_total_tokens": 260, "max_running_requests": 3, "hicache_ratio": 4.0}
"""Fewer tokens than the prompts have, and as many as run at once."""


@functools.cache
def says(model: Path) -> list[list[int]]:
    return greedy_batch(model, PROMPTS, COUNT)


@pytest.fixture(scope="module")
def engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[SglangDriver]:
    with SglangDriver(runtime, **{VARIABLE: COPY_S}) as driver:
        driver.open(checkpoint("llama", tied=False, seed=1), **OPTIONS, **ROOM)
        yield driver


def cached(engine: SglangDriver, model: Path) -> list[int]:
    """How much of each prompt is found, in the cache or on the host. The answers are the model's."""
    done = [engine.generate([prompt], COUNT)[0] for prompt in PROMPTS]  # one by one: not all have room
    assert [one["tokens"] for one in done] == says(model)
    return [one["cached"] for one in done]


@pytest.mark.parametrize(
    ("policy", "paused"),
    [("recompute", False), ("recompute", True), ("abort", False), ("abort", True), ("keep", False), ("drain", False)],
)
def test_an_update_comes_while_the_cache_is_copied_to_the_host_and_what_lies_there_serves_no_new_request(
    engine: SglangDriver, checkpoint: Checkpoint, policy: InFlight, paused: bool
) -> None:
    """`paused`: by the user, so that SGLang notices no end of a copy."""
    with SyncManager(in_flight=policy, timeout_s=120) as manager:
        for model in (checkpoint("llama", tied=False, seed=seed) for seed in (2, 1)):
            flight = engine.submit(OTHERS, 30)
            engine.wait_for_tokens(flight, 2)
            if paused:
                engine.call("own_pause")
            (report,) = manager.update(ModuleAdapter(weights(model))).replicas
            assert report.status == "committed"
            if paused:
                engine.call("own_resume")
            assert all(done["finished"] for done in engine.wait(flight))
            assert max(cached(engine, model)) <= 1  # two prompts may begin with the same token
            assert min(cached(engine, model)) == LONG - 1
