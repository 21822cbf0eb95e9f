"""More tiny checkpoints than `models.py` has: one for each kind of model whose weights an engine keeps in a form of its own.

Each is made from a seed, without the network. Two seeds are two versions of one model: every tensor differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models import SHAPE, make_llama, make_qwen3, make_qwen3_moe, save_model

__all__ = ["MAKERS", "in_w8a8", "load", "make", "rewrite"]

Maker = Callable[[Path, int], Path]


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, in its own order of names."""
    return dict(load_file(checkpoint / "model.safetensors"))


def rewrite(checkpoint: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Replaces the tensors of a checkpoint, and entries of its `config.json`."""
    save_file(
        {n: t.contiguous().clone() for n, t in tensors.items()}, checkpoint / "model.safetensors", {"format": "pt"}
    )
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config, indent=2))
    return checkpoint


def make(kind: str, directory: Path, seed: int) -> Path:
    """One checkpoint of `MAKERS` in `directory`."""
    return MAKERS[kind](directory, seed)


# --- plain models -----------------------------------------------------------------------------------------------------


def maker_of(config: str, model: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Maker:
    """A model of transformers by its two classes; an override that is `REMOVED` removes an entry of `SHAPE`."""

    def build(directory: Path, seed: int) -> Path:
        import transformers

        shape = SHAPE | {"tie_word_embeddings": False} | overrides
        made = getattr(transformers, config)(**{name: v for name, v in shape.items() if v is not REMOVED})
        path = save_model(getattr(transformers, model), made, directory, seed=seed, dtype=dtype)
        return rewrite(path, {name: _lively(name, tensor, seed) for name, tensor in load(path).items()})

    return build


REMOVED = object()
NO_HEAD_DIM = {"head_dim": REMOVED}
HALF_HEADS = {"num_attention_heads": 2, "num_key_value_heads": REMOVED, "head_dim": REMOVED}
"""Heads of 32, the smallest that vLLM's attention on a CPU takes without another kernel."""


def _lively(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Biases of experts start as zeros in every seed; two versions must differ there as well."""
    return noise(tensor, seed) if tensor.dim() > 1 and not tensor.any() else tensor


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def gpt_oss(dtype: torch.dtype) -> Maker:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 32}
    return maker_of("GptOssConfig", "GptOssForCausalLM", dtype=dtype, **experts)


def dense_and_moe(directory: Path, seed: int) -> Path:
    """A Qwen3-MoE with a dense first layer and biases on queries, keys and values: every kind of part that is left out of a
    manifest, in one engine of vLLM. It has no place for a bias of the attention's output, and SGLang's no dense layer."""
    dense = {"attention_bias": True, "mlp_only_layers": [0], "decoder_sparse_step": 1}
    path = maker_of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **EXPERTS, **dense)(directory, seed)
    return rewrite(path, {n: t for n, t in load(path).items() if not n.endswith("o_proj.bias")})


# --- checkpoints that say one thing and ship another ------------------------------------------------------------------


def head_shipped(*, equal: bool) -> Maker:
    """A Llama whose configuration ties the head, and whose checkpoint has an `lm_head.weight` all the same: equal to the
    embedding (vLLM builds two parameters and ties them again after loading), or not (they stay two)."""

    def build(directory: Path, seed: int) -> Path:
        path = make_llama(directory, seed=seed, tied=True, dtype=torch.float32)
        tensors = load(path)
        embedding = tensors["model.embed_tokens.weight"]
        head = embedding if equal else noise(embedding, seed)
        return rewrite(path, tensors | {"lm_head.weight": head})

    return build


# --- quantised checkpoints --------------------------------------------------------------------------------------------

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def w8a8_int8(directory: Path, seed: int) -> Path:
    """A Llama in W8A8."""
    return in_w8a8(make_llama(directory, seed=seed, dtype=torch.bfloat16))


def in_w8a8(path: Path) -> Path:
    """Rewrites a checkpoint as compressed-tensors writes W8A8: int8 weights with a scale per output channel, activations scaled
    per token while running."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load(path).items():
        if name.split(".")[-2] not in _LINEAR:
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensor.float() / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale  # float32, as vLLM keeps it
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": scheme | {"strategy": "channel", "dynamic": False},
        "input_activations": scheme | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return rewrite(
        path, tensors, quantization_config=_compressed(config_groups={"group_0": group}, format="int-quantized")
    )


def fp8_kv_scales(*, placeholders: bool) -> Maker:
    """A Llama in bfloat16 whose checkpoint brings the scales of an fp8 KV cache, one of each kind per layer; with
    `placeholders` also what the engine loads and then drops (the scale of queries, the zero points)."""

    def build(directory: Path, seed: int) -> Path:
        path = make_llama(directory, seed=seed, dtype=torch.bfloat16)
        tensors = load(path)
        for layer in range(SHAPE["num_hidden_layers"]):
            prefix = f"model.layers.{layer}.self_attn."
            for i, kind in enumerate(("k", "v")):
                # So wide a scale leaves few steps: another version's scale shows in the log-probabilities.
                tensors[f"{prefix}{kind}_scale"] = torch.tensor([0.01 * (1 + seed + 2 * layer + i)])
            if placeholders:
                tensors[f"{prefix}q_scale"] = torch.tensor([0.5 + seed])
                tensors |= {f"{prefix}{kind}_zero_point": torch.zeros(1, dtype=torch.bfloat16) for kind in "qkv"}
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        compressed = _compressed(config_groups={}, kv_cache_scheme=scheme, format="dense")
        return rewrite(path, tensors, quantization_config=compressed)

    return build


def _compressed(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **fields,
    }


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(like.shape, generator=generator).mul(0.2).to(like.dtype)


def _existing(function: Callable[..., Path], **options: Any) -> Maker:
    return lambda directory, seed: function(directory, seed=seed, dtype=torch.float32, **options)


MAKERS: dict[str, Maker] = {
    "llama": _existing(make_llama),
    "llama-padded": _existing(make_llama, vocab_size=257),
    "qwen3": _existing(make_qwen3, tied=True),
    "qwen3-moe": _existing(make_qwen3_moe),
    "qwen2": maker_of("Qwen2Config", "Qwen2ForCausalLM", **NO_HEAD_DIM, num_attention_heads=2),
    "opt": maker_of(
        "OPTConfig",
        "OPTForCausalLM",
        **HALF_HEADS,
        ffn_dim=128,
        word_embed_proj_dim=64,
        init_std=0.2,
        do_layer_norm_before=True,
        intermediate_size=REMOVED,
    ),
    "gpt2": maker_of("GPT2Config", "GPT2LMHeadModel", **HALF_HEADS, n_positions=1024, intermediate_size=REMOVED),
    "bloom": maker_of(
        "BloomConfig", "BloomForCausalLM", **HALF_HEADS, tie_word_embeddings=True, intermediate_size=REMOVED
    ),
    "apertus": maker_of(
        "ApertusConfig", "ApertusForCausalLM", **NO_HEAD_DIM, num_attention_heads=2, dtype=torch.bfloat16
    ),
    "gemma3": maker_of("Gemma3TextConfig", "Gemma3ForCausalLM", sliding_window=32, tie_word_embeddings=True),
    "mixtral": maker_of("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "gpt-oss-float16": gpt_oss(torch.float16),
    "gpt-oss-bfloat16": gpt_oss(torch.bfloat16),
    "dense-and-moe": dense_and_moe,
    "qwen3-moe-biased": maker_of("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **EXPERTS, attention_bias=True),
    "retied-head": head_shipped(equal=True),
    "shipped-head": head_shipped(equal=False),
    "w8a8-int8": w8a8_int8,
    "fp8-kv-scales": fp8_kv_scales(placeholders=False),
    "fp8-kv-scales-whole": fp8_kv_scales(placeholders=True),
}
"""Maker of each kind: a directory and a seed."""
