"""How the plug-in gets into a real vLLM, stays out of it, and refuses one that it doesn't know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.wire.errors import PeerLost
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import ENGINE_ARGUMENTS, ENVIRONMENT, ROOT, START_TIMEOUT_S, Driver
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OURS = "inference_plugin.engines.vllm.WeightSyncWorkerExtension"

TABLE = """
import importlib, json, os
os.environ["WEIGHTWIRE_DISABLE"] = "1"   # importing the module must not hook yet
from inference_plugin.engines import vllm as ours
from inference_plugin.plugin import register_vllm
del os.environ["WEIGHTWIRE_DISABLE"]
from vllm.v1.worker.worker_base import WorkerBase
from vllm.v1.engine.core import EngineCore

def refusal():
    try:
        register_vllm()
    except Exception as error:
        hooked = [hasattr(vars(EngineCore).get(n), "__wrapped__") for n in ("add_request", "shutdown")]
        touched = hasattr(WorkerBase, "weightwire_start"), any(hooked)
        return [type(error).__name__, str(error), *touched]
    return None

results = {}
for touch in ours.TOUCHES:
    module_name, _, path = touch.place.partition(":")
    owner = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if name not in vars(owner):
        results[touch.place] = ["inherited"]
        continue
    if isinstance(owner, type) and type(owner).__name__ == "EnumType":
        results[touch.place] = ["enum"]
        continue
    held = vars(owner)[name]
    delattr(owner, name)
    missing = refusal() if not hasattr(owner, name) else "inherited"
    changed = None
    if touch.parameters:
        setattr(owner, name, lambda: None)
        changed = refusal()
    setattr(owner, name, held)
    results[touch.place] = [missing, changed]
register_vllm()
register_vllm()
results["registered"] = hasattr(WorkerBase, "weightwire_start")
print("RESULTS" + json.dumps(results))
"""


def test_every_place_that_is_missing_or_changed_is_named_with_the_known_versions_and_nothing_is_touched() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TABLE],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    results: dict[str, Any] = json.loads(ran.stdout.rpartition("RESULTS")[2])
    assert results.pop("registered") is True
    tried = {place: found for place, found in results.items() if found[0] not in ("inherited", "enum")}
    assert len(tried) >= 25
    for place, (missing, changed) in tried.items():
        assert missing is not None, f"{place} was missing and nobody minded"
        if missing != "inherited":
            kind, text, worker_touched, core_touched = missing
            assert kind == "EngineUnsupported" and not worker_touched and not core_touched
            assert place in text and "missing" in text and "0.32.0" in text and "WEIGHTWIRE_DISABLE" in text, text
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
