"""Weightwire's own Megatron architectures, one file per family. Importing this package registers them."""

from trainer_adapters.sources.megatron.families import deepseek, llama, qwen

__all__ = ["deepseek", "llama", "qwen"]
