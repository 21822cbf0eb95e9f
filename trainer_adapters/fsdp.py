"""FSDP2 (`fully_shard`): each rank sends the shards that it holds, where they are. Nothing is gathered.

A `Shard(0)` shard is one contiguous range of its checkpoint tensor, a `Shard(1)` shard a strided region of
it; both are boxes. What every rank holds whole (ignored parameters, buffers) is divided between the ranks by
bytes.

From torch's private side: `compute_local_shape_and_global_offset` (checked against the shard it describes)
and `FSDPModule._get_fsdp_state()`, whose groups know whether parameters are sharded just now.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Box, box_volume
from trainer_adapters.module import (
    NOT_SENT,
    Buffers,
    Head,
    Plan,
    Rename,
    Rules,
    ScannedSource,
    cut_box,
    module_stream,
    module_ties,
    why_not_plain,
)
from trainer_adapters.source import share_by_bytes

__all__ = ["FSDPAdapter"]

Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a shard in its tensor."""

FREED_HINT = (
    "call reshard() on the modules named here (the root's covers only parameters of its own), or update "
    "after backward(), which reshards: after a forward pass alone the root stays unsharded"
)


class FSDPAdapter(ScannedSource):
    """A source for a model that `fully_shard` has sharded, over one mesh dimension or, as HSDP, over
    (replicate, shard).

    Every rank of the mesh makes one, and contributes its own shards: views of the parameters' memory, uneven
    and dim-1 shards included, on the CPU where they are offloaded. Of HSDP's copies the first sends.
    Parameters that `fully_shard` ignored and buffers, which each rank holds whole, are divided between the
    ranks by bytes; ranks must agree on them (buffers aren't synchronised by FSDP). Frozen parameters are sent
    like the others.

    `dtype_rules`, `include_buffers`, `rename` and tied weights are as in `ModuleAdapter`. The parameters'
    dtype is that of the shards (the optimizer's), not that of `MixedPrecisionPolicy`: `dtype_rules={"*":
    torch.bfloat16}` sends bf16.

    Raises TypeError for a model without `fully_shard`, and `ManifestMismatch` where parameters are unsharded
    just now, have pending sums (`Partial`), are sharded in more than one dimension of the mesh, or live on
    ranks that differ from one parameter to the next or that this rank isn't among.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype_rules: Rules = None,
        include_buffers: Buffers = "persistent",
        rename: Rename = None,
    ) -> None:
        _refuse_others(model)
        super().__init__(
            module_stream(model, include_buffers),
            ties=lambda: module_ties(model),
            rescan=True,
            twins=True,
            dtype_rules=dtype_rules,
            rename=rename,
        )
        self._model = model
        self._known: dict[tuple[tuple[int, ...], _Layout], Place] = {}
        self._boxed: tuple[Plan, Mapping[int, Box]] | None = None
        self._layouts: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Layout] = {}

    def _scan(self, keep: list[torch.Tensor] | None = None) -> tuple[Head, ...]:
        if unsharded := _unsharded(self._model):
            raise ManifestMismatch(
                f"parameters are unsharded just now in {first_few(unsharded)}",
                hint=FREED_HINT,
                side="trainer",
            )
        with torch.no_grad():
            return super()._scan(keep)

    def _look(self, tensor: torch.Tensor) -> tuple[Hashable, str]:
        if not isinstance(tensor, DTensor):
            return None, why_not_plain(tensor)
        local = _shard(tensor)
        key = tensor.device_mesh, tuple(tensor.placements)
        layout = self._layouts.setdefault(key, _Layout(*key))
        problem = why_not_plain(local) or layout.problem
        if not problem and layout.is_sharded:
            _, sizes = self._place(tuple(tensor.shape), layout)
            if sizes != tuple(local.shape):
                problem = f"holds a shard of shape {list(local.shape)} where {list(sizes)} is expected"
        return layout, problem

    def _check_plan(self, plan: Plan) -> None:
        meshes: dict[tuple[int, ...], str] = {}
        for head, place in zip(plan.heads, plan.places, strict=True):
            if isinstance(head.layout, _Layout) and place != NOT_SENT:
                meshes.setdefault(head.layout.ranks, head.name)
        if len(meshes) > 1:
            uses = [f"{name} on ranks {list(ranks)}" for ranks, name in meshes.items()]
            raise ManifestMismatch(
                f"parameters live on different sets of ranks: {first_few(uses)}",
                hint="FSDP2 with a further parallelism (TP, EP) is what DTensorAdapter is going to serve",
                side="trainer",
            )

    def _boxes(self, plan: Plan) -> Mapping[int, Box]:
        if self._boxed is None or self._boxed[0] is not plan:
            self._boxed = plan, self._boxes_of(plan)
        return self._boxed[1]

    def _boxes_of(self, plan: Plan) -> Mapping[int, Box]:
        boxes: dict[int, Box] = {}
        shared: list[int] = []
        ranks = tuple(range(dist.get_world_size()))
        for head, place in zip(plan.heads, plan.places, strict=True):
            if place == NOT_SENT:
                continue
            if isinstance(head.layout, _Layout):
                ranks = head.layout.ranks
            if not isinstance(head.layout, _Layout) or not head.layout.is_sharded:
                shared.append(place)
            elif head.layout.is_first_copy():
                box = Box(place, *self._place(head.shape, head.layout))
                if box_volume(box):
                    boxes[place] = box
        return boxes | share_by_bytes(plan.manifest, shared, ranks.index(dist.get_rank()), len(ranks))

    def _local(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return cut_box(tensor, box)
        with torch.no_grad():
            local = _shard(tensor)
        return local if tuple(local.shape) == box.sizes else cut_box(local, box)

    def _place(self, shape: tuple[int, ...], layout: _Layout) -> Place:
        """Where this rank's shard lies. Kept: models repeat their shapes, and torch takes its time."""
        key = (shape, layout)
        if key not in self._known:
            sizes, offsets = compute_local_shape_and_global_offset(shape, layout.mesh, layout.placements)
            self._known[key] = tuple(map(int, offsets)), tuple(map(int, sizes))
        return self._known[key]


@dataclass(frozen=True)
class _Layout:
    """How a DTensor lies on its mesh. An adapter keeps one of each kind, since a mesh takes its time to answer."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, ascending."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    @cached_property
    def is_sharded(self) -> bool:
        return any(not placement.is_replicate() for placement in self.placements)

    def is_first_copy(self) -> bool:
        """Whether this rank is the first in each mesh dimension that holds copies."""
        coordinate = self.mesh.get_coordinate() or ()
        return not any(at for at, kind in zip(coordinate, self.placements, strict=True) if kind.is_replicate())

    @cached_property
    def problem(self) -> str:
        """Why a tensor that lies like this can't be sent; "" if it can."""
        if self.mesh.get_coordinate() is None:
            return f"lives on ranks {list(self.ranks)}, and this is rank {dist.get_rank()}"
        if any(placement.is_partial() for placement in self.placements):
            return f"has placements {self.placements}: sums are pending, redistribute it to Shard or Replicate"
        others = [placement for placement in self.placements if type(placement) not in (Shard, Replicate)]
        if others or sum(type(placement) is Shard for placement in self.placements) > 1:
            return (
                f"has placements {self.placements}: FSDPAdapter takes one Shard, beside Replicate; "
                "DTensorAdapter is going to serve FSDP2 with tensor parallelism"
            )
        return ""


def _shard(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of a DTensor: the memory itself. Called without gradients, else torch keeps a record."""
    return tensor.to_local().detach()


def _refuse_others(model: torch.nn.Module) -> None:
    parts = list(model.modules())
    if any(isinstance(part, FullyShardedDataParallel) for part in parts):
        raise TypeError("FSDP1 isn't supported: shard the model with fully_shard")
    if not any(isinstance(part, FSDPModule) for part in parts):
        raise TypeError("fully_shard was applied to no part of this model: use ModuleAdapter")


def _unsharded(model: torch.nn.Module) -> list[str]:
    """Names of the FSDP modules whose parameters are not the shards just now."""
    return [
        name or "the root"
        for name, part in model.named_modules()
        if isinstance(part, FSDPModule)
        and any(parameter.sharded_state.name != "SHARDED" for group in _groups(part) for parameter in group.fsdp_params)
    ]


def _groups(part: FSDPModule) -> list[Any]:
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
