"""How much memory something takes at its peak, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Peak", "peak_bytes", "peak_of"]


@dataclass
class Peak:
    nbytes: int = 0


def peak_bytes(action: Callable[[], Any]) -> int:
    """How far this process's resident memory rises above what it is at the beginning. What was freed before counts as free."""
    ctypes.CDLL(None).malloc_trim(0)
    with peak_of(os.getpid()) as peak:
        action()
    return peak.nbytes


@contextlib.contextmanager
def peak_of(pid: int) -> Iterator[Peak]:
    """At the end: how far the resident memory of a process, shared memory included, rose above what it was at the beginning."""
    peak = Peak()
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before = _now_bytes(pid, "VmRSS")
    yield peak
    peak.nbytes = _now_bytes(pid, "VmHWM") - before


def _now_bytes(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024
