"""Cuts slices at the edges of what workers need, so that each worker is sent only its own part of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from inference_plugin.wire import geometry
from inference_plugin.wire.geometry import Box, Edges, cut_at_edges
from inference_plugin.wire.tensors import narrowed
from trainer_adapters.sources.base import LocalSlice

__all__ = ["cut_slices", "edges_of"]


def edges_of(needs: Iterable[Sequence[Box]]) -> Edges:
    """The edges of all boxes that workers need."""
    return geometry.edges_of(itertools.chain.from_iterable(needs))


def cut_slices(
    slices: Iterable[LocalSlice], edges: Edges, known: dict[Box, list[Box]] | None = None
) -> Iterator[LocalSlice]:
    """Yields the same elements in the same order; a slice that no edge crosses stays whole. `known` remembers how boxes were
    cut at these edges."""
    known = {} if known is None else known
    for item in slices:
        if (parts := known.get(item.box)) is None:
            parts = known[item.box] = cut_at_edges(item.box, edges)
        if len(parts) == 1:
            yield item
        else:
            for box in parts:
                offsets = [start - first for start, first in zip(box.offsets, item.box.offsets, strict=True)]
                yield LocalSlice(box, narrowed(item.tensor, offsets, box.sizes))
        del item  # before the next one is made
