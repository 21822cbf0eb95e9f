"""Nemotron: norms with biases, and an MLP without a gate."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MODEL, NORMS, zero_centered
from trainer_adapters.sources.megatron.rules import ColumnParallel, RowParallel, decoder_layer

__all__ = ["nemotron"]

UNGATED_MLP = decoder_layer(
    ColumnParallel("mlp.linear_fc1.*", "mlp.up_proj.*"),
    RowParallel("mlp.linear_fc2.*", "mlp.down_proj.*"),
)


@megatron_architecture("nemotron")
def nemotron() -> Architecture:
    return Architecture((*zero_centered((*MODEL, *NORMS)), *ATTENTION, *UNGATED_MLP))
