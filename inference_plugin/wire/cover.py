"""Whether boxes cover a manifest exactly: nothing left out, nothing written twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box, box_volume, intersect, tile
from inference_plugin.wire.manifest import Manifest

__all__ = ["ExactCover", "check_exact_cover"]

MAX_DOUBLES = 1000
"""A check stops after this many boxes that were written twice."""

MOST_COMPARED = 200_000
"""Limit on the pairs of boxes compared for an error's text, which need not list every mistake."""


class ExactCover:
    """`check_exact_cover` for lists of boxes that repeat with every update: only a new list is checked.

    For one thread at a time.
    """

    def __init__(self, manifest: Manifest, within: Sequence[Box] | None = None) -> None:
        self._manifest = manifest
        self._within = within
        self._passed: tuple[Box, ...] | None = None
        self._touching: tuple[int, ...] = ()

    def check(self, boxes: Sequence[Box], owner_of: Callable[[int], str]) -> tuple[int, ...]:
        """Positions of the boxes that intersect what must be covered. `owner_of(position)` names a box's owner in errors.

        Raises `ManifestMismatch` as `check_exact_cover` does.
        """
        boxes = tuple(boxes)
        if boxes != self._passed:
            self._passed = None
            owned = [(box, owner_of(position)) for position, box in enumerate(boxes)]
            check_exact_cover(self._manifest, owned, within=self._within)
            wanted = {box.tensor: box for box in self._within} if self._within is not None else None
            self._touching = tuple(
                position
                for position, box in enumerate(boxes)
                if wanted is None or (box.tensor in wanted and intersect(box, wanted[box.tensor]) is not None)
            )
            self._passed = boxes
        return self._touching


def check_exact_cover(
    manifest: Manifest, boxes: Sequence[tuple[Box, str]], *, within: Sequence[Box] | None = None
) -> None:
    """Checks that `boxes`, each with its owner's name, cover the manifest exactly: no orphan, no double.

    `within`, one box per tensor at most, restricts what must be covered. Raises `ManifestMismatch` naming the first
    orphans and doubles and their counts. The cost follows the number of boxes, however they lie.
    """
    by_tensor: dict[int, list[tuple[Box, str]]] = {}
    for box, owner in boxes:
        manifest.check_box(box)
        if box_volume(box):
            by_tensor.setdefault(box.tensor, []).append((box, owner))
    wanted = [manifest.whole(i) for i in range(len(manifest.tensors))] if within is None else within
    doubles: list[str] = []
    orphans: list[str] = []
    for whole in wanted:
        held = by_tensor.get(whole.tensor, [])
        inside = [part for box, _ in held if (part := intersect(box, whole)) is not None]
        if not tile(whole, inside):
            doubled = _doubles(manifest, held)
            doubles += doubled
            if not doubled and (missing := box_volume(whole) - sum(map(box_volume, inside))) > 0:
                orphans.append(f"{manifest.describe(whole)} ({missing} elements)")
            elif not doubled:
                doubles.append(manifest.describe(whole))
        if len(doubles) >= MAX_DOUBLES:  # a list that is wrong throughout has as many as pairs
            break
    if doubles:
        raise ManifestMismatch(f"written more than once: {first_few(doubles)}")
    if orphans:
        raise ManifestMismatch(f"written by nobody: {first_few(orphans)}")


def _doubles(manifest: Manifest, held: Sequence[tuple[Box, str]]) -> list[str]:
    """The intersections of boxes of one tensor, in words."""
    found = []
    held = sorted(held, key=lambda entry: entry[0])
    pairs = ((one, other) for i, one in enumerate(held) for other in held[i + 1 :])
    for (box, owner), (other, other_owner) in itertools.islice(pairs, MOST_COMPARED):
        if (shared := intersect(box, other)) is not None:
            found.append(f"{manifest.describe(shared)} by {owner} and {other_owner}")
    return found
