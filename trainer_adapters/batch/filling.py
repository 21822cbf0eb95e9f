"""Copies rows into blocks of a store's memory, and makes their digests on the way: one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence

from inference_plugin.wire.copying import copy_groups_and_digest
from inference_plugin.wire.tensors import PackedRows
from trainer_adapters.batch.memory import Block
from trainer_adapters.batch.parts import Sources

__all__ = ["back", "fill"]

NO_MEMORY = bytearray()


def fill(blocks: Sequence[Block], sources: Sequence[Sources | PackedRows]) -> list[int]:
    """Copies the places of each of `sources`, one after the other, into its block, which is as long as they are together; returns
    the digests of the blocks. Blocks without memory have that of no bytes.

    The caller keeps the memory of `sources` alive. Raises `TransportUnavailable` where the system has no memory for the blocks.
    """
    for block in blocks:
        if not block.is_warm:
            back(block)
    return copy_groups_and_digest(
        [
            (NO_MEMORY, 0, b"") if block.segment is None else (block.segment.memory, block.offset, one.places)
            for block, one in zip(blocks, sources, strict=True)
        ]
    )


def back(block: Block) -> None:
    """Has all pages of a block exist. Raises `TransportUnavailable` where the system has no memory for them."""
    if not block.is_warm and block.segment is not None:
        block.segment.back(block.offset, block.nbytes)
