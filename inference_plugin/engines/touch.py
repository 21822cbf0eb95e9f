"""The table of places of an engine that its file touches, and the check of that table at start."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["Touch", "check_touches", "resolve"]


@dataclass(frozen=True)
class Touch:
    """One place: `module:qualified.name`, parameters that must be there if it is callable, and what we do with it."""

    place: str
    parameters: tuple[str, ...] = ()
    why: str = ""


def check_touches(engine: str, version: str, known_versions: Sequence[str], touches: Sequence[Touch]) -> None:
    """Raises `EngineUnsupported` that names the engine's version, every place that is missing or changed, and the
    versions that are known to work. Nothing is touched before it returned."""
    wrong = [f"{touch.place} ({reason})" for touch in touches if (reason := _wrong(touch))]
    if wrong:
        raise EngineUnsupported(
            f"{engine} {version} is not the engine this plug-in knows: {'; '.join(wrong)}",
            hint=f"known to work: {engine} {', '.join(known_versions)}; to run without Weightwire set WEIGHTWIRE_DISABLE=1",
            phase="start",
        )


def resolve(place: str) -> Any:
    """The object at `module:qualified.name`. Raises ImportError or AttributeError."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        fields = getattr(found, "__dataclass_fields__", {})  # a field without a plain default is no attribute
        if name in fields:
            found = fields[name]
        else:
            found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    return found


def _wrong(touch: Touch) -> str:
    try:
        found = resolve(touch.place)
    except (ImportError, AttributeError) as error:
        return f"missing: {error}"
    if touch.parameters:
        there = inspect.signature(getattr(found, "__func__", found)).parameters
        if missing := [name for name in touch.parameters if name not in there]:
            return f"has no parameter {', '.join(missing)}"
    return ""
