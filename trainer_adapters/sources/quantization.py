"""How a weight is kept in fewer bits: its blocks, their scales, and the values that stand for it.

Each scheme is bit for bit what the format's own tools make of weights in float32:

- `FP8InBlocks`, as DeepSeek and Qwen publish: a scale for each block, `amax / 448`, or the next power of two. The formula is
  that of vLLM's `per_block_cast_to_fp8`.
- `EightBits`: FP8 or INT8, symmetric, a scale per output channel, per block or per tensor: `amax` over half the range of the
  type, rounded to the scale's dtype. The formula is that of compressed-tensors' `calculate_qparams`, and ModelOpt's.
- `MXFP8` (OCP Microscaling Formats 1.0): blocks of 32 columns, each with an exponent, the least by which no value is cut off. The
  formula is that of vLLM's `mxfp8_e4m3_quantize`. The specification's own, `floor(log2(amax)) - 8`, cuts values off.
- `PackedInt4`, symmetric, in groups of columns: `amax / 7`, at least 1e-5, and values from -7 to 7. This is the grid on which
  slime and miles train (quantisation-aware training), not that of `calculate_qparams`, which divides by 7.5. Eight values lie in
  an int32, the first in its lowest bits.
- `NVFP4`: groups of 16 columns with scales in FP8, and one scale for the matrix, by which the largest of them becomes 448. Two
  values lie in a byte, the first in its lower half. Formulas: compressed-tensors' `generate_gparam` and `calculate_qparams`, and
  ModelOpt's `NVFP4QTensor`; they differ in what a group of zeros gets.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from inference_plugin.wire.manifest import TensorSpec
from inference_plugin.wire.tensors import torch_dtype

__all__ = [
    "FP8",
    "EightBits",
    "FP8InBlocks",
    "MXFP8",
    "NVFP4",
    "PackedInt4",
    "Scales",
    "Scheme",
    "block_maxima",
    "largest",
    "quantize",
]

FP8 = torch.float8_e4m3fn
LARGEST_FP8, LARGEST_FP4, LARGEST_INT4 = 448.0, 6.0, 7
LEAST_AMAX = 1e-4
"""A block of FP8 whose values are all smaller gets the scale of this one."""
LEAST_INT4_SCALE = 1e-5
INT4_ZERO = 8
"""What is added to a value of INT4 before it is packed."""
LEAST_FP8, EPS_FP8 = 2.0**-9, 0x20
"""The smallest number of FP8 above zero; `torch.finfo(FP8).eps`, 1/8, as it is stored."""
EXPONENT_BIAS = 127
EXPONENT_OF_NAN = 255

ELEMENTS_AT_ONCE, ELEMENTS_ON_A_DEVICE = 1 << 19, 1 << 24
"""How many elements are in float32 at a time, unless one row of blocks has more."""


class Scales(NamedTuple):
    """Of the blocks of a matrix or of a part of it, `(down, across)`."""

    stored: torch.Tensor
    """As the checkpoint has them, in its dtype."""
    factors: torch.Tensor
    """Float32: what values are divided by, or multiplied with (`Scheme.multiplies`), before they are rounded."""
    of_matrix: torch.Tensor | None = None
    """Float32, one number: the scale that the whole matrix has beside them."""


@dataclass(frozen=True)
class Scheme(ABC):
    """How one weight of shape `(rows, columns)` is kept; `block`: rows and columns that share a scale.

    `tensors`: those that the checkpoint has of it: the values, the scales and, for NVFP4, the scale of the matrix.
    `shares`: set where the largest value of the whole matrix is asked for. The weights of which it is the same share
    one: engines keep them in one matrix.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    tensors: tuple[TensorSpec, ...]
    shares: str | None = None

    in_a_number: ClassVar[int] = 1
    """How many columns of the weight are one of the tensor of values."""
    multiplies: ClassVar[bool] = False

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks the weight has, down and across."""
        return math.ceil(self.shape[0] / self.block[0]), math.ceil(self.shape[1] / self.block[1])

    @property
    def one_scale(self) -> bool:
        """Whether the matrix has one scale and no other."""
        return self.shares is not None and len(self.tensors) == 2

    @property
    def dtype(self) -> torch.dtype:
        """That of the stored values."""
        return torch_dtype(self.tensors[0].dtype)

    @property
    def scales_dtype(self) -> torch.dtype:
        return torch_dtype(self.tensors[1].dtype)

    @abstractmethod
    def scales(self, amax: torch.Tensor, of_matrix: torch.Tensor | None = None) -> Scales:
        """Those of blocks whose largest absolute values are `amax` (float32). `of_matrix`: the largest of the whole matrix, and
        of those that it shares a scale with; `NVFP4` needs it."""

    @abstractmethod
    def rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        """The stored values of `scaled` ones: float32, which may be overwritten."""


@dataclass(frozen=True)
class FP8InBlocks(Scheme):
    power_of_two: bool = False
    multiplies: ClassVar[bool] = True

    def scales(self, amax: torch.Tensor, of_matrix: torch.Tensor | None = None) -> Scales:
        scale = amax.clamp(LEAST_AMAX) / LARGEST_FP8
        if self.power_of_two:
            scale = torch.pow(2.0, torch.ceil(torch.log2(scale)))
        scale = scale.to(self.scales_dtype)
        return Scales(scale, 1.0 / scale.float())

    def rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)


@dataclass(frozen=True)
class EightBits(Scheme):
    def scales(self, amax: torch.Tensor, of_matrix: torch.Tensor | None = None) -> Scales:
        dtype = self.scales_dtype
        scale = (amax / (LARGEST_FP8 if self.dtype == FP8 else 127.5)).to(dtype)
        scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
        return Scales(scale, scale.float())

    def rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        if self.dtype == FP8:
            return scaled.clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)
        return scaled.round_().clamp_(-128, 127).to(torch.int8)


@dataclass(frozen=True)
class MXFP8(Scheme):
    """The exponents are stored with a bias of 127, as uint8 or float8_e8m0fnu, which is the same."""

    def scales(self, amax: torch.Tensor, of_matrix: torch.Tensor | None = None) -> Scales:
        exponents = torch.ceil(torch.log2(amax.clamp(torch.finfo(torch.float32).tiny) / LARGEST_FP8)) + EXPONENT_BIAS
        finite = exponents.isfinite()
        stored = torch.where(finite, exponents.clamp(0, EXPONENT_OF_NAN - 1), EXPONENT_OF_NAN).to(torch.uint8)
        factors = torch.where(finite, torch.exp2(stored.float() - EXPONENT_BIAS), torch.nan)
        return Scales(stored.view(self.scales_dtype), factors)

    def rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.clamp_(-LARGEST_FP8, LARGEST_FP8).to(FP8)


@dataclass(frozen=True)
class PackedInt4(Scheme):
    in_a_number: ClassVar[int] = 8

    def scales(self, amax: torch.Tensor, of_matrix: torch.Tensor | None = None) -> Scales:
        scale = (amax / LARGEST_INT4).clamp(LEAST_INT4_SCALE)
        return Scales(scale.to(self.scales_dtype), scale)  # values are divided before scales are rounded

    def rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        codes = scaled.round_().clamp_(-LARGEST_INT4, LARGEST_INT4).add_(INT4_ZERO)
        return _in_pairs(codes.to(torch.int8)).view(torch.int32)


@dataclass(frozen=True)
class NVFP4(Scheme):
    divides: bool = False
    """The scale of the matrix divides, as compressed-tensors writes it; ModelOpt's multiplies."""
    in_a_number: ClassVar[int] = 2

    def scales(self, amax: torch.Tensor, of_matrix: torch.Tensor | None = None) -> Scales:
        assert of_matrix is not None
        if self.divides:
            whole = LARGEST_FP8 * LARGEST_FP4 / of_matrix.clamp(torch.finfo(torch.float32).tiny)
            whole = torch.where(whole.isinf(), 1.0, whole)  # a matrix of zeros
            scale = (whole * (amax / LARGEST_FP4)).clamp(max=LARGEST_FP8).to(FP8)
            scale.view(torch.uint8).masked_fill_(scale.view(torch.uint8) == 0, EPS_FP8)
            return Scales(scale, scale.float() / whole, whole)
        whole = torch.where(of_matrix == 0, 1.0, of_matrix / (LARGEST_FP8 * LARGEST_FP4))
        scale = (amax / (LARGEST_FP4 * whole)).clamp(LEAST_FP8, LARGEST_FP8)
        scale = torch.where(amax == 0, 1.0, scale).to(FP8)
        return Scales(scale, scale.float() * whole, whole)

    def rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        sign = (scaled < 0).view(torch.int8) << 3
        size = scaled.abs_().clamp_(max=LARGEST_FP4)
        # Steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6; halves go to the even code, as hardware rounds.
        codes = (size * 2).round_().to(torch.int8)
        codes = torch.minimum(codes, size.round().to(torch.int8).add_(2))
        codes = torch.minimum(codes, size.div_(2).round_().to(torch.int8).add_(4))
        return _in_pairs(codes.add_(sign))


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15 in int8, as bytes of two, the first one below: `(rows, columns / 2)` in uint8."""
    pairs = codes.view(torch.int16)
    return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)  # of two bytes, the lower one is kept


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


def largest(values: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of a matrix: float32, one number. NaN if it has NaN."""
    return block_maxima(values, (0, 0), (1, values.shape[1])).amax()


def quantize(values: torch.Tensor, at: tuple[int, int], scheme: Scheme, factors: torch.Tensor) -> torch.Tensor:
    """The stored values of a part of a weight that begins at `at`; `factors`: those of the blocks that it touches, of
    `Scheme.scales`. Where values are packed, the part begins and ends at a multiple of `Scheme.in_a_number` columns."""
    shape = (values.shape[0], values.shape[1] // scheme.in_a_number)
    made = torch.empty(shape, dtype=scheme.dtype, device=values.device)
    (top, left), (height, width) = at, scheme.block
    whole = left % width == 0 and values.shape[1] % width == 0
    for first, last in _spans(values, top, 1 if factors.shape[0] == 1 else height):
        factor = factors[(top + first) // height - top // height : math.ceil((top + last) / height) - top // height]
        if 1 < len(factor) < last - first:
            factor = _expanded(factor, top + first, last - first, height, 0)
        part = values[first:last].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if whole:
            blocks, factor = torch.unflatten(part, 1, (-1, width)), factor[:, :, None]
        else:
            blocks, factor = part, _expanded(factor, left, values.shape[1], width, 1)
        scaled = blocks.mul_(factor) if scheme.multiplies else blocks.div_(factor)
        made[first:last] = scheme.rounded(scaled.view_as(part))
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
