"""Describes each parameter of a Megatron model on this rank as boxes of checkpoint tensors, by its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.tensors import dtype_name
from trainer_adapters.sources.inspection import why_not_plain
from trainer_adapters.sources.inventory import HeldBox, Inventory
from trainer_adapters.sources.megatron.chunks import Chunk
from trainer_adapters.sources.megatron.rules import PADDING

__all__ = [
    "ParameterBox",
    "ParameterKey",
    "boxes_of_parameters",
    "check_complete",
    "check_readable",
    "described",
    "inventory_of",
]

ParameterKey = tuple[int, str]
"""A parameter of this rank: the number of its chunk, and its name without wrappers."""


@dataclass(frozen=True, slots=True)
class ParameterBox:
    """A box of a checkpoint tensor, and the place of its values: at `starts` of the rank's `parameter`, which begins at `origin`
    of the whole parameter. `added`: a number to add to each value. `adapted`: an adapter's product is added. `rearranged`: copies
    the rank's whole parameter into the checkpoint's order and dimensions, and `starts` are those of the copy."""

    box: HeldBox
    parameter: ParameterKey
    starts: tuple[int, ...]
    origin: tuple[int, ...]
    added: float
    adapted: bool
    rearranged: Callable[[torch.Tensor], torch.Tensor] | None


def described(chunks: Sequence[Chunk], tensors: Mapping[ParameterKey, torch.Tensor]) -> dict[ParameterKey, str]:
    """Dtype and shape of each parameter, in words. Equal as long as nothing changes on which the manifest depends."""
    found = {}
    for (number, name), tensor in tensors.items():
        match = chunks[number].architecture.match(name)
        dtype = match.rule.dtype(tensor.dtype) if match is not None else tensor.dtype
        found[number, name] = f"{dtype} {list(tensor.shape)}"
    return found


def boxes_of_parameters(
    chunks: Sequence[Chunk], tensors: Mapping[ParameterKey, torch.Tensor]
) -> Iterator[ParameterBox]:
    """The boxes of checkpoint tensors that this rank's parameters hold. Raises `ManifestMismatch` for parameters that can't be
    sent."""
    check_readable(tensors)
    for key, tensor in tensors.items():
        yield from _boxes(chunks[key[0]], key, tensor)


def check_readable(tensors: Mapping[ParameterKey, torch.Tensor]) -> None:
    """Raises `ManifestMismatch` for parameters whose values can't be read where they are."""
    for (_, name), tensor in tensors.items():
        if problem := why_not_plain(tensor):
            raise ManifestMismatch(f"{name} {problem}", side="trainer")


def inventory_of(chunks: Sequence[Chunk], boxes: Sequence[ParameterBox]) -> Inventory:
    """This rank's inventory. Its `parts` are the layers and experts of which it holds something."""
    config = chunks[0].model.config
    parts = {chunk.numbers(chunk.match(name, tensor)) for chunk in chunks for name, tensor in chunk.stream()}
    facts = {
        "layers": config.num_layers,
        "experts": chunks[0].experts,
        "MTP layers": getattr(config, "mtp_num_layers", None) or 0,
        "vocabulary": chunks[0].vocab_size,
        "tied embeddings": chunks[0].tied,
    }
    return Inventory([one.box for one in boxes], {key: str(fact) for key, fact in facts.items()}, sorted(parts))


def check_complete(inventories: Sequence[Inventory]) -> None:
    """Raises `ManifestMismatch`, which names them, for layers and experts that are on no rank."""
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


def _boxes(chunk: Chunk, key: ParameterKey, tensor: torch.Tensor) -> Iterator[ParameterBox]:
    name = key[1]
    match = chunk.match(name, tensor)
    rule = match.rule
    if not rule.names:
        return
    rank, ways = chunk.place.tensor_parallel(by_expert=match.expert is not None)
    shape = tuple(tensor.shape)
    dim = chunk.partition_dim(name, match, tensor)
    along, first, rows = (dim, rank * shape[dim], ways * shape[dim]) if dim is not None else (0, 0, shape[0])
    runs = chunk.runs(name, match, rows)
    names = chunk.names(match)
    _, _, expert = chunk.numbers(match)
    sizes = [max((run.start + run.rows for run in runs if run.part == part), default=0) for part in range(len(names))]
    layer, _, word = name.rpartition(".")
    none = (0,) * len(shape)
    row = 0
    for run in runs:
        low, high = max(row, first), min(row + run.rows, first + shape[along])
        if low < high and run.part != PADDING:
            yield ParameterBox(
                HeldBox(
                    name=names[run.part],
                    dtype=dtype_name(rule.dtype(tensor.dtype)),
                    shape=rule.placed(_with(shape, along, sizes[run.part]), chunk.experts),
                    offsets=rule.placed(_with(none, along, run.start + low - row), expert),
                    sizes=rule.placed(_with(shape, along, high - low), 1),
                    turn=chunk.place.pp_rank * ways + rank,
                ),
                key,
                starts=rule.placed(_with(none, along, low - first), 0),
                origin=_with(none, along, first),
                added=rule.added(match.word, chunk.dims(match)),
                adapted=layer in chunk.adapted and word.startswith("weight"),
                rearranged=rule.rearranged if rule.rearranges else None,
            )
        row += run.rows


def _with(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])
