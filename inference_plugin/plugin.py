"""The entry points by which engines find the plug-in. The hook specifications for third parties are in `plugins`.

An installed plug-in never keeps an engine from starting: whatever fails here is warned about once, `weightwire doctor` and
`weightwire status` tell of it, and the engine serves without the plug-in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

__all__ = ["register_sglang", "register_vllm"]


def register_vllm() -> None:
    """Entry point of group `vllm.general_plugins`: vLLM calls it once in each of its processes, before the model.

    `WEIGHTWIRE_DISABLE=1` turns it off. Never raises.
    """

    def register() -> None:
        from inference_plugin.engines.vllm import register

        register()

    _registered("vllm", register)


def register_sglang() -> None:
    """Entry point of group `sglang.srt.plugins`: SGLang calls it first in each of its processes.

    `WEIGHTWIRE_DISABLE=1` turns it off. Never raises.
    """

    def register() -> None:
        from inference_plugin.engines.sglang import register

        register()

    _registered("sglang", register)


def _registered(engine: str, register: Callable[[], None]) -> None:
    if os.environ.get("WEIGHTWIRE_DISABLE", "") not in ("", "0"):
        return
    logger = logging.getLogger(f"{engine}.weightwire")  # below the engine's own, which shows it
    try:
        register()
    except Exception as error:  # noqa: BLE001 -- whatever it is, the engine starts without us
        try:
            from inference_plugin.engines.monkeypatch import run_without

            run_without(engine, error, logger)
        except ImportError:
            logger.warning("weightwire: OFF in this engine, which serves without it: %s", error)
