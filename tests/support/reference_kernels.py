"""Kernels for quantised linear layers of vLLM that this CPU has none for: they multiply by the dequantised weights.

With them an engine starts, so that its loading and post-processing of such weights is run for real, updates included. What they
compute is no kernel of vLLM's. NVFP4 and MXFP8 vLLM emulates itself, on GPUs without a kernel for them; here on the CPU too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization import fp8 as checkpoints
from vllm.model_executor.layers.quantization.online import fp8, mxfp8
from vllm.platforms import PlatformEnum
from vllm.triton_utils import triton
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

__all__ = ["fill_in"]

MX_BLOCK = 32
"""Columns that share an exponent in MXFP8 and MXFP4."""


class ReferenceKernel:
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Takes weights as the quantisation method leaves them."""

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, dequantised(layer).to(x.dtype), bias)


def dequantised(layer: Any) -> torch.Tensor:
    """(rows, columns), in float32."""
    if hasattr(layer, "weight_scale_inv"):
        rows, columns = layer.weight.shape
        scale = layer.weight_scale_inv
        for dim, size in enumerate(layer.weight_block_size):
            scale = scale.repeat_interleave(size, dim)
        return layer.weight.float() * scale[:rows, :columns]
    if layer.weight_scale.dtype == torch.uint8:
        return in_microscaling(layer.weight, layer.weight_scale)
    transposed: torch.Tensor = layer.weight.float().t()
    return transposed * layer.weight_scale


def in_microscaling(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values, in float32, of MXFP8, or of MXFP4 with two elements in a byte; `scale` holds exponents."""
    values = in_fp4(weight) if weight.dtype == torch.uint8 else weight.float()
    return values * torch.exp2(scale.repeat_interleave(MX_BLOCK, -1).float() - 127)


def in_fp4(weight: torch.Tensor) -> torch.Tensor:
    """The values of packed codes, two in a byte."""
    codes = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).long()
    return torch.tensor([*FP4, *(-value for value in FP4)], device=weight.device)[codes]


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of E2M1 without a sign."""


def mxfp4_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of vLLM's, which is a kernel of Triton's: packed codes, and the exponents of blocks."""
    blocks = weight.float().unflatten(-1, (-1, MX_BLOCK))
    exponents = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2
    values = torch.tensor(FP4, device=weight.device)
    codes = ((blocks * torch.exp2(-exponents)).abs()[..., None] - values).abs().argmin(-1)
    codes = (codes + 8 * (blocks < 0)).flatten(-2).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).squeeze(-1).to(torch.uint8)


def fill_in() -> None:
    """Has vLLM take a reference kernel where it finds none of its own. May be called twice."""
    kernels = [(fp8, "init_fp8_linear_kernel"), (checkpoints, "init_fp8_linear_kernel")]
    kernels += [(mxfp8, "init_mxfp8_linear_kernel")]
    with contextlib.suppress(ImportError):  # older versions
        from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_mxfp4
        from vllm.model_executor.layers.quantization.online import mxfp4

        mxfp4.mxfp4_quantize = mxfp4_quantize
        kernels += [(module, "init_mxfp4_linear_kernel") for module in (mxfp4, compressed_tensors_w4a4_mxfp4)]
    for name in ("NvFp4", "Mxfp8"):
        if (emulation := getattr(linear, f"Emulation{name}LinearKernel", None)) is not None:
            getattr(linear, f"_POSSIBLE_{name.upper()}_KERNELS").setdefault(PlatformEnum.CPU, [emulation])
    if not _library and not hasattr(torch.ops._C, "silu_and_mul_quant"):
        _library.append(_with_silu_and_mul_quant())
    for module, name in kernels:
        found: Callable[..., Any] = getattr(module, name)
        if not hasattr(found, "__wrapped__"):
            setattr(module, name, _or_reference(found))
    if not hasattr(_custom_ops.scaled_fp8_quant, "__wrapped__"):
        _custom_ops.scaled_fp8_quant = _per_tensor_too(_custom_ops.scaled_fp8_quant)

    if not hasattr(triton, "set_allocator"):  # OLMo-Hybrid's layers call it where they are made
        triton.set_allocator = lambda allocate: None
    with contextlib.suppress(ImportError):  # older versions
        from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

        # It holds the configuration's size of a head, which Youtu and Mistral 4 have too, against sizes of the cache.
        MLACommonMetadata.__post_init__ = lambda self: None
    if not hasattr(CPUAttentionBackendImpl.__init__, "__wrapped__"):
        CPUAttentionBackendImpl.__init__ = _without_chunks(CPUAttentionBackendImpl.__init__)


def _without_chunks(init: Callable[..., None]) -> Callable[..., None]:
    """Takes Rnj-1's word that a layer does not attend by chunks."""

    @functools.wraps(init)
    def made(self: Any, *args: Any, chunk_lookback: int = -1, **kwargs: Any) -> None:
        assert chunk_lookback == -1
        init(self, *args, **kwargs)

    return made


_library: list[torch.library.Library] = []


def _with_silu_and_mul_quant() -> torch.library.Library:
    """The operation that vLLM quantises activations with where it multiplies them, and that a CPU lacks."""
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()")

    def silu_and_mul_quant(result: torch.Tensor, inputs: torch.Tensor, scale: torch.Tensor) -> None:
        gate, up = inputs.float().chunk(2, -1)
        most = torch.finfo(torch.float8_e4m3fn).max
        result.copy_((functional.silu(gate) * up / scale).clamp(-most, most))

    library.impl("silu_and_mul_quant", silu_and_mul_quant, "CPU")
    return library


def _per_tensor_too(quantise: Callable[..., Any]) -> Callable[..., Any]:
    """`scaled_fp8_quant` that also takes one given scale, which a CPU has no operator for."""

    @functools.wraps(quantise)
    def quantised(input: torch.Tensor, scale: torch.Tensor | None = None, **more: Any) -> Any:  # noqa: A002 -- vLLM's name
        info = torch.finfo(torch.float8_e4m3fn)
        if scale is None and more == {"use_per_token_if_dynamic": True}:
            scale = input.float().abs().amax(1, keepdim=True) / info.max
        elif scale is None or scale.numel() > 1 or more:
            return quantise(input, scale, **more)
        scaled = input.float() * scale.reciprocal()  # as vLLM's kernel does
        return scaled.clamp(info.min, info.max).to(torch.float8_e4m3fn), scale

    return quantised


def _or_reference(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        try:
            return init(*args, **kwargs)
        except ValueError:
            return ReferenceKernel()

    return kernel
