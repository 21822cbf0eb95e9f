"""What the files of all engines use to hook in."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

from torch import nn

__all__ = ["finish", "installed_version", "wrap"]


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


def finish(quant_method: Any, module: nn.Module) -> None:
    """An engine's post-processing of one module, by a method as it was before any load.

    The method of a mixture of experts may remember that it has packed once, and pack no more from then on.
    """
    copy.copy(quant_method).process_weights_after_loading(module)
