"""Real SGLang engines of two pipeline stages: pauses and sleep.

The tests that are imported here run with this module's `engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import test_pause
from tests.engines.conftest import Checkpoint
from tests.engines.test_pause import (  # noqa: F401 -- collected here once more
    Pausable,
    test_a_pause_that_keeps_requests_may_hold_an_update_that_aborts_or_recomputes_them,
    test_no_step_runs_while_paused_updates_are_taken_and_requests_go_on_with_the_last,
    test_requests_in_flight_follow_the_policy_of_the_pause,
)
from tests.engines.test_sglang_pipeline import STAGES
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Pausable]:
    models = checkpoint("qwen3", tied=True, seed=1), checkpoint("qwen3", tied=True, seed=2)
    with SglangDriver(runtime, pp=STAGES, WEIGHTWIRE_TEST_ALLOCATOR="1") as driver:
        driver.open(models[0], enable_weights_cpu_backup=True)
        yield Pausable("sglang", driver, *models)
    assert driver.leftovers() == []


def test_asleep_it_takes_no_update_before_its_weights_are_awake_and_goes_on_with_the_new_ones(engine: Pausable) -> None:
    test_pause.test_asleep_it_takes_no_update_before_its_weights_are_awake_and_goes_on_with_the_new_ones(engine)


def test_discarded_weights_serve_nobody_until_a_full_update(engine: Pausable) -> None:
    test_pause.test_discarded_weights_serve_nobody_until_a_full_update(engine)
