"""Compares what a rank read back of its live parameters with a checkpoint's tensors. Needs torch, which `reports` does not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.messages import BoxDigest, RankVerify
from inference_plugin.wire.tensors import bytes_view, narrowed

__all__ = ["compare_rank"]


def compare_rank(rank: RankVerify, tensor_named: Callable[[str], torch.Tensor | None]) -> list[str]:
    """Boxes of one rank that differ from the tensors that `tensor_named` gives (whole, by checkpoint name), in words."""
    return [f"rank {rank.rank}: {words}" for box in rank.boxes if (words := _difference(box, tensor_named(box.name)))]


def _difference(box: BoxDigest, tensor: torch.Tensor | None) -> str:
    ranges = ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True))
    where = f"{box.name}[{ranges}]"
    if tensor is None:
        return f"{where} is in the engine and not in the source"
    if str(tensor.dtype).removeprefix("torch.") != box.dtype:
        return f"{where} is {box.dtype} in the engine and {tensor.dtype} in the source"
    if not box.lies_in(tuple(tensor.shape)):
        return f"{where} is in the engine, and the source's tensor has shape {list(tensor.shape)}"
    part = narrowed(tensor, box.offsets, box.sizes)
    if not box.signed_zeros and part.is_floating_point() and part.element_size() > 1:
        part = part + 0
    same = digest_bytes(bytes_view(part.contiguous()).numpy()) == box.digest
    return "" if same else f"{where} differs"
