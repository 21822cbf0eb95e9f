"""Streams: the tensors of a model with the trainer's names, which a scan reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from trainer_adapters.sources.plan import unwrapped
from trainer_adapters.sources.sharded import is_deepspeed_engine, is_wrapped_by_fsdp1

__all__ = [
    "Buffers",
    "Pairs",
    "Stream",
    "holds_its_tensors",
    "module_stream",
    "module_ties",
    "pairs_of",
    "stream_of",
    "trained_names",
    "walk",
    "wrapped",
]

Pairs: TypeAlias = Iterable[tuple[str, Any]]
Stream: TypeAlias = Callable[[], Pairs]
_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)

PAIRS = "give what yields (name, tensor), such as model.named_parameters"

Buffers: TypeAlias = Literal["persistent", "all", "none"]


def holds_its_tensors(model: object) -> bool:
    """Whether this is a dict, list or tuple. A subclass that iterates in a way of its own may make each tensor when it is asked
    for, and make all of them in the same memory."""
    kind: Any = type(model)
    if isinstance(model, dict):
        return kind.items in (dict.items, OrderedDict.items)
    return isinstance(model, list | tuple) and kind.__iter__ in (list.__iter__, tuple.__iter__)


def module_stream(module: torch.nn.Module, include_buffers: Buffers = "persistent") -> Stream:
    """The module's parameters and buffers in the order of its state dict, tied ones under each of their names. Runs no hooks.

    Raises ValueError if `include_buffers` is none of the words of `Buffers`."""
    if include_buffers not in ("persistent", "all", "none"):
        raise ValueError(f"include_buffers is 'persistent', 'all' or 'none', not {include_buffers!r}")

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, part in walk(module):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield prefix + name, parameter
            for name, buffer in part._buffers.items():
                temporary = name in part._non_persistent_buffers_set
                if isinstance(part, AveragedModel):
                    continue  # `n_averaged`, which no model has
                if buffer is None or include_buffers == "none" or (temporary and include_buffers == "persistent"):
                    continue
                yield prefix + name, buffer

    return stream


def trained_names(module: torch.nn.Module) -> set[str]:
    """The names of the parameters that have a gradient, as `module_stream` gives them."""
    return {
        prefix + name
        for prefix, part in walk(module)
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.requires_grad
    }


def stream_of(model: Any) -> Stream:
    """The stream of a mapping, of an iterable of pairs, or of a function that returns either. Raises `ArgumentError` for
    anything else."""
    if isinstance(model, Mapping):
        return lambda: model.items()
    if isinstance(model, Iterator):
        raise ArgumentError(
            f"a {type(model).__name__} can be read only once, while every update reads it again: pass a "
            "callable that returns a fresh one, e.g. `lambda: model.named_parameters()`"
        )
    if isinstance(model, list | tuple):
        return lambda: model
    if isinstance(model, Iterable):
        return lambda: _checked(model)
    if callable(model):
        return lambda: _checked(pairs_of(model()))
    raise ArgumentError(f"expected a module, a mapping, a callable or an iterable of pairs, not {type(model).__name__}")


def pairs_of(tensors: Any) -> Pairs:
    """The pairs of a mapping or of an iterable of pairs."""
    pairs: Pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    return pairs


def _checked(pairs: Any) -> Iterator[tuple[str, Any]]:
    """The pairs, one at a time. Raises `ArgumentError` for anything else, such as what `model.parameters()` yields."""
    if not isinstance(pairs, Iterable):
        raise ArgumentError(f"a {type(pairs).__name__} came where pairs are expected", hint=PAIRS)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ArgumentError(f"a {type(pair).__name__} came where (name, tensor) is expected", hint=PAIRS)
        yield pair  # type: ignore[misc]
        del pair  # before the next tensor is made


def module_ties(module: torch.nn.Module) -> dict[str, str]:
    """The names that transformers declares tied, each with the name that it is tied to; "" if transformers only lists the tied
    names. As `unwrapped` gives names: what transformers declares has no wrapper that was put into the model afterwards."""
    ties: dict[str, str] = {}
    for prefix, part in walk(module):
        declared = getattr(part, "all_tied_weights_keys", None)
        if declared is None:
            declared = dict.fromkeys(getattr(part, "_tied_weights_keys", None) or (), "")
        for name, source in declared.items():
            ties[unwrapped(prefix + name)] = unwrapped(prefix + source) if source else ""
    return ties


def walk(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each submodule with the prefix of its names, once for every place where it is used, without the names of wrappers.

    Raises `ManifestMismatch` for a module that contains itself."""
    above: set[int] = set()
    left: list[tuple[str, torch.nn.Module | int]] = [("", module)]
    while left:
        prefix, part = left.pop()
        if isinstance(part, int):  # the end of that module
            above.discard(part)
            continue
        if id(part) in above:
            raise ManifestMismatch(f"{prefix}: the module contains itself", side="trainer")
        yield prefix, part
        if part._modules:
            inner = wrapped(part)
            above.add(id(part))
            left.append((prefix, id(part)))
            left.extend(
                (prefix if name == inner else f"{prefix}{name}.", child)
                for name, child in reversed(part._modules.items())
                if child is not None
            )


def wrapped(part: torch.nn.Module) -> str:
    """The attribute in which a wrapper holds the wrapped module; names in a checkpoint don't contain it. "" for no wrapper."""
    if isinstance(part, _WRAPPERS) or is_deepspeed_engine(part):
        return "module"
    return "_fsdp_wrapped_module" if is_wrapped_by_fsdp1(part) else ""
