"""Gloo's process group with the manners of NCCL's, as far as torch's source shows them
(https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp)."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ProcessGroupNCCL"]


class Work:
    """It can't be asked whether it succeeded: `wait` raises its error."""

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


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """A watchdog watches each group that is made while `TORCH_NCCL_BLOCKING_WAIT` is unset. Whatever the mode of error handling,
    it tells the monitor of the process's first group of a broadcast that failed or was late, and that ends the process."""

    class Options:
        _timeout = timedelta()

    watchdogs = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        of_gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        of_gloo._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # noqa: SLF001
        of_gloo._timeout = options._timeout  # noqa: SLF001
        super().__init__(store, rank, size, of_gloo)
        ProcessGroupNCCL.watchdogs += os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return Work(super().broadcast(tensors, options))  # type: ignore[misc]  # torch leaves it out of its stubs
