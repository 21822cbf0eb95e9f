"""What vLLM on CPU lacks for experts that data-parallel ranks share: gathering and scattering parts of unequal sizes.

`CpuCommunicator` chooses the manager that dispatches tokens by these two operations, and has neither of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

__all__ = ["fill_in"]


def fill_in() -> None:
    """Gives `CpuCommunicator` both operations, over gloo."""
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    rows = sizes or [input_.shape[0]] * self.world_size
    mine = input_.new_zeros((max(rows), *input_.shape[1:]))
    mine[: input_.shape[0]] = input_
    parts = [torch.empty_like(mine) for _ in rows]
    dist.all_gather(parts, mine, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    rows = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    first = sum(rows[: self.rank_in_group])
    return total[first : first + rows[self.rank_in_group]].clone()
