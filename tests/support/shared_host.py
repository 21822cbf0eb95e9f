"""A device whose memory processes share as on a GPU: the real `CudaDriver`, with a library of its calls that gives memory of the
host. `ON_SHARED_HOST`, in the environment of a process that loads plug-ins, makes it that process's device.

`WEIGHTWIRE_TEST_UUID`: the device's uuid.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference_plugin.devices import ByteCopy, SharedMemory, Unused
from inference_plugin.devices.cuda_driver import CudaDriver, DeviceArray
from inference_plugin.devices.host import Host

__all__ = ["ON_SHARED_HOST", "SharedHost", "can_be_built", "page_locked_bytes", "shared_allocations"]

ON_SHARED_HOST = {"WEIGHTWIRE_PLUGINS": "tests.support.shared_host_plugin:plugin"}

SOURCE = Path(__file__).with_name("fake_cuda.c")
UUID = "GPU-of-this-host"


def can_be_built() -> bool:
    return shutil.which("cc") is not None


def shared_allocations(pid: int) -> set[int]:
    """Allocations, by inode, that a process has made or mapped; none once it has ended."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if str(file.readlink()).startswith("/memfd:fake-cuda"):
                    found.add(file.stat().st_ino)
    return found


@functools.cache
def _library() -> str:
    directory = Path(tempfile.gettempdir()) / f"weightwire-tests-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    built = directory / f"fake-cuda-{SOURCE.stat().st_mtime_ns}.so"
    if not built.exists():
        temporary = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-O1", "-Wall", "-shared", "-fPIC", "-o", temporary, SOURCE], check=True)
        temporary.replace(built)
    return str(built)


class _HostArray:
    """A `DeviceArray` as numpy takes it over."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array
        self.__array_interface__: dict[str, Any] = array.described


def _as_tensor(array: DeviceArray, device: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_HostArray(array)))


@functools.cache
def _driver() -> CudaDriver:
    return CudaDriver(_as_tensor, _library())


def page_locked_bytes() -> int:
    """Bytes of the host that this process's device has page-locked."""
    library = ctypes.CDLL(_library())
    library.fake_registered.restype = ctypes.c_size_t
    nbytes: int = library.fake_registered()
    return nbytes


class SharedHost(Host):
    """The host, with memory that is shared as a GPU's is."""

    def uuid(self) -> str:
        return os.environ.get("WEIGHTWIRE_TEST_UUID", UUID)

    def why_not_shared(self) -> str | None:
        return None

    def reachable(self) -> tuple[str, ...]:
        return (self.uuid(),)

    def copy_bytes(self, copies: Sequence[ByteCopy]) -> None:
        _driver().copy(0, 0, copies)

    def page_lock(self, memory: torch.Tensor) -> Callable[[], None]:
        return _driver().page_lock(0, memory.data_ptr(), memory.nbytes)

    def share(self, nbytes: int, unused: Unused) -> SharedMemory:
        return _driver().share(0, nbytes, unused)

    def attach(self, handle: bytes, nbytes: int, uuid: str) -> SharedMemory:
        assert uuid == self.uuid()
        return _driver().attach(0, handle, nbytes)
