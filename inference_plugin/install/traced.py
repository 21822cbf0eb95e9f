"""Tensors of a traced load: which checkpoint region a tensor is a copy of, and whether a write to it is a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_plugin.install.coverage import Destination
from inference_plugin.install.storages import named_tensors, storage_id
from inference_plugin.wire.geometry import Region, c_strides

__all__ = [
    "CopiedRegion", "Derived", "Joined", "Refused", "bindings", "check_plain", "destination", "floats_among", "outermost_first",
    "plain_numbers",
]  # fmt: skip


class CopiedRegion(NamedTuple):
    """Element `i` of a copy laid out with `strides` in its own storage is element `i` of `region`."""

    region: Region
    strides: tuple[int, ...]
    dtype: torch.dtype


class Joined(NamedTuple):
    """A tensor of this shape that the loader concatenated from others along a dimension."""

    shape: torch.Size
    dim: int
    parts: tuple[Tensor, ...]


@dataclass
class Derived:
    """A tensor that the loader made from others. `copied`: set if it is a rearranged copy of a source. `joined`: set if it is a
    concatenation of such copies."""

    origins: frozenset[str]
    how: str
    copied: CopiedRegion | None = None
    joined: Joined | None = None

    def parts_of(self, tensor: Tensor) -> list[tuple[int, int, Tensor]]:
        """If this is a concatenation and `tensor` is all of it: dimension, start and tensor of each part."""
        if self.joined is None or tensor.shape != self.joined.shape or not tensor.is_contiguous():
            return []
        if tensor.nbytes != tensor.untyped_storage().nbytes():
            return []
        found, start = [], 0
        for part in self.joined.parts:
            found.append((self.joined.dim, start, part))
            start += part.shape[self.joined.dim]
        return found


class Refused(Exception):
    """Why a write cannot be a placement."""


def check_plain(target: Tensor, dtype: torch.dtype) -> None:
    """Raises `Refused` unless `target` is an ordinary view that contains each of its elements once."""
    if not target.is_meta:
        raise Refused("the skeleton holds it in real memory, which may be the live model's")
    if target.dtype != dtype or target.is_conj() or target.is_neg():
        raise Refused("written through a view of another dtype, or conjugated or negated")
    reach = 0
    for size, stride in sorted(zip(target.shape, target.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride <= reach:
            raise Refused("written through a view that overlaps itself")
        reach += (size - 1) * stride


def bindings(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (storage_id(t), t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype)
        for name, t, _ in named_tensors(model)
    }


def destination(name: str, tensor: Tensor) -> Destination:
    numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    dims = [d for d in outermost_first(tensor) if tensor.shape[d] > 1]
    shape = tuple(tensor.shape[d] for d in dims)
    dense = tensor.numel() == numel and tuple(tensor.stride(d) for d in dims) == c_strides(shape)
    return Destination(name, tensor.dtype, numel, shape if dense else (numel,))


def outermost_first(tensor: Tensor) -> list[int]:
    strides = tuple(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: -strides[d])


def plain_numbers(model: nn.Module) -> Iterator[tuple[tuple[str, str], tuple[float, ...]]]:
    """Numbers and truth values that modules hold as attributes, or in lists, tuples and dicts that are attributes, each with its
    module and attribute. An unchanged attribute gives an equal tuple, also of numbers that are NaN."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            if numbers := tuple(each for each in held if isinstance(each, int | float)):
                yield (path, name), numbers


def floats_among(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Of numbers that a module holds. Whole numbers and truth values may count loads, or say that there was one."""
    return tuple(number for number in numbers if type(number) is float)
