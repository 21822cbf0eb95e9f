"""Phi-3 and Phi-4-mini: Llama with queries, keys and values in one tensor, and gate and up projection in one."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import QKV, Concatenated, GatedMLP, decoder_layer

__all__ = ["phi3"]


@megatron_architecture("phi3")
def phi3() -> Architecture:
    layers = decoder_layer(
        Concatenated("self_attention.linear_qkv.*", "self_attn.qkv_proj.*", QKV("", "q", "k", "v")),
        Concatenated("mlp.linear_fc1.*", "mlp.gate_up_proj.*", GatedMLP("", "gate", "up")),
    )
    return llama().extended(layers)
