"""Experts in FP8, int8, MXFP4 and NVFP4, and those without a gate (Nemotron-H), for vLLM on a CPU that has no kernel for them:
they multiply by the dequantised weights.

As `reference_kernels`: loading and post-processing are vLLM's own, what is computed is no kernel of its.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantised
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.quantization import fp8 as checkpoints
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization import mxfp4 as checkpoints_in_mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_nvfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_fp8 as compressed_fp8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as compressed_int8,
)
from vllm.model_executor.layers.quantization.online import fp8, int8, mxfp4

from tests.support.reference_kernels import in_fp4, in_microscaling

__all__ = ["fill_in"]


NVFP4_BLOCK = 16
"""Columns that share a scale in NVFP4."""


class ReferenceExperts(CPUUnquantizedExperts):
    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Takes weights as the quantisation method leaves them."""

    def apply(  # type: ignore[override]
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        **_: Any,
    ) -> None:
        made = self.quant_config
        first = dequantised(w1, made.w1_scale, made.block_shape, made.g1_alphas)
        second = dequantised(w2, made.w2_scale, made.block_shape, made.g2_alphas)
        x = hidden_states.float()
        found = torch.zeros_like(x)
        for expert in range(w1.shape[0]):
            weight = topk_weights.masked_fill(topk_ids != expert, 0).sum(1, keepdim=True).float()
            inner = functional.linear(x, first[expert])
            if activation == MoEActivation.RELU2_NO_MUL:
                inner = functional.relu(inner).square()
            else:
                gate, up = inner.chunk(2, -1)
                inner = functional.silu(gate) * up
            found += weight * functional.linear(inner, second[expert])
        output.copy_(found)


def dequantised(
    weight: torch.Tensor, scale: torch.Tensor | None, block: list[int] | None, whole: torch.Tensor | None
) -> torch.Tensor:
    """(experts, rows, columns), in float32. `whole`: a second scale of each expert, which NVFP4 has."""
    if scale is None:
        return weight.float()
    if whole is not None and weight.dtype == torch.uint8:
        return in_fp4(weight) * scale.float().repeat_interleave(NVFP4_BLOCK, -1) * whole.reshape(-1, 1, 1)
    if scale.dtype == torch.uint8:
        return in_microscaling(weight, scale)
    if block is not None:
        for dim, size in enumerate(block, 1):
            scale = scale.repeat_interleave(size, dim)
        return weight.float() * scale[:, : weight.shape[1], : weight.shape[2]]
    return weight.float() * scale.float().reshape(weight.shape[0], -1, 1)


def fill_in() -> None:
    """Has vLLM take these experts where it finds no kernel of its own. May be called twice."""
    for module, name, backend in (
        (fp8, "select_fp8_moe_backend", Fp8MoeBackend.TRITON),
        (checkpoints, "select_fp8_moe_backend", Fp8MoeBackend.TRITON),
        (modelopt, "select_fp8_moe_backend", Fp8MoeBackend.TRITON),
        (compressed_fp8, "select_fp8_moe_backend", Fp8MoeBackend.TRITON),
        (int8, "select_int8_moe_backend", Int8MoeBackend.TRITON),
        (compressed_int8, "select_int8_moe_backend", Int8MoeBackend.TRITON),
        (modelopt, "select_nvfp4_moe_backend", NvFp4MoeBackend.EMULATION),
        (compressed_nvfp4, "select_nvfp4_moe_backend", NvFp4MoeBackend.EMULATION),
        (mxfp4, "select_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
        (checkpoints_in_mxfp4, "select_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
        (checkpoints_in_mxfp4, "select_deepseek_v4_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
    ):
        found: Callable[..., Any] = getattr(module, name)
        if not hasattr(found, "__wrapped__"):
            setattr(module, name, _or_reference(found, backend))
    check = moe_config.FusedMoEConfig.__post_init__
    if not hasattr(check, "__wrapped__"):
        moe_config.FusedMoEConfig.__post_init__ = _also_without_a_gate(check)
        unquantised.select_unquantized_moe_backend = _without_a_gate(unquantised.select_unquantized_moe_backend)


def _also_without_a_gate(check: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(check)
    def checked(self: Any) -> None:
        with mock.patch.object(moe_config.current_platform, "is_xpu", return_value=not self.is_act_and_mul):
            check(self)

    return checked


def _without_a_gate(select: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(select)
    def selected(moe_config: Any) -> Any:
        if moe_config.is_act_and_mul:
            with contextlib.suppress(NotImplementedError):
                return select(moe_config=moe_config)
        return UnquantizedMoeBackend.CPU, ReferenceExperts

    return selected


def _or_reference(select: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    @functools.wraps(select)
    def selected(*args: Any, **kwargs: Any) -> Any:
        try:
            own, experts = select(*args, **kwargs)
        except (NotImplementedError, ValueError):
            return backend, ReferenceExperts
        is_kernel = experts is not None and experts._supports_current_device()
        return (own, experts) if is_kernel else (backend, ReferenceExperts)

    return selected
