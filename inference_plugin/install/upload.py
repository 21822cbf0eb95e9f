"""Copies of many tensors from the host's memory into a device's, as few large ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_plugin.devices import Device, Mark
from inference_plugin.wire.manifest import aligned

__all__ = ["Upload"]


class Upload:
    """Packs tensors into page-locked memory, in two buffers in turn, and spreads them out on the device.

    A device reads page-locked memory at full speed, and does so while this thread packs the next batch. Packing works for every
    segment; page-locking in place does not, as a segment may be mapped read-only.

    `most_bytes`: of a batch, each of its tensors counted with `room`. The caller waits for the device before it says that the
    bytes are there.
    """

    def __init__(self, device: Device, most_bytes: int) -> None:
        self._device = device
        self._packed = [device.host_memory(most_bytes) for _ in range(2)]
        self._arrived = device.memory(most_bytes)
        self._read: list[Mark | None] = [None, None]
        self._turn = 0

    @staticmethod
    def room(tensor: torch.Tensor) -> int:
        """Bytes that a tensor takes in a batch."""
        return aligned(tensor.nbytes)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queues the copies of one batch: `targets` of the device, `sources` of the host, which may change once this returns."""
        turn, self._turn = self._turn, 1 - self._turn
        packed = self._packed[turn]
        if (read := self._read[turn]) is not None:
            self._device.finish(read)
        parts, start = [], 0
        for source in sources:
            here, there = (
                memory.narrow(0, start, source.nbytes).view(source.dtype).view(source.shape)
                for memory in (packed, self._arrived)
            )
            here.copy_(source)
            parts.append(there)
            start += self.room(source)
        self._device.copy(self._arrived.narrow(0, 0, start), packed.narrow(0, 0, start))
        self._read[turn] = self._device.record()
        torch._foreach_copy_(list(targets), parts)
