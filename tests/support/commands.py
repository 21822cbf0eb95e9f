"""The `weightwire` command in a process of its own that has imported torch and the command already: a tenth of the time."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from inference_plugin import cli
from tests.support.rig import eventually, fork

__all__ = ["weightwire"]


def weightwire(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, into: Path | None = None
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `weightwire ARGUMENTS`, whose output goes into files; with `into`, into that device."""
    with tempfile.TemporaryDirectory() as name:
        out, told, status = (Path(name) / each for each in ("out", "told", "status"))
        where = {"out": str(into or out), "told": str(told), "status": str(status)}
        fork("tests.support.commands:run", {**os.environ, **(environment or {})}, arguments=arguments, **where)
        eventually(status.exists, "the command's end")
        return int(status.read_text()), "" if into else out.read_text(), told.read_text()


def run(arguments: list[str], out: str, told: str, status: str) -> None:
    """In that process."""
    for path, number in ((out, 1), (told, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["weightwire", *arguments]
    code: object = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        code = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    Path(status + ".tmp").write_text(str(code))
    Path(status + ".tmp").replace(status)
