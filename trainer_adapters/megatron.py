"""Megatron-Core: each rank sends the parts of checkpoint tensors that it holds, where they are. Nothing is gathered.

How it works:
1. `megatron_rules` says, for each parameter that this rank holds, which rows of which checkpoint tensors its rows are;
   numbers of layers and experts are turned into those of the whole model by Megatron's own functions and groups;
2. at construction the ranks exchange what they hold (`inventory`), since no pipeline stage knows the others' tensors;
   from that follow, on each rank alone, the manifest and who sends what;
3. `slices()` cuts views of the parameters as they are then. A model that is no longer what was exchanged is an error.

Megatron is imported where it is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Box, Manifest
from inference_plugin.wire.tensors import dtype_name, torch_dtype
from trainer_adapters.inventory import Inventory, Item, Share, divide, exchange_all, merge
from trainer_adapters.megatron_lora import Adapted, base_name, look_for_adapters, make_factors
from trainer_adapters.megatron_rules import ARCHITECTURES, PADDING, Architecture, Facts, Match
from trainer_adapters.module import module_stream
from trainer_adapters.plan import Rules
from trainer_adapters.scan import why_not_plain
from trainer_adapters.source import DtypeRules, LocalSlice, NameFilter, WeightSource

__all__ = ["Chunk", "MegatronAdapter", "chunks_of"]

FALLBACK = "add it to the architecture's table, or send what another converter exports (docs/trainers/megatron.md)"


class MegatronAdapter(WeightSource):
    """A source for a Megatron-Core GPT model: tensor, pipeline (virtual too), expert and expert-tensor parallel, and
    their products; data- and context-parallel copies each send a share of the bytes.

    `model` is what the training loop has on this rank: a `GPTModel`, or the list of its chunks, in
    `DistributedDataParallel` and `Float16Module` or not. `hf_config` is the checkpoint's config: a transformers config
    or the mapping of a `config.json`; its `model_type` chooses the table of `megatron_rules`, `vocab_size` cuts the
    padding, `tie_word_embeddings` must be the model's. `architecture` is used instead of the table that `model_type`
    names.

    Collective over `process_group` (default: all of torch.distributed): every rank that holds part of the model makes
    one, at the same time. Parameters and persistent buffers are sent, names of wrappers removed. Tied embeddings
    travel once, from the first stage. Copies that tensor-parallel ranks hold (norms) are sent by the first of them.
    `dtype_rules`, `include` and `exclude` as in `ModuleAdapter`; the router's expert bias counts as fp32, which is what
    Megatron keeps it in.

    LoRA adapters of Megatron-Bridge are merged into what is sent; their A and B are gathered over tensor-parallel ranks,
    once per update, in the manager's thread (`megatron_lora`).

    Raises `ManifestMismatch`, on all ranks and naming the rank it comes from, for a parameter that the table has no
    rule for or that does not have the size that the config says; for ranks with different models; for elements that
    are on no rank, or in two parts. `manifest()` and `slices()` raise it where this rank's parameters have changed in name,
    shape or dtype since: make a new adapter then, on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        hf_config: Any,
        *,
        dtype_rules: Rules = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        architecture: Architecture | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        def look() -> Inventory:
            self._chunks = chunks_of(model, hf_config, architecture)
            self._heads, self._cuts = _look(self._chunks)
            return _inventory(self._chunks, self._cuts)

        everybody = exchange_all(look, process_group)
        _check_complete(everybody)
        self._manifest = merge(
            everybody,
            tied=self._chunks[0].ties(),
            rules=DtypeRules(dtype_rules),
            names=NameFilter(include, exclude),
        )
        rank = dist.get_rank(process_group) if len(everybody) > 1 else 0
        self._sent, self._left = divide(self._manifest, everybody, rank)
        self._claims = tuple(share.box for share in self._sent)
        self._factors = make_factors([chunk.model for chunk in self._chunks], [chunk.adapted for chunk in self._chunks])

    def manifest(self) -> Manifest:
        self._tensors()
        return self._manifest

    def slices(self) -> Iterator[LocalSlice]:
        tensors = self._tensors()
        if self._factors is not None:
            self._factors.gather()
        return (self._slice(share, tensors) for share in self._sent)

    def claims(self) -> tuple[Box, ...]:
        return self._claims

    def made_together(self) -> frozenset[int]:
        if self._factors is None or not self._factors.are_divided:
            return frozenset()
        adapted = (cut.item.name for cut in self._cuts if cut.adapted)
        return frozenset(self._manifest.index[name] for name in adapted if name in self._manifest.index)

    def copies(self) -> Iterator[LocalSlice]:
        """What tensor-parallel ranks and stages hold of what another one sends: norms, routers, embeddings. Only
        Megatron's reduction of their gradients keeps these equal."""
        tensors = self._tensors()
        return (self._slice(share, tensors) for share in self._left)

    def _slice(self, share: Share, tensors: Mapping[tuple[int, str], torch.Tensor]) -> LocalSlice:
        cut = self._cuts[share.item]
        values = tensors[cut.parameter].detach()
        starts = list(cut.starts)
        for dim, (offset, held) in enumerate(zip(share.box.offsets, cut.item.offsets, strict=True)):
            starts[dim] += offset - held
        for dim, (start, size) in enumerate(zip(starts, share.box.sizes, strict=True)):
            values = values.narrow(dim, start, size)
        if cut.adapted and self._factors is not None:
            layer = cut.parameter[0], cut.parameter[1].rpartition(".")[0]
            values = self._factors.merged(layer, values, tuple(map(sum, zip(cut.origin, starts, strict=True))))
            return LocalSlice(share.box, values.to(torch_dtype(self._manifest.tensors[share.box.tensor].dtype)))
        return LocalSlice(share.box, values + cut.plus if cut.plus else values)

    def _tensors(self) -> dict[tuple[int, str], torch.Tensor]:
        """The parameters and buffers of now. Raises `ManifestMismatch` if they aren't those of the exchange."""
        tensors = {(i, name): tensor for i, chunk in enumerate(self._chunks) for name, tensor in chunk.stream()}
        if any(look_for_adapters(chunk.model) != chunk.adapted for chunk in self._chunks):
            raise ManifestMismatch(
                "LoRA adapters came, went or were scaled after the adapter of the model was made",
                hint="make a new MegatronAdapter, on all ranks",
                side="trainer",
            )
        heads = {key: _head(self._chunks[key[0]], key[1], tensor) for key, tensor in tensors.items()}
        if heads != self._heads:
            changes = [f"{name} appeared" for (i, name) in heads if (i, name) not in self._heads]
            changes += [f"{name} vanished" for (i, name) in self._heads if (i, name) not in heads]
            changes += [
                f"{key[1]} was {before} and is {heads[key]}"
                for key, before in self._heads.items()
                if key in heads and heads[key] != before
            ]
            raise ManifestMismatch(
                f"the model changed after its adapter was made: {first_few(changes)}",
                hint="make a new MegatronAdapter, on all ranks",
                side="trainer",
            )
        return tensors


@dataclass(frozen=True, slots=True)
class _Cut:
    """An item, and where its values are: from `starts` on in `parameter` (chunk and name), with `plus` added. This rank's
    part of the whole parameter begins at `origin`; `adapted` by LoRA."""

    item: Item
    parameter: tuple[int, str]
    starts: tuple[int, ...]
    plus: float
    origin: tuple[int, ...]
    adapted: bool


@dataclass(frozen=True)
class Chunk:
    """One `GPTModel` of this rank (several with virtual stages) and what its rules need to know."""

    model: Any
    architecture: Architecture
    vocab_size: int
    tied: bool
    place: _Place
    layer_offset: int
    mtp_offset: int
    adapted: Mapping[str, Adapted]

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of all parameters and persistent buffers, but for those of LoRA adapters."""
        for name, tensor in module_stream(self.model)():
            base = base_name(name) if self.adapted else name
            if base is not None:
                yield base, tensor

    def match(self, name: str, tensor: torch.Tensor) -> Match:
        """What the table says. Raises `ManifestMismatch` if that is nothing."""
        if (found := self.architecture.match(name)) is None:
            raise ManifestMismatch(f"no rule for Megatron's {name} {list(tensor.shape)}", hint=FALLBACK, side="trainer")
        return found

    def numbers(self, match: Match) -> tuple[int, int]:
        """Layer (MTP: from 0) and expert over all ranks; -1 where the name has none."""
        layer = -1
        if match.layer is not None:
            layer = match.layer + (self.mtp_offset if match.where == "mtp" else self.layer_offset)
        if match.expert is None:
            return layer, -1
        return layer, match.expert + self.place.ep_rank * (self.model.config.num_moe_experts // self.place.ep_size)

    def names(self, match: Match) -> list[str]:
        """Checkpoint names of what a parameter holds."""
        layer, expert = self.numbers(match)
        prefix = ""
        if match.where == "decoder":
            prefix = self.architecture.layer_prefix.format(layer=layer)
        elif match.where == "mtp":
            prefix = self.mtp_prefix(layer)
        templates = match.rule.names if match.rule is not None else ()
        names = [prefix + name.replace("*", match.word).replace("{expert}", str(expert)) for name in templates]
        # The last stage's copy of a tied embedding is called after what it is used as.
        return [self.architecture.ties.get(name, name) for name in names] if self.tied else names

    def mtp_prefix(self, number: int) -> str:
        return self.architecture.mtp_prefix.format(layer=self.model.config.num_layers + number, mtp=number)

    def ties(self) -> dict[str, str]:
        """Names that other tensors travel for."""
        ties = dict(self.architecture.ties) if self.tied else {}
        for number in range(getattr(self.model.config, "mtp_num_layers", None) or 0):
            for name, source in self.architecture.mtp_ties.items():
                ties[self.mtp_prefix(number) + name] = ties.get(source, source)
        return ties

    @property
    def norm_offset(self) -> float:
        held = bool(getattr(self.model.config, "layernorm_zero_centered_gamma", False))
        return float(held) - float(self.architecture.zero_centered_norms)


@dataclass(frozen=True, slots=True)
class _Place:
    """This rank's place in Megatron's groups."""

    tp_rank: int
    tp_size: int
    expert_tp_rank: int
    expert_tp_size: int
    ep_rank: int
    ep_size: int
    pp_rank: int


def chunks_of(model: Any, hf_config: Any, architecture: Architecture | None) -> list[Chunk]:
    models = [_unwrapped(one) for one in (model if isinstance(model, list | tuple) else [model])]
    if not models:
        raise TypeError("this rank's list of model chunks is empty: leave it out of process_group")
    architecture = architecture or _architecture(_get(hf_config, "model_type"))
    tied = _tied(models, hf_config)
    chunks = []
    for i, one in enumerate(models):
        place = _place(one)
        stage = getattr(one, "vp_stage", None)
        stage = i if stage is None and len(models) > 1 else stage
        chunk = Chunk(
            model=one,
            architecture=architecture,
            vocab_size=int(_get(hf_config, "vocab_size")),
            tied=tied,
            place=place,
            layer_offset=_layer_offset(one.config, stage, place.pp_rank),
            mtp_offset=_mtp_offset(one.config, stage),
            adapted=look_for_adapters(one),
        )
        _check_layer_numbers(chunk)
        chunks.append(chunk)
    return chunks


def _unwrapped(model: Any) -> Any:
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    if not isinstance(model, torch.nn.Module) or not all(hasattr(model, name) for name in ("decoder", "config")):
        raise TypeError(f"expected Megatron-Core's GPTModel or a list of its chunks, not {type(model).__name__}")
    return model


def _get(hf_config: Any, name: str) -> Any:
    value = hf_config.get(name) if isinstance(hf_config, Mapping) else getattr(hf_config, name, None)
    if value is None:
        raise ManifestMismatch(f"the Hugging Face config has no {name}", side="trainer")
    return value


def _architecture(model_type: str) -> Architecture:
    if (found := ARCHITECTURES.get(model_type)) is None:
        raise ManifestMismatch(
            f"no table for model_type {model_type!r}; there are {', '.join(ARCHITECTURES)}",
            hint="give MegatronAdapter(architecture=...), or send what another converter exports (docs/trainers/megatron.md)",
            side="trainer",
        )
    return found


def _tied(models: list[Any], hf_config: Any) -> bool:
    tied = bool(getattr(models[0], "share_embeddings_and_output_weights", False))
    key = "tie_word_embeddings"
    said = hf_config.get(key) if isinstance(hf_config, Mapping) else getattr(hf_config, key, None)
    if said is not None and bool(said) != tied:
        raise ManifestMismatch(
            f"{key} is {said} in the Hugging Face config, share_embeddings_and_output_weights is {tied} in the model",
            hint="an engine ties what its config ties: make the two agree",
            side="trainer",
        )
    return tied


def _place(model: Any) -> _Place:
    """From the groups that the model was built with; from Megatron's global ones where it doesn't say."""
    from megatron.core import parallel_state as mpu

    groups = getattr(model, "pg_collection", None)

    def at(name: str, rank: Callable[[], int], size: Callable[[], int]) -> tuple[int, int]:
        group = getattr(groups, name, None)
        return (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (rank(), size())

    tp = at("tp", mpu.get_tensor_model_parallel_rank, mpu.get_tensor_model_parallel_world_size)
    expert_tp = at("expt_tp", mpu.get_expert_tensor_parallel_rank, mpu.get_expert_tensor_parallel_world_size)
    ep = at("ep", mpu.get_expert_model_parallel_rank, mpu.get_expert_model_parallel_world_size)
    pp = at("pp", mpu.get_pipeline_model_parallel_rank, mpu.get_pipeline_model_parallel_world_size)
    return _Place(*tp, *expert_tp, *ep, pp[0])


def _layer_offset(config: Any, stage: int | None, pp_rank: int) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return _asked(get_transformer_layer_offset, config, stage, pp_rank)


def _mtp_offset(config: Any, stage: int | None) -> int:
    if not getattr(config, "mtp_num_layers", None):
        return 0
    from megatron.core.transformer import multi_token_prediction

    offset = getattr(multi_token_prediction, "get_mtp_layer_offset", None)
    return 0 if offset is None else _asked(offset, config, stage, 0)


def _asked(function: Callable[..., int], config: Any, stage: int | None, pp_rank: int) -> int:
    """Its answer; which arguments it takes differs from version to version. One without a stage reads a global one."""
    from megatron.core import parallel_state as mpu

    known = {"vp_stage": stage, "pp_rank": pp_rank}
    takes = inspect.signature(function).parameters
    arguments = {name: value for name, value in known.items() if name in takes}
    if stage is None or "vp_stage" in takes:
        return int(function(config, **arguments))
    before = mpu.get_virtual_pipeline_model_parallel_rank()
    mpu.set_virtual_pipeline_model_parallel_rank(stage)
    try:
        return int(function(config, **arguments))
    finally:
        mpu.set_virtual_pipeline_model_parallel_rank(before)


def _check_layer_numbers(chunk: Chunk) -> None:
    """The layers know their numbers too, from when they were built: a model that was built in other groups, or as
    another virtual stage, would be sent under wrong names."""
    for i, layer in enumerate(getattr(chunk.model.decoder, "layers", ())):
        number = getattr(layer, "layer_number", None)
        if number is not None and number != chunk.layer_offset + i + 1:
            raise ManifestMismatch(
                f"decoder.layers.{i} was built as layer {number - 1}, Megatron now says {chunk.layer_offset + i}",
                hint="make the adapter in the parallel groups that the model was built in; pass the chunks in order",
                side="trainer",
            )


Heads = dict[tuple[int, str], str]


def _look(chunks: list[Chunk]) -> tuple[Heads, list[_Cut]]:
    """What this rank holds. Raises `ManifestMismatch` for what can't be sent."""
    heads: Heads = {}
    cuts: list[_Cut] = []
    for i, chunk in enumerate(chunks):
        for name, tensor in chunk.stream():
            heads[i, name] = _head(chunk, name, tensor)
            if problem := why_not_plain(tensor):
                raise ManifestMismatch(f"{name} {problem}", side="trainer")
            cuts += _cuts(chunk, (i, name), tensor)
    return heads, cuts


def _head(chunk: Chunk, name: str, tensor: torch.Tensor) -> str:
    match = chunk.architecture.match(name)
    dtype = match.rule.dtype(tensor.dtype) if match is not None and match.rule is not None else tensor.dtype
    return f"{dtype} {list(tensor.shape)}"


def _cuts(chunk: Chunk, parameter: tuple[int, str], tensor: torch.Tensor) -> Iterator[_Cut]:
    """The boxes of checkpoint tensors that one parameter holds."""
    match = chunk.match(parameter[1], tensor)
    if match.rule is None:
        return
    place = chunk.place
    by_expert = match.expert is not None
    tp_rank, ways = (place.expert_tp_rank, place.expert_tp_size) if by_expert else (place.tp_rank, place.tp_size)
    facts = Facts(chunk.model.config, chunk.vocab_size, ways)
    held = tuple(tensor.shape)
    axis = match.rule.axis(held, facts)
    along, first, rows = (axis, tp_rank * held[axis], ways * held[axis]) if axis is not None else (0, 0, held[0])
    runs = list(match.rule.runs(rows, facts))
    if (expected := sum(run.rows for run in runs)) != rows:
        raise ManifestMismatch(
            f"{parameter[1]} has {rows} rows over all ranks, its rule {match.rule} accounts for {expected}",
            hint="the model was built from another config than its own, or " + FALLBACK,
            side="trainer",
        )
    names = chunk.names(match)
    layer, _, word = parameter[1].rpartition(".")
    sizes = [max((r.start + r.rows for r in runs if r.part == part), default=0) for part in range(len(names))]
    row = 0
    for run in runs:
        low, high = max(row, first), min(row + run.rows, first + held[along])
        if low < high and run.part != PADDING:
            yield _Cut(
                Item(
                    name=names[run.part],
                    dtype=dtype_name(match.rule.dtype(tensor.dtype)),
                    shape=_with(held, along, sizes[run.part]),
                    offsets=_with((0,) * len(held), along, run.start + low - row),
                    sizes=_with(held, along, high - low),
                    turn=place.pp_rank * ways + tp_rank,
                ),
                parameter,
                _with((0,) * len(held), along, low - first),
                match.rule.plus(match.word, chunk.norm_offset),
                _with((0,) * len(held), along, first),
                layer in chunk.adapted and word.startswith("weight"),
            )
        row += run.rows


def _with(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _inventory(chunks: list[Chunk], cuts: list[_Cut]) -> Inventory:
    config = chunks[0].model.config
    parts: set[tuple[str, int, int]] = set()
    for chunk in chunks:
        for name, tensor in chunk.stream():
            match = chunk.match(name, tensor)
            parts.add((match.where, *chunk.numbers(match)))
    facts = {
        "layers": config.num_layers,
        "experts": getattr(config, "num_moe_experts", None) or 0,
        "MTP layers": getattr(config, "mtp_num_layers", None) or 0,
        "vocabulary": chunks[0].vocab_size,
        "tied embeddings": chunks[0].tied,
    }
    return Inventory([cut.item for cut in cuts], {key: str(fact) for key, fact in facts.items()}, sorted(parts))


def _check_complete(inventories: Sequence[Inventory]) -> None:
    """Every layer and every expert is on some rank. Raises `ManifestMismatch` that names those that aren't."""
    facts = inventories[0].facts
    parts = {part for inventory in inventories for part in inventory.parts}
    missing = []
    for where, count in (("decoder", int(facts["layers"])), ("mtp", int(facts["MTP layers"]))):
        layers = {layer for kind, layer, _ in parts if kind == where}
        missing += [f"{where} layer {layer}" for layer in range(count) if layer not in layers]
        for layer in sorted(layers):
            experts = {expert for kind, at, expert in parts if kind == where and at == layer} - {-1}
            if experts:
                missing += [
                    f"{where} layer {layer}'s expert {expert}"
                    for expert in range(int(facts["experts"]))
                    if expert not in experts
                ]
    if missing:
        raise ManifestMismatch(
            f"no rank holds {first_few(missing)}",
            hint="every rank that holds part of the model makes an adapter, in one process_group",
            side="trainer",
        )
