"""Rules that families share, with the names of local layer specs and those of Transformer Engine: a norm that Transformer Engine
fuses into the next linear layer is `linear_qkv.layer_norm_weight`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainer_adapters.sources.megatron.rules import (
    QKV,
    ColumnParallel,
    GatedMLP,
    Norm,
    Replicated,
    RowParallel,
    Rule,
    VocabParallel,
    decoder_layer,
)

__all__ = ["ATTENTION", "MLA", "MLP", "MODEL", "MOE", "NORMS", "QK_NORM", "experts", "zero_centered"]

Rules = tuple[Rule, ...]


def zero_centered(rules: Iterable[Rule]) -> Rules:
    """The same rules, for a checkpoint that holds the weights of norms minus one."""
    return tuple(Norm(one.megatron, *one.names, zero_centered=True) if isinstance(one, Norm) else one for one in rules)


MODEL: Rules = (
    VocabParallel("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Norm("decoder.final_layernorm.*", "model.norm.*"),
    VocabParallel("output_layer.weight", "lm_head.weight"),
)

NORMS = decoder_layer(
    Norm("input_layernorm.*", "input_layernorm.*"),
    Norm("self_attention.linear_qkv.layer_norm_*", "input_layernorm.*"),
    Norm("pre_mlp_layernorm.*", "post_attention_layernorm.*"),
    Norm("mlp.linear_fc1.layer_norm_*", "post_attention_layernorm.*"),
)

ATTENTION = decoder_layer(
    QKV("self_attention.linear_qkv.*", "self_attn.q_proj.*", "self_attn.k_proj.*", "self_attn.v_proj.*"),
    RowParallel("self_attention.linear_proj.*", "self_attn.o_proj.*"),
)

QK_NORM = decoder_layer(
    Norm("self_attention.q_layernorm.*", "self_attn.q_norm.*"),
    Norm("self_attention.k_layernorm.*", "self_attn.k_norm.*"),
)

MLA = decoder_layer(
    ColumnParallel("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    ColumnParallel("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", may_be_duplicated=True),
    Norm("self_attention.q_layernorm.*", "self_attn.q_a_layernorm.*"),
    Norm("self_attention.linear_q_up_proj.layer_norm_*", "self_attn.q_a_layernorm.*"),
    ColumnParallel("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    ColumnParallel(
        "self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", may_be_duplicated=True
    ),
    Norm("self_attention.kv_layernorm.*", "self_attn.kv_a_layernorm.*"),
    Norm("self_attention.linear_kv_up_proj.layer_norm_*", "self_attn.kv_a_layernorm.*"),
    ColumnParallel("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    RowParallel("self_attention.linear_proj.*", "self_attn.o_proj.*"),
)

MLP = decoder_layer(
    GatedMLP("mlp.linear_fc1.*", "mlp.gate_proj.*", "mlp.up_proj.*"),
    RowParallel("mlp.linear_fc2.*", "mlp.down_proj.*"),
)


def experts(gate: str, up: str, down: str) -> Rules:
    """Rules of the routed experts, for sequential experts and for `TEGroupedMLP`. Takes their checkpoint names, with `{expert}`
    and without the layer's prefix."""
    return decoder_layer(
        GatedMLP("mlp.experts.local_experts.{expert}.linear_fc1.weight", gate, up),
        RowParallel("mlp.experts.local_experts.{expert}.linear_fc2.weight", down),
        GatedMLP("mlp.experts.linear_fc1.weight{expert}", gate, up),
        RowParallel("mlp.experts.linear_fc2.weight{expert}", down),
    )


MOE: Rules = (
    *decoder_layer(
        Replicated("mlp.router.weight", "mlp.gate.weight"),
        Replicated("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", kept=torch.float32),
    ),
    *experts(*(f"mlp.experts.{{expert}}.{projection}_proj.weight" for projection in ("gate", "up", "down"))),
)
