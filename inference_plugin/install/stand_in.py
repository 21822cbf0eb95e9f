"""A private copy of one module of the skeleton, on which the engine's post-processing runs, and the changes that it made.

The copy includes parameters, buffers, constants, and the helpers behind attributes (`graph.is_helper`). Nothing that
post-processing writes to it reaches the skeleton or the live model.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from inference_plugin.install.graph import Boundary, Path, captured_by, child_at, copied, helpers_under, state_of
from inference_plugin.wire.geometry import Region, region_of

__all__ = ["ABSENT", "StandIn", "frozen"]

ABSENT: Any = object()
"""The value of an attribute that is missing."""


class StandIn:
    """`tensor` maps a tensor of the skeleton to a real one. `key_of` returns the key of the storage that a real tensor views.

    `submodules`: finished stand-ins for the submodules that post-processing reads; all other submodules stay the skeleton's.
    """

    module: nn.Module

    def __init__(
        self,
        original: nn.Module,
        tensor: Callable[[Tensor], Tensor],
        key_of: Callable[[Tensor], str | None],
        boundary: Boundary,
        submodules: Mapping[str, StandIn],
    ) -> None:
        self._key_of = key_of
        self._submodules = submodules
        self.module = object.__new__(type(original))
        memo: dict[int, Any] = {id(original): self.module}
        memo |= {id(original._modules[name]): twin.module for name, twin in submodules.items()}
        self._originals = original  # keeps the ids of the memo
        for name, held in vars(original).items():
            private = name in ("_parameters", "_buffers", "_modules") or name not in _OWN
            self.module.__dict__[name] = copied(held, memo, tensor, boundary) if private else held
        copies = {id(value) for value in memo.values()}
        self._nodes: dict[Path, Any] = {(): self.module}
        for path, node in helpers_under(self.module, boundary):
            if id(node) in copies:
                self._nodes[path] = node
        self._before = {path: _snapshot(node) for path, node in self._nodes.items()}
        self.parameters = dict(self.module._parameters)
        self.buffers = dict(self.module._buffers)
        self._versions = {name: held._version for name, held in self.buffers.items() if held is not None}

    def written_buffers(self) -> dict[str, Tensor]:
        """Buffers that post-processing replaced or wrote to."""
        return {
            name: held
            for name, held in self.module._buffers.items()
            if held is not None and (held is not self.buffers.get(name) or held._version != self._versions[name])
        }

    def changes(self) -> dict[Path, Any]:
        """The attributes that post-processing set on the module and its helpers, by path; `ABSENT` for those that it removed.
        Parameters and buffers are left out."""
        found: dict[Path, Any] = {}
        for path, node in self._nodes.items():
            before, now = self._before[path], state_of(node)
            for name in before.keys() | now.keys():
                value = now.get(name, ABSENT)
                if value is ABSENT or name not in before or before[name] != frozen(value):
                    found[*path, name] = value
        return found

    def region(self, tensor: Tensor) -> Region | None:
        """The region of a storage that `tensor` is a view of; None if it has memory of its own."""
        key = self._key_of(tensor)
        return None if key is None else region_of(key, tensor)

    def for_live(self, value: Any, live: nn.Module) -> Any:
        """`value`, with the stand-in and its helpers replaced by the live module and its helpers. Raises LookupError or
        AttributeError if the live module lacks one."""
        if value is ABSENT:
            return value
        memo: dict[int, Any] = {id(node): child_at(live, path) for path, node in self._nodes.items()}
        memo |= {id(twin.module): live._modules.get(name) for name, twin in self._submodules.items()}
        memo |= {
            id(held): live._parameters[name]
            for name, held in self.module._parameters.items()
            if held is not None and live._parameters.get(name) is not None and held is self.parameters.get(name)
        }
        return _replaced(value, memo)

    def captures_itself(self, value: Any) -> bool:
        """Whether a function in `value` has the stand-in or one of its helpers in its closure, so that it can't be moved."""
        own = {id(node) for node in self._nodes.values()}
        stack, seen = [value], set[int]()
        while stack:
            item = stack.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, types.FunctionType):
                captured = [held for _, held in captured_by(item)]
                if any(id(held) in own for held in captured):
                    return True
                stack += captured
            elif isinstance(item, dict):
                stack += item.values()
            elif isinstance(item, (list, tuple)):
                stack += item
        return False


_OWN = frozenset(nn.Module().__dict__)


def _snapshot(node: Any) -> dict[str, Any]:
    return {name: frozen(value) for name, value in state_of(node).items()}


class _Same:
    """Compares by identity and version. Keeps the object, so that no other object gets its id."""

    def __init__(self, value: Any, version: int = 0) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value and other._version == self._version

    __hash__ = None  # type: ignore[assignment]


def frozen(value: Any) -> Any:
    """A snapshot that compares equal until something in `value` is set or written. It does not enter helpers, which have
    snapshots of their own."""
    if isinstance(value, Tensor):
        return _Same(value, 0 if value.is_inference() else value._version)
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    return _Same(value)


def _replaced(value: Any, memo: Mapping[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if type(value) is dict:
        return {key: _replaced(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, memo) for item in value)
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _replaced(value.__self__, memo))
    return value
