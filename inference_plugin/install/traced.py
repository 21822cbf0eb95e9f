"""Tensors of a traced load: which checkpoint region a tensor is a copy of, and whether a write to it is a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from inference_plugin.install.coverage import Destination
from inference_plugin.install.graph import PLAIN, Boundary, children_of
from inference_plugin.install.storages import named_tensors, storage_id
from inference_plugin.wire.geometry import Region, c_strides

__all__ = [
    "NOTHING", "OWN", "CopiedRegion", "Derived", "Joined", "Refused", "bindings", "check_plain", "destination",
    "floats_among", "names_among", "numbers_under", "outermost_first", "plain_numbers", "reading", "sent_among",
]  # fmt: skip


OWN = "the engine's own "
"""Among the origins of a tensor, stands before the name of a storage of the model."""
NOTHING = OWN + "memory, into which it loaded nothing"
"""Among the origins of a tensor: memory that the loader took, and read before all of it was written."""

_TENSORS = ("_parameters", "_buffers", "_modules")


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


def plain_numbers(model: nn.Module, boundary: Boundary) -> Iterator[tuple[tuple[str, str], tuple[float, ...]]]:
    """The numbers in each attribute of each module, and in the attributes of each of its tensors: `numbers_under`, by module and
    name. What several attributes hold counts for the first one. An unchanged attribute gives an equal tuple, also of numbers that
    are NaN."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name in dict.fromkeys((*vars(module), *module._parameters, *module._buffers)):
            if name in _TENSORS:
                continue
            if numbers := tuple(numbers_under(module, name, boundary, seen)):
                yield (path, name), numbers


def numbers_under(module: nn.Module, name: str, boundary: Boundary, seen: set[int]) -> Iterator[float]:
    """Numbers and truth values of an attribute, or in containers and helpers behind it. No whole numbers of helpers and tensors:
    these often count something. Leaves out the objects in `seen`, and adds to them."""
    registered = {**module._parameters, **module._buffers}.get(name)
    stack = [(vars(module).get(name), True) if registered is None else (vars(registered), False)]
    while stack:
        item, is_own = stack.pop()
        if isinstance(item, float | bool) or (isinstance(item, int) and is_own):
            yield item
        elif not isinstance(item, (Tensor, *PLAIN)) and id(item) not in seen:
            seen.add(id(item))
            is_own = is_own and isinstance(item, (dict, list, tuple))
            stack += [(child, is_own) for _, child in reversed(children_of(item, boundary))]


def floats_among(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Of numbers that a module holds. Whole numbers and truth values may count loads, or say that there was one."""
    return tuple(number for number in numbers if type(number) is float)


def sent_among(origins: frozenset[str]) -> frozenset[str]:
    """Those of the origins that are checkpoint tensors."""
    return frozenset(name for name in origins if not name.startswith(OWN))


def reading(func: Any, origins: frozenset[str]) -> str:
    return f"{func} reads the values of {names_among(origins)}"


def names_among(origins: frozenset[str]) -> str:
    names = sorted(origins)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
