"""Computes the boxes of a tensor that a rank holds, from the mesh and the placements of a DTensor.

A rank's shard of a tensor is, per dimension, a list of index ranges: one for `Shard`, several for a `_StridedShard` without a
`Shard` after it. Every combination of ranges is a box. The computed sizes are checked against the shards' shapes.

Private parts of torch used here: `_StridedShard` and its split factor, and `DeviceMesh._get_root_mesh()`, which older versions
have in `_mesh_resources`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_adapters.sources.plan import Dims, LocalShard
from trainer_adapters.sources.slice_plan import LocalShards

__all__ = ["Mesh", "Spread", "index_ranges", "shards_of"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Index ranges of one dimension, `(start, size)` each, in the order in which the shard holds them."""


@dataclass(frozen=True)
class Mesh:
    """A mesh and placements on it. A source keeps one object for each kind, because queries of a mesh are slow."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, ascending."""
        return tuple(sorted(self.mesh.mesh.flatten().tolist()))

    @cached_property
    def family(self) -> tuple[int, ...]:
        """All ranks of the root mesh, from which this mesh was cut; its own ranks if it is the root."""
        mesh: Any = self.mesh
        older: Any = device_mesh
        known = hasattr(mesh, "_get_root_mesh")
        root = mesh._get_root_mesh() if known else older._mesh_resources.get_root_mesh(mesh)
        return tuple(sorted(root.mesh.flatten().tolist()))

    @cached_property
    def coordinate(self) -> Dims | None:
        """This rank's coordinate in the mesh; None if it isn't in the mesh."""
        found = self.mesh.get_coordinate()
        return None if found is None else tuple(found)

    @cached_property
    def is_sharded(self) -> bool:
        return any(not placement.is_replicate() for placement in self.placements)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """The ranks that hold the same shard as this one, including itself; empty if it isn't in the mesh."""
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
        """Why a tensor with these placements can't be sent; "" if it can."""
        if any(placement.is_partial() for placement in self.placements):
            return f"has placements {self.placements}: sums are pending, redistribute it to Shard or Replicate"
        unknown = [p for p in self.placements if not p.is_replicate() and type(p) not in (Shard, _StridedShard)]
        if unknown:
            return f"has placements {self.placements} with the unknown {unknown[0]}: redistribute it to Shard"
        ranks, sharded = self.mesh.mesh, (d for d, p in enumerate(self.placements) if not p.is_replicate())
        if any(bool((ranks.diff(dim=d) < 0).any()) for d in sharded):
            return (
                f"is sharded over ranks {ranks.tolist()} in this order, in which torch itself mistakes one shard for another: "
                "make the mesh with ascending ranks"
            )
        return ""


@dataclass(frozen=True)
class Spread:
    """The shards that this rank holds of a tensor of one shape on a mesh. `problem`: why they can't be computed."""

    mesh: Mesh
    shards: tuple[LocalShard, ...]
    problem: str = ""

    def local_shards(self) -> LocalShards:
        """The shards, of which each rank that holds the same ones sends a share."""
        copies = self.mesh.copies
        return LocalShards(self.shards, copies, copies.index(dist.get_rank())) if copies else LocalShards(())

    @staticmethod
    def of(mesh: Mesh, shape: Dims, local: Dims) -> Spread:
        """For a shard of shape `local` on this rank."""
        if mesh.coordinate is None:
            return Spread(mesh, ())
        readings = index_ranges(shape, tuple(mesh.mesh.mesh.shape), mesh.coordinate, mesh.placements)
        sizes = [tuple(sum(size for _, size in dim) for dim in reading) for reading in readings]
        if 0 in local and any(0 in size for size in sizes):
            return Spread(mesh, ())  # nothing: of which shape doesn't matter, and `fully_shard` says 0 of 0
        if local not in sizes:
            return Spread(mesh, (), f"holds a shard of shape {list(local)} where {list(sizes[0])} is expected")
        return Spread(mesh, shards_of(readings[sizes.index(local)]))


def index_ranges(
    shape: Dims, mesh_shape: Dims, coordinate: Dims, placements: Sequence[Placement]
) -> list[tuple[Ranges, ...]]:
    """The index ranges, per dimension, of what the rank at `coordinate` holds of a tensor. A pure function.

    Returns one reading of the placements, or two. `fully_shard` over a plan of other dimensions cuts along the plan first, in the
    mesh's order, then along its own dimension, which it writes as `_StridedShard`, with the number of cuts of later dimensions as
    its split factor. torch reads the placements from left to right, which differs for sizes that many ranks divide unevenly,
    and if the plan has a `_StridedShard` of its own. The reading of `fully_shard` comes first, and the shard's shape decides.
    """
    dims = [d for d, p in enumerate(placements) if not p.is_replicate()]
    strided = [d for d in dims if isinstance(placements[d], _StridedShard)]
    later = [d for d in strided if _split_of(placements, d) == _later_cuts(placements, mesh_shape, d)]
    orders = [[*(d for d in dims if d not in later), *reversed(later)], dims] if later else [dims]
    readings = []
    for order in orders:
        ranges: list[Ranges] = [((0, size),) if size else () for size in shape]
        for mesh_dim in order:
            placement: Any = placements[mesh_dim]
            splits = 1 if order is not dims and mesh_dim in later else _split_of(placements, mesh_dim)
            held = ranges[placement.dim]
            pieces = [_chunk(held, splits, i) for i in range(splits)]
            own = [_chunk(piece, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
            ranges[placement.dim] = _joined(itertools.chain.from_iterable(own))
        readings.append(tuple(ranges))
    return readings


def shards_of(ranges: Sequence[Ranges]) -> tuple[LocalShard, ...]:
    """A shard for every combination of the dimensions' ranges, with its place in the rank's memory."""
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
    """The number of pieces into which later mesh dimensions cut the tensor dimension that `mesh_dim` cuts."""
    dim = getattr(placements[mesh_dim], "dim", None)
    cuts = 1
    for size, placement in zip(mesh_shape[mesh_dim + 1 :], placements[mesh_dim + 1 :], strict=True):
        cuts *= size if getattr(placement, "dim", None) == dim else 1
    return cuts


def _chunk(ranges: Ranges, chunks: int, index: int) -> Ranges:
    """`torch.chunk` of the indices in the ranges: the first chunks have one size, the last may be smaller or empty."""
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
