"""What integrations share: a user's options for `SyncManager`, checked when they are given and not in the first update, and the
wait for replicas before it."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Mapping
from typing import Any

from inference_plugin.wire.errors import ArgumentError, ConfigError, SyncTimeout, WeightwireError
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.selection import DtypeRules

__all__ = ["await_ranks", "await_registrations", "checked_options"]


def checked_options(
    options: object, dtype: Any, given_as: str, error: type[ArgumentError | ConfigError] = ArgumentError
) -> dict[str, Any]:
    """`options`, keywords for `SyncManager`. Raises `error` if they are no mapping, if `SyncManager` lacks one of them, and
    for an invalid `dtype`; `given_as` says where the user gave them."""
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
    except WeightwireError as wrong:
        raise error(
            f"{given_as}: dtype={dtype!r}: {wrong.message}", hint="a dtype is torch.bfloat16 or its name, 'bfloat16'"
        ) from None
    return dict(options)


def await_registrations(manager: SyncManager, count: int) -> None:
    """Rank 0 waits until `count` replicas have registered: an engine on another host finds a new manager only when it tries
    again. After `silence_s` nothing is raised: the update says what is missing."""
    if manager.rank == 0:
        with contextlib.suppress(SyncTimeout):
            manager.wait_for_replicas(count, timeout_s=manager.settings.config.silence_s)


def await_ranks(manager: SyncManager, count: int) -> None:
    """Rank 0 waits until replicas with `count` ranks in all have registered, however many replicas these are: one that is missing
    would go on with the weights that it was started with. Raises `SyncTimeout` after `timeout_s`."""
    deadline_s = time.monotonic() + manager.settings.timeout_s
    cards = manager.discover() if manager.rank == 0 else []
    while manager.rank == 0 and (there := sum(len(card.workers) for card in cards)) < count:
        try:
            cards = manager.wait_for_replicas(len(cards) + 1, timeout_s=max(0.0, deadline_s - time.monotonic()))
        except SyncTimeout as error:
            raise SyncTimeout(
                f"replicas with {there} ranks have registered, of {count} that there are: {error.message}",
                hint=error.hint,
                side="manager",
                phase="discover",
            ) from error
