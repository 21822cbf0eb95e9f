"""`weightwire transports`, `weightwire config` and `weightwire keygen`: what this machine can do, and how it is set up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from inference_plugin.cli.app import as_json_option
from inference_plugin.cli.output import line, print_json, stop, table
from inference_plugin.net import curve
from inference_plugin.wire.config import OTHER_VARIABLES, Config, settings, unknown_variables, written

__all__ = ["config", "keygen", "transports"]


@click.command(short_help="Transports, and why one can't be used here.")
@as_json_option
def transports(as_json: bool) -> None:
    """Lists the transports in the order in which `auto` tries them, and says why any of them can't be used here."""
    from inference_plugin.transports.registry import transports as known_transports  # imports torch

    rows = [
        {"name": t.name, "state": t.why_not() or "available", "summary": t.summary} for t in known_transports().values()
    ]
    if as_json:
        print_json(transports=rows)
        return
    columns = ("name", "state", "summary")
    table(columns, [[row[column] for column in columns] for row in rows])


@click.command(short_help="Every setting, and where its value comes from.")
@as_json_option
def config(as_json: bool) -> None:
    """Shows every setting as this environment gives it, and where its value comes from. Exit status 2: a value is invalid."""
    given = Config.from_environment()
    rows = [
        {
            "setting": setting.field,
            "value": getattr(given, setting.field),
            "from": setting.variable if os.environ.get(setting.variable) else "default",
            "side": setting.side,
            "for": setting.text,
        }
        for setting in settings()
    ]
    rows += [
        {
            "setting": variable,
            "value": os.environ.get(variable) or None,
            "from": variable if os.environ.get(variable) else "default",
            "side": "both",
            "for": f"default: {default}" if default else "",
        }
        for variable, default in OTHER_VARIABLES.items()
    ]
    if as_json:
        print_json(settings=rows, unknown_variables=unknown_variables())
        return
    table(("setting", "value", "from", "side"), [_shown(row) for row in rows])


def _shown(row: dict[str, Any]) -> list[str]:
    unset = OTHER_VARIABLES.get(row["setting"]) or "not set"
    return [row["setting"], unset if row["value"] is None else written(row["value"]), row["from"], row["side"]]


@click.command(short_help="Makes the key for a job on several hosts.")
@click.argument("file", type=click.Path(path_type=Path))
def keygen(file: Path) -> None:
    """Makes the key with which the sockets of a job may be reached from other hosts.

    FILE is a new file; copy it to every host of the job, and name it in WEIGHTWIRE_KEY.
    """
    try:
        curve.make_key(file)
    except FileExistsError:
        raise stop(f"{file} exists; a key is never overwritten") from None
    except OSError as error:
        raise stop(f"{file}: {error.strerror}") from None
    line(f"{file}: a new key; who can read it can update the engines")
