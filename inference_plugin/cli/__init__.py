"""`weightwire`: what runs, whether it is healthy, and whether an engine holds what it should. Extra `cli`.

One command or two to a file; `app` holds what they share. Nothing imports this package but the entry points.
"""

from __future__ import annotations

import sys

from inference_plugin.cli.app import app
from inference_plugin.wire.errors import WeightwireError

from inference_plugin.cli import status, top, doctor, push, settings, verify, check_engine  # isort: skip  # noqa: F401 -- commands, as --help lists them

__all__ = ["main"]


def main() -> None:
    """The console script: an error of ours is one line on stderr and exit status 2."""
    try:
        app()
    except WeightwireError as error:
        print(f"weightwire: {error}", file=sys.stderr)
        raise SystemExit(2) from None
