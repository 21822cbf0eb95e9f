"""A real vLLM of three pipeline stages: what fails in the middle of an update.

The tests that are imported here run with this module's `tp2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import (  # noqa: F401 -- collected here once more
    PLUGIN,
    Faulty,
    check_a_worker_killed_while_it_installs,
    test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update,
    test_a_silent_worker_fails_the_update_by_the_deadline_and_takes_the_next_one_when_it_wakes,
    test_an_installation_that_fails_on_one_rank_is_undone_on_all,
    test_post_processing_that_fails_half_way_on_one_rank_is_undone_on_all,
    test_weights_that_the_engine_s_own_api_resets_serve_nobody_until_a_full_update,
    tp2,
)
from tests.support.engines import Driver

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("llama_deep", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-vllm-pipeline"
    faults.write_text("[]")
    with Driver(runtime, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(model_a, pipeline_parallel_size=3, max_model_len=1024)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


def test_a_stage_killed_while_it_installs_takes_its_engine_down_and_the_manager_is_told(tp2: Faulty) -> None:  # noqa: F811
    """The last one for this engine."""
    check_a_worker_killed_while_it_installs(tp2)
