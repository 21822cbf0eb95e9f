"""`weightwire`: what runs, whether it is healthy, and whether an engine holds what it should. Extra `cli`.

A file holds one command or a few; `app` holds what they share. Nothing imports this package but the entry points.
"""

from __future__ import annotations

import sys

from inference_plugin.cli.app import app
from inference_plugin.cli.output import ended_by
from inference_plugin.wire.errors import WeightwireError

__all__ = ["app", "main"]


def main() -> None:
    """The console script: an error of ours, or of the file system, is one line on stderr and exit status 2."""
    try:
        app()
    except WeightwireError as error:
        print(f"weightwire: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        raise ended_by(error) from None
