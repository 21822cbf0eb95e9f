"""Rows that are no tensors: None, bool, int, float, str, bytes, and lists and dicts of them, as msgpack carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from inference_plugin.wire.errors import BatchError, ProtocolError
from trainer_adapters.batch.records import Entry

__all__ = ["PlainValue", "decode_values", "encode_values", "plain_values"]

PlainValue = None | bool | int | float | str | bytes | list[Any] | dict[Any, Any]

MAX_DEPTH = 32
"""Deepest nesting of lists and dicts in one value."""

_DECODER = msgspec.msgpack.Decoder(list[Any])
_ENCODER = msgspec.msgpack.Encoder()
_SCALARS = frozenset({type(None), bool, float, str, bytes})


def plain_values(rows: Sequence[Any]) -> list[PlainValue]:
    """Rows as msgpack gives them back: tuples as lists, numpy scalars as Python's. Raises `BatchError` that names the place
    of what has no plain form."""
    return _plain_list(rows, "rows", 0)


def encode_values(values: list[PlainValue]) -> bytes:
    """Raises `BatchError` for text that is not Unicode."""
    try:
        return _ENCODER.encode(values)
    except (UnicodeEncodeError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise BatchError(f"values can't be encoded: {error}") from error


def decode_values(entry: Entry, data: memoryview) -> list[PlainValue]:
    """The rows of an entry of plain values. Raises `ProtocolError` for bytes that are not what the entry says."""
    try:
        values = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"entry {entry.shard} is not a list of plain values: {error}") from error
    if len(values) != entry.rows:
        raise ProtocolError(f"entry {entry.shard} has {entry.rows} rows, but its bytes hold {len(values)}")
    return values


def _plain_list(items: Sequence[Any], where: str, depth: int) -> list[PlainValue]:
    return [item if type(item) in _SCALARS else _plain(item, f"{where}[{i}]", depth) for i, item in enumerate(items)]


def _plain(value: Any, where: str, depth: int) -> PlainValue:
    """`value` as msgpack gives it back. Raises `BatchError` for what has no plain form."""
    kind = type(value)
    if kind in _SCALARS:
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.generic) and not isinstance(value, (np.longdouble, np.clongdouble)):  # whose item is itself
        return _plain(value.item(), where, depth)
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value  # type: ignore[no-any-return]
        raise BatchError(f"{where}: the number {value} doesn't fit into 64 bits")
    if depth == MAX_DEPTH:
        raise BatchError(f"{where}: lists and dicts are nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        return _plain_list(value, where, depth + 1)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise BatchError(f"{where}: a dict's keys are str or int, not {type(key).__name__}")
        return {key: _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    raise BatchError(
        f"{where}: a {kind.__name__} is not a plain value",
        hint="rows are tensors, or None, bool, int, float, str, bytes, and lists and dicts of these",
    )
