"""DeepSeek V2 and V3, and what is made like them: multi-head latent attention, shared experts, multi-token prediction."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import MLA, MLP, MODEL, MOE, NORMS
from trainer_adapters.sources.megatron.rules import (
    ColumnParallel,
    GatedMLP,
    Norm,
    RowParallel,
    decoder_layer,
    mtp_layer,
)

__all__ = ["deepseek_v3"]

SHARED_EXPERTS = decoder_layer(
    GatedMLP(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    RowParallel("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
)

MTP = mtp_layer(
    Norm("enorm.*", "enorm.*"),
    Norm("hnorm.*", "hnorm.*"),
    ColumnParallel("eh_proj.weight", "eh_proj.weight", may_be_duplicated=True),
    Norm("final_layernorm.*", "shared_head.norm.*"),
)

MTP_TIES = {
    "model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.{layer}.shared_head.head.weight": "lm_head.weight",
}


@megatron_architecture("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
def deepseek_v3() -> Architecture:
    return Architecture((*MODEL, *NORMS, *MLA, *MLP, *MOE, *SHARED_EXPERTS, *MTP), mtp_ties=MTP_TIES)
