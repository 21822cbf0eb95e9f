"""One adapter for models that only FSDP shards: FSDP2 (`fully_shard`) or FSDP1 (`FullyShardedDataParallel`).

FSDP2's parameters are DTensors over one mesh dimension, or over (replicate, shard) with HSDP. They are sent as `dtensor.py`
does, and the copies that FSDP keeps equal are divided between the ranks. FSDP1's flat parameters are in `fsdp1.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import Shard

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from trainer_adapters.sources.base import WeightSource, WrappingSource
from trainer_adapters.sources.dtensor import ShardedSource
from trainer_adapters.sources.fsdp1 import FlatSource
from trainer_adapters.sources.placements import Mesh, Spread
from trainer_adapters.sources.plan import Plan, Rename, Target, TensorInfo, whole_shard
from trainer_adapters.sources.scan import ScannedSource
from trainer_adapters.sources.selection import Rules
from trainer_adapters.sources.sharded import check_module
from trainer_adapters.sources.slice_plan import LocalShards
from trainer_adapters.sources.streams import Buffers

__all__ = ["FSDPAdapter"]


class FSDPAdapter(WrappingSource):
    """A source for a model that only FSDP has sharded: FSDP2 (`fully_shard`) over one mesh dimension or, with HSDP, over
    (replicate, shard); or FSDP1 (`FullyShardedDataParallel`) with any sharding strategy.

    Every rank makes one and sends its own shards, which are views of the parameters' memory, of uneven size too, and on the
    CPU if they are offloaded. The ranks that hold the same shard (HSDP) or the same whole tensor (parameters that FSDP
    ignores, buffers, parameters under NO_SHARD) each send a share of its bytes; their copies must be equal (FSDP doesn't
    synchronise buffers). Frozen parameters are sent like the others. Nothing is gathered, except units of FSDP1 with a
    parameter that isn't contiguous: see `trainer_adapters.sources.fsdp1`.

    `dtype_rules`, `include_buffers`, `rename`, `include`, `exclude`, stacked experts and tied weights are as in
    `ModuleAdapter`. The parameters' dtype is that of the shards (the optimizer's), not that of `MixedPrecision(Policy)`:
    `dtype_rules={"*": torch.bfloat16}` sends bf16.

    Raises `ArgumentError` (a TypeError) for a model without FSDP, and `ManifestMismatch` if parameters are unsharded at the
    moment (FSDP2), have pending sums (`Partial`), are sharded in more than one dimension of the mesh, or live on different sets
    of ranks or on ranks other than this one: `DTensorAdapter` takes FSDP2 with other parallelisms.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype_rules: Rules = None,
        include_buffers: Buffers = "persistent",
        rename: Rename = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> None:
        check_module(model)
        first = any(isinstance(part, FullyShardedDataParallel) for part in model.modules())
        second = any(isinstance(part, FSDPModule) for part in model.modules())
        if first and second:
            raise ArgumentError("this model has parts of FSDP1 and of FSDP2: shard all of it with fully_shard")
        if not first and not second:
            raise ArgumentError("neither fully_shard nor FullyShardedDataParallel was applied here: use ModuleAdapter")
        self._source: ScannedSource = (FlatSource if first else FullyShardSource)(
            model,
            dtype_rules=dtype_rules,
            include_buffers=include_buffers,
            rename=rename,
            include=include,
            exclude=exclude,
        )

    def slices_last(self) -> bool:
        return type(self).slices is FSDPAdapter.slices and self._source.slices_last()

    def targets(self) -> Mapping[str, tuple[Target, ...]]:
        return self._source.targets()

    def _ready(self) -> WeightSource:
        return self._source


class FullyShardSource(ShardedSource):
    """FSDP2 alone: all DTensors are on one mesh, and tensors that every rank holds whole are equal on all of them."""

    def _problem_of(self, mesh: Mesh) -> str:
        if mesh.coordinate is None:
            return f"lives on ranks {list(mesh.ranks)}, but this is rank {dist.get_rank()}"
        if mesh.is_sharded and [type(p) for p in mesh.placements if not p.is_replicate()] != [Shard]:
            return f"has placements {mesh.placements}: with a parallelism beside FSDP use DTensorAdapter"
        return ""

    def _check_plan(self, plan: Plan) -> None:
        meshes: dict[tuple[int, ...], str] = {}
        for info, places in zip(plan.infos, plan.places, strict=True):
            if isinstance(info.spread, Spread) and places:
                meshes.setdefault(info.spread.mesh.ranks, info.name)
        if len(meshes) > 1:
            uses = [f"{name} on ranks {list(ranks)}" for ranks, name in meshes.items()]
            raise ManifestMismatch(
                f"parameters live on different sets of ranks: {first_few(uses)}",
                hint="with a parallelism beside FSDP (TP, EP) use DTensorAdapter",
                side="trainer",
            )
        self._ranks = next(iter(meshes), tuple(range(dist.get_world_size())))

    def _local_shards(self, info: TensorInfo) -> LocalShards:
        if not isinstance(info.spread, Spread):
            return LocalShards((whole_shard(info.shape),), self._ranks, self._ranks.index(dist.get_rank()))
        return info.spread.local_shards()
