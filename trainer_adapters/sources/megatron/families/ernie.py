"""ERNIE 4.5's mixtures of experts for text: attention of Llama's kind, experts of DeepSeek's."""

from __future__ import annotations

import torch

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import MOE
from trainer_adapters.sources.megatron.families.deepseek import SHARED_EXPERTS
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import Replicated, decoder_layer

__all__ = ["ernie4_5_moe"]


class _BiasOfOnePool(Replicated):
    """The checkpoint has a row for each pool of experts, and models for text have one pool."""

    def ordered(self, part: torch.Tensor) -> torch.Tensor:
        return part.unsqueeze(0)

    def placed(self, values: tuple[int, ...], expert: int) -> tuple[int, ...]:
        return (min(values[0], 1), *values)  # each rank has the whole bias: its offset is 0


@megatron_architecture("ernie4_5_moe")
def ernie4_5_moe() -> Architecture:
    bias = _BiasOfOnePool("mlp.router.expert_bias", "mlp.moe_statics.e_score_correction_bias", kept=torch.float32)
    return llama().extended((*MOE, *SHARED_EXPERTS, *decoder_layer(bias)))
