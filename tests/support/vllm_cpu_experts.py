"""What vLLM on CPU lacks for experts that data-parallel ranks share, and what tests want to know of such ranks.

`CpuCommunicator` chooses the manager that dispatches tokens by gathering and scattering parts of unequal sizes, and has neither
of these operations: they are made of those of gloo. vLLM 0.33 gives each rank a NUMA node of its own, of which there may be one.

`WEIGHTWIRE_TEST_STEPS` names a directory. There each rank notes, in a file of its number, what its live weights were before and
after every step, also of those with an empty batch that it takes for the sake of the other ranks: one line of JSON each.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_dp_group
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

__all__ = ["fill_in"]


def fill_in(weights_seen: Callable[[Any], list[float]]) -> None:
    """`weights_seen`: what to note of a worker's weights."""
    if CpuCommunicator.all_gatherv is all_gatherv:
        return
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    nodes = cpu_worker.get_visible_memory_node
    cpu_worker.get_visible_memory_node = lambda *_: nodes()
    if not (directory := os.environ.get("WEIGHTWIRE_TEST_STEPS")):
        return
    empty, full = Worker.execute_dummy_batch, WorkerWrapperBase.execute_model

    def noted(worker: Any, step: Callable[[], Any]) -> Any:
        before = weights_seen(worker)
        result = step()
        with (Path(directory) / str(get_dp_group().rank_in_group)).open("a") as notes:
            notes.write(json.dumps([before, weights_seen(worker)]) + "\n")
        return result

    @functools.wraps(empty)
    def execute_dummy_batch(self: Any) -> Any:
        return noted(self, lambda: empty(self))

    @functools.wraps(full)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            return full(self, scheduler_output)  # tells the worker of requests that ended
        return noted(self.worker, lambda: full(self, scheduler_output))

    Worker.execute_dummy_batch, WorkerWrapperBase.execute_model = execute_dummy_batch, execute_model


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
