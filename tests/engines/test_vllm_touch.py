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
from inference_plugin.engines.monkeypatch import installed_version
from inference_plugin.plugin import register_vllm
del os.environ["WEIGHTWIRE_DISABLE"]
from vllm.v1.worker.worker_base import WorkerBase
from vllm.v1.engine.core import EngineCore

def refusal():
    register_vllm()   # as vLLM calls it: whatever fails, the engine starts
    try:
        ours.register()
    except Exception as error:
        hooked = [hasattr(vars(EngineCore).get(n), "__wrapped__") for n in ("add_request", "shutdown")]
        touched = hasattr(WorkerBase, "weightwire_start"), any(hooked)
        return [type(error).__name__, str(error), *touched]
    return None

results = {}
for touch in ours.PATCH_POINTS:
    if touch.without or not touch.needed_in(installed_version(*ours.VLLM.distributions)):
        continue
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
    fields = vars(owner).get("__dataclass_fields__", {})
    field = fields.pop(name, None)  # a field with a default is in both places
    delattr(owner, name)
    missing = refusal() if not hasattr(owner, name) else "inherited"
    changed = None
    if touch.parameters:
        setattr(owner, name, lambda: None)
        changed = refusal()
    setattr(owner, name, held)
    if field is not None:
        fields[name] = field
    results[touch.place] = [missing, changed]
register_vllm()
register_vllm()
results["registered"] = hasattr(WorkerBase, "weightwire_start")

# what fails of ours while the engine runs
from types import SimpleNamespace
from inference_plugin.engines.vllm.core import CoreControl
core = SimpleNamespace()
control = core._weightwire_control = CoreControl(core)
control.root_epoch = 1
results["added"] = [EngineCore.add_request(core, SimpleNamespace(request_id="r", client_index=0))]
results["added"] += [[o.request_id, o.stop_reason] for outputs in control._stash for o in outputs.outputs]
control._stash.clear()
with control.lock:
    control.submit(lambda: 1 / 0)
    results["stepped"] = control.step(lambda: "stepped")
print("RESULTS" + json.dumps(results))
"""


def test_every_place_that_is_missing_or_changed_is_named_nothing_is_touched_and_our_failures_stay_ours(
    runtime: Path,
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TABLE],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "WEIGHTWIRE_RUNTIME_DIR": str(runtime), "WEIGHTWIRE_JOB": "touch"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    results: dict[str, Any] = json.loads(ran.stdout.rpartition("RESULTS")[2])
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
