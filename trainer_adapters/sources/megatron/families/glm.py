"""GLM-4.5 and later mixtures of experts: attention of Llama's kind, experts of DeepSeek's, multi-token prediction."""

from __future__ import annotations

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MLP, MODEL, MOE, NORMS, QK_NORM
from trainer_adapters.sources.megatron.families.deepseek import MTP, MTP_TIES, SHARED_EXPERTS

__all__ = ["glm4_moe"]


@megatron_architecture("glm4_moe")
def glm4_moe() -> Architecture:
    return Architecture(
        (*MODEL, *NORMS, *ATTENTION, *QK_NORM, *MLP, *MOE, *SHARED_EXPERTS, *MTP),
        mtp_ties=MTP_TIES,
    )
