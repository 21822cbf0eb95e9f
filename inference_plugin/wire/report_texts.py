"""Reports as people read them: lines of text for `print`, a table for rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference_plugin.wire.errors import ErrorInfo
    from inference_plugin.wire.reports import PauseReport, UpdateReport, VerifyReport

__all__ = ["Text", "gib", "of_pause", "of_update", "of_verify"]

PHASES = ("scan", "agree", "stage", "seal", "commit")
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
            table.add_column(self.columns[i], overflow="fold")
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


def of_update(report: UpdateReport) -> Text:
    took = len(report.replicas) - len(report.failed)
    phases = ", ".join(f"{name} {seconds(report.phases[name])}" for name in PHASES if name in report.phases)
    rate = f" ({gib(int(report.bytes / report.seconds))}/s)" if report.seconds > 0 else ""
    heading = (
        f"{report.group} version {report.version}: {took} of {len(report.replicas)} replicas serve it, "
        f"{gib(report.bytes)} in {seconds(report.seconds)}{rate}; {phases}"
    )
    rows = [
        (
            one.replica,
            one.status,
            "version unknown" if one.version is None else f"version {one.version}",
            f"stopped {seconds(one.stopped_s)}" if one.status == "committed" else "",
            "/".join(filter(None, (one.transport, one.install, one.mechanism))),
            _error(one.error),
        )
        for one in report.replicas
    ]
    return Text(heading, ("replica", "status", "serves", "generation", "how", "error"), rows)


def of_verify(report: VerifyReport) -> Text:
    equal = sum(one.ok for one in report.replicas)
    heading = f"{report.group}: {equal} of {len(report.replicas)} replicas hold what the trainer holds"
    rows = [
        (
            one.replica,
            "equal" if one.ok else "failed" if one.error else "DIFFERENT" if one.differ else "not all readable",
            "version unknown" if one.version is None else f"version {one.version}",
            f"{one.boxes} boxes",
            "; ".join((*one.differ, *(f"unreadable: {name}" for name in one.unreadable))),
            _error(one.error),
        )
        for one in report.replicas
    ]
    return Text(heading, ("replica", "result", "serves", "compared", "differences", "error"), rows)


def of_pause(report: PauseReport) -> Text:
    counts: dict[str, int] = {}
    for one in report.replicas:
        counts[one.state] = counts.get(one.state, 0) + 1
    heading = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "no replicas (not rank 0)"
    rows = [
        (
            one.replica,
            one.engine,
            one.state,
            f"released: {', '.join(one.asleep)}" if one.asleep else "",
            _error(one.error),
        )
        for one in report.replicas
    ]
    return Text(heading, ("replica", "engine", "state", "memory", "error"), rows)


def _error(info: ErrorInfo | None) -> str:
    return "" if info is None else f"{info.kind}: {info.message}" + (f" -- {info.hint}" if info.hint else "")
