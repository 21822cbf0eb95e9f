"""DTensors: each rank sends the shards that it holds, where they are, whatever the meshes and placements. No gathering.

A rank's shard of a tensor is, per dimension, a list of index ranges: one for `Shard`, several for a `_StridedShard` that
stands alone. Every combination of ranges is a box. Offsets are computed here and checked against the shards' shapes.

From torch's private side: `_StridedShard` and its split factor, a DTensor's `_spec` and `_local_tensor` (`to_local()` adds a
record for autograd to each), `DeviceMesh._get_root_mesh()`, and
`FSDPModule._get_fsdp_state()`, whose groups know whether parameters are sharded just now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.experts import checkpoint_layout
from trainer_adapters.module import Buffers, module_stream, module_ties
from trainer_adapters.plan import Dims, Head, Part, Rename, Rules, whole_part
from trainer_adapters.scan import Holding, Look, ScannedSource, memory_of, why_not_plain

__all__ = ["DTensorAdapter", "Mesh", "ShardedSource", "Spread", "boxes_of", "index_ranges"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Index ranges of one dimension, `(start, size)` each, in the order in which the shard holds them."""

FREED_HINT = (
    "call reshard() on the modules named here (the root's covers only parameters of its own), or update "
    "after backward(), which reshards: after a forward pass alone the root stays unsharded"
)


class ShardedSource(ScannedSource):
    """What the sources of DTensors share: looking at them, and the boxes that this rank's shards are."""

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
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            raise TypeError("parts of this model are sharded by FullyShardedDataParallel: use FSDPAdapter")
        super().__init__(
            module_stream(model, include_buffers),
            ties=lambda: module_ties(model),
            layout=lambda: checkpoint_layout(model),
            rescan=True,
            twins=True,
            dtype_rules=dtype_rules,
            rename=rename,
            include=include,
            exclude=exclude,
        )
        self._model = model
        self._meshes: dict[tuple[DeviceMesh, tuple[Placement, ...]], Mesh] = {}
        self._spreads: dict[tuple[Mesh, Dims, Dims], Spread] = {}
        self._known: dict[int, tuple[Any, Dims, Dims, Any, str]] = {}

    def _scan(self, keep: list[Any] | None = None) -> tuple[Head, ...]:
        heads = super()._scan(keep)
        if len(self._known) > 2 * len(heads):  # of parameters that are gone
            self._known.clear()
        # What was planned lay in shards: only another model may be one that doesn't just now.
        if (self._plan is None or heads != self._plan.heads) and (unsharded := _unsharded(self._model)):
            raise ManifestMismatch(
                f"parameters are unsharded just now in {first_few(unsharded)}", hint=FREED_HINT, side="trainer"
            )
        return heads

    def _look(self, thing: Any) -> Look:
        if not isinstance(thing, DTensor):
            return super()._look(thing)
        local = thing._local_tensor
        spec = thing._spec
        known = self._known.get(id(spec))
        if known is None or known[0] is not spec or known[1] != local.shape:
            known = self._known[id(spec)] = (spec, local.shape, *self._spread_of(thing, local))
        _, _, shape, layout, problem = known
        if not problem and layout.mesh.coordinate is not None:
            problem = why_not_plain(local)
        return Look(shape, thing.dtype, layout, problem, None if problem else memory_of(thing))

    def _spread_of(self, thing: DTensor, local: torch.Tensor) -> tuple[Dims, Any, str]:
        """Its shape, how it lies on its mesh, and why it can't be sent."""
        key = thing.device_mesh, tuple(thing.placements)
        mesh = self._meshes.setdefault(key, Mesh(*key))
        shape = tuple(thing.shape)
        if problem := mesh.problem or self._problem_of(mesh):
            return shape, mesh, problem
        spread = self._spread(mesh, shape, tuple(local.shape))
        return shape, spread, spread.problem

    def _local(self, thing: Any) -> torch.Tensor:
        if not isinstance(thing, DTensor):
            return super()._local(thing)
        return thing._local_tensor.detach()

    def _problem_of(self, mesh: Mesh) -> str:
        """Why this source sends no tensor that lies so; "" if it does."""
        return ""

    def _spread(self, mesh: Mesh, shape: Dims, local: Dims) -> Spread:
        """Kept: models repeat their shapes."""
        key = (mesh, shape, local)
        if key not in self._spreads:
            self._spreads[key] = Spread.of(*key)
        return self._spreads[key]


class DTensorAdapter(ShardedSource):
    """A source for a model of DTensors: tensor-parallel plans, `fully_shard` over them, expert-parallel meshes.

    Every rank makes one, and contributes its own shards: views of the parameters' memory. Meshes and placements may
    differ from one parameter to the next; `_StridedShard` and uneven shards are fine. Copies that a mesh describes
    (`Replicate`) are divided between their ranks by bytes.

    Copies that no mesh describes may have come apart in training: parameters on the data-parallel submesh only, and plain
    tensors, are held by each tensor-parallel rank, and nothing sums the gradients that each sees. The copy of the lowest
    rank is sent. The others' digests are compared with it in updates 1, 2, 4, 8, ... and in `verify`; a difference is
    warned about.

    `process_group`: the trainer's ranks, as for `SyncManager`; default all of torch.distributed. The rest is as in
    `ModuleAdapter`, the parameters' dtype as in `FSDPAdapter`.

    Raises TypeError for a model that FSDP1 wraps, and `ManifestMismatch`, which names them, for parameters with pending
    sums (`Partial`), of a kind of placement that isn't known, or unsharded just now.
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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            dtype_rules=dtype_rules,
            include_buffers=include_buffers,
            rename=rename,
            include=include,
            exclude=exclude,
        )
        self._ranks = tuple(sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD)))

    def _holding(self, head: Head) -> Holding:
        if not isinstance(head.layout, Spread):
            role: Any = "send" if dist.get_rank() == self._ranks[0] else "copy"
            return Holding((whole_part(head.shape),), role=role)
        mesh = head.layout.mesh
        # Meshes that are cut from one hold a copy each; of these the one with the lowest rank sends.
        if min(set(mesh.family) & set(self._ranks), default=-1) in mesh.ranks:
            return head.layout.holding()
        return Holding(head.layout.parts if mesh.is_first_copy else (), role="copy")


@dataclass(frozen=True)
class Mesh:
    """A mesh and placements on it. A source keeps one of each kind, since a mesh takes its time to answer."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, ascending."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    @cached_property
    def family(self) -> tuple[int, ...]:
        """All ranks of the mesh that this one was cut from; its own if it wasn't."""
        root = self.mesh._get_root_mesh() if hasattr(self.mesh, "_get_root_mesh") else self.mesh
        return tuple(sorted(root.mesh.flatten().tolist()))

    @cached_property
    def coordinate(self) -> Dims | None:
        """This rank's place in the mesh; None if it has none."""
        found = self.mesh.get_coordinate()
        return None if found is None else tuple(found)

    @cached_property
    def is_sharded(self) -> bool:
        return any(not placement.is_replicate() for placement in self.placements)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """The ranks that hold what this one holds, itself among them; none if it isn't in the mesh."""
        if self.coordinate is None:
            return ()
        pairs = zip(self.coordinate, self.placements, strict=True)
        index = tuple(slice(None) if placement.is_replicate() else at for at, placement in pairs)
        return tuple(sorted(self.mesh.mesh[index].flatten().tolist()))

    @cached_property
    def is_first_copy(self) -> bool:
        return dist.get_rank() in self.copies[:1]

    @cached_property
    def problem(self) -> str:
        """Why a tensor that lies like this can't be sent; "" if it can."""
        if any(placement.is_partial() for placement in self.placements):
            return f"has placements {self.placements}: sums are pending, redistribute it to Shard or Replicate"
        unknown = [p for p in self.placements if not p.is_replicate() and type(p) not in (Shard, _StridedShard)]
        if unknown:
            return f"has placements {self.placements}, of which {unknown[0]} isn't known: redistribute it to Shard"
        return ""


@dataclass(frozen=True)
class Spread:
    """A tensor of one shape on a mesh: the parts that this rank holds; `problem` is why they can't be told."""

    mesh: Mesh
    parts: tuple[Part, ...]
    problem: str = ""

    def holding(self) -> Holding:
        """Of these ranks, each sends a share of what they all hold."""
        copies = self.mesh.copies
        return Holding(self.parts, copies, copies.index(dist.get_rank())) if copies else Holding(())

    @staticmethod
    def of(mesh: Mesh, shape: Dims, local: Dims) -> Spread:
        """For a shard of shape `local` on this rank."""
        if mesh.coordinate is None:
            return Spread(mesh, ())
        readings = index_ranges(shape, tuple(mesh.mesh.mesh.shape), mesh.coordinate, mesh.placements)
        sizes = [tuple(sum(size for _, size in dim) for dim in reading) for reading in readings]
        if local not in sizes:
            return Spread(mesh, (), f"holds a shard of shape {list(local)} where {list(sizes[0])} is expected")
        return Spread(mesh, boxes_of(readings[sizes.index(local)]))


def index_ranges(
    shape: Dims, mesh_shape: Dims, coordinate: Dims, placements: Sequence[Placement]
) -> list[tuple[Ranges, ...]]:
    """What the rank at `coordinate` holds of a tensor: per dimension its index ranges. A pure function.

    One reading of the placements, or two: `fully_shard` over a tensor-parallel plan cuts along the plan first, then its
    own dimension, and writes that down as `(_StridedShard(sf), Shard)`. Torch reads this from left to right. The two agree
    but for sizes that many ranks divide unevenly; then what `fully_shard` does comes first, and shards tell by their shape.
    """
    dims = [d for d, p in enumerate(placements) if not p.is_replicate()]
    strided = [d for d in dims if isinstance(placements[d], _StridedShard)]
    orders = [dims]
    if strided and all(_split_of(placements, d) == _later_cuts(placements, mesh_shape, d) for d in strided):
        orders = [dims[::-1], dims]
    readings = []
    for order in orders:
        ranges: list[Ranges] = [((0, size),) if size else () for size in shape]
        for mesh_dim in order:
            placement: Any = placements[mesh_dim]
            splits = _split_of(placements, mesh_dim) if order is dims else 1
            held = ranges[placement.dim]
            pieces = [_chunk(held, splits, i) for i in range(splits)]
            own = [_chunk(piece, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
            ranges[placement.dim] = _joined(itertools.chain.from_iterable(own))
        readings.append(tuple(ranges))
    return readings


def boxes_of(ranges: Sequence[Ranges]) -> tuple[Part, ...]:
    """Every combination of the dimensions' ranges, and where it lies in the shard."""
    placed = []
    for dim in ranges:
        starts = itertools.accumulate((size for _, size in dim), initial=0)
        placed.append([(start, size, at) for (start, size), at in zip(dim, starts, strict=False)])
    return tuple(
        Part(tuple(c[0] for c in combination), tuple(c[1] for c in combination), tuple(c[2] for c in combination))
        for combination in itertools.product(*placed)
    )


def _split_of(placements: Sequence[Placement], mesh_dim: int) -> int:
    return int(getattr(placements[mesh_dim], "split_factor", 1))


def _later_cuts(placements: Sequence[Placement], mesh_shape: Dims, mesh_dim: int) -> int:
    """Into how many pieces later mesh dimensions cut the tensor's dimension that this one cuts."""
    dim = getattr(placements[mesh_dim], "dim", None)
    cuts = 1
    for size, placement in zip(mesh_shape[mesh_dim + 1 :], placements[mesh_dim + 1 :], strict=True):
        cuts *= size if getattr(placement, "dim", None) == dim else 1
    return cuts


def _chunk(ranges: Ranges, chunks: int, index: int) -> Ranges:
    """`torch.chunk` of what the ranges list: the first chunks are of one size, the last may be smaller or empty."""
    total = sum(size for _, size in ranges)
    size = -(-total // chunks)
    low, high = size * index, size * (index + 1)
    cut = []
    at = 0
    for start, length in ranges:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            cut.append((start + first - at, last - first))
        at += length
    return tuple(cut)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for start, size in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((start, size))
    return tuple(joined)


def _unsharded(model: torch.nn.Module) -> list[str]:
    """Names of the FSDP2 modules whose parameters are not the shards just now."""
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
