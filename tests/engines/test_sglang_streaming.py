"""`install="streaming"` on a real SGLang with two ranks: the tests of `test_vllm_streaming`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import PLUGIN, Faulty
from tests.engines.test_vllm_streaming import (  # noqa: F401 -- collected here once more
    check_a_worker_killed_amid_the_bytes,
    test_a_killed_trainer_rank_fails_the_update_which_says_that_the_replica_is_torn,
    test_a_manager_killed_while_it_streams_tears_the_replica_until_the_next_update,
    test_a_paused_replica_takes_what_is_streamed_and_stays_paused,
    test_a_silent_worker_fails_the_update_by_the_deadline_and_the_next_one_heals,
    test_a_trainer_that_wakes_late_writes_into_nothing_that_is_served,
    test_an_installation_that_fails_after_the_bytes_tears_the_replica,
    test_requests_in_flight_wait_while_it_streams_and_go_on_with_the_new_version,
    test_what_fails_before_the_first_byte_leaves_the_old_version,
    tp2,
)
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("qwen3_wide", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-sglang-streaming"
    faults.write_text("[]")
    with SglangDriver(runtime, tp=2, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(model_a)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


def test_a_worker_killed_while_it_streams_takes_its_engine_down_and_the_manager_is_told(tp2: Faulty) -> None:  # noqa: F811
    """The last one for this engine."""
    assert isinstance(tp2.engine, SglangDriver)
    tp2.engine.ends_itself = True
    check_a_worker_killed_amid_the_bytes(tp2)
