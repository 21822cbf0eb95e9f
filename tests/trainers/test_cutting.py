"""Slices cut where needs end: the same elements, and no piece that a worker needs in part."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.geometry import Box, intersect
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.update.cutting import cut_slices, edges_of

SHAPE = (6, 8)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in SHAPE)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(SHAPE, offsets, strict=True))
    return Box(0, offsets, sizes)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


@given(held=boxes(), needs=st.lists(st.lists(boxes(), max_size=1), max_size=4))
@settings(deadline=None)
def test_parts_are_the_slice_and_each_is_needed_whole_or_not_at_all(held: Box, needs: list[list[Box]]) -> None:
    whole = torch.arange(48).view(SHAPE)
    view = whole[tuple(slice(o, o + s) for o, s in zip(held.offsets, held.sizes, strict=True))]
    parts = list(cut_slices([LocalSlice(held, view)], edges_of(needs)))
    assert sorted(itertools.chain(*(indices(part.box) for part in parts))) == sorted(indices(held))
    for part in parts:
        box = part.box
        assert torch.equal(
            part.tensor, whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
        )
        assert part.tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "nothing is copied"
        for need in itertools.chain(*needs):
            assert intersect(box, need) in (None, box)


def test_what_no_edge_crosses_stays_as_it_is() -> None:
    items = [
        LocalSlice(Box(0, (2, 0), (2, 8)), torch.zeros(2, 8)),
        LocalSlice(Box(1, (), ()), torch.zeros(())),
        LocalSlice(Box(2, (0, 0), (0, 4)), torch.zeros(0, 4)),
        LocalSlice(Box(3, (0,), (4,)), torch.zeros(4)),  # nobody needs it
    ]
    needs = [[Box(0, (2, 0), (4, 8)), Box(1, (), ()), Box(2, (0, 0), (0, 4))], [Box(0, (0, 0), (2, 8))]]
    assert all(a is b for a, b in zip(cut_slices(items, edges_of(needs)), items, strict=True))
