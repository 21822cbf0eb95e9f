"""The trainer's side that all engines' own ways share: gathering whole tensors, buckets, a gloo group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 64 << 20


def metas_of(model: Any) -> list[tuple[str, str, list[int]]]:
    """Name, dtype and shape of every parameter."""
    return [(name, str(p.dtype).removeprefix("torch."), list(p.shape)) for name, p in model.named_parameters()]


def gathered(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, whole, on every rank. Collective."""
    for name, p in model.named_parameters():
        with torch.no_grad():
            yield name, (p.full_tensor() if isinstance(p, DTensor) else p.detach()).contiguous()


def gathered_buckets(model: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The same, bucket by bucket."""
    tensors = gathered(model)
    for bucket in buckets(metas_of(model)):
        yield [next(tensors) for _ in bucket]


def flat(bucket: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """A bucket's tensors as one, uint8."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])


def buckets(
    metas: list[tuple[str, str, list[int]]],
) -> Iterator[list[tuple[str, torch.dtype, list[int], int]]]:
    """Names in order, cut into buckets of about `BUCKET_BYTES`: (name, dtype, shape, bytes)."""
    bucket: list[tuple[str, torch.dtype, list[int], int]] = []
    used = 0
    for name, dtype_name, shape in metas:
        dtype = getattr(torch, dtype_name)
        nbytes = math.prod(shape) * dtype.itemsize
        if bucket and used + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, dtype, shape, nbytes))
        used += nbytes
    yield bucket


def save(model: Any, path: str) -> None:
    """Gathers to rank 0 and writes safetensors. Collective."""
    from safetensors.torch import save_file

    state = {name: tensor.clone() for name, tensor in gathered(model) if dist.get_rank() == 0}
    if dist.get_rank() == 0:
        save_file(state, str(Path(path) / "model.safetensors"), metadata={"format": "pt"})


def group(store: Any, rank: int, size: int) -> Any:
    """A gloo group of its own between trainer rank 0 (rank 0 here) and all workers."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=120))


def broadcast(gloo: Any, tensor: torch.Tensor) -> None:
    """From rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    gloo.broadcast([tensor], options).wait()
