"""A second instance of an engine's model without its weights: parameters on the meta device, all else real."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from inference_plugin.install.storages import with_data
from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["Skeleton", "build_skeleton"]

SMALL_ELEMENTS = 4096
"""Of parameters up to this size, such as scales, the constructor's values are kept."""


class Skeleton(NamedTuple):
    """`constants`: what the constructor put into buffers and small parameters, by name, on the CPU."""

    model: nn.Module
    constants: dict[str, torch.Tensor]


def build_skeleton(
    make: Callable[[], nn.Module], dtype: AbstractContextManager[Any], ropes: dict[Any, Any] | None = None
) -> Skeleton:
    """Calls `make` in the context `dtype`, with the engine's table of rotary embeddings (`ropes`: one of each kind, shared by
    all models of the process) empty for that while. What `make` enters into any table of the process is taken out again.

    A constructor may compute with tensors of its own (`.item()`, `.tolist()`): they are real. A parameter moves to meta
    as it is registered, so that no memory of weights is ever touched; one of a single element moves when the constructor
    has ended, which may read its value. On the engine's own thread only: default dtype, tables and torch's registration are
    the process's. Raises `EngineUnsupported` where the constructor fails.
    """
    ropes = {} if ropes is None else ropes
    kept = dict(ropes)
    built: dict[int, torch.Tensor] = {}
    try:
        with _modules_stay_in_tables(), dtype, torch.device("cpu"), _parameters_to_meta(built):
            ropes.clear()
            model = make()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        place = next((f"{f.filename}:{f.lineno}" for f in reversed(at) if "/torch/" not in f.filename), "")
        raise EngineUnsupported(
            f"the model can't be built a second time, without weights: {type(error).__name__}: {error} ({place})",
            hint="its weights can't be updated while it runs; it is served without Weightwire",
            phase="start",
        ) from error
    finally:
        ropes.clear()
        ropes.update(kept)
    constants = {
        name: built[id(parameter)].to(parameter.dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in built
    }
    constants |= _buffers_to_meta(model)
    torch.empty(1, device="meta").copy_(
        torch.empty(1, device="meta")
    )  # the first operation on meta imports for a second
    return Skeleton(model, constants)


@contextlib.contextmanager
def _modules_stay_in_tables() -> Iterator[None]:
    """Afterwards the tables of the process (dicts at the top of Python's modules) hold the torch modules that they held before.
    An engine may enter a layer by its name where it is made, and look it up there in each step: the live model would
    compute with the layers of the skeleton. A table of a Python module that is first imported meanwhile stays as it is."""
    tables = {
        id(table): table
        for python in list(sys.modules.values())
        for table in list(getattr(python, "__dict__", {}).values())
        if type(table) is dict
    }
    before = [(table, _modules_in(table)) for table in tables.values()]
    try:
        yield
    finally:
        for table, held in before:
            for key, module in _modules_in(table).items():
                if held.get(key) is not module:
                    del table[key]
            table.update(held)


def _modules_in(table: dict[Any, Any]) -> dict[Any, nn.Module]:
    # `isinstance` would ask lazy objects for their class, and import what they stand for.
    return {key: value for key, value in list(table.items()) if issubclass(type(value), nn.Module)}


@contextlib.contextmanager
def _parameters_to_meta(built: dict[int, torch.Tensor]) -> Iterator[None]:
    """Moves every parameter that is registered meanwhile to meta, as the same object; one of a single element moves at the end.
    `built` gets the values of small ones. A constructor that moves a part of the model to a device (Kimi-K2.5 in vLLM) leaves it
    where it is: torch refuses to move a parameter from meta."""
    register, move = nn.Module.register_parameter, nn.Module.to
    keep: list[Any] = []  # an id in `built` stays its parameter's
    storages: dict[int, torch.Tensor] = {}
    single: list[nn.Parameter] = []

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or is_lazy(param):
            return
        if param.numel() == 1:
            single.append(param)
        else:
            to_meta(param)

    def to_meta(param: nn.Parameter) -> None:
        if param.is_meta:
            return
        if param.numel() <= SMALL_ELEMENTS:
            built[id(param)] = param.detach().clone()
        keep.append(param)
        storage = param.untyped_storage()
        is_view = storage.nbytes() != param.nbytes  # others may lie in the same memory
        if is_view:
            keep.append(storage)
        swap: Any = torch.utils.swap_tensors  # type: ignore[attr-defined, unused-ignore]
        swap(param, _on_meta(param, storages if is_view else {}))

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
        return self if dtype is None else move(self, dtype)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
        for param in single:
            to_meta(param)
    finally:
        nn.Module.register_parameter, nn.Module.to = register, move  # type: ignore[method-assign]


def _buffers_to_meta(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Puts twins on meta in the place of all buffers; returns the buffers by name."""
    found: dict[str, torch.Tensor] = {}
    twins: dict[int, torch.Tensor] = {}
    storages: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in list(module._buffers.items()):
            if buffer is None or buffer.is_meta:
                continue
            found[f"{prefix}.{name}" if prefix else name] = buffer
            if id(buffer) not in twins:
                twins[id(buffer)] = _on_meta(buffer, storages)
            module._buffers[name] = twins[id(buffer)]
    return found


def _on_meta(tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """A twin of `tensor` on meta. Twins of tensors that share a storage share one, too: `storages` has them."""
    storage = tensor.untyped_storage()
    count = storage.nbytes() // tensor.element_size()
    flat = storages.setdefault(storage._cdata, torch.empty(count, dtype=tensor.dtype, device="meta"))
    data = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return with_data(tensor, data)
