"""A second set of weights that trainer ranks write themselves, in a zone: what it has to be, and how it is swapped in."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import Throttle
from inference_plugin.install.plan import Placement
from inference_plugin.install.policies import PolicyInstaller, StandbyInstaller, WayBack
from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.standby import StandbyWeights
from inference_plugin.wire.errors import TransportUnavailable, first_few
from inference_plugin.wire.geometry import Box, bounding_box
from inference_plugin.wire.manifest import DTYPE_BYTES, aligned
from inference_plugin.wire.zone import Place, ZoneLayout, strides_of_box

__all__ = ["ZoneInstaller", "zone_layout"]


class ZoneInstaller(StandbyInstaller):
    """Swaps the storages of a zone in. It keeps no second set: the zone that was swapped out is the transport's."""

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._spans = _spans(agreement)[0]

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        zone = segment.numpy()
        # Each is a torch storage of its own, as the engine's are, over the zone's memory.
        storages = {
            key: torch.from_numpy(zone[span.start : span.end]).view(span.dtype) for key, span in self._spans.items()
        }
        with torch.inference_mode():
            for fill in self._agreement.plan.fills:
                if fill.dest.tensor in storages and fill.dest.tensor in self._layout.written:
                    fill.dest.of(storages[fill.dest.tensor]).fill_(fill.value)
        return storages, []

    def _keep(self, weights: StandbyWeights) -> StandbyWeights:
        return weights


def zone_layout(agreement: Agreement, kind: type[PolicyInstaller]) -> ZoneLayout:
    """What a zone for this agreement has to be. `kind`: the installer of a segment. Raises `TransportUnavailable` where trainer
    ranks can't write all of the second set themselves."""
    layout = agreement.layout
    if kind is not StandbyInstaller:
        raise _refused("the engine has no second set to write: its weights are copied, or loaded by its own loader")
    if layout.rebuilt:
        raise _refused(f"the engine makes something else of {first_few(sorted(layout.rebuilt))}")
    if agreement.plan.repeats:
        raise _refused("several tensors fill one place of the engine")
    if agreement.model.device.type != "cpu":
        raise _refused(f"the weights are on {agreement.model.device}")
    if mixed := _filled_among_weights(agreement):
        raise _refused(f"the engine's loader fills {first_few(mixed)} with constants, and then writes weights there")
    spans, nbytes = _spans(agreement)
    return ZoneLayout(nbytes, tuple(_place(agreement, p, spans[p.dest.tensor].start) for p in layout.plain_placements))


def _place(agreement: Agreement, placement: Placement, storage_at: int) -> Place:
    manifest = agreement.manifest
    name = placement.source.tensor
    index = manifest.index[manifest.tied.get(name, name)]
    found, exact = bounding_box(placement.source, placement.shape)
    if not exact:
        raise _refused(f"the engine takes of {name} what is no box")
    box = Box(index, found.offsets, found.sizes)
    item_bytes = DTYPE_BYTES[manifest.tensors[index].dtype]
    strides = strides_of_box(box, placement.shape, placement.source, placement.dest)
    offset = storage_at + placement.dest.offset * item_bytes
    return Place(box, offset, tuple(stride * item_bytes for stride in strides))


def _filled_among_weights(agreement: Agreement) -> list[str]:
    """Storages where a constant might lie over weights: it is filled in when these are there already."""
    return sorted(
        {
            fill.dest.tensor
            for fill in agreement.plan.fills
            for placement in agreement.layout.plain_placements
            if placement.dest.tensor == fill.dest.tensor
            and placement.dest.offset < fill.dest.end
            and fill.dest.offset < placement.dest.end
        }
    )


class _Span(NamedTuple):
    """The bytes of a zone that are one storage of the model."""

    start: int
    end: int
    dtype: torch.dtype


def _spans(agreement: Agreement) -> tuple[dict[str, _Span], int]:
    """Where each storage that the group writes lies in a zone, by key, and the zone's size in bytes."""
    spans: dict[str, _Span] = {}
    nbytes = 0
    for key, storage in sorted(agreement.layout.own_storages().items()):
        spans[key] = _Span(nbytes, nbytes + storage.nbytes, storage.dtype)
        nbytes += aligned(storage.nbytes)
    return spans, nbytes


def _refused(why: str) -> TransportUnavailable:
    return TransportUnavailable(f"zone: {why}", hint="transport 'shm' brings the bytes in a segment")
