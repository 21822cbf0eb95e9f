"""From what a scan found to the manifest, and from what a rank holds to boxes of it. Pure functions, no tensors.

head    one tensor of the trainer, as found: its name, shape, dtype, and how it is spread over ranks
region  one tensor of the checkpoint, as a box of the trainer's tensor (stacked experts hold many)
part    a box of the trainer's tensor that this rank has in memory, and where
take    what a part and a region share: a box of the manifest, and where its values are
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Box, Manifest, TensorSpec
from inference_plugin.wire.tensors import dtype_name
from trainer_adapters.source import DtypeRules, NameFilter

__all__ = [
    "Dims",
    "Head",
    "Layout",
    "Part",
    "Plan",
    "Region",
    "Rename",
    "Rules",
    "Take",
    "make_plan",
    "parts_of_run",
    "takes_of",
    "whole_part",
]

Dims: TypeAlias = tuple[int, ...]
Rename: TypeAlias = Callable[[str], str | None] | Mapping[str, str | None] | None
Rules: TypeAlias = DtypeRules | Mapping[str, torch.dtype | str] | Iterable[tuple[str, torch.dtype | str]] | None
Layout: TypeAlias = Callable[[str, Dims], "tuple[Region, ...]"]
"""The checkpoint's tensors in a trainer's tensor of this name and shape."""

MAX_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Head:
    """What a scan keeps of one tensor. `twin` is the position of the first tensor that is the same memory
    (often its own); `layout` is how it is spread over ranks, None where every rank holds all of it; `problem`
    is why it can't be sent."""

    name: str
    shape: Dims
    dtype: torch.dtype
    twin: int
    layout: Hashable = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """A checkpoint tensor as a box of a trainer's tensor; its first `dropped` dimensions, of size 1, aren't the
    checkpoint's."""

    name: str
    offsets: Dims
    sizes: Dims
    dropped: int = 0


@dataclass(frozen=True)
class Plan:
    """A scan and the manifest made from it. `places[i]` are the tensors of the manifest that lie in `heads[i]`, each
    with its region; none where it isn't sent."""

    heads: tuple[Head, ...]
    manifest: Manifest
    places: tuple[tuple[tuple[int, Region], ...], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a trainer's tensor that a rank holds.

    `at` is where the box begins in the rank's memory: an index per dimension; or one index, where that memory is 1-D
    and the box is a run of it in C order.
    """

    offsets: Dims
    sizes: Dims
    at: Dims


@dataclass(frozen=True, slots=True)
class Take:
    """`box` of the manifest lies `inside` a part; `sizes` are its own in the trainer's dimensions."""

    box: Box
    part: Part
    inside: Dims
    sizes: Dims

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The values of `box`, a view of the memory that the part was made for."""
        if local.shape == self.sizes == self.box.sizes:
            return local
        part = self.part
        if local.dim() != len(part.sizes):
            local = local.narrow(0, part.at[0], math.prod(part.sizes)).view(part.sizes)
            at = self.inside
        else:
            at = tuple(map(sum, zip(part.at, self.inside, strict=True)))
        for dim, (start, size) in enumerate(zip(at, self.sizes, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, start, size)
        return local if len(self.box.sizes) == local.dim() else local.view(self.box.sizes)

    def cut(self, box: Box) -> Take:
        """The part of it that is `box`, which lies within its own."""
        dropped = (0,) * (len(self.sizes) - len(box.sizes))
        steps = (*dropped, *(o - first for o, first in zip(box.offsets, self.box.offsets, strict=True)))
        inside = tuple(map(sum, zip(self.inside, steps, strict=True)))
        return Take(box, self.part, inside, (1,) * len(dropped) + box.sizes)


def whole_part(shape: Dims, at: Dims | None = None) -> Part:
    """All of a tensor."""
    return Part((0,) * len(shape), shape, (0,) * len(shape) if at is None else at)


def takes_of(plan: Plan, position: int, parts: Iterable[Part]) -> list[Take]:
    """What `parts` of a head hold of the manifest's tensors, in the manifest's order."""
    takes = []
    parts = tuple(parts)
    for index, region in plan.places[position]:
        for part in parts:
            starts = tuple(map(max, part.offsets, region.offsets))
            ends = tuple(
                min(a + m, b + n)
                for a, m, b, n in zip(part.offsets, part.sizes, region.offsets, region.sizes, strict=True)
            )
            sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
            if all(size > 0 for size in sizes):
                offsets = tuple(start - first for start, first in zip(starts, region.offsets, strict=True))
                box = Box(index, offsets[region.dropped :], sizes[region.dropped :])
                inside = tuple(start - first for start, first in zip(starts, part.offsets, strict=True))
                takes.append(Take(box, part, inside, sizes))
    return takes


def parts_of_run(shape: Dims, start: int, count: int, at: int) -> list[Part]:
    """Elements `start:start + count` of a tensor in C order, as boxes: at most `2 * len(shape) - 1` of them.

    The run lies at `at` in 1-D memory. A partial first row, whole rows, a partial last row; rows are cut alike.
    """
    parts: list[Part] = []

    def cut(lead: Dims, start: int, count: int, at: int) -> None:
        rest = shape[len(lead) :]
        if count <= 0:
            return
        if not rest or count == math.prod(rest):
            parts.append(Part(lead + (0,) * len(rest), (1,) * len(lead) + rest, (at,)))
            return
        row = math.prod(rest[1:])
        first, skipped = divmod(start, row)
        if skipped:
            head = min(row - skipped, count)
            cut((*lead, first), skipped, head, at)
            first, count, at = first + 1, count - head, at + head
        rows, tail = divmod(count, row)
        if rows:
            offsets = (*lead, first) + (0,) * (len(rest) - 1)
            parts.append(Part(offsets, (1,) * len(lead) + (rows, *rest[1:]), (at,)))
        cut((*lead, first + rows), 0, tail, at + rows * row)

    cut((), start, count, at)
    return parts


def make_plan(
    heads: tuple[Head, ...],
    *,
    ties: Mapping[str, str],
    rename: Rename,
    layout: Layout | None,
    names: NameFilter,
    rules: DtypeRules,
) -> Plan:
    """The manifest of what was scanned. A pure function of its arguments. Raises `ManifestMismatch`.

    `ties` are declared ones, by the heads' names: of tensors that are one memory the name that isn't declared
    a copy of another travels, else the first.
    """
    renamed = _renamed(_unwrapped([head.name for head in heads]), rename)
    found = [_regions(name, head, layout) for name, head in zip(renamed, heads, strict=True)]
    kept = names.keep(region.name for regions in found for region in regions)
    regions = [tuple(region for region in every if region.name in kept) for every in found]
    _check_names(regions, heads)
    _check_ties(ties, regions, heads)
    speakers: dict[int, int] = {}
    for i, head in enumerate(heads):
        if not regions[i]:
            continue
        chosen = speakers.setdefault(head.twin, i)
        if heads[chosen].name in ties and head.name not in ties:
            speakers[head.twin] = i
    order = sorted(speakers.values())
    firsts = dict(zip(order, accumulate((len(regions[i]) for i in order), initial=0), strict=False))
    tied = _tied(regions, [speakers[head.twin] if regions[i] else i for i, head in enumerate(heads)])
    dtypes = rules.resolve({region.name: heads[i].dtype for i in order for region in regions[i]}, tied)
    specs = tuple(
        TensorSpec(region.name, _traveling(region.name, dtypes[region.name]), region.sizes[region.dropped :])
        for i in order
        for region in regions[i]
    )
    places = tuple(
        tuple((firsts[i] + k, region) for k, region in enumerate(own)) if i in firsts else ()
        for i, own in enumerate(regions)
    )
    return Plan(heads, Manifest(specs, tied).check(), places)


def _regions(name: str | None, head: Head, layout: Layout | None) -> tuple[Region, ...]:
    if name is None:
        return ()
    if layout is None or head.problem:
        return (Region(name, (0,) * len(head.shape), head.shape),)
    return layout(name, head.shape)


def _tied(regions: Sequence[tuple[Region, ...]], speakers: Sequence[int]) -> dict[str, str]:
    """Names that don't travel, to those that do in their place: tied tensors are laid out alike."""
    return {
        own.name: spoken.name
        for i, speaker in enumerate(speakers)
        if i != speaker
        for own, spoken in zip(regions[i], regions[speaker], strict=True)
    }


def _unwrapped(names: list[str]) -> list[str]:
    """Names without the parts that wrappers add. A leading `module.` goes if all names have it."""
    names = [name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "") for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


def _renamed(names: list[str], rename: Rename) -> list[str | None]:
    if rename is None:
        return list(names)
    if isinstance(rename, Mapping):
        if unused := sorted(set(rename) - set(names)):
            raise ManifestMismatch(
                f"rename has names that the model doesn't: {first_few(unused)}",
                hint="names are given without wrappers such as module. and _orig_mod.",
                side="trainer",
            )
        return [rename.get(name, name) for name in names]
    return [rename(name) for name in names]


def _check_names(regions: Sequence[tuple[Region, ...]], heads: tuple[Head, ...]) -> None:
    origins: dict[str, list[str]] = {}
    for own, head in zip(regions, heads, strict=True):
        for region in own:
            origins.setdefault(region.name, []).append(head.name)
    if doubled := [f"{name} (from {', '.join(raw)})" for name, raw in origins.items() if len(raw) > 1]:
        raise ManifestMismatch(
            f"duplicate names: {first_few(doubled)}",
            hint="give each tensor one name; rename=... can tell them apart or leave one out",
            side="trainer",
        )
    if problems := [
        f"{head.name} {head.problem}" for own, head in zip(regions, heads, strict=True) if own and head.problem
    ]:
        raise ManifestMismatch(
            f"tensors that can't be sent: {first_few(problems)}",
            hint="change them as it says, or leave them out with exclude=[name]",
            side="trainer",
        )
    if unusable := [repr(name) for name in origins if not name or len(name.encode()) > MAX_NAME_BYTES]:
        raise ManifestMismatch(f"names that are empty or too long: {first_few(unusable)}", side="trainer")


def _check_ties(ties: Mapping[str, str], regions: Sequence[tuple[Region, ...]], heads: tuple[Head, ...]) -> None:
    sent = {head.name: head for own, head in zip(regions, heads, strict=True) if own}
    apart = [
        f"{name} and {source}"
        for name, source in ties.items()
        if name in sent and source in sent and sent[name].twin != sent[source].twin
    ]
    if apart:
        raise ManifestMismatch(
            f"declared tied, but two tensors each, which training may have moved apart: {first_few(apart)}",
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
