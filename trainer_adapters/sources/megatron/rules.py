"""Rules: how one parameter of Megatron consists of checkpoint tensors, so that a rank can send its part without communication.

A rule gives Megatron's name of a parameter and the checkpoint's names of the tensors in it. In names, `*` stands for `weight` or
`bias`, the same in all of them; `{layer}` for the number of a decoder layer, `{mtp}` for that of a multi-token-prediction
layer, `{expert}` for that of an expert. Megatron's names count on this rank, the checkpoint's over all ranks from 0; in the
checkpoint's name of a multi-token-prediction parameter, `{layer}` continues after the last decoder layer.

A rule doesn't say how tensor parallelism divides the parameter: Megatron's own marks on the parameter do
(`dims.partition_dim`). A rule says which divisions it supports, and a parameter that is divided differently is an error.

Nothing here imports Megatron or reads a value.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch

from trainer_adapters.sources.megatron.dims import ModelDims

__all__ = [
    "PADDING", "QKV", "ColumnParallel", "Concatenated", "GatedMLP", "InterleavedMLP", "Norm", "NotSent", "Replicated",
    "RowParallel", "Rule", "Run", "VocabParallel", "below", "decoder_layer", "mtp_decoder_layer", "mtp_layer", "stacked",
]  # fmt: skip

PADDING = -1
"""`Run.part` of rows that are in no checkpoint tensor."""


class Run(NamedTuple):
    """`rows` consecutive rows of a parameter: the rows from `start` on of checkpoint tensor `names[part]`."""

    part: int
    start: int
    rows: int


class Rule(ABC):
    """How one parameter consists of checkpoint tensors.

    "Rows" run along the dimension that tensor parallelism divides (dimension 0 if it divides none) of the whole
    parameter: the ranks' parts laid end to end in order of tensor-parallel rank. Other dimensions are the checkpoint's.

    Raises ValueError if the number of names isn't `parts`, or if a name has a placeholder such as `{expert}` that Megatron's
    name lacks.
    """

    parts: ClassVar[int] = 1
    """Number of checkpoint tensors in the parameter."""

    strides: tuple[int, ...] = (1,)
    """Values of Megatron's `partition_stride` for which `runs` is correct."""

    is_stacked = is_transposed = False
    """The checkpoint has the tensors of all experts in one, with the expert's number as dimension 0; it has a matrix with its
    dimensions swapped. `stacked` makes such a rule."""

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
            raise ValueError(f"the checkpoint names of {megatron} have {', '.join(sorted(unknown))}, which it lacks")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, (self.megatron, *self.names)))})"

    @abstractmethod
    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        """The dimensions that tensor parallelism may divide; None stands for a copy on each of its ranks. `shape`: this rank's
        part. With a single rank, the first one applies."""

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        """The runs that all `rows` make up, in order. The caller raises an error if they don't add up to `rows`."""
        yield Run(0, 0, rows)

    def ordered(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter, with its values in the checkpoint's order. Runs count rows in that order, and their
        division by rank must not change."""
        return part

    @property
    def rearranges(self) -> bool:
        """Whether the checkpoint has other dimensions, or another order of values, than `ordered` gets: the part is copied."""
        return self.is_stacked or self.is_transposed or type(self).ordered is not Rule.ordered

    def rearranged(self, part: torch.Tensor) -> torch.Tensor:
        """A copy of this rank's part, with the checkpoint's dimensions."""
        part = self.ordered(part)
        part = part.t() if self.is_transposed else part
        return (part.unsqueeze(0) if self.is_stacked else part).contiguous()

    def placed(self, values: tuple[int, ...], expert: int) -> tuple[int, ...]:
        """One number for each dimension of the parameter, as one for each dimension of the checkpoint's tensor. `expert`: the
        number for the dimension that counts experts."""
        values = values[::-1] if self.is_transposed else values
        return (expert, *values) if self.is_stacked else values

    def added(self, word: str, dims: ModelDims) -> float:
        """The number to add to Megatron's values to get the checkpoint's. `word`: what `*` stands for."""
        return 0.0

    def dtype(self, held: torch.dtype) -> torch.dtype:
        """The dtype that counts as the trainer's, for a parameter that is in `held` at the moment."""
        return held


class ColumnParallel(Rule):
    """Divided along dimension 0, the layer's outputs, bias too. With `may_be_duplicated`, Megatron may also have a copy on each
    rank (MLA's down projections are divided in the local layer spec and duplicated in Transformer Engine's)."""

    def __init__(self, megatron: str, *names: str, may_be_duplicated: bool = False) -> None:
        super().__init__(megatron, *names)
        self.may_be_duplicated = may_be_duplicated

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0, None) if self.may_be_duplicated else (0,)


class RowParallel(Rule):
    """Divided along dimension 1, the layer's inputs; each rank holds the whole bias."""

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (1,) if len(shape) > 1 else (None,)


class Replicated(Rule):
    """Each tensor-parallel rank holds all of it. `kept`: the dtype in which Megatron keeps it, whatever the model's dtype (before
    the first forward pass the buffer may still have the model's)."""

    def __init__(self, megatron: str, *names: str, kept: torch.dtype | None = None) -> None:
        super().__init__(megatron, *names)
        self.kept = kept

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (None,)

    def dtype(self, held: torch.dtype) -> torch.dtype:
        return self.kept or held


class Norm(Replicated):
    """A norm. With `layernorm_zero_centered_gamma`, Megatron holds its weight minus one. `zero_centered`: the checkpoint does so
    too. If only one of the two does, the difference is added to a copy of the weight."""

    def __init__(self, megatron: str, *names: str, zero_centered: bool = False) -> None:
        super().__init__(megatron, *names)
        self.zero_centered = zero_centered

    def added(self, word: str, dims: ModelDims) -> float:
        held = bool(getattr(dims.config, "layernorm_zero_centered_gamma", False))
        return float(held) - float(self.zero_centered) if word != "bias" else 0.0


class VocabParallel(Rule):
    """Divided along dimension 0, the vocabulary, and padded after the last token of the checkpoint."""

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        yield Run(0, 0, dims.vocab_size)
        if rows > dims.vocab_size:
            yield Run(PADDING, 0, rows - dims.vocab_size)


class GatedMLP(Rule):
    """`GatedMLP(megatron, gate, up)`: each rank holds its rows of the gate, then its rows of the up projection."""

    parts = 2
    strides = (1, 2)  # Megatron marks it with either, for the same division

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        each = rows // (2 * dims.ways)
        interleaved = getattr(dims.config, "moe_mlp_glu_interleave_size", None)
        if dims.config.gated_linear_unit and not interleaved:  # without runs the caller raises an error
            for way in range(dims.ways):
                yield Run(0, way * each, each)
                yield Run(1, way * each, each)


class InterleavedMLP(Rule):
    """`GatedMLP`, for a checkpoint tensor in which rows of the gate and of the up projection take turns."""

    strides = GatedMLP.strides

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (0,)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        interleaved = getattr(dims.config, "moe_mlp_glu_interleave_size", None)
        if dims.config.gated_linear_unit and not interleaved:  # without runs the caller raises an error
            yield Run(0, 0, rows)

    def ordered(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(part.chunk(2), dim=1).flatten(0, 1)


class QKV(Rule):
    """`QKV(megatron, q, k, v)`: rows by group of heads that share a key: the group's queries, its key, its value.

    With `attention_output_gate`, a group consists of its queries, their gates, its key and its value, and the checkpoint's
    query tensor holds each head's query and then its gate. With more ranks than groups, ranks hold parts of groups.
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


class Concatenated(Rule):
    """`Concatenated(megatron, name, QKV("", "q", "k", "v"))`: the checkpoint has the tensors of another rule in one, the rows of
    the first before those of the second."""

    def __init__(self, megatron: str, name: str, of: Rule) -> None:
        super().__init__(megatron, name)
        self.of, self.strides = of, of.strides

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return self.of.partition_dims(shape)

    def runs(self, rows: int, dims: ModelDims) -> Iterator[Run]:
        runs = list(self.of.runs(rows, dims))
        sizes = [sum(run.rows for run in runs if run.part == part) for part in range(self.of.parts)]
        for part, start, count in runs:
            yield Run(0, sum(sizes[:part]) + start, count)


class NotSent(Rule):
    """A parameter that the checkpoint doesn't have."""

    parts = 0

    def partition_dims(self, shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return (None,)


def decoder_layer(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of a decoder layer, whose names are given without `decoder.layers.{layer}.` and `model.layers.{layer}.`."""
    return _below("decoder.layers.{layer}.", "model.layers.{layer}.", rules)


def mtp_layer(*rules: Rule) -> tuple[Rule, ...]:
    """Rules of a multi-token-prediction layer, whose names are given without `mtp.layers.{mtp}.` and `model.layers.{layer}.`. For
    its decoder layer, the rules of decoder layers apply where it has none of its own."""
    return _below("mtp.layers.{mtp}.", "model.layers.{layer}.", rules)


def mtp_decoder_layer(checkpoint: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules for the decoder layer inside a multi-token-prediction layer, from rules of decoder layers: `checkpoint` replaces
    `model.layers.{layer}.` in the checkpoint's names."""
    copies = tuple(map(copy.copy, rules))
    for one in copies:
        one.megatron = one.megatron.replace("decoder.layers.{layer}.", "mtp.layers.{mtp}.transformer_layer.")
        one.names = tuple(name.replace("model.layers.{layer}.", checkpoint) for name in one.names)
    return copies


def below(prefix: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The same rules, for a checkpoint that has `prefix` in place of `model.`: a text model inside a larger one."""
    copies = tuple(map(copy.copy, rules))
    for one in copies:
        one.names = tuple(re.sub(r"^model\.", prefix, name) for name in one.names)
    return copies


def stacked(rule: Rule, *, transposed: bool = False) -> Rule:
    """The rule of an expert's parameter, for a checkpoint that has the tensors of all experts in one: its name has no `{expert}`,
    and its dimension 0 counts experts. `transposed`: it has matrices with their dimensions swapped."""
    one = copy.copy(rule)
    one.is_stacked, one.is_transposed = True, transposed
    return one


def _below(megatron: str, checkpoint: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    copies = tuple(map(copy.copy, rules))
    for one in copies:
        one.megatron = megatron + one.megatron
        one.names = tuple(checkpoint + name for name in one.names)
    return copies
