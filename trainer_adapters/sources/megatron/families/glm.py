"""GLM-4, with norms after attention and MLP; and GLM-4.5 and later mixtures of experts: attention of Llama's kind, experts of
DeepSeek's, multi-token prediction."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MLP, MODEL, MOE, NORMS, QK_NORM
from trainer_adapters.sources.megatron.families.deepseek import MTP, MTP_TIES, SHARED_EXPERTS
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import Concatenated, GatedMLP, Norm, decoder_layer

__all__ = ["glm4", "glm4_moe"]

NORMS_AFTER = decoder_layer(
    # In slime's layer.
    Norm("post_self_attn_layernorm.*", "post_self_attn_layernorm.*"),
    Norm("post_mlp_layernorm.*", "post_mlp_layernorm.*"),
    # In ms-swift's mcore-bridge.
    Norm("self_attention.post_self_attn_layernorm.*", "post_self_attn_layernorm.*"),
    Norm("mlp.post_mlp_layernorm.*", "post_mlp_layernorm.*"),
)


@megatron_architecture("glm4")
def glm4() -> Architecture:
    mlp = Concatenated("mlp.linear_fc1.*", "mlp.gate_up_proj.*", GatedMLP("", "gate", "up"))
    return llama().extended((*decoder_layer(mlp), *NORMS_AFTER))


@megatron_architecture("glm4_moe")
def glm4_moe() -> Architecture:
    return Architecture(
        (*MODEL, *NORMS, *ATTENTION, *QK_NORM, *MLP, *MOE, *SHARED_EXPERTS, *MTP),
        mtp_ties=MTP_TIES,
    )
