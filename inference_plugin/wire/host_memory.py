"""How much more memory this process may take: the least that the host, its control group (a container), the limit of its own
address space and a host that promises no more memory than it has leave it."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from inference_plugin.wire.errors import TransportUnavailable

__all__ = ["PROMISED", "check_fits", "free_host_bytes", "gives_large_shared_pages", "large_pages"]

CGROUPS = Path("/sys/fs/cgroup")
"""Where control groups of version 2 are mounted (https://docs.kernel.org/admin-guide/cgroup-v2.html), and those of version 1 that
bound memory in its folder `memory` (https://docs.kernel.org/admin-guide/cgroup-v1/memory.html)."""

PROC = Path("/proc")

PAGES = Path("/sys/kernel/mm/transparent_hugepage")
"""https://docs.kernel.org/admin-guide/mm/transhuge.html"""


def free_host_bytes() -> int:
    """Bytes that this process can take without swapping, without an allocation that fails, and without being killed for its
    container's limit."""
    import psutil  # type: ignore[import-untyped]  # takes long to import, and is needed here only

    left = (*left_in_groups(Path("/proc/self/cgroup"), CGROUPS), *left_of_addresses(), *left_to_promise(PROC))
    return min([int(psutil.virtual_memory().available), *left])


def check_fits(nbytes: int, what: str, hint: str) -> None:
    """Raises `TransportUnavailable`, which names both numbers, unless `nbytes` are free."""
    if nbytes > (free := free_host_bytes()):
        raise TransportUnavailable(f"{what} of {nbytes >> 20} MiB does not fit: {free >> 20} MiB are free", hint=hint)


class Promised:
    """Bytes that threads of this process are about to fill, all of them together: what one will fill is not free for another."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)  # those threads are the parent's

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0

    def promise(self, sizes: Sequence[int], spared_bytes: int = 0) -> dict[int, int]:
        """Promises memory for each of `sizes` that fits into what is free, less `spared_bytes`, until it is `fulfilled`. Returns
        the numbers of the others, each with the bytes that were left for it."""
        refused: dict[int, int] = {}
        with self._lock:
            try:
                left = free_host_bytes() - self._nbytes - spared_bytes
            except OSError:  # no descriptor is free to look with
                left = 1 << 63
            for number, nbytes in enumerate(sizes):
                if nbytes > left:
                    refused[number] = left
                else:
                    left -= nbytes
                    self._nbytes += nbytes
        return refused

    def fulfilled(self, nbytes: int) -> None:
        """These bytes were filled, and so are no longer free; or nobody will fill them."""
        with self._lock:
            self._nbytes -= nbytes


PROMISED = Promised()


def large_pages() -> str:
    """For `weightwire doctor`: whether Linux gives pages of 2 MiB to those who ask, in ordinary and in shared memory."""
    kinds = {"enabled": "ordinary memory", "shmem_enabled": "shared memory"}
    return ", ".join(f"{kind}: {_choice(name)}" for name, kind in kinds.items())


def gives_large_shared_pages() -> bool:
    """Whether shared memory that asks for pages of 2 MiB gets them."""
    return _choice("shmem_enabled") in ("advise", "within_size", "always", "force")


def _choice(name: str) -> str:
    try:  # the choices, the one in force in brackets
        return (PAGES / name).read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def left_of_addresses() -> Iterator[int]:
    """What RLIMIT_AS (`ulimit -v`) leaves, where it is set. A segment counts in every process that maps it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((PROC / "self" / "statm").read_text().split()[0])
        yield max(0, limit - pages * resource.getpagesize())


def left_to_promise(proc: Path) -> Iterator[int]:
    """What may still be allocated on a host that never promises more memory than it has (`vm.overcommit_memory=2`)."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        if int((proc / "sys" / "vm" / "overcommit_memory").read_text()) == 2:
            lines = (proc / "meminfo").read_text().splitlines()
            kib = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
            yield max(0, kib["CommitLimit"] - kib["Committed_AS"]) << 10


def left_in_groups(membership: Path, mounted: Path) -> Iterator[int]:
    """What each control group that bounds this process leaves: its limit, less what it holds beside files that can be dropped."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, name in lines:
        if not controllers:
            yield from _left_in(mounted, name, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
            yield from _left_in(mounted / "memory", name, *names)


def _left_in(mounted: Path, name: str, limit_file: str, held_file: str, prefix: str) -> Iterator[int]:
    """What a group and those around it leave. A group without a limit yields nothing, or more than any host has."""
    group = mounted / name.lstrip("/")
    # Both are dropped before a process is killed. A checkpoint that was read twice is active; shared memory is neither.
    droppable = f"{prefix}inactive_file", f"{prefix}active_file"
    for each in (group, *group.parents):
        if not each.is_relative_to(mounted):
            break
        with contextlib.suppress(OSError, ValueError):  # the root has no limit, and "max" is none
            limit, held = (int((each / file).read_text()) for file in (limit_file, held_file))
            lines = (each / "memory.stat").read_text().splitlines()
            files = sum(int(line.split()[1]) for line in lines if line.split()[0] in droppable)
            yield max(0, limit - held + files)
