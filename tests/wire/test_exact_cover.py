"""Whether pieces cover a tensor exactly: right for any boxes, and at a cost that follows their number."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.wire.cover import check_exact_cover
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec

SHAPE = (3, 2, 4)
MANIFEST = Manifest((TensorSpec("a", "uint8", SHAPE),))


@st.composite
def any_boxes(draw: st.DrawFn) -> list[Box]:
    """Boxes that lie anyhow, or a tiling with some taken away, doubled or added."""
    ranges = [[(low, high - low) for low, high in itertools.combinations(range(size + 1), 2)] for size in SHAPE]
    anyhow = st.tuples(*(st.sampled_from(each) for each in ranges)).map(
        lambda spans: Box(0, tuple(low for low, _ in spans), tuple(size for _, size in spans))
    )
    tiles = [Box(0, at, (1, 1, 1)) for at in itertools.product(*map(range, SHAPE))]
    return draw(st.permutations(tiles).flatmap(lambda order: st.sampled_from([order, order[1:], [*order, order[0]]]))
                | st.lists(anyhow, max_size=4))  # fmt: skip


@given(any_boxes())
def test_boxes_are_an_exact_cover_if_every_element_is_in_one_of_them(boxes: list[Box]) -> None:
    counts = torch.zeros(SHAPE, dtype=torch.int32)
    for box in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    owned = [(box, "x") for box in boxes]
    if bool((counts == 1).all()):
        check_exact_cover(MANIFEST, owned)
    else:
        word = "more than once" if bool((counts > 1).any()) else "by nobody"
        with pytest.raises(ManifestMismatch, match=word):
            check_exact_cover(MANIFEST, owned)


@pytest.mark.parametrize("doubled", [False, True])
def test_many_boxes_of_one_row_are_no_reason_to_stand_still(doubled: bool) -> None:
    """A worker checks a list under its lock, and a peer says how long it is: pairs of 20 000 boxes would take an hour."""
    manifest = Manifest((TensorSpec("a", "uint8", (1, 20_000)),))
    boxes = [(Box(0, (0, i), (1, 1)), "x") for i in range(20_000)]
    if doubled:
        with pytest.raises(ManifestMismatch, match="written more than once"):
            check_exact_cover(manifest, [*boxes, boxes[7]])
    else:
        check_exact_cover(manifest, boxes)
