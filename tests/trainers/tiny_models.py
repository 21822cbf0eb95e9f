"""Tiny models of transformers: those that it holds in memory otherwise than checkpoints have them, and a few others."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

__all__ = ["MODELS", "WITH_IMAGES", "checkpoint_of", "tiny"]

BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED = {"intermediate_size": 24, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPED = {"intermediate_size": 24, "moe_intermediate_size": 10, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
DEEP = {**GROUPED, "n_shared_experts": 1, "first_k_dense_replace": 1}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ALL_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
SECOND_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**SHARED, "num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 8}),
    "axk1": ("AXK1", {**DEEP, **LATENT}),
    "cohere2_moe": ("Cohere2Moe", {**ALL_SPARSE, **SLIDING, "intermediate_size": 10, "num_experts": 4}),
    "deepseek_v2": ("DeepseekV2", {**DEEP, **LATENT}),
    "deepseek_v3": ("DeepseekV3", {**DEEP, **LATENT}),
    "deepseek_v32": ("DeepseekV32", {**DEEP, **LATENT, **INDEXED}),
    "dots1": ("Dots1", DEEP),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 10, "intermediate_size": 24},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**SHARED, **SECOND_SPARSE, **SLIDING, "num_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "flex_olmo": ("FlexOlmo", {"intermediate_size": 10, "num_experts": 3}),
    "glm4_moe": ("Glm4Moe", {**DEEP, "head_dim": 8}),
    "glm4_moe_lite": ("Glm4MoeLite", {**DEEP, **LATENT}),
    "glm_moe_dsa": ("GlmMoeDsa", {**DEEP, **LATENT, **INDEXED}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 10, "intermediate_size": 24, "head_dim": 8},
    ),
    "jamba": (
        "Jamba",
        {"intermediate_size": 24, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 2},
    ),
    "laguna": (
        "Laguna",
        {
            **SHARED,
            **SECOND_SPARSE,
            **SLIDING,
            "num_experts": 4,
            "num_attention_heads_per_layer": [2, 2],
            "head_dim": 8,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**SHARED, "num_experts": 4, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**LATENT, "n_routed_experts": 4, "zero_expert_num": 1, "moe_topk": 2, "expert_ffn_hidden_size": 10}
        | {"ffn_hidden_size": 24, "num_layers": 2},
    ),
    "mellum": ("Mellum", {**SHARED, **ALL_SPARSE, "num_experts": 3, "head_dim": 8}),
    "mimo_v2_flash": ("MiMoV2Flash", {**GROUPED, **SECOND_SPARSE, **SLIDING, "head_dim": 8, "v_head_dim": 8}),
    "minimax": (
        "MiniMax",
        {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8, "layer_types": LINEAR["layer_types"]},
    ),
    "minimax_m2": ("MiniMaxM2", {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8, "rotary_dim": 4}),
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 3}),
    "olmoe": ("Olmoe", {"intermediate_size": 10, "num_experts": 3}),
    "phimoe": ("Phimoe", {"intermediate_size": 24, "num_local_experts": 3}),
    "qwen2_moe": ("Qwen2Moe", {**SHARED, "num_experts": 3}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**SHARED, **LINEAR, "num_experts": 3, "head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {**SHARED, "num_experts": 3, "head_dim": 8}),
    "qwen3_next": ("Qwen3Next", {**SHARED, **LINEAR, "num_experts": 3, "head_dim": 8}),
    "solar_open": ("SolarOpen", {**DEEP, "head_dim": 8}),
    "granitemoe": ("GraniteMoe", {"intermediate_size": 10, "num_local_experts": 3}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "intermediate_size": 10,
            "num_local_experts": 3,
            "shared_intermediate_size": 12,
            "layer_types": ["mamba", "attention"],
        }
        | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "hybrid_override_pattern": "ME*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "n_routed_experts": 3,
        }
        | {
            "moe_intermediate_size": 10,
            "moe_shared_expert_intermediate_size": 12,
            "intermediate_size": 24,
            "head_dim": 8,
        }
        | {"n_group": 1, "topk_group": 1, "num_hidden_layers": 3, "ssm_state_size": 8},
    ),
    "hrm_text": (
        "HrmText",
        {"intermediate_size": 24, "num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 2, "L_bp_cycles": [1]},
    ),
    "gpt_neox": ("GPTNeoX", {"intermediate_size": 24}),
    "gpt_oss": ("GptOss", {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8}),
    "qwen3": ("Qwen3", {"intermediate_size": 24, "head_dim": 8}),
}


VISION = {"depth": 1, "num_heads": 2, "patch_size": 4}
PATCHES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    "image_size": 8,
    "patch_size": 4,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {"intermediate_size": 24, "rope_parameters": SECTIONS},
        {**VISION, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**SHARED, "num_experts": 3, "head_dim": 8},
        {**VISION, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "deepstack_visual_indexes": [0]},
    ),
    "gemma3": ("Gemma3", {"intermediate_size": 24, "head_dim": 8}, PATCHES),
    "llava": (
        "Llava",
        {"intermediate_size": 24, "model_type": "llama"},
        {**PATCHES, "model_type": "clip_vision_model"},
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoe",
        {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": [10, 6], "moe_num_shared_experts": 1}
        | {"intermediate_size": 24, "rope_parameters": SECTIONS},
        {**VISION, "hidden_size": 16, "intermediate_size": 24},
    ),
}
"""Models of text and images: the options of both parts."""


def tiny(model_type: str, **text_options: Any) -> Any:
    """A model of this type with random weights; its router's bias isn't zero. `text_options`: of the text part of one that reads
    images."""
    torch.manual_seed(13)
    if model_type in WITH_IMAGES:
        stem, text, vision = WITH_IMAGES[model_type]
        config = getattr(transformers, f"{stem}Config")(
            text_config={**BASE, **text, **text_options}, vision_config=vision
        )
        model = getattr(transformers, f"{stem}ForConditionalGeneration")(config)
    else:
        stem, options = MODELS[model_type]
        kind = f"{stem}TextConfig" if model_type.endswith("_moe_text") else f"{stem}Config"
        model = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, kind)(**(BASE | options)))
    assert model.config.model_type == model_type
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            tensor.normal_()
    return model


def checkpoint_of(model: Any) -> dict[str, torch.Tensor]:
    """What `save_pretrained` writes; of Qwen3-VL-MoE, the experts are transposed, as published checkpoints have them. In a
    process group rank 0 writes, and the others get nothing."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        written = Path(directory) / "model.safetensors"
        tensors = load_file(written) if written.exists() else {}
    turned = "mlp.experts." if model.config.model_type == "qwen3_vl_moe" else "\0"
    return {name: tensor.transpose(1, 2).contiguous() if turned in name else tensor for name, tensor in tensors.items()}
