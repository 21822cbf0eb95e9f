"""The `GPTModel`s of a rank (several with virtual pipeline stages), with what their rules and names depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from trainer_adapters.sources.megatron.architecture import Architecture, Match, architectures
from trainer_adapters.sources.megatron.dims import (
    ModelDims,
    ParallelPlace,
    check_marks,
    layer_offset,
    mtp_offset,
    partition_dim,
    place_of,
)
from trainer_adapters.sources.megatron.lora_factors import BridgeAdapter, adapters_of, base_name
from trainer_adapters.sources.megatron.rules import Run
from trainer_adapters.sources.streams import module_stream, walk

__all__ = ["FALLBACK", "Chunk", "chunks_of"]

FALLBACK = "add a rule to the architecture, or send what another converter exports (docs/trainers/megatron.md)"


@dataclass(frozen=True)
class Chunk:
    """A `GPTModel` without wrappers. `tied`: its output layer is the embedding. The offsets count the layers of earlier chunks.
    `adapted`: LoRA adapters, by the name of their layer."""

    model: Any
    architecture: Architecture
    vocab_size: int
    tied: bool
    place: ParallelPlace
    layer_offset: int
    mtp_offset: int
    adapted: Mapping[str, BridgeAdapter]

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of all parameters and persistent buffers, except those of LoRA adapters."""
        for name, tensor in module_stream(self.model)():
            base = base_name(name) if self.adapted else name
            if base is not None:
                yield base, tensor

    def match(self, name: str, tensor: torch.Tensor) -> Match:
        """The parameter's rule. Raises `ManifestMismatch` if there is none."""
        if (found := self.architecture.match(name)) is None:
            raise ManifestMismatch(f"no rule for Megatron's {name} {list(tensor.shape)}", hint=FALLBACK, side="trainer")
        return found

    def dims(self, match: Match) -> ModelDims:
        """The values that the rule of a parameter may use."""
        _, ways = self.place.tensor_parallel(by_expert=match.expert is not None)
        return ModelDims(self.model.config, self.vocab_size, ways)

    def partition_dim(self, name: str, match: Match, tensor: torch.Tensor) -> int | None:
        """The dimension of a parameter that tensor parallelism divides according to Megatron; None if it divides none.

        Raises `ManifestMismatch` if Megatron's marks and the rule contradict each other.
        """
        at, _, own_name = name.rpartition(".")
        layer, expert = self._layers.get(at), match.expert is not None
        rule = match.rule
        check_marks(layer, name, tensor, strides=rule.strides, expert=expert, ep_size=self.place.ep_size)
        said, known = partition_dim(layer, own_name, tensor), rule.partition_dims(tuple(tensor.shape))
        if said in known:
            return said
        if self.place.tensor_parallel(by_expert=expert)[1] == 1:
            return known[0]
        raise ManifestMismatch(
            f"{name} {list(tensor.shape)} {_divided(said)}, but its rule {rule} is for one that {_divided(known[0])}",
            hint="give it the rule that fits its division; if Megatron's marks on the parameter (tensor_model_parallel, "
            "partition_dim) are missing or wrong, set them",
            side="trainer",
        )

    def runs(self, name: str, match: Match, rows: int) -> list[Run]:
        """The runs that all rows of a parameter make up. Raises `ManifestMismatch` if its rule accounts for another number."""
        runs = list(match.rule.runs(rows, self.dims(match)))
        if (expected := sum(run.rows for run in runs)) != rows:
            raise ManifestMismatch(
                f"{name} has {rows} rows over all ranks, its rule {match.rule} accounts for {expected}",
                hint="the model was built from another config than its own, or " + FALLBACK,
                side="trainer",
            )
        return runs

    @property
    def experts(self) -> int:
        """Number of experts in a layer, over all ranks; 0 if the model has none."""
        return getattr(self.model.config, "num_moe_experts", None) or 0

    def numbers(self, match: Match) -> tuple[str, int, int]:
        """ "model", "decoder" or "mtp"; the layer there and the expert, counted over all ranks from 0; -1 if there is none."""
        where, layer = "model", -1
        if match.layer is not None:
            where, layer = "decoder", match.layer + self.layer_offset
        elif match.mtp is not None:
            where, layer = "mtp", match.mtp + self.mtp_offset
        if match.expert is None:
            return where, layer, -1
        return (
            where,
            layer,
            match.expert + self.place.ep_rank * (self.experts // self.place.ep_size),
        )

    def names(self, match: Match) -> list[str]:
        """Checkpoint names of the tensors in a parameter."""
        where, layer, expert = self.numbers(match)
        filled = [
            (self._numbered(name, layer) if where == "mtp" else name.replace("{layer}", str(layer)))
            .replace("*", match.word)
            .replace("{expert}", str(expert))
            for name in match.rule.names
        ]
        # In the last stage, Megatron names the copy of a tied embedding after its use, the output layer.
        return [self.architecture.ties.get(name, name) for name in filled] if self.tied else filled

    def ties(self) -> dict[str, str]:
        """Tied names, each with the tensor that travels for it."""
        ties = dict(self.architecture.ties) if self.tied else {}
        for number in range(getattr(self.model.config, "mtp_num_layers", None) or 0):
            for name, source in self.architecture.mtp_ties.items():
                ties[self._numbered(name, number)] = ties.get(source, source)
        return ties

    def _numbered(self, name: str, mtp: int) -> str:
        return name.replace("{layer}", str(self.model.config.num_layers + mtp)).replace("{mtp}", str(mtp))

    @cached_property
    def _layers(self) -> dict[str, Any]:
        """The layers by name; for an adapted layer, the layer inside the wrapper, which comes after it."""
        return {(base_name(prefix) or "").removesuffix("."): part for prefix, part in walk(self.model)}


def chunks_of(model: Any, hf_config: Any, architecture: Architecture | None) -> list[Chunk]:
    """The chunks of the training loop's model: a `GPTModel` or a list of them, with or without wrappers.

    Raises TypeError for anything else, and `ManifestMismatch` if the model, its groups and the config contradict each other.
    """
    models = [_unwrapped(one) for one in (model if isinstance(model, list | tuple) else [model])]
    if not models:
        raise ArgumentError("this rank's list of model chunks is empty: leave it out of process_group")
    if hf_config is None:
        raise ArgumentError(
            "a Megatron-Core model was given without the config of its checkpoint",
            hint="pass hf_config=AutoConfig.from_pretrained(...) of the model that the engine serves, on every rank",
        )
    architecture = architecture or _architecture(_required("model_type", _said(hf_config, "model_type")))
    tied = _tied(models, hf_config)
    chunks = []
    for i, one in enumerate(models):
        place = place_of(one)
        stage = getattr(one, "vp_stage", None)
        stage = i if stage is None and len(models) > 1 else stage
        chunk = Chunk(
            model=one,
            architecture=architecture,
            vocab_size=int(_required("vocab_size", _said_of_text(hf_config, "vocab_size"))),
            tied=tied,
            place=place,
            layer_offset=layer_offset(one.config, stage, place.pp_rank),
            mtp_offset=mtp_offset(one.config, stage),
            adapted=adapters_of(one),
        )
        _check_layer_numbers(chunk)
        chunks.append(chunk)
    return chunks


def _divided(dim: int | None) -> str:
    return "is whole on each tensor-parallel rank" if dim is None else f"is divided along dimension {dim}"


def _unwrapped(model: Any) -> Any:
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    if not isinstance(model, torch.nn.Module) or not all(hasattr(model, name) for name in ("decoder", "config")):
        raise ArgumentError(
            f"expected Megatron-Core's GPTModel or a list of its chunks, not {type(model).__name__}",
            hint="give its language_model, with the config of the whole" if hasattr(model, "language_model") else "",
        )
    return model


def _said(hf_config: Any, name: str) -> Any:
    return hf_config.get(name) if isinstance(hf_config, Mapping) else getattr(hf_config, name, None)


def _said_of_text(hf_config: Any, name: str) -> Any:
    """Of the text model, which a larger model's config has in `text_config`."""
    value = _said(_said(hf_config, "text_config") or {}, name)
    return _said(hf_config, name) if value is None else value


def _required(name: str, value: Any) -> Any:
    if value is None:
        raise ManifestMismatch(f"the Hugging Face config has no {name}", side="trainer")
    return value


def _architecture(model_type: str) -> Architecture:
    known = architectures()
    if (found := known.get(model_type)) is None:
        broken = "".join(
            f"; plug-in {name} could not be loaded: {why}" for name, why in plugin_manager().broken.items()
        )
        raise ManifestMismatch(
            f"no Megatron architecture for model_type {model_type!r}; there are {', '.join(sorted(known))}{broken}",
            hint="register one, or send what another converter exports (docs/trainers/megatron.md)",
            side="trainer",
        )
    return found


def _tied(models: list[Any], hf_config: Any) -> bool:
    tied = bool(getattr(models[0], "share_embeddings_and_output_weights", False))
    said = _said_of_text(hf_config, "tie_word_embeddings")
    if said is not None and bool(said) != tied:
        raise ManifestMismatch(
            f"tie_word_embeddings is {said} in the Hugging Face config, share_embeddings_and_output_weights is {tied} in the "
            "model",
            hint="an engine ties what its config ties: make the two agree",
            side="trainer",
        )
    return tied


def _check_layer_numbers(chunk: Chunk) -> None:
    """Compares with the numbers that the layers got when they were built: a model that was built in other groups, or as another
    virtual stage, would be sent under wrong names."""
    for i, layer in enumerate(getattr(chunk.model.decoder, "layers", ())):
        number = getattr(layer, "layer_number", None)
        if number is not None and number != chunk.layer_offset + i + 1:
            raise ManifestMismatch(
                f"decoder.layers.{i} was built as layer {number - 1}, but Megatron now says {chunk.layer_offset + i}",
                hint="make the adapter in the parallel groups that the model was built in; pass the chunks in order",
                side="trainer",
            )
