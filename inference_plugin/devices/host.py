"""The host: its memory is written and read by the calling thread, in the order of its calls."""

from __future__ import annotations

import torch

from inference_plugin.devices.base import Device, Mark, Queue
from inference_plugin.wire.host_memory import free_host_bytes

__all__ = ["Host"]


class Host(Device):
    """There is nothing to wait for."""

    type = "cpu"

    def is_in_use(self) -> bool:
        return True

    def current(self) -> int | None:
        return None

    def use(self, index: int | None) -> None:
        pass

    def uuid(self) -> str:
        return ""

    def free_bytes(self, device: torch.device) -> int:
        return free_host_bytes()

    def record(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    def finish(self, mark: Mark) -> None:
        pass

    def synchronise(self) -> None:
        pass

    def drain(self, device: torch.device) -> None:
        pass

    def new_queue(self) -> Queue:
        return None

    def current_queue(self) -> Queue:
        return None

    def enter(self, queue: Queue) -> None:
        pass

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
