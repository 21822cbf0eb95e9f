"""A vLLM that starts while a job runs answers with the job's weights before the next update."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import Driver, eventually
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_second_engine_that_starts_after_update_3_answers_with_its_tokens_before_update_4(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    with Driver(runtime, in_process=True) as first, SyncManager(timeout_s=180) as manager:
        first.open(a)
        for version, model in ((1, b), (2, a), (3, b)):
            manager.update(source(model), version)
        with Driver(runtime, in_process=True, job=first.job) as second:
            second.open(a)
            eventually(
                lambda: [(s.state, s.version) for s in manager.replicas()] == [("current", 3)] * 2,
                what="the newcomer caught up",
            )
            assert second.tokens(PROMPTS, COUNT) == first.tokens(PROMPTS, COUNT) == reference(b)
            assert manager.verify(source(b)).ok
            assert [r.status for r in manager.update(source(a), 4).replicas] == ["committed"] * 2
            assert second.tokens(PROMPTS, COUNT) == first.tokens(PROMPTS, COUNT) == reference(a)
        eventually(lambda: {s.state for s in manager.replicas()} == {"current", "lost"}, what="the one that left")
