"""`weightwire`: what runs, whether it is healthy, and whether an engine holds what it should. Extra `cli`.

A file holds one command or a few; `app` holds what they share. Nothing imports this package but the entry points.
"""

from __future__ import annotations

import os
import sys

from inference_plugin.cli.app import app
from inference_plugin.cli.output import ended_by

__all__ = ["app", "main"]


def main() -> None:
    """The console script. Help that cannot be written ends it as a command's output would. Where stdout or stderr is closed,
    nobody wants to hear of it: the exit status tells."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 -- until the process ends
    try:
        app()
    except OSError as error:
        raise ended_by(error) from None
