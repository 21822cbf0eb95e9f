"""Gemma, whose checkpoints hold the weights of norms minus one. From the second generation on there are norms after attention and
MLP, which Megatron-Bridge puts into the layers before them."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import QK_NORM, zero_centered
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import Norm, decoder_layer

__all__ = ["gemma", "gemma2", "gemma3"]

NORMS_AFTER = decoder_layer(
    Norm("self_attention.linear_proj.post_layernorm.*", "post_attention_layernorm.*"),
    Norm("mlp.linear_fc1.layer_norm_*", "pre_feedforward_layernorm.*"),
    Norm("mlp.linear_fc2.post_layernorm.*", "post_feedforward_layernorm.*"),
)


@megatron_architecture("gemma")
def gemma() -> Architecture:
    return Architecture(zero_centered(llama().rules))


@megatron_architecture("gemma2")
def gemma2() -> Architecture:
    return gemma().extended(zero_centered(NORMS_AFTER))


@megatron_architecture("gemma3_text")
def gemma3() -> Architecture:
    return gemma2().extended(zero_centered(QK_NORM))
