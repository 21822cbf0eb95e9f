"""Qwen from its third generation on, its mixtures of experts, and the gated delta nets of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.dims import ModelDims
from trainer_adapters.sources.megatron.families.common import ATTENTION, MLP, MODEL, MOE, NORMS, QK_NORM, zero_centered
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import (
    ColumnParallel,
    GatedMLP,
    Norm,
    Replicated,
    RowParallel,
    Rule,
    Run,
    below,
    decoder_layer,
    mtp_decoder_layer,
)

__all__ = ["qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_moe", "qwen3_next"]

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


@megatron_architecture("qwen3_moe", "olmoe")
def qwen3_moe() -> Architecture:
    return qwen3().extended((*MOE, *SHARED_EXPERT))


class _DeltaNetInput(Rule):
    """Each rank holds the queries, keys, values, output gates, betas and alphas of its heads, one after the other. The checkpoint
    has, for each head of the keys, its query, key, values and gates in one tensor, its betas and alphas in the other."""

    parts = 2

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        heads, per_head = dims.config.linear_num_key_heads, _values_per_key(dims)
        key, value = dims.config.linear_key_head_dim, per_head * dims.config.linear_value_head_dim
        for way in range(dims.ways):
            for part, sizes in ((0, (key, key, value, value)), (1, (per_head, per_head))):
                for i, size in enumerate(sizes):
                    for head in range(way * heads // dims.ways, (way + 1) * heads // dims.ways):
                        yield Run(part, head * sum(sizes) + sum(sizes[:i]), size)


class _DeltaNetInputApart(Rule):
    """As `_DeltaNetInput`, for a checkpoint that has four tensors: queries, keys and values one after the other; gates; betas;
    alphas."""

    parts = 4

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        key, value, heads = _delta_net_sizes(dims)
        for way in range(dims.ways):
            for part, before, size in (
                (0, 0, key), (0, key, key), (0, 2 * key, value), (1, 0, value), (2, 0, heads), (3, 0, heads),
            ):  # fmt: skip
                yield Run(part, before + way * size // dims.ways, size // dims.ways)


class _DeltaNetConvolution(Rule):
    """Each rank holds its rows of the queries, of the keys, of the values. The checkpoint has all rows of the queries first."""

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        key, value, _ = _delta_net_sizes(dims)
        for way in range(dims.ways):
            for before, size in ((0, key), (key, key), (2 * key, value)):
                yield Run(0, before + way * size // dims.ways, size // dims.ways)


def _delta_net_sizes(dims: ModelDims) -> tuple[int, int, int]:
    """Rows of all keys, of all values, and number of heads of the values."""
    config = dims.config
    heads = int(config.linear_num_value_heads)
    return config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim, heads


def _values_per_key(dims: ModelDims) -> int:
    return int(dims.config.linear_num_value_heads // dims.config.linear_num_key_heads)


DELTA_NET = (
    *zero_centered(decoder_layer(Norm("self_attention.in_proj.layer_norm_*", "input_layernorm.*"))),
    *decoder_layer(
        _DeltaNetInput("self_attention.in_proj.*", "linear_attn.in_proj_qkvz.*", "linear_attn.in_proj_ba.*"),
        _DeltaNetConvolution("self_attention.conv1d.weight", "linear_attn.conv1d.weight"),
        ColumnParallel("self_attention.A_log", "linear_attn.A_log"),
        ColumnParallel("self_attention.dt_bias", "linear_attn.dt_bias"),
        Norm("self_attention.out_norm.*", "linear_attn.norm.*"),
        RowParallel("self_attention.out_proj.weight", "linear_attn.out_proj.weight"),
    ),
)


_AT = "mtp.layers.{mtp}."
_LAYERS = (*zero_centered((*NORMS, *QK_NORM)), *ATTENTION, *MLP, *MOE, *SHARED_EXPERT)
MTP = (
    *zero_centered(
        (
            Norm(f"{_AT}enorm.*", "mtp.pre_fc_norm_embedding.*"),
            Norm(f"{_AT}hnorm.*", "mtp.pre_fc_norm_hidden.*"),
            Norm(f"{_AT}final_layernorm.*", "mtp.norm.*"),
        )
    ),
    ColumnParallel(f"{_AT}eh_proj.weight", "mtp.fc.weight", may_be_duplicated=True),
    *mtp_decoder_layer(_AT, _LAYERS),
)


@megatron_architecture("qwen3_next")
def qwen3_next() -> Architecture:
    return Architecture((*zero_centered(MODEL), *_LAYERS, *DELTA_NET, *MTP))


@megatron_architecture("qwen3_5_text", "qwen3_5_moe_text")
def qwen3_5_text() -> Architecture:
    apart = _DeltaNetInputApart(
        "self_attention.in_proj.*", *(f"linear_attn.in_proj_{x}.*" for x in ("qkv", "z", "b", "a"))
    )
    return qwen3_next().extended(decoder_layer(apart))


@megatron_architecture("qwen3_5", "qwen3_5_moe")
def qwen3_5() -> Architecture:
    """The text part of the published model, without its vision tower."""
    prefix = "model.language_model."
    return Architecture(below(prefix, qwen3_5_text().rules), ties={"lm_head.weight": f"{prefix}embed_tokens.weight"})
