"""What several workers returned, as one result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inference_plugin.wire.errors import BatchError
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.limits import checked_list

__all__ = ["merge"]


def merge(results: Sequence[Any]) -> Any:
    """What several workers returned, as one result, in the order of the workers. A worker that returned None is left out.

    - batches: `DistributedBatch.concat`; tensors: joined in dimension 0 (those of no dimension stacked);
    - dicts of the same keys: merged key by key; tuples of the same length: item by item; lists: one after the other;
    - anything else: a list with each worker's; None only: None.

    Raises `BatchError` where workers returned different things.
    """
    return _merged(checked_list("results", results, "what each worker returned"), "the results")


def _merged(results: list[Any], where: str) -> Any:
    found = [result for result in results if result is not None]
    if not found:
        return None
    for kind in (DistributedBatch, torch.Tensor, dict, list, tuple):
        if any(isinstance(item, kind) for item in found):
            if all(isinstance(item, kind) for item in found):
                break
            names = sorted({type(item).__name__ for item in found})
            raise BatchError(f"{where} of the workers differ in type: {', '.join(names)}")
    else:
        return found
    if kind is DistributedBatch:
        return DistributedBatch.concat(found)
    if kind is torch.Tensor:
        return _joined_tensors(found, where)
    if kind is list:
        return [item for items in found for item in items]
    if kind is tuple:
        if len(lengths := {len(items) for items in found}) > 1:
            raise BatchError(f"{where} of the workers are tuples of different lengths: {sorted(lengths)}")
        items = [_merged(list(column), f"{where}[{n}]") for n, column in enumerate(zip(*found, strict=True))]
        return type(found[0])(*items) if hasattr(found[0], "_fields") else tuple(items)
    if len(keys := {frozenset(item) for item in found}) > 1:
        odd = sorted(map(str, frozenset.union(*keys) - frozenset.intersection(*keys)))
        raise BatchError(f"{where} of the workers differ in keys: only some have {', '.join(odd)}")
    return {key: _merged([item[key] for item in found], f"{where}[{key!r}]") for key in found[0]}


def _joined_tensors(tensors: list[torch.Tensor], where: str) -> torch.Tensor:
    try:
        if all(tensor.dim() == 0 for tensor in tensors):
            return torch.stack(tensors)
        if any(tensor.is_nested for tensor in tensors):
            joined: torch.Tensor = DistributedBatch.concat([DistributedBatch({"rows": t}) for t in tensors])["rows"]
            return joined
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise BatchError(f"dtypes {sorted(str(tensor.dtype) for tensor in tensors)}")
        return torch.cat(tensors)
    except (RuntimeError, BatchError) as error:
        raise BatchError(f"{where}: the tensors of the workers don't join: {error}") from None
