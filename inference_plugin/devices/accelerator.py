"""Accelerators, through torch's module of their type (`torch.cuda`, `torch_npu.npu`, ...): their queues are its streams, their
marks its events (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams)."""

from __future__ import annotations

from typing import Any

import torch

from inference_plugin.devices.base import Device, Mark, Queue

__all__ = ["Accelerator"]


class Accelerator(Device):
    """All accelerators of one type."""

    def __init__(self, kind: str) -> None:
        self.type = kind

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def is_in_use(self) -> bool:
        return bool(self._module.is_initialized())

    def current(self) -> int | None:
        index: int = self._module.current_device()
        return index

    def use(self, index: int | None) -> None:
        if index is not None:
            self._module.set_device(index)

    def uuid(self) -> str:
        return str(getattr(self._module.get_device_properties(self.current()), "uuid", ""))

    def free_bytes(self, device: torch.device) -> int:
        return int(self._module.mem_get_info(device)[0])

    def record(self) -> Mark:
        mark = self._module.Event(blocking=True)  # a thread that waits for it sleeps
        mark.record()
        return mark

    def wait(self, mark: Mark) -> None:
        self._module.current_stream().wait_event(mark)

    def finish(self, mark: Mark) -> None:
        mark.synchronize()

    def synchronise(self) -> None:
        self.finish(self.record())

    def drain(self, device: torch.device) -> None:
        self._module.synchronize(device)

    def new_queue(self) -> Queue:
        return self._module.Stream()

    def current_queue(self) -> Queue:
        return self._module.current_stream()

    def enter(self, queue: Queue) -> None:
        self._module.set_device(queue.device)
        self._module.set_stream(queue)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.type, self.current() or 0))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
