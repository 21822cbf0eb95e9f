"""Boxes and regions, held against brute force on small tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.wire.geometry import (
    Box,
    Region,
    bounding_box,
    box_volume,
    c_strides,
    cut_at_edges,
    edges_of,
    hull,
    in_box,
    intersect,
    may_overlap,
    overlap,
    region_of,
    segment_region,
    subtract,
    through_copy,
    tile,
)

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(0, offsets, tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True)))


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of numbers 0, 1, ... in C order of `shape`: sliced with steps, permuted, perhaps expanded."""
    view = torch.arange(math.prod(shape)).view(shape)
    for dim, size in enumerate(shape):
        start = draw(st.integers(0, size - 1))
        stop, step = draw(st.integers(start + 1, size)), draw(st.integers(1, 2))
        view = view[(slice(None),) * dim + (slice(start, stop, step),)]
    view = view.permute(draw(st.permutations(range(view.dim()))))
    return view.unsqueeze(0).expand(2, *view.shape) if draw(st.booleans()) else view


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))))


def of_box(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


@given(shapes, st.data())
def test_overlap_hull_and_difference_are_those_of_the_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b, c = (data.draw(boxes(shape)) for _ in range(3))
    shared = intersect(a, b)
    assert (elements(shared) if shared is not None else set()) == elements(a) & elements(b)
    assert overlap(a.offsets, a.sizes, b.offsets, b.sizes) == (shared and (shared.offsets, shared.sizes))
    around = hull(a, b)
    assert elements(around) >= elements(a) | elements(b)
    for dim in range(len(shape)):
        ends = [(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in (a, b)]
        assert around.offsets[dim] == min(start for start, _ in ends)
        assert around.offsets[dim] + around.sizes[dim] == max(end for _, end in ends)
    left = subtract([a], [b, c])
    assert sum(map(box_volume, left)) == len(elements(a) - elements(b) - elements(c))
    assert set().union(*map(elements, left)) == elements(a) - elements(b) - elements(c)


@given(shapes, st.data())
def test_parts_that_no_edge_crosses_tile_the_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = data.draw(boxes(shape))
    needs = data.draw(st.lists(boxes(shape), max_size=3))
    parts = cut_at_edges(whole, edges_of(needs))
    assert tile(whole, parts)
    assert parts == sorted(parts, key=lambda box: box.offsets)
    assert all(intersect(part, need) in (None, part) for part in parts for need in needs)
    assert cut_at_edges(whole, {}) == [whole]


@given(shapes, st.data())
def test_boxes_tile_a_box_if_they_hold_each_element_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = Box(0, (0,) * len(shape), shape)
    parts = data.draw(
        st.lists(boxes(shape), max_size=4)
        | st.lists(boxes(shape), max_size=3).map(lambda needs: cut_at_edges(whole, edges_of(needs)))
    )
    held = [element for part in parts for element in elements(part)]
    assert tile(whole, parts) == (sorted(held) == sorted(elements(whole)))


@given(shapes, st.data())
def test_a_bounding_box_holds_the_region_and_says_whether_it_is_all_of_it(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    view = data.draw(views(shape))
    region = region_of("t", view)
    box, exact = bounding_box(region, shape)
    numbers = torch.arange(math.prod(shape)).view(shape)
    inside = of_box(box, numbers).flatten().tolist()
    seen = view.flatten().tolist()
    assert set(seen) <= set(inside)
    assert region.numel == len(seen) and region.end == max(seen) + 1
    if exact:
        assert sorted(seen) == sorted(inside)
    assert torch.equal(region.of(numbers.view(-1)), view)
    moved = in_box(region, shape, box)
    assert torch.equal(moved.of(of_box(box, numbers).contiguous().view(-1)), view)


def test_a_box_that_does_not_hold_a_region_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold"):
        in_box(Region("t", 0, (8,), (1,)), (4, 4), Box(0, (1, 0), (3, 4)))


@given(shapes, st.data())
def test_regions_that_share_an_element_may_overlap(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(views(shape)), data.draw(views(shape))
    if set(one.flatten().tolist()) & set(other.flatten().tolist()):
        assert may_overlap(region_of("a", one), region_of("b", other), shape)


@given(shapes, st.data())
def test_a_view_of_a_copy_shows_the_same_elements_of_what_was_copied(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    copied = data.draw(views(shape))
    order = data.draw(st.permutations(range(copied.dim())))
    laid_out = copied.permute(order).clone(memory_format=torch.contiguous_format)
    copy = laid_out.permute([order.index(d) for d in range(copied.dim())])
    view = copy
    for dim in range(copy.dim()):
        start = data.draw(st.integers(0, copy.shape[dim] - 1))
        view = view.narrow(dim, start, data.draw(st.integers(1, copy.shape[dim] - start)))
    found = through_copy(region_of("", view), region_of("t", copied), copy.stride())
    if found is not None:
        assert found.tensor == "t"
        assert found.of(torch.arange(math.prod(shape))).flatten().tolist() == view.flatten().tolist()


@given(shapes, st.data())
def test_selecting_and_narrowing_a_region_is_that_of_the_view(shape: tuple[int, ...], data: st.DataObject) -> None:
    view, numbers = data.draw(views(shape)), torch.arange(math.prod(shape))
    dim = data.draw(st.integers(0, view.dim() - 1))
    start = data.draw(st.integers(0, view.shape[dim] - 1))
    size = data.draw(st.integers(1, view.shape[dim] - start))
    region = region_of("t", view)
    assert torch.equal(region.select(dim, start).of(numbers), view.select(dim, start))
    assert torch.equal(region.narrow(dim, start, size).of(numbers), view.narrow(dim, start, size))
    assert region.named("u") == Region("u", region.offset, region.sizes, region.strides)


@given(shapes, st.integers(1, 8), st.integers(0, 64), st.data())
def test_the_rows_of_a_box_are_its_bytes_in_c_order(
    shape: tuple[int, ...], item_bytes: int, start: int, data: st.DataObject
) -> None:
    box = data.draw(boxes(shape))
    total = math.prod(shape) * item_bytes
    expected = of_box(box, torch.arange(start, start + total).view(*shape, item_bytes)).flatten()
    region = segment_region(box, shape, item_bytes, start)
    if region is not None:
        assert region.strides[1] == 1
        assert torch.equal(region.of(torch.arange(start + total)).flatten(), expected)
    else:
        starts = expected[::item_bytes]
        gaps = torch.diff(starts)
        assert len(set(gaps.tolist())) > 1
    assert c_strides(shape) == torch.empty(shape, device="meta").stride()
