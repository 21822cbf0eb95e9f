"""Mixtral: Llama's attention, and experts under names of its own."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import experts
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import Replicated, decoder_layer

__all__ = ["mixtral"]


@megatron_architecture("mixtral")
def mixtral() -> Architecture:
    gate, up, down = (f"block_sparse_moe.experts.{{expert}}.{w}.weight" for w in ("w1", "w3", "w2"))
    router = decoder_layer(Replicated("mlp.router.weight", "block_sparse_moe.gate.weight"))
    return llama().extended((*router, *experts(gate, up, down)))
