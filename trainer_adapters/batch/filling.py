"""Copies rows into a block of a store's memory, and makes their digest on the way: one pass over memory."""

from __future__ import annotations

from inference_plugin.wire.copying import copy_joined_and_digest
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.tensors import PackedRows
from trainer_adapters.batch.memory import Block
from trainer_adapters.batch.parts import Sources

__all__ = ["back", "fill"]


def fill(block: Block, sources: Sources | PackedRows) -> int:
    """Copies `sources`, `block.nbytes` in all, one after the other into a block; returns the digest of its bytes.

    The caller keeps the memory of `sources` alive.

    Raises `TransportUnavailable` where the system has no memory for it.
    """
    if block.segment is None:
        return digest_bytes(b"")
    back(block)
    return copy_joined_and_digest(block.segment.memory, block.offset, sources.addresses, sources.sizes)


def back(block: Block) -> None:
    """Has all pages of a block exist. Raises `TransportUnavailable` where the system has no memory for them."""
    if block.segment is not None and not block.is_warm:
        block.segment.back(block.offset, block.nbytes)
