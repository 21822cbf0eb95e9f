"""The explicit way: `--worker-extension-cls inference_plugin.engines.vllm.WeightSyncWorkerExtension`."""

from __future__ import annotations

import os
from importlib import metadata

from inference_plugin.engines.vllm import register
from inference_plugin.engines.vllm.worker import stop_worker
from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["WeightSyncWorkerExtension"]


class WeightSyncWorkerExtension:
    """Importing this module hooks into vLLM. vLLM refuses an extension that shares an attribute with the worker. The entry point
    has already added the methods that operations use to the worker, so this class has none of them.

    From 0.33 on vLLM calls the two methods itself. Older versions don't know them; there, and where another project's class is
    the extension, the wrapped `WorkerWrapperBase.shutdown` closes a worker.
    """

    def init_worker_extension(self) -> None:
        """The devices and process groups are there, the model is not: the engine core starts the worker once it is loaded."""
        if not hasattr(self, "weightwire_start"):
            raise EngineUnsupported(
                "this worker was made before the plug-in was live in its process",
                hint="unset WEIGHTWIRE_DISABLE, or start vLLM without our --worker-extension-cls",
                phase="start",
            )

    def destroy_worker_extension(self) -> None:
        """The worker is about to end: its groups and its socket are closed. A second call does nothing."""
        stop_worker(self)


def _register_explicitly() -> None:
    """What importing this module does. Raises `EngineUnsupported` where vLLM won't find the entry point too.

    A worker extension is imported in workers only; the coordinator lives in the engine core, which the entry point reaches.
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
