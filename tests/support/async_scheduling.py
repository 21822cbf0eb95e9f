"""vLLM's asynchronous scheduling on a CPU: an engine core schedules a step before the last one has ended, as on a GPU.

vLLM turns it off on a CPU, where it brings nothing. `WEIGHTWIRE_TEST_ASYNC=1` keeps it on, and gives workers streams and events
that do nothing: a CPU's steps are over when they return.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

__all__ = ["keep_if_asked", "streams_if_asked"]


class Placeholder:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


def asked() -> bool:
    return os.environ.get("WEIGHTWIRE_TEST_ASYNC") == "1"


def keep_if_asked() -> None:
    """In the process that configures the engine."""
    from vllm.platforms.cpu import CpuPlatform

    original: Any = CpuPlatform.check_and_update_config
    if not asked() or hasattr(original, "keeps_async"):
        return

    @functools.wraps(original)
    def check_and_update_config(vllm_config: Any) -> None:
        before = vllm_config.scheduler_config.async_scheduling
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = before

    check_and_update_config.keeps_async = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)  # type: ignore[method-assign, assignment]


def streams_if_asked() -> None:
    """In a worker, before it makes its model runner."""
    if asked():
        cuda: Any = torch.cuda
        cuda.Event = cuda.Stream = cuda.current_stream = Placeholder
        cuda.stream = lambda _: contextlib.nullcontext()
