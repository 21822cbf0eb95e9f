"""Real SGLang engines of two pipeline stages: what fails in the middle of an update.

The tests that are imported here run with this module's `tp2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_sglang_pipeline import STAGES
from tests.engines.test_vllm_faults import (  # noqa: F401 -- collected here once more
    PLUGIN,
    Faulty,
    check_a_worker_killed_while_it_installs,
    test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update,
    test_a_silent_worker_fails_the_update_by_the_deadline_and_takes_the_next_one_when_it_wakes,
    test_a_torn_replica_refuses_even_if_its_card_cannot_be_written,
    test_an_installation_that_fails_on_one_rank_is_undone_on_all,
    tp2,
)
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-sglang-pipeline"
    faults.write_text("[]")
    with SglangDriver(runtime, pp=STAGES, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(model_a)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


def test_a_reset_of_the_weights_is_refused_by_name_and_the_version_is_served(tp2: Faulty) -> None:  # noqa: F811
    assert isinstance(tp2.engine, SglangDriver)
    success, message = tp2.engine.call("reset_weights")
    assert not success and "a pipeline's weights can't be reset" in message, message
    assert tp2.card.state == "serving"
    tp2.assert_serves()
    tp2.assert_recovered()


def test_a_stage_killed_while_it_installs_takes_its_engine_down_and_the_manager_is_told(tp2: Faulty) -> None:  # noqa: F811
    """The last one for this engine."""
    assert isinstance(tp2.engine, SglangDriver)
    tp2.engine.ends_itself = True
    check_a_worker_killed_while_it_installs(tp2)
