"""MiMo: Qwen2 with multi-token prediction under names of its own."""

from __future__ import annotations

import torch

from trainer_adapters.sources.megatron.architecture import Architecture, megatron_architecture
from trainer_adapters.sources.megatron.families.common import ATTENTION, MLP, NORMS
from trainer_adapters.sources.megatron.families.llama import llama
from trainer_adapters.sources.megatron.rules import ColumnParallel, Norm, mtp_decoder_layer

__all__ = ["mimo"]

AT, OF = "mtp.layers.{mtp}.", "model.mtp_layers.{mtp}."


class _HiddenStatesFirst(ColumnParallel):
    """The checkpoint's columns of the hidden states come before those of the embedding, Megatron's after."""

    def ordered(self, part: torch.Tensor) -> torch.Tensor:
        return part.roll(part.shape[1] // 2, dims=1)


@megatron_architecture("mimo")
def mimo() -> Architecture:
    mtp = (
        Norm(f"{AT}enorm.*", f"{OF}token_layernorm.*"),
        Norm(f"{AT}hnorm.*", f"{OF}hidden_layernorm.*"),
        _HiddenStatesFirst(f"{AT}eh_proj.weight", f"{OF}input_proj.weight", may_be_duplicated=True),
        Norm(f"{AT}final_layernorm.*", f"{OF}final_layernorm.*"),
    )
    return llama().extended((*mtp, *mtp_decoder_layer(OF, (*NORMS, *ATTENTION, *MLP))))
