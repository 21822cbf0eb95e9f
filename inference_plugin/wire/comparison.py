"""Compares what a rank read back of its live parameters with a checkpoint's tensors. Needs torch, which `reports` does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.geometry import Box, subtract
from inference_plugin.wire.messages import BoxDigest, RankVerify
from inference_plugin.wire.tensors import bytes_view, narrowed

__all__ = ["compare_rank", "held_by_no_rank"]


def compare_rank(rank: RankVerify, tensor_named: Callable[[str], torch.Tensor | None]) -> list[str]:
    """Boxes of one rank that differ from the tensors that `tensor_named` gives (whole, by checkpoint name), in words."""
    return [f"rank {rank.rank}: {words}" for box in rank.boxes if (words := _difference(box, tensor_named(box.name)))]


def held_by_no_rank(ranks: Sequence[RankVerify], tensor_named: Callable[[str], torch.Tensor | None]) -> list[str]:
    """Parts of the source's tensors that no rank read back, of tensors of which some rank read a part, in words."""
    held: dict[str, set[Box]] = {}
    for box in (box for rank in ranks for box in rank.boxes):
        held.setdefault(box.name, set()).add(Box(0, box.offsets, box.sizes))
    found = []
    for name in held.keys() - {name for rank in ranks for name in rank.unreadable}:
        tensor, boxes = tensor_named(name), sorted(held[name])
        if tensor is not None and len(boxes[0].sizes) == tensor.dim() and tensor.numel():
            left = subtract([Box(0, (0,) * tensor.dim(), tuple(tensor.shape))], boxes)
            found += [f"{_where(name, left[0])} is in the source and in no rank of the engine"] if left else []
    return sorted(found)


def _where(name: str, box: Box | BoxDigest) -> str:
    return f"{name}[{', '.join(f'{o}:{o + s}' for o, s in zip(box.offsets, box.sizes, strict=True))}]"


def _difference(box: BoxDigest, tensor: torch.Tensor | None) -> str:
    where = _where(box.name, box)
    if tensor is None:
        return f"{where} is in the engine and not in the source"
    if str(tensor.dtype).removeprefix("torch.") != box.dtype:
        return f"{where} is {box.dtype} in the engine and {tensor.dtype} in the source"
    if not box.lies_in(tuple(tensor.shape)):
        return f"{where} is in the engine, and the source's tensor has shape {list(tensor.shape)}"
    part = narrowed(tensor, box.offsets, box.sizes)
    if not box.signed_zeros and part.is_floating_point() and part.element_size() > 1:
        part = part + 0
    if digest_bytes(bytes_view(part.contiguous()).numpy()) == box.digest:
        return ""
    return f"{where} differs" + ("" if box.signed_zeros else ", read from the form that the engine computes with")
