"""A manifest that an engine's model can take, as the installers read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from inference_plugin.install.contract import EngineModel
from inference_plugin.install.layout import LiveLayout
from inference_plugin.install.parts import Part
from inference_plugin.install.plan import Placement, PlacementPlan, grouped
from inference_plugin.install.storages import equal_bytes
from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box, Region, bounding_box, hull
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import box_view, torch_dtype

__all__ = ["Agreement"]


@dataclass(frozen=True)
class Agreement:
    """A manifest that an engine's model can take, and how it takes it.

    - `partial`: the manifest holds only a part of the model.
    - `ties`: as `live_ties` returns them.
    - `why_loader`: why the engine's own loader has to install; "" if the plan was proven.
    - `parts`: the parts that the loader fills one by one; empty if it has to load everything at once.
    - `passed_over`: as in `contract.InstallTerms`.
    - `ignored`: names of the tensors from which the engine's loader takes nothing.
    - `aliases`: second names under which the loader is given tied tensors, each with the name that travels.
    - `unfilled`: parameters that neither the manifest nor the engine's own checkpoint fills.
    - `expert_places`: as in `contract.EngineModel`, at the time when the plan was traced.
    """

    model: EngineModel
    manifest: Manifest
    partial: bool
    plan: PlacementPlan
    layout: LiveLayout
    ties: Mapping[str, str]
    why_loader: str
    parts: tuple[Part, ...]
    passed_over: tuple[int, ...]
    ignored: frozenset[str]
    aliases: Mapping[str, str]
    unfilled: tuple[str, ...]
    expert_places: str

    @cached_property
    def needs(self) -> tuple[Box, ...]:
        """The boxes that the installer reads, at most one per tensor, in the manifest's order."""
        if self.why_loader and not self.parts:
            taken = {
                self.manifest.sent_name(name)
                for name in (*self.manifest.index, *self.manifest.tied)
                if name not in self.ignored
            }
            return tuple(self.manifest.whole(i) for i, spec in enumerate(self.manifest.tensors) if spec.name in taken)
        boxes: dict[int, Box] = {}
        for name, needed in self.plan.needs().items():
            index = self.manifest.index[self.manifest.sent_name(name)]
            box = Box(index, needed.offsets, needed.sizes)
            boxes[index] = hull(boxes[index], box) if index in boxes else box
        for name in {name for part in self.parts for name in part.sources}:
            index = self.manifest.index[self.manifest.sent_name(name)]
            boxes[index] = self.manifest.whole(index)
        return tuple(boxes[i] for i in sorted(boxes))

    @cached_property
    def unreadable(self) -> Mapping[str, str]:
        """Tensors of the manifest that can't be read back from the live model, and why."""
        computed = "the engine's loader computes with it"
        if self.plan.refusal is not None:
            return {spec.name: computed for spec in self.manifest.tensors}
        sent_name = self.manifest.sent_name
        found = {sent_name(name): computed for names in self.plan.refused_sources.values() for name in names}
        return found | {
            sent_name(other.source.tensor): f"its place in the engine is that of {kept.source.tensor} too"
            for other, kept in self.plan.repeats
        }

    def check_repeats(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Raises `ManifestMismatch` if tensors that fill one place of the engine differ: the order of the load would decide which
        of them stays there. Sizes (int64 tensors such as `weight_shape`) may differ, because nothing computes with them."""
        wrong = [
            f"{other.source.tensor} and {kept.source.tensor}"
            for other, kept in self.plan.repeats
            if other.dtype != torch.int64
            and not equal_bytes(
                other.source.of(sources[other.source.tensor]), kept.source.of(sources[kept.source.tensor])
            )
        ]
        if wrong:
            raise ManifestMismatch(
                f"tensors that the engine keeps in one place differ: {first_few(wrong)}",
                hint="let the quantiser use one scale for all parts of a fused layer",
                phase="seal",
            )

    def box_read(self, placement: Placement) -> Box | None:
        """The box of the manifest that a placement reads; None if that is no box."""
        found, exact = bounding_box(placement.source, placement.shape)
        index = self.manifest.index[self.manifest.sent_name(placement.source.tensor)]
        return Box(index, found.offsets, found.sizes) if exact else None

    def in_segment(self, placements: Iterable[Placement]) -> list[Placement]:
        """The placements as they read a segment of this manifest. The sources are regions of the whole segment, as elements of
        the dtype whose name they have; see `segment_views`. Raises ValueError if one doesn't lie in its tensor."""
        layout, found = self.manifest.layout, []
        for placement in placements:
            name, region = placement.source.tensor, placement.source
            index = self.manifest.index[self.aliases.get(name, name)]
            spec, item_bytes = self.manifest.tensors[index], placement.dtype.itemsize
            if torch_dtype(spec.dtype) != placement.dtype or region.offset < 0 or region.end * item_bytes > spec.nbytes:
                raise ValueError(f"source {name} is {spec.dtype} {list(spec.shape)}; the plan has {placement}")
            offset = layout.offsets[index] // item_bytes + region.offset
            source = Region(str(placement.dtype), offset, region.sizes, region.strides)
            found.append(Placement(source, placement.dest, placement.dtype, placement.shape))
        return found

    def tensors_in(self, segment: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a segment of this manifest, under every name that the loader takes, in the order of the agreement."""
        manifest = self.manifest
        sources = {spec.name: box_view(segment, manifest, manifest.whole(i)) for i, spec in enumerate(manifest.tensors)}
        sources |= {alias: sources[name] for alias, name in self.aliases.items()}
        return {name: sources[name] for name in self._names}

    @cached_property
    def _names(self) -> list[str]:
        return grouped([*(spec.name for spec in self.manifest.tensors), *self.aliases])

    def segment_views(self, segment: torch.Tensor) -> dict[str, torch.Tensor]:
        """A segment as elements of each dtype in the manifest, by the dtype's name in torch: the sources of `in_segment`."""
        dtypes = {torch_dtype(spec.dtype) for spec in self.manifest.tensors}
        return {
            str(dtype): segment.narrow(0, 0, segment.numel() // dtype.itemsize * dtype.itemsize).view(dtype)
            for dtype in dtypes
        }
