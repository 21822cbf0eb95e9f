"""Tiny checkpoints of models that read images, made of those of their relatives, for `make models`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import load, rewrite
from tests.support.multimodal import FAMILIES, LINEAR, QWEN_VISION, Medium, qwen
from tests.support.multimodal_newest import TEXT_ONLY, matrices, v4_layers
from tests.support.remote_checkpoints import internvl_chat, linear, remote
from tests.support.written_checkpoints import WORDS, Shapes, norms

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


def _v4_tower(wide: int, narrow: int) -> Shapes:
    shapes = norms("vision.norm", width=narrow) | linear("vision.patch_embed.proj", narrow, 3 * 14 * 14)
    for number in range(2):
        at = f"vision.blocks.{number}"
        shapes |= norms(f"{at}.norm1", f"{at}.norm2", width=narrow) | linear(f"{at}.attn.wqkv", 3 * narrow, narrow)
        shapes |= linear(f"{at}.attn.wo", narrow, narrow) | linear(f"{at}.mlp.w1", 128, narrow, bias=False)
        shapes |= linear(f"{at}.mlp.w2", narrow, 64, bias=False)
    return shapes | linear("aligner.w1", wide, 9 * narrow) | linear("aligner.w2", wide, wide)


def _deepseek_v4_vision() -> Medium:
    """DeepSeek-V4 with a tower; the router has a bias of its own for images."""
    base, wide, narrow = TEXT_ONLY["deepseek_v4"][0], 128, 32
    shapes = _v4_tower(wide, narrow) | {f"layers.{number}.ffn.gate.bias_vl": (4,) for number in range(2)}
    shapes |= {f"image_{part}": (wide,) for part in ("start", "end", "newline", "pad")}

    def make(directory: Path, seed: int) -> Path:
        path = base.make(directory, seed)
        random = torch.Generator().manual_seed(seed)
        made = {name: (0.2 * torch.randn(shape, generator=random)).to(torch.bfloat16) for name, shape in shapes.items()}
        return rewrite(
            path, load(path) | made, architectures=["DeepseekV4ForConditionalGeneration"], vision_n_layers=2,
            vision_dim=narrow, vision_n_heads=2, vision_inter_dim=64,
        )  # fmt: skip

    return dataclasses.replace(base, make=make, vllm=base.vllm | {"skip_mm_profiling": True})


def _deepseek_v41() -> Medium:
    """DeepSeek-V4.1: layers share what they have compressed and indexed; the first layer has a sliding window only."""
    wide, narrow, head, ranks, rows = 128, 32, 512, 64, 32

    shapes: Shapes = {"embed.weight": (WORDS, wide), "head.weight": (WORDS, wide), "norm.weight": (wide,)}
    shapes |= v4_layers(wide, head, ranks, rows, 64, ("bias", "bias_vl"))
    shapes |= matrices("layers.1.attn.compressor", wkv=(head, wide), wgate=(head, wide), norm=(head,))
    shapes |= matrices(
        "layers.1.attn.indexer", wq_b=(4 * 128, ranks), weights_proj=(4, wide), wk=(128, head), k_norm=(128,)
    )
    shapes |= _v4_tower(wide, narrow) | {f"image_{part}": (wide,) for part in ("start", "end", "newline")}
    return remote(
        "DeepseekV41ForCausalLM",
        {
            "model_type": "deepseek_v41", "expert_dtype": "bf16", "tie_word_embeddings": False, "eos_token_id": 0,
            "vision_config": {
                "num_hidden_layers": 2, "hidden_size": narrow, "num_attention_heads": 2, "intermediate_size": 64,
            },
            "text_config": {
                "vocab_size": WORDS, "hidden_size": wide, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 1, "head_dim": head, "qk_rope_head_dim": 64, "q_lora_rank": ranks,
                "o_lora_rank": rows, "o_groups": 2, "sliding_window": 32, "compress_ratios": [0, 2],
                "kv_source_layer_ids": [1], "index_source_layer_ids": [1], "compress_rope_theta": 160000.0,
                "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4, "hc_mult": 4, "hc_eps": 1e-6,
                "hc_sinkhorn_iters": 20, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                "moe_intermediate_size": 64, "num_hash_layers": 0, "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus",
                "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu",
                "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 0, "max_position_embeddings": 1024, "rope_theta": 10000.0,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
                    "beta_slow": 1,
                },
            },
        },
        shapes, dtype="bfloat16", code=False, skip_mm_profiling=True,
    )  # fmt: skip


QWEN4: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "hc_lowrank": 12, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64,
    "indexer_compress_ratio": 4, "output_gate_type": "silu", "ple_layer_ids": [1], "ple_embed_dim": 32, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2, "eos_token_id": 0,
    "layer_types": ["linear_attention", "indexed_attention"],
}  # fmt: skip
"""With embeddings of n-grams in the first layer."""

ON_THE_DEVICE: dict[str, Any] = {"engram_config": {"cpu_offload": False}}
"""Tables of n-grams lie beside the other weights: on a GPU a table in the host's memory is refused."""

REST: dict[str, Medium] = {
    "h2ovl": internvl_chat("H2OVLChatModel", "h2ovl_chat", use_msac=False),
    "skywork-r1v": internvl_chat("SkyworkR1VChatModel", "skywork_chat"),
    "nvlm-d": internvl_chat(
        "NVLM_D",
        "NVLM_D",
        heads=9,
        inner=128,
        bias=False,
        tokens=("<Image>", "</Image>", "<|vision_pad|>"),
        place=("<image>", 13),
    ),
    "qwen4-exp": qwen(
        "Qwen4Exp", LINEAR | QWEN4, QWEN_VISION | {"deepstack_visual_indexes": []}, dtype="bfloat16", **ON_THE_DEVICE
    ),
    "deepseek_v4.1": _deepseek_v41(),
    "interns1-pro": _interns1_pro(),
    "deepseek_v4-vision": _deepseek_v4_vision(),
}
