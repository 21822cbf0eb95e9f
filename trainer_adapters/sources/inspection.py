"""What a source sees of one item of a stream, wherever the item's bytes lie."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from inference_plugin.wire.geometry import MAX_DIMS
from trainer_adapters.sources.plan import Dims
from trainer_adapters.sources.sharded import is_dtensor, is_partitioned, shape_of

__all__ = ["Inspection", "Memory", "mark_of", "memory_of", "why_not_plain"]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Inspection(NamedTuple):
    """What a scan sees of one item of a stream. `memory`: equal, on all ranks alike, for items that are the same elements of the
    same memory; None if that is unknown."""

    shape: Dims
    dtype: torch.dtype
    spread: Hashable = None
    problem: str = ""
    memory: Hashable = None


def why_not_plain(tensor: torch.Tensor) -> str:
    """Why a tensor's values can't be read where they are; "" if they can."""
    if type(tensor) not in _PLAIN:
        if is_dtensor(tensor):
            return "is a DTensor: use FSDPAdapter or DTensorAdapter for a model, ExportAdapter for tensors by name"
        if not tensor.is_meta and bool(is_traceable_wrapper_subclass(tensor)):
            return f"is a {type(tensor).__name__}, which wraps other tensors: convert it to a plain one"
    if is_partitioned(tensor) and shape_of(tensor) != tensor.shape:
        return "is partitioned by DeepSpeed's ZeRO-3: use DeepSpeedAdapter"
    if tensor.is_meta:
        return "is on the meta device: it has no values"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is {tensor.layout} {tensor.dtype}: convert it to a plain tensor"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "has no memory: it was freed, or moved away by an offloader"
    if tensor.numel() and type(tensor) not in _PLAIN and not tensor.data_ptr():
        return f"is a {type(tensor).__name__}, which has no memory of its own: convert it to a plain tensor"
    if tensor.dim() > MAX_DIMS:
        return f"has {tensor.dim()} dimensions, and at most {MAX_DIMS} can travel"
    return ""


def mark_of(tensor: torch.Tensor) -> Hashable:
    """All that `why_not_plain` and `memory_of` look at, at a fraction of their time; None for a tensor of another class or layout
    than a plain one, of which only they can tell."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
        return None
    memory = (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.untyped_storage().nbytes(),
    )
    return id(tensor), type(tensor), memory, tensor.is_conj(), tensor.is_neg()


class Memory(NamedTuple):
    """Where a plain tensor's elements lie: equal, on all ranks alike, for the same elements of the same memory. `reading`: how
    the memory from `address` on is read."""

    device: torch.device
    address: int
    reading: Hashable


def memory_of(tensor: torch.Tensor) -> Hashable:
    """The tensor's `Memory`; a value that no other tensor has, if it has no elements."""
    if not tensor.numel():
        return id(tensor)
    reading = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return Memory(tensor.device, tensor.data_ptr(), reading)
