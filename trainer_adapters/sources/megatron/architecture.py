"""Architectures, which are lists of rules. Each is registered under the `model_type` of Hugging Face configs: by a decorator, or
by a plug-in (`weightwire_megatron_architectures`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.errors import ManifestMismatch
from trainer_adapters.sources.megatron.rules import Rule

__all__ = ["Architecture", "Match", "architectures", "megatron_architecture"]

MTP_DECODER_LAYER = re.compile(r"mtp\.layers\.(?P<mtp>\d+)\.(?:transformer_layer|mtp_model_layer)\.(?P<rest>.+)")
"""The decoder layer inside a multi-token-prediction layer, whose name changed between Megatron's versions: rules call it
`transformer_layer`."""


@dataclass(frozen=True, slots=True)
class Match:
    """The rule of one parameter, and the numbers in its name: `layer` and `mtp` count from the first of this model chunk,
    `expert` from the first of this rank; None if the name has no such number. `word`: what `*` stands for."""

    rule: Rule
    layer: int | None = None
    mtp: int | None = None
    expert: int | None = None
    word: str = ""


@dataclass(frozen=True)
class Architecture:
    """The rules of one architecture. If several fit a parameter's name, the last one applies.

    `ties`: names that stand for other tensors in a model with `share_embeddings_and_output_weights`. `mtp_ties`: the same for
    each multi-token-prediction layer, with `{layer}` and `{mtp}` as in rules.
    """

    rules: tuple[Rule, ...]
    ties: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    mtp_ties: Mapping[str, str] = field(default_factory=dict)

    def extended(self, rules: Iterable[Rule]) -> Architecture:
        """This architecture with further rules, which apply before its own."""
        return replace(self, rules=(*self.rules, *rules))

    def match(self, name: str) -> Match | None:
        """The rule of a parameter, whose name has no wrapper's prefix; None if no rule fits."""
        inside = MTP_DECODER_LAYER.fullmatch(name)
        if inside is not None:
            name = f"mtp.layers.{inside['mtp']}.transformer_layer.{inside['rest']}"
        for pattern, rule in self._patterns:
            if (found := pattern.fullmatch(name)) is not None:
                groups = found.groupdict()
                numbers = {key: int(groups[key]) for key in ("layer", "mtp", "expert") if key in groups}
                return Match(rule, **numbers, word=groups.get("word", ""))
        if inside is None:
            return None
        found_there = self.match(f"decoder.layers.0.{inside['rest']}")
        if found_there is None:
            return None
        return Match(found_there.rule, None, int(inside["mtp"]), found_there.expert, found_there.word)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(rule.megatron), rule) for rule in reversed(self.rules)]


def _pattern(name: str) -> re.Pattern[str]:
    pattern = re.escape(name).replace(r"\*", "(?P<word>weight|bias)")
    return re.compile(re.sub(r"\\\{(layer|mtp|expert)\\\}", r"(?P<\1>\\d+)", pattern))


Maker = Callable[[], Architecture]

_REGISTERED: dict[str, Maker] = {}


def megatron_architecture(*model_types: str) -> Callable[[Maker], Maker]:
    """Registers an architecture, which the decorated function makes at its first use.

    Raises ValueError for a model type that is already registered: `MegatronAdapter(architecture=...)` takes another
    architecture for a single source.
    """

    def register(maker: Maker) -> Maker:
        if taken := [kind for kind in model_types if kind in _REGISTERED]:
            raise ValueError(f"a Megatron architecture is registered already for {', '.join(taken)}")
        made = cache(maker)
        _REGISTERED.update(dict.fromkeys(model_types, made))
        return made

    return register


def architectures() -> dict[str, Architecture]:
    """All architectures by model type: registered ones first, then those of plug-ins.

    Raises `ManifestMismatch` if a plug-in provides an architecture for a model type that already has one.
    """
    known = {kind: maker() for kind, maker in _REGISTERED.items()}
    offered: list[Mapping[str, Architecture]] = plugin_manager().hook.weightwire_megatron_architectures()
    for several in offered:
        for kind, architecture in several.items():
            if known.setdefault(kind, architecture) is not architecture:
                raise ManifestMismatch(
                    f"a Megatron architecture is registered already for model_type {kind!r}",
                    hint="have the plug-in leave it out, or give MegatronAdapter(architecture=...)",
                    side="trainer",
                )
    return known
