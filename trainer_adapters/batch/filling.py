"""Copies rows into blocks of a store's memory, and makes their digests on the way: one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from inference_plugin.wire.copying import copy_groups_and_digest
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.tensors import PackedRows
from trainer_adapters.batch.memory import Block, Segment
from trainer_adapters.batch.parts import Sources

__all__ = ["back", "fill"]

OF_NOTHING = digest_bytes(b"")


def fill(blocks: Sequence[Block], sources: Sequence[Sources | PackedRows]) -> list[int]:
    """Copies the places of each of `sources`, one after the other, into its block, which is as long as they are together; returns
    the digests of the blocks. Blocks without memory stay as they are.

    The caller keeps the memory of `sources` alive. Raises `TransportUnavailable` where the system has no memory for the blocks.
    """
    digests = [OF_NOTHING] * len(blocks)
    in_segment: dict[Segment, list[int]] = {}
    for i, block in enumerate(blocks):
        if not block.is_warm:
            back(block)
        if block.segment is not None:
            in_segment.setdefault(block.segment, []).append(i)
    for segment, numbers in in_segment.items():
        groups = [(blocks[i].offset, sources[i].addresses, sources[i].sizes) for i in numbers]
        for i, digest in zip(numbers, copy_groups_and_digest(segment.memory, groups), strict=True):
            digests[i] = digest
    return digests


def back(block: Block) -> None:
    """Has all pages of a block exist. Raises `TransportUnavailable` where the system has no memory for them."""
    if not block.is_warm and block.segment is not None:
        block.segment.back(block.offset, block.nbytes)
