"""Pages that exist before they are written: which ones, with what bytes, on which cores, and what happens without memory."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference_plugin.wire import pages
from inference_plugin.wire.compiled import FUNCTIONS, WHY_NOT
from inference_plugin.wire.pages import populate

ROOT = Path(__file__).resolve().parents[2]
PAGE = mmap.PAGESIZE
MIB = 1 << 20

compiled = pytest.mark.skipif(bool(WHY_NOT), reason=f"not compiled: {WHY_NOT}")
can_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mount namespaces need root and util-linux"
)


@pytest.fixture(params=["C", pytest.param("alone", id="without C")])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "C" and WHY_NOT:
        pytest.skip(f"not compiled: {WHY_NOT}")
    if request.param == "alone":
        monkeypatch.setattr(pages, "FUNCTIONS", None)


class Memory:
    """A file in memory of `nbytes`, in pages of 4 KiB."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("pages")
        os.ftruncate(self.fd, nbytes)
        self.map = mmap.mmap(self.fd, nbytes)
        self.map.madvise(mmap.MADV_NOHUGEPAGE)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)

    @property
    def existing_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(24 * MIB + 100)
    yield made
    del made.bytes
    os.close(made.fd)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cores", [1, 2, 5, 64])
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 24 * MIB + 100), (0, 0), (PAGE, PAGE + 1), (3 * PAGE, 5 * MIB + 1), (23 * MIB, 24 * MIB + 100)],
)
def test_the_pages_of_the_range_exist_and_no_others_and_keep_their_bytes(
    memory: Memory, start: int, end: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    written = [at for at in (start, end - 1) if start <= at < end]
    for at in written:
        memory.bytes[at] = 7
    populate(memory.bytes, start, end)
    assert memory.existing_bytes == -(-end // PAGE) * PAGE - start if end > start else not memory.existing_bytes
    assert memory.bytes[start:end].sum() == 7 * len(set(written))


@pytest.mark.usefixtures("way")
def test_pages_of_memory_that_is_mapped_read_only_exist_too(memory: Memory) -> None:
    read = np.frombuffer(mmap.mmap(memory.fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)
    populate(read, 0, read.nbytes, for_writing=False)
    assert memory.existing_bytes == -(-read.nbytes // PAGE) * PAGE
    memory.bytes[5] = 3
    assert read[5] == 3


@pytest.mark.usefixtures("way")
def test_the_systems_own_error_is_raised(memory: Memory) -> None:
    read = np.frombuffer(mmap.mmap(memory.fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)
    with pytest.raises(OSError, match=r"Invalid argument|Bad address|Cannot allocate memory"):
        populate(read, 0, read.nbytes)
    assert not memory.existing_bytes


@compiled
@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4), (0, 101), (101, 102)])
def test_a_range_outside_of_the_buffer_is_refused(start: int, end: int) -> None:
    assert FUNCTIONS is not None
    with pytest.raises(ValueError, match="don't lie within the buffer"):
        FUNCTIONS.populate(bytearray(100), start, end, pages.MADV_POPULATE_WRITE, 2)


SMALL = """
import errno, mmap, os
import numpy as np
from inference_plugin.wire import pages
os.sched_getaffinity, os.sched_setaffinity = lambda _: set(range({cores})), lambda *_: None
fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
os.ftruncate(fd, 64 << 20)
memory = np.frombuffer(mmap.mmap(fd, 64 << 20), dtype=np.uint8)
memory[:5] = 9
try:
    pages.populate(memory, 0, memory.nbytes)
    raise SystemExit("64 MiB found room in 8 MiB")
except OSError as error:
    assert error.errno in (errno.EFAULT, errno.ENOMEM), error
assert memory[:6].tolist() == [9] * 5 + [0]
"""


@can_mount
@pytest.mark.parametrize("cores", [1, 16])
def test_a_system_without_memory_for_the_pages_is_an_error_and_no_signal(cores: int) -> None:
    mount = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, SMALL.format(cores=cores)]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


@compiled
@pytest.mark.parametrize(
    ("cpulist", "near"),
    [
        ("0-3,8-11", {1, 2, 3, 8}),
        ("1", {1}),
        ("0-63", set(range(1, 9))),
        ("20-30", set(range(1, 9))),
        ("?", set(range(1, 9))),
    ],
)
def test_threads_run_on_the_node_of_the_caller_who_has_its_cores_back_afterwards(
    memory: Memory, cpulist: str, near: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`near`: the cores that are this thread's own, 1 to 8, as far as they belong to the node."""
    for each in os.sched_getaffinity(0):
        (tmp_path / "cpu" / f"cpu{each}" / "node1").mkdir(parents=True)
    (tmp_path / "node" / "node1").mkdir(parents=True)
    (tmp_path / "node" / "node1" / "cpulist").write_text(f"{cpulist}\n")
    monkeypatch.setattr(pages, "CPUS", tmp_path / "cpu")
    monkeypatch.setattr(pages, "NODES", tmp_path / "node")
    now, seen = [set(range(1, 9))], []

    class Watched:
        def populate(self, *arguments: Any) -> int:
            seen.append(now[0])
            assert FUNCTIONS is not None
            found: int = FUNCTIONS.populate(*arguments)
            return found

    monkeypatch.setattr(pages, "FUNCTIONS", Watched())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: now[0])
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: now.__setitem__(0, cores))
    pages.node_of.cache_clear()
    try:
        populate(memory.bytes, 0, memory.bytes.nbytes)
    finally:
        pages.node_of.cache_clear()
    assert (seen, now) == ([near], [set(range(1, 9))])
