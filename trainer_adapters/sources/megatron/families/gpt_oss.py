"""GPT-OSS: attention sinks, biases everywhere, and all experts of a layer in one tensor."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MODEL, NORMS
from trainer_adapters.sources.megatron.rules import (
    ColumnParallel,
    InterleavedMLP,
    Replicated,
    RowParallel,
    Rule,
    decoder_layer,
    stacked,
)

__all__ = ["gpt_oss"]

SINKS_AND_ROUTER = decoder_layer(
    ColumnParallel("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    Replicated("mlp.router.*", "mlp.router.*"),
)


def _experts(fc1: str, fc2: str) -> tuple[Rule, ...]:
    """Of experts whose layers Megatron calls so, with WORD for `weight` or `bias`. The checkpoint has matrices as (experts,
    inputs, outputs)."""
    return decoder_layer(
        stacked(InterleavedMLP(fc1.replace("WORD", "weight"), "mlp.experts.gate_up_proj"), transposed=True),
        stacked(InterleavedMLP(fc1.replace("WORD", "bias"), "mlp.experts.gate_up_proj_bias")),
        stacked(RowParallel(fc2.replace("WORD", "weight"), "mlp.experts.down_proj"), transposed=True),
        stacked(RowParallel(fc2.replace("WORD", "bias"), "mlp.experts.down_proj_bias")),
    )


@megatron_architecture("gpt_oss")
def gpt_oss() -> Architecture:
    grouped = _experts("mlp.experts.linear_fc1.WORD{expert}", "mlp.experts.linear_fc2.WORD{expert}")
    local = "mlp.experts.local_experts.{expert}."
    sequential = _experts(f"{local}linear_fc1.WORD", f"{local}linear_fc2.WORD")
    return Architecture((*MODEL, *NORMS, *ATTENTION, *SINKS_AND_ROUTER, *grouped, *sequential))
