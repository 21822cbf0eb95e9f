"""xxh3-64 of bytes in a device's memory: the value that `wire.digest` computes of them on the host, at the speed of that memory.

XXH3-64 of more than 240 bytes (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 algorithm description for large
inputs") keeps eight accumulators of 64 bits. A block of 1,024 bytes is 16 stripes of 8 lanes. What a stripe adds to the
accumulators depends on its bytes alone; only the scramble after each block depends on the accumulators. So there are three steps:

1. `sums`: for each block and lane the sum of what its stripes add. All blocks of all pieces at once: this reads the bytes.
2. `chains`: for each piece and lane, block after block, add the sum and scramble. This reads a sixteenth of the bytes. A piece
   of 16 MiB is a chain of 16,384 short steps, and every piece has eight chains, which run side by side.
3. `finish`: eight accumulators become one digest, on the host.

Steps 1 and 2 are Triton kernels (`digest_kernels`), or calls of torch, which any device runs. Pieces of at most 240 bytes have
another algorithm; they are copied to the host together, and digested there.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.tensors import bytes_view

__all__ = [
    "ALIGNMENT_BYTES", "BLOCK_BYTES", "KEYS", "LANES", "LAST_KEYS", "LONGEST_MEDIUM_BYTES", "SCRAMBLE_KEYS", "STARTS",
    "BlockDigests", "Digests", "Offsets", "Runs", "TorchDigests",
]  # fmt: skip

LANES = 8
STRIPES = 16
"""Stripes of a block."""
STRIPE_BYTES = 8 * LANES
BLOCK_BYTES = STRIPES * STRIPE_BYTES
LONGEST_MEDIUM_BYTES = 240
ALIGNMENT_BYTES = 16
"""A thread of a kernel loads as many bytes at once."""

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1 = 0x165667919E3779F9

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _keys_at(start: int, count: int) -> tuple[int, ...]:
    """Keys of 64 bits in the secret, as torch has them: signed."""
    return tuple(np.frombuffer(SECRET[start : start + 8 * count], "<i8").tolist())


KEYS = _keys_at(0, STRIPES + LANES - 1)
"""The key of lane j in stripe i of a block is `KEYS[i + j]`."""
SCRAMBLE_KEYS = _keys_at(len(SECRET) - STRIPE_BYTES, LANES)
LAST_KEYS = _keys_at(len(SECRET) - STRIPE_BYTES - 7, LANES)
STARTS = tuple(
    np.array([PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1], dtype=np.uint64)
    .view(np.int64)
    .tolist()
)
LOW = 0xFFFFFFFF


Offsets: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True)
class Runs:
    """Runs of contiguous bytes of `memory`, a contiguous tensor: where each starts, and its length."""

    memory: torch.Tensor
    starts: Offsets
    lengths: Offsets

    def view(self, start: int, length: int) -> torch.Tensor:
        return bytes_view(self.memory).narrow(0, start, length)

    def views(self) -> list[torch.Tensor]:
        return list(map(self.view, self.starts.tolist(), self.lengths.tolist()))


class Digests(abc.ABC):
    """Digests of tensors of one device. Work goes into the calling thread's queue."""

    @abc.abstractmethod
    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queues all reading of the tensors. What is queued afterwards may change them."""

    def add_runs(self, runs: Sequence[Runs]) -> None:
        """`add` of each run, in order."""
        self.add([view for some in runs for view in some.views()])

    @staticmethod
    @abc.abstractmethod
    def held_bytes(nbytes: int) -> int:
        """About the most memory of the device that digests of so many bytes hold at once, beside these bytes."""

    @abc.abstractmethod
    def end(self) -> list[int]:
        """The `digest_bytes` of each tensor's bytes in C order, in the order of `add`. All of this queue's work has ended."""


class BlockDigests(Digests):
    """The three steps. `add` is the first."""

    def __init__(self) -> None:
        self._count = 0
        self._short: list[tuple[Offsets, list[int], torch.Tensor]] = []
        """Positions of pieces of at most 240 bytes, their lengths, and a copy of their bytes side by side."""
        self._long: list[Offsets] = []
        """Positions of the others, in the order of `_read`."""
        self._lengths: list[Offsets] = []

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        data = [bytes_view(tensor.contiguous()) for tensor in tensors]
        self._add_at(self._count + np.arange(len(data)), data)
        self._count += len(data)

    def end(self) -> list[int]:
        digests = np.zeros(self._count, dtype=np.uint64)
        for positions, lengths, kept in self._short:
            packed, end = kept.cpu().numpy(), 0
            for position, length in zip(positions.tolist(), lengths, strict=True):
                digests[position] = digest_bytes(packed[end : end + length])
                end += length
        if self._long:
            accumulators = self._chained().cpu().numpy().view(np.uint64)
            digests[np.concatenate(self._long)] = _finished(
                accumulators, np.concatenate(self._lengths).astype(np.uint64)
            )
        found: list[int] = digests.tolist()
        return found

    def _add_at(self, positions: Offsets, data: Sequence[torch.Tensor]) -> None:
        """`add` of contiguous bytes (1-D, uint8), each with its position among all."""
        lengths = np.array([each.numel() for each in data], dtype=np.int64)
        is_short = lengths <= LONGEST_MEDIUM_BYTES
        if is_short.any():
            short = [each for each, is_one in zip(data, is_short.tolist(), strict=True) if is_one]
            self._short.append((positions[is_short], lengths[is_short].tolist(), torch.cat(short)))
        if not is_short.all():
            long = [each for each, is_one in zip(data, is_short.tolist(), strict=True) if not is_one]
            self._keep_order(positions[~is_short], lengths[~is_short])
            self._read([each if _is_aligned(each) else each.clone() for each in long])

    def _keep_order(self, positions: Offsets, lengths: Offsets) -> None:
        """Says which pieces are read next."""
        self._long.append(positions)
        self._lengths.append(lengths)

    @abc.abstractmethod
    def _read(self, pieces: Sequence[torch.Tensor]) -> None:
        """Step 1 of pieces of more than 240 bytes, each contiguous, 1-D, uint8, at an address that is a multiple of 16."""

    @abc.abstractmethod
    def _chained(self) -> torch.Tensor:
        """Step 2 of all pieces: accumulators (pieces, 8), int64, whose arithmetic wraps around."""


class TorchDigests(BlockDigests):
    """On any device. Step 2 is some calls for each block of the longest piece: slow on a device."""

    @staticmethod
    def held_bytes(nbytes: int) -> int:
        # All sums, and again where step 2 has them side by side, filled up to at most twice their size.
        return 3 * (nbytes // BLOCK_BYTES) * STRIPE_BYTES

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[torch.Tensor] = []
        self._rests: list[torch.Tensor] = []

    def _read(self, pieces: Sequence[torch.Tensor]) -> None:
        keys, last_keys = _constant(KEYS, pieces[0]).unfold(0, LANES, 1), _constant(LAST_KEYS, pieces[0])
        for piece in pieces:
            end = piece.numel()
            blocks = (end - 1) // BLOCK_BYTES
            start = blocks * BLOCK_BYTES
            whole = piece.narrow(0, 0, start).view(torch.int64).view(blocks, STRIPES, LANES)
            self._sums.append(_added(whole, keys).sum(1))
            # What is added after the last scramble: the stripes of the block that is not whole, and the last 64 bytes.
            stripes = (end - 1 - start) // STRIPE_BYTES
            rest = piece.narrow(0, start, stripes * STRIPE_BYTES).view(torch.int64).view(stripes, LANES)
            last = piece.narrow(0, end - STRIPE_BYTES, STRIPE_BYTES).clone().view(torch.int64)
            self._rests.append(_added(rest, keys.narrow(0, 0, stripes)).sum(0) + _added(last, last_keys))

    def _chained(self) -> torch.Tensor:
        alike: dict[int, list[int]] = {}
        for i, sums in enumerate(self._sums):
            alike.setdefault(len(sums).bit_length(), []).append(i)
        found: dict[int, torch.Tensor] = {}
        for some in alike.values():
            found.update(zip(some, _chained_together([self._sums[i] for i in some]).unbind(), strict=True))
        return torch.stack([found[i] for i in range(len(found))]) + torch.stack(self._rests)


def _chained_together(every: Sequence[torch.Tensor]) -> torch.Tensor:
    """The accumulators of pieces of about the same size, from their blocks' sums."""
    one, blocks = every[0], [len(sums) for sums in every]
    most, counts = max(blocks), _constant(blocks, one).unsqueeze(1)
    padded = one.new_zeros((len(every), most, LANES))
    torch._foreach_copy_([row.narrow(0, 0, len(sums)) for row, sums in zip(padded, every, strict=True)], list(every))
    keys, accumulators = _constant(SCRAMBLE_KEYS, one), _constant(STARTS, one).repeat(len(every), 1)
    for block in range(most):
        scrambled = _scrambled(accumulators + padded.select(1, block), keys)
        accumulators = torch.where(counts > block, scrambled, accumulators)
    return accumulators


def _is_aligned(data: torch.Tensor) -> bool:
    return data.data_ptr() % ALIGNMENT_BYTES == 0 and data.storage_offset() % ALIGNMENT_BYTES == 0


def _constant(values: Sequence[int], beside: torch.Tensor) -> torch.Tensor:
    made = beside.new_empty((len(values),), dtype=torch.int64)
    torch._foreach_copy_([made], [torch.tensor(values, dtype=torch.int64)])
    return made


def _added(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What stripes (..., 8) add to each accumulator: the product of the halves of the keyed lane, and the neighbouring lane."""
    keyed = data ^ keys
    neighbours = data.view(*data.shape[:-1], LANES // 2, 2).flip(-1).view(data.shape)
    return (keyed & LOW) * ((keyed >> 32) & LOW) + neighbours


def _scrambled(accumulators: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    shifted = (accumulators >> 47) & 0x1FFFF  # torch keeps the sign
    return (accumulators ^ shifted ^ keys) * PRIME32_1


def _finished(accumulators: Any, lengths: Any) -> Any:
    """Step 3: digests of pieces of `lengths` bytes, all uint64."""
    keys = np.frombuffer(SECRET[11 : 11 + STRIPE_BYTES], "<u8")
    mixed = accumulators ^ keys
    digests = lengths * np.uint64(PRIME64_1)
    for lane in range(0, LANES, 2):
        digests = digests + _folded_product(mixed[:, lane], mixed[:, lane + 1])
    digests = (digests ^ (digests >> np.uint64(37))) * np.uint64(PRIME_MX1)
    return digests ^ (digests >> np.uint64(32))


def _folded_product(a: Any, b: Any) -> Any:
    """The lower 64 bits of the product of 128, XOR the upper ones; from the products of halves, as numpy has none of 128 bits."""
    low, half = np.uint64(LOW), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    crossed = (a_low * b_low >> half) + (a_high * b_low & low) + a_low * b_high
    upper = a_high * b_high + (a_high * b_low >> half) + (crossed >> half)
    return (a * b) ^ upper
