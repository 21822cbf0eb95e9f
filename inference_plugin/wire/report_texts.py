"""The words and tables of reports: lines of text for `print`, a table for rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_plugin.wire.errors import ErrorInfo

__all__ = ["Text", "error_text", "gib", "seconds"]

GIB = 1 << 30


class Text:
    """A heading, and rows of cells under `columns`."""

    def __init__(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.heading = heading
        self.columns = columns
        self.rows = rows

    def __str__(self) -> str:
        """The heading and a line per row; columns that are empty in all rows are left out."""
        used = [i for i, _ in enumerate(self.columns) if any(row[i] for row in self.rows)]
        widths = {i: max(len(row[i]) for row in self.rows) for i in used}
        lines = ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in self.rows]
        return "\n".join([self.heading, *(f"  {line}" for line in lines)])

    def table(self) -> Any:
        """The same as a table of rich, which must be installed."""
        from rich.table import Table

        table = Table(title=self.heading, title_justify="left")
        used = [i for i, _ in enumerate(self.columns) if any(row[i] for row in self.rows)]
        for i in used:
            table.add_column(self.columns[i], overflow="fold", no_wrap=i < 2)  # names, to be copied, and a word each
        for row in self.rows:
            table.add_row(*(row[i] for i in used))
        return table


def gib(nbytes: int) -> str:
    """Bytes in GiB with three significant digits, or in smaller units where that would be nothing."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size / 10:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} B"


def seconds(value: float) -> str:
    """Seconds, or milliseconds below one tenth of a second."""
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def error_text(info: ErrorInfo | None) -> str:
    return "" if info is None else f"{info.kind}: {info.message}" + (f" -- {info.hint}" if info.hint else "")
