"""What users would otherwise do, inside a vLLM worker: receive over gloo and load. A vLLM worker extension.

With `BENCH_LAYOUT=plain` it also keeps linear weights as `load_weights` wrote them, as on a GPU; by default vLLM packs
them on a CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gather import broadcast, buckets, group


class BaselineExtension:
    """Methods that the benchmark calls by `collective_rpc`; prefixed, as an extension's must be."""

    def bench_connect(self: Any, store_path: str, size: int) -> None:
        self.bench_group = group(dist.FileStore(store_path, size), 1 + self.rank, size)

    def bench_receive(self: Any, way: str, metas: list[tuple[str, str, list[int]]]) -> float:
        """Receives every tensor and loads it; returns the seconds."""
        started_s = time.perf_counter()
        received = self._bench_per_tensor(metas) if way == "per-tensor" else self._bench_bucketed(metas)
        self._bench_load(received)
        return time.perf_counter() - started_s

    def bench_reload(self: Any, path: str) -> float:
        """The engine's own reload from safetensors on disk."""
        started_s = time.perf_counter()
        self.reload_weights(weights_path=path)
        return time.perf_counter() - started_s

    def _bench_load(self: Any, received: Iterator[tuple[str, torch.Tensor]]) -> None:
        if os.environ.get("BENCH_LAYOUT") == "plain":
            with torch.no_grad():
                self.model_runner.get_model().load_weights(received)
        else:
            self.reload_weights(weights_iterator=received)

    def _bench_per_tensor(self: Any, metas: list[tuple[str, str, list[int]]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in metas:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.bench_group, tensor)
            yield name, tensor

    def _bench_bucketed(self: Any, metas: list[tuple[str, str, list[int]]]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets(metas):
            flat = torch.empty(sum(nbytes for *_, nbytes in bucket), dtype=torch.uint8)
            broadcast(self.bench_group, flat)
            start = 0
            for name, dtype, shape, nbytes in bucket:
                yield name, flat[start : start + nbytes].view(dtype).view(shape)
                start += nbytes


def _keep_plain() -> None:
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


if os.environ.get("BENCH_LAYOUT") == "plain":
    _keep_plain()
