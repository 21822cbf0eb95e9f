"""Tiny checkpoints of further models that transformers lacks, by name and shape, for `make models`."""

from __future__ import annotations

from typing import Any

from tests.support.models import SHAPE
from tests.support.multimodal import Medium
from tests.support.remote_checkpoints import remote
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

__all__ = ["INKLING", "IN_SGLANG_TOO", "KIMI_K3"]

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
    "nanbeige": _nanbeige(),
    "xverse_moe": _xverse_moe(),
    "sdar": _sdar(experts=False),
    "sdar_moe": _sdar(experts=True),
    "phi3_small": _phi3_small(),
}
"""Models of SGLang that vLLM lacks."""


def _kimi_k3() -> Medium:
    """The text of Kimi-K3: as Kimi-Linear, with gates of full rank, experts of lower rank, and learned residuals."""
    heads, size = 2, 128
    inner = heads * size

    def matrices(at: str, **shapes: tuple[int, ...]) -> Shapes:
        return {f"{at}.{name}.weight": shape for name, shape in shapes.items()}

    def layer(number: int) -> Shapes:
        at = "self_attn"
        found = NORMS | norms("self_attention_res_norm", "mlp_res_norm")
        found |= {f"{name}_res_proj.weight": (1, WIDTH) for name in ("self_attention", "mlp")}
        if not number:
            found |= matrices(at, **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), (inner, WIDTH)))
            found |= matrices(at, **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), (inner, 1, 4)))
            found |= matrices(at, f_a_proj=(size, WIDTH), f_b_proj=(inner, size), b_proj=(heads, WIDTH), o_norm=(size,))
            found |= matrices(at, o_proj=(WIDTH, inner)) | {f"{at}.A_log": (heads,), f"{at}.dt_bias": (inner,)}
            return found | mlp("mlp")
        found |= matrices(
            at, q_a_proj=(32, WIDTH), q_a_layernorm=(32,), q_b_proj=(4 * 96, 32), kv_a_proj_with_mqa=(576, WIDTH),
            kv_a_layernorm=(512,), kv_b_proj=(4 * 64, 512), g_proj=(4 * 32, WIDTH), o_proj=(WIDTH, 4 * 32),
        )  # fmt: skip
        at = "block_sparse_moe"
        found |= matrices(at, gate=(4, WIDTH)) | {f"{at}.gate.e_score_correction_bias": (4,)}
        found |= mlp(f"{at}.shared_experts", 64) | matrices(
            at, routed_expert_down_proj=(32, WIDTH), routed_expert_norm=(32,), routed_expert_up_proj=(WIDTH, 32)
        )
        for expert in range(4):
            found |= matrices(f"{at}.experts.{expert}", w1=(64, 32), w2=(32, 64), w3=(64, 32))
        return found

    shapes = model(layer) | norms("model.output_attn_res_norm") | {"model.output_attn_res_proj.weight": (1, WIDTH)}
    return remote(
        "KimiLinearForCausalLM",
        SHAPE | {
            "model_type": "kimi_linear", "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "hidden_act": "situ", "activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0,
            "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
            "v_head_dim": 32, "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 1,
            "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 64,
            "moe_renormalize": True, "first_k_dense_replace": 1, "routed_expert_hidden_size": 32, "latent_moe_use_norm": True,
            "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 1.5,
            "linear_attn_config": {
                "kda_layers": [1], "full_attn_layers": [2], "head_dim": size, "num_heads": heads, "short_conv_kernel_size": 4,
                "use_full_rank_gate": True, "gate_lower_bound": -5.0,
            },
        },
        shapes, code=False, dtype="bfloat16",
        enable_prefix_caching=False, mamba_block_size=256,
    )  # fmt: skip


KIMI_K3 = _kimi_k3()


INKLING_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        *("message_user", "message_model", "message_system", "message_tool", "content_text", "content_image"),
        *("content_model_end_sampling", "content_thinking", "content_audio_input", "content_xml"),
        *("content_invoke_tool_json", "end_message", "audio_end"),
    )
)


def _inkling() -> Medium:
    """The text of Inkling: short convolutions of all streams, learned relative positions, interleaved gates of experts."""
    kernel = (1, 4)

    def layer(number: int) -> Shapes:
        found = norms("attn_norm", "mlp_norm") | norms("attn.q_norm", "attn.k_norm", width=HEAD)
        for name, rows in (("wq_du", 4 * HEAD), ("wk_dv", 2 * HEAD), ("wv_dv", 2 * HEAD), ("wr_du", 4 * 16)):
            found |= {f"attn.{name}.weight": (rows, WIDTH)}
        found |= {"attn.wo_ud.weight": (WIDTH, 4 * HEAD), "attn.rel_logits_proj.proj": (16, 32 if number else 64)}
        found |= {f"attn.{name}_sconv.weight": (2 * HEAD, *kernel) for name in "kv"}
        found |= {f"{name}_sconv.weight": (WIDTH, *kernel) for name in ("attn", "mlp")}
        if not number:
            return found | {
                "mlp.w13_dn.weight": (2 * INNER, WIDTH),
                "mlp.w2_md.weight": (WIDTH, INNER),
                "mlp.global_scale": (1,),
            }
        found |= {"mlp.gate.weight": (5, WIDTH), "mlp.gate.bias": (4,), "mlp.gate.global_scale": (1,)}
        found |= {"mlp.experts.w13_weight": (4, 128, WIDTH), "mlp.experts.w2_weight": (4, WIDTH, 64)}
        found |= {"mlp.shared_experts.shared_w13_weight": (1, 128, WIDTH)}
        return found | {"mlp.shared_experts.shared_w2_weight": (1, WIDTH, 64)}

    at = "model.llm"
    names = {"embedding": f"{at}.embed", "norm": f"{at}.norm", "head": f"{at}.unembed"}
    return remote(
        "InklingForCausalLM",
        SHAPE | {
            "model_type": "inkling_model", "intermediate_size": 64, "dense_intermediate_size": INNER, "d_rel": 16,
            "rel_extent": 64, "local_layer_ids": [1], "sliding_window_size": 32, "use_embed_norm": True, "use_sconv": True,
            "sconv_kernel_size": 4, "dense_mlp_idx": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "use_gate_bias": True, "use_global_scale": True, "shared_expert_sink": True, "tie_word_embeddings": False,
        },
        model(layer, f"{at}.layers", **names) | norms(f"{at}.embed_norm"),
        last=INKLING_TOKENS, code=False, dtype="bfloat16", enable_prefix_caching=False,
    )  # fmt: skip


INKLING = _inkling()
