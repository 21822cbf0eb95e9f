"""Llama 4: dense layers and mixtures of experts in turns, and all experts of a layer in one tensor."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MODEL, NORMS
from trainer_adapters.sources.megatron.rules import (
    Concatenated,
    GatedMLP,
    Replicated,
    RowParallel,
    Rule,
    VocabParallel,
    below,
    decoder_layer,
    stacked,
)

__all__ = ["llama4", "llama4_text"]


def _gated(megatron: str, checkpoint: str) -> tuple[Rule, ...]:
    return decoder_layer(
        GatedMLP(f"{megatron}.linear_fc1.*", f"{checkpoint}.gate_proj.*", f"{checkpoint}.up_proj.*"),
        RowParallel(f"{megatron}.linear_fc2.*", f"{checkpoint}.down_proj.*"),
    )


def _experts(fc1: str, fc2: str) -> tuple[Rule, ...]:
    """The checkpoint has matrices as (experts, inputs, outputs)."""
    gate_up = Concatenated(fc1, "feed_forward.experts.gate_up_proj", GatedMLP("", "gate", "up"))
    down = RowParallel(fc2, "feed_forward.experts.down_proj")
    return decoder_layer(stacked(gate_up, transposed=True), stacked(down, transposed=True))


LAYERS = (
    *ATTENTION,
    *NORMS,
    *_gated("mlp", "feed_forward"),
    *_gated("mlp.shared_experts", "feed_forward.shared_expert"),
    *decoder_layer(Replicated("mlp.router.weight", "feed_forward.router.weight")),
    *_experts("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.linear_fc2.weight{expert}"),
    *_experts(*(f"mlp.experts.local_experts.{{expert}}.linear_{x}.weight" for x in ("fc1", "fc2"))),
)


@megatron_architecture("llama4_text")
def llama4_text() -> Architecture:
    return Architecture((*MODEL, *LAYERS))


@megatron_architecture("llama4")
def llama4() -> Architecture:
    """The text part of the published model, without its vision tower."""
    at = "language_model."
    head = VocabParallel("output_layer.weight", f"{at}lm_head.weight")
    ties = {f"{at}{name}": f"{at}{source}" for name, source in llama4_text().ties.items()}
    return Architecture((*below(f"{at}model.", llama4_text().rules), head), ties=ties)
