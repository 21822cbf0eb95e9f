"""Which entries a fetch needs, and a batch's columns once they have arrived. `client` moves the bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from inference_plugin.wire.errors import BatchError, ProtocolError
from trainer_adapters.batch.columns import Column
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, ShardId

__all__ = ["arrived", "missing", "refuse_in_event_loop"]


def missing(columns: Iterable[Column], have: Mapping[Entry, LocalPart]) -> list[Entry]:
    """The entries whose rows are neither here nor in `have`, each once. Raises `BatchError` for two entries of one shard."""
    wanted: dict[ShardId, Entry] = {}
    for column in columns:
        for entry in () if column.is_local else column.all_entries():
            if (first := wanted.setdefault(entry.shard, entry)) is not entry and first != entry:
                raise BatchError(
                    f"two different entries of shard {entry.shard}, of owners {first.owner!r} and {entry.owner!r}",
                    hint="task ids must be unique over a training; a later put of a task makes its older entries void",
                )
    return [entry for entry in wanted.values() if entry not in have] if have else list(wanted.values())


def arrived(
    columns: Mapping[str, Column], fetched: Mapping[ShardId, LocalPart], have: Mapping[Entry, LocalPart]
) -> dict[str, Column]:
    """The columns with their rows here: those just `fetched`, and those that earlier fetches got.

    Raises `ProtocolError` if a part is missing, or not as its entry says.
    """
    return {
        key: column
        if column.is_local
        else column.fetched(
            [_part(entry, fetched.get(entry.shard) or have.get(entry)) for entry in column.all_entries()]
        )
        for key, column in columns.items()
    }


def refuse_in_event_loop() -> None:
    """Raises `BatchError` where a blocking fetch would stop an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BatchError("fetch() would block the event loop that runs in this thread", hint="use `await batch.afetch()`")


def _part(entry: Entry, part: LocalPart | None) -> LocalPart:
    if part is None:
        raise ProtocolError(f"the fetch ended without an error, but shard {entry.shard} has not arrived")
    if (part.kind, part.rows, part.dtype, part.item_shape) != (entry.kind, entry.rows, entry.dtype, entry.item_shape):
        raise ProtocolError(f"the fetch of shard {entry.shard} gave {part}, which its entry does not describe")
    return part
