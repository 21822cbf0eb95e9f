"""Finds boxes of a manifest that no rank reads: an engine would ignore these bytes silently."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box, box_volume, subtract
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import GroupOpened

__all__ = ["check_needs", "passed_over", "unread"]

INDICES = ("int32", "int64")


def unread(manifest: Manifest, boxes: Iterable[Box], *, partial: bool) -> list[str]:
    """Names the parts of the manifest that lie in none of `boxes`: a tensor's name, or its first unread range.

    For a whole model, leaves out tensors of indices or sizes (`g_idx`, for example) that no box touches: engines pass over those
    that they don't need, and refuse a manifest that leaves a parameter unfilled. For a `partial` group nobody knows what the
    engine needs, so these tensors count too.
    """
    by_tensor: dict[int, set[Box]] = {}
    for box in boxes:
        by_tensor.setdefault(box.tensor, set()).add(box)
    found = []
    for i, spec in enumerate(manifest.tensors):
        whole = manifest.whole(i)
        if not partial and spec.dtype in INDICES and i not in by_tensor:
            continue
        taken = by_tensor.get(i, set())
        if whole not in taken and box_volume(whole) and (left := subtract([whole], sorted(taken))):
            found.append(spec.name if left == [whole] else manifest.describe(left[0]))
    return found


def passed_over(manifest: Manifest, opened: Sequence[GroupOpened]) -> tuple[str, ...]:
    """Names of the tensors that all ranks of a replica pass over; a single rank also passes over those of other ranks."""
    common = set(opened[0].passed_over).intersection(*(each.passed_over for each in opened))
    return tuple(spec.name for i, spec in enumerate(manifest.tensors) if i in common)


def check_needs(manifest: Manifest, opened: Sequence[GroupOpened], *, partial: bool) -> None:
    """Raises `ManifestMismatch` unless every byte of the manifest is read by some rank of a replica, or belongs to a tensor that
    the engine passes over."""
    needs = itertools.chain.from_iterable(each.needs for each in opened)
    known = set(passed_over(manifest, opened))
    if missing := [name for name in unread(manifest, needs, partial=partial) if name not in known]:
        raise ManifestMismatch(
            f"the engine's model has no place for: {first_few(missing)}",
            hint="a name, a shape or a tie differs between trainer and engine; exclude what the engine doesn't load",
            phase="open",
        )
