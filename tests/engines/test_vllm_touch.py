"""How the plug-in gets into a real vLLM, stays out of it, and refuses one that it doesn't know."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.wire.errors import PeerLost
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import ENGINE_ARGUMENTS, ENVIRONMENT, PRELOADED, START_TIMEOUT_S, Driver
from tests.support.preloaded import nursery
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OURS = "inference_plugin.engines.vllm.WeightSyncWorkerExtension"


def test_every_place_that_is_missing_or_changed_is_named_nothing_is_touched_and_our_failures_stay_ours(
    runtime: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, **ENVIRONMENT, "WEIGHTWIRE_RUNTIME_DIR": str(runtime), "WEIGHTWIRE_JOB": "touch"}
    found, log = tmp_path / "found.json", tmp_path / "log"
    program = nursery(sys.executable, PRELOADED, tuple(ENVIRONMENT.items())).start(
        "tests.support.changed_places", [str(found)], environment, log
    )
    program.wait(300)
    assert found.exists(), log.read_text(errors="replace")[-4000:]
    results: dict[str, Any] = json.loads(found.read_text())
    assert results.pop("registered") is True
    accepted, (request, reason) = results.pop("added")
    assert (accepted, request) == (None, "r") and "has no attribute" in reason, (
        "it ends with an error, and the engine goes on"
    )
    assert results.pop("stepped") == "stepped", "a command that fails does not reach the step in which it runs"
    tried = {place: found for place, found in results.items() if found[0] not in ("inherited", "enum")}
    assert len(tried) >= 25
    for place, (missing, changed) in tried.items():
        assert missing is not None, f"{place} was missing and nobody minded"
        if missing != "inherited":
            kind, text, worker_touched, core_touched = missing
            assert kind == "EngineUnsupported" and not worker_touched and not core_touched
            assert (
                place in text and "missing" in text and "0.24.0 to 0.33.0" in text and "WEIGHTWIRE_DISABLE" in text
            ), text
        if changed is not None:
            assert changed[0] == "EngineUnsupported" and place in changed[1] and "has no parameter" in changed[1]


@pytest.mark.parametrize(
    "environment", [{"WEIGHTWIRE_DISABLE": "1"}, {"VLLM_PLUGINS": "somebody_elses"}], ids=["disabled", "not-allowed"]
)
def test_an_engine_without_the_plug_in_runs_as_ever_and_is_no_replica(
    runtime: Path, checkpoint: Checkpoint, environment: dict[str, str]
) -> None:
    model = checkpoint("qwen3", tied=True, seed=1)
    with Driver(runtime, in_process=True, **environment) as driver:
        driver.open(model)
        # No prompt of fewer than five tokens: stock vLLM dies of those on a CPU with AMX.
        assert driver.tokens(PROMPTS[1:], COUNT) == reference(model)[1:]
        assert driver.cards == [] and driver.leftovers() == []
        with SyncManager() as sync, pytest.raises(PeerLost, match="no replica"):
            sync.update(source(model), 1)


@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "multiprocess"])
def test_the_entry_point_and_the_explicit_extension_together_do_no_harm(
    runtime: Path, checkpoint: Checkpoint, in_process: bool
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    with Driver(runtime, in_process=in_process) as driver:
        kwargs = {"model": str(model_a), "worker_extension_cls": OURS, **ENGINE_ARGUMENTS}
        driver.call("open_bare", kwargs=kwargs, timeout_s=START_TIMEOUT_S)
        assert driver.tokens(PROMPTS, COUNT) == reference(model_a)
        with SyncManager() as sync:
            assert [r.status for r in sync.update(source(model_b), 1).replicas] == ["committed"]
            assert driver.tokens(PROMPTS, COUNT) == reference(model_b)
            assert sync.verify(source(model_b)).ok
    assert driver.leftovers() == []
