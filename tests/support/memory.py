"""How much memory something takes at its peak, and how much processes hold, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Peak", "held_bytes", "peak_bytes", "peak_of"]


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


def held_bytes(pids: Sequence[int]) -> int:
    """Memory of these processes: of each its own, and of the shared segments and zones that they hold each once.

    A segment counts with the pages that it has, not with those that a mapping of it has (`Rss`): the kernel unmaps pages
    whenever it makes large ones of them (`khugepaged`), and maps them again when a process reads them. A segment that no
    process has open any more, such as a zone that became an engine's parameters, counts as a whole.
    """
    own, mapped, allocated = 0, dict[int, int](), dict[int, int]()
    for pid in pids:
        inode, sizes = 0, dict[int, int]()
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inode = int(line.split()[4]) if "/memfd:weightwire" in line else 0
            elif line.startswith("Size:") and inode:
                sizes[inode] = sizes.get(inode, 0) + (int(line.split()[1]) << 10)
            elif line.startswith("Anonymous:") and not inode:
                own += int(line.split()[1]) << 10
        for inode, size in sizes.items():
            mapped[inode] = max(mapped.get(inode, 0), size)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if str(descriptor.readlink()).startswith("/memfd:weightwire"):
                    status = descriptor.stat()
                    allocated[status.st_ino] = status.st_blocks * 512
    return own + sum((mapped | allocated).values())


def _now_bytes(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024
