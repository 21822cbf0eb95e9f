"""Makes digests of a live model's values, in the checkpoint's coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from inference_plugin.devices import device_of
from inference_plugin.install.layout import LiveLayout
from inference_plugin.install.plan import Placement
from inference_plugin.install.replay import read_back
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import BoxDigest
from inference_plugin.wire.tensors import dtype_name

__all__ = ["box_digest", "live_digests"]


def live_digests(
    manifest: Manifest, layout: LiveLayout, unreadable: Mapping[str, str]
) -> Iterator[BoxDigest | tuple[str, str]]:
    """Engine's thread: a digest for each box of the live parameters, or (tensor, why it can't be read)."""
    yield from unreadable.items()
    plain = layout.plain_placements
    yield from _digests(manifest, plain, layout.live_storages(), exact=True)
    unpacking = layout.unpacking()
    computed = layout.read_computed(unpacking)
    yield from _digests(manifest, [p for p in plain if p.dest.tensor in computed], computed, exact=False)
    for name in layout.rebuilt:
        storages, why = layout.read_rebuilt(name, unpacking)
        placements = layout.rebuilt_placements[name]
        for source, key in dict.fromkeys((p.source.tensor, p.dest.tensor) for p in placements if p.dest.tensor in why):
            yield manifest.sent_name(source), why[key]
        yield from _digests(manifest, [p for p in placements if p.dest.tensor in storages], storages, exact=False)


def _digests(
    manifest: Manifest, placements: Sequence[Placement], storages: Mapping[str, torch.Tensor], *, exact: bool
) -> Iterator[BoxDigest]:
    for source, box, tensor in read_back(placements, storages):
        yield box_digest(manifest.sent_name(source), box.offsets, tensor, exact=exact)


def box_digest(name: str, offsets: tuple[int, ...], tensor: torch.Tensor, *, exact: bool) -> BoxDigest:
    """The digest of a box's values. Not `exact`: they were read through a form that keeps no sign of zero, so +0.0 is added."""
    with_signs = exact or not tensor.is_floating_point() or tensor.element_size() == 1
    data = tensor if with_signs else tensor + 0
    return BoxDigest(
        name=name,
        offsets=offsets,
        sizes=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        digest=device_of(data.device).digests([data])[0],
        signed_zeros=exact,
    )
