"""The model that most benchmarks move. torch and transformers are imported only to make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT

__all__ = ["bench_config", "bench_model", "make_model"]


def make_model(layers: int) -> Path:
    """A random Qwen3, made once; 28 layers give 506 M parameters."""
    path = ROOT / ".models" / f"bench-qwen3-{layers}-layers"
    if not (path / "model.safetensors").exists():
        import torch
        from transformers import Qwen3ForCausalLM

        from tests.support.models import tiny_tokenizer

        torch.manual_seed(0)
        Qwen3ForCausalLM(bench_config(layers)).to(torch.bfloat16).save_pretrained(path)
        tiny_tokenizer(512).save_pretrained(path)
    return path


def bench_config(layers: int) -> Any:
    """A Qwen3 in bf16 with tied embeddings: 506 M parameters (1.01 GB) with 28 layers."""
    import torch
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=150000,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype=torch.bfloat16,
    )


def bench_model(layers: int) -> Any:
    """That model; its weights don't matter."""
    import torch
    from transformers import Qwen3ForCausalLM

    config = bench_config(layers)
    on_meta = torch.get_default_device().type == "meta"
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if not on_meta:
        model.to_empty(device="cpu")
        model.tie_weights()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.02, 0.02)
    return model
