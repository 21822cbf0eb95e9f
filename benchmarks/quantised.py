"""The benchmarks' Qwen3 as compressed-tensors writes it in 8 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.model import make_model

__all__ = ["make_int8"]


def make_int8(directory: Path) -> Path:
    """W8A8: int8 weights with a scale per row; the engine scales activations per token."""
    model = make_model(28)
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors |= {name: (tensor.float() / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": scheme | {"strategy": "channel", "dynamic": False},
        "input_activations": scheme | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
