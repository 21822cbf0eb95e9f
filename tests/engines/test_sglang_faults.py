"""The fault table on SGLang: the tests of `test_vllm_faults`, with an SGLang replica of two ranks on the other side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import (  # noqa: F401 -- collected here once more
    PLUGIN,
    Faulty,
    check_a_worker_killed_while_it_installs,
    test_a_killed_trainer_rank_fails_the_update_on_its_manager_at_once,
    test_a_manager_killed_after_it_sent_the_commit_leaves_the_old_version_or_the_new_one,
    test_a_manager_killed_before_the_commit_leaves_the_old_version_and_nothing_of_its_own,
    test_a_pause_whose_card_cannot_be_written_ends_with_its_lease_and_the_engine_lives,
    test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update,
    test_a_silent_coordinator_fails_the_commit_by_the_deadline_and_takes_the_next_one_when_it_wakes,
    test_a_silent_manager_loses_its_lease_and_is_told_so_when_it_wakes,
    test_a_silent_trainer_rank_fails_the_update_on_its_manager_by_the_deadline,
    test_a_silent_worker_fails_the_update_by_the_deadline_and_takes_the_next_one_when_it_wakes,
    test_a_torn_replica_refuses_even_if_its_card_cannot_be_written,
    test_a_trainer_rank_killed_inside_a_broadcast_is_a_lost_peer_and_the_next_update_makes_new_groups,
    test_a_trainer_rank_that_learns_of_its_manager_s_death_fails_with_a_typed_error,
    test_an_installation_that_fails_on_one_rank_is_undone_on_all,
    test_weights_reset_while_an_update_is_on_its_way_end_it_and_the_next_one_heals,
    test_weights_that_the_engine_s_own_api_resets_serve_nobody_until_a_full_update,
    tp2,
)
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-sglang"
    faults.write_text("[]")
    with SglangDriver(runtime, tp=2, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(model_a)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


def test_a_worker_killed_while_it_installs_takes_its_engine_down_and_the_manager_is_told(tp2: Faulty) -> None:  # noqa: F811
    """The last one for this engine."""
    assert isinstance(tp2.engine, SglangDriver)
    tp2.engine.ends_itself = True
    check_a_worker_killed_while_it_installs(tp2)
