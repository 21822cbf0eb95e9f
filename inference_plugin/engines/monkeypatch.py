"""Wraps an engine's functions, all or none; where that fails, the engine runs without the plug-in."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from inference_plugin.net import diagnosis
from inference_plugin.wire.errors import EngineUnsupported, WeightwireError

__all__ = ["add", "all_or_none", "contained", "installed_version", "run_without", "wrap"]

WARNED = "_WW_WARNED"
"""Set by `run_without`, never by a user: the warning that this process gave, so that its children don't repeat it."""


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces `owner.name` by the decorated function, which gets the original first. A class method stays one."""

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        found = vars(owner).get(name)
        original = found.__func__ if isinstance(found, classmethod) else getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        _set(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)
        return wrapped

    return decorate


def add(owner: Any, name: str, value: Any) -> None:
    """Gives `owner` an attribute that it must not have yet. Raises `EngineUnsupported`."""
    if hasattr(owner, name):
        raise EngineUnsupported(f"{owner.__name__} has an attribute {name} already", phase="start")
    _set(owner, name, value)


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Around all the `wrap`s and `add`s of an engine: where one fails, those before it are taken back."""
    _changes.clear()
    try:
        yield
    except BaseException:
        for owner, name, before in reversed(_changes):
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        raise
    finally:
        _changes.clear()


@contextlib.contextmanager
def contained(what: str, logger: logging.Logger) -> Iterator[None]:
    """Around our own part of a wrapped function: a failure is logged, loudly once per `what`, and does not reach the engine."""
    try:
        yield
    except Exception as error:
        first = what not in _contained
        _contained.add(what)
        logger.log(logging.ERROR if first else logging.DEBUG, "weightwire: %s failed: %s", what, error, exc_info=True)


def run_without(engine: str, error: BaseException, logger: logging.Logger, about: str = "") -> None:
    """Warns that this process runs `engine` without the plug-in, and notes it for `doctor` and `status`. Never raises.

    The processes that this one starts fail alike and don't warn again. `about` says what the engine runs.
    """
    why = f"{about}: {WeightwireError.wrap(error)}" if about else str(WeightwireError.wrap(error))
    logger.debug("weightwire: what failed", exc_info=error)
    mark = hashlib.sha256(f"{engine}: {why}".encode(errors="replace")).hexdigest()
    if os.environ.get(WARNED) == mark:
        return
    os.environ[WARNED] = mark
    logger.warning(
        "weightwire: OFF in this engine: it serves as if the plug-in were not installed, and no trainer will find it: %s",
        why,
    )
    try:
        diagnosis.note_problem(engine, why)
    except Exception as unwritten:  # noqa: BLE001 -- whatever keeps it from being written, the engine starts
        logger.warning("weightwire: `weightwire doctor` won't know of it: %s", unwritten)


def installed_version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            if version := metadata.version(name):
                return version
    return "unknown"


_NOTHING = object()
_changes: list[tuple[Any, str, Any]] = []
_contained: set[str] = set()


def _set(owner: Any, name: str, value: Any) -> None:
    before = vars(owner).get(name, _NOTHING)  # undoing must not copy an inherited attribute into `owner`
    setattr(owner, name, value)
    _changes.append((owner, name, before))
