"""Fresh memory of an installation starts as 0xFF: NaN in every floating type, so that a byte which nobody wrote shows.

`spread()` is for a process of an engine and for one of a trainer. Nothing may depend on memory that starts as zeros:
in an engine that has run for a while it does not.
"""

from __future__ import annotations

import functools
import importlib
import os
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["VARIABLE", "spread", "spread_if_asked"]

VARIABLE = "WEIGHTWIRE_TEST_POISON"
INSTALLING = ("layout", "policies", "post_processing", "proof", "trial_load")
"""Modules of `inference_plugin.install` that make memory for weights."""


def spread_if_asked() -> None:
    if os.environ.get(VARIABLE, "0") != "0":
        spread()


def spread() -> Callable[[], None]:
    """Poisons second sets, skeletons in memory, stand-ins' storages, and staging memory, in this process, until what it
    returns is called. Twice is once."""
    from inference_plugin.transports import bucket_staging, delta, segment, store_staging

    before: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    for module_name in INSTALLING:
        module: Any = importlib.import_module(f"inference_plugin.install.{module_name}")
        if not isinstance(module.torch, _Poisoned):
            replace(module, "torch", _Poisoned("torch"))
    for owner, name, do in (
        (segment.SharedSegment, "create", lambda made: _poison(made.tensor)),
        (bucket_staging.BucketReceiver, "open", lambda staging: _poison(staging.segment)),
        (delta.DeltaReceiver, "open", lambda staging: None if staging.landing else _poison(staging.segment)),
        (store_staging.StoreReceiver, "open", lambda staging: None if staging.landing else _poison(staging.segment)),
    ):
        if (after := _after(vars(owner).get(name), do)) is not None:
            replace(owner, name, after)

    def undo() -> None:
        while before:
            setattr(*before.pop())

    return undo


class _Poisoned(types.ModuleType):
    """`torch` with poisoned `empty` and `empty_like`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("empty", "empty_like"):
            return found

        @functools.wraps(found)
        def poisoned(*args: Any, **kwargs: Any) -> Any:
            tensor = found(*args, **kwargs)
            _poison(tensor)
            return tensor

        return poisoned


def _poison(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if tensor.device.type == "cpu" and storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


def _after(held: Any, do: Callable[[Any], None]) -> Any:
    """`held`, whose result is given to `do` first; None if there is no such method, or it does so already."""
    original = held.__func__ if isinstance(held, staticmethod) else held
    if original is None or hasattr(original, "poisons"):
        return None

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        do(made)
        return made

    wrapped.poisons = True  # type: ignore[attr-defined]
    return staticmethod(wrapped) if isinstance(held, staticmethod) else wrapped
