"""A host without room for shared memory: puts fail with a typed error, nothing that is held is lost, and later puts work."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import TransportUnavailable
from tests.batch.owners import MIB, descriptors, elsewhere, fetched, memfd_bytes
from tests.support.memory import in_a_control_group
from tests.support.rig import runtime
from trainer_adapters.batch.store import Store

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import os, torch
from inference_plugin.transports.segment import SharedSegment
from inference_plugin.wire.errors import TransportUnavailable
from tests.batch.owners import fetched
from trainer_adapters.batch.store import Store

def row(mib, value):
    return {"k": torch.full((1, mib << 20), value, dtype=torch.uint8)}

def all_are(entries, value):
    return bool(fetched(entries, store.owner)[entries[0].shard].tensor.eq(value).all())
"""

FULL = """
with open("/dev/shm/filler", "wb") as filler:
    try:
        while True:
            filler.write(bytes(65536))
            filler.flush()
    except OSError as error:
        assert error.errno == 28, error
    with Store(budget_bytes=256 << 20) as store:
        assert all_are(store.put("t", row(40, 3)), 3)
"""

OF_A_SMALL_FILE_SYSTEM = """
def made(nbytes):
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, nbytes)
    return SharedSegment(fd, nbytes, "segment", writable=True)

SharedSegment.create = staticmethod(made)
with Store(budget_bytes=256 << 20) as store:
    kept = store.put("kept", row(6, 5))
    for attempt in range(3):
        try:
            store.put("large", row(30, 7))
            raise SystemExit("30 MiB found room on 24 MiB")
        except TransportUnavailable as error:
            assert "the system has no memory for 31457280 bytes of rows" in str(error) and "budget_bytes" in error.hint
        stats = store.stats()
        assert (stats.tasks, stats.nbytes, stats.leased_bytes) == (1, 6 << 20, 0), stats
    later = store.put("later", row(10, 9))
    assert all_are(kept, 5) and all_are(later, 9)
"""

IN_A_CONTAINER = """
input("ready\\n")
store = Store(budget_bytes=1 << 30)
kept = store.put("kept", row(8, 5))
try:
    for number in range(100):
        store.put(f"more {number}", row(8, 7))
    raise SystemExit("800 MiB found room in a container of 160 MiB")
except TransportUnavailable as error:
    assert "shared memory for rows of 40 MiB does not fit" in str(error) and "budget_bytes" in error.hint, error
assert number > 4 and all_are(kept, 5)
store.clear(f"more {number}" for number in range(number))
assert all_are(store.put("later", row(8, 9)), 9)
store.close()
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The system refuses larger files, and a segment is one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def in_a_small_dev_shm(code: str) -> None:
    """Runs a program for which /dev/shm is a file system of 24 MiB of its own."""
    mount = 'mount -t tmpfs -o size=24m tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount, sys.executable, HEAD + code]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


can_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mount namespaces need root and util-linux"
)


@can_mount
def test_a_full_dev_shm_does_not_concern_a_store() -> None:
    in_a_small_dev_shm(FULL)


@can_mount
def test_memory_that_ends_in_the_middle_of_a_put_is_a_typed_error_and_the_room_comes_back() -> None:
    in_a_small_dev_shm(OF_A_SMALL_FILE_SYSTEM)


def test_a_container_s_limit_is_a_typed_error_and_a_budget_beyond_it_is_warned_of() -> None:
    program = [sys.executable, "-c", HEAD + IN_A_CONTAINER]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            with in_a_control_group([process.pid], 160 * MIB):
                _, said = process.communicate("\n", timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, said[-4000:]
    assert "a store's budget_bytes is 1073741824; this process may take" in said


def test_a_segment_that_the_system_refuses_is_a_typed_error_and_what_is_held_stays() -> None:
    gc.collect()
    before = memfd_bytes()
    with Store(budget_bytes=256 * MIB) as store:
        (kept,) = store.put("kept", {"k": torch.full((1, 4 * MIB), 5, dtype=torch.uint8)})
        opened = descriptors()
        with files_of_at_most(10 * MIB):
            for _ in range(3):
                with pytest.raises(TransportUnavailable, match="a segment of 33554432 bytes can't be made"):
                    store.put("t", {"small": [1], "large": torch.ones(1, 32 * MIB, dtype=torch.uint8)})
            assert (store.stats().tasks, store.stats().nbytes, store.taken_bytes) == (1, 4 * MIB, 4 * MIB)
            assert descriptors() <= opened + 2
            (small,) = store.put("small", {"k": [7]})
        (large,) = store.put("t", {"large": torch.ones(1, 32 * MIB, dtype=torch.uint8)})
        for owner in (store.owner, elsewhere(store.owner)):
            have = fetched([kept, small, large], owner)
            assert have[kept.shard].tensor.eq(5).all() and have[small.shard].values == [7]
            assert have[large.shard].tensor.eq(1).all()
            del have
    gc.collect()
    assert memfd_bytes() <= before
