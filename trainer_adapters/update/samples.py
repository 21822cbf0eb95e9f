"""Finds out whether the weights changed while they were read, by copies of a few of them: digests are those of what was read,
which may be a mixture of two steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import bytes_view, copyable
from trainer_adapters.sources.base import LocalSlice

__all__ = ["Samples"]

SAMPLES, SAMPLE_BYTES = 4, 64 << 10
"""Number of matrices whose beginnings are compared, evenly spread as the first layers may be frozen, and their bytes at most. A
step with a small learning rate changes few bits of bf16 weights, but some among so many; torch copies these in one thread."""


class Samples:
    """Of one pass over `count` slices, whose tensors all hold their values until the end."""

    def __init__(self, manifest: Manifest, count: int) -> None:
        self._manifest = manifest
        self._due = [i * count // SAMPLES for i in range(SAMPLES)]
        self._taken: list[tuple[Box, torch.Tensor, torch.Tensor]] = []

    def watch(self, slices: Iterable[LocalSlice]) -> Iterator[LocalSlice]:
        """The same slices."""
        for position, item in enumerate(slices):
            if self._due and position >= self._due[0] and _is_plain_matrix(item.tensor):
                del self._due[0]
                begins = copyable(_beginning(item.tensor))
                self._taken.append((item.box, begins, begins.clone(memory_format=torch.contiguous_format)))
            yield item

    def check(self) -> None:
        """Raises `ManifestMismatch` if one of them has other bytes than when it was yielded."""
        if changed := [self._manifest.describe(box) for box, now, before in self._taken if not _same(now, before)]:
            raise ManifestMismatch(
                f"the weights changed while they were read: {first_few(changed)}",
                hint="let the optimizer's step wait until update() has returned, or wait_released() of update_async's future",
                side="trainer",
            )


def _is_plain_matrix(tensor: torch.Tensor) -> bool:
    """Statistics of batches, which a forward pass may change, have one dimension."""
    return tensor.dim() > 1 and not (tensor.is_conj() or tensor.is_neg())


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    for dim in range(tensor.dim()):
        if tensor.nbytes > SAMPLE_BYTES:
            row_bytes = tensor.nbytes // tensor.shape[dim]
            tensor = tensor.narrow(dim, 0, max(1, SAMPLE_BYTES // row_bytes))
    return tensor


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    one, other = bytes_view(now.contiguous()), bytes_view(before)  # as bytes: NaN is not equal to itself
    if one.is_cpu:
        return np.array_equal(one.numpy(), other.numpy())  # torch would wake its threads
    return torch.equal(one, other)
