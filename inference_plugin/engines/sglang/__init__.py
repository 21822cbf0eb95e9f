"""SGLang: where we hook in, and nothing else.

SGLang finds the entry point `sglang.srt.plugins` by itself, in every process; where discovery is switched off,
`python -m inference_plugin.engines.sglang ...` (all of SGLang's own arguments) starts a server with the extension, and
`make_engine(...)` an `sgl.Engine`. All of them call `register`, which checks `TOUCHES` and then wraps those places once
per process.

Every rank of a replica is a scheduler process (`scheduler`, `model`, `lora`): it holds `RankRuntime` (groups, socket).
The first one has the `Front` as well (`control`). Its commands become a `Turn` (`turn`) among the requests that SGLang
broadcasts to all ranks in each pass of its event loop, so that every rank takes the same turn in the same pass, between
two forward passes, also while paused. Within a turn the first rank leads: it sends operations to the others and gathers
their answers over a process group of our own, with deadlines, until it ends the turn.
"""

from __future__ import annotations

import functools
from typing import Any

from inference_plugin.engines.hooking import installed_version
from inference_plugin.engines.sglang.hooks import hook_scheduler
from inference_plugin.engines.sglang.lora import hook_lora
from inference_plugin.engines.sglang.touches import KNOWN_VERSIONS, TOUCHES
from inference_plugin.engines.touch import check_touches

__all__ = ["KNOWN_VERSIONS", "TOUCHES", "make_engine", "register", "run_scheduler"]


@functools.cache
def register() -> None:
    """Hooks into this process's SGLang; a second call does nothing. Raises `EngineUnsupported`, having touched nothing."""
    check_touches("sglang", installed_version("sglang"), KNOWN_VERSIONS, TOUCHES)
    hook_scheduler()
    hook_lora()


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's `run_scheduler_process` with the extension, whatever plug-ins SGLang itself discovers."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    register()
    return run_scheduler_process(*args, **kwargs)


def make_engine(**kwargs: Any) -> Any:
    """An `sgl.Engine(**kwargs)` whose schedulers have the extension. For engines that are built by hand."""
    from sglang.srt.entrypoints.engine import Engine

    register()
    kind = type("Engine", (Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)})
    return kind(**kwargs)
