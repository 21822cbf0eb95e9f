"""In the place of the memory saver that SGLang lacks on a CPU: released weights that nobody may touch, as on a GPU.

From the first release on, the next group that is opened stands in a load of its trial until the weights are to be released again,
and then reads them. When it stands, there is the file that `VARIABLE` names.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from inference_plugin.worker.live_memory import LiveMemory
from tests.support.memory_pool import MemoryPool

__all__ = ["VARIABLE", "give"]

VARIABLE = "WEIGHTWIRE_TEST_HELD"

TOO_EARLY_S = 1.0
"""Time for an engine that does not wait for readers to release the weights under them."""

_asked, _released = threading.Event(), threading.Event()
_pools: list[MemoryPool] = []


def give() -> None:
    """Puts it into this process."""
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop as Saver

    Saver.enabled = True
    Saver.pause = _pause
    Saver.resume = _resume


def _pause(_: Any, tag: str) -> None:
    if tag != "weights":
        return
    if not _pools:
        from inference_plugin.engines.sglang import hooks

        assert hooks.served_rank is not None
        model = hooks.served_rank.model.live
        _pools.append(MemoryPool(model.parameters()))
        _hold_an_opening(model, Path(os.environ[VARIABLE]))
    _pools[0].release()
    _released.set()


def _resume(_: Any, tag: str) -> None:
    if tag == "weights":
        _pools[0].take_back()
        _released.clear()


def _hold_an_opening(model: Any, held: Path) -> None:
    kind, load, release = type(model), type(model).load_weights, LiveMemory.release

    def holding(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module is not model:
            kind.load_weights = load
            held.touch()
            assert _asked.wait(600), "nobody called the engine's thread"
            _released.wait(TOO_EARLY_S)
            for parameter in model.parameters():
                parameter.sum()
        return load(module, *args, **kwargs)

    def telling(memory: LiveMemory, timeout_s: float) -> bool:
        if held.exists():
            _asked.set()
        return release(memory, timeout_s)

    kind.load_weights = holding
    LiveMemory.release = telling  # type: ignore[method-assign]
