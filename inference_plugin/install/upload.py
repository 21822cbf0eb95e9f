"""Copies many tensors from the host's memory into a device's in a few large transfers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference_plugin.devices import Device, Mark
from inference_plugin.wire.manifest import aligned

__all__ = ["LARGE_BYTES", "Upload"]

LARGE_BYTES = 256 << 10
"""From this size on, a separate copy costs no more than packing."""


class Upload:
    """Copies large page-locked tensors from where they lie. Packs all others into page-locked memory, in two buffers in turn, and
    unpacks them on the device.

    A device reads page-locked memory at full speed, while this thread packs the next batch.

    `most_bytes`: the largest batch, as the sum of `room` over its tensors. The caller waits for the device before it reports the
    bytes as copied, and before it changes page-locked sources.
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
        """Queues the copies of one batch: `targets` on the device, `sources` on the host."""
        packed = []
        for target, source in zip(targets, sources, strict=True):
            if self._is_read_directly(target, source):
                self._device.copy(target, source)
            else:
                packed.append((target, source))
        if packed:
            self._copy_packed(packed)

    def _is_read_directly(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        return (
            source.nbytes >= LARGE_BYTES
            and source.dtype == target.dtype
            and source.is_contiguous()
            and target.is_contiguous()
            and self._device.is_page_locked(source)
        )

    def _copy_packed(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        packed = self._packed[turn]
        if (read := self._read[turn]) is not None:
            self._device.finish(read)
        parts, start = [], 0
        for _, source in pairs:
            here, there = (
                memory.narrow(0, start, source.nbytes).view(source.dtype).view(source.shape)
                for memory in (packed, self._arrived)
            )
            here.copy_(source)
            parts.append(there)
            start += self.room(source)
        self._device.copy(self._arrived.narrow(0, 0, start), packed.narrow(0, 0, start))
        self._read[turn] = self._device.record()
        torch._foreach_copy_([target for target, _ in pairs], parts)
