"""A file system that has no room: for bytes, or for another file."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FILES = 40


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A directory of 256 KiB, with a path that is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="ww-", dir="/tmp"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(path)], check=False)
    try:
        if mounted.returncode:
            pytest.skip("mounting is not permitted here")
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    """Files can be made, and stay empty."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Nothing can be changed on the disk."""
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)


@contextlib.contextmanager
def without_inodes(directory: Path) -> Iterator[None]:
    """No file, socket or directory can be made."""
    subprocess.run(["mount", "-o", f"remount,nr_inodes={FILES}", str(directory)], check=True)
    fillers = [directory / f"filler{number}" for number in range(FILES)]
    with contextlib.suppress(OSError):
        for filler in fillers:
            filler.touch()
    try:
        yield
    finally:
        for filler in fillers:
            filler.unlink(missing_ok=True)
