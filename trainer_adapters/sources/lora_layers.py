"""Whether PEFT put adapters into a model. PEFT is not imported for that: where it never was, no model has any."""

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
    """Raises `ArgumentError` for a model with adapters whose names nobody renames: no engine knows PEFT's names, and the base
    weights alone are not what was trained."""
    if rename is None and has_lora_layers(model):
        raise ArgumentError(
            "this model has adapters of PEFT",
            hint="for LoRA use MergedLoRAAdapter, which sends the base model with the adapters merged in, or LoRAAdapter for the "
            "adapter alone; `update(model)` finds the first by itself",
            side="trainer",
        )
