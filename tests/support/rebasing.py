"""Placements for sources of which only parts are there: shows that what a plan says it needs is enough for a replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from inference_plugin.install.plan import Placement
from inference_plugin.wire.geometry import Box, in_box

__all__ = ["rebase"]


def rebase(placements: Iterable[Placement], boxes: Mapping[str, Box]) -> tuple[Placement, ...]:
    """The same placements for sources of which only `boxes` are there, each C-contiguous by itself."""
    return tuple(
        replace(p, source=in_box(p.source, p.shape, box), shape=box.sizes)
        for p in placements
        for box in [boxes[p.source.tensor]]
    )
