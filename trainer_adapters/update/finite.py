"""Looks for NaN and infinity in the pieces that a trainer rank sends, right before each piece is digested and copied: so the
piece is in the processor's cache, and memory is read once. It looks at the bytes that travel, after the cast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from inference_plugin.wire.errors import NotFinite, first_few
from inference_plugin.wire.finite import all_finite
from inference_plugin.wire.geometry import PiecePlace
from inference_plugin.wire.manifest import Manifest
from trainer_adapters.sources.base import LocalSlice

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """The check of one rank's part of an update."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._found: dict[int, None] = {}

    def watch(self, slices: Iterable[LocalSlice]) -> Iterator[LocalSlice]:
        """The same slices; their pieces are checked as they are sent."""
        for item in slices:
            yield replace(item, seen=self._look)

    def raise_found(self) -> None:
        """Raises `NotFinite`, which names the tensors, if there are any."""
        if self._found:
            names = [self._manifest.tensors[i].name for i in self._found]
            raise NotFinite(f"NaN or infinity in {first_few(names)}", side="trainer")

    def _look(self, place: PiecePlace, data: Any) -> None:
        tensor = place.box.tensor
        if tensor not in self._found and not all_finite(data, self._manifest.tensors[tensor].dtype):
            self._found[tensor] = None
