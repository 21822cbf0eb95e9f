"""Layout, boxes and covers: pure functions, held against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire.cover import ExactCover, check_exact_cover
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box, box_volume, intersect, split_box
from inference_plugin.wire.manifest import ALIGNMENT_BYTES, DTYPE_BYTES, Manifest, TensorSpec, aligned

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def test_aligned_rounds_up_to_whole_blocks() -> None:
    assert [aligned(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert [aligned(n, 1) for n in (0, 1, 7, 12345)] == [0, 1, 7, 12345]
    assert all(type(aligned(n)) is int for n in (0, 513))


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_aligned_is_the_next_multiple(nbytes: int, alignment: int) -> None:
    result = aligned(nbytes, alignment)
    assert result % alignment == 0 and nbytes <= result < nbytes + alignment


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), max_size=8))
@settings(deadline=None)
def test_tensors_lie_aligned_one_after_the_other_and_the_end_is_their_aligned_sum(
    tensors: list[tuple[str, tuple[int, ...]]],
) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{i}", d, s) for i, (d, s) in enumerate(tensors))).check()
    end = 0
    for spec, offset in zip(manifest.tensors, manifest.layout.offsets, strict=True):
        assert offset == end and offset % ALIGNMENT_BYTES == 0
        end += aligned(math.prod(spec.shape) * DTYPE_BYTES[spec.dtype])
    assert manifest.layout.nbytes == end
    assert manifest.nbytes == sum(math.prod(s) * DTYPE_BYTES[d] for d, s in tensors)


def test_the_fingerprint_sees_names_dtypes_shapes_order_and_ties() -> None:
    a, b = TensorSpec("a", "bfloat16", (4, 2)), TensorSpec("b", "bfloat16", (4, 2))
    different = [
        Manifest((a, b)),
        Manifest((b, a)),
        Manifest((a,)),
        Manifest((a, b), {"c": "a"}),
        Manifest((a, b), {"c": "b"}),
        Manifest((a, TensorSpec("b", "float16", (4, 2)))),
        Manifest((a, TensorSpec("b", "bfloat16", (2, 4)))),
        Manifest((a, TensorSpec("c", "bfloat16", (4, 2)))),
    ]
    assert len({manifest.fingerprint for manifest in different}) == len(different)
    assert Manifest((a, b)).fingerprint == Manifest((a, b)).fingerprint


def test_bad_manifests_name_the_first_offenders_and_their_count() -> None:
    doubled = tuple(TensorSpec(f"t{i}", "bfloat16", (1,)) for i in range(10)) * 2
    with pytest.raises(ManifestMismatch, match=r"duplicate tensor names: t0, .*t7, \.\.\. \(10 in all\)"):
        Manifest(doubled).check()
    with pytest.raises(ManifestMismatch, match=r"can't travel: w: float7 \(1 in all\)"):
        Manifest((TensorSpec("w", "float7", ()),)).check()
    tie = Manifest((TensorSpec("w", "bool", ()), TensorSpec("v", "bool", ())), {"w": "v", "x": "y"})
    with pytest.raises(ManifestMismatch, match=r"w -> v, x -> y \(2 in all\)"):
        tie.check()


# --- boxes ------------------------------------------------------------------------------------------------------------


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(0, offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


def marked(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is in one of the boxes."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    return counts


@given(shapes, st.data())
@settings(max_examples=200, deadline=None)
def test_split_covers_its_box_once_with_pieces_within_the_limit_in_c_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    box = data.draw(boxes_in(shape))
    item_bytes = data.draw(st.sampled_from([1, 2, 4, 8]))
    limit = data.draw(st.integers(1, 400))
    pieces = split_box(box, item_bytes, limit)
    assert (marked(shape, pieces) == marked(shape, [box])).all() or box_volume(box) == 0
    assert all(box_volume(piece) * item_bytes <= max(limit, item_bytes) for piece in pieces)
    assert [piece.offsets for piece in pieces] == sorted(piece.offsets for piece in pieces)
    assert bool(pieces) == (box_volume(box) > 0)


@pytest.mark.parametrize(
    ("elements", "pieces"), [(255, [255]), (256, [256]), (257, [256, 1]), (512, [256, 256]), (513, [256, 256, 1])]
)
def test_a_box_at_and_beside_the_limit_is_cut_there(elements: int, pieces: list[int]) -> None:
    assert [p.sizes[0] for p in split_box(Box(0, (0,), (elements,)), 2, 512)] == pieces


@given(shapes, st.data())
@settings(max_examples=200, deadline=None)
def test_intersection_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = (marked(shape, [a]) * marked(shape, [b])) > 0
    shared = intersect(a, b)
    assert shared == intersect(b, a)
    assert ((marked(shape, [shared]) if shared else np.zeros(shape)) == both).all()
    assert intersect(a, Box(1, b.offsets, b.sizes)) is None


# --- covers -----------------------------------------------------------------------------------------------------------


@st.composite
def partitions(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """A random cutting of a box, not only along rows."""
    cuttable = [d for d, size in enumerate(box.sizes) if size > 1]
    if not depth or not cuttable or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(cuttable))
    at = draw(st.integers(1, box.sizes[dim] - 1))
    low = Box(box.tensor, box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
    high = Box(
        box.tensor,
        (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :]),
        (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :]),
    )
    return [*draw(partitions(low, depth - 1)), *draw(partitions(high, depth - 1))]


@st.composite
def exact_covers(draw: st.DrawFn) -> tuple[Manifest, list[tuple[Box, str]]]:
    tensors = draw(st.lists(shapes, min_size=1, max_size=3))
    manifest = Manifest(tuple(TensorSpec(f"t{i}", "int8", shape) for i, shape in enumerate(tensors)))
    boxes = [box for i in range(len(tensors)) for box in draw(partitions(manifest.whole(i)))]
    owned = [(box, f"rank {draw(st.integers(0, 3))}") for box in draw(st.permutations(boxes))]
    return manifest, owned


@given(exact_covers())
@settings(max_examples=200, deadline=None)
def test_every_exact_partition_is_accepted(cover: tuple[Manifest, list[tuple[Box, str]]]) -> None:
    check_exact_cover(*cover)


@given(exact_covers(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_lost_box_is_named_and_counted(cover: tuple[Manifest, list[tuple[Box, str]]], data: st.DataObject) -> None:
    manifest, owned = cover
    lost = data.draw(st.sampled_from(owned))
    owned.remove(lost)
    if not box_volume(lost[0]):
        check_exact_cover(manifest, owned)
        return
    with pytest.raises(ManifestMismatch, match="written by nobody") as raised:
        check_exact_cover(manifest, owned)
    assert f"t{lost[0].tensor}[" in str(raised.value)
    assert f"({box_volume(lost[0])} elements)" in str(raised.value)


@given(exact_covers(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_box_that_overlaps_is_named_with_both_owners(
    cover: tuple[Manifest, list[tuple[Box, str]]], data: st.DataObject
) -> None:
    manifest, owned = cover
    twice = data.draw(st.sampled_from(owned))[0]
    if not box_volume(twice):
        return
    with pytest.raises(ManifestMismatch, match="written more than once") as raised:
        check_exact_cover(manifest, [*owned, (twice, "the other one")])
    assert f"t{twice.tensor}[" in str(raised.value) and "the other one" in str(raised.value)


@given(exact_covers(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_cover_that_passed_lets_no_other_list_pass(
    cover: tuple[Manifest, list[tuple[Box, str]]], data: st.DataObject
) -> None:
    manifest, owned = cover
    boxes = [box for box, _ in owned]
    remembered = ExactCover(manifest)
    owner_of = [owner for _, owner in owned].__getitem__
    assert remembered.check(boxes, owner_of) == remembered.check(boxes, owner_of) == tuple(range(len(boxes)))
    lost = data.draw(st.integers(0, len(boxes) - 1))
    if not box_volume(boxes[lost]):
        return
    fewer = boxes[:lost] + boxes[lost + 1 :]
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match="written by nobody"):
            remembered.check(fewer, owner_of)
    assert remembered.check(boxes, owner_of) == tuple(range(len(boxes)))


def test_a_cover_tells_which_boxes_touch_what_is_needed() -> None:
    manifest = Manifest((TensorSpec("a", "int8", (4, 4)), TensorSpec("b", "int8", (4,))))
    rows = [Box(0, (row, 0), (1, 4)) for row in range(4)] + [Box(1, (0,), (4,))]
    cover = ExactCover(manifest, within=[Box(0, (1, 2), (2, 2))])
    assert cover.check(rows, str) == (1, 2)


@given(shapes, st.sampled_from(sorted(DTYPE_BYTES)), st.integers(1, 64), st.data())
def test_a_slice_is_split_with_the_place_of_each_piece(
    shape: tuple[int, ...], dtype: str, piece_bytes: int, data: st.DataObject
) -> None:
    manifest = Manifest((TensorSpec("first", "int8", (3,)), TensorSpec("t", dtype, shape)))
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = Box(1, offsets, tuple(data.draw(st.integers(0, size - o)) for size, o in zip(shape, offsets, strict=True)))
    places = manifest.split(box, piece_bytes)
    assert [place.box for place in places] == split_box(box, DTYPE_BYTES[dtype], piece_bytes)
    assert [place.region for place in places] == [manifest.region(place.box) for place in places]
    numbers = torch.arange(manifest.layout.nbytes)
    item_bytes = DTYPE_BYTES[dtype]
    for place in places:
        starts = numbers[manifest.layout.offsets[1] :][: math.prod(shape) * item_bytes : item_bytes].reshape(shape)
        for dim, (first, size) in enumerate(zip(place.box.offsets, place.box.sizes, strict=True)):
            starts = starts.narrow(dim, first, size)
        bytes_of = [start + i for start in starts.flatten().tolist() for i in range(item_bytes)]
        if place.region is not None:
            (count, row_bytes), stride, start = place.region.sizes, place.region.strides[0], place.region.offset
            assert [start + row * stride + i for row in range(count) for i in range(row_bytes)] == bytes_of
            assert count == 1 or stride > row_bytes
        else:
            rows = [
                at
                for at, before in zip(bytes_of, [None, *bytes_of], strict=False)
                if before is None or at != before + 1
            ]
            assert len({b - a for a, b in itertools.pairwise(rows)}) > 1
    assert [(place.start, place.end - place.start) for place in places] == [
        (start, manifest.box_nbytes(place.box))
        for start, place in zip(
            itertools.accumulate((manifest.box_nbytes(place.box) for place in places), initial=0), places, strict=False
        )
    ]
    assert manifest.split(box, piece_bytes) is places


def test_within_asks_only_for_what_a_worker_needs() -> None:
    manifest = Manifest((TensorSpec("a", "int8", (4, 4)), TensorSpec("b", "int8", (4,))))
    half = Box(0, (0, 0), (2, 4))
    check_exact_cover(manifest, [(half, "r")], within=[half])
    check_exact_cover(manifest, [], within=[])
    with pytest.raises(ManifestMismatch, match=r"a\[0:2, 0:4\] \(8 elements\)"):
        check_exact_cover(manifest, [(Box(0, (2, 0), (2, 4)), "r")], within=[half])


def test_boxes_outside_their_tensor_are_refused() -> None:
    manifest = Manifest((TensorSpec("a", "int8", (4, 4)),))
    for box in (Box(0, (0, 1), (4, 4)), Box(0, (0,), (4,)), Box(0, (0, 0, 0), (4, 4, 1)), Box(1, (), ())):
        with pytest.raises(ManifestMismatch):
            check_exact_cover(manifest, [(box, "r")])
