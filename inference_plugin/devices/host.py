"""The host: its memory is written and read by the calling thread, in the order of its calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_plugin.devices.base import Device, Mark, Queue
from inference_plugin.devices.digests import Digests
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.host_memory import free_host_bytes
from inference_plugin.wire.tensors import bytes_view

__all__ = ["Host"]


class HostDigests(Digests):
    """By the xxhash library, at once."""

    def __init__(self) -> None:
        self._found: list[int] = []

    @staticmethod
    def held_bytes(nbytes: int) -> int:
        return 0

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        self._found += [digest_bytes(bytes_view(tensor.contiguous()).numpy()) for tensor in tensors]

    def end(self) -> list[int]:
        return self._found


class Host(Device):
    """Work ends before its call returns, so nothing waits."""

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

    def new_digests(self) -> Digests:
        return HostDigests()

    def why_not_shared(self) -> str | None:
        return "this process computes on the host, whose memory transports zone and shm share"
