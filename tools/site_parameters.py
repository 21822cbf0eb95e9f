"""An extension of griffe (mkdocs.yml): the lines `name: what it is` of a docstring, one for each parameter, become a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"^`?(\w+)`?: ")


class ParameterLists(griffe.Extension):
    """Our docstrings have a line for each parameter; as Markdown those lines would run together."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _listed(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        made = cls.members.get("__init__")
        own = {parameter.name for parameter in made.parameters} if isinstance(made, griffe.Function) else set()
        _listed(cls, own | set(cls.attributes))


def _listed(thing: griffe.Object, names: set[str]) -> None:
    if thing.docstring is None:
        return
    lines: list[str] = []
    inside = False
    for line in thing.docstring.value.splitlines():
        found = _LINE.match(line)
        if found and found[1] in names:
            lines += [""] * (not inside) + [f"- `{found[1]}`: {line[found.end() :]}"]
            inside = True
            continue
        if inside and line and not line.startswith(" "):
            lines.append("")
        inside = inside and line.startswith(" ")
        lines.append(line)
    thing.docstring.value = "\n".join(lines)
