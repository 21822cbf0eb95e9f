"""Makes the manifest of a scan, and boxes of the manifest from a rank's shards. Pure functions, no tensors.

A `TensorInfo` is one tensor of the trainer, as scanned. A `Target` is a checkpoint tensor that lies in it (stacked experts
contain many), or a part of a checkpoint tensor that is several tensors in memory. A `LocalShard` is a box of the trainer's tensor
that this rank has in memory. A `PlannedSlice` is the intersection of a shard and a target: a box of the manifest, and the place
of its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import torch

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.tensors import dtype_name, narrowed
from trainer_adapters.sources.selection import DtypeRules, NameFilter

__all__ = [
    "Dims", "TensorInfo", "CheckpointLayout", "LocalShard", "Plan", "Target", "Rename", "PlannedSlice",
    "checked_rename", "make_plan", "new_name", "shards_of_run", "planned_slices", "unwrapped", "whole_shard", "whole_target",
]  # fmt: skip

Dims: TypeAlias = tuple[int, ...]
Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None] | None
CheckpointLayout: TypeAlias = "Callable[[Sequence[str | None], Sequence[TensorInfo]], list[tuple[Target, ...]]]"
"""Returns the checkpoint tensors that lie in each of the trainer's tensors, which are given with their new names."""

MAX_NAME_BYTES = 1024


class TensorInfo(NamedTuple):
    """The result of scanning one tensor. `twin`: position of the first tensor in the same memory (often its own). `spread`: how
    the tensor lies over the ranks; None if every rank holds all of it. `problem`: why it can't be sent."""

    name: str
    shape: Dims
    dtype: torch.dtype
    twin: int
    spread: Hashable = None
    problem: str = ""


class Target(msgspec.Struct, frozen=True, gc=False):
    """A box of a trainer's tensor that is a checkpoint tensor, or a box of one.

    `offsets`, `sizes`: the box in the trainer's tensor. `dims`: for each dimension of the checkpoint tensor, the trainer's; in
    the others the box has one element. `at`: where the box begins in the checkpoint tensor, of the shape `shape`. `problem`:
    why that can't be sent.
    """

    name: str
    offsets: Dims
    sizes: Dims
    dims: Dims
    at: Dims
    shape: Dims
    problem: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint tensor has no other parts."""
        return self.shape == tuple(self.sizes[dim] for dim in self.dims)


def whole_target(name: str, shape: Dims, problem: str = "") -> Target:
    """The target that is a whole tensor of the trainer."""
    zeros = (0,) * len(shape)
    return Target(name, zeros, shape, tuple(range(len(shape))), zeros, shape, problem)


@dataclass(frozen=True)
class Plan:
    """A scan and the manifest made from it. `places[i]`: the tensors of the manifest that lie in `infos[i]`, each with its
    target; empty if that tensor is not sent. `targets`: by the new name of each tensor, also of tied ones."""

    infos: tuple[TensorInfo, ...]
    manifest: Manifest
    places: tuple[tuple[tuple[int, Target], ...], ...]
    targets: Mapping[str, tuple[Target, ...]]


class LocalShard(msgspec.Struct, frozen=True, gc=False):
    """A box of a trainer's tensor that a rank holds.

    `at`: where the box begins in the rank's memory: an index per dimension, or a single index if that memory is 1-D and the box
    is a run of it in C order.
    """

    offsets: Dims
    sizes: Dims
    at: Dims


class PlannedSlice(msgspec.Struct, frozen=True, gc=False):
    """`box` of the manifest, which lies `inside` a shard. `sizes`: its sizes in the trainer's dimensions. `dims`: for each
    dimension of the box, the trainer's."""

    box: Box
    shard: LocalShard
    inside: Dims
    sizes: Dims
    dims: Dims

    def view_of(self, local: torch.Tensor) -> torch.Tensor:
        """The values of `box`, a view of the memory that the shard was made for."""
        straight = self.dims == tuple(range(len(self.sizes)))
        if straight and local.shape == self.sizes:
            return local
        shard = self.shard
        if local.dim() != len(shard.sizes):
            local = local.narrow(0, shard.at[0], math.prod(shard.sizes)).view(shard.sizes)
            at = self.inside
        else:
            at = tuple(map(sum, zip(shard.at, self.inside, strict=True)))
        local = narrowed(local, at, self.sizes)
        if straight:
            return local
        others = [dim for dim in range(local.dim()) if dim not in self.dims]
        return local.permute(*others, *self.dims)[(0,) * len(others)]

    def narrowed(self, box: Box) -> PlannedSlice:
        """The part of this slice that is `box`, which lies within its own box."""
        inside, sizes = list(self.inside), list(self.sizes)
        for i, dim in enumerate(self.dims):
            inside[dim] += box.offsets[i] - self.box.offsets[i]
            sizes[dim] = box.sizes[i]
        return PlannedSlice(box, self.shard, tuple(inside), tuple(sizes), self.dims)


def whole_shard(shape: Dims) -> LocalShard:
    """The shard that is a whole tensor."""
    return LocalShard((0,) * len(shape), shape, (0,) * len(shape))


def planned_slices(plan: Plan, position: int, shards: Iterable[LocalShard]) -> list[PlannedSlice]:
    """The slices of the manifest that `shards` of the tensor at `position` hold, in the manifest's order."""
    planned = []
    shards = tuple(shards)
    for index, target in plan.places[position]:
        for shard in shards:
            starts = tuple(map(max, shard.offsets, target.offsets))
            ends = tuple(
                min(a + m, b + n)
                for a, m, b, n in zip(shard.offsets, shard.sizes, target.offsets, target.sizes, strict=True)
            )
            sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
            if all(size > 0 for size in sizes):
                offsets = (
                    at + starts[dim] - target.offsets[dim] for dim, at in zip(target.dims, target.at, strict=True)
                )
                box = Box(index, tuple(offsets), tuple(sizes[dim] for dim in target.dims))
                inside = tuple(start - first for start, first in zip(starts, shard.offsets, strict=True))
                planned.append(PlannedSlice(box, shard, inside, sizes, target.dims))
    return planned


def shards_of_run(shape: Dims, start: int, count: int, at: int) -> list[LocalShard]:
    """Elements `start:start + count` of a tensor in C order, as boxes: at most `2 * len(shape) - 1` of them.

    The run lies at `at` in 1-D memory. It consists of a partial first row, whole rows and a partial last row; partial rows are
    cut in the same way.
    """
    shards: list[LocalShard] = []

    def cut(lead: Dims, start: int, count: int, at: int) -> None:
        rest = shape[len(lead) :]
        if count <= 0:
            return
        if not rest or count == math.prod(rest):
            shards.append(LocalShard(lead + (0,) * len(rest), (1,) * len(lead) + rest, (at,)))
            return
        row = math.prod(rest[1:])
        first, skipped = divmod(start, row)
        if skipped:
            rest_of_row = min(row - skipped, count)
            cut((*lead, first), skipped, rest_of_row, at)
            first, count, at = first + 1, count - rest_of_row, at + rest_of_row
        rows, tail = divmod(count, row)
        if rows:
            offsets = (*lead, first) + (0,) * (len(rest) - 1)
            shards.append(LocalShard(offsets, (1,) * len(lead) + (rows, *rest[1:]), (at,)))
        cut((*lead, first + rows), 0, tail, at + rows * row)

    cut((), start, count, at)
    return shards


def make_plan(
    infos: tuple[TensorInfo, ...],
    *,
    ties: Mapping[str, str],
    rename: Rename,
    layout: CheckpointLayout | None,
    names: NameFilter,
    rules: DtypeRules,
) -> Plan:
    """The manifest of a scan. A pure function of its arguments. Raises `ManifestMismatch`.

    `ties`: declared ties, by the trainer's names as `unwrapped` gives them. If several names share memory, the one travels that
    is not declared a copy of another, else the first. A part of a checkpoint tensor travels whatever memory it shares.
    """
    renamed = _renamed(_unwrapped([info.name for info in infos]), rename)
    found = (layout or _as_in_memory)(renamed, infos)
    kept = names.keep(target.name for targets in found for target in targets)
    targets = [tuple(target for target in every if target.name in kept) for every in found]
    _check_names(targets, infos)
    _check_ties(ties, targets, infos)
    twins = [
        info.twin if all(t.is_whole for t in own) else i
        for i, (own, info) in enumerate(zip(targets, infos, strict=True))
    ]
    speakers: dict[int, int] = {}
    for i, info in enumerate(infos):
        if not targets[i]:
            continue
        chosen = speakers.setdefault(twins[i], i)
        if unwrapped(infos[chosen].name) in ties and unwrapped(info.name) not in ties:
            speakers[twins[i]] = i
    order = sorted(speakers.values())
    tied = _tied(targets, [speakers[twins[i]] if targets[i] else i for i in range(len(infos))])
    traveling = {target.name: (infos[i].dtype, target.shape) for i in order for target in targets[i]}
    dtypes = rules.resolve({name: dtype for name, (dtype, _) in traveling.items()}, tied)
    specs = tuple(TensorSpec(name, _traveling(name, dtypes[name]), shape) for name, (_, shape) in traveling.items())
    numbers = {name: number for number, name in enumerate(traveling)}
    spoken = set(order)
    places = tuple(
        tuple((numbers[target.name], target) for target in own) if i in spoken else () for i, own in enumerate(targets)
    )
    named = {name: own for name, own in zip(renamed, targets, strict=True) if name is not None}
    return Plan(infos, Manifest(specs, tied).check(), places, named)


def _as_in_memory(names: Sequence[str | None], infos: Sequence[TensorInfo]) -> list[tuple[Target, ...]]:
    """The layout of a checkpoint that has the same tensors as memory."""
    return [() if name is None else (whole_target(name, info.shape),) for name, info in zip(names, infos, strict=True)]


def _tied(targets: Sequence[tuple[Target, ...]], speakers: Sequence[int]) -> dict[str, str]:
    """Maps names that don't travel to those that travel in their place. Tied tensors have the same layout."""
    return {
        own.name: spoken.name
        for i, speaker in enumerate(speakers)
        if i != speaker
        for own, spoken in zip(targets[i], targets[speaker], strict=True)
    }


def unwrapped(name: str) -> str:
    """A name without the parts that torch.compile and activation checkpointing add."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _unwrapped(names: list[str]) -> list[str]:
    """Names without the parts that wrappers add. A leading `module.` is removed if all names have it."""
    names = list(map(unwrapped, names))
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


def _renamed(names: list[str], rename: Rename) -> list[str | None]:
    if isinstance(rename, Mapping) and (unused := sorted(set(rename) - set(names))):
        raise ManifestMismatch(
            f"rename has names that the model doesn't: {first_few(unused)}",
            hint="names are given without wrappers such as module. and _orig_mod.",
            side="trainer",
        )
    return [new_name(rename, name) for name in names]


def checked_rename(rename: Rename) -> Rename:
    """Raises `ArgumentError` for what is neither a function nor a mapping of names."""
    names = [*rename, *rename.values()] if isinstance(rename, Mapping) else []
    if not (isinstance(rename, Mapping | Callable | None) and all(map(_is_name, names))):
        raise ArgumentError(
            f"rename={rename!r} is neither a function of a name nor a mapping of names",
            hint='such as rename={"lm_head.weight": "output.weight"}; None in place of a name leaves a tensor out',
        )
    return rename


def new_name(rename: Rename, name: str) -> str | None:
    """The name under which a tensor travels; None leaves it out. Raises `ArgumentError` if a function returns anything else."""
    if rename is None:
        return name
    if isinstance(rename, Mapping):
        return rename.get(name, name)
    if not _is_name(new := rename(name)):
        raise ArgumentError(
            f"rename({name!r}) returned {new!r}, a {type(new).__name__}", hint="return a name, or None to leave it out"
        )
    return new


def _is_name(name: object) -> bool:
    return name is None or isinstance(name, str)


def _check_names(targets: Sequence[tuple[Target, ...]], infos: tuple[TensorInfo, ...]) -> None:
    origins: dict[str, list[tuple[Target, str]]] = {}
    for own, info in zip(targets, infos, strict=True):
        for target in own:
            if not target.problem:
                origins.setdefault(target.name, []).append((target, info.name))
    if doubled := [
        f"{name} (from {', '.join(raw for _, raw in found)})"
        for name, found in origins.items()
        if len(found) > 1 and len({target.at for target, _ in found if not target.is_whole}) < len(found)
    ]:
        raise ManifestMismatch(
            f"duplicate names: {first_few(doubled)}",
            hint="give each tensor one name; rename=... can tell them apart or leave one out",
            side="trainer",
        )
    if problems := [
        f"{info.name} {info.problem}" for own, info in zip(targets, infos, strict=True) if own and info.problem
    ]:
        raise ManifestMismatch(
            f"tensors that can't be sent: {first_few(problems)}",
            hint="correct them, or leave them out with exclude=[name]",
            side="trainer",
        )
    if problems := [f"{target.name} {target.problem}" for own in targets for target in own if target.problem]:
        raise ManifestMismatch(
            f"checkpoint tensors that can't be sent from memory: {first_few(problems)}",
            hint="leave them out with exclude=[name], or send what transformers itself would save: docs/trainers.md has the "
            "lines, with ExportAdapter and revert_weight_conversion",
            side="trainer",
        )
    if unusable := [repr(name) for name in origins if not name or len(name.encode()) > MAX_NAME_BYTES]:
        raise ManifestMismatch(f"names that are empty or too long: {first_few(unusable)}", side="trainer")


def _check_ties(ties: Mapping[str, str], targets: Sequence[tuple[Target, ...]], infos: tuple[TensorInfo, ...]) -> None:
    sent = {unwrapped(info.name): info for own, info in zip(targets, infos, strict=True) if own}
    apart = [
        f"{name} and {source}"
        for name, source in ties.items()
        if name in sent and source in sent and sent[name].twin != sent[source].twin
    ]
    if apart:
        raise ManifestMismatch(
            f"declared tied, but two tensors each, which may differ after training: {first_few(apart)}",
            hint="call tie_weights() before wrapping, and shard tied weights in one fully_shard group; or "
            "correct the config's tie_word_embeddings, or leave one out with exclude=[name]",
            side="trainer",
        )


def _traveling(name: str, dtype: torch.dtype) -> str:
    try:
        return dtype_name(dtype)
    except ManifestMismatch as error:
        raise ManifestMismatch(
            f"{name}: {error.message}", hint="a dtype rule for this name can say what to send", side="trainer"
        ) from None
