"""The shared memory of a store: blocks in memfd segments, whose pages are kept warm and used again.

Blocks follow each other in a segment and never move. A segment whose blocks are all freed is *spare*: the next blocks come into
it, because writing to pages that exist takes a tenth of the time that fresh pages take. `trim` gives freed pages back to the
system where the budget needs them.

A block is freed when nobody reads or writes it any more. Two rules keep another block's bytes away from late readers and writers:

- a segment that has given pages back takes no further block: no page that is about to be given back holds a new block;
- neither does a *retired* segment: one with a reader whose end the owner concluded from the end of its process (a child that the
  process had forked may still map it), or with a block that was not written to its end. It is closed when it is empty, and
  whoever maps it keeps what is there.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from inference_plugin.transports.segment import LARGE_PAGE_BYTES, SharedSegment
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.host_memory import PROMISED, free_host_bytes, gives_large_shared_pages

__all__ = ["Block", "BlockMemory", "Freeing", "GivenBack", "Segment", "warn_of_budget"]

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64
"""Enough for any dtype, for SIMD and for the one-pass copy with digest."""

PAGE = mmap.PAGESIZE

LARGE_FROM_BYTES = 32 << 20
"""Segments from this size on ask for pages of 2 MiB; of a smaller store these would waste too much."""

LOOKED_EVERY_BYTES = 8 << 20
"""New pages of a segment between two looks at the memory that this process may still take."""

LEFT_BYTES = 32 << 20
"""Memory that a put leaves to everything else in this process, new pages up to the next look included."""

NO_MEMORY = "give the store a smaller budget_bytes, or the process more memory; what the store holds is kept"


class Segment:
    """One memfd and what is known of it.

    The next block begins at `used`. The pages before `backed` exist, but for those that were given back. `blocks`: the end of
    each block by its offset. `edge_blocks`: how many blocks begin or end in each page, counted from `trim` on. `backed_at_once`:
    bytes that the system adds at a time.
    """

    __slots__ = (
        "_looked_ahead_bytes",
        "_shared",
        "address",
        "backed",
        "backed_at_once",
        "block_bytes",
        "blocks",
        "edge_blocks",
        "given_back_bytes",
        "is_retired",
        "memory",
        "nbytes",
        "used",
    )

    def __init__(self, nbytes: int) -> None:
        self._shared = SharedSegment.create(nbytes)
        self.nbytes = self._shared.nbytes
        self.address = self._shared.address
        is_large = self.nbytes >= LARGE_FROM_BYTES and gives_large_shared_pages()
        self._shared.ask_for_large_pages(is_large)
        self.backed_at_once = LARGE_PAGE_BYTES if is_large else 1
        self.memory: npt.NDArray[np.uint8] = self._shared.tensor.numpy()
        self.used = self.backed = self._looked_ahead_bytes = 0
        self.blocks: dict[int, int] = {}
        self.edge_blocks: dict[int, int] | None = None
        self.block_bytes = self.given_back_bytes = 0
        self.is_retired = False

    def descriptor(self) -> int:
        """A new descriptor of the memfd, to be closed by the caller."""
        return os.dup(self._shared.fd)

    @property
    def spare_bytes(self) -> int:
        """Bytes of existing pages that belong to no block."""
        return self.backed - self.block_bytes - self.given_back_bytes

    def back(self, offset: int, nbytes: int) -> None:
        """Has the pages of a new block exist before anybody writes to it: a write that finds the system without memory would end
        the process. So does a container's limit, here already: it is looked at first. Raises `TransportUnavailable`."""
        self._looked_ahead_bytes -= nbytes
        promised = nbytes if self._looked_ahead_bytes < 0 else 0
        if promised and (refused := PROMISED.promise([nbytes], LEFT_BYTES)):
            fits = f"{nbytes + LEFT_BYTES >> 20} MiB does not fit: {refused[0] + LEFT_BYTES >> 20} MiB are free"
            raise TransportUnavailable(f"shared memory for rows of {fits}", hint=NO_MEMORY)
        try:
            if promised:
                self._looked_ahead_bytes = LOOKED_EVERY_BYTES
            self._shared.back(offset, nbytes)
        except OSError as error:
            raise TransportUnavailable(
                f"shm: the system has no memory for {nbytes} bytes of rows: {error}", hint=NO_MEMORY
            ) from error
        finally:
            PROMISED.fulfilled(promised)

    def trim(self) -> list[GivenBack]:
        """Gives up all pages without a block; from now on also those of each block that is freed."""
        found, start = [], 0
        self.edge_blocks = {}
        self._shared.ask_for_large_pages(False)  # a large page would bring back what is given up beside a block
        self.backed_at_once = 1
        for offset, end in [*sorted(self.blocks.items()), (-(-self.backed // PAGE) * PAGE, 0)]:
            if start < (stop := offset // PAGE * PAGE):
                found.append(GivenBack(self, start, stop))
            start = -(-end // PAGE) * PAGE
            for page in {offset // PAGE, (end - 1) // PAGE} if end else ():
                self.edge_blocks[page] = self.edge_blocks.get(page, 0) + 1
        self.given_back_bytes += self.spare_bytes
        return found

    def trim_after(self, offset: int, end: int) -> list[GivenBack]:
        """Gives up the pages of a block that was freed; neighbours may lie in its first page and in its last one."""
        assert self.edge_blocks is not None
        first, last = offset // PAGE, (end - 1) // PAGE
        for page in {first, last}:
            self.edge_blocks[page] -= 1
        start = first if not self.edge_blocks[first] else first + 1
        stop = last + 1 if not self.edge_blocks[last] else last
        self.given_back_bytes += self.spare_bytes
        return [GivenBack(self, start * PAGE, stop * PAGE)] if start < stop else []

    def give_back(self, start: int, end: int) -> None:
        self._shared.give_back(start, end)

    def close(self) -> None:
        self._shared.close()
        if not self.blocks:  # else a put may be writing: memory and file go with the last block
            self.memory = np.empty(0, dtype=np.uint8)


class Block(msgspec.Struct, eq=False, gc=False):
    """`nbytes` bytes at `offset` of a segment; no segment where there are no bytes. `is_warm`: all of its pages exist.

    The garbage collector passes over blocks (gc=False), of which a store has many thousands; they are in no cycle.
    """

    segment: Segment | None
    offset: int
    nbytes: int
    is_warm: bool = False

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The block's bytes. Only the store may write to them."""
        if self.segment is None:
            return np.empty(0, dtype=np.uint8)
        return self.segment.memory[self.offset : self.offset + self.nbytes]

    def descriptor(self) -> int:
        """A new descriptor of its segment, for a mapping of its own. The caller knows that the memory is not closed."""
        assert self.segment is not None
        return self.segment.descriptor()


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Pages `start:end`, in bytes, that no block uses any more; with `start` -1 the whole segment."""

    segment: Segment
    start: int = -1
    end: int = -1


class BlockMemory:
    """Hands out blocks. `give_back` takes time: call it outside of the caller's lock, and everything else under it.

    `spare_bytes`: what it keeps besides the blocks that are handed out.
    """

    def __init__(self, segment_bytes: int) -> None:
        self._segment_bytes = segment_bytes
        self._segments: set[Segment] = set()
        self._open: Segment | None = None
        self._empty: dict[Segment, None] = {}
        """Spare segments, in the order in which they became empty."""
        self.spare_bytes = 0

    def allocate(self, nbytes: int) -> Block:
        """A block, whose bytes may be those of an earlier one. Raises `TransportUnavailable` where no segment can be made."""
        if not nbytes:
            return Block(None, 0, 0)
        segment, room = self._open, _occupied(nbytes)
        if segment is None or segment.used + room > segment.nbytes:
            segment = self._next_segment(room)
        start, end = segment.used, segment.used + room
        fresh_bytes = max(0, -(-end // segment.backed_at_once) * segment.backed_at_once - segment.backed)
        segment.used = end
        segment.backed += fresh_bytes
        segment.blocks[start] = end
        segment.block_bytes += room
        self.spare_bytes += fresh_bytes - room
        return Block(segment, start, nbytes, not fresh_bytes)

    def free(self, block: Block) -> list[GivenBack]:
        """Frees a block that nobody reads or writes any more. Returns the pages to hand to `give_back`."""
        segment = block.segment
        if segment is None:
            return []
        end = segment.blocks.pop(block.offset)
        segment.block_bytes -= end - block.offset
        if segment not in self._segments:  # the memory is closed, and a block was still held
            return [] if segment.blocks else [GivenBack(segment)]
        self.spare_bytes += end - block.offset
        if not segment.blocks:
            return self._emptied(segment)
        if segment.edge_blocks is None:
            return []
        self.spare_bytes -= segment.spare_bytes
        return segment.trim_after(block.offset, end)

    def retire(self, blocks: Iterable[Block]) -> None:
        """The segments of these blocks take no further block."""
        for segment in {block.segment for block in blocks if block.segment is not None}:
            self._retire(segment)

    def trim(self, nbytes: int) -> list[GivenBack]:
        """Gives up at least `nbytes` of the spare bytes, or all of them. Returns the pages to hand to `give_back`.

        First the pages between blocks, which no block can use before their segment is empty; then empty segments, the one that
        is empty for the longest time first; the segment that takes the next block comes last.
        """
        target = self.spare_bytes - nbytes
        given_back: list[GivenBack] = []
        between = [one for one in self._segments - self._empty.keys() if one is not self._open and one.spare_bytes]
        for segment in sorted(between, key=lambda one: one.spare_bytes, reverse=True):
            if self.spare_bytes <= target:
                return given_back
            given_back += self._trimmed(segment)
        while self._empty and self.spare_bytes > target:
            given_back += self._dropped(next(iter(self._empty)))
        if self._open is not None and self.spare_bytes > target:
            given_back += self._trimmed(self._open)
        return given_back

    @staticmethod
    def give_back(ranges: list[GivenBack]) -> None:
        """Returns memory to the system."""
        for one in ranges:
            if one.start < 0:
                one.segment.close()
            else:
                one.segment.give_back(one.start, one.end)

    def close(self) -> None:
        """Closes all segments. Readers that map them keep the memory."""
        self._open = None
        self._empty.clear()
        self.spare_bytes = 0
        while self._segments:
            self._segments.pop().close()

    @property
    def segments(self) -> int:
        """Segments that are mapped; each takes two descriptors."""
        return len(self._segments)

    def _next_segment(self, nbytes: int) -> Segment:
        """An empty segment with room for `nbytes`: the smallest spare one that is not far too large, or a new one."""
        needed = max(nbytes, self._segment_bytes)
        unit = LARGE_PAGE_BYTES if needed >= LARGE_FROM_BYTES else PAGE
        needed = -(-needed // unit) * unit
        fitting = [one for one in self._empty if nbytes <= one.nbytes <= 2 * needed]
        if fitting:
            segment = min(fitting, key=lambda one: (one.nbytes, -one.backed))
            del self._empty[segment]
        else:
            segment = Segment(needed)
            self._segments.add(segment)
        if nbytes <= self._segment_bytes // 2 or self._open is None:  # a large block has a segment of its own
            self._open = segment
        return segment

    def _emptied(self, segment: Segment) -> list[GivenBack]:
        """The last block of a segment was freed."""
        if segment.is_retired:
            return self._dropped(segment)
        segment.used = 0
        self._empty[segment] = None
        if segment is self._open:
            self._open = None
        return []

    def _trimmed(self, segment: Segment) -> list[GivenBack]:
        """Gives up the pages of a segment in which no block lies."""
        self._retire(segment)
        self.spare_bytes -= segment.spare_bytes
        return segment.trim()

    def _dropped(self, segment: Segment) -> list[GivenBack]:
        """An empty segment is closed."""
        self._retire(segment)
        self._segments.remove(segment)
        self._empty.pop(segment, None)
        self.spare_bytes -= segment.spare_bytes
        return [GivenBack(segment)]

    def _retire(self, segment: Segment) -> None:
        segment.is_retired = True
        if segment is self._open:
            self._open = None


class Freeing:
    """Collects what is freed under the store's lock, and gives it back once the lock is released: `with Freeing(memory) as freed,
    lock`. The `with` statement itself takes the lock, which is a plain one: where Python code takes a lock, Ctrl-C may raise
    before the statement knows of it, and the lock stays taken.
    """

    __slots__ = ("_freed", "_memory")

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._freed: list[GivenBack] = []

    def __enter__(self) -> list[GivenBack]:
        return self._freed

    def __exit__(self, *_: object) -> None:
        if self._freed:
            self._memory.give_back(self._freed)


def warn_of_budget(budget_bytes: int) -> None:
    """Logs a warning where this process can't take as much memory as a store's budget."""
    with contextlib.suppress(OSError):  # no descriptor is free to look with
        if budget_bytes > (free := free_host_bytes()):
            logger.warning(
                "weightwire: a store's budget_bytes is %d; this process may take %d bytes of memory, its container's limit "
                "included: puts may fail before the budget is reached",
                budget_bytes,
                free,
            )


def _occupied(nbytes: int) -> int:
    """Bytes of a segment that a block takes."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
