"""What SGLang's hierarchical cache needs on a CPU, which it has on a GPU only: copies between the cache and the host, and their
ends, which come later.

`give` puts it into this process. SGLang needs `hicache_io_backend="direct"` and `hicache_mem_layout="layer_first"` then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["OPTIONS", "VARIABLE", "give"]

VARIABLE = "WEIGHTWIRE_TEST_HOST_CACHE"
"""Set in an engine's environment: how long a copy takes, in seconds."""

OPTIONS = {"enable_hierarchical_cache": True, "hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}


def give(copy_s: float) -> None:
    from sglang.srt.managers import cache_controller, scheduler  # noqa: F401 -- they import those that are replaced
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller  # noqa: F401
    from sglang.srt.mem_cache.pool_host import base, common, mha

    class Event:
        """Of a stream that does one thing after another."""

        ends_s = 0.0

        def record(self, *_: Any) -> None:
            self.ends_s = time.monotonic() + copy_s

        def query(self) -> bool:
            return time.monotonic() >= self.ends_s

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.ends_s - time.monotonic()))

        def wait(self, *_: Any) -> None: ...

    def wait(loading: cache_controller.LayerLoadingEvent, layer: int) -> None:
        """As a GPU's stream does, which computes with a layer once it is there: no more than one load is open at a time."""
        loading.load_events[layer].synchronize()

    cache_controller.LayerLoadingEvent.wait = wait
    device = SimpleNamespace(__name__="host", Event=Event, Stream=_Stream, stream=_in_stream, current_stream=_Stream)
    kept = l2_transfer.device_module
    for module in list(sys.modules.values()):
        if module.__name__.startswith("sglang.srt.") and getattr(module, "device_module", None) is kept:
            module.device_module = device
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # it wants 10 GB that nobody uses; the caches of tests are tiny
    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)
    mha.transfer_kv_direct = _copy


class _Stream:
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def _in_stream(_: Any) -> Iterator[None]:
    yield


def _copy(
    *,
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Rows of each layer. Indices are those of tokens, whatever the size of a page."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
