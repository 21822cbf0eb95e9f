"""SGLang: where we hook in, and nothing else.

SGLang finds the entry point `sglang.srt.plugins` by itself, in every process; where discovery is switched off,
`python -m inference_plugin.engines.sglang ...` (all of SGLang's own arguments) starts a server with the extension, and
`make_engine(...)` an `sgl.Engine`. All of them call `register`, which checks `PATCH_POINTS` and then wraps those places once
per process. If SGLang found the plug-in by its entry point, a failure of the plug-in never keeps SGLang from starting: it is
logged once, as a warning, and the engine runs as if the plug-in were not installed. Started in one of our ways, SGLang does not
start without the plug-in.

Every rank of a replica is a scheduler process (`scheduler`, `model`, `lora`): it holds `RankRuntime` (groups, socket). The
first rank has the `ReplicaCoordinator` as well. The coordinator's commands become a `Turn` (`turn`) among the requests that
SGLang broadcasts to all ranks in each pass of its event loop, so that every rank takes the turn in the same pass, between
two forward passes, also while paused. In a pipeline the turn waits until no micro-batch is between two stages (`pipeline`).
In a turn (`control`) the first rank sends each operation to the others and gathers their answers, over sockets or a process group
of our own (`ranks`), with deadlines. It sends a commit once; then every rank runs the commit by itself, and the ranks only gather
each other's answers.

Importing this package imports neither SGLang nor torch: `weightwire check-engine` reads the table only.
"""

from __future__ import annotations

import functools
from typing import Any

from inference_plugin.engines.patch_points import check_patch_points
from inference_plugin.engines.sglang.patch_points import PATCH_POINTS, SGLANG

__all__ = ["PATCH_POINTS", "SGLANG", "make_engine", "register", "run_scheduler"]


@functools.cache
def register() -> None:
    """Hooks into this process's SGLang; a second call does nothing. Raises `EngineUnsupported`, having touched nothing."""
    from inference_plugin.engines.monkeypatch import all_or_none, installed_version

    lacks = check_patch_points(SGLANG, installed_version(*SGLANG.distributions))

    from inference_plugin.engines.sglang import hooks
    from inference_plugin.engines.sglang.api import hook_api, name_application
    from inference_plugin.engines.sglang.kv_events import hook_kv_events
    from inference_plugin.engines.sglang.lora import hook_lora

    with all_or_none():
        hooks.hook_start()
        hooks.hook_scheduler(lacks)
        hooks.hook_own_commands()
        hook_lora()
        hook_kv_events()
        hook_api()
    name_application()


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's `run_scheduler_process` with the extension, whatever plug-ins SGLang itself discovers.

    The user asked for the extension: where it can't start, the scheduler doesn't.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process

    from inference_plugin.engines.sglang import hooks

    register()
    hooks.explicit = True
    return run_scheduler_process(*args, **kwargs)


def make_engine(**kwargs: Any) -> Any:
    """An `sgl.Engine(**kwargs)` whose schedulers have the extension. For engines that are built by hand."""
    from sglang.srt.entrypoints.engine import Engine

    register()
    kind = type("Engine", (Engine,), {"run_scheduler_process_func": staticmethod(run_scheduler)})
    return kind(**kwargs)
