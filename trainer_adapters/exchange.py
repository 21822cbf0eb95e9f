"""What each rank has to say, told to all: bytes of any length, by two collectives and without pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["exchange_bytes", "exchange_tensors"]


def exchange_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's `data`, in order of rank. Collective over `group` (None: the default group)."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return [one.cpu().numpy().tobytes() for one in exchange_tensors(mine, group)]


def exchange_tensors(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The same for 1-D tensors of uint8, which may differ in length."""
    device = mine.device
    if not mine.is_cuda and dist.get_backend(group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one.item()) for one in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine.to(device)
    everybody = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everybody, padded, group=group)
    return [one[:size] for one, size in zip(everybody, sizes, strict=True)]
