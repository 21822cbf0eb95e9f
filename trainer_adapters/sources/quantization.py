"""How a quantised checkpoint keeps its weights: which ones, in which blocks, and the values that stand for a matrix.

Schemes whose numbers follow from one block of the weight alone:

- FP8 in blocks (`quant_method: fp8` with `weight_block_size`, as DeepSeek and Qwen publish): a scale for each block,
  `amax / 448`, under `NAME_scale_inv`; with `scale_fmt: ue8m0`, or scales of that dtype, the next power of two. The formula is
  that of vLLM's `per_block_cast_to_fp8`.
- compressed-tensors with 8 bits, FP8 or INT8, symmetric, a scale per output channel or per block, under `NAME_scale`: `amax` over
  half the range of the type, rounded to the scale's dtype; the formula is that of its `calculate_qparams`.
- compressed-tensors with INT4, symmetric, in groups of columns (`pack-quantized`, as Kimi-K2 is published): `amax / 7`, at least
  1e-5, and values from -7 to 7. This is the grid on which slime and miles train (quantisation-aware training), not that of
  `calculate_qparams`, which divides by 7.5. Eight values lie in an int32, the first in its lowest bits.

What a whole layer must know (one scale per tensor, which engines share between fused layers), what is measured (scales of
activations), and floating-point formats in fewer bits are not made.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from inference_plugin.wire.checkpoint_headers import checkpoint_directory, read_headers
from inference_plugin.wire.errors import ArgumentError, first_few
from inference_plugin.wire.manifest import TensorSpec
from inference_plugin.wire.tensors import dtype_name

Headers: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

__all__ = ["Scheme", "block_maxima", "quantize", "schemes_of"]

LEAST_AMAX = 1e-4
"""A block of FP8 whose values are all smaller gets the scale of this one."""

LARGEST_INT4, LEAST_INT4_SCALE = 7, 1e-5
INT4_ZERO = 8
"""What is added to a value of INT4 before it is packed."""
IN_A_WORD = 8
"""How many values of INT4 are in an int32."""

ELEMENTS_AT_ONCE, ELEMENTS_ON_A_DEVICE = 1 << 19, 1 << 24
"""How many elements are in float32 at a time, unless one row of blocks has more."""

FP8, INT8, PACKED = torch.float8_e4m3fn, torch.int8, torch.int32
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
MEASURED = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
)


class _Weights(msgspec.Struct):
    """What compressed-tensors says of the weights of a group of layers."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _About(msgspec.Struct):
    """`quantization_config`, as far as it tells of weights."""

    quant_method: str | None = None
    weight_block_size: list[int] | None = None
    scale_fmt: str | None = None
    config_groups: dict[str, _Group] | None = None

    def weights(self, bits: int) -> list[_Weights]:
        """Those that have so many bits. Fewer than 8 may lie in bytes, too."""
        found = [group.weights for group in (self.config_groups or {}).values()]
        return [one for one in found if one is not None and one.num_bits == bits]


@dataclass(frozen=True)
class Scheme:
    """How one weight of shape `(rows, columns)` is kept: the dtype of its values (int32 where INT4 is packed), and the rows and
    columns of a block.

    `tensors`: those that the checkpoint has of it: the values, the scales and, where values are packed, the weight's shape.
    `reciprocal`: values are multiplied by the scale's reciprocal, as vLLM does for FP8 in blocks, and not divided by it.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    block: tuple[int, int]
    scales_dtype: torch.dtype
    tensors: tuple[TensorSpec, ...]
    power_of_two: bool = False
    reciprocal: bool = False

    @property
    def in_a_word(self) -> int:
        """How many columns of the weight are one of the tensor of values."""
        return IN_A_WORD if self.dtype == PACKED else 1

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks the weight has, down and across."""
        return math.ceil(self.shape[0] / self.block[0]), math.ceil(self.shape[1] / self.block[1])

    def scale(self, amax: torch.Tensor) -> torch.Tensor:
        """The scales, for `quantize`, of blocks whose largest absolute values are `amax` (float32). INT4 is divided by scales in
        float32, which are rounded to `scales_dtype` as they are stored; the others are rounded before."""
        if self.dtype == PACKED:
            return (amax / LARGEST_INT4).clamp(LEAST_INT4_SCALE)
        if self.reciprocal:
            scale = amax.clamp(LEAST_AMAX) / torch.finfo(self.dtype).max
        else:
            scale = amax / (127.5 if self.dtype == INT8 else torch.finfo(self.dtype).max)
        if self.power_of_two:
            scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
        scale = scale.to(self.scales_dtype)
        if not self.reciprocal and not self.power_of_two:
            scale = torch.where(scale == 0, torch.finfo(self.scales_dtype).eps, scale)
        return scale


def schemes_of(checkpoint: str | Path) -> dict[str, Scheme]:
    """The scheme of each weight that a checkpoint keeps quantised, by name.

    `checkpoint`: a directory with `config.json` and safetensors files, or a name in the hub of which this machine has a copy.
    Raises `ArgumentError` if it can't be read, is not quantised, or has what can't be made of the trainer's weights.
    """
    try:
        directory = checkpoint_directory(str(checkpoint))
        config = json.loads((directory / "config.json").read_text())
        parts = (config, config.get("text_config") or {})  # as engines do: the model of the text alone may have it
        given = (one.get("quantization_config") or one.get("compression_config") for one in parts)
        about = msgspec.convert(next(filter(None, given), {}), _About)
        headers = read_headers(directory)
    except Exception as error:
        raise ArgumentError(
            f"the quantised checkpoint {str(checkpoint)!r} can't be read: {type(error).__name__}: {error}",
            hint="give the directory of the checkpoint that the engine was started from; a name of the hub is found if this "
            "machine has a copy (`hf download`)",
        ) from error
    if about.quant_method not in ("fp8", "compressed-tensors"):
        raise ArgumentError(
            f"{directory} has quant_method {about.quant_method!r} in its config.json; weights are quantised as 'fp8' in blocks "
            "has them, and 'compressed-tensors' in 8 bits or packed INT4",
            hint="serve the checkpoint in the trainer's dtype and let the engine quantise it, or send tensors in the engine's "
            "format by ExportAdapter",
        )
    found: dict[str, Scheme] = {}
    strange: list[str] = []
    for name, (_, dtype) in headers.items():
        weight = name.removesuffix("_packed")
        if name.rpartition(".")[2] in MEASURED:
            strange.append(name)
        elif weight != name or dtype in (FP8, INT8):
            if (scheme := _packed(weight, about, headers) if weight != name else _scheme(name, about, headers)) is None:
                strange.append(name)
            else:
                found[weight] = scheme
    if strange:
        raise ArgumentError(
            f"{directory} has tensors that can't be made of the trainer's weights: {first_few(sorted(strange))}",
            hint="what can be made: FP8 in blocks with weight_scale_inv, 8 bits of compressed-tensors with scales per channel or "
            "block, and its packed INT4 in groups; symmetric, activations scaled while the engine runs",
        )
    if not found:
        raise ArgumentError(f"{directory} has no weight in FP8, INT8 or INT4 with scales")
    return found


def _scheme(name: str, about: _About, headers: Headers) -> Scheme | None:
    shape, dtype = headers[name]
    in_blocks = about.quant_method == "fp8"
    scales = f"{name}_scale_inv" if in_blocks else f"{name}_scale"
    scales_shape, scales_dtype = headers.get(scales, ((), torch.bool))
    if len(shape) != 2 or scales_dtype not in SCALES or (in_blocks and dtype != FP8):
        return None
    for block in _blocks(shape, about):
        grid = tuple(math.ceil(size / width) for size, width in zip(shape, block, strict=True))
        if scales_shape == grid or (grid[1] == 1 and scales_shape == grid[:1]):
            return Scheme(
                (shape[0], shape[1]),
                dtype,
                block,
                scales_dtype,
                _specs(headers, name, scales),
                power_of_two=about.scale_fmt == "ue8m0" or scales_dtype == torch.float8_e8m0fnu,
                reciprocal=in_blocks,
            )
    return None


def _packed(name: str, about: _About, headers: Headers) -> Scheme | None:
    parts = [f"{name}_packed", f"{name}_scale", f"{name}_shape"]
    if any(len(headers.get(part, ((), None))[0]) != dims for part, dims in zip(parts, (2, 2, 1), strict=True)):
        return None
    (words, dtype), (grid, scales_dtype) = headers[parts[0]], headers[parts[1]]
    if dtype != PACKED or scales_dtype not in SCALES:
        return None
    shape = words[0], words[1] * IN_A_WORD
    for group in about.weights(4):
        width = group.group_size or 0
        if (group.strategy, group.type, group.symmetric) != ("group", "int", True):
            continue
        if width > 0 and width % IN_A_WORD == shape[1] % width == 0 and grid == (shape[0], shape[1] // width):
            return Scheme(shape, dtype, (1, width), scales_dtype, _specs(headers, *parts))
    return None


def _specs(headers: Headers, *names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype_name(headers[name][1]), headers[name][0]) for name in names)


def _blocks(shape: tuple[int, ...], about: _About) -> list[tuple[int, int]]:
    """The blocks that a weight may be divided into, as the config says."""
    if about.quant_method == "fp8":
        sizes = [about.weight_block_size]
    else:
        sizes = [[1, shape[1]] for one in about.weights(8) if one.strategy == "channel" and one.symmetric]
        sizes += [one.block_structure for one in about.weights(8) if one.strategy == "block"]
    return [(size[0], size[1]) for size in sizes if size is not None and len(size) == 2 and min(size) > 0]


def block_maxima(values: torch.Tensor, at: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """The largest absolute value in each block that `values`, a part of a matrix that begins at `at`, touches: float32, a row for
    each row of blocks. NaN where a block has NaN."""
    rows = []
    for first, last in _spans(values, at[0], block[0]):
        part = _magnitudes(values[first:last])
        if block[0] > 1:
            part = _largest(part, at[0] + first, block[0], 0)
        rows.append(_largest(part, at[1], block[1], 1).view(values.dtype).float())
    return torch.cat(rows)


def quantize(values: torch.Tensor, at: tuple[int, int], scheme: Scheme, scales: torch.Tensor) -> torch.Tensor:
    """The stored values of a part of a weight that begins at `at`; `scales`: those of the blocks that it touches, of
    `Scheme.scale`. Where values are packed, the part begins and ends at a multiple of `Scheme.in_a_word` columns."""
    shape = (values.shape[0], values.shape[1] // scheme.in_a_word)
    made = torch.empty(shape, dtype=scheme.dtype, device=values.device)
    factors = 1.0 / scales.float() if scheme.reciprocal else scales.float()
    (top, left), (height, width) = at, scheme.block
    whole = left % width == 0 and values.shape[1] % width == 0
    for first, last in _spans(values, top, height):
        factor = factors[(top + first) // height - top // height : math.ceil((top + last) / height) - top // height]
        if 1 < len(factor) < last - first:
            factor = _expanded(factor, top + first, last - first, height, 0)
        part = values[first:last].to(torch.float32, copy=True)
        if whole:
            blocks, factor = torch.unflatten(part, 1, (-1, width)), factor[:, :, None]
        else:
            blocks, factor = part, _expanded(factor, left, values.shape[1], width, 1)
        part = (blocks.mul_(factor) if scheme.reciprocal else blocks.div_(factor)).view_as(part)
        if scheme.dtype == PACKED:
            codes = part.round_().clamp_(-LARGEST_INT4, LARGEST_INT4).add_(INT4_ZERO).to(torch.int8).view(torch.int16)
            part = (codes >> 4).bitwise_or_(codes).to(torch.uint8).view(PACKED)  # of two bytes, the lower one is kept
        elif scheme.dtype == INT8:
            part = part.round_().clamp_(-128, 127)
        else:
            largest = torch.finfo(scheme.dtype).max
            part = part.clamp_(-largest, largest)
        made[first:last] = part
    return made


def _spans(values: torch.Tensor, at: int, height: int) -> Iterable[tuple[int, int]]:
    """The rows to work on at once, which end between blocks of `height` rows: as many as a processor's cache holds; on a device,
    where each operation costs a launch, as many as leave the working copies small."""
    elements = ELEMENTS_AT_ONCE if values.device.type == "cpu" else ELEMENTS_ON_A_DEVICE
    step = height * max(1, elements // (height * max(1, values.shape[1])))
    return itertools.pairwise([0, *range(step - at % height, len(values), step), len(values)])


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The bits of the absolute values, as whole numbers: their order is the same (NaN is the largest), and torch finds their
    maxima faster."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    return values.view(whole) & torch.iinfo(whole).max


def _largest(values: torch.Tensor, at: int, width: int, dim: int) -> torch.Tensor:
    """The largest of each block of `width` along `dim`; `values` begin at `at` there. The first and last block may be parts."""
    length = values.shape[dim]
    head = min(-at % width, length)
    tail = (length - head) % width
    parts = (0, head, head), (head, length - tail, width), (length - tail, length, tail)
    made = [
        torch.unflatten(values.narrow(dim, first, last - first), dim, (-1, of)).amax(dim + 1)
        for first, last, of in parts
        if last > first
    ]
    return made[0] if len(made) == 1 else torch.cat(made, dim)


def _expanded(factors: torch.Tensor, at: int, length: int, width: int, dim: int) -> torch.Tensor:
    """The factor of each of the `length` rows or columns that begin at `at`, from those of their blocks."""
    return factors.repeat_interleave(width, dim).narrow(dim, at % width, length)
