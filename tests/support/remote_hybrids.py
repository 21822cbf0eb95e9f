"""Tiny checkpoints of Ling 2.5 and 3, which transformers lacks: linear attention, then latent attention, and experts."""

from __future__ import annotations

from typing import Any

from tests.support.models import SHAPE
from tests.support.multimodal import Medium
from tests.support.remote_checkpoints import remote
from tests.support.written_checkpoints import HEAD, NORMS, ROPE, ROUTED, WIDTH, Shapes, experts, mlp, model, norms

__all__ = ["HYBRIDS", "OF_A_CPU"]

HEADS = 4
INNER = HEADS * HEAD
ENTRIES: dict[str, Any] = SHAPE | ROUTED | {
    "model_type": "bailing_hybrid", "tie_word_embeddings": False, "layer_group_size": 2, "num_key_value_heads": HEADS,
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
    "use_qkv_bias": False, "use_bias": False, "use_rmsnorm": True, "norm_head": False, "router_dtype": "fp32",
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "embedding_dropout": 0.0, "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0, "rope_parameters": ROPE, "partial_rotary_factor": 0.5,
}  # fmt: skip


def matrices(**shapes: tuple[int, ...]) -> Shapes:
    return {f"attention.{name}.weight": shape for name, shape in shapes.items()}


LATENT: Shapes = matrices(
    q_a_proj=(32, WIDTH), q_a_layernorm=(32,), q_b_proj=(HEADS * 96, 32), kv_a_proj_with_mqa=(576, WIDTH),
    kv_a_layernorm=(512,), kv_b_proj=(HEADS * 64, 512), dense=(WIDTH, HEADS * 32),
)  # fmt: skip


def _ling(architecture: str, linear: Shapes, latent: Shapes, entries: dict[str, Any], **vllm: Any) -> Medium:
    def layer(number: int) -> Shapes:
        return NORMS | (latent | experts("mlp", "expert_bias") if number else linear | mlp("mlp"))

    shapes = model(layer, embedding="model.word_embeddings")
    return remote(architecture, ENTRIES | entries, shapes, attention_backend="CPU_MLA", **vllm)


HYBRIDS: dict[str, Medium] = {
    "bailing_moe_v2_5": _ling(
        "BailingMoeV2_5ForCausalLM",
        matrices(query_key_value=(3 * INNER, WIDTH), g_proj=(INNER, WIDTH), g_norm=(INNER,), dense=(WIDTH, INNER))
        | norms("attention.query_layernorm", "attention.key_layernorm", width=HEAD),
        LATENT,
        {"group_norm_size": 2},
        enable_prefix_caching=False, mamba_block_size=256,
    ),
    "bailing_moe_v3": _ling(
        "BailingMoeV3ForCausalLM",
        matrices(
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "f_proj", "g_proj"), (INNER, WIDTH)),
            **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (INNER, 1, 4)),
            b_proj=(HEADS, WIDTH), o_norm=(HEAD,), o_proj=(WIDTH, INNER),
        ) | {"attention.A_log": (HEADS,), "attention.dt_bias": (INNER,)},
        LATENT | matrices(g_proj=(HEADS, WIDTH)),
        {
            "no_kda_lora": True, "kda_safe_gate": True, "kda_lower_bound": -5.0, "short_conv_kernel_size": 4,
            "gated_attention_proj_granularity_type": "head_wise",
        },
        enable_prefix_caching=False, mamba_block_size=256,
    ),
}  # fmt: skip
"""Models of both engines. SGLang has their configuration, vLLM takes that which comes with the checkpoint."""
OF_A_CPU: dict[str, dict[str, Any]] = {
    "bailing_moe_v2_5": {
        "rope_scaling": {
            "rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.7,
            "mscale_all_dim": 0.7,
        }
    }
}  # fmt: skip
"""Entries of configurations without which SGLang has no rotary embeddings for these on a CPU."""
