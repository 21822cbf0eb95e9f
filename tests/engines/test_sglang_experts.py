"""A mixture of experts in SGLang, each rank with experts of its own.

On a CPU such an engine starts, and ends at its first token: its kernel takes the -1 of another rank's expert for a place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_plugin.wire.errors import EngineUnsupported
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import source
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_experts_that_move_are_refused_when_the_group_is_opened(runtime: Path, checkpoint: Checkpoint) -> None:
    with SglangDriver(runtime, tp=2) as driver:
        driver.open(checkpoint("qwen3_moe", tied=False, seed=1), ep_size=2, enable_eplb=True)
        with SyncManager(timeout_s=60) as manager, pytest.raises(EngineUnsupported, match="moves experts"):
            manager.update(source(checkpoint("qwen3_moe", tied=False, seed=2)), 1)
