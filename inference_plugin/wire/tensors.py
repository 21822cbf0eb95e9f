"""Views between tensors and bytes: dtypes by name, a tensor's bytes, a box of a segment as a tensor. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import torch

from inference_plugin.wire.compiled import FUNCTIONS
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest

__all__ = [
    "PackedRows", "box_view", "bytes_view", "copyable", "dtype_name", "is_freed", "narrowed", "packed_rows",
    "tensors_over", "torch_dtype",
]  # fmt: skip

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES if hasattr(torch, name)}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}

EXCHANGE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
"""The C functions by which torch (from 2.10 on) describes a tensor, in a quarter of the time that its Python attributes take."""

DLPACK_TYPES = {
    "bool": (6, 8), "int8": (0, 8), "int16": (0, 16), "int32": (0, 32), "int64": (0, 64), "uint8": (1, 8),
    "float16": (2, 16), "float32": (2, 32), "float64": (2, 64), "bfloat16": (4, 16),
}  # fmt: skip
"""Type code and bits, by which DLPack (dlpack.h, `DLDataTypeCode`) names the usual dtypes."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a manifest calls `name`. Raises `ManifestMismatch` if it can't travel or this torch lacks it."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ManifestMismatch(f"unknown dtype {name!r}", hint=f"use one of {', '.join(_DTYPES)}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of `dtype`. Raises `ManifestMismatch` if it can't travel."""
    try:
        return _NAMES[dtype]
    except (KeyError, TypeError):  # a list, say
        raise ManifestMismatch(f"{dtype} can't travel; known: {', '.join(_DTYPES)}") from None


LOWEST_SURE = 1 << 44
"""No tensor begins so many bytes into its storage: an address from here on is not that of a place in a storage at null."""


class PackedRows(msgspec.Struct, frozen=True, gc=False):
    """Where the bytes of tensors of one `dtype` lie: `nbytes` bytes at `places` (see `copying.places_in`), one for each tensor.

    `shape` is the first tensor's. The others differ from it at most in their first dimension, which is `lengths[i]`: 1 for a
    tensor without dimensions.
    """

    places: bytes
    nbytes: int
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str


def packed_rows(tensors: tuple[object, ...]) -> PackedRows | None:
    """Where a list's tensors lie, in one C call; None if they aren't plain, packed CPU tensors that make one column.

    None is no error: the caller then looks at them one by one, and knows why they are refused. The places hold as long as
    nobody resizes or frees the tensors.
    """
    if FUNCTIONS is None or EXCHANGE is None:
        return None
    if (found := FUNCTIONS.tensor_rows(tensors, torch.Tensor, EXCHANGE)) is None:
        return None
    places, nbytes, lowest, shape, lengths = found
    rows = cast("tuple[torch.Tensor, ...]", tensors)
    dtype = rows[0].dtype
    if (name := _NAMES.get(dtype)) is None or (dtype.is_floating_point and any(map(torch.Tensor.is_neg, rows))):
        return None
    if lowest < LOWEST_SURE and any(map(is_freed, rows)):
        return None
    return PackedRows(places, nbytes, shape, lengths, name)


def tensors_over(
    keepers: Sequence[object], addresses: list[int], lengths: list[tuple[int, ...]], inner: tuple[int, ...], dtype: str
) -> list[torch.Tensor] | None:
    """Contiguous tensors over memory of others, in one C call; None where this torch, or a dtype, has no such way.

    From `addresses[i]` on lies a tensor `[length, *inner]` for each of `lengths[i]`, one after the other. Each has its own
    storage, which keeps `keepers[i]`. The caller knows that the memory is there, aligned and large enough, as long as its
    keeper lives.
    """
    if FUNCTIONS is None or EXCHANGE is None or (kind := DLPACK_TYPES.get(dtype)) is None:
        return None
    tensors: list[torch.Tensor] | None = FUNCTIONS.tensors_over(
        list(keepers), addresses, lengths, inner, *kind, EXCHANGE
    )
    return tensors


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor that has elements has no memory for them any more."""
    return tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


def bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a 1-D uint8 view of the same memory, detached from autograd.

    Raises ValueError if the bytes in memory are not those of the values in C order: strided, lazily conjugated or negated.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} and stride {list(tensor.stride())} has no plain bytes"
        )
    # Not `reshape`: it keeps the stride of a single element, and torch then gives no view of its bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` for `torch._foreach_copy_`, which on a GPU knows every dtype but float8_e8m0fnu: that one as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == _DTYPES.get("float8_e8m0fnu") else tensor


def box_view(segment: torch.Tensor, manifest: Manifest, box: Box) -> torch.Tensor:
    """`box` in a segment that is laid out by `manifest`: a view of shape `box.sizes`, with the whole tensor's strides.

    `segment` is 1-D uint8 and contiguous, has at least `manifest.layout.nbytes` bytes, and begins at a multiple of the item
    size in its storage; else this raises ValueError. Raises `ManifestMismatch` for a box that doesn't lie in its tensor.
    """
    if segment.dtype != torch.uint8 or segment.dim() != 1 or not segment.is_contiguous():
        raise ValueError(f"a segment is 1-D, contiguous and uint8, not {segment.dtype} of shape {list(segment.shape)}")
    if segment.numel() < manifest.layout.nbytes:
        raise ValueError(f"the segment has {segment.numel()} bytes, its manifest needs {manifest.layout.nbytes}")
    manifest.check_box(box)
    spec = manifest.tensors[box.tensor]
    start = manifest.layout.offsets[box.tensor]
    dtype = torch_dtype(spec.dtype)
    if segment.storage_offset() % dtype.itemsize:
        raise ValueError(
            f"the segment begins {segment.storage_offset()} bytes into its storage: {spec.dtype} is unaligned"
        )
    return narrowed(segment[start : start + spec.nbytes].view(dtype).view(spec.shape), box.offsets, box.sizes)


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of `tensor` that begins at `offsets` and has `sizes`, as a view of it."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor
