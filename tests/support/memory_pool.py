"""Memory that an engine's allocator takes away as on a GPU: whoever touches it meanwhile ends the process (SIGSEGV)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

__all__ = ["MemoryPool"]

PROT_NONE = 0  # mmap has no name for it
_libc = ctypes.CDLL(None, use_errno=True)


class MemoryPool:
    """Moves the storages behind `tensors` into memory of its own. Views stay views."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        unlike = {id(tensor): tensor for tensor in tensors}.values()
        held = [tensor for tensor in unlike if not tensor.is_meta and tensor.untyped_storage().nbytes()]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
        self._memory = mmap.mmap(-1, sum(_whole_pages(each.nbytes()) for each in storages.values()))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        moved: dict[int, torch.UntypedStorage] = {}
        offset = 0
        for address, storage in storages.items():
            # A storage for each: weights in one storage would be tied.
            own = torch.frombuffer(self._memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
            own.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            moved[address] = own.untyped_storage()
            offset += _whole_pages(storage.nbytes())
        for tensor in held:
            own_storage = moved[tensor.untyped_storage().data_ptr()]
            where = tensor.storage_offset(), tensor.size(), tensor.stride()
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(own_storage, *where)

    def release(self) -> None:
        self._protect(PROT_NONE)

    def take_back(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def _protect(self, how: int) -> None:
        if _libc.mprotect(ctypes.c_void_p(self._address), ctypes.c_size_t(len(self._memory)), how):
            raise OSError(ctypes.get_errno(), "mprotect")


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
