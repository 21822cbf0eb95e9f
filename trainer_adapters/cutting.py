"""Slices cut where what a worker needs ends, so that each is sent its own part of a tensor and nothing of the others'."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from inference_plugin.wire.manifest import Box
from trainer_adapters.source import LocalSlice

__all__ = ["Edges", "cut_slices", "edges_of"]

Edges = dict[int, tuple[frozenset[int], ...]]
"""Of each tensor, per dimension, where something that a worker needs begins or ends."""


def edges_of(needs: Iterable[Sequence[Box]]) -> Edges:
    found: dict[int, tuple[set[int], ...]] = {}
    for boxes in needs:
        for box in boxes:
            edges = found.setdefault(box.tensor, tuple(set() for _ in box.sizes))
            for own, offset, size in zip(edges, box.offsets, box.sizes, strict=True):
                own.update((offset, offset + size))
    return {tensor: tuple(map(frozenset, edges)) for tensor, edges in found.items()}


def cut_slices(slices: Iterable[LocalSlice], edges: Edges) -> Iterator[LocalSlice]:
    """The same elements in the same order of slices; those that no edge crosses as they are."""
    for item in slices:
        box = item.box
        spans = [
            list(itertools.pairwise(sorted({low, low + size, *(at for at in own if low < at < low + size)})))
            for own, low, size in zip(edges.get(box.tensor, ()), box.offsets, box.sizes, strict=False)
        ]
        if all(len(span) <= 1 for span in spans):
            yield item
            continue
        for part in itertools.product(*spans):
            tensor = item.tensor
            for dim, (start, end) in enumerate(part):
                tensor = tensor.narrow(dim, start - box.offsets[dim], end - start)
            yield LocalSlice(Box(box.tensor, tuple(s for s, _ in part), tuple(e - s for s, e in part)), tensor)
