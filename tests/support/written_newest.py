"""Tiny checkpoints of further models that transformers lacks, by name and shape, for `make models`."""

from __future__ import annotations

from typing import Any

from tests.support.written_checkpoints import (
    HEAD,
    INNER,
    NORMS,
    ROPE,
    TWO_HEADS,
    WIDTH,
    Shapes,
    Written,
    attention,
    mlp,
    model,
    norms,
    written,
)

__all__ = ["IN_SGLANG_TOO"]

KINDS = ["full_attention", "sliding_attention"]
OF_LLAMA = ("rope_parameters",)
QK_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", width=HEAD)


def _spark() -> Written:
    """Spark 2.5: queries, keys and values are one tensor, and each head has a gate."""
    layer = NORMS | mlp("mlp") | {
        "self_attn.q_k_v_proj.weight": (8 * HEAD, WIDTH),
        "self_attn.g_proj.weight": (4, WIDTH),
        "self_attn.out_proj.weight": (WIDTH, 4 * HEAD),
    }  # fmt: skip
    entries = {
        "model_type": "spark2_5", "layer_types": KINDS, "sliding_window": 32, "headwise_attn_output_gate": True,
        "rope_parameters": {kind: ROPE | {"partial_rotary_factor": 1.0} for kind in KINDS},
    }  # fmt: skip
    return written("Spark2_5ForCausalLM", entries, model(lambda _: layer, embedding="model.embedding"))


def _iquest_q1() -> Written:
    """IQuest-Q1: all experts of a layer are two tensors; its loader refuses a checkpoint that lacks a tensor."""

    def layer(number: int) -> Shapes:
        found = norms("attention_norm", "attn_out_norm", "feed_forward_norm") | attention("self_attn") | QK_NORMS
        found |= {"self_attn.sink_k": (2, HEAD)}
        if not number:
            return found | norms("ffn_out_norm") | mlp("mlp")
        found |= {"mlp.experts.fc": (4, 128, WIDTH), "mlp.experts.proj": (4, WIDTH, 64)}
        return found | {"mlp.router.weight": (4, WIDTH)}

    entries = {
        "model_type": "iquest_q1", "dense_intermediate_size": INNER, "intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "first_layers_types": KINDS[:1], "hybrid_layers_types_block": KINDS[1:],
        "num_hybrid_layers_block": 1, "last_layers_types": [], "sliding_window": 32, "rotary_dim": HEAD, "mlp_only_layers": [0],
        "no_rope_layers": [], "rope_parameters": ROPE, "enable_lm_head_fp32": True,
    }  # fmt: skip
    return written("IQuestQ1ForCausalLM", entries, model(layer))


def _nanbeige() -> Written:
    """Nanbeige: a Llama whose layers are passed twice."""
    entries = {
        "model_type": "nanbeige",
        "num_loops": 2,
        "skip_loop_final_norm": False,
        "rope_theta": 10000.0,
        **TWO_HEADS,
    }
    return written(
        "NanbeigeForCausalLM",
        entries | {"rope_scaling": None},
        model(lambda _: NORMS | attention("self_attn", 2, 2) | mlp("mlp")),
        without=("head_dim", *OF_LLAMA),
    )


def _xverse_moe() -> Written:
    """Experts whose weights are parts of one tensor."""
    layer = NORMS | attention("self_attn", 2, 2) | {"mlp.router.weight": (4, WIDTH)} | mlp("mlp.shared_experts", 64)
    for number in range(4):
        layer |= mlp(f"mlp.experts.{number}", 64)
    entries = {"num_experts": 4, "moe_top_k": 2, "num_shared_experts": 1, "intermediate_size": 64, **TWO_HEADS}
    return written("XverseMoeForCausalLM", entries, model(lambda _: layer))


def _sdar(experts: bool) -> Written:
    """SDAR: a Qwen3 that decodes by blocks."""
    layer = NORMS | attention("self_attn") | QK_NORMS
    if experts:
        layer |= {"mlp.gate.weight": (4, WIDTH)}
        for number in range(4):
            layer |= mlp(f"mlp.experts.{number}", 64)
        entries: dict[str, Any] = {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
        return written("SDARMoeForCausalLM", entries, model(lambda _: layer))
    return written("SDARForCausalLM", {"attention_bias": False}, model(lambda _: layer | mlp("mlp")))


def _phi3_small() -> Written:
    """Phi-3-small: each key head's queries stand beside it, gates and values are interleaved, and the head is tied."""
    layer: Shapes = {}
    for name in ("input_layernorm", "post_attention_layernorm"):
        layer |= norms(name) | norms(name, part="bias")
    for name, rows, columns in (
        ("self_attn.query_key_value", 3 * WIDTH, WIDTH),
        ("self_attn.dense", WIDTH, WIDTH),
        ("mlp.up_proj", 2 * INNER, WIDTH),
        ("mlp.down_proj", WIDTH, INNER),
    ):
        layer |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    shapes = model(lambda _: layer, norm="model.final_layernorm") | norms("model.final_layernorm", part="bias")
    del shapes["lm_head.weight"]
    entries = {
        "hidden_act": "gegelu", "gegelu_limit": 20.0, "layer_norm_epsilon": 1e-5, "mup_attn_multiplier": 1.0,
        "mup_embedding_multiplier": 10.0, "mup_use_scaling": True, "mup_width_multiplier": 8.0, "rope_embedding_base": 10000.0,
        "rope_position_scale": 1.0, "dense_attention_every_n_layers": 1, "blocksparse_block_size": 64,
        "blocksparse_homo_head_pattern": False, "blocksparse_num_local_blocks": 16, "blocksparse_vert_stride": 8,
        "blocksparse_triton_kernel_block_size": 64, "dummy_token_indices": [], "tie_word_embeddings": True, **TWO_HEADS,
    }  # fmt: skip
    return written("Phi3SmallForCausalLM", entries, shapes, without=("head_dim",))


IN_SGLANG_TOO: dict[str, Written] = {
    "spark2_5": _spark(),
    "iquest_q1": _iquest_q1(),
    "nanbeige": _nanbeige(),
    "xverse_moe": _xverse_moe(),
    "sdar": _sdar(experts=False),
    "sdar_moe": _sdar(experts=True),
    "phi3_small": _phi3_small(),
}
"""Models of SGLang that vLLM lacks."""
