"""What the commands print: lines and tables for people, one JSON document for programs. Nothing is cut or wrapped in a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
import msgspec

__all__ = ["JSON_SCHEMA", "ended_by", "heard_or_not", "line", "print_json", "problem", "stop", "table", "terminal"]

JSON_SCHEMA = 1
"""Version of the documents that `--json` prints. Fields may be added to a version; a field that changes its meaning or goes
away makes a new one."""

PIPE_COLUMNS = 1000
"""Width of a table that nobody sees on a terminal: wider than any row."""


def line(text: str, *, colour: str | None = None) -> None:
    """One line, however long. The colour is left out where stdout is no terminal, and where `NO_COLOR` is set (no-color.org)."""
    click.echo(text if colour is None or os.environ.get("NO_COLOR") else click.style(text, fg=colour))


def problem(text: str, indent: str = "") -> None:
    line(f"{indent}PROBLEM: {text}", colour="red")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    drawn = Table(*columns)
    for row in rows:
        drawn.add_row(*row)
    terminal().print(drawn, markup=False)


def terminal() -> Any:
    """The terminal as rich sees it, or a wide page where there is none. Importing rich takes longer than most commands."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # not rich's status 1, which would say that a problem was found

    return Terminal(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def print_json(**document: Any) -> None:
    """Prints one JSON object: `document`, and `schema`, the version of its form."""
    print(json.dumps({"schema": JSON_SCHEMA, **msgspec.to_builtins(document)}, indent=2))


def stop(message: str) -> SystemExit:
    """To be raised: prints `message` to stderr and ends with status 2."""
    print(f"weightwire: {message}", file=sys.stderr)
    return SystemExit(2)


def ended_by(error: OSError) -> SystemExit:
    """To be raised: says what could not be read or written, and ends with status 2. Says nothing if the reader has closed its
    pipe, as `head` does."""
    with contextlib.suppress(OSError, AttributeError):  # what is still to be written would fail again as Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return SystemExit(2)
    return stop(f"could not read or write: {error}")


@contextlib.contextmanager
def heard_or_not() -> Iterator[None]:
    """For the report of what a command has done: an error of the output goes to stderr and leaves the exit status as it is."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        ended_by(error)
