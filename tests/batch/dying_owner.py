"""An owner in a process of its own, one of whose puts stops for good before a given line of the package is run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trainer_adapters.batch
from tests.batch.owners import rows_of, tell
from tests.support.rig import eventually
from trainer_adapters.batch.store import Store

PACKAGE = str(Path(trainer_adapters.batch.__file__).parent)
FIRST, SECOND = 100, 130
"""Items of the rows that are put before, and of those whose put stops."""


def run(told: str, begin: str, stopped: str, task_id: str, step: int) -> None:
    """Puts task "whole"; when `begin` exists puts `task_id`, and stops before the line number `step` of that put. `stopped` then
    appears; it holds the number of lines if the put ended before."""
    with Store(budget_bytes=64 << 20) as store:
        tell(told, store.owner, store.put("whole", rows_of("whole", FIRST)))
        eventually(Path(begin).exists, "the begin")
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            if event == "line":
                lines += 1
                if lines == step:
                    Path(stopped).write_text("")
                    threading.Event().wait()
            return trace

        rows = rows_of(task_id, SECOND)
        sys.settrace(trace)
        store.put(task_id, rows)
        sys.settrace(None)
        Path(stopped + ".new").write_text(str(lines))
        Path(stopped + ".new").rename(stopped)
        threading.Event().wait()


def draft(told: str) -> None:
    """Has built rows in its store, and not put them."""
    with Store(budget_bytes=64 << 20) as store:
        rows = store.empty((1 << 20,), dtype=torch.float32)
        rows.fill_(7)
        tell(told, store.owner, [])
        threading.Event().wait()
        assert rows is not None
