"""What a pool checks: the payloads of its user, and the metadata of its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_plugin.wire.errors import BatchError, ProtocolError, WeightwireError
from inference_plugin.wire.messages.rollout import MAX_TASK_BYTES
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.records import Entry, Kind

__all__ = ["check_entries", "encoded_payload"]


def encoded_payload(task_id: str, payload: Any) -> bytes:
    """The payload in msgpack. Raises `BatchError` if it is not a plain value, or too large."""
    try:
        part = local_part([payload])
        if part.kind is not Kind.VALUES:
            raise BatchError(
                f"a {type(payload).__name__} is not a plain value",
                hint="a payload is None, bool, int, float, str, bytes, or lists and dicts of these",
            )
        encoded = part.encoded
    except WeightwireError as error:
        raise BatchError(f"the payload of task {task_id!r}: {error.message}", hint=error.hint) from error
    if len(encoded) > MAX_TASK_BYTES:
        raise BatchError(
            f"the payload of task {task_id!r} has {len(encoded)} bytes; allowed are {MAX_TASK_BYTES}",
            hint="put what is large where the worker can read it, and submit its name",
        )
    return encoded


def check_entries(task_id: str, entries: Sequence[Entry], owner: str | None) -> None:
    keys = [entry.shard.key for entry in entries]
    if not entries or len(set(keys)) != len(keys) or len({entry.rows for entry in entries}) != 1:
        raise ProtocolError(f"task {task_id!r} was announced with no rows, or with keys that disagree: {keys[:8]}")
    for entry in entries:
        if entry.shard.task_id != task_id or (owner is not None and entry.owner != owner):
            raise ProtocolError(f"task {task_id!r} was announced with shard {entry.shard} of owner {entry.owner!r}")
