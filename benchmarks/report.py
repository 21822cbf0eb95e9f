"""Tables and files of results. One file holds the rows of all engines; a run replaces those of the cases that it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import OURS, PLAIN_COPY
from benchmarks.plots import cases

Row = dict[str, Any]

COLUMNS = ("way", "install", "seconds", "x copy", "stopped s", "x copy", "messages", "copies/byte", "extra MB")


def show(console: Console, title: str, rows: list[Row], decoding: list[Row]) -> None:
    for tp, layout in cases(rows):
        own = [row for row in rows if (row["tp"], row["layout"]) == (tp, layout)]
        limit = next(row["seconds"] for row in own if row["way"] == PLAIN_COPY)
        table = Table(title=f"{title} tp={tp}, {layout} layout, {own[0]['bytes'] / 1e9:.2f} GB")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("way", "install") else "right")
        for row in own:
            table.add_row(
                row["way"],
                row["install"],
                f"{row['seconds']:.3f}",
                f"{row['seconds'] / limit:.1f}",
                f"{row['stopped_s']:.4f}",
                f"{row['stopped_s'] / limit:.2f}",
                f"{row['messages']:.0f}",
                f"{row['copies_per_byte']:.0f}",
                f"{row['extra_bytes'] / 1e6:.0f}",
            )
        console.print(table)
        compare(console, own)
    for row in decoding:
        console.print(f"decoding beside a standby: {row}")


def compare(console: Console, own: list[Row]) -> None:
    """Our ways against the best of the engine's own."""
    native = [row for row in own if row["install"] == "engine"]
    for row in own if native else []:
        if (row["way"], row["install"]) in OURS:
            faster = min(each["seconds"] for each in native) / row["seconds"]
            stopped = row["stopped_s"] / min(each["stopped_s"] for each in native)
            console.print(
                f"{row['way']} {row['install']}: {faster:.1f} times faster than the fastest of the engine's own ways; "
                f"stopped {stopped:.2f} times as long as under the one that stops least"
            )


def merge(path: Path, rows: list[Row]) -> list[Row]:
    """Writes rows in place of the former ones of their cases; returns all."""
    before = json.loads(path.read_text()) if path.exists() else []
    measured = {_case(row) for row in rows}
    merged = [row for row in before if _case(row) not in measured] + rows
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


def _case(row: Row) -> tuple[str, int, str]:
    return row["engine"], row["tp"], row["layout"]
