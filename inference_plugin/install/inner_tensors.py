"""The tensors inside an object that post-processing makes anew: a kernel, a configuration, a list of scales.

Where addresses must stay, the live object stays too, and an update writes over the tensors inside it: a captured graph reads them
where they lay at its capture, whether or not anything else still refers to them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor, nn

from inference_plugin.install.graph import PLAIN, Boundary, Path, children_of, is_helper
from inference_plugin.install.storages import equal_bytes

__all__ = ["inner_tensors"]

_MISSING: Any = object()


def inner_tensors(
    one: Any,
    other: Any,
    live: Any,
    is_placed: Callable[[Tensor, Any], bool | None],
    working: Collection[str],
    boundary: Boundary,
) -> frozenset[Path] | None:
    """The paths in `live` of the tensors that have to be overwritten so that `live` becomes what post-processing made. None if
    that is not enough: something else in it depends on the weights, or the engine has derived something more at first use.

    `one`, `other`: what post-processing made of different weights. `is_placed(made, held)`: None for a tensor with memory of its
    own; else whether `held` lies in the live parameter of which `made` is a view, and so follows it. `working`: names of the
    engine's working memory.
    """
    try:
        return frozenset(_walk((), (one, other, live), is_placed, frozenset(working), boundary, set()))
    except _Differs:
        return None


class _Differs(Exception):
    pass


def _walk(
    path: Path,
    values: tuple[Any, Any, Any],
    is_placed: Callable[[Tensor, Any], bool | None],
    working: frozenset[str],
    boundary: Boundary,
    above: set[int],
) -> Iterator[Path]:
    one, other, live = values
    if one is other or not working.isdisjoint(path) or id(one) in above:
        return
    if type(one) is not type(other) or hasattr(type(one), "__del__"):
        raise _Differs  # a finalizer frees what the object's tensors may point to
    if isinstance(one, Tensor):
        if _is_overwritten(one, other, live, is_placed):
            yield path
        return
    if isinstance(one, (*PLAIN, set, frozenset)):
        if one != other or (live != one and _may_be_derived(live, boundary)):
            raise _Differs
        return
    if isinstance(one, types.FunctionType) and one.__code__ is not other.__code__:
        raise _Differs
    inside = [dict(children_of(value, boundary)) for value in values]
    if not inside[0] and not isinstance(one, (dict, list, tuple)) and not is_helper(one, boundary):
        raise _Differs  # it can't be inspected
    if type(live) is not type(one) or inside[0].keys() != inside[1].keys():
        raise _Differs
    if any(_may_be_derived(value, boundary) for label, value in inside[2].items() if label not in inside[0]):
        raise _Differs
    for label, child in inside[0].items():
        below = child, inside[1][label], inside[2].get(label, _MISSING)
        yield from _walk((*path, label), below, is_placed, working, boundary, above | {id(one)})


def _is_overwritten(one: Tensor, other: Tensor, live: Any, is_placed: Callable[[Tensor, Any], bool | None]) -> bool:
    placed = is_placed(one, live)
    if placed is not None:
        if not placed:
            raise _Differs
        return False
    alike = isinstance(live, Tensor) and (live.shape, live.dtype) == (one.shape, one.dtype)
    if not alike and not equal_bytes(one, other):
        raise _Differs
    return alike


def _may_be_derived(value: Any, boundary: Boundary, above: frozenset[int] = frozenset()) -> bool:
    """Whether the engine may have derived this value from weights at first use."""
    if isinstance(value, (Tensor, float)):
        return True
    if id(value) in above or (isinstance(value, nn.Module) and not is_helper(value, boundary)):
        return False  # a module of the model is updated by itself
    return any(_may_be_derived(child, boundary, above | {id(value)}) for _, child in children_of(value, boundary))
