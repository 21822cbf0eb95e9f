"""Everything that an engine's model computes with, as far as Python reaches it: tensors and plain values, by path.

From each module: parameters, buffers and attributes, and from there on objects of the engine (quantisation methods, schemes,
kernels, attention implementations), containers, bound methods, partials and closures. Two engines that hold the same
weights have equal maps, whatever their history.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

__all__ = ["differences", "reachable", "reachable_tensors"]

NOT_WEIGHTS = (
    "handler_tensor",
    "kv_cache",
    "vllm_config",
    "_vllm_config",
    "compilation_config",
    "config",
    "server_args",
    "model_config",
    "pp_group",
    "tp_group",
    "parallel_group",
    "name_or_path",
    "_model_name",
    "prefix",
    "layer_name",
    "online_quantization_time",
    "per_layer_embeddings",
    "_hits",
    "_total",
    "topk_indices_buffer",
    "_topk_indices_buffer",
    "logical_topk_indices",
    "physical_topk_indices",
    "valid_topk_counts",
)
"""Attributes that hold an address, what was cached of requests and how often it was found, which tokens a step attends to, or how
the engine was started and how long that took."""

TRACED = "_tensor_constant"
"""torch.fx leaves such attributes on a module that it traces; vLLM traces one module of each class once in a process."""

ADDRESS = 1 << 32
"""Integers from here on are addresses."""


def reachable(model: nn.Module) -> dict[str, str]:
    """Path to value, in words; tensors as dtype, shape and digest."""
    return {path: _digest(v) if isinstance(v, torch.Tensor) else v for path, v in _everything(model)}


def reachable_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Path to tensor."""
    return {path: value for path, value in _everything(model) if isinstance(value, torch.Tensor)}


def _everything(model: nn.Module) -> Iterator[tuple[str, str | torch.Tensor]]:
    for name, module in model.named_modules(remove_duplicate=False):
        yield from _inside(module, name, set())


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    names = one.keys() | other.keys()
    return sorted(name for name in names if one.get(name) != other.get(name))


def _inside(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, str | torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
        yield path, "an address" if isinstance(value, int) and value >= ADDRESS else repr(value)
    elif id(value) in above or isinstance(value, type):
        return
    else:
        for name, part in _parts(value, path):
            if name not in NOT_WEIGHTS and not name.startswith(TRACED) and not isinstance(part, nn.Module):
                yield from _inside(part, f"{path}.{name}", above | {id(value)})


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from {**value._parameters, **value._buffers}.items()  # noqa: SLF001
        for name, attribute in vars(value).items():
            if name not in ("_parameters", "_buffers", "_modules") and not name.endswith("_hooks"):
                yield name, attribute
    elif isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells)
        yield "__defaults__", value.__defaults__
        yield "__kwdefaults__", value.__kwdefaults__
    elif type(value).__module__.split(".")[0] in ("vllm", "sglang"):
        yield from getattr(value, "__dict__", {}).items()


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return f"{tensor.dtype} {list(tensor.shape)} without memory"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_64_hexdigest(data.numpy())}"
