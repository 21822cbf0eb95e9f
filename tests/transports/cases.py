"""What every transport must carry bit for bit, and the small trainer that sends it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import bytes_view
from tests.support.plain_engine import manifest_of
from trainer_adapters.sources.base import LocalSlice

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def any_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaNs with payloads included."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)


def every_kind() -> dict[str, torch.Tensor]:
    """Every dtype, 0-d, empty, odd sizes, three dimensions, transposed, strided, expanded: in one manifest."""
    tensors: dict[str, torch.Tensor] = {}
    for i, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        tensors[f"{name}.odd"] = any_bits(dtype, 7, 3, seed=i)
        tensors[f"{name}.scalar"] = any_bits(dtype, seed=i + 1)
        tensors[f"{name}.empty"] = any_bits(dtype, 0, 4)
        tensors[f"{name}.transposed"] = any_bits(dtype, 5, 9, seed=i + 2).T
        tensors[f"{name}.strided"] = any_bits(dtype, 6, 10, seed=i + 3)[::2, 1::3]
        tensors[f"{name}.cube"] = any_bits(dtype, 3, 5, 7, seed=i + 5)
        tensors[f"{name}.one"] = any_bits(dtype, 1, seed=i + 4)
    tensors["expanded"] = any_bits(torch.float32, 1, 5).expand(3, 5)
    return tensors


def around_the_piece() -> dict[str, torch.Tensor]:
    """Sizes at, below and above the limit of one piece, and one of several."""
    sizes = {"below": PIECE_BYTES - 1, "at": PIECE_BYTES, "above": PIECE_BYTES + 1, "several": 2 * PIECE_BYTES + 77}
    return {name: any_bits(torch.uint8, size, seed=size) for name, size in sizes.items()}


CASES = {
    "every dtype and shape": every_kind,
    "around the size of a piece": around_the_piece,
    "larger than a bucket, first": lambda: {
        "large": any_bits(torch.int32, 1100, 2048),
        "small": any_bits(torch.bool, 3),
    },
    "larger than a bucket, last": lambda: {
        "small": any_bits(torch.bool, 3),
        "large": any_bits(torch.int32, 1100, 2048),
    },
    "larger than a bucket, transposed, alone": lambda: {"large": any_bits(torch.int32, 1100, 2048).T},
    "no tensor at all": dict,
    "only empty tensors": lambda: {"a": any_bits(torch.int8, 0), "b": any_bits(torch.int64, 3, 0)},
}


def whole_slices(tensors: dict[str, torch.Tensor]) -> Iterator[LocalSlice]:
    for i, tensor in enumerate(tensors.values()):
        yield LocalSlice(Box(i, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)


def column_slices(tensors: dict[str, torch.Tensor], parts: int = 3) -> Iterator[LocalSlice]:
    """Every tensor in slices along its last dimension: boxes whose bytes don't lie together."""
    for i, tensor in enumerate(tensors.values()):
        if not tensor.dim():
            yield LocalSlice(Box(i, (), ()), tensor)
            continue
        start = 0
        for part in tensor.tensor_split(parts, dim=-1):
            offsets = (*(0,) * (tensor.dim() - 1), start)
            yield LocalSlice(Box(i, offsets, tuple(part.shape)), part)
            start += part.shape[-1]


def assert_equal_bytes(held: dict[str, torch.Tensor], meant: dict[str, torch.Tensor]) -> None:
    assert list(held) == list(meant)
    for name, tensor in meant.items():
        assert (held[name].dtype, held[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bytes_view(held[name].contiguous()), bytes_view(tensor.contiguous())), name


def manifest_for(tensors: dict[str, torch.Tensor]) -> Manifest:
    return manifest_of(tensors)


def block_slices(tensors: dict[str, torch.Tensor]) -> Iterator[LocalSlice]:
    """Columns, and these cut in two along the dimension before: of three dimensions they are boxes whose rows are not equally
    far apart."""
    for item in column_slices(tensors):
        if item.tensor.dim() < 2:
            yield item
            continue
        start = item.box.offsets[-2]
        for part in item.tensor.tensor_split(2, dim=-2):
            yield LocalSlice(
                Box(item.box.tensor, (*item.box.offsets[:-2], start, item.box.offsets[-1]), tuple(part.shape)), part
            )
            start += part.shape[-2]
