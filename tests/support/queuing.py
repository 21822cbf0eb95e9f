"""A process group of gloo's that is used as NCCL's: its works do what a `WorkNCCL` does, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["QueuingGroup"]


class Work:
    """https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed

    def wait(self) -> bool:
        waited: bool = self._work.wait()
        return waited

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")


class QueuingGroup(dist.ProcessGroupGloo):
    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return Work(super().broadcast(tensors, options))  # type: ignore[misc]  # torch leaves it out of its stubs
