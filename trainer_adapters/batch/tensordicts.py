"""To and from `tensordict`, where it is installed (https://docs.pytorch.org/tensordict)."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from inference_plugin.wire.errors import BatchError, NotFetched
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.status import BatchStatus

__all__ = ["from_tensordict", "to_tensordict"]


def to_tensordict(batch: DistributedBatch) -> Any:
    """A `TensorDict` of batch size `[rows]` over the same memory: tensors as they are, ragged keys as nested tensors, plain
    values as a `NonTensorStack`. Raises `NotFetched`, and `BatchError` if tensordict isn't installed."""
    tensordict = _library()
    if batch.status is not BatchStatus.LOCAL:
        raise NotFetched(f"a batch that is {batch.status.name} has no tensors")
    values = {
        key: value
        if isinstance(value, torch.Tensor)
        else tensordict.NonTensorStack(*(tensordict.NonTensorData(item) for item in value))
        for key, value in batch.items()
    }
    return tensordict.TensorDict(values, batch_size=[len(batch)])


def from_tensordict(tensors: Any) -> DistributedBatch:
    """The LOCAL batch of the rows of a `TensorDict`: its first batch dimension. Keys of a tensordict inside it are joined by
    a dot. Raises `BatchError`."""
    tensordict = _library()
    if not len(tensors.batch_size):
        raise BatchError("a tensordict without batch dimensions has no rows", hint="give it batch_size=[rows]")
    items = tensors.flatten_keys(".").items()
    return DistributedBatch({key: value.tolist() if tensordict.is_non_tensor(value) else value for key, value in items})


def _library() -> Any:
    try:
        return importlib.import_module("tensordict")
    except ImportError as error:
        raise BatchError(f"tensordict can't be imported: {error}", hint="pip install tensordict") from error
