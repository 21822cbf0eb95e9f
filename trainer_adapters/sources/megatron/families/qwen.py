"""Qwen from its third generation on, and its mixtures of experts."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import MOE, QK_NORM
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import GatedMLP, Replicated, RowParallel, decoder_layer

__all__ = ["qwen2_moe", "qwen3", "qwen3_moe"]

SHARED_EXPERT = decoder_layer(
    GatedMLP(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    RowParallel("mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"),
    Replicated("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)


@megatron_architecture("qwen3")
def qwen3() -> Architecture:
    return llama().extended(QK_NORM)


@megatron_architecture("qwen2_moe")
def qwen2_moe() -> Architecture:
    return llama().extended((*MOE, *SHARED_EXPERT))


@megatron_architecture("qwen3_moe")
def qwen3_moe() -> Architecture:
    return qwen3().extended((*MOE, *SHARED_EXPERT))
