"""Walks, copies and compares the objects that a module holds beside its parameters: attributes, and everything behind them.

An engine also keeps weights outside parameters: a packed copy behind a handle of a kernel object, a scale as a Python
float, a reference to another module's parameter in an attention implementation.

A *helper* is an object of the engine without parameters of its own: a quantisation method, a scheme, a kernel, an
attention implementation. These functions never enter objects of the packages in `Boundary`: configurations, process groups,
torch.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = [
    "PLAIN", "Boundary", "Path", "captured_by", "child_at", "children_of", "copied", "equivalent", "helpers_under", "is_helper",
    "modules_under", "state_of", "tensors_under", "words",
]  # fmt: skip

Path: TypeAlias = tuple[Hashable, ...]
"""The attribute names, keys and positions that lead from a module to a value."""

_MAPPINGS = (dict, types.MappingProxyType)
_SEQUENCES = (list, tuple, collections.deque)
_TORCH_OWN = frozenset(nn.Module().__dict__)
_FOREIGN = frozenset((
    "torch", "numpy", "threading", "logging", "asyncio", "concurrent", "zmq", "pathlib", "multiprocessing", "weakref", "re",
))  # fmt: skip
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type)


@dataclass(frozen=True)
class Boundary:
    """Packages whose objects are never entered, as prefixes of module names."""

    packages: tuple[str, ...] = ()

    def keeps_out(self, value: Any) -> bool:
        module = type(value).__module__
        return module.partition(".")[0] in _FOREIGN or any(
            module == package or module.startswith(f"{package}.") for package in self.packages
        )


def is_helper(value: Any, boundary: Boundary) -> bool:
    """Whether `value` is an object of the engine that belongs to the module that holds it."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is None and next(value.buffers(), None) is None
    if isinstance(
        value, (Tensor, BaseException, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)
    ):
        return False
    if isinstance(value, (*PLAIN, dict, list, tuple, set, frozenset)):
        return False
    return (hasattr(value, "__dict__") or _slots(value) != ()) and not boundary.keeps_out(value)


def state_of(value: Any) -> dict[str, Any]:
    """An object's attributes by name. For a module: with its submodules, without torch's own attributes."""
    if isinstance(value, nn.Module):
        own = {name: held for name, held in list(vars(value).items()) if name not in _TORCH_OWN}
        return own | {name: held for name, held in list(value._modules.items()) if held is not None}
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def child_at(root: Any, path: Path) -> Any:
    """The object at `path`. Raises LookupError or AttributeError if there is none."""
    for label in path:
        container: Any = root
        key: Any = label
        if isinstance(root, (*_MAPPINGS, *_SEQUENCES)):
            root = container[key]
        elif isinstance(root, (set, frozenset)):
            root = list(container)[key]
        elif isinstance(root, types.FunctionType):
            root = dict(captured_by(root))[str(label)]
        elif isinstance(root, functools.partial) and label != "func":
            root = root.args[key] if isinstance(key, int) else root.keywords[key]
        else:
            root = getattr(root, str(label))
    return root


def tensors_under(module: nn.Module, boundary: Boundary) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor that a module holds, also in attributes of its parameters and buffers, except the parameters and buffers of
    the module and of its submodules."""
    seen: set[int] = set()
    registered = [
        (name, held) for name, held in (*module._parameters.items(), *module._buffers.items()) if held is not None
    ]
    stack: list[tuple[Path, Any]] = [
        ((name, mark), value) for name, held in registered for mark, value in vars(held).items()
    ]
    stack += [((name,), value) for name, value in reversed(state_of(module).items())]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Tensor):
            yield path, value
        elif not isinstance(value, PLAIN) and id(value) not in seen:
            seen.add(id(value))
            stack += reversed([((*path, label), child) for label, child in children_of(value, boundary)])


def modules_under(
    module: nn.Module, boundary: Boundary, placeholders: Collection[str]
) -> Iterator[tuple[Path, nn.Module]]:
    """Every module with parameters or buffers that hangs on a module, registered in it or not, without what hangs on those, or on
    objects of the classes `placeholders`."""
    seen = {id(module)}
    stack: list[tuple[Path, Any]] = [((name,), value) for name, value in state_of(module).items()]
    while stack:
        path, value = stack.pop()
        if isinstance(value, (Tensor, *PLAIN)) or id(value) in seen or type(value).__name__ in placeholders:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module) and not is_helper(value, boundary):
            yield path, value
        else:
            stack += [((*path, label), child) for label, child in children_of(value, boundary)]


def helpers_under(module: nn.Module, boundary: Boundary) -> list[tuple[Path, Any]]:
    """Every helper under a module, with the shortest path to it."""
    found: list[tuple[Path, Any]] = []
    seen = {id(module)}
    queue: list[tuple[Path, Any]] = [((name,), value) for name, value in state_of(module).items()]
    for path, value in queue:  # grows
        if not isinstance(value, (dict, list, tuple)):
            if id(value) in seen or not is_helper(value, boundary):
                continue
            seen.add(id(value))
            found.append((path, value))
        queue += [((*path, label), child) for label, child in children_of(value, boundary)]
    return found


def children_of(value: Any, boundary: Boundary) -> list[tuple[Hashable, Any]]:
    """What a container, a function or a helper holds, by the labels of `Path`; empty for all else."""
    if isinstance(value, _MAPPINGS):
        return list(value.items())
    if isinstance(value, (*_SEQUENCES, set, frozenset)):
        return list(enumerate(value))
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        return list(captured_by(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    return list(state_of(value).items()) if is_helper(value, boundary) else []


def equivalent(one: Any, other: Any, same: Callable[[Tensor, Tensor], bool], boundary: Boundary) -> bool:
    """Whether two graphs have the same types, plain values and code, and `same` holds for each pair of tensors.

    An object that can't be inspected (a handle) is equivalent only to itself.
    """
    seen: set[tuple[int, int]] = set()

    def alike(a: Any, b: Any) -> bool:
        if a is b or (id(a), id(b)) in seen:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, Tensor):
            return same(a, b)
        if isinstance(a, PLAIN):
            return bool(a == b)
        seen.add((id(a), id(b)))
        if isinstance(a, types.FunctionType) and a.__code__ is not b.__code__:
            return False
        entered = isinstance(
            a, (dict, list, tuple, types.FunctionType, types.MethodType, functools.partial)
        ) or is_helper(a, boundary)
        if not entered:
            return False
        left, right = children_of(a, boundary), children_of(b, boundary)
        return [label for label, _ in left] == [label for label, _ in right] and all(
            alike(x, y) for (_, x), (_, y) in zip(left, right, strict=True)
        )

    return alike(one, other)


def copied(value: Any, memo: dict[int, Any], tensor: Callable[[Tensor], Tensor], boundary: Boundary) -> Any:
    """A private copy of `value`: containers, helpers and bound methods are copied, `tensor` maps tensors, all else is shared.

    `memo`: copies by the original's id; the caller keeps the originals alive. An object with a finalizer is never copied:
    both copies would free the same resource.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        memo[id(value)] = found = tensor(value)
        return found
    if type(value) is dict:
        memo[id(value)] = twin = {}
        twin.update({key: copied(item, memo, tensor, boundary) for key, item in value.items()})
        return twin
    if type(value) is list:
        memo[id(value)] = items = []
        items += [copied(item, memo, tensor, boundary) for item in value]
        return items
    if type(value) is tuple:
        return tuple(copied(item, memo, tensor, boundary) for item in value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, copied(value.__self__, memo, tensor, boundary))
    if isinstance(value, functools.partial):
        arguments = [copied(item, memo, tensor, boundary) for item in value.args]
        named = {key: copied(item, memo, tensor, boundary) for key, item in value.keywords.items()}
        return functools.partial(copied(value.func, memo, tensor, boundary), *arguments, **named)
    if not is_helper(value, boundary) or not hasattr(value, "__dict__") or hasattr(type(value), "__del__"):
        return value
    memo[id(value)] = helper = object.__new__(type(value))
    for name, held in list(vars(value).items()):
        private = name not in _TORCH_OWN or name == "_modules"
        helper.__dict__[name] = copied(held, memo, tensor, boundary) if private else held
    return helper


def captured_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables that a function captured, and the defaults of its arguments, by name."""
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            yield name, cell.cell_contents


def words(module: str, path: Path) -> str:
    """A dotted name for a path, such as `layers.0.attn.impl.sinks`."""
    return ".".join([module, *map(str, path)]) if module else ".".join(map(str, path))


def _slots(value: Any) -> tuple[str, ...]:
    found: list[str] = []
    for kind in type(value).__mro__:
        slots: str | Mapping[str, Any] | tuple[str, ...] = kind.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]
    return tuple(found)
