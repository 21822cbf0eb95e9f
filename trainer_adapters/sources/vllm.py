"""Adapts vLLM's own `WeightSource` (0.27 and newer, both interfaces). Recognises it by its class, without importing vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer_adapters.sources.export import ExportAdapter, TensorMetadata
from trainer_adapters.sources.selection import Rules

__all__ = ["VllmSourceAdapter", "is_vllm_source"]


def is_vllm_source(model: object) -> bool:
    """Whether this is a `WeightSource` of `vllm.distributed.weight_transfer`, of any version."""
    return any(
        kind.__name__ == "WeightSource" and kind.__module__.startswith("vllm.distributed.weight_transfer")
        for kind in type(model).__mro__
    )


class VllmSourceAdapter(ExportAdapter):
    """A source for objects that `is_vllm_source` recognises. Their `metadata` says what the ranks hold, so that nothing is
    gathered before the first update; then their full tensors travel, one at a time. Collective like `ExportAdapter`, and raises
    the same."""

    def __init__(
        self, source: Any, *, dtype_rules: Rules = None, process_group: dist.ProcessGroup | None = None
    ) -> None:
        rank = dist.get_rank(process_group) if dist.is_available() and dist.is_initialized() else 0
        super().__init__(
            lambda: _held_tensors(source),
            metadata=lambda: _held(source, rank),
            dtype_rules=dtype_rules,
            process_group=process_group,
        )


def _held(source: Any, rank: int) -> Iterator[tuple[str, TensorMetadata]]:
    """Names and metadata of the tensors that this rank will yield."""
    if hasattr(source, "owned_names"):  # 0.33
        described, held = source.metadata, source.owned_names(rank)
    else:
        described = source.metadata()
        held = source.held_names() if hasattr(source, "held_names") else None  # 0.29
    names = None if held is None else set(held)
    for one in described:
        if names is None or one.name in names:
            yield one.name, TensorMetadata(one.dtype, tuple(one.shape))


def _held_tensors(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors that this rank holds; vLLM yields None for a tensor that this rank only helps to gather."""
    pairs: Iterable[tuple[str, Any]] = source.iter_full() if hasattr(source, "iter_full") else source
    return ((name, tensor) for name, tensor in pairs if tensor is not None)
