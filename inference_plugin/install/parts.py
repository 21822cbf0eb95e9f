"""Parts of a model that the engine's own loader computes, loaded one at a time.

A placement plan may describe all storages but a few (a query-key-value matrix whose rows the loader reorders, for example). Then
only these few go through the loader, part by part: each part in memory of its own, with the checkpoint tensors that the loader
computes it from. `prove_parts` shows beforehand that the loader computes the same from these tensors alone as from all tensors
at once.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from inference_plugin.install.plan import LoadWeights, PlacementPlan, TensorInfo
from inference_plugin.install.proof import BUDGET_BYTES, Groups, Member
from inference_plugin.install.storages import equal_bytes, storage_views
from inference_plugin.install.trial_load import (
    POISON,
    Materialised,
    check_trial_fits,
    filled_with,
    in_batches,
    loaded,
    trial_tensors,
)
from inference_plugin.wire.errors import lacks_resources

__all__ = ["Part", "ProvenParts", "prove_parts"]

JOINED_BYTES = 4 << 20
"""Small parts are loaded together up to about this size: each load goes through the whole model's names, and a model may have
thousands of parts."""


SHOWN_CHARACTERS = 200
"""Characters of what a loader raises: SGLang's list all parameters that it lacks, more than a message may be long."""


@dataclass(frozen=True)
class Part:
    """Storages that the loader computes, by key, and the checkpoint tensors that it computes them from."""

    sources: tuple[str, ...]
    destinations: tuple[str, ...]


@dataclass(frozen=True)
class ProvenParts:
    """`uncovered`: the number of elements that the loader leaves unwritten, by parameter. `why`: why `parts` is empty."""

    parts: tuple[Part, ...] = ()
    uncovered: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


def prove_parts(
    plan: PlacementPlan,
    skeleton: nn.Module,
    load: LoadWeights,
    tensors: Sequence[TensorInfo],
    device: torch.device,
    free_bytes: float,
) -> ProvenParts:
    """Loads trial tensors into all parts at once (beside the rest of the checkpoint, where it is small), then into each part
    alone, and compares the two bit for bit. Raises `EngineUnsupported`, before it takes anything, if that is more than the
    `free_bytes` of the device."""
    parts = _parts_of(plan, skeleton)
    if not parts:
        return ProvenParts(why="their source tensors are unknown")
    infos = {info[0]: info for info in tensors}
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape, dtype in tensors}
    budget_bytes = min(BUDGET_BYTES, free_bytes / 3)
    whole = sum(sizes.values()) <= budget_bytes
    storages = {key: flat.nbytes for key, flat in storage_views(skeleton).items()}
    joined = in_batches(parts, lambda part: _trial_bytes([part], sizes, storages), JOINED_BYTES)
    parts = tuple(
        Part(tuple(n for part in some for n in part.sources), tuple(n for part in some for n in part.destinations))
        for some in joined
    )
    batches = in_batches(parts, lambda part: sum(sizes[name] for name in part.sources), budget_bytes)
    check_trial_fits(max(_trial_bytes(batch, sizes, storages) for batch in batches), free_bytes)
    uncovered: dict[str, int] = {}
    try:
        for batch in batches:
            given = dict(
                trial_tensors(tensors if whole else [infos[n] for part in batch for n in part.sources], device)
            )
            everything = Part(tuple(given), tuple(key for part in batch for key in part.destinations))
            with _loaded(everything, skeleton, load, given, device) as held:
                together = held.flats
            for part in batch:
                with _loaded(part, skeleton, load, given, device) as held:
                    alone, left = held.flats, held.left(skeleton)
                if wrong := [key for key in part.destinations if not equal_bytes(alone[key], together[key])]:
                    return ProvenParts(why=f"the loader computes {wrong[0]} differently from its own tensors alone")
                del alone, held  # their memory
                if left:
                    with _loaded(part, skeleton, load, given, device, 0) as again:
                        uncovered |= again.left_again(left)
    except Exception as error:  # a loader may insist on every name; any exception means "not part by part"
        if lacks_resources(error):
            raise
        told = textwrap.shorten(str(error), SHOWN_CHARACTERS, placeholder=" ...")
        return ProvenParts(why=f"the loader raised {type(error).__name__}: {told}")
    return ProvenParts(parts, uncovered)


def _parts_of(plan: PlacementPlan, skeleton: nn.Module) -> tuple[Part, ...]:
    """The refused storages of a plan in parts: storages of one module, or that are computed from a common tensor, are one part.
    Empty if the source tensors of some storage are unknown."""
    known, groups = storage_views(skeleton).keys(), Groups()
    for destination in plan.refused:
        sources = plan.refused_sources.get(destination, ())
        if not sources or destination not in known:
            return ()
        for other in (("module", destination.rpartition(".")[0]), *(("source", name) for name in sources)):
            groups.join(("refused", destination), other)
    return tuple(Part(_of_kind("source", members), _of_kind("refused", members)) for members in groups.sets())


def _of_kind(kind: str, members: Iterable[Member]) -> tuple[str, ...]:
    return tuple(sorted(name for of, name in members if of == kind))


@contextmanager
def _loaded(
    part: Part,
    skeleton: nn.Module,
    load: LoadWeights,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    byte: int = POISON,
) -> Iterator[Materialised]:
    """The part's storages, which started as this byte, after a load."""
    tensors = iter([(name, given[name]) for name in part.sources])
    with loaded(skeleton, set(part.destinations), load, tensors, filled_with(byte), device) as held:
        yield held


def _trial_bytes(batch: Sequence[Part], sizes: Mapping[str, int], storages: Mapping[str, int]) -> int:
    """What the tensors of a batch take, its storages, and once more those of the part that is loaded alone."""
    given = {name for part in batch for name in part.sources}
    loaded = [sum(storages[key] for key in part.destinations) for part in batch]
    return sum(sizes[name] for name in given) + sum(loaded) + max(loaded)
