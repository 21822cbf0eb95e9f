"""Nemotron: norms with biases, and an MLP without a gate. Nemotron-H, Megatron's `MambaModel`: each layer is a Mamba-2 mixer,
attention, an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.dims import ModelDims
from trainer_adapters.sources.megatron.families.common import ATTENTION, MODEL, NORMS, zero_centered
from trainer_adapters.sources.megatron.rules import (
    QKV,
    ColumnParallel,
    Norm,
    Replicated,
    RowParallel,
    Rule,
    Run,
    VocabParallel,
    below,
    decoder_layer,
)

__all__ = ["nemotron", "nemotron_h"]

UNGATED_MLP = decoder_layer(
    ColumnParallel("mlp.linear_fc1.*", "mlp.up_proj.*"),
    RowParallel("mlp.linear_fc2.*", "mlp.down_proj.*"),
)


@megatron_architecture("nemotron")
def nemotron() -> Architecture:
    return Architecture((*zero_centered((*MODEL, *NORMS)), *ATTENTION, *UNGATED_MLP))


class _MambaParts(Rule):
    """Each rank holds its rows of several parts, one after the other. The checkpoint has all rows of the first part first."""

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        sizes = self.sizes(dims)
        for way in range(dims.ways):
            for i, size in enumerate(sizes):
                yield Run(0, sum(sizes[:i]) + way * size // dims.ways, size // dims.ways)

    def sizes(self, dims: ModelDims) -> list[int]:
        """Of the convolution: inputs, then B and C of each group."""
        inner, state = (
            _heads(dims) * dims.config.mamba_head_dim,
            dims.config.mamba_num_groups * dims.config.mamba_state_dim,
        )
        return [inner, state, state]


class _MambaInput(_MambaParts):
    def sizes(self, dims: ModelDims) -> list[int]:
        """Gates; the convolution's; time steps."""
        inner, *states = super().sizes(dims)
        return [inner, inner, *states, _heads(dims)]


def _heads(dims: ModelDims) -> int:
    """Without a number of heads, Megatron's mixer is twice as wide as the model."""
    config = dims.config
    return int(config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim)


def _experts(fc1: str, fc2: str) -> tuple[Rule, ...]:
    up, down = (f"mixer.experts.{{expert}}.{projection}_proj.weight" for projection in ("up", "down"))
    return decoder_layer(ColumnParallel(fc1, up), RowParallel(fc2, down))


HYBRID = (
    VocabParallel("embedding.word_embeddings.weight", "model.embeddings.weight"),
    Norm("decoder.final_norm.*", "model.norm_f.*"),
    VocabParallel("output_layer.weight", "lm_head.weight"),
    *decoder_layer(
        Norm("norm.*", "norm.*"),
        Norm("input_layernorm.*", "norm.*"),
        Norm("pre_mlp_layernorm.*", "norm.*"),
        Norm("mixer.in_proj.layer_norm_*", "norm.*"),
        Norm("self_attention.linear_qkv.layer_norm_*", "norm.*"),
        Norm("mlp.linear_fc1.layer_norm_*", "norm.*"),
        _MambaInput("mixer.in_proj.weight", "mixer.in_proj.weight"),
        _MambaParts("mixer.conv1d.*", "mixer.conv1d.*"),
        ColumnParallel("mixer.A_log", "mixer.A_log"),
        ColumnParallel("mixer.D", "mixer.D"),
        ColumnParallel("mixer.dt_bias", "mixer.dt_bias"),
        ColumnParallel("mixer.norm.weight", "mixer.norm.weight"),
        RowParallel("mixer.out_proj.weight", "mixer.out_proj.weight"),
        QKV("self_attention.linear_qkv.*", "mixer.q_proj.*", "mixer.k_proj.*", "mixer.v_proj.*"),
        RowParallel("self_attention.linear_proj.*", "mixer.o_proj.*"),
        ColumnParallel("mlp.linear_fc1.*", "mixer.up_proj.*"),
        RowParallel("mlp.linear_fc2.*", "mixer.down_proj.*"),
        Replicated("mlp.router.weight", "mixer.gate.weight"),
        Replicated("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", kept=torch.float32),
        ColumnParallel("mlp.shared_experts.linear_fc1.weight", "mixer.shared_experts.up_proj.weight"),
        RowParallel("mlp.shared_experts.linear_fc2.weight", "mixer.shared_experts.down_proj.weight"),
    ),
    *_experts("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.linear_fc2.weight{expert}"),
    *_experts(*(f"mlp.experts.local_experts.{{expert}}.linear_{x}.weight" for x in ("fc1", "fc2"))),
)


@megatron_architecture("nemotron_h")
def nemotron_h() -> Architecture:
    return Architecture(below("backbone.", HYBRID), ties={"lm_head.weight": "backbone.embeddings.weight"})
