"""Which boxes of a manifest nobody reads: an engine would ignore these bytes silently."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box, box_volume, intersect
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import GroupOpened

__all__ = ["check_needs", "passed_over", "unread"]

INDICES = ("int32", "int64")


def unread(manifest: Manifest, boxes: Iterable[Box], *, partial: bool) -> list[str]:
    """Names the parts of the manifest that lie in none of `boxes`: a tensor's name, or the first range of it.

    Of a whole model, a tensor of indices or sizes (`g_idx`, say) that no box touches is left out: engines pass over those that
    tell them nothing, and refuse a manifest that leaves a parameter unfilled. Of a `partial` group nobody knows what it lacks.
    """
    by_tensor: dict[int, set[Box]] = {}
    for box in boxes:
        by_tensor.setdefault(box.tensor, set()).add(box)
    found = []
    for i, spec in enumerate(manifest.tensors):
        whole = manifest.whole(i)
        if not partial and spec.dtype in INDICES and i not in by_tensor:
            continue
        if box_volume(whole) and (left := _subtract([whole], sorted(by_tensor.get(i, ())))):
            found.append(spec.name if left == [whole] else manifest.describe(left[0]))
    return found


def passed_over(manifest: Manifest, opened: Sequence[GroupOpened]) -> tuple[str, ...]:
    """Names of what all ranks of a replica pass over: each of them passes over what belongs to others, too."""
    common = set(opened[0].passed_over).intersection(*(each.passed_over for each in opened))
    return tuple(spec.name for i, spec in enumerate(manifest.tensors) if i in common)


def check_needs(manifest: Manifest, opened: Sequence[GroupOpened], *, partial: bool) -> None:
    """Raises `ManifestMismatch` unless some rank of a replica reads every byte of the manifest, apart from the tensors that the
    engine is known to pass over."""
    needs = itertools.chain.from_iterable(each.needs for each in opened)
    known = set(passed_over(manifest, opened))
    if missing := [name for name in unread(manifest, needs, partial=partial) if name not in known]:
        raise ManifestMismatch(
            f"the engine's model has no place for: {first_few(missing)}",
            hint="a name, a shape or a tie differs between trainer and engine; exclude what the engine doesn't load",
            phase="open",
        )


def _subtract(boxes: list[Box], taken: Sequence[Box]) -> list[Box]:
    """What is left of `boxes` without `taken`."""
    for hole in taken:
        boxes = [part for box in boxes for part in _cut_out(box, hole)]
    return boxes


def _cut_out(box: Box, hole: Box) -> list[Box]:
    shared = intersect(box, hole)
    if shared is None:
        return [box]
    parts = []
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        start, end = offsets[dim], offsets[dim] + sizes[dim]
        inner_start, inner_end = shared.offsets[dim], shared.offsets[dim] + shared.sizes[dim]
        for low, high in ((start, inner_start), (inner_end, end)):
            if low < high:
                parts.append(
                    Box(
                        box.tensor,
                        (*offsets[:dim], low, *offsets[dim + 1 :]),
                        (*sizes[:dim], high - low, *sizes[dim + 1 :]),
                    )
                )
        offsets[dim], sizes[dim] = inner_start, inner_end - inner_start
    return parts
