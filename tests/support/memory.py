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

import pytest

from inference_plugin.wire.host_memory import CGROUPS

__all__ = ["Peak", "held_bytes", "in_a_control_group", "peak_bytes", "peak_of"]


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


@contextlib.contextmanager
def in_a_control_group(pids: Sequence[int], left_bytes: int) -> Iterator[None]:
    """These processes together may take `left_bytes` more of memory, of whichever version the host's control groups are."""
    first = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    mounted, limit = (CGROUPS / "memory", "memory.limit_in_bytes") if first else (CGROUPS, "memory.max")
    group = mounted / f"weightwire-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(left_bytes))  # what they took before counts in their old group
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    before = {pid: _group_of(pid, mounted, "memory" if first else "") for pid in pids}
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid, old in before.items():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (old / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _group_of(pid: int, mounted: Path, controller: str) -> Path:
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    return next(mounted / name.lstrip("/") for _, controllers, name in lines if controller in controllers.split(","))


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
