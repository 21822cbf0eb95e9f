"""What users give an integration for its `SyncManager`: checked when it is given, not in the first update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from inference_plugin.wire.errors import ArgumentError, ConfigError, WeightwireError
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.selection import DtypeRules

__all__ = ["checked_options"]


def checked_options(
    options: object, dtype: Any, given_as: str, error: type[ArgumentError | ConfigError] = ArgumentError
) -> dict[str, Any]:
    """`options`, keywords for `SyncManager`. Raises `error` if they are no mapping, or name something that `SyncManager` does not
    take, and for a `dtype` that is none; `given_as` says where the user gave them."""
    if not isinstance(options, Mapping):
        raise error(
            f"{given_as}: {options!r} is no mapping", hint="give SyncManager's keywords, such as {'timeout_s': 300}"
        )
    try:
        inspect.signature(SyncManager).bind(**options)
    except TypeError as wrong:
        raise error(f"{given_as}: SyncManager {wrong}", hint="docs/trainers.md lists what it takes") from None
    try:
        DtypeRules(dtype)
    except (WeightwireError, TypeError, ValueError) as wrong:
        why = wrong.message if isinstance(wrong, WeightwireError) else f"it is a {type(dtype).__name__}"
        raise error(
            f"{given_as}: dtype={dtype!r}: {why}", hint="a dtype is torch.bfloat16 or its name, 'bfloat16'"
        ) from None
    return dict(options)
