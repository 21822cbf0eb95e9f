"""`fully_shard` over plans that cut the same dimension: cases of `test_dtensor_adapter.py` on eight ranks (`observing.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.trainers.observing import Result, observe, run_cases
from trainer_adapters import DTensorAdapter


def numbers(rows: int) -> torch.Tensor:
    return torch.arange(rows * 6.0).view(rows, 6)


def holding(weight: torch.Tensor) -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


def over_two_cuts(rows: int) -> Result:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    model = holding(distribute_tensor(numbers(rows), mesh["ep", "tp"], [Shard(0), Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    return observe(DTensorAdapter(model), {"weight": numbers(rows)})


def fsdp_over_two_cuts() -> Result:
    return over_two_cuts(16)


def fsdp_over_two_uneven_cuts() -> Result:
    return over_two_cuts(19)


def fsdp_between_two_cuts() -> Result:
    """All dimensions in one mesh, that of data parallelism between the plan's."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ep", "dp", "tp"))
    model = holding(distribute_tensor(numbers(16), mesh, [Shard(0), Replicate(), Shard(0)]))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    gathered = model.weight.full_tensor()  # torch reads these placements rightly, too
    return observe(DTensorAdapter(model), {"weight": gathered} if gathered.equal(numbers(16)) else {})


def packed(rows: int, parts: int) -> Result:
    """A fused projection: each rank of tensor parallelism has a share of each of its parts."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    shares = [part.chunk(2)[mesh["tp"].get_local_rank()] for part in numbers(rows).chunk(parts)]
    placements = [_StridedShard(0, split_factor=parts)]
    model = holding(DTensor.from_local(torch.cat(shares), mesh["tp"], placements, run_check=False))
    fully_shard(model, mesh=mesh["dp"])
    return observe(DTensorAdapter(model), {"weight": numbers(rows)})


def fsdp_over_packed_gate_and_up() -> Result:
    return packed(16, 2)


def fsdp_over_packed_query_key_and_value() -> Result:
    return packed(24, 3)


def fsdp_over_fewer_columns_than_ranks() -> Result:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    whole = numbers(5)[:, :3].contiguous()
    model = holding(distribute_tensor(whole, mesh["tp"], [Shard(1)]))
    fully_shard(model, mesh=mesh["dp"])
    return observe(DTensorAdapter(model), {"weight": whole})


if __name__ == "__main__":
    cases = [
        fsdp_over_fewer_columns_than_ranks,
        fsdp_over_two_cuts,
        fsdp_over_two_uneven_cuts,
        fsdp_between_two_cuts,
        fsdp_over_packed_gate_and_up,
        fsdp_over_packed_query_key_and_value,
    ]
    run_cases(cases, Path(sys.argv[1]))
