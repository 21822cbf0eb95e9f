"""Kernels for quantised linear layers of vLLM that this CPU has none for: they multiply by the dequantised weights.

With them an engine starts, so that its loading and post-processing of such weights is run for real, updates included. What they
compute is no kernel of vLLM's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from vllm import _custom_ops
from vllm.model_executor.layers.quantization.online import fp8, mxfp8

__all__ = ["fill_in"]

MX_BLOCK = 32
"""Columns that share an exponent in MXFP8."""


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
        exponents = layer.weight_scale.repeat_interleave(MX_BLOCK, 1).float() - 127
        return layer.weight.float() * torch.exp2(exponents)
    transposed: torch.Tensor = layer.weight.float().t()
    return transposed * layer.weight_scale


def fill_in() -> None:
    """Has vLLM take a reference kernel where it finds none of its own. May be called twice."""
    for module, name in ((fp8, "init_fp8_linear_kernel"), (mxfp8, "init_mxfp8_linear_kernel")):
        found: Callable[..., Any] = getattr(module, name)
        if not hasattr(found, "__wrapped__"):
            setattr(module, name, _or_reference(found))
    if not hasattr(_custom_ops.scaled_fp8_quant, "__wrapped__"):
        _custom_ops.scaled_fp8_quant = _per_tensor_too(_custom_ops.scaled_fp8_quant)


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
