"""Detects PEFT's adapters in a model, without importing PEFT: if nobody imported it, no model has any."""

from __future__ import annotations

import sys
from typing import Any

import torch

from inference_plugin.wire.errors import ArgumentError

__all__ = ["has_lora_layers", "refuse_lora_layers"]


def has_lora_layers(model: torch.nn.Module) -> bool:
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(part, tuners.BaseTunerLayer) for part in model.modules())


def refuse_lora_layers(model: torch.nn.Module, rename: object) -> None:
    """Raises `ArgumentError` for a model with adapters, unless a `rename` is given: no engine knows PEFT's names, and the base
    weights alone are not what was trained."""
    if rename is None and has_lora_layers(model):
        raise ArgumentError(
            "this model has PEFT adapters",
            hint="for LoRA use MergedLoRAAdapter, which sends the base model with the adapters merged in, or LoRAAdapter for the "
            "adapter alone; `update(model)` finds the first by itself",
            side="trainer",
        )
