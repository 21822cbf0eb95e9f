"""Megatron-Core models: the sources, and the registered architectures, whose rules map parameters to checkpoint tensors.

This package exports everything that a table of your own needs: `megatron_architecture`, `Architecture`, the rules,
`decoder_layer`, `mtp_layer`. Importing it needs no Megatron.
"""

from trainer_adapters.sources.megatron import families
from trainer_adapters.sources.megatron.architecture import Architecture, architectures, megatron_architecture
from trainer_adapters.sources.megatron.dims import ModelDims
from trainer_adapters.sources.megatron.rules import (
    PADDING,
    QKV,
    ColumnParallel,
    Concatenated,
    GatedMLP,
    InterleavedMLP,
    Norm,
    NotSent,
    Replicated,
    RowParallel,
    Rule,
    Run,
    VocabParallel,
    below,
    decoder_layer,
    mtp_decoder_layer,
    mtp_layer,
    stacked,
)

__all__ = [
    "PADDING", "QKV", "Architecture", "ColumnParallel", "Concatenated", "GatedMLP", "InterleavedMLP", "ModelDims", "Norm",
    "NotSent", "Replicated", "RowParallel", "Rule", "Run", "VocabParallel", "architectures", "below", "decoder_layer",
    "families", "megatron_architecture", "mtp_decoder_layer", "mtp_layer", "stacked",
]  # fmt: skip
