"""Rows that are built where they will lie: a user writes them into memory of a store, and a put takes them by reference.

A draft is a mapping of one block, of its own. Until the put it shares the block's pages. The put moves a private mapping to its
place, in one step of the kernel: whatever is written from then on goes to pages of this process alone, as at a consumer. The
block is read, and so not freed, for as long as a tensor views the draft. A child that this process forks has no part of it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inference_plugin.wire.copying import digest_spans, places_in
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.pages import MADV_POPULATE_WRITE
from inference_plugin.wire.tensors import PackedRows
from trainer_adapters.batch.leases import Holding
from trainer_adapters.batch.memory import Block
from trainer_adapters.batch.parts import Sources
from trainer_adapters.batch.records import Entry

__all__ = ["Draft", "Drafts"]

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MREMAP_FIXED = 3  # and MREMAP_MAYMOVE, without which it is refused
MADV_DONTFORK = 10
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Draft:
    """One block, mapped for a user to write to; arrays over it keep it. `holding`: the shard that a put has made of it."""

    __slots__ = (
        "__array_interface__",
        "__weakref__",
        "_drafts",
        "_mapped_bytes",
        "_pid",
        "_private",
        "_shared",
        "block",
        "holding",
    )

    def __init__(self, drafts: Drafts) -> None:
        self.holding: Holding | None = None
        self._drafts = drafts
        self._pid = os.getpid()
        self._shared = self._private = 0

    def map(self, block: Block, fd: int) -> None:
        """Maps a block of the segment `fd`, which is closed. Raises `TransportUnavailable`."""
        self.block = block
        self._mapped_bytes = block.offset % mmap.PAGESIZE + block.nbytes
        try:
            self._private = self._map(fd, mmap.MAP_PRIVATE)
            self._shared = self._map(fd, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        _libc.madvise(self._shared, self._mapped_bytes, MADV_POPULATE_WRITE)  # else page by page, as they are written
        self._drafts.put_back({0: self})

    @property
    def is_mapped(self) -> bool:
        """Whether the block is the draft's: it is freed when the draft ends."""
        return bool(self._shared)

    @property
    def address(self) -> int:
        return self._shared + self.block.offset % mmap.PAGESIZE

    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes. The array keeps this object, by numpy's protocol for memory of others."""
        place = {"version": 3, "shape": (self.block.nbytes,), "typestr": "|u1", "data": (self.address, False)}
        self.__array_interface__: dict[str, Any] = place
        return np.asarray(self)

    def seal(self) -> int:
        """From now on what is written to it is this process's own. Returns the digest of what was written before."""
        segment = self.block.segment
        assert segment is not None
        private, self._private = self._private, 0  # first: whoever ends the draft now must not unmap what has moved
        moved = _libc.mremap(private, self._mapped_bytes, self._mapped_bytes, MREMAP_FIXED, self._shared)
        if moved == FAILED:
            self._private = private
            raise _cannot_map(self.block)
        return digest_spans(segment.memory, [(self.block.offset, self.block.nbytes)])[0]

    def held(self, entry: Entry) -> Holding:
        """The shard that a put made of it. Whoever views the draft is a reader."""
        self.holding = Holding(entry, self.block, readers=1)
        return self.holding

    def _map(self, fd: int, kind: int) -> int:
        start = self.block.offset - self.block.offset % mmap.PAGESIZE
        at = _libc.mmap(None, self._mapped_bytes, READ_WRITE, kind, fd, start)
        if at == FAILED:
            raise _cannot_map(self.block)
        _libc.madvise(at, self._mapped_bytes, MADV_DONTFORK)
        return int(at)

    def __del__(self) -> None:
        """Takes no lock: the garbage collector calls it at any point of any thread."""
        if os.getpid() != self._pid:  # a child has none of the memory
            return
        shared, private = self._shared, self._private
        if shared:
            self._drafts.forget(self)
            self._shared = 0  # nor does anybody get it who looks for it just now
        for at in filter(None, (shared, private)):
            _libc.munmap(at, self._mapped_bytes)
        if shared:
            self._drafts.end(self.holding or self.block)


def _cannot_map(block: Block) -> TransportUnavailable:
    why = os.strerror(ctypes.get_errno())
    return TransportUnavailable(f"shm: {block.nbytes} bytes of a store can't be mapped for rows: {why}")


class Drafts:
    """The drafts of a store."""

    def __init__(self, waker: int) -> None:
        """`waker`: an eventfd that is written to when a draft has ended; closed with this object."""
        self.ended: deque[Holding | Block] = deque()
        """What no tensor views any more: shards, and memory that was never put."""
        self._waker = waker
        self._by_address: dict[int, weakref.ref[Draft]] = {}

    def claim(self, sources: Sequence[Sources | PackedRows]) -> dict[int, Draft]:
        """Those of `sources`, by number, that are rows which fill a draft to its last byte, one after the other. Nobody else gets
        the draft from now on."""
        claimed: dict[int, Draft] = {}
        for number, rows in enumerate(sources if self._by_address else ()):
            if (draft := self._filled_by(rows)) is not None and self._by_address.pop(draft.address, None) is not None:
                claimed[number] = draft
        return claimed

    def put_back(self, drafts: Mapping[int, Draft]) -> None:
        """They were not used: a later put may claim them."""
        for draft in drafts.values():
            self._by_address[draft.address] = weakref.ref(draft)

    def forget(self, draft: Draft) -> None:
        """No tensor views the draft any more, and its memory will be unmapped. Takes no lock."""
        self._by_address.pop(draft.address, None)

    def end(self, what: Holding | Block) -> None:
        """The memory was unmapped of a draft that was a shard, or was never put. Takes no lock."""
        self.ended.append(what)
        os.eventfd_write(self._waker, 1)

    def _filled_by(self, rows: Sources | PackedRows) -> Draft | None:
        places = [(at, size) for at, size in places_in(rows.places) if size]
        known = self._by_address.get(places[0][0]) if places else None
        if known is None or (draft := known()) is None:
            return None
        *starts, end = itertools.accumulate((size for _, size in places), initial=draft.address)
        is_all = [at for at, _ in places] == starts and end == draft.address + draft.block.nbytes
        return draft if is_all else None

    def __del__(self) -> None:
        os.close(self._waker)
