"""An SGLang engine is updated while it compiles the grammar of a request: that request waits apart from all others."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from inference_plugin.wire.messages import InFlight
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import weights
from tests.support.engines import eventually
from tests.support.held_grammars import VARIABLE
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT, COUNT = [*range(20, 60)], 12
ANYTHING = "(.|\n)*"


@pytest.mark.parametrize("policy", get_args(InFlight))
def test_a_request_whose_grammar_is_compiled_during_an_update_starts_with_the_new_weights_alone(
    runtime: Path, tmp_path: Path, checkpoint: Checkpoint, policy: InFlight
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    end = tmp_path / "end"
    with SglangDriver(runtime, **{VARIABLE: str(end)}) as driver:
        driver.open(model_a)
        driver.tokens([PROMPT], COUNT)  # its keys and values are cached from here on
        with SyncManager(in_flight=policy, timeout_s=60) as manager:
            waits = driver.submit([PROMPT], COUNT, regex=ANYTHING)
            eventually(end.with_suffix(".asked").exists, what="a grammar that is compiled")
            (report,) = manager.update(ModuleAdapter(weights(model_b)), 1).replicas
            assert report.status == "committed", report
        end.touch()
        (done,) = driver.wait(waits)
        if policy == "abort":
            assert done["reason"] == "Aborted by AbortReq.", done  # as SGLang ends it by itself
        else:
            assert done["finish_reason"] == "length" and done["cached"] == 0, done
            assert {each[0] for each in done["versions"]} == {"1"}, done
        (again,) = driver.wait(driver.submit([PROMPT[:1]], 1))  # and it serves on
        assert again["finish_reason"] == "length"
