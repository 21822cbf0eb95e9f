"""vLLM: where we hook in, and nothing else.

vLLM loads the plug-in in two ways, which may be combined: it finds the entry point `vllm.general_plugins` by itself, and
`--worker-extension-cls inference_plugin.engines.vllm.WeightSyncWorkerExtension` names the plug-in explicitly. Both call
`register`, which checks `PATCH_POINTS` and then wraps those places once per process. Worker methods are added to vLLM's
`WorkerBase` under a prefixed name, so that another project's worker extension can be in use at the same time.

If vLLM found the plug-in by its entry point, a failure of the plug-in never keeps vLLM from starting: it is logged once, as a
warning, and the engine runs as if the plug-in were not installed. If the user named the plug-in explicitly, vLLM does not start.

- Worker processes (`worker`, `extension`, `served`, `model`, `draft`, `lora`): `RankRuntime` (groups, socket);
  operations arrive by `collective_rpc`, which shares one ordered queue with `execute_model`: they run at the same step on
  every TP and PP rank.
- EngineCore process (`hooks`, `core_start`, `core`, `weight_transfer`): `ReplicaCoordinator`. Its commands enter the core's
  own input queue as a WAKEUP that carries a callable, so that they run between two steps and wake an idle engine. An
  in-process engine has no queue: there, a lock around its client's methods makes the step boundary. Where data-parallel ranks
  share experts, one core leads the others (`core_turns`, `shared_core`, `step_gate`).
- API process (`api`, `answers`, `ended_pooling`, `hooks`): a middleware turns the 500 of a torn replica into a 503 that says why;
  answers say which versions made them; `weightwire status` shows an engine that is still starting.

Importing this package imports neither vLLM nor torch: `weightwire check-engine` reads the table only.
"""

from __future__ import annotations

import functools
from typing import Any

from inference_plugin.engines.patch_points import check_patch_points
from inference_plugin.engines.vllm.patch_points import PATCH_POINTS, VLLM

__all__ = ["PATCH_POINTS", "VLLM", "WeightSyncWorkerExtension", "register"]


@functools.cache
def register() -> None:
    """Hooks into this process's vLLM; a second call does nothing. Raises `EngineUnsupported`, having touched nothing."""
    from inference_plugin.engines.logs import log_like
    from inference_plugin.engines.monkeypatch import all_or_none, installed_version

    lacks = check_patch_points(VLLM, installed_version(*VLLM.distributions))

    from inference_plugin.engines.vllm import hooks
    from inference_plugin.engines.vllm.api import hook_api
    from inference_plugin.engines.vllm.ended_pooling import hook_ended_pooling
    from inference_plugin.engines.vllm.weight_transfer import register_backend
    from inference_plugin.engines.vllm.worker import hook_worker

    log_like("vllm")
    with all_or_none():
        hook_worker()
        hooks.hook_start()
        hooks.hook_core(lacks)
        hooks.hook_own_commands()
        hooks.hook_requests()
        hooks.hook_shared_cores()
        hooks.hook_inproc()
        hook_api()
        hook_ended_pooling()
        register_backend()


def __getattr__(name: str) -> Any:
    """`WeightSyncWorkerExtension`, by the name that users give vLLM: importing its module hooks in."""
    if name == "WeightSyncWorkerExtension":
        from inference_plugin.engines.vllm.extension import WeightSyncWorkerExtension

        return WeightSyncWorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
