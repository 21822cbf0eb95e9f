"""Quantised checkpoints, made of plain tensors by other code than ours: vLLM's for FP8 in blocks, compressed-tensors' for 8 bits
with a scale per channel or per block and for the packing of four bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["KINDS", "as_vllm_quantises", "INT4", "SIZES", "config_of", "large", "quantised", "write_checkpoint"]

BLOCK = 16
"""Rows and columns of a block. Small beside the tiny models' matrices, whose sizes are no multiples of it."""


def kinds(block: int = BLOCK) -> dict[str, dict[str, Any]]:
    """`quantization_config` of FP8 in blocks, or what compressed-tensors says of weights."""
    return {
        "fp8 in blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]},
        "fp8 in blocks, powers of two": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
            "scale_fmt": "ue8m0",
        },
        "int8 per channel": {"type": "int", "strategy": "channel"},
        "fp8 per channel": {"type": "float", "strategy": "channel"},
        "fp8 per block": {"type": "float", "strategy": "block", "block_structure": [block, block]},
        "int4 in groups": {"type": "int", "strategy": "group", "group_size": block, "num_bits": 4},
    }


KINDS = tuple(kinds())
INT4 = "int4 in groups"
SIZES = {INT4: {"hidden_size": 48, "intermediate_size": 144}}
"""Sizes of a model for this kind, whose groups fill the matrices; ranks that halve their columns cut groups, but not words."""


def large() -> dict[str, torch.Tensor]:
    """Two matrices, each of more than a piece, which ends within the last blocks of 128 rows; these have the largest values."""
    rows = torch.arange(768.0)[:, None]
    return {f"{name}_proj.weight": (rows + torch.arange(3072)).bfloat16() for name in "ab"}


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and name.endswith("_proj.weight")


def quantised(tensors: Mapping[str, torch.Tensor], kind: str, block: int = BLOCK) -> dict[str, torch.Tensor]:
    """What the checkpoint of these tensors has."""
    found: dict[str, torch.Tensor] = {}
    about = kinds(block)[kind]
    for name, tensor in tensors.items():
        if not is_quantised(name, tensor):
            found[name] = tensor
        elif about.get("num_bits") == 4:
            if tensor.shape[1] % block:
                found[name] = tensor
            else:
                found |= _as_trained_in_int4(name, tensor, block)
        elif about.get("quant_method") == "fp8":
            found[name], found[f"{name}_scale_inv"] = as_vllm_quantises(tensor, [block, block], "scale_fmt" in about)
        else:
            found[name], found[f"{name}_scale"] = _by_compressed_tensors(tensor, about)
    return found


def as_vllm_quantises(tensor: torch.Tensor, block: list[int], power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):
        return per_block_cast_to_fp8(tensor, block, power_of_two)  # type: ignore[no-any-return]


def _by_compressed_tensors(tensor: torch.Tensor, kind: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    how = QuantizationArgs(num_bits=8, symmetric=True, **kind)
    down, across = kind.get("block_structure", (1, tensor.shape[1]))
    values = tensor.float()
    parts = [list(row.split(across, 1)) for row in values.split(down)]
    highest = torch.stack([torch.stack([part.abs().amax() for part in row]) for row in parts])
    scales, zero_point = calculate_qparams(-highest, highest, how)
    dtype = torch.int8 if kind["type"] == "int" else torch.float8_e4m3fn
    return quantize(values, scales, zero_point, how, dtype=dtype), scales


def _as_trained_in_int4(name: str, tensor: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """The grid of quantisation-aware training, as slime's `_FakeInt4QuantizationSTE` defines it."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rows, columns = tensor.shape
    grouped = tensor.float().view(rows, columns // group, group)
    scales = torch.clamp(grouped.abs().amax(-1, keepdim=True) / 7, min=1e-5)
    steps = torch.clamp(torch.round(grouped / scales), -7, 7).view(rows, columns)
    return {
        f"{name}_packed": pack_to_int32(steps.to(torch.int8), 4),
        f"{name}_scale": scales.squeeze(-1).to(tensor.dtype),
        f"{name}_shape": torch.tensor([rows, columns]),
    }


def config_of(kind: str, block: int = BLOCK) -> dict[str, Any]:
    """`quantization_config` of a checkpoint."""
    about = kinds(block)[kind]
    if "quant_method" in about:
        return about
    scheme = {"num_bits": 8, "type": about["type"], "symmetric": True}
    packed = about["strategy"] == "group"
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "dynamic": False, **about},
        "input_activations": None if packed else {**scheme, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "pack-quantized" if packed else f"{about['type']}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def write_checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor], kind: str, block: int = BLOCK) -> Path:
    """Writes what `quantised` returns, and a config that says how; no model can be made of it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"quantization_config": config_of(kind, block)}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
