"""Tiny Llamas as the common quantisers write them: packed weights, scales and zero points of linear layers.

The bits are drawn from the seed, and no quantiser computes them: an update is right if the engine holds after it what it holds
after it has loaded the same checkpoint, whatever these weights are worth. Formats: compressed-tensors, AutoGPTQ
(`checkpoint_format` "gptq"), AutoAWQ ("gemm"), ModelOpt, and FP8 as DeepSeek and vLLM's own tools write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import Maker, gpt_oss, load, rewrite
from tests.support.models import make_llama, make_qwen3, make_qwen3_moe

__all__ = ["FOR_BOTH", "FOUR_BITS", "FOR_VLLM", "FP8", "QUANTISED", "that_start", "w4a16"]

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32
"""Columns that share a scale."""
IN_A_WORD = 8
"""Numbers of four bits in an int32."""

NEED_AVX512 = (
    "w4a16",
    "w4a16-asymmetric",
    "int4 in groups",
    "gptq",
    "awq",
    "fp8-kv-scales",
    "fp8-kv-scales-whole",
    "fp8-one-kv-scale",
)
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
        inputs = torch.Generator().manual_seed(
            columns + random.initial_seed()
        )  # layers of the same input share their order
        return {
            "qweight": _words(columns // IN_A_WORD, rows, random=random),
            "qzeros": torch.full((columns // GROUP, rows // IN_A_WORD), 0x77777777, dtype=torch.int32),
            "scales": _scales(columns // GROUP, rows, random=random),
            "g_idx": groups[torch.randperm(columns, generator=inputs)] if act_order else groups,
        }

    return quantise


def pack_quantized_asymmetric(rows: int, columns: int, random: torch.Generator) -> Parts:
    zeros = _words(rows // IN_A_WORD, columns // GROUP, random=random)
    return {**pack_quantized(rows, columns, random), "weight_zero_point": zeros}


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


def int8_dynamic(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {name: made for name, made in int8_static(rows, columns, random).items() if name != "input_scale"}


def int8_asymmetric(rows: int, columns: int, random: torch.Generator) -> Parts:
    zero = torch.tensor([3 + random.initial_seed()], dtype=torch.int8)
    return {**int8_static(rows, columns, random), "input_zero_point": zero}


def fp8_blocks(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {
        "weight": torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn),
        "weight_scale_inv": 0.1 + 0.1 * torch.rand(rows // GROUP, columns // GROUP, generator=random),
    }


def fp8_static(*shape: int, shared: bool = False) -> Quantise:
    """Scales of the form `shape`. `shared`: all layers have one scale of their inputs, as the parts of an expert must."""

    def quantise(rows: int, columns: int, random: torch.Generator) -> Parts:
        inputs = torch.full(shape, random.initial_seed() % 7) if shared else torch.rand(shape, generator=random)
        return {
            "weight": torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn),
            "weight_scale": 0.1 + 0.1 * torch.rand(shape, generator=random),
            "input_scale": 0.01 + 0.01 * inputs,
        }

    return quantise


def fp8_dynamic(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {name: made for name, made in fp8_static()(rows, columns, random).items() if name != "input_scale"}


def fp8_channels(rows: int, columns: int, random: torch.Generator) -> Parts:
    weight = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": 20 * _scales(rows, 1, random=random)}


def mxfp8(rows: int, columns: int, random: torch.Generator) -> Parts:
    weight = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
    return {"weight": weight, "weight_scale": _exponents(rows, columns, random)}


def mxfp4(rows: int, columns: int, random: torch.Generator) -> Parts:
    return {"weight_packed": _pairs(rows, columns, random), "weight_scale": _exponents(rows, columns, random)}


def nvfp4(rows: int, columns: int, random: torch.Generator) -> Parts:
    """As ModelOpt writes it. The scales of whole matrices are those of all layers: fused ones must share them."""
    return {
        "weight": _pairs(rows, columns, random),
        "weight_scale": (0.5 + torch.rand(rows, columns // 16, generator=random)).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.05 + 0.02 * random.initial_seed()),
        "input_scale": torch.tensor(0.01 + 0.002 * random.initial_seed()),
    }


def compressed_nvfp4(rows: int, columns: int, random: torch.Generator) -> Parts:
    """As compressed-tensors writes it: the scales of whole matrices divide."""
    made = nvfp4(rows, columns, random)
    return {
        "weight_packed": made["weight"],
        "weight_scale": made["weight_scale"],
        "weight_global_scale": made["weight_scale_2"].reshape(1).reciprocal(),
        "input_global_scale": made["input_scale"].reshape(1).reciprocal(),
    }


def _pairs(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    """Codes of four bits, two in a byte."""
    return torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)


def _exponents(rows: int, columns: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(120, 126, (rows, columns // GROUP), generator=random, dtype=torch.uint8)


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
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
PER_TOKEN = {"strategy": "token", "dynamic": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
FLOAT4 = FLOAT8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def w4a16(**shape: Any) -> Maker:
    """A Llama in 4 bits, as compressed-tensors writes it; `shape` replaces entries of its configuration."""
    return _llama(pack_quantized, _compressed("pack-quantized", INT4, None), **shape)


ROUTERS = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
"""Layers of a mixture that are not quantised."""
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC_FP8 = DYNAMIC | {"activation_scheme": "static"}
BLOCKS: dict[str, Any] = DYNAMIC | {"weight_block_size": [GROUP, GROUP]}


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    found = {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_scheme": None, "ignore": ["lm_head"]}
    return found | more


def one_cache_scale(directory: Path, seed: int) -> Path:
    """A Llama in FP8 with one scale for cached keys and values."""
    path = FP8["llama-fp8-static"](directory, seed)
    scales = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.01 * (seed + layer)) for layer in range(2)}
    return rewrite(path, load(path) | scales)


def gpt_oss_mxfp4(directory: Path, seed: int) -> Path:
    """A GPT-OSS as published: all experts of a layer in one tensor, in blocks of 32 codes, and an exponent of each block."""
    path, random = gpt_oss(torch.bfloat16)(directory, seed), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load(path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            blocks = _pairs(experts * rows, columns, random).view(experts, rows, -1, GROUP // 2)
            exponents = _exponents(experts * rows, columns, random).view(experts, rows, -1)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        else:
            tensors[name] = tensor
    plain = [f"model.layers.*.{part}" for part in ("self_attn", "mlp.router")] + ["model.embed_tokens", "lm_head"]
    return rewrite(path, tensors, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": plain})


FP8: dict[str, Maker] = {
    "qwen3-fp8-blocks": _llama(fp8_blocks, BLOCKS, make_qwen3, tied=False),
    "qwen3_moe-fp8-blocks": _llama(fp8_blocks, BLOCKS | {"modules_to_not_convert": ROUTERS}, make_qwen3_moe),
    "llama-fp8-static": _llama(fp8_static(), STATIC_FP8),
    "llama-fp8-dynamic": _llama(fp8_dynamic, DYNAMIC),
    "qwen3_moe-fp8-static": _llama(
        fp8_static(shared=True), STATIC_FP8 | {"modules_to_not_convert": ROUTERS}, make_qwen3_moe
    ),
}
"""Models in FP8, by the form of their scales, as published checkpoints have them. SGLang's Llama takes no blocks."""
FOR_VLLM: dict[str, Maker] = {
    "llama-w4a16-asymmetric": _llama(
        pack_quantized_asymmetric, _compressed("pack-quantized", INT4 | {"symmetric": False}, None)
    ),
    "llama-w8a8-int8-asymmetric": _llama(
        int8_asymmetric, _compressed("int-quantized", INT8, STATIC | {"symmetric": False})
    ),
    "qwen3_moe-w8a8-int8": _llama(int8_dynamic, _compressed("int-quantized", INT8, INT8 | PER_TOKEN), make_qwen3_moe),
    "llama-compressed-fp8-static": _llama(fp8_static(1), _compressed("float-quantized", FLOAT8, FLOAT8)),
    **{
        f"{name}-compressed-fp8-channels": _llama(
            fp8_channels, _compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, FLOAT8 | PER_TOKEN), make
        )
        for name, make in (("llama", make_llama), ("qwen3_moe", make_qwen3_moe))
    },
    "llama-modelopt-fp8": _llama(fp8_static(), _modelopt("FP8")),
    "qwen3_moe-modelopt-fp8": _llama(fp8_static(shared=True), _modelopt("FP8", ignore=ROUTERS), make_qwen3_moe),
    "llama-modelopt-mxfp8": _llama(mxfp8, _modelopt("MXFP8", kv_cache_quant_algo=None, exclude_modules=["lm_head"])),
    "llama-compressed-mxfp4": _llama(
        mxfp4, _compressed("mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": GROUP}, None)
    ),
    **{
        f"{name}-modelopt-nvfp4": _llama(nvfp4, _modelopt("NVFP4", group_size=16, ignore=plain), make)
        for name, make, plain in (("llama", make_llama, ROUTERS[:1]), ("qwen3_moe", make_qwen3_moe, ROUTERS))
    },
    **{
        f"{name}-compressed-nvfp4": _llama(
            compressed_nvfp4, _compressed("nvfp4-pack-quantized", FLOAT4, FLOAT4 | {"dynamic": "local"}), make
        )
        for name, make in (("llama", make_llama), ("qwen3_moe", make_qwen3_moe))
    },
    "llama-fp8-one-kv-scale": one_cache_scale,
    "gpt_oss-mxfp4": gpt_oss_mxfp4,
}
"""Formats that SGLang doesn't start with on a CPU, or that only vLLM has."""
FOR_BOTH = ("llama-w4a16-asymmetric", "llama-compressed-fp8-static", "qwen3_moe-compressed-fp8-channels")
"""Of these, those that SGLang loads, too."""
WIDE: dict[str, Any] = {"hidden_size": 128}
"""The narrowest experts that vLLM's kernels named Marlin take."""
FOUR_BITS: dict[str, Maker] = {
    "qwen3_moe-w4a16": _llama(pack_quantized, _compressed("pack-quantized", INT4, None), make_qwen3_moe, **WIDE),
    "qwen3_moe-gptq": _llama(gptq(act_order=False), GPTQ | {"desc_act": False}, make_qwen3_moe, **WIDE),
    "qwen3_moe-awq": _llama(awq, AWQ | {"modules_to_not_convert": ["mlp.gate"]}, make_qwen3_moe, **WIDE),
}
QUANTISED: dict[str, Maker] = {
    "w4a16": w4a16(),
    "w8a8-int8-static": _llama(int8_static, _compressed("int-quantized", INT8, STATIC)),
    "gptq": _llama(gptq(act_order=False), GPTQ | {"desc_act": False}),
    "gptq-act-order": _llama(gptq(act_order=True), GPTQ | {"desc_act": True}),
    "awq": _llama(awq, AWQ),
}
"""By the scheme's name."""
