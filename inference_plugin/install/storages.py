"""The storages (memory) behind a model's parameters and buffers. Tied parameters lie in one storage.

The *key* of a storage is the first name that leads to it, in the order of `named_parameters` and then `named_buffers`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from inference_plugin.wire.tensors import bytes_view

__all__ = [
    "equal_bytes", "flat", "held_tensors", "keys_by_name", "named_tensors", "storage_id", "storage_views", "tensors_among",
    "with_data", "written_tensors",
]  # fmt: skip


def storage_views(model: nn.Module) -> dict[str, Tensor]:
    """Each parameter's and buffer's whole storage as a flat tensor, by its key."""
    views: dict[int, tuple[str, Tensor]] = {}
    for name, tensor, _ in named_tensors(model):
        if storage_id(tensor) not in views:
            views[storage_id(tensor)] = (name, flat(tensor))
    return dict(views.values())


def keys_by_name(model: nn.Module) -> dict[str, str]:
    """The key of the storage that each parameter or buffer lies in, by name."""
    first: dict[int, str] = {}
    return {name: first.setdefault(storage_id(tensor), name) for name, tensor, _ in named_tensors(model)}


def storage_id(tensor: Tensor) -> int:
    """Identity of the memory behind `tensor`, unique while that memory is alive."""
    return int(tensor.untyped_storage()._cdata)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, is a parameter) of all parameters, then all buffers, under every name that they have."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, False


def held_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Every parameter and buffer: its full name, the dict that holds it, its name there, itself."""
    left = [("", model)]
    while left:  # the order of `named_modules`, in a fraction of its time: every update runs through a model
        prefix, module = left.pop()
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield prefix + name, cast(dict[str, Any], holder), name, tensor
        inner = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
        left += reversed(inner)


def flat(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as a flat plain tensor of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.detach().as_strided((count,), (1,), 0).as_subclass(Tensor)


def with_data(tensor: Tensor, data: Tensor) -> Tensor:
    """A tensor over `data` with the class and the attributes of `tensor`, which may be of an engine's own parameter class.

    `tensor.data = data` would keep the object, but torch refuses it if one of the two is on meta.
    """
    if type(tensor) is Tensor:
        return data
    twin: Tensor = Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin


def equal_bytes(one: Tensor | None, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, on whatever devices."""
    if one is None or one.is_meta or other.is_meta or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(bytes_view(one.detach().cpu().contiguous()), bytes_view(other.detach().cpu().contiguous()))


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that `func` writes in place according to its schema, except empty ones."""
    positions, names = _written_arguments(func)
    values = [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
    return [tensor for tensor in tensors_among(values) if tensor.numel()]


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results, also in lists. A trace asks thrice for each operation of a load, and
    torch's own walk takes three times as long."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_among(value)
    return found


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    schema = getattr(func, "_schema", None)
    arguments = schema.arguments if schema is not None else []
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(written), tuple(arguments[i].name for i in written)
