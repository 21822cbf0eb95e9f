"""A second set of weights that trainer ranks write themselves, in a zone: its layout, and its installation."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import Throttle
from inference_plugin.install.plan import Placement, in_place
from inference_plugin.install.policies import (
    CopyInstaller,
    PolicyInstaller,
    StandbyInstaller,
    Tensors,
    WayBack,
)
from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.staged import StagedInstaller
from inference_plugin.install.standby import StandbyWeights
from inference_plugin.wire.errors import TransportUnavailable, first_few
from inference_plugin.wire.manifest import DTYPE_BYTES, aligned
from inference_plugin.wire.zone import Place, ZoneLayout, strides_of_box

__all__ = ["ZoneCopyInstaller", "ZoneInstaller", "zone_installer", "zone_layout"]


class ZoneInstaller(StandbyInstaller):
    """Swaps the storages of a zone in. It keeps no second set: the zone that was swapped out is the transport's. It keeps the
    views of that zone only, which serve again once the zone takes the next update.

    Parameters that the engine transforms lie in the zone as the engine's loader would leave them. They are copied into memory of
    their own, module by module, and rebuilt there: post-processing may write over its inputs.
    """

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._spans = _spans(agreement)[0]
        self._is_in_zone = False
        """Whether the live weights lie in a zone of these terms."""

    @property
    def holds_second_set(self) -> bool:
        return self._is_in_zone

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        spare, self._spare = self._spare, None
        if spare is not None and self._layout.is_whole(spare) and self._lies_in(segment, spare):
            if self._agreement.plan.fills:
                self._fill_constants(spare.storages)
            self._prepared = spare
        else:
            super().prepare(segment, throttle)
        return sum(span.end - span.start for span in self._spans.values()) + self._layout.rebuilt_nbytes

    def _lies_in(self, segment: torch.Tensor, weights: StandbyWeights) -> bool:
        base = segment.data_ptr()
        return all(
            data.data_ptr() - data.storage_offset() * data.itemsize == base + self._spans[live.key].start
            for live, data in zip(weights.tensors, weights.data, strict=True)
        )

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        # Each is a torch storage of its own, as the engine's are, over the zone's memory.
        memory, base = segment.untyped_storage(), segment.storage_offset()
        storages = {
            key: torch.empty(0, dtype=span.dtype, device=segment.device).set_(
                memory[base + span.start : base + span.end]
            )
            for key, span in self._spans.items()
        }
        loaded = {key: storages.pop(key) for key in self._layout.rebuilding}
        self._fill_constants(storages)
        self._check_fits(self._layout.rebuilt_nbytes)
        return storages, self._make_beforehand(loaded, storages, throttle)

    def _reading(self, placements: list[Placement]) -> list[Placement]:
        return in_place(placements)

    def finish(self) -> None:
        super().finish()
        self._is_in_zone = True

    def _put_back(self, previous: torch.Tensor | None) -> None:
        super()._put_back(previous)
        self._spare = None  # of a zone that is never used again

    def _keep(self, weights: StandbyWeights) -> StandbyWeights:
        if not self._is_in_zone or self._layout.rebuilt:
            return weights
        return super()._keep(weights)

    def discard(self) -> None:
        self._prepared = self._spare = None

    def forget_segments(self) -> None:
        self._spare, self._is_in_zone = None, False


class ZoneCopyInstaller(CopyInstaller):
    """`copy` from a zone in the device's memory, where addresses of parameters must stay. The way back is the zone of the version
    before."""

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._spans = _spans(agreement)[0]

    @property
    def holds_second_set(self) -> bool:
        return True

    def _sources(self, segment: torch.Tensor) -> Tensors:
        return {
            key: segment.narrow(0, span.start, span.end - span.start).view(span.dtype)
            for key, span in self._spans.items()
        }

    def _reading(self, placements: list[Placement]) -> list[Placement]:
        return in_place(placements)

    def discard(self) -> None:
        self.forget_segments()  # a zone that was dropped is freed once nothing views it


def zone_installer(kind: type[PolicyInstaller]) -> type[PolicyInstaller]:
    """The installer of a zone where `kind` would install a segment."""
    return ZoneCopyInstaller if kind is StagedInstaller else ZoneInstaller


def zone_layout(agreement: Agreement, kind: type[PolicyInstaller]) -> ZoneLayout:
    """The zone that this agreement needs. `kind`: the installer of a segment. Raises `TransportUnavailable` if trainer ranks
    can't write all of the second set themselves."""
    layout = agreement.layout
    if kind not in (StandbyInstaller, StagedInstaller):
        raise _refused("the engine has no second set to write: its weights are copied, or loaded by its own loader")
    if why := _why_rebuilt_needs_a_segment(agreement):
        raise _refused(f"the engine makes something else of {first_few(sorted(layout.rebuilt))}, {why}")
    if agreement.plan.repeats:
        raise _refused("several tensors fill one place of the engine")
    if mixed := _filled_among_weights(agreement):
        raise _refused(f"the engine's loader fills {first_few(mixed)} with constants, and then writes weights there")
    spans, nbytes = _spans(agreement)
    # Several modules may be rebuilt from one storage.
    placements = dict.fromkeys(chain(layout.plain_placements, *layout.rebuilt_placements.values()))
    return ZoneLayout(nbytes, tuple(_place(agreement, p, spans[p.dest.tensor].start) for p in placements))


def _why_rebuilt_needs_a_segment(agreement: Agreement) -> str:
    """Why rebuilt modules, if there are any, are better made from a segment; "" if a zone will do.

    Both zones keep the tensors that modules were rebuilt from; a segment exists once. So a zone holds less memory as long as most
    bytes are plain.
    """
    layout = agreement.layout
    if layout.reducing:
        return "and some of it together with the other ranks, at the commit"
    if not layout.rebuilding:
        return ""
    if agreement.model.device.type != "cpu":
        return f"and computes on {agreement.model.device}"
    plain = sum(storage.nbytes for storage in layout.own_storages().values())
    rebuilding = sum(storage.nbytes for storage in layout.rebuilding.values())
    return "which is most of the model" if rebuilding > plain else ""


def _place(agreement: Agreement, placement: Placement, storage_at: int) -> Place:
    if (box := agreement.box_read(placement)) is None:
        raise _refused(f"the part of {placement.source.tensor} that the engine takes is no box")
    item_bytes = DTYPE_BYTES[agreement.manifest.tensors[box.tensor].dtype]
    strides = strides_of_box(box, placement.shape, placement.source, placement.dest)
    offset = storage_at + placement.dest.offset * item_bytes
    return Place(box, offset, tuple(stride * item_bytes for stride in strides))


def _filled_among_weights(agreement: Agreement) -> list[str]:
    """Storages where a constant might lie over weights: it is filled in when these are there already."""
    placed: dict[str, list[Placement]] = {fill.dest.tensor: [] for fill in agreement.plan.fills}
    for placement in agreement.layout.plain_placements:
        if placement.dest.tensor in placed:
            placed[placement.dest.tensor].append(placement)
    return sorted(
        {
            fill.dest.tensor
            for fill in agreement.plan.fills
            for placement in placed[fill.dest.tensor]
            if placement.dest.offset < fill.dest.end and fill.dest.offset < placement.dest.end
        }
    )


class _Span(NamedTuple):
    """The bytes of a zone that are one storage of the model, as a load leaves it."""

    start: int
    end: int
    dtype: torch.dtype


def _spans(agreement: Agreement) -> tuple[dict[str, _Span], int]:
    """Where each storage that the group writes, or rebuilds modules from, lies in a zone, by key; and the size of the zone."""
    spans: dict[str, _Span] = {}
    nbytes = 0
    storages = agreement.layout.own_storages() | agreement.layout.rebuilding
    for key, storage in sorted(storages.items()):
        spans[key] = _Span(nbytes, nbytes + storage.nbytes, storage.dtype)
        nbytes += aligned(storage.nbytes)
    return spans, nbytes


def _refused(why: str) -> TransportUnavailable:
    return TransportUnavailable(f"zone: {why}", hint="transport 'shm' brings the bytes in a segment")
