"""Triton kernels of `digests`: its steps 1 and 2."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from inference_plugin.devices.digests import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    KEYS,
    LANES,
    LAST_KEYS,
    LONGEST_MEDIUM_BYTES,
    SCRAMBLE_KEYS,
    STARTS,
    BlockDigests,
    Offsets,
    Runs,
)

__all__ = ["TritonDigests"]

BLOCKS_AT_ONCE = 2
"""Blocks that a program sums at once. A program is one warp, which reads 512 bytes at once. Tried on an H200: two blocks and one
warp read 4.0 TB/s, which is the speed of its memory; two or four warps reach half of that."""
LOADED_AHEAD = 64
"""Steps of a chain whose sums are loaded before the first of them is taken: a load takes as long as some tens of steps."""
MAX_PROGRAMS_OF_PIECE = 4096
BYTES_OF_SUMS = 8 * LANES
HELD_BYTES_OF_SUMS = 128 << 20
"""Sums of 2 GiB are taken by step 2 together: so many chains run side by side. They are held until these have ended."""
MOST_CHAINED = 2
"""How often step 2 is queued before its first has ended: an engine leaves little memory free for sums."""


class TritonDigests(BlockDigests):
    """Two kernels. Step 1 leaves, for each piece, a row of 8 sums for each whole block, one for the rest, and those of the last
    64 bytes. Step 2 takes them in a queue of its own: it keeps few of the device's units busy, while step 1 or the caller's
    copies of what comes next need the memory's speed."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[torch.Tensor] = []
        self._sums_bytes = 0
        self._described: list[Offsets] = []
        """Of the pieces of `_sums`: the address of each one's rows, the address of the sums of its last 64 bytes, its whole
        blocks."""
        self._accumulators: list[torch.Tensor] = []
        self._side: Any = None
        self._ends: list[Any] = []

    @staticmethod
    def held_bytes(nbytes: int) -> int:
        # Those of the chains that are queued, of the one that waits for the first of them, and of a launch that passes the limit.
        return min(nbytes // BLOCK_BYTES * BYTES_OF_SUMS, (MOST_CHAINED + 2) * HELD_BYTES_OF_SUMS)

    def add_runs(self, runs: Sequence[Runs]) -> None:
        if not runs:
            return
        addresses = np.concatenate([some.memory.data_ptr() + some.starts for some in runs])
        lengths = np.concatenate([some.lengths for some in runs])
        positions = self._count + np.arange(len(lengths))
        fit = (lengths > LONGEST_MEDIUM_BYTES) & (addresses % ALIGNMENT_BYTES == 0)
        self._count += len(lengths)
        if fit.any():
            self._keep_order(positions[fit], lengths[fit])
            self._launch(addresses[fit], lengths[fit], runs[0].memory.device)
        if not fit.all():
            whose = np.repeat(np.arange(len(runs)), [len(some.lengths) for some in runs])
            starts = np.concatenate([some.starts for some in runs])
            places = zip(whose[~fit].tolist(), starts[~fit].tolist(), lengths[~fit].tolist(), strict=True)
            self._add_at(positions[~fit], [runs[k].view(start, length) for k, start, length in places])

    def _read(self, pieces: Sequence[torch.Tensor]) -> None:
        addresses = np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)
        lengths = np.array([piece.numel() for piece in pieces], dtype=np.int64)
        self._launch(addresses, lengths, pieces[0].device)

    def _launch(self, addresses: Offsets, lengths: Offsets, device: torch.device) -> None:
        blocks = (lengths - 1) // BLOCK_BYTES
        ends = np.cumsum(blocks + 1)
        firsts = ends - blocks - 1
        count = len(lengths)
        sums = torch.empty(int(ends[-1]), LANES, dtype=torch.int64, device=device)
        lasts = torch.empty(count, LANES, dtype=torch.int64, device=device)
        described = _sent([addresses, lengths, firsts], device)
        programs = min(MAX_PROGRAMS_OF_PIECE, triton.cdiv(int(blocks.max()) + 1, BLOCKS_AT_ONCE))
        keys, constants = _constants(device)
        with _current(device):
            _sum_blocks[(count, programs)](
                described[0],
                described[1],
                described[2],
                keys,
                constants,
                sums,
                lasts,
                BLOCKS=BLOCKS_AT_ONCE,
                num_warps=1,
            )
        self._sums += sums, lasts
        self._sums_bytes += sums.nbytes
        rows = sums.data_ptr() + firsts * BYTES_OF_SUMS
        self._described.append(np.stack([rows, lasts.data_ptr() + np.arange(count) * BYTES_OF_SUMS, blocks]))
        if self._sums_bytes >= HELD_BYTES_OF_SUMS:
            self._chain()

    def _chained(self) -> torch.Tensor:
        if self._sums:
            self._chain()
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        return torch.cat(self._accumulators)

    def _chain(self) -> None:
        """Queues step 2 of what step 1 has left."""
        device = self._sums[0].device
        numbers = np.concatenate(self._described, axis=1)
        with self._beside(device):
            described, count = _sent(list(numbers), device), numbers.shape[1]
            accumulators = torch.empty(count, LANES, dtype=torch.int64, device=device)
            _chain_blocks[(count,)](
                described[0],
                described[1],
                described[2],
                _constants(device)[1],
                accumulators,
                AHEAD=LOADED_AHEAD,
                num_warps=1,
            )
        if self._side is not None:
            for sums in self._sums:
                sums.record_stream(self._side)  # its memory is not used anew before
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(self._side)
            self._ends.append(end)
            if len(self._ends) > MOST_CHAINED:
                self._ends.pop(0).synchronize()
        self._accumulators.append(accumulators)
        self._sums, self._sums_bytes, self._described = [], 0, []

    def _beside(self, device: torch.device) -> Any:
        """Inside, this thread's work goes to the queue of step 2, after all that it queued before."""
        if device.type == "cpu":
            return contextlib.nullcontext()
        if self._side is None:
            _constants(device)  # there, before two queues use them
            self._side = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._side)


def _sent(values: Sequence[Offsets], device: torch.device) -> torch.Tensor:
    """Numbers on the device; nothing waits for it."""
    here = torch.from_numpy(np.stack(values))
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


def _current(device: torch.device) -> Any:
    """Makes `device` the thread's current one: Triton launches a kernel there, in the thread's queue of it, wherever the kernel's
    arguments lie."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(KEYS, dtype=torch.int64).to(device),
        torch.tensor([STARTS, SCRAMBLE_KEYS, LAST_KEYS], dtype=torch.int64).to(device),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _sum_blocks(  # type: ignore[no-untyped-def]
    addresses,
    lengths,
    firsts,
    keys,
    constants,
    sums,
    lasts,
    BLOCKS: tl.constexpr,  # noqa: N803 -- Triton names constants so
):
    """Program (piece, k) sums `BLOCKS` blocks of a piece, beginning with its k-th `BLOCKS`, then those a whole grid further on.
    Neighbouring threads read neighbouring bytes."""
    piece = tl.program_id(0)
    address = tl.load(addresses + piece)
    nbytes = tl.load(lengths + piece)
    data_at = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    stripes = ((nbytes - 1) // 64).to(tl.int32)
    sums_at = sums + tl.load(firsts + piece) * 8
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    key = tl.load(keys + stripe + lane)
    for start in range(tl.program_id(1) * BLOCKS, stripes // 16 + 1, tl.num_programs(1) * BLOCKS):
        block = (start + tl.arange(0, BLOCKS))[:, None, None]
        there = block * 16 + stripe + lane * 0 < stripes
        data = tl.load(data_at + block.to(tl.int64) * 128 + stripe * 8 + lane, mask=there, other=0)
        keyed = data ^ key
        products = tl.sum(tl.where(there, (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF), 0), 1)
        even, odd = tl.split(tl.reshape(tl.sum(data, 1), (BLOCKS, 4, 2)))
        neighbours = tl.reshape(tl.join(odd, even), (BLOCKS, 8))
        row = (start + tl.arange(0, BLOCKS))[:, None]
        column = tl.arange(0, 8)[None, :]
        tl.store(sums_at + row.to(tl.int64) * 8 + column, products + neighbours, mask=row + column * 0 <= stripes // 16)
    if tl.program_id(1) == 0:  # the last 64 bytes begin anywhere
        last_lane = tl.arange(0, 8)
        last_at = address.to(tl.pointer_type(tl.uint8)) + nbytes - 64
        last = tl.zeros((8,), tl.int64)
        neighbour = tl.zeros((8,), tl.int64)
        for byte in tl.static_range(8):
            last |= tl.load(last_at + last_lane * 8 + byte).to(tl.int64) << (8 * byte)
            neighbour |= tl.load(last_at + (last_lane ^ 1) * 8 + byte).to(tl.int64) << (8 * byte)
        keyed_last = last ^ tl.load(constants + 16 + last_lane)
        added = (keyed_last & 0xFFFFFFFF) * ((keyed_last >> 32) & 0xFFFFFFFF) + neighbour
        tl.store(lasts + piece * 8 + last_lane, added)


@triton.jit  # type: ignore[untyped-decorator]
def _chain_blocks(  # type: ignore[no-untyped-def]
    rows,
    lasts,
    blocks,
    constants,
    accumulators,
    AHEAD: tl.constexpr,  # noqa: N803
):
    """A program takes one piece from its first to its last block. A thread has one lane.

    No load depends on a condition: a thread knows few conditions at once, and would have to wait for each load before the next.
    """
    piece = tl.program_id(0)
    lane = tl.arange(0, 8)
    whole = tl.load(blocks + piece).to(tl.int32)
    rows_at = tl.load(rows + piece).to(tl.pointer_type(tl.int64)) + lane
    last_at = tl.load(lasts + piece).to(tl.pointer_type(tl.int64)) + lane
    state = tl.load(constants + lane)
    key = tl.load(constants + 8 + lane)
    for start in range(0, whole // AHEAD * AHEAD, AHEAD):
        for step in tl.static_range(AHEAD):
            added = state + tl.load(rows_at + (start + step) * 8)
            state = (added ^ ((added >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1
    for step in range(whole // AHEAD * AHEAD, whole):
        added = state + tl.load(rows_at + step * 8)
        state = (added ^ ((added >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1
    tl.store(accumulators + piece * 8 + lane, state + tl.load(rows_at + whole * 8) + tl.load(last_at))
