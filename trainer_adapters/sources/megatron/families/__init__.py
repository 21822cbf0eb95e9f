"""Weightwire's own Megatron architectures, one file per family. Importing this package registers them."""

from trainer_adapters.sources.megatron.families import (
    deepseek,
    gemma,
    glm,
    gpt_oss,
    llama,
    mimo,
    mixtral,
    nemotron,
    qwen,
)

__all__ = ["deepseek", "gemma", "glm", "gpt_oss", "llama", "mimo", "mixtral", "nemotron", "qwen"]
