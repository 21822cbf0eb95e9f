"""Takes away each place of vLLM that the plug-in holds on to, and changes it, and notes what registering says then.

Usage: changed_places.py RESULTS, a new JSON file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["WEIGHTWIRE_DISABLE"] = "1"  # importing our modules must not hook yet
from inference_plugin.engines import vllm as ours
from inference_plugin.engines.monkeypatch import installed_version
from inference_plugin.engines.patch_points import PatchPoint
from inference_plugin.plugin import register_vllm

del os.environ["WEIGHTWIRE_DISABLE"]
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerBase


def refusal() -> list[Any] | None:
    """The error's kind and text, and whether a worker and a core were touched all the same."""
    register_vllm()  # as vLLM calls it: whatever fails, the engine starts
    try:
        ours.register()
    except Exception as error:  # noqa: BLE001 - any kind is noted
        hooked = [hasattr(vars(EngineCore).get(n), "__wrapped__") for n in ("add_request", "shutdown")]
        touched = hasattr(WorkerBase, "weightwire_start"), any(hooked)
        return [type(error).__name__, str(error), *touched]
    return None


def without(point: PatchPoint) -> list[Any]:
    """What registering says while the place is missing, and while it takes no parameter."""
    module_name, _, path = point.place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if name not in vars(owner):
        return ["inherited"]
    if isinstance(owner, type) and type(owner).__name__ == "EnumType":
        return ["enum"]
    held = vars(owner)[name]
    fields = vars(owner).get("__dataclass_fields__", {})
    field = fields.pop(name, None)  # a field with a default is in both places
    delattr(owner, name)
    missing = refusal() if not hasattr(owner, name) else "inherited"
    changed = None
    if point.parameters:
        setattr(owner, name, lambda: None)
        changed = refusal()
    setattr(owner, name, held)
    if field is not None:
        fields[name] = field
    return [missing, changed]


def failures_of_ours() -> dict[str, Any]:
    """What becomes of a request and of a step in which our code fails."""
    from inference_plugin.engines.vllm.core import CoreControl

    core: Any = SimpleNamespace()
    control: Any = CoreControl(core)
    core.weightwire_control = control
    control.caches.root_epoch = 1
    request: Any = SimpleNamespace(request_id="r", client_index=0)
    added: list[Any] = [EngineCore.add_request(core, request)]
    added += [[o.request_id, o.stop_reason] for outputs in control.stash for o in outputs.outputs]
    control.stash.clear()
    with control.lock:
        control.submit(lambda: 1 / 0)
        stepped = control.step(lambda: "stepped")
    return {"added": added, "stepped": stepped}


def main(results: Path) -> None:
    version = installed_version(*ours.VLLM.distributions)
    found: dict[str, Any] = {
        point.place: without(point) for point in ours.PATCH_POINTS if not point.without and point.needed_in(version)
    }
    register_vllm()
    register_vllm()
    found["registered"] = hasattr(WorkerBase, "weightwire_start")
    results.write_text(json.dumps(found | failures_of_ours()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
