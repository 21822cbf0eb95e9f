"""Llama, and models whose parameters have the same names."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MLP, MODEL, NORMS

__all__ = ["llama"]


@megatron_architecture("llama", "mistral", "qwen2", "seed_oss")
def llama() -> Architecture:
    return Architecture((*MODEL, *NORMS, *ATTENTION, *MLP))
