"""What the rows of a column have in common, and which rows go into one column."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inference_plugin.wire.errors import BatchError
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Kind

__all__ = ["Schema", "schema_of"]

_DENSE, _JAGGED = Kind.DENSE, Kind.JAGGED  # an enum's own attributes are slow


@dataclass(frozen=True)
class Schema:
    """What all rows of a column have in common. `item_shape` as in an `Entry`: of a row (dense), or behind a row's first
    dimension (jagged). A column keeps its schema whatever rows it loses."""

    kind: Kind
    dtype: str = ""
    item_shape: tuple[int, ...] = ()

    @staticmethod
    def of(part: LocalPart | Entry) -> Schema:
        return Schema(part.kind, part.dtype, part.item_shape)

    @staticmethod
    def all_of(parts: Iterable[LocalPart | Entry]) -> list[Schema]:
        """The different schemas of parts. Dense parts that differ in their first dimension only count together, as the jagged
        column that they make: a column of single rows has nearly as many shapes as rows."""
        found: dict[tuple[Kind, str, tuple[int, ...]], tuple[Kind, str, tuple[int, ...]]] = {}
        for schema in dict.fromkeys([(part.kind, part.dtype, part.item_shape) for part in parts]):
            kind, dtype, shape = schema
            column = (_JAGGED, dtype, shape[1:]) if kind is _DENSE and shape else schema
            found[column] = column if column in found else schema
        return [Schema(*schema) for schema in found.values()]

    def joined(self, other: Schema) -> Schema | None:
        """The schema of a column that has rows of both; None if there is none. Dense rows that differ in their first
        dimension only make a jagged column."""
        if self == other:
            return self
        if Kind.VALUES in (self.kind, other.kind) or self.dtype != other.dtype:
            return None
        tails = {
            schema.item_shape if schema.kind is Kind.JAGGED else schema.item_shape[1:]
            for schema in (self, other)
            if schema.kind is Kind.JAGGED or schema.item_shape
        }
        scalars = any(schema.kind is Kind.DENSE and not schema.item_shape for schema in (self, other))
        return None if scalars or len(tails) != 1 else Schema(Kind.JAGGED, self.dtype, tails.pop())

    def __str__(self) -> str:
        if self.kind is Kind.VALUES:
            return "values"
        shape = ["*", *map(str, self.item_shape)] if self.kind is Kind.JAGGED else map(str, self.item_shape)
        return f"{self.dtype}[{', '.join(shape)}]"


def schema_of(key: str, parts: Iterable[LocalPart | Entry]) -> Schema:
    """The schema of a column that has all rows of `parts`. Raises `BatchError`."""
    schema: Schema | None = None
    for found in Schema.all_of(parts):
        joined = found if schema is None else schema.joined(found)
        if joined is None:
            raise BatchError(
                f"key {key!r} has rows {found} and rows {schema}",
                hint="rows of one key have one dtype and may differ in their first dimension only",
            )
        schema = joined
    assert schema is not None
    return schema
