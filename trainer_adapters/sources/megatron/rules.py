"""Rules: how one parameter of Megatron is made of checkpoint tensors, so that a rank can send what it holds without asking.

A rule gives Megatron's name of a parameter and the checkpoint's names of what is in it. In names, `*` stands for `weight` or
`bias`, the same in all of them; `{layer}` for the number of a decoder layer, `{mtp}` for that of a multi-token-prediction
layer, `{expert}` for that of an expert. Megatron's names count on this rank; the checkpoint's over all ranks, from 0, and
`{layer}` in the checkpoint's name of a multi-token-prediction parameter goes on after the last decoder layer.

A rule doesn't say how tensor parallelism divides the parameter: Megatron's own marks on the parameter do
(`dims.partition_dim`). It says which of these it can follow, and a parameter that is divided otherwise is an error.

Nothing here imports Megatron or reads a value.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch

from trainer_adapters.sources.megatron.dims import ModelDims

__all__ = [
    "PADDING",
    "QKV",
    "ColumnParallel",
    "GatedMLP",
    "Norm",
    "NotSent",
    "Replicated",
    "RowParallel",
    "Rule",
    "Run",
    "VocabParallel",
    "decoder_layer",
    "mtp_layer",
]

PADDING = -1
"""`Run.part` of rows that no checkpoint tensor has."""


class Run(NamedTuple):
    """`rows` consecutive rows of a parameter: the rows from `start` on of checkpoint tensor `names[part]`."""

    part: int
    start: int
    rows: int


class Rule(ABC):
    """How one parameter is made of checkpoint tensors.

    "Rows" run along the dimension that tensor parallelism divides (dimension 0 where it divides none) of the whole
    parameter: the ranks' parts laid end to end in order of tensor-parallel rank. Other dimensions are the checkpoint's.

    Raises ValueError for another number of names than `parts`, and for a number such as `{expert}` that Megatron's name
    lacks.
    """

    parts: ClassVar[int] = 1
    """Checkpoint tensors in the parameter."""

    strides: tuple[int, ...] = (1,)
    """Values of Megatron's `partition_stride` that `runs` is right for."""

    def __init__(self, megatron: str, *names: str) -> None:
        self.megatron = megatron
        self.names = names
        if len(names) != self.parts:
            raise ValueError(
                f"{type(self).__name__} of {megatron} takes {self.parts} checkpoint names, not {len(names)}"
            )
        known = set(re.findall(r"\{\w+\}|\*", megatron))
        known |= {"{layer}"} if "{mtp}" in known else set()
        if unknown := {place for name in names for place in re.findall(r"\{\w+\}|\*", name)} - known:
            raise ValueError(f"the checkpoint names of {megatron} have {', '.join(sorted(unknown))}, which it doesn't")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, (self.megatron, *self.names)))})"

    @abstractmethod
    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        """The dimensions that tensor parallelism may divide; None: each of its ranks holds all. `shape` is this rank's
        part. The first one is taken where there is one rank only."""

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        """Where all `rows` go, in order. Runs that don't add up to `rows` are an error of whoever asks."""
        yield Run(0, 0, rows)

    def added(self, word: str, dims: ModelDims) -> float:
        """What the checkpoint's values are more than Megatron's; `word` is what `*` stands for."""
        return 0.0

    def dtype(self, held: torch.dtype) -> torch.dtype:
        """The dtype that counts as the trainer's, where the parameter is in `held` just now."""
        return held


class ColumnParallel(Rule):
    """Divided by dimension 0, the layer's outputs, bias too. With `may_be_duplicated` Megatron may also have a copy on each
    rank (MLA's down projections are divided in the local layer spec and duplicated in Transformer Engine's)."""

    def __init__(self, megatron: str, *names: str, may_be_duplicated: bool = False) -> None:
        super().__init__(megatron, *names)
        self.may_be_duplicated = may_be_duplicated

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0, None) if self.may_be_duplicated else (0,)


class RowParallel(Rule):
    """Divided by dimension 1, the layer's inputs; each rank holds all of the bias."""

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (1,) if len(shape) > 1 else (None,)


class Replicated(Rule):
    """Each tensor-parallel rank holds all of it. `kept` is a dtype that Megatron keeps it in, whatever the others have
    (before the first forward pass the buffer may still be in the model's)."""

    def __init__(self, megatron: str, *names: str, kept: torch.dtype | None = None) -> None:
        super().__init__(megatron, *names)
        self.kept = kept

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (None,)

    def dtype(self, held: torch.dtype) -> torch.dtype:
        return self.kept or held


class Norm(Replicated):
    """A norm. Megatron holds its weight less one with `layernorm_zero_centered_gamma`, and so does the checkpoint if it is
    `zero_centered`; where only one of the two does, the difference is added to a copy of the weight."""

    def __init__(self, megatron: str, *names: str, zero_centered: bool = False) -> None:
        super().__init__(megatron, *names)
        self.zero_centered = zero_centered

    def added(self, word: str, dims: ModelDims) -> float:
        held = bool(getattr(dims.config, "layernorm_zero_centered_gamma", False))
        return float(held) - float(self.zero_centered) if word != "bias" else 0.0


class VocabParallel(Rule):
    """Divided by dimension 0, the vocabulary, and padded behind the last token that the checkpoint knows."""

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        yield Run(0, 0, dims.vocab_size)
        if rows > dims.vocab_size:
            yield Run(PADDING, 0, rows - dims.vocab_size)


class GatedMLP(Rule):
    """`GatedMLP(megatron, gate, up)`: each rank holds its rows of the gate, then its rows of the up projection."""

    parts = 2
    strides = (1, 2)  # Megatron says either, and means this

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        each = rows // (2 * dims.ways)
        interleaved = getattr(dims.config, "moe_mlp_glu_interleave_size", None)
        if dims.config.gated_linear_unit and not interleaved:  # else no row is accounted for: an error
            for way in range(dims.ways):
                yield Run(0, way * each, each)
                yield Run(1, way * each, each)


class QKV(Rule):
    """`QKV(megatron, q, k, v)`: rows by group of heads that share a key: the group's queries, its key, its value.

    With `attention_output_gate` a group is its queries, their gates, its key, its value, and the checkpoint's query
    tensor holds each head's query and then its gate. Ranks may hold parts of groups (more ranks than groups).
    """

    parts = 3

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        config = dims.config
        groups, head = config.num_query_groups, config.kv_channels
        per_group = config.num_attention_heads // groups
        gated = getattr(config, "attention_output_gate", False)
        for group in range(groups):
            if gated:
                for gate in (0, 1):
                    for query in range(group * per_group, (group + 1) * per_group):
                        yield Run(0, (2 * query + gate) * head, head)
            else:
                yield Run(0, group * per_group * head, per_group * head)
            yield Run(1, group * head, head)
            yield Run(2, group * head, head)


class NotSent(Rule):
    """A parameter that the checkpoint doesn't have."""

    parts = 0

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (None,)


def decoder_layer(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of a decoder layer, given without `decoder.layers.{layer}.` and the checkpoint's `model.layers.{layer}.`."""
    return _below("decoder.layers.{layer}.", "model.layers.{layer}.", rules)


def mtp_layer(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of a multi-token-prediction layer, given without `mtp.layers.{mtp}.` and `model.layers.{layer}.`. Its decoder
    layer has the rules of decoder layers where it has none of its own."""
    return _below("mtp.layers.{mtp}.", "model.layers.{layer}.", rules)


def _below(megatron: str, checkpoint: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    copies = tuple(map(copy.copy, rules))
    for one in copies:
        one.megatron = megatron + one.megatron
        one.names = tuple(checkpoint + name for name in one.names)
    return copies
