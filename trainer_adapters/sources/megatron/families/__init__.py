"""Weightwire's own Megatron architectures, one file per family. Importing this package registers them."""

from trainer_adapters.sources.megatron.families import (
    deepseek,
    ernie,
    gemma,
    glm,
    gpt_oss,
    llama,
    llama4,
    mimo,
    mixtral,
    nemotron,
    phi,
    qwen,
)

__all__ = [
    "deepseek", "ernie", "gemma", "glm", "gpt_oss", "llama", "llama4", "mimo", "mixtral", "nemotron", "phi", "qwen",
]  # fmt: skip
