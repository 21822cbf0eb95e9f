"""Which boxes of a tensor a rank holds, from the mesh and the placements of a DTensor.

A rank's shard of a tensor is, per dimension, a list of index ranges: one for `Shard`, several for a `_StridedShard` that
stands alone. Every combination of ranges is a box. Offsets are computed here and checked against the shards' shapes.

From torch's private side: `_StridedShard` and its split factor, and `DeviceMesh._get_root_mesh()`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_adapters.sources.plan import Dims, LocalShard
from trainer_adapters.sources.scan import LocalShards

__all__ = ["Mesh", "Spread", "index_ranges", "shards_of"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Index ranges of one dimension, `(start, size)` each, in the order in which the shard holds them."""


@dataclass(frozen=True)
class Mesh:
    """A mesh and placements on it. A source keeps one of each kind, since asking a mesh is slow."""

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
    """A tensor of one shape on a mesh: the shards that this rank holds; `problem` is why they can't be told."""

    mesh: Mesh
    shards: tuple[LocalShard, ...]
    problem: str = ""

    def local_shards(self) -> LocalShards:
        """Of these ranks, each sends a share of what they all hold."""
        copies = self.mesh.copies
        return LocalShards(self.shards, copies, copies.index(dist.get_rank())) if copies else LocalShards(())

    @staticmethod
    def of(mesh: Mesh, shape: Dims, local: Dims) -> Spread:
        """For a shard of shape `local` on this rank."""
        if mesh.coordinate is None:
            return Spread(mesh, ())
        readings = index_ranges(shape, tuple(mesh.mesh.mesh.shape), mesh.coordinate, mesh.placements)
        sizes = [tuple(sum(size for _, size in dim) for dim in reading) for reading in readings]
        if local not in sizes:
            return Spread(mesh, (), f"holds a shard of shape {list(local)} where {list(sizes[0])} is expected")
        return Spread(mesh, shards_of(readings[sizes.index(local)]))


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


def shards_of(ranges: Sequence[Ranges]) -> tuple[LocalShard, ...]:
    """Every combination of the dimensions' ranges, and where it lies in the rank's memory."""
    placed = []
    for dim in ranges:
        starts = itertools.accumulate((size for _, size in dim), initial=0)
        placed.append([(start, size, at) for (start, size), at in zip(dim, starts, strict=False)])
    return tuple(
        LocalShard(tuple(c[0] for c in combination), tuple(c[1] for c in combination), tuple(c[2] for c in combination))
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
