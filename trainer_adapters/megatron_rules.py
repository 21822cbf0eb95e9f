"""Megatron-Core's parameters as Hugging Face checkpoint tensors: one table per architecture, to be read and extended.

A table maps a parameter's name to a *rule*. A rule says which dimension tensor parallelism divides and which rows of
which checkpoint tensors the parameter's rows are, so that a rank can send the part it holds without asking anybody.

Names in a table: `*` stands for `weight` or `bias`, the same in both names; `{expert}` for an expert's number (counted
on this rank in Megatron's name, over all ranks in the checkpoint's). Both the local specs' names and Transformer
Engine's are in the tables: a norm that TE fuses into the linear layer behind it is `linear_qkv.layer_norm_weight`.

Nothing here imports Megatron or reads a value.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

__all__ = [
    "ARCHITECTURES",
    "DEEPSEEK_V3",
    "LLAMA",
    "QWEN2_MOE",
    "QWEN3",
    "QWEN3_MOE",
    "QKV",
    "Architecture",
    "Columns",
    "Facts",
    "GateUp",
    "Match",
    "Norm",
    "Rows",
    "Rule",
    "Run",
    "Vocabulary",
    "Whole",
]

PADDING = -1
"""`Run.part` of rows that no checkpoint tensor has."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rule may ask: Megatron's config, the vocabulary without padding, and over how many ranks tensor
    parallelism (for an expert's parameter: its own) divides the parameter."""

    config: Any
    vocab_size: int
    ways: int


class Run(NamedTuple):
    """`rows` consecutive rows of a parameter: they are the rows from `start` on of checkpoint tensor
    `names[part]`."""

    part: int
    start: int
    rows: int


@dataclass(frozen=True)
class Rule(ABC):
    """How one parameter is made of checkpoint tensors.

    "Rows" are those of the dimension that `axis` returns, of the whole parameter: the ranks' parts laid end to end in
    order of tensor-parallel rank. Other dimensions are the checkpoint's.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Checkpoint names, as templates."""

    def axis(self, shape: tuple[int, ...], facts: Facts) -> int | None:
        """The dimension that tensor parallelism divides; None if each of its ranks holds everything. `shape` is this
        rank's part."""
        return 0

    def runs(self, rows: int, facts: Facts) -> Iterator[Run]:
        """Where all `rows` go, in order. Runs that don't add up to `rows` are an error of whoever asks."""
        yield Run(0, 0, rows)

    def plus(self, word: str, norm_offset: float) -> float:
        """What is added to each value; `word` is what `*` stands for. See `Norm`."""
        return 0.0

    def dtype(self, held: torch.dtype) -> torch.dtype:
        """The dtype that counts as the trainer's, where the parameter is in `held` just now. See `Whole`."""
        return held


@dataclass(frozen=True)
class _Named(Rule):
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Whole(_Named):
    """Each tensor-parallel rank holds all of it. `kept` is a dtype that Megatron keeps it in, whatever the others
    have (before the first forward pass the buffer may still be in the model's)."""

    kept: torch.dtype | None = None

    def axis(self, shape: tuple[int, ...], facts: Facts) -> int | None:
        return None

    def dtype(self, held: torch.dtype) -> torch.dtype:
        return self.kept or held


@dataclass(frozen=True)
class Norm(_Named):
    """A norm, whole on each rank. Where Megatron holds the weight less one (`layernorm_zero_centered_gamma`) and the
    checkpoint doesn't, one is added; this makes a copy of that weight."""

    def axis(self, shape: tuple[int, ...], facts: Facts) -> int | None:
        return None

    def plus(self, word: str, norm_offset: float) -> float:
        return norm_offset if word != "bias" else 0.0


@dataclass(frozen=True)
class Rows(_Named):
    """Divided by rows. With `of`, a function from Megatron's config to the whole number of rows: a parameter that has
    them all is not divided (the down projections of MLA are divided in the local spec and copied in TE's)."""

    of: Callable[[Any], int] | None = None

    def axis(self, shape: tuple[int, ...], facts: Facts) -> int | None:
        return None if self.of is not None and shape[0] == self.of(facts.config) else 0

    def runs(self, rows: int, facts: Facts) -> Iterator[Run]:
        yield Run(0, 0, rows if self.of is None else self.of(facts.config))


@dataclass(frozen=True)
class Columns(_Named):
    """Divided by columns; the bias is whole on each rank."""

    def axis(self, shape: tuple[int, ...], facts: Facts) -> int | None:
        return 1 if len(shape) > 1 else None


@dataclass(frozen=True)
class Vocabulary(_Named):
    """Divided by rows, and padded behind the last token that the checkpoint knows."""

    def runs(self, rows: int, facts: Facts) -> Iterator[Run]:
        yield Run(0, 0, facts.vocab_size)
        if rows > facts.vocab_size:
            yield Run(PADDING, 0, rows - facts.vocab_size)


@dataclass(frozen=True)
class GateUp(Rule):
    """Each rank holds its rows of the gate, then its rows of the up projection."""

    gate: str
    up: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.gate, self.up

    def runs(self, rows: int, facts: Facts) -> Iterator[Run]:
        each = rows // (2 * facts.ways)
        interleaved = getattr(facts.config, "moe_mlp_glu_interleave_size", None)
        if facts.config.gated_linear_unit and not interleaved:  # else no row is accounted for: an error
            for way in range(facts.ways):
                yield Run(0, way * each, each)
                yield Run(1, way * each, each)


@dataclass(frozen=True)
class QKV(Rule):
    """Rows by group of heads that share a key: the group's queries, its key, its value.

    With `attention_output_gate` a group is its queries, their gates, its key, its value, and the checkpoint's query
    tensor holds each head's query and then its gate. Ranks may hold parts of groups (more ranks than groups).
    """

    q: str
    k: str
    v: str

    @property
    def names(self) -> tuple[str, ...]:
        return self.q, self.k, self.v

    def runs(self, rows: int, facts: Facts) -> Iterator[Run]:
        config = facts.config
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


Table: TypeAlias = Mapping[str, Rule | None]
"""Parameter names (of Megatron) to rules; None: not sent."""


@dataclass(frozen=True, slots=True)
class Match:
    """What an architecture says of one parameter. `layer` is counted from the first of this model chunk, `expert` from
    the first of this rank; None where the name has no such number."""

    rule: Rule | None
    where: Literal["model", "decoder", "mtp"]
    layer: int | None = None
    expert: int | None = None
    word: str = ""


@dataclass(frozen=True)
class Architecture:
    """The tables of one architecture.

    `model` has the parameters outside of layers; `layer` those of one decoder layer, without `decoder.layers.N.`;
    `mtp` those of a multi-token-prediction layer beside its decoder layer, without `mtp.layers.N.`.
    `layer_prefix` and `mtp_prefix` are put before the checkpoint names of the last two; `{layer}` is the number over
    all stages (in `mtp_prefix` it goes on after the last decoder layer), `{mtp}` counts MTP layers from 0.
    `ties`: names that a model with `share_embeddings_and_output_weights` has for other tensors, and `mtp_ties`, below
    `mtp_prefix`, those that each MTP layer has for tensors of the model.
    `zero_centered_norms`: the checkpoint holds norm weights less one.
    """

    model: Table
    layer: Table
    mtp: Table = field(default_factory=dict)
    layer_prefix: str = "model.layers.{layer}."
    mtp_prefix: str = "model.layers.{layer}."
    ties: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    mtp_ties: Mapping[str, str] = field(default_factory=dict)
    zero_centered_norms: bool = False

    def match(self, name: str) -> Match | None:
        """What the tables say of a parameter (its name has no wrapper's prefix); None if they say nothing."""
        for pattern, where, table in self._places:
            if (place := pattern.fullmatch(name)) is None:
                continue
            layer = int(place["layer"]) if where != "model" else None
            for entry, rule in table:
                if (found := entry.fullmatch(place["rest"])) is not None:
                    groups = found.groupdict()
                    expert = int(groups["expert"]) if "expert" in groups else None
                    return Match(rule, where, layer, expert, groups.get("word", ""))
        return None

    @cached_property
    def _places(self) -> list[tuple[re.Pattern[str], Literal["model", "decoder", "mtp"], _Entries]]:
        layer, mtp, model = _entries(self.layer), _entries(self.mtp), _entries(self.model)
        inside = r"mtp\.layers\.(?P<layer>\d+)\.(?:transformer_layer|mtp_model_layer)\.(?P<rest>.+)"
        return [
            (re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)"), "decoder", layer),
            (re.compile(inside), "mtp", layer),
            (re.compile(r"mtp\.layers\.(?P<layer>\d+)\.(?P<rest>.+)"), "mtp", mtp),
            (re.compile(r"(?P<rest>.+)"), "model", model),
        ]


_Entries: TypeAlias = list[tuple[re.Pattern[str], Rule | None]]


def _entries(table: Table) -> _Entries:
    def compiled(name: str) -> re.Pattern[str]:
        pattern = re.escape(name).replace(r"\*", "(?P<word>weight|bias)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        return re.compile(pattern)

    return [(compiled(name), rule) for name, rule in table.items()]


# --- the tables ----------------------------------------------------------------------------------------------------

MODEL: Table = {
    "embedding.word_embeddings.weight": Vocabulary("model.embed_tokens.weight"),
    "decoder.final_layernorm.*": Norm("model.norm.*"),
    "output_layer.weight": Vocabulary("lm_head.weight"),
}

NORMS: Table = {
    "input_layernorm.*": Norm("input_layernorm.*"),
    "self_attention.linear_qkv.layer_norm_*": Norm("input_layernorm.*"),
    "pre_mlp_layernorm.*": Norm("post_attention_layernorm.*"),
    "mlp.linear_fc1.layer_norm_*": Norm("post_attention_layernorm.*"),
}

ATTENTION: Table = {
    "self_attention.linear_qkv.*": QKV("self_attn.q_proj.*", "self_attn.k_proj.*", "self_attn.v_proj.*"),
    "self_attention.linear_proj.*": Columns("self_attn.o_proj.*"),
}

QK_NORM: Table = {
    "self_attention.q_layernorm.*": Norm("self_attn.q_norm.*"),
    "self_attention.k_layernorm.*": Norm("self_attn.k_norm.*"),
}

MLA: Table = {
    "self_attention.linear_q_proj.weight": Rows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": Rows("self_attn.q_a_proj.weight", lambda c: c.q_lora_rank),
    "self_attention.q_layernorm.*": Norm("self_attn.q_a_layernorm.*"),
    "self_attention.linear_q_up_proj.layer_norm_*": Norm("self_attn.q_a_layernorm.*"),
    "self_attention.linear_q_up_proj.weight": Rows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": Rows(
        "self_attn.kv_a_proj_with_mqa.weight", lambda c: c.kv_lora_rank + c.qk_pos_emb_head_dim
    ),
    "self_attention.kv_layernorm.*": Norm("self_attn.kv_a_layernorm.*"),
    "self_attention.linear_kv_up_proj.layer_norm_*": Norm("self_attn.kv_a_layernorm.*"),
    "self_attention.linear_kv_up_proj.weight": Rows("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.*": Columns("self_attn.o_proj.*"),
}

MLP: Table = {
    "mlp.linear_fc1.*": GateUp("mlp.gate_proj.*", "mlp.up_proj.*"),
    "mlp.linear_fc2.*": Columns("mlp.down_proj.*"),
}

EXPERT_GATE_UP = GateUp("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
EXPERT_DOWN = Columns("mlp.experts.{expert}.down_proj.weight")

MOE: Table = {
    "mlp.router.weight": Whole("mlp.gate.weight"),
    "mlp.router.expert_bias": Whole("mlp.gate.e_score_correction_bias", kept=torch.float32),
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": EXPERT_GATE_UP,
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": EXPERT_DOWN,
    "mlp.experts.linear_fc1.weight{expert}": EXPERT_GATE_UP,
    "mlp.experts.linear_fc2.weight{expert}": EXPERT_DOWN,
}

SHARED_EXPERT_OF_QWEN: Table = {
    "mlp.shared_experts.linear_fc1.weight": GateUp(
        "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": Columns("mlp.shared_expert.down_proj.weight"),
    "mlp.shared_experts.gate_weight": Whole("mlp.shared_expert_gate.weight"),
}

SHARED_EXPERTS_OF_DEEPSEEK: Table = {
    "mlp.shared_experts.linear_fc1.weight": GateUp(
        "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"
    ),
    "mlp.shared_experts.linear_fc2.weight": Columns("mlp.shared_experts.down_proj.weight"),
}

MTP: Table = {
    "enorm.*": Norm("enorm.*"),
    "hnorm.*": Norm("hnorm.*"),
    "eh_proj.weight": Rows("eh_proj.weight", lambda c: c.hidden_size),
    "final_layernorm.*": Norm("shared_head.norm.*"),
}

LLAMA = Architecture(MODEL, {**NORMS, **ATTENTION, **MLP})
QWEN3 = Architecture(MODEL, {**NORMS, **ATTENTION, **QK_NORM, **MLP})
QWEN2_MOE = Architecture(MODEL, {**NORMS, **ATTENTION, **MLP, **MOE, **SHARED_EXPERT_OF_QWEN})
QWEN3_MOE = Architecture(MODEL, {**NORMS, **ATTENTION, **QK_NORM, **MLP, **MOE, **SHARED_EXPERT_OF_QWEN})
DEEPSEEK_V3 = Architecture(
    MODEL,
    {**NORMS, **MLA, **MLP, **MOE, **SHARED_EXPERTS_OF_DEEPSEEK},
    mtp=MTP,
    mtp_ties={"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": QWEN3,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
}
"""By `model_type` of the Hugging Face config."""
