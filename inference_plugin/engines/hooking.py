"""What the files of engines use to hook in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

__all__ = ["installed_version", "wrap"]


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces `owner.name` by the decorated function, which gets the original as its first argument."""

    def decorate(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        return wrapped

    return decorate


def installed_version(*distributions: str) -> str:
    """The version of the first of these distributions that is installed."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            if version := metadata.version(name):
                return version
    return "unknown"
