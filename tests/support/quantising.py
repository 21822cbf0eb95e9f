"""Quantised checkpoints, made of plain tensors by other code than ours: vLLM's for FP8 in blocks and MXFP8, compressed-tensors'
for 8 bits, for NVFP4 and for the packing of INT4. For ModelOpt, which isn't installed here, stands its formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["KINDS", "as_vllm_quantises", "INT4", "SIZES", "config_of", "large", "quantised", "write_checkpoint"]

FP8 = torch.float8_e4m3fn

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
        "fp8 per tensor": {"type": "float", "strategy": "tensor"},
        "nvfp4": {"type": "float", "strategy": "tensor_group", "group_size": 16, "num_bits": 4},
        "mxfp8": {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
        "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "modelopt mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    }


KINDS = tuple(kinds())
INT4 = "int4 in groups"
SIZES = {kind: {"hidden_size": 48, "intermediate_size": 144} for kind in (INT4, "nvfp4", "modelopt nvfp4")}
SIZES |= {kind: {"hidden_size": 64, "intermediate_size": 160} for kind in ("mxfp8", "modelopt mxfp8")}
"""Sizes of a model for these kinds, whose groups fill the matrices; ranks that halve the columns cut groups, but not numbers."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that engines keep in one matrix: NVFP4's and ModelOpt's scales of matrices are theirs together."""


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
    width = 32 if "mxfp8" in kind else about.get("group_size", 1)
    for name, tensor in tensors.items():
        if not is_quantised(name, tensor) or tensor.shape[1] % width:
            found[name] = tensor
        elif kind == INT4:
            found |= _as_trained_in_int4(name, tensor, block)
        elif "nvfp4" in kind:
            make = _nvfp4_by_compressed_tensors if kind == "nvfp4" else _nvfp4_of_modelopt
            found |= make(name, tensor, _of_fused(name, tensors))
        elif "mxfp8" in kind:
            found[name], found[f"{name}_scale"] = _mxfp8_by_vllm(tensor)
        elif about.get("quant_method") == "fp8":
            found[name], found[f"{name}_scale_inv"] = as_vllm_quantises(tensor, [block, block], "scale_fmt" in about)
        elif kind == "modelopt fp8":
            found |= _fp8_of_modelopt(name, tensor, _of_fused(name, tensors))
        else:
            found[name], found[f"{name}_scale"] = _by_compressed_tensors(tensor, about)
            if about["strategy"] == "tensor":
                found[f"{name.removesuffix('weight')}input_scale"] = _measured(name).reshape(1)
    return found


def _measured(name: str) -> torch.Tensor:
    """A scale of activations, as if it had been measured: fused layers have one."""
    return torch.tensor(0.02 if any(one in name for one in FUSED[0]) else 0.03)


def _of_fused(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of a weight and of those that it is fused with, in float32."""
    layer, module, last = name.rsplit(".", 2)
    fused = next((group for group in FUSED if module in group), (module,))
    found = [tensors[other] for one in fused if (other := f"{layer}.{one}.{last}") in tensors]
    return torch.stack([one.float().abs().amax() for one in found]).amax()


def _nvfp4_by_compressed_tensors(name: str, tensor: torch.Tensor, top: torch.Tensor) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    how = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, scale_dtype=FP8
    )
    values = tensor.float()
    whole = generate_gparam(-top, top)
    highest = values.unflatten(1, (-1, 16)).abs().amax(-1)
    scales, zero_point = calculate_qparams(-highest, highest, how, global_scale=whole)
    steps = quantize(values, scales, zero_point, how, global_scale=whole)
    return {
        f"{name}_packed": pack_fp4_to_uint8(steps),
        f"{name}_scale": scales.to(FP8),
        f"{name}_global_scale": whole,
        f"{name.removesuffix('weight')}input_global_scale": _measured(name).reciprocal().reshape(1),
    }


def _nvfp4_of_modelopt(name: str, tensor: torch.Tensor, top: torch.Tensor) -> dict[str, torch.Tensor]:
    """As its `NVFP4QTensor` defines it, but for a matrix of zeros, which gets NaN there; halves go to the even code."""
    whole = top / (6.0 * 448.0) if top else torch.tensor(1.0)
    groups = tensor.float().unflatten(1, (-1, 16))
    scales = groups.abs().amax(-1) / (6.0 * whole)
    scales[scales == 0] = 1.0
    scales = scales.clamp(2**-9, 448).to(FP8)
    scaled = (groups / (scales.float() * whole)[..., None]).flatten(1)
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.searchsorted(between, scaled.abs(), right=False)
    codes += (scaled.abs()[..., None] == between[1::2]).any(-1)
    codes += 8 * (scaled < 0)
    return {
        name: (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8),
        f"{name}_scale": scales,
        f"{name}_scale_2": whole,
        f"{name.removesuffix('weight')}input_scale": _measured(name),
    }


def _fp8_of_modelopt(name: str, tensor: torch.Tensor, top: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.float() / (top / 448.0)).to(FP8),
        f"{name}_scale": top / 448.0,
        f"{name.removesuffix('weight')}input_scale": _measured(name),
    }


def _mxfp8_by_vllm(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize

    return mxfp8_e4m3_quantize(tensor)


def as_vllm_quantises(tensor: torch.Tensor, block: list[int], power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):
        return per_block_cast_to_fp8(tensor, block, power_of_two)  # type: ignore[no-any-return]


def _by_compressed_tensors(tensor: torch.Tensor, kind: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    how = QuantizationArgs(num_bits=8, symmetric=True, **kind)
    down, across = kind.get("block_structure", tensor.shape if kind["strategy"] == "tensor" else (1, tensor.shape[1]))
    values = tensor.float()
    parts = [list(row.split(across, 1)) for row in values.split(down)]
    highest = torch.stack([torch.stack([part.abs().amax() for part in row]) for row in parts])
    scales, zero_point = calculate_qparams(-highest, highest, how)
    if kind["strategy"] == "tensor":
        scales, zero_point = scales.reshape(1), zero_point.reshape(1)
    dtype = torch.int8 if kind["type"] == "int" else FP8
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
        return about | ({"ignore": ["lm_head"]} if about["quant_method"] == "modelopt" else {})
    scheme = {"num_bits": 8, "type": about["type"], "symmetric": True}
    weights = {**scheme, "dynamic": False, **about}
    static = {"fp8 per tensor": weights, "nvfp4": weights | {"dynamic": "local"}, INT4: None, "mxfp8": weights}
    packings = {INT4: "pack-quantized", "nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": static.get(kind, {**scheme, "strategy": "token", "dynamic": True}),
        "output_activations": None,
    }
    if kind == "mxfp8":
        group["input_activations"] = weights | {"dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": packings.get(kind, f"{about['type']}-quantized"),
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
