"""The entry points by which engines find the plug-in. The hook specifications for third parties are in `hooks`."""

from __future__ import annotations

import os

from inference_plugin.wire import addresses

__all__ = ["register_sglang", "register_vllm"]


def register_vllm() -> None:
    """Entry point of group `vllm.general_plugins`: vLLM calls it once in each of its processes, before the model.

    Raises `EngineUnsupported` if this vLLM is not one that the plug-in knows. `WEIGHTWIRE_DISABLE=1` turns it off.
    """
    if os.environ.get("WEIGHTWIRE_DISABLE", "") in ("", "0"):
        from inference_plugin.engines.vllm import register

        register()


def register_sglang() -> None:
    """Entry point of group `sglang.srt.plugins`: SGLang calls it first in each of its processes.

    SGLang logs and swallows what it raises (`EngineUnsupported`, if this SGLang is not one that the plug-in knows), and
    runs without the plug-in; `weightwire doctor` tells. `WEIGHTWIRE_DISABLE=1` turns it off.
    """
    if os.environ.get("WEIGHTWIRE_DISABLE", "") in ("", "0"):
        try:
            from inference_plugin.engines.sglang import register

            register()
        except Exception as error:
            addresses.note_problem("sglang", str(error))
            raise
