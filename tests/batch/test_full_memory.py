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

import pytest
import torch

from inference_plugin.wire.errors import TransportUnavailable
from tests.batch.owners import MIB, descriptors, elsewhere, fetched, memfd_bytes
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
            assert (store.stats().tasks, store.stats().nbytes, store._taken_bytes) == (1, 4 * MIB, 4 * MIB)
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
