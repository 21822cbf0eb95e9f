"""Memory that processes of one host share, and the address by which a peer opens it.

A memfd has no name: when the last process that maps it is gone, killed or not, so is the memory. It doesn't count
against the size of /dev/shm, and Python's resource tracker never sees it. Peers open it as `/proc/<pid>/fd/<fd>`,
which the kernel allows to the same user only (ptrace access mode "read"), in the same pid namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import torch

from inference_plugin.devices import in_use
from inference_plugin.net.addresses import boot_id
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ProtocolError, TransportUnavailable, lacks_resources
from inference_plugin.wire.messages.common import BootId, Count
from inference_plugin.wire.pages import populate

__all__ = [
    "LARGE_PAGE_BYTES",
    "MIN_SEGMENT_BYTES",
    "MappedSegments",
    "SegmentAddress",
    "SharedSegment",
    "why_no_segments",
]

MIN_SEGMENT_BYTES = 4096

GIVEN_BACK_AT_ONCE = 4 << 20
"""Bytes of one system call, during which no other Python thread runs."""

LARGE_PAGE_BYTES = 2 << 20

_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

T = TypeVar("T")


class SegmentAddress(msgspec.Struct, frozen=True):
    """The place where a segment can be opened, and proof that it is the right segment."""

    segment_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    boot_id: BootId
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
    inode: Count


class SharedSegment:
    """A mapped memfd. `tensor` is its bytes, uint8. Close it once nobody uses views of it; may be called twice.

    `is_fresh`: pages may be missing, or unknown to this mapping; whoever has written all that this process writes ends it.
    """

    def __init__(self, fd: int, nbytes: int, segment_id: str, *, writable: bool, private: bool = False) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.segment_id = segment_id
        self.is_fresh = True
        self._is_closed = self._is_unmapped = False
        self._end_page_lock: Callable[[], None] | None = None
        self._map: mmap.mmap | None = None
        if private:
            self.tensor = torch.from_numpy(np.asarray(_PrivateMapping(fd, nbytes)))
            return
        self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch can't mark a tensor read-only and says so
            # By way of numpy: its array keeps the mapping as long as a view lives, `torch.frombuffer` does not.
            self.tensor = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))

    @staticmethod
    def create(nbytes: int) -> SharedSegment:
        """A new segment of at least `nbytes`, zero-filled, its size sealed. Raises `TransportUnavailable`."""
        nbytes = max(nbytes, MIN_SEGMENT_BYTES)
        try:
            fd = os.memfd_create("weightwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as error:
            raise TransportUnavailable(f"shm: memfd_create failed: {error}") from error
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return SharedSegment(fd, nbytes, secrets.token_hex(8), writable=True)
        except (OSError, OverflowError) as error:
            os.close(fd)
            hint = "free memory, or raise this process's limits (`ulimit -a`)"
            raise TransportUnavailable(f"shm: a segment of {nbytes} bytes can't be made: {error}", hint=hint) from error

    @staticmethod
    def attach(address: SegmentAddress, *, writable: bool, private: bool = False) -> SharedSegment:
        """The segment at `address`. `private`: pages that this process writes to become its own, and nobody else sees what it
        wrote. Raises `TransportUnavailable` if this process can't reach it."""
        if address.boot_id != boot_id():
            raise TransportUnavailable("shm: the trainer is on another host", hint="use transport 'zmq'")
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            # O_NONBLOCK: whatever else lies there (a FIFO), opening it must not wait.
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportUnavailable(
                f"shm: process {os.getpid()} can't open {path}: {error.strerror}",
                hint="trainer and engine must run as one user in one pid namespace; else use transport 'zmq'",
            ) from error
        try:
            status = os.fstat(fd)
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if status.st_ino != address.inode or status.st_size != address.nbytes or not seals & fcntl.F_SEAL_SHRINK:
                raise TransportUnavailable(
                    f"shm: {path} is not the segment that was announced",
                    hint="its owner has freed it since: send again; if another SyncManager updates this group too, let one do it",
                )
            return SharedSegment(fd, address.nbytes, address.segment_id, writable=writable, private=private)
        except (OSError, ValueError, RuntimeError) as error:
            os.close(fd)
            hint = (
                "free memory, or raise this process's limit of addresses (`ulimit -v`)"
                if lacks_resources(error)
                else ""
            )
            raise TransportUnavailable(f"shm: {path} can't be mapped: {error}", hint=hint) from error
        except TransportUnavailable:
            os.close(fd)
            raise

    def lies_at(self, address: SegmentAddress) -> bool:
        """Whether this is the memory that `address` describes; an id alone could be reused."""
        return self.nbytes == address.nbytes and os.fstat(self.fd).st_ino == address.inode

    @property
    def address(self) -> SegmentAddress:
        """The address for other processes, valid while this one lives and keeps the segment open."""
        return SegmentAddress(self.segment_id, boot_id(), os.getpid(), self.fd, self.nbytes, os.fstat(self.fd).st_ino)

    def write(self, start: int, struct: bytes) -> None:
        """Puts a struct in msgpack at byte `start`, for `read`."""
        self.tensor[start : start + len(struct)] = torch.frombuffer(bytearray(struct), dtype=torch.uint8)

    def read(self, start: int, nbytes: int, kind: type[T]) -> T:
        """The struct of type `kind` at byte `start`. Raises `ProtocolError` for anything else."""
        if start + nbytes > self.nbytes:
            raise ProtocolError(f"a {kind.__name__} at {start} of {nbytes} bytes, in a segment of {self.nbytes}")
        return decode_as(self.tensor[start : start + nbytes].numpy().tobytes(), kind)

    def set_writable(self, writable: bool) -> None:
        """Ends, or begins anew, this process's permission to write; its page tables stay. Raises OSError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = ctypes.c_void_p(self.tensor.data_ptr())
        if self._map is None or _libc.mprotect(address, ctypes.c_size_t(self.nbytes), protection):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def page_lock(self) -> None:
        """Has this process's device read it at full speed, where it can."""
        self._end_page_lock = in_use().page_lock(self.tensor)

    def keep_from_children(self) -> None:
        """Keeps the mapping out of processes that this one forks, such as a data loader's."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTFORK)

    def ask_for_large_pages(self, wanted: bool = True) -> None:
        """Asks for pages of 2 MiB: page tables are built, protected and walked in a fraction of the time. Takes effect where
        `/sys/kernel/mm/transparent_hugepage/shmem_enabled` says `advise`, on pages that do not exist yet. Not `wanted`: from now
        on pages are small."""
        if self._map is not None and self.nbytes >= LARGE_PAGE_BYTES:
            with contextlib.suppress(OSError, ValueError):  # a kernel without them; closed meanwhile
                self._map.madvise(mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE)

    def touch(self, start: int, nbytes: int) -> bool:
        """As `back`; False also where the system has no memory for the pages."""
        try:
            return self.back(start, nbytes)
        except OSError:
            return False

    def back(self, start: int, nbytes: int) -> bool:
        """Has the pages of `start:start + nbytes` exist, mapped for writing, on several threads (`populate`): a fraction of the
        time that faults take. False: the kernel has no such call (before Linux 5.14), or the segment is closed. Raises OSError
        where the system has no memory for the pages: a write would end the process there."""
        memory = self.tensor  # it keeps the mapping if another thread closes the segment meanwhile
        if self._map is None or not memory.nbytes:
            return False
        try:
            populate(memory.numpy(), start - start % mmap.PAGESIZE, min(start + nbytes, self.nbytes))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True

    def give_back(self, start: int, end: int) -> None:
        """Returns the memory of the pages `start:end` to the system; they read as zeros from then on, in every process.
        `start` is a multiple of the page size, and `end` too, or the segment's end. Has no effect on a closed segment."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            for step in range(start, end, GIVEN_BACK_AT_ONCE):
                if (mapping := self._map) is None:
                    return
                mapping.madvise(mmap.MADV_REMOVE, step, min(GIVEN_BACK_AT_ONCE, end - step))

    def close(self) -> bool:
        """Unmaps it and closes the descriptor. False: views of `tensor` that are still held keep the mapping until they go."""
        if self._is_closed:
            return self._is_unmapped
        self._is_closed = True
        if self._end_page_lock is not None:
            with contextlib.suppress(TransportUnavailable):  # the device is gone, and its hold on the pages with it
                self._end_page_lock()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        mapping, self._map = self._map, None
        os.close(self.fd)
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view keeps it
                mapping.close()
                self._is_unmapped = True
        return self._is_unmapped


class _PrivateMapping:
    """A mapping of a file, of which the pages that this process writes become its own. It ends with the last array over it.

    The system's own call: Python's mapping keeps a descriptor, and a process may hold thousands of mappings; torch's leaves one
    open where it fails. Raises OSError.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._nbytes = 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _libc.mmap(None, nbytes, protection, mmap.MAP_PRIVATE, fd, 0)
        if self._address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._nbytes = nbytes
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (self._address, False)}

    def __del__(self, munmap: Callable[[int, int], int] = _libc.munmap) -> None:
        if self._nbytes:
            munmap(self._address, self._nbytes)


class MappedSegments:
    """Segments of other processes, by their id; the last `most` that were asked for stay mapped: building page tables anew costs
    as much as a copy. `first` is called with each one that is newly mapped."""

    def __init__(self, *, writable: bool, most: int, first: Callable[[SharedSegment], None] = lambda _: None) -> None:
        self._writable = writable
        self._most = most
        self._first = first
        self._segments: dict[str, SharedSegment] = {}

    def at(self, address: SegmentAddress) -> SharedSegment:
        """Raises `TransportUnavailable` if this process can't reach it."""
        segment = self._segments.pop(address.segment_id, None)
        if segment is None or not segment.lies_at(address):
            if segment is not None:
                segment.close()
            segment = SharedSegment.attach(address, writable=self._writable)
            segment.ask_for_large_pages()
            self._first(segment)
        self._segments[address.segment_id] = segment
        while len(self._segments) > self._most:
            self._segments.pop(next(iter(self._segments))).close()
        return segment

    def close(self) -> None:
        """Unmaps all of them; they may be asked for again."""
        while self._segments:
            self._segments.popitem()[1].close()


def why_no_segments() -> str | None:
    """Why this host can't share memory so; None where it can."""
    if not hasattr(os, "memfd_create"):
        return "the operating system has no memfd_create (Linux 3.17 or later is needed)"
    if not Path("/proc/self/fd").is_dir():
        return "/proc is not mounted"
    try:
        SharedSegment.create(MIN_SEGMENT_BYTES).close()
    except TransportUnavailable as error:
        return error.message
    return None
