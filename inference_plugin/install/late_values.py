"""Finds the tensors that an engine has kept on a live model since a group was opened.

An engine may derive a value from weights when it first needs it: the positions of a size of an image, a weight in another dtype.
What is there when a group is opened, `references` accounts for. What comes later must not outlive an update unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_plugin.install.graph import PLAIN, Boundary, Path, children_of, is_helper, words

__all__ = ["NO_WEIGHTS", "LateValues"]

NO_WEIGHTS = frozenset({torch.bool, torch.int64})
"""Dtypes of masks and indices."""

_OF_TORCH = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers"}


class _Table(NamedTuple):
    """The attributes of an object, or a dict or list. `keys`: those that it had; `plain`: those of them that held None, a number
    or a text, with their values."""

    name: str
    held: Any
    length: int
    keys: Collection[Any]
    plain: Mapping[Any, Any]

    def new(self) -> Iterator[tuple[Any, Any]]:
        for key, value in _items(self.held):
            if key not in self.keys or (key in self.plain and value is not self.plain[key]):
                yield key, value


class LateValues:
    """Remembers what the modules of a live model held when this was made. `working`: names of working memory, and of caches that
    each update empties. `replaced`: the values that each update makes anew, which are not to be kept alive.

    It keeps the tables that hold values, not the values. Another name for a module of the model, or for one of its parameters, is
    nothing new.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        working: Collection[str],
        replaced: Iterable[Any],
        boundary: Boundary,
    ) -> None:
        self._working = frozenset(working)
        self._boundary = boundary
        held = [t for module in modules.values() for t in (*module._parameters.values(), *module._buffers.values())]
        self._registered = {id(tensor): weakref.ref(tensor) for tensor in held if tensor is not None}
        self._tables: dict[int, _Table] = {}
        self._suspected = False
        passed_over = {id(value) for value in replaced}
        for name, module in modules.items():
            if not _computes_angles(module):
                self._note(name, module, passed_over, is_layer=True)
        self._list()

    def look(self) -> None:
        """Any thread, while the engine computes, so that generation does not wait for it: about 1 ms for a model of 28 layers."""
        try:
            self._suspected = bool(self._find())
        except RuntimeError:  # a step changed a table under the look
            self._suspected = True

    def confirmed(self) -> list[str]:
        """Engine's thread, between two steps: the names of the tensors that the last `look` saw and that are still there. What a
        step makes and drops is not."""
        return self._find() if self._suspected else []

    def _find(self) -> list[str]:
        changed = {id(held) for held, length in self._lengths if len(held) != length}
        changed |= {id(held) for held, key, value in self._plain if held.get(key) is not value}
        changed |= {
            id(held) for held, index, value in self._plain_items if index < len(held) and held[index] is not value
        }
        found = [name for table in changed for name in self._new_tensors(self._tables[table])]
        if changed and not found:
            self._list()
        return found

    def _list(self) -> None:
        """Lists what a look compares: the length of each table, and each plain value."""
        tables = self._tables.values()
        self._lengths = [(table.held, table.length) for table in tables]
        plain = [(table.held, key, value) for table in tables for key, value in table.plain.items()]
        self._plain = [each for each in plain if isinstance(each[0], dict)]
        self._plain_items = [each for each in plain if isinstance(each[0], list)]

    def _new_tensors(self, table: _Table) -> list[str]:
        new = [(words(table.name, (key,)), value) for key, value in table.new() if key not in self._working]
        found = [
            words(name, path)
            for name, value in new
            for path, tensor in self._walk(value)
            if isinstance(tensor, Tensor)
            and tensor.numel()
            and tensor.dtype not in NO_WEIGHTS
            and not self._is_registered(tensor)
        ]
        if not found:  # from now on it is known, and watched
            self._tables[id(table.held)] = self._table(table.name, table.held)
            for name, value in new:
                self._note(name, value)
        return found

    def _is_registered(self, tensor: Tensor) -> bool:
        """Whether this very object was a parameter or buffer of the model, whose values updates replace."""
        return (known := self._registered.get(id(tensor))) is not None and known() is tensor

    def _note(self, name: str, root: Any, passed_over: Collection[int] = (), *, is_layer: bool = False) -> None:
        for path, value in self._walk(root, passed_over, is_layer=is_layer):
            if (held := self._table_of(value, is_layer=is_layer and not path)) is not None:
                self._tables.setdefault(id(held), self._table(words(name, path), held))

    def _table(self, name: str, held: Any) -> _Table:
        items = [(key, value) for key, value in _items(held) if key not in self._working]
        plain = {key: value for key, value in items if isinstance(value, PLAIN)}
        return _Table(name, held, len(held), frozenset(key for key, _ in items), plain)

    def _table_of(self, value: Any, *, is_layer: bool) -> Any:
        if isinstance(value, (dict, list)):
            return value
        entered = is_layer or isinstance(value, Tensor) or is_helper(value, self._boundary)
        return getattr(value, "__dict__", None) if entered else None

    def _walk(
        self, root: Any, passed_over: Collection[int] = (), *, is_layer: bool = False
    ) -> Iterator[tuple[Path, Any]]:
        """All that hangs on `root`, itself first. `is_layer`: it is a module of the model, which is entered, without its
        submodules."""
        seen: set[int] = set()
        stack: list[tuple[Path, Any]] = [((), root)]
        while stack:
            path, value = stack.pop()
            if (
                isinstance(value, PLAIN)
                or id(value) in passed_over
                or id(value) in seen
                or not self._working.isdisjoint(path)
            ):
                continue
            seen.add(id(value))
            yield path, value
            if is_layer and not path:
                inside = [(key, item) for key, item in _items(vars(value)) if key not in _OF_TORCH]
            else:
                inside = _items(vars(value)) if isinstance(value, Tensor) else children_of(value, self._boundary)
            stack += [((*path, key), item) for key, item in inside]


def _computes_angles(module: nn.Module) -> bool:
    """Whether a module computes with positions and no weights."""
    return "rotary" in type(module).__name__.lower() and next(module.parameters(), None) is None


def _items(held: Any) -> list[tuple[Any, Any]]:
    return list(held.items()) if isinstance(held, dict) else list(enumerate(held))
