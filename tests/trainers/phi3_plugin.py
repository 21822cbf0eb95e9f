"""A plug-in that adds a Megatron architecture, as in docs/trainers/megatron.md: Phi-3, with a rule of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from inference_plugin.plugins import hookimpl
from trainer_adapters.sources.megatron import (
    QKV,
    Architecture,
    GatedMLP,
    ModelDims,
    Rule,
    Run,
    decoder_layer,
)
from trainer_adapters.sources.megatron.families.llama import llama


class Stacked(Rule):
    """The tensors of the rule `parts` lie in one checkpoint tensor, the first tensor's rows before the second's."""

    def __init__(self, megatron: str, name: str, parts: Rule) -> None:
        super().__init__(megatron, name)
        self.of, self.strides = parts, parts.strides

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return self.of.partition_dims(shape)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        runs = list(self.of.runs(rows, dims))
        sizes = [sum(run.rows for run in runs if run.part == part) for part in range(self.of.parts)]
        for part, start, count in runs:
            yield Run(0, sum(sizes[:part]) + start, count)


PHI3 = llama().extended(
    decoder_layer(
        Stacked("self_attention.linear_qkv.*", "self_attn.qkv_proj.*", QKV("", "q", "k", "v")),
        Stacked("mlp.linear_fc1.*", "mlp.gate_up_proj.*", GatedMLP("", "gate", "up")),
    )
)


@hookimpl
def weightwire_megatron_architectures() -> Mapping[str, Architecture]:
    return {"our_phi3": PHI3}
