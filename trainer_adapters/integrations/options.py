"""What integrations share: a user's options for `SyncManager`, checked when they are given and not in the first update, and the
wait for replicas before it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

from inference_plugin.wire.errors import (
    ArgumentError,
    ConfigError,
    EngineUnsupported,
    PeerLost,
    SyncTimeout,
    WeightwireError,
)
from inference_plugin.wire.messages import ReplicaCard
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.selection import DtypeRules

__all__ = ["await_ranks", "await_replicas", "checked_options", "replicas_behind"]

ANSWER_S = 30.0  # longest wait for a server's answer about its replicas


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


def replicas_behind(url: str) -> set[str]:
    """The replicas of the server at `url`. Raises `EngineUnsupported` if it has none, and `PeerLost` if it doesn't answer."""
    import requests

    try:
        answer = requests.get(f"{url}/ready", timeout=ANSWER_S)
        said = answer.json() if answer.status_code in (200, 503) else {"replicas": []}
        found = {one["replica"] for one in said["replicas"]}
    except (requests.RequestException, KeyError, TypeError) as error:
        raise PeerLost(f"the server at {url} gave no answer about its replicas: {error!r}", side="trainer") from error
    if not found:
        why = ", ".join(said.get("why", ())) or f"/ready is answered with status {answer.status_code}"
        hint = "install Weightwire beside its vLLM; where it is, the log says `weightwire: OFF` and the reason"
        raise EngineUnsupported(f"the server at {url} takes no weight updates: {why}", hint=hint)
    return found


def await_replicas(manager: SyncManager, names: set[str]) -> None:
    """Rank 0 waits until these replicas, which run, have registered: an engine on another host finds a new manager only when it
    tries again, which takes a third of `silence_s`. Raises `SyncTimeout` after `silence_s`."""

    def lacking(cards: list[ReplicaCard]) -> str:
        missing = names - {card.replica for card in cards}
        return f"{', '.join(sorted(missing))} of the server's {len(names)} replicas did not register" if missing else ""

    hint = "trainer and engine need the same WEIGHTWIRE_JOB, and on several hosts WEIGHTWIRE_REGISTRY"
    _await(manager, lacking, manager.settings.config.silence_s, hint)


def await_ranks(manager: SyncManager, count: int, timeout_s: float | None = None) -> None:
    """Rank 0 waits until replicas with `count` ranks in all have registered, however many replicas these are: one that is missing
    would go on with the weights that it was started with. Raises `SyncTimeout` after `timeout_s`, by default the manager's."""

    def lacking(cards: list[ReplicaCard]) -> str:
        there = sum(len(card.workers) for card in cards)
        return f"replicas with {there} ranks have registered, of {count} that there are" if there < count else ""

    _await(manager, lacking, manager.settings.timeout_s if timeout_s is None else timeout_s)


def _await(
    manager: SyncManager, lacking: Callable[[list[ReplicaCard]], str], timeout_s: float, hint: str | None = None
) -> None:
    """Rank 0 waits until nothing is `lacking` any more of the replicas that have registered."""
    deadline_s = time.monotonic() + timeout_s
    cards = manager.discover() if manager.rank == 0 else []
    while manager.rank == 0 and (what := lacking(cards)):
        try:
            cards = manager.wait_for_replicas(len(cards) + 1, timeout_s=max(0.0, deadline_s - time.monotonic()))
        except SyncTimeout as error:
            raise SyncTimeout(
                f"{what}: {error.message}", hint=hint or error.hint, side="manager", phase="discover"
            ) from error
