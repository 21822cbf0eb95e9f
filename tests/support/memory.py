"""How much memory something takes at its peak, as Linux counts it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["peak_bytes"]


def peak_bytes(action: Callable[[], Any]) -> int:
    """How far this process's resident memory rises above what it is at the beginning. What was freed before counts as free."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _now_bytes("VmRSS")
    action()
    return _now_bytes("VmHWM") - before


def _now_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
