"""The pieces that a trainer's rank writes into the host's memory, in order. Bytes that lie one after the other on both sides are
copied and digested many pieces in one call: models have hundreds of small tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from inference_plugin.transports.base import WriteStats
from inference_plugin.transports.pieces import checked_dtype
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.copying import ALIGNED_BYTES, SPANS_AT_ONCE, copy_groups_and_digest, places_at
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box, Piece, PiecePlace, Slice
from inference_plugin.wire.manifest import Manifest

__all__ = ["WrittenPieces"]


Lands: TypeAlias = Callable[[PiecePlace], tuple[Any, int] | None]
"""Where a piece's bytes land one after the other, if they do, in one place: the memory (a writable buffer), and where in it."""


def _address_of(manifest: Manifest, item: Slice) -> int | None:
    """Where a slice's bytes begin that travel as they lie: in C order, in the host's memory. None for any other slice, and where
    somebody looks at the pieces. Raises `ManifestMismatch` as `pieces_of` does."""
    tensor = item.tensor
    if (
        checked_dtype(manifest, item) != tensor.dtype
        or type(tensor) is not torch.Tensor
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
        or getattr(item, "seen", None) is not None
    ):
        return None
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return tensor.data_ptr() if tensor.untyped_storage().nbytes() >= end else None  # else it was freed


@dataclass
class _Waiting:
    """Pieces that wait to be copied: for each its target, its place there and that of its bytes; and its number in the list of
    pieces. `kept`: the tensors whose memory that is, each with its address."""

    groups: list[tuple[Any, int, bytes]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    nbytes: int = 0
    kept: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def check_memory(self) -> None:
        """Raises `ManifestMismatch` if the memory of a tensor that waits was freed."""
        if any(tensor.data_ptr() != address for tensor, address in self.kept):
            raise ManifestMismatch(
                "the memory of a tensor was freed before its bytes were copied",
                hint="move or free weights once the update has read them: `wait_released` returns then",
                side="trainer",
            )


class WrittenPieces:
    """Collects pieces. `stats` counts the bytes and the seconds of the copies made here."""

    def __init__(self, stats: WriteStats) -> None:
        self._stats = stats
        self._waiting = _Waiting()
        self._boxes: list[Box] = []
        self._digests: list[int] = []

    def add(self, box: Box, digest: int) -> None:
        """A piece that was written."""
        self._boxes.append(box)
        self._digests.append(digest)

    def copy_slice(
        self, manifest: Manifest, item: Slice, places: Sequence[PiecePlace], lands: Lands, *, lasts: bool
    ) -> bool:
        """Has the pieces of a slice copied, by `end` at the latest if the slice `lasts` so long, else at once. False, and none is
        taken, unless the bytes of each lie one after the other, and land so in one place that can be written in one pass."""
        if (address := _address_of(manifest, item)) is None:
            return False
        targets = [target for place in places if (target := lands(place)) is not None]
        if len(targets) != len(places) or any(start % ALIGNED_BYTES for _, start in targets):
            return False
        for place, (target, start) in zip(places, targets, strict=True):
            self._copy(place.box, target, start, address + place.start, place.end - place.start)
        if not lasts:
            self._copy_waiting()
        elif self._waiting.groups:
            self._waiting.kept.append((item.tensor, address))
        return True

    def end(self) -> list[Piece]:
        """Every piece, in order, with its digest. All bytes are copied."""
        self._copy_waiting()
        return list(map(Piece, self._boxes, self._digests))

    def close(self) -> None:
        """Forgets what waits to be copied: an error may keep this object, and with it the memory."""
        self._waiting = _Waiting()

    def _copy(self, box: Box, target: Any, start: int, address: int, nbytes: int) -> None:
        waiting = self._waiting
        waiting.numbers.append(len(self._boxes))
        self.add(box, 0)
        waiting.groups.append((target, start, places_at((address,), (nbytes,))))
        waiting.nbytes += nbytes
        if waiting.nbytes >= PIECE_BYTES or len(waiting.groups) >= SPANS_AT_ONCE:
            self._copy_waiting()

    def _copy_waiting(self) -> None:
        began_s, waiting = time.perf_counter(), self._waiting
        waiting.check_memory()
        for number, digest in zip(waiting.numbers, copy_groups_and_digest(waiting.groups), strict=True):
            self._digests[number] = digest
        self._stats.nbytes += waiting.nbytes
        self._stats.move_s += time.perf_counter() - began_s
        self._waiting = _Waiting()
