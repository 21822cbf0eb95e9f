"""Tests whether torch has sharded a module or a tensor, without importing torch's sharding modules.

That import takes seconds, and a trainer that shards has already made it: no object exists of a class that nobody imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "is_fully_sharded", "is_wrapped_by_fsdp1"]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_fully_sharded(module: object) -> bool:
    """Whether `fully_shard` (FSDP2) was called on this module itself."""
    return _is("torch.distributed.fsdp", "FSDPModule", module)


def is_wrapped_by_fsdp1(module: object) -> bool:
    """Whether this is a FullyShardedDataParallel, which holds the module that it wraps."""
    return _is("torch.distributed.fsdp", "FullyShardedDataParallel", module)


def _is(module: str, name: str, value: object) -> bool:
    kind = getattr(sys.modules.get(module), name, None)  # also None while that module is being imported
    return kind is not None and isinstance(value, kind)
