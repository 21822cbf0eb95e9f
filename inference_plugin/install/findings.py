"""Collects the writes and refusals of a traced load, and makes the placement plan from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from inference_plugin.install.coverage import Destination, coverage_of
from inference_plugin.install.plan import Fill, Placement, PlacementPlan
from inference_plugin.wire.geometry import Region, may_overlap

__all__ = ["LoadFindings"]


class LoadFindings:
    """`destinations`: the model's storages, in the model's order. `names`: the checkpoint's tensors."""

    def __init__(self, destinations: Sequence[Destination], names: Sequence[str]) -> None:
        self._destinations = destinations
        self._names = names
        self._writes: dict[str, list[Placement | Fill]] = defaultdict(list)
        self._mutated: dict[str, str] = {}
        self._used: set[str] = set()
        self._touched: set[str] = set()
        self._refused: dict[str, str] = {}
        self._refused_sources: dict[str, set[str]] = defaultdict(set)
        self._refusal: str | None = None
        self._broke = False
        self._broke_at = ""
        self._untraceable: Exception | None = None
        self._made_of_nothing: set[str] = set()
        self._kept: set[tuple[str, str]] = set()
        self._elsewhere: set[int] = set()
        self._numbers: Mapping[tuple[str, str], tuple[float, ...]] = {}
        self._casts: dict[str, str] = {}
        self._cast_into: dict[str, set[str]] = defaultdict(set)
        self._wanted: dict[str, torch.dtype] = {}

    def wrote(self, destination: Destination, write: Placement | Fill) -> None:
        self._writes[destination.name].append(write)

    def reads_back(self, destination: Destination, held: Iterable[str]) -> set[str]:
        """The loader computes in this destination with what these storages hold: itself, or others of its module. Returns the
        tensors that the loader has written there so far, and refuses the plan where it has written none. That it cast them
        before is a part of what it computes in place, and no dtype of the trainer's is wrong (vLLM's `A` of Mamba-2 in float32,
        of `A_log` in bfloat16); a parameter that stays as it was written must have the trainer's."""
        sources: set[str] = set()
        for name in held:
            written = {write.source.tensor for write in self._writes[name] if isinstance(write, Placement)}
            cast = self._cast_into.get(name, set())
            if not written | cast or name.rpartition(".")[0] != destination.name.rpartition(".")[0]:
                self.refuse_all(f"{destination.name} is written from another parameter or buffer")
            elif name != destination.name:
                self.refuse(name, f"{destination.name} is computed from it", ())
            else:
                for tensor in cast:
                    self._casts.pop(tensor, None)
                    self._wanted.pop(tensor, None)
            sources |= written | cast
        return sources

    def touched(self, name: str) -> None:
        """The loader did something with this tensor."""
        self._touched.add(name)

    def used(self, names: Iterable[str]) -> None:
        """The loader took these tensors, but wrote none of their bytes."""
        self._used.update(names)

    def cast(self, name: str, sent: torch.dtype, wanted: torch.dtype, destination: str) -> None:
        """The loader would cast this tensor."""
        self._casts.setdefault(name, f"the trainer sends {sent}, the engine holds {wanted} in {destination}")
        self._wanted.setdefault(name, wanted)
        self._cast_into[destination].add(name)

    def mutated(self, source: str, how: str) -> None:
        """The loader writes to a checkpoint tensor: copies can't describe where that tensor lands."""
        self._mutated.setdefault(source, f"the loader writes to the checkpoint tensor {source} ({how})")
        self._used.add(source)

    def refuse(self, destination: str, reason: str, sources: Iterable[str]) -> None:
        """This destination has to go through the engine's own loader, which needs `sources` for it."""
        self._refused.setdefault(destination, reason)
        self._refused_sources[destination].update(sources)

    def refuse_all(self, reason: str) -> None:
        """The whole plan is unusable."""
        self._refusal = self._refusal or reason

    def wrote_elsewhere(self, what: str, storage: int) -> None:
        """The loader writes to memory that is neither of the model's parameters and buffers nor its own."""
        self._elsewhere.add(storage)
        self.refuse_all(f"{what} to a tensor that is neither a parameter nor a buffer")

    def made_of_nothing(self, destination: str) -> None:
        """The loader writes memory of its own there, into which it loaded nothing."""
        self._made_of_nothing.add(destination)

    def kept(self, module: str, attribute: str) -> None:
        """A module keeps there numbers that the loader made of checkpoint tensors."""
        self._kept.add((module, attribute))

    def read_numbers(self, held: Mapping[tuple[str, str], tuple[float, ...]]) -> None:
        """The loader read values of tensors, and modules hold these numbers after it."""
        self._numbers = held

    def untraceable(self, reason: str, error: Exception) -> None:
        """An operation on a checkpoint tensor raised `error`."""
        self._untraceable = error
        self.refuse_all(reason)

    def broke(self, reason: str, last: str, error: Exception) -> None:
        """The loader raised `error`: it can't take these tensors. `last`: the one it was given last."""
        if isinstance(error, NotImplementedError) and self._untraceable in (error, error.__context__):
            # Meta tensors can't do what it does with them (torch raises another error for a module). Real ones may fit: a real
            # load tells.
            self._touched.update(self._names)
        else:
            self._broke, self._broke_at = True, last
        self.refuse_all(reason)

    def plan(self) -> PlacementPlan:
        """The plan that describes the load."""
        if self._refusal is not None:
            untouched = () if self._broke else tuple(name for name in self._names if name not in self._touched)
            return PlacementPlan(
                refusal=self._refusal,
                broke=self._broke,
                broke_at=self._broke_at,
                unused=untouched,
                made_of_nothing=frozenset(self._made_of_nothing),
                kept=frozenset(self._kept),
                elsewhere=frozenset(self._elsewhere),
                numbers=self._numbers,
            )
        writes = self._writes
        for name, made in writes.items():
            for write in made:
                if isinstance(write, Placement) and write.source.tensor in self._mutated:
                    self.refuse(name, self._mutated[write.source.tensor], {write.source.tensor})
        placements: list[Placement] = []
        fills: list[Fill] = []
        extents: dict[str, int] = {}
        uncovered: dict[str, int] = {}
        doubled: list[str] = []
        gapped: list[str] = []
        for dest in self._destinations:
            if writes[dest.name]:
                self._check_fills(dest, writes[dest.name])
            copies = [write for write in writes[dest.name] if isinstance(write, Placement)]
            if dest.name in self._refused:
                self._refused_sources[dest.name].update(copy.source.tensor for copy in copies)
                continue
            constants = [write for write in writes[dest.name] if isinstance(write, Fill)]
            cover = coverage_of(dest, [c.dest for c in copies], [c.dest for c in constants])
            uncovered.update(cover.uncovered)
            if cover.doubled:
                doubled.append(dest.name)
            else:
                copies.sort(key=lambda copy: copy.dest.offset)
            if copies:
                extents[dest.name] = dest.numel
                gapped += [dest.name] if cover.has_gaps else []
            placements += copies
            fills += constants
        placed = {placement.source.tensor for placement in placements}
        used = self._used.union(placed, *self._refused_sources.values())
        return PlacementPlan(
            placements=tuple(placements),
            fills=tuple(fills),
            refused=dict(self._refused),
            refused_sources={name: tuple(sorted(self._refused_sources[name])) for name in self._refused},
            unused=tuple(name for name in self._names if name not in used),
            numbers=self._numbers,
            made_of_nothing=frozenset(self._made_of_nothing),
            uncovered=uncovered,
            doubled=tuple(doubled),
            dtype_conflicts=dict(self._casts),
            dtypes_wanted=dict(self._wanted),
            extents=extents,
            gapped=frozenset(gapped),
        )

    def _check_fills(self, dest: Destination, writes: Sequence[Placement | Fill]) -> None:
        """Refuses a destination that holds constants only, or a constant over a copy: a replay writes constants first, and only
        into destinations that it also copies to."""
        if not any(isinstance(write, Placement) for write in writes):
            self.refuse(dest.name, "only ever filled with a constant", ())
        earlier: list[Region] = []
        for write in writes:
            if isinstance(write, Placement):
                earlier.append(write.dest)
            elif any(may_overlap(write.dest, region, dest.frame) for region in earlier):
                self.refuse(dest.name, "filled with a constant after it was copied to", ())
