"""Traces tensors through another library's code: which boxes of which tensors its results consist of.

A stand-in is a tensor on the meta device: it has a shape and strides, and no values. What is computed from stand-ins is either a
view of one, whose place follows from its strides, or a new tensor. Of a new tensor the trace keeps from which views it was copied
(`contiguous`, `cat`); one that anything else has made is *computed*, and only its sources are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Dims", "Piece", "Trace"]

Dims: TypeAlias = tuple[int, ...]
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a result that is a box of a source. `at`: where it begins in the result. `offsets`, `sizes`: the box in the
    source. `dims`: for each dimension of the result, the source's."""

    source: int
    at: Dims
    offsets: Dims
    sizes: Dims
    dims: Dims


@dataclass(slots=True)
class _Origin:
    """What is known of a storage: the tensor that was made with it, the sources on which it depends, and the pieces of which it
    consists; None if it was computed. `places`: what `_dims_of` said of views by their shapes and strides."""

    made: torch.Tensor
    sources: frozenset[int]
    pieces: list[Piece] | None
    places: dict[tuple[Dims, Dims], _Dims | None] = field(default_factory=dict)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """While it is entered, records what becomes of its stand-ins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, _Origin] = {}

    def stand_in(self, source: int, shape: Dims, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values for the source of this number."""
        made = torch.empty(shape, dtype=dtype, device="meta")
        zeros = (0,) * len(shape)
        whole = Piece(source, zeros, zeros, shape, tuple(range(len(shape))))
        self._origins[_storage(made)] = _Origin(made, frozenset([source]), [whole])
        return made

    def sources(self, result: torch.Tensor) -> frozenset[int]:
        """The sources on which a result depends."""
        origin = self._origins.get(_storage(result))
        return origin.sources if origin is not None else frozenset()

    def pieces(self, result: torch.Tensor) -> list[Piece] | None:
        """The boxes of sources of which a result consists; None if it doesn't consist of boxes."""
        origin = self._origins.get(_storage(result))
        if origin is None or origin.pieces is None or result.dtype != origin.made.dtype:
            return None
        if result.is_neg() or result.is_conj():
            return None
        placed = _place(result, origin)
        if placed is None:
            return None
        starts, (sizes, dims) = placed
        found: list[Piece] = []
        for one in origin.pieces:
            at, offsets, extents = [0] * len(starts), list(one.offsets), [1] * len(one.offsets)
            for dim, inner in enumerate(one.dims):
                first = max(starts[dim], one.at[dim])
                size = min(starts[dim] + sizes[dim], one.at[dim] + one.sizes[inner]) - first
                if size <= 0 and sizes[dim]:
                    break
                at[dim] = first - starts[dim]
                offsets[inner] += first - one.at[dim]
                extents[inner] = size
            else:
                place = tuple(at[dim] for dim in dims)
                inside = tuple(one.dims[dim] for dim in dims)
                found.append(Piece(one.source, place, tuple(offsets), tuple(extents), inside))
        return found

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        writes = func._schema.is_mutable
        if not writes and isinstance(result, torch.Tensor) and _storage(result) in self._origins:
            return result  # a view, of which the strides say the place
        made = [
            one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and _storage(one) not in self._origins
        ]
        if writes or made:
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            sources = frozenset(itertools.chain.from_iterable(map(self.sources, given)))
            for one in made:
                self._origins[_storage(one)] = _Origin(one, sources, None if writes else self._copied(func, args, one))
            for one in given if writes else ():
                if (origin := self._origins.get(_storage(one))) is not None:
                    origin.sources, origin.pieces = sources, None
        return result

    def _copied(self, func: Any, args: tuple[Any, ...], made: torch.Tensor) -> list[Piece] | None:
        """The pieces of a tensor that this operation made; None if it did more than copying."""
        views: list[torch.Tensor]
        dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        if func is aten.cat.default:
            views = [one for one in args[0] if one.numel()]
        elif func in (aten.clone.default, aten._to_copy.default):
            views, dim = [args[0]], 0
        else:
            return None
        if any(one.dtype != made.dtype for one in views):
            return None
        found: list[Piece] = []
        begin, dim = 0, dim % max(made.dim(), 1)
        for view in views:
            if (inner := self.pieces(view)) is None:
                return None
            for one in inner:
                at = tuple(start + begin if d == dim else start for d, start in enumerate(one.at))
                found.append(Piece(one.source, at, one.offsets, one.sizes, one.dims))
            begin += view.shape[dim] if view.dim() else 1
        return found


class _Dims(NamedTuple):
    """A view of a tensor without its offset: its sizes in that tensor's dimensions, and the dimension for each of the view."""

    sizes: Dims
    dims: Dims


def _place(view: torch.Tensor, origin: _Origin) -> tuple[Dims, _Dims] | None:
    """Where a view lies in the tensor of its storage: offsets and the rest; None if it is no box."""
    form = tuple(view.shape), view.stride()
    if form not in origin.places:
        origin.places[form] = _dims_of(*form, origin.made)
    found = origin.places[form]
    if found is None:
        return None
    shape, offsets, left = origin.made.shape, [0] * origin.made.dim(), int(view.storage_offset())
    for stride, dim in sorted(zip(origin.made.stride(), range(len(shape)), strict=True), reverse=True):
        if shape[dim] > 1:
            offsets[dim], left = divmod(left, stride)
    if any(offset + size > most for offset, size, most in zip(offsets, found.sizes, shape, strict=True)):
        return None
    return tuple(offsets), found


def _dims_of(shape: Dims, strides: Dims, base: torch.Tensor) -> _Dims | None:
    """`base` has no gaps, so that its dimensions of more than one element differ in their strides."""
    if shape == base.shape and strides == base.stride():
        return _Dims(shape, tuple(range(len(shape))))
    if 0 in shape:
        return None
    known = {stride: dim for dim, (stride, size) in enumerate(zip(base.stride(), base.shape, strict=True)) if size > 1}
    dims = [known.get(stride) if size > 1 else -1 for stride, size in zip(strides, shape, strict=True)]
    free = [dim for dim in range(base.dim()) if dim not in dims]
    if (
        None in dims
        or len(shape) > base.dim()
        or len({dim for dim in dims if dim != -1}) < sum(dim != -1 for dim in dims)
    ):
        return None
    placed = tuple(free.pop(0) if dim == -1 else dim for dim in dims if dim is not None)
    sizes = [1] * base.dim()
    for dim, size in zip(placed, shape, strict=True):
        sizes[dim] = size
    return _Dims(tuple(sizes), placed)


def _storage(tensor: torch.Tensor) -> int:
    """The identity of a storage, while the trace keeps it alive."""
    return int(tensor.untyped_storage()._cdata)
