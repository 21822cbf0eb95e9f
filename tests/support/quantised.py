"""Tiny Llamas as the common quantisers write them: packed weights, scales and zero points of linear layers.

The bits are drawn from the seed, and no quantiser computes them: an update is right if the engine holds after it what it holds
after it has loaded the same checkpoint, whatever these weights are worth. Formats: compressed-tensors `pack-quantized` and
`int-quantized`, AutoGPTQ (`checkpoint_format` "gptq"), AutoAWQ ("gemm").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import Maker, load, rewrite
from tests.support.models import make_llama, make_qwen3, make_qwen3_moe

__all__ = ["FP8_FOR_SGLANG", "QUANTISED", "that_start", "w4a16"]

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32
"""Columns that share a scale."""
IN_A_WORD = 8
"""Numbers of four bits in an int32."""

NEED_AVX512 = ("w4a16", "gptq", "awq", "fp8-kv-scales", "fp8-kv-scales-whole")
"""vLLM for CPUs without AVX-512 (`_C_AVX2`) has no kernel for four-bit weights or an FP8 KV cache: no engine starts."""

Parts = Mapping[str, torch.Tensor]
Quantise = Callable[[int, int, torch.Generator], Parts]
"""(rows, columns, random) of a linear layer -> its tensors by the last part of their names."""


def that_start(names: Iterable[str]) -> list[Any]:
    """Names of models in vLLM, as a test's parameters: those that this host's processor has no kernel for are skipped."""
    import pytest  # engines' processes import this file too

    lacks = " avx512f " not in Path("/proc/cpuinfo").read_text().replace("\n", " ")
    skip = pytest.mark.skipif(lacks, reason="vLLM has no kernel for four-bit weights or an FP8 cache without AVX-512")
    return [pytest.param(name, marks=skip) if name.endswith(NEED_AVX512) else name for name in names]


def _words(*shape: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, generator=random, dtype=torch.int64).to(torch.int32)


def _scales(*shape: int, random: torch.Generator) -> torch.Tensor:
    return (0.005 + 0.02 * torch.rand(shape, generator=random)).to(torch.bfloat16)


def pack_quantized(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {
        "weight_packed": _words(rows, columns // IN_A_WORD, random=random),
        "weight_scale": _scales(rows, columns // GROUP, random=random),
        "weight_shape": torch.tensor([rows, columns]),
    }


def gptq(*, act_order: bool) -> Quantise:
    def quantise(rows: int, columns: int, random: torch.Generator) -> Parts:
        groups = torch.arange(columns, dtype=torch.int32) // GROUP
        return {
            "qweight": _words(columns // IN_A_WORD, rows, random=random),
            "qzeros": torch.full((columns // GROUP, rows // IN_A_WORD), 0x77777777, dtype=torch.int32),
            "scales": _scales(columns // GROUP, rows, random=random),
            "g_idx": groups[torch.randperm(columns, generator=random)] if act_order else groups,
        }

    return quantise


def awq(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {
        "qweight": _words(columns, rows // IN_A_WORD, random=random),
        "qzeros": _words(columns // GROUP, rows // IN_A_WORD, random=random),
        "scales": _scales(columns // GROUP, rows, random=random),
    }


def int8_static(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {
        "weight": torch.randint(-127, 128, (rows, columns), generator=random, dtype=torch.int8),
        "weight_scale": (0.0005 + 0.002 * torch.rand(rows, 1, generator=random)),
        "input_scale": torch.tensor([0.01 + 0.002 * random.initial_seed()]),  # of all layers: fused ones must share it
    }


def fp8_blocks(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {
        "weight": torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn),
        "weight_scale_inv": 0.1 + 0.1 * torch.rand(rows // GROUP, columns // GROUP, generator=random),
    }


def fp8_static(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {
        "weight": torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn),
        "weight_scale": 0.1 + 0.1 * torch.rand((), generator=random),
        "input_scale": 0.01 + 0.01 * torch.rand((), generator=random),
    }


def _llama(quantise: Quantise, config: dict[str, Any], make: Callable[..., Path] = make_llama, **shape: Any) -> Maker:
    def build(directory: Path, seed: int) -> Path:
        path = make(directory, seed=seed, dtype=torch.bfloat16, **shape)
        random = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load(path).items():
            if name.split(".")[-2] in LINEAR:
                parts = quantise(*tensor.shape, random)
                tensors |= {f"{name.removesuffix('weight')}{part}": made for part, made in parts.items()}
            else:
                tensors[name] = tensor
        return rewrite(path, tensors, quantization_config=config)

    return build


def _compressed(packing: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
}


def w4a16(**shape: Any) -> Maker:
    """A Llama in 4 bits, as compressed-tensors writes it; `shape` replaces entries of its configuration."""
    return _llama(pack_quantized, _compressed("pack-quantized", INT4, None), **shape)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

FP8_FOR_SGLANG: dict[str, Maker] = {
    "qwen3-fp8-blocks": _llama(fp8_blocks, FP8 | {"weight_block_size": [GROUP, GROUP]}, make_qwen3, tied=False),
    "qwen3_moe-fp8-blocks": _llama(fp8_blocks, FP8 | {"weight_block_size": [GROUP, GROUP]}, make_qwen3_moe),
    "llama-fp8-static": _llama(fp8_static, FP8 | {"activation_scheme": "static"}),
}
"""Models in FP8, by the form of their scales, as published checkpoints have them. SGLang's Llama takes no blocks."""
QUANTISED: dict[str, Maker] = {
    "w4a16": w4a16(),
    "w8a8-int8-static": _llama(int8_static, _compressed("int-quantized", INT8, STATIC)),
    "gptq": _llama(gptq(act_order=False), GPTQ | {"desc_act": False}),
    "gptq-act-order": _llama(gptq(act_order=True), GPTQ | {"desc_act": True}),
    "awq": _llama(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}
"""By the scheme's name."""
