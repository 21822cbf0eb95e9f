"""Finds a patch point in the source of a release that is not installed: in syntax trees, through re-exports and base classes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from inference_plugin.engines.patch_points import PatchPoint

__all__ = ["Release", "wrong_in"]

MAX_ALIASES = 20
"""Longest chain of re-exports and base classes that is followed."""


@dataclass(frozen=True)
class Release:
    """The sources of a release: text by path, for instance `vllm/v1/engine/core.py`."""

    distribution: str
    version: str
    read: Callable[[str], str | None]
    """The text of a file, None if there is none."""

    @cached_property
    def _modules(self) -> dict[str, ast.Module | None]:
        return {}

    def module(self, name: str) -> ast.Module | None:
        """A module's syntax tree; None if the release has no such module, or none in Python."""
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self.read(f"{path}.py")
            text = self.read(f"{path}/__init__.py") if text is None else text
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def is_package(self, name: str) -> bool:
        return self.read(f"{name.replace('.', '/')}/__init__.py") is not None


def wrong_in(release: Release, point: PatchPoint) -> str:
    """What is wrong with a place in this release, in words; "" for nothing."""
    module, _, path = point.place.partition(":")
    try:
        found = _found(release, module, path.split(".") if path else [])
    except SyntaxError as error:
        return f"can't be read: {error}"
    except RecursionError:
        return "can't be read: its names lead in a circle"
    if found is None:
        return "missing"
    there = _parameters(release, *found)
    if there is not None and (absent := [name for name in point.parameters if name not in there]):
        return f"has no parameter {', '.join(absent)}"
    return ""


Place = tuple[str, ast.AST]
"""A node, and the module in whose scope its names are resolved."""


def _found(release: Release, module: str, path: list[str]) -> Place | None:
    """The node of `module:path`, through re-exports and base classes."""
    tree = release.module(module)
    if tree is None:
        return None
    place: Place | None = (module, tree)
    for name in path:
        if place is None:
            return None
        place = _member(release, *place, name)
    return place


def _member(release: Release, module: str, node: ast.AST, name: str, depth: int = 0) -> Place | None:
    if depth > MAX_ALIASES:
        return None
    bound = _bound(node, name)
    if isinstance(bound, ast.ImportFrom | ast.Import):
        return _imported(release, module, bound, name)
    if bound is not None:
        return module, bound
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            owner = _named(release, module, base)
            if owner is not None and (found := _member(release, *owner, name, depth + 1)) is not None:
                return found
    if isinstance(node, ast.Module):
        return _by_star(release, module, node, name, depth) or _of_package(release, module, node, name)
    return None


def _by_star(release: Release, module: str, tree: ast.Module, name: str, depth: int) -> Place | None:
    """What `from source import *` brings."""
    for statement in _statements(tree.body):
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
            source = _absolute(module, "." * statement.level + (statement.module or ""), release.is_package(module))
            brought = release.module(source)
            if brought is not None and (found := _member(release, source, brought, name, depth + 1)) is not None:
                return found
    return None


def _of_package(release: Release, module: str, tree: ast.Module, name: str) -> Place | None:
    """What a package has besides the names that its `__init__` binds: submodules, and names that it imports lazily."""
    if not release.is_package(module):
        return None
    if (found := release.module(f"{module}.{name}")) is not None:
        return f"{module}.{name}", found
    source = _lazy(tree).get(name)
    return None if source is None else _found(release, _absolute(module, source, True), [name])


def _lazy(tree: ast.Module) -> Mapping[str, str]:
    """Names by the module that they come from, in a dictionary of strings such as packages with `__getattr__` keep."""
    found: dict[str, str] = {}
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict):
            for key, entry in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(entry, ast.Constant) and isinstance(entry.value, str):
                    found[str(key.value)] = entry.value.partition(":")[0]
    return found


def _bound(node: ast.AST, name: str) -> ast.AST | None:
    """The last statement in a module's or a class's body that binds `name`, whatever condition it stands under."""
    bound: ast.AST | None = None
    for statement in _statements(getattr(node, "body", [])):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [statement.name]
            case ast.ImportFrom() | ast.Import():
                names = [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
            case ast.Assign():
                names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            case ast.AnnAssign():
                names = [statement.target.id] if isinstance(statement.target, ast.Name) else []
            case _:
                names = []
        if name in names:
            bound = statement
    return bound


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of a body, those under `if`, `try` and `with` too."""
    found = []
    for statement in body:
        found.append(statement)
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                found += _statements(getattr(statement, part, []))
        for handler in getattr(statement, "handlers", []):
            found += _statements(handler.body)
    return found


def _imported(release: Release, module: str, node: ast.ImportFrom | ast.Import, name: str) -> Place | None:
    """What an import statement binds to `name`. A module of another distribution counts as found."""
    alias = next(one for one in node.names if (one.asname or one.name.partition(".")[0]) == name)
    if isinstance(node, ast.Import):
        source, path = alias.name, list[str]()
    else:
        source = _absolute(module, "." * node.level + (node.module or ""), release.is_package(module))
        path = [alias.name]
    if release.module(source.partition(".")[0]) is None:
        return module, node
    return _found(release, source, path)


def _absolute(module: str, source: str, is_package: bool) -> str:
    """The module that `source` means inside `module`; it may begin with dots."""
    name = source.lstrip(".")
    level = len(source) - len(name)
    if level == 0:
        return name
    parts = module.split(".")
    parts = parts[: len(parts) - level + is_package]
    return ".".join([*parts, *filter(None, [name])])


def _named(release: Release, module: str, node: ast.expr) -> Place | None:
    """The place that an expression such as a base class names; None if it cannot be told."""
    if isinstance(node, ast.Subscript):
        node = node.value
    path: list[str] = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    return _found(release, module, [node.id, *path]) if isinstance(node, ast.Name) else None


def _parameters(release: Release, module: str, node: ast.AST, depth: int = 0) -> set[str] | None:
    """The parameters of a function, or of making an instance of a class. None: they cannot be told from the source."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        return {argument.arg for argument in named if argument is not None}
    if not isinstance(node, ast.ClassDef) or depth > MAX_ALIASES:
        return None
    if isinstance(init := _bound(node, "__init__"), ast.FunctionDef):
        return _parameters(release, module, init)
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for base in node.bases:
        owner = _named(release, module, base)
        if owner is not None:
            fields |= _parameters(release, *owner, depth + 1) or set()
    return fields
