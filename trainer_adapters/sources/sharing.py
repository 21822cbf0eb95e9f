"""Divides boxes that several ranks hold between these ranks, so that each byte is sent once. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TypeVar

from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest

__all__ = ["MIN_CUT_BYTES", "beginnings", "share_boxes", "some_of"]

Item = TypeVar("Item")

MIN_CUT_BYTES = 1 << 20
"""Smaller boxes are never divided between ranks that hold the same copy."""

COMPARED, KINDS = 16, 64
"""Number of boxes that are compared with another rank's copy, among those that training keeps equal: about so many, and at least
one of each kind, of so many kinds at most."""

KEPT = 4
"""The same where their values are copied because tensors are made one by one."""


def share_boxes(manifest: Manifest, boxes: Sequence[Box], rank: int, world_size: int) -> dict[int, Box]:
    """The part of boxes that `rank` sends, if all `world_size` ranks hold them: by position in `boxes`, only those of which it
    sends something. Raises ValueError if there is no such rank.

    The boxes are laid end to end and their bytes divided evenly between the ranks. A box goes to the rank that its first
    byte falls to; a box of `MIN_CUT_BYTES` or more is cut between rows. A pure function, so that the ranks need not communicate.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1}, not {rank}")
    sizes = [manifest.box_nbytes(box) for box in boxes]
    low, high = sum(sizes) * rank // world_size, sum(sizes) * (rank + 1) // world_size
    shares = {}
    start = 0
    for position, (box, nbytes) in enumerate(zip(boxes, sizes, strict=True)):
        if (share := _rows_that_begin_in(box, nbytes, low - start, high - start)) is not None:
            shares[position] = share
        start += nbytes
    return shares


def some_of(manifest: Manifest, shares: dict[int, Box], trained: Collection[int] = ()) -> dict[int, Box]:
    """A few of the boxes that another rank sends: of each kind of tensor, which is its name without numbers, some that are spread
    evenly over the layers. So experts are among them, and what tensor parallelism divides, of which ranks may hold different
    parts under one name. Boxes of fewer than two dimensions only from `trained`: others may differ between ranks without an
    error, such as statistics that each rank keeps of its own batches."""
    matrices = [position for position, box in shares.items() if len(box.sizes) > 1]
    vectors = [position for position, box in shares.items() if len(box.sizes) < 2 and position in trained]
    return {i: shares[i] for some in (matrices, vectors) for i in _some_of_each_kind(manifest, shares, some)}


def _some_of_each_kind(manifest: Manifest, shares: dict[int, Box], positions: list[int]) -> list[int]:
    kinds: dict[str, list[int]] = {}
    for position in positions:
        kinds.setdefault(re.sub(r"\d+", "", manifest.tensors[shares[position].tensor].name), []).append(position)
    some = _spread(list(kinds.values()), KINDS)
    each = max(1, COMPARED // max(1, len(some)))
    return [position for kind in some for position in _spread(kind, each)]


def beginnings(manifest: Manifest, shares: dict[int, Box]) -> dict[int, Box]:
    """Of a few of these boxes the first piece, which is a piece that its sender sends: what a rank can keep a copy of, to compare
    it, after the tensor itself is gone."""
    some = _spread(list(shares.items()), KEPT)
    return {position: manifest.split(box, PIECE_BYTES)[0].box for position, box in some}


def _spread(items: list[Item], most: int) -> list[Item]:
    """At most so many of the items, evenly spread."""
    step = -(-len(items) // most) or 1
    return items[step // 2 :: step]


def _rows_that_begin_in(box: Box, nbytes: int, low: int, high: int) -> Box | None:
    """The rows of a box whose first byte lies in `[low, high)`, counted from the box's own first byte."""
    if not nbytes:
        return None
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or nbytes < MIN_CUT_BYTES:
        return box if low <= 0 < high else None
    rows = box.sizes[dim]
    row_bytes = nbytes // rows
    first, last = (min(max(-(-edge // row_bytes), 0), rows) for edge in (low, high))
    if first >= last:
        return None
    offsets = (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :])
    return Box(box.tensor, offsets, (*box.sizes[:dim], last - first, *box.sizes[dim + 1 :]))
