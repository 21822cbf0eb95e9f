"""The places of an engine that we call, wrap or read: a table for each engine, and its check when the engine starts."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["EngineTable", "PatchPoint", "check_patch_points", "judge", "resolve"]


@dataclass(frozen=True)
class PatchPoint:
    """One place: `module:qualified.name`, the parameters that it must have, and what we do with it.

    It is needed from version `since` on, and no longer from version `until` on; "" sets no limit. With `without` the place is
    optional: an engine that lacks it, or is older than `since`, is served, and `without` says what its users miss.
    """

    place: str
    parameters: tuple[str, ...] = ()
    why: str = ""
    since: str = ""
    until: str = ""
    without: str = ""

    def needed_in(self, version: str) -> bool:
        """Whether this version of the engine must have the place. A version that is no number counts as the newest."""
        number = _release(version)
        return not (self.since and number < _release(self.since)) and not (
            self.until and number >= _release(self.until)
        )


@dataclass(frozen=True)
class EngineTable:
    """Everything that is known of an engine's versions. `oldest` and `newest` are the first and the last one that the table
    was compared with; a newer one is accepted if it has every place."""

    engine: str
    distributions: tuple[str, ...]
    """Names under which package indexes have the engine, the usual one first."""
    oldest: str
    newest: str
    run: tuple[str, ...]
    """Versions that the engine tests ran with."""
    points: tuple[PatchPoint, ...]

    @property
    def served(self) -> str:
        """The versions that are served, in words. `docs/versions.md` says which of them were run."""
        return f"{self.engine} {self.oldest} to {self.newest}"


def check_patch_points(table: EngineTable, version: str) -> tuple[str, ...]:
    """What users of the installed engine miss for want of an optional place, in words; most miss nothing.

    To be called before anything is wrapped. Raises `EngineUnsupported`, which names the engine's version, every place that is
    missing or changed, and the versions that are served.
    """
    wrong, lacks = judge(table, version, _wrong)
    if wrong:
        raise EngineUnsupported(
            f"{table.engine} {version} is not the engine this plug-in knows: {'; '.join(wrong)}",
            hint=f"served are {table.served}; to run without Weightwire set WEIGHTWIRE_DISABLE=1",
            phase="start",
        )
    return lacks


def judge(
    table: EngineTable, version: str, wrong: Callable[[PatchPoint], str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What keeps this version of the engine from being served, and what it lacks, both in words. `wrong` says what is wrong
    with a place, "" for nothing."""
    missing, lacks = [], []
    if _release(version) < _release(table.oldest):
        missing.append(f"it is older than {table.oldest}")
    for point in table.points:
        reason = wrong(point)
        if point.without and (reason or not point.needed_in(version)):
            lacks.append(point.without)
        elif reason and point.needed_in(version):
            missing.append(f"{point.place} ({reason})")
    return tuple(missing), tuple(dict.fromkeys(lacks))


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


def _wrong(point: PatchPoint) -> str:
    try:
        found = resolve(point.place)
        there = inspect.signature(getattr(found, "__func__", found)).parameters if point.parameters else {}
    except (ImportError, AttributeError) as error:
        return f"missing: {error}"
    except Exception as error:  # noqa: BLE001 -- what importing an engine's module raises is anybody's guess
        return f"can't be read: {type(error).__name__}: {error}"
    if point.parameters and (missing := [name for name in point.parameters if name not in there]):
        return f"has no parameter {', '.join(missing)}"
    return ""


def _release(version: str) -> tuple[float, ...]:
    """The numbers of a version for comparing: "0.30.1rc2+cpu" is (0, 30, 1). Without a number it is a build from source."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else (float("inf"),)
