"""Calls of the CUDA driver that torch does not offer: memory in allocations of its own, and handles by which processes share it
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html).

A handle stands for one allocation of `cuMemAlloc`. Memory of torch's allocator has no handle of this kind where segments are
expandable, and one handle shares everything that lies in the same block.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from inference_plugin.devices.base import ByteCopy, SharedMemory, Unused
from inference_plugin.wire.errors import TransportUnavailable

__all__ = ["CudaDriver", "DeviceArray", "HANDLE_BYTES"]

HANDLE_BYTES = 64
GRANULARITY = 2 << 20
"""The driver gives memory in blocks of this size, and a handle shares whole blocks: none is shared with something else."""
LAZY_PEER_ACCESS = 1
REGISTER_PORTABLE, REGISTER_READ_ONLY = 1, 8


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class DeviceArray:
    """Memory at an address, as other libraries take it over (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).
    A tensor made of it keeps it; `unused` is called when the last one is gone."""

    def __init__(self, address: int, nbytes: int, unused: Callable[[], None]) -> None:
        self._unused = unused
        self._pid = os.getpid()
        self.described = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.described

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # not in a child that was forked
            self._unused()


class CudaDriver:
    """`as_tensor` makes a tensor of a `DeviceArray` on a device. Each call works on the device that it names, whichever is the
    thread's current one."""

    def __init__(self, as_tensor: Callable[[DeviceArray, int], Any], library: str = "libcuda.so.1") -> None:
        self._as_tensor = as_tensor
        self._shared: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._library = ctypes.CDLL(library)
        for name, types in _SIGNATURES.items():
            getattr(self._library, name).argtypes = types

    def share(self, device: int, nbytes: int, unused: Unused) -> SharedMemory:
        """New memory, and its handle. Raises `TransportUnavailable`."""
        address = ctypes.c_uint64()
        handle = _Handle()
        with self._on(device):
            self._call("cuMemAlloc_v2", ctypes.byref(address), max(1, -(-nbytes // GRANULARITY)) * GRANULARITY)
            try:
                self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except TransportUnavailable:
                self._call("cuMemFree_v2", address)
                raise
        free = functools.partial(self._call_on, device, "cuMemFree_v2", address.value)
        array = DeviceArray(address.value, nbytes, lambda: unused(free))
        memory = SharedMemory(self._as_tensor(array, device), bytes(handle.reserved))
        self._shared[memory.handle] = memory.tensor
        return memory

    def attach(self, device: int, handle: bytes, nbytes: int) -> SharedMemory:
        """Maps memory that another process shares; a process can't map its own, and gets it as it is. Raises
        `TransportUnavailable`."""
        if (own := self._shared.get(handle)) is not None:
            return SharedMemory(own, handle)
        if len(handle) != HANDLE_BYTES:
            raise TransportUnavailable(f"a CUDA handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        with self._on(device):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS
            )
        array = DeviceArray(address.value, nbytes, lambda: None)
        end = weakref.finalize(array, self._unmap, device, address.value, os.getpid())
        end.atexit = False  # the process takes its mappings with it
        return SharedMemory(self._as_tensor(array, device), handle, end)

    def _unmap(self, device: int, address: int, pid: int) -> None:
        if os.getpid() == pid:  # not in a child that was forked
            self._call_on(device, "cuIpcCloseMemHandle", address)

    def copy(self, device: int, stream: int, copies: Iterable[ByteCopy]) -> None:
        """Queues copies within the device's memory. Raises `TransportUnavailable`."""
        with self._on(device):
            for target, at, source, start, nbytes in copies:
                addresses = target.data_ptr() + at, source.data_ptr() + start
                self._call("cuMemcpyDtoDAsync_v2", *addresses, nbytes, stream)

    def page_lock(self, device: int, address: int, nbytes: int) -> Callable[[], None]:
        """Page-locks memory of the host, for reading; returns what ends it. Raises `TransportUnavailable`.

        The driver's call, not the runtime's: a failure of that one would be raised by torch's next kernel launch.
        """
        self._call_on(device, "cuMemHostRegister_v2", address, nbytes, REGISTER_PORTABLE | REGISTER_READ_ONLY)
        return functools.partial(self._call_on, device, "cuMemHostUnregister", address)

    def _call_on(self, device: int, name: str, *arguments: Any) -> None:
        with self._on(device):
            self._call(name, *arguments)

    @contextlib.contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Inside, this thread's current context is the device's primary one, which torch uses."""
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        """The device's primary context. It is retained for good: a context that nobody retains ends, and every mapping in it. On
        another rank's device, where this process computes nothing, torch retains none."""
        if (context := self._contexts.get(device)) is None:
            ordinal, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(ordinal), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._contexts[device] = context
        return context

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(said))
            raise TransportUnavailable(f"{name} failed: {(said.value or b'error %d' % code).decode()}")


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemAlloc_v2": [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t],
    "cuMemFree_v2": [ctypes.c_uint64],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), ctypes.c_uint64],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [ctypes.c_uint64],
    "cuMemcpyDtoDAsync_v2": [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
}
