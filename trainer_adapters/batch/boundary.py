"""The interface between batches and `trainer_adapters.batch.client`, the module that moves bytes."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Protocol, cast

from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import ClearReport, Entry, Owner, ShardId

__all__ = ["TIMEOUT_S", "Client", "client"]

TIMEOUT_S = 300.0
"""Default time limit of a fetch or clear."""


class Client(Protocol):
    """The functions of `trainer_adapters.batch.client`. `have` is filled as rows arrive, also by a fetch that fails."""

    def fetch_entries(
        self,
        entries: Sequence[Entry],
        owners: Mapping[str, Owner],
        *,
        timeout_s: float,
        have: MutableMapping[ShardId, LocalPart],
    ) -> None: ...

    async def afetch_entries(
        self,
        entries: Sequence[Entry],
        owners: Mapping[str, Owner],
        *,
        timeout_s: float,
        have: MutableMapping[ShardId, LocalPart],
    ) -> None: ...

    def clear_tasks(self, task_ids: Iterable[str], owners: Mapping[str, Owner], *, timeout_s: float) -> ClearReport: ...


def client() -> Client:
    """The module that moves bytes; loaded when the first byte is to be moved."""
    return cast(Client, importlib.import_module("trainer_adapters.batch.client"))
