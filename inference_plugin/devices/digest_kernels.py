"""Triton kernels of `digests`: its steps 1 and 2."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from inference_plugin.devices.digests import (
    BLOCK_BYTES,
    KEYS,
    LANES,
    LAST_KEYS,
    SCRAMBLE_KEYS,
    STARTS,
    BlockDigests,
)

__all__ = ["TritonDigests"]

BLOCKS_AT_ONCE = 16
PIECES_AT_ONCE = 4
"""With 8 lanes each: the threads of one warp."""
LOADED_AHEAD = 16
"""Steps of a chain whose sums are loaded before the first of them is taken: a load takes as long as ten steps."""
MAX_PROGRAMS_OF_PIECE = 4096
BYTES_OF_SUMS = 8 * LANES


class TritonDigests(BlockDigests):
    """Two kernels. Step 1 leaves, for each piece, a row of 8 sums for each whole block, one for the rest, and those of the last
    64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []
        self._described: list[tuple[int, int, int]] = []
        """Of each piece: the address of its rows, the address of the sums of its last 64 bytes, its whole blocks."""

    def _read(self, pieces: Sequence[torch.Tensor]) -> None:
        device, count = pieces[0].device, len(pieces)
        lengths = [piece.numel() for piece in pieces]
        blocks = [(nbytes - 1) // BLOCK_BYTES for nbytes in lengths]
        firsts = list(itertools.accumulate((each + 1 for each in blocks), initial=0))
        sums = torch.empty(firsts[-1], LANES, dtype=torch.int64, device=device)
        lasts = torch.empty(count, LANES, dtype=torch.int64, device=device)
        described = _sent([[piece.data_ptr() for piece in pieces], lengths, firsts[:-1]], device)
        programs = min(MAX_PROGRAMS_OF_PIECE, triton.cdiv(max(blocks) + 1, BLOCKS_AT_ONCE))
        keys, constants = _constants(device)
        _sum_blocks[(count, programs)](
            described[0], described[1], described[2], keys, constants, sums, lasts, BLOCKS=BLOCKS_AT_ONCE
        )
        self._kept += sums, lasts
        self._described += [
            (sums.data_ptr() + first * BYTES_OF_SUMS, lasts.data_ptr() + index * BYTES_OF_SUMS, whole)
            for index, (first, whole) in enumerate(zip(firsts, blocks, strict=False))
        ]

    def _chained(self) -> torch.Tensor:
        device, count = self._kept[0].device, len(self._described)
        described = _sent(list(zip(*self._described, strict=True)), device)
        accumulators = torch.empty(count, LANES, dtype=torch.int64, device=device)
        most = max(whole for _, _, whole in self._described)
        _chain_blocks[(triton.cdiv(count, PIECES_AT_ONCE),)](
            described[0],
            described[1],
            described[2],
            _constants(device)[1],
            accumulators,
            count,
            most,
            PIECES=PIECES_AT_ONCE,
            AHEAD=LOADED_AHEAD,
            num_warps=1,
        )
        return accumulators


def _sent(values: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Numbers on the device; nothing waits for it."""
    here = torch.tensor(values, dtype=torch.int64)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


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
    """Program (piece, k) sums `BLOCKS` blocks of a piece, beginning with its k-th `BLOCKS`, then those a whole grid further on. A
    thread has one lane of a block, so that nothing is exchanged before the end."""
    piece = tl.program_id(0)
    address = tl.load(addresses + piece)
    nbytes = tl.load(lengths + piece)
    data_at = address.to(tl.pointer_type(tl.int64))
    stripes = ((nbytes - 1) // 64).to(tl.int32)
    sums_at = sums + tl.load(firsts + piece) * 8
    lane = tl.arange(0, 8)[None, :]
    for start in range(tl.program_id(1) * BLOCKS, stripes // 16 + 1, tl.num_programs(1) * BLOCKS):
        block = (start + tl.arange(0, BLOCKS))[:, None]
        block_at = data_at + block.to(tl.int64) * 128 + lane
        products = tl.zeros((BLOCKS, 8), tl.int64)
        lanes = tl.zeros((BLOCKS, 8), tl.int64)
        for stripe in tl.static_range(16):
            there = block * 16 + stripe + lane * 0 < stripes
            data = tl.load(block_at + stripe * 8, mask=there, other=0)
            keyed = data ^ tl.load(keys + stripe + lane)
            products += tl.where(there, (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF), 0)
            lanes += data
        even, odd = tl.split(tl.reshape(lanes, (BLOCKS, 4, 2)))
        neighbours = tl.reshape(tl.join(odd, even), (BLOCKS, 8))
        tl.store(sums_at + block.to(tl.int64) * 8 + lane, products + neighbours, mask=block + lane * 0 <= stripes // 16)
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
    count,
    most,
    PIECES: tl.constexpr,  # noqa: N803
    AHEAD: tl.constexpr,  # noqa: N803
):
    """A program takes `PIECES` pieces from their first to their last block. A thread has one lane of a piece."""
    thread = tl.program_id(0) * PIECES * 8 + tl.arange(0, PIECES * 8)
    piece, lane = thread // 8, thread % 8
    there = piece < count
    whole = tl.load(blocks + piece, mask=there, other=0)
    rows_at = tl.load(rows + piece, mask=there, other=0).to(tl.pointer_type(tl.int64)) + lane
    last_at = tl.load(lasts + piece, mask=there, other=0).to(tl.pointer_type(tl.int64)) + lane
    state = tl.load(constants + lane)
    key = tl.load(constants + 8 + lane)
    for start in range(0, most, AHEAD):
        for step in tl.static_range(AHEAD):
            more = there & (start + step < whole)
            added = state + tl.load(rows_at + (start + step) * 8, mask=more, other=0)
            state = tl.where(more, (added ^ ((added >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1, state)
    state += tl.load(rows_at + whole * 8, mask=there, other=0) + tl.load(last_at, mask=there, other=0)
    tl.store(accumulators + thread, state, mask=there)
