"""Tiny checkpoints of models that read images, made of those of their relatives, for `make models`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from tests.support.checkpoints import load, rewrite
from tests.support.multimodal import FAMILIES, Medium

__all__ = ["REST"]

Tensors = dict[str, torch.Tensor]
FOURIER = {
    "rope_type": "default", "rope_theta": 10000.0, "fope_init_factor": 0.1, "fope_sep_head": True, "num_inv_freq": 12,
}  # fmt: skip


def _interns1_pro() -> Medium:
    """A Qwen3-VL with experts whose rotary embeddings are learned: sums of frequencies, which the engine adds up once."""
    base = FAMILIES["qwen3-vl-moe"]

    def make(directory: Path, seed: int) -> Path:
        path = base.make(directory, seed)
        random = torch.Generator().manual_seed(seed)
        known = json.loads((path / "config.json").read_text())
        shape = (known["text_config"]["num_key_value_heads"], 12, 12)
        made = {
            f"model.language_model.rotary_emb.{part}_coef": torch.eye(12) + 0.1 * torch.randn(shape, generator=random)
            for part in ("cos", "sin")
        }
        text = known["text_config"] | {"rope_parameters": FOURIER, "tie_word_embeddings": False}
        return rewrite(
            path,
            _each_expert(load(path)) | made,
            architectures=["InternS1ProForConditionalGeneration"],
            text_config=text,
        )

    return dataclasses.replace(base, make=make)


def _each_expert(tensors: Tensors) -> Tensors:
    """A Qwen3-VL with a tensor for each expert's projection, not one for those of all."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        at, stacked, part = name.partition(".experts.")
        if not stacked:
            made[name] = tensor
            continue
        names = ("down_proj",) if part == "down_proj" else ("gate_proj", "up_proj")
        for number, weight in enumerate(tensor.transpose(1, 2)):
            for projection, rows in zip(names, weight.chunk(len(names)), strict=True):
                made[f"{at}.experts.{number}.{projection}.weight"] = rows.contiguous()
    return made


REST: dict[str, Medium] = {"interns1-pro": _interns1_pro()}
