"""Rules for models whose experts transformers 5 stacks in memory but writes one by one: where each checkpoint tensor lies.

In memory an expert layer has two tensors, `gate_up_proj` (E, 2F, H) and `down_proj` (E, H, F) for E experts, F features
and hidden size H. `save_pretrained` writes three tensors per expert: gate (F, H) is `gate_up_proj[i, :F]`, up (F, H) is
`gate_up_proj[i, F:]`, down (H, F) is `down_proj[i]`. Each is a box, so that shards are cut along it and nothing is
gathered. Models whose checkpoint has the same tensors as memory (GPT-OSS, Llama 4) need no rule. A model that isn't in the table
keeps its own names: an engine that expects other names refuses them before a byte moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from inference_plugin.wire.errors import ManifestMismatch
from trainer_adapters.sources.plan import CheckpointLayout, Dims, Target

__all__ = ["STACKED", "Stacked", "checkpoint_layout"]

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True)
class Stacked:
    """A checkpoint's names for the tensors of expert `{}`. `spelling`: parts of names that the checkpoint spells differently from
    the module."""

    gate: str
    up: str
    down: str
    spelling: dict[str, str] = field(default_factory=dict)

    def targets(self, name: str, shape: Dims, hidden_size: int) -> tuple[Target, ...]:
        """The checkpoint's tensors in the tensor `name`. Raises `ManifestMismatch` for stacked experts of another layout."""
        held = name
        for own, written in self.spelling.items():
            name = name.replace(own, written)
        if not name.endswith((GATE_UP, DOWN)):
            return (Target(name, (0,) * len(shape), shape),)
        stem = name[: name.rindex(".experts.") + 1]
        if name.endswith(DOWN) and len(shape) == 3 and shape[1] == hidden_size:
            return tuple(Target(stem + self.down.format(i), (i, 0, 0), (1, *shape[1:]), 1) for i in range(shape[0]))
        if name.endswith(GATE_UP) and len(shape) == 3 and shape[2] == hidden_size and shape[1] % 2 == 0:
            features = shape[1] // 2
            return tuple(
                Target(stem + part.format(i), (i, start, 0), (1, features, hidden_size), 1)
                for i in range(shape[0])
                for part, start in ((self.gate, 0), (self.up, features))
            )
        raise ManifestMismatch(
            f"{held}: experts of shape {list(shape)} with hidden size {hidden_size} are not stacked in a known way",
            hint="give ModuleAdapter an iterable of the checkpoint's own tensors, or rename this one",
            side="trainer",
        )


_BY_PROJECTION = Stacked(
    gate="experts.{}.gate_proj.weight", up="experts.{}.up_proj.weight", down="experts.{}.down_proj.weight"
)
_BY_NUMBER = Stacked(gate="experts.{}.w1.weight", up="experts.{}.w3.weight", down="experts.{}.w2.weight")
_SPARSE_BLOCK = replace(_BY_NUMBER, spelling={".mlp.": ".block_sparse_moe."})

STACKED: dict[str, Stacked] = {
    "afmoe": _BY_PROJECTION,
    "axk1": replace(_BY_PROJECTION, spelling={".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."}),
    "cohere2_moe": _BY_PROJECTION,
    "deepseek_v2": _BY_PROJECTION,
    "deepseek_v3": _BY_PROJECTION,
    "deepseek_v32": _BY_PROJECTION,
    "dots1": _BY_PROJECTION,
    "ernie4_5_moe": replace(_BY_PROJECTION, spelling={".gate.moe_statics.": ".moe_statics."}),
    "exaone_moe": replace(_BY_PROJECTION, spelling={".mlp.gate.e_score": ".mlp.e_score"}),
    "flex_olmo": _BY_PROJECTION,
    "glm4_moe": _BY_PROJECTION,
    "glm4_moe_lite": _BY_PROJECTION,
    "glm_moe_dsa": _BY_PROJECTION,
    "hunyuan_v1_moe": _BY_PROJECTION,
    "jamba": _BY_PROJECTION,
    "laguna": replace(
        _BY_PROJECTION, spelling={".mlp.gate.e_score": ".mlp.experts.e_score", ".shared_experts.": ".shared_expert."}
    ),
    "lfm2_moe": _BY_NUMBER,
    "longcat_flash": _BY_PROJECTION,
    "mellum": _BY_PROJECTION,
    "mimo_v2_flash": replace(_BY_PROJECTION, spelling={".self_attn.sinks": ".self_attn.attention_sink_bias"}),
    "minimax": _SPARSE_BLOCK,
    "minimax_m2": _SPARSE_BLOCK,
    "mixtral": _SPARSE_BLOCK,
    "olmoe": _BY_PROJECTION,
    "phimoe": replace(_BY_NUMBER, spelling={".mlp.router.": ".block_sparse_moe.gate.", ".mlp.": ".block_sparse_moe."}),
    "qwen2_moe": _BY_PROJECTION,
    "qwen3_5_moe_text": _BY_PROJECTION,
    "qwen3_moe": _BY_PROJECTION,
    "qwen3_next": _BY_PROJECTION,
    "solar_open": _BY_PROJECTION,
}
"""By `config.model_type`. A new line needs a line in `test_experts.py`, which compares it with `save_pretrained`."""


def checkpoint_layout(module: torch.nn.Module) -> CheckpointLayout | None:
    """The rule for a module whose config, or the config of its first part that has one, has a model type of the table."""
    config: Any = next(
        (c for part in module.modules() if hasattr(c := getattr(part, "config", None), "model_type")), None
    )
    rule = STACKED.get(config.model_type) if config is not None else None
    if rule is None:
        return None
    return lambda name, shape: rule.targets(name, shape, config.hidden_size)
