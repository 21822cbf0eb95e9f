"""Writes an update into the live model piece by piece while the engine is stopped, without a second set or a segment.

A piece of a plain parameter goes to its place at once. Pieces of a rebuilt module wait in that module's memory until the last
piece has arrived; then the engine's own post-processing rebuilds the module, and that memory is freed. There is no way back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul, sub

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import Throttle
from inference_plugin.install.memory import return_freed_memory
from inference_plugin.install.plan import Placement
from inference_plugin.install.policies import PolicyInstaller, WayBack
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, TornReplica, first_few
from inference_plugin.wire.geometry import Box, overlap
from inference_plugin.wire.tensors import narrowed
from inference_plugin.wire.zone import strides_of_box

__all__ = ["StreamingInstaller"]


@dataclass(frozen=True)
class _Place:
    """Where a box of a checkpoint tensor goes: a storage, the offset of the box's first element there, and a stride for each
    dimension. `module`: the rebuilt module in whose memory the storage lies; "" for a live storage."""

    box: Box
    module: str
    key: str
    offset: int
    strides: tuple[int, ...]


@dataclass
class _Passing:
    """One update while it is written. `memory`: storages of incomplete rebuilt modules, by module and key. `missing`: number of
    elements that each rebuilt module still waits for."""

    storages: dict[str, torch.Tensor]
    missing: dict[str, int]
    memory: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    placed: int = 0
    held_bytes: int = 0


class StreamingInstaller(PolicyInstaller):
    """Writes the live parameters as the bytes arrive."""

    install_policy = "streaming"

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        """Raises `EngineUnsupported` for a model that needs whole tensors."""
        super().__init__(agreement, way_back)
        if agreement.why_loader:
            raise _refused(f"the engine's own loader has to fill it: {agreement.why_loader}")
        if agreement.plan.repeats:
            raise _refused(
                "several tensors fill one place of the engine, and have to be compared before the installation"
            )
        if self._layout.reducing:
            raise _refused(
                f"post-processing of {first_few(self._layout.reducing)} reduces over the ranks, which needs all bytes beforehand"
            )
        self._awaiting: dict[str, list[str]] = {}
        """The modules that are also rebuilt from a plain storage, by its key."""
        for module in self._layout.rebuilt:
            for key in self._layout.plain_keys(module):
                self._awaiting.setdefault(key, []).append(module)
        self._places: dict[int, list[_Place]] = {}
        self._elements: dict[str, int] = dict.fromkeys(self._layout.rebuilt, 0)
        self._whole = 0
        placements = [("", placement) for placement in self._layout.plain_placements]
        placements += [(name, p) for name, some in self._layout.rebuilt_placements.items() for p in some]
        for module, placement in placements:
            place = self._place_of(module, placement)
            self._places.setdefault(place.box.tensor, []).append(place)
            self._whole += placement.dest.numel
            for each in self._waiting_for(place):
                self._elements[each] += placement.dest.numel
        self._passing: _Passing | None = None
        self._peak_bytes = 0

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def place(self, box: Box, tensor: torch.Tensor) -> None:
        """Raises what the engine's post-processing raises, if the piece completes a module."""
        passing = self._passing or self._begin()
        for place in self._places.get(box.tensor, ()):
            shared = overlap(place.box.offsets, place.box.sizes, box.offsets, box.sizes)
            if shared is None:
                continue
            offsets, sizes = shared
            source = narrowed(tensor, tuple(map(sub, offsets, box.offsets)), sizes)
            start = place.offset + sum(map(mul, map(sub, offsets, place.box.offsets), place.strides))
            storage = self._storage(passing, place)  # made outside, so that post-processing may write to it
            with torch.inference_mode():
                storage.as_strided(sizes, place.strides, start).copy_(source)
            del storage  # whose memory the completed module gives back
            passing.placed += source.numel()
            for module in self._waiting_for(place):
                passing.missing[module] -= source.numel()
                if not passing.missing[module]:
                    self._complete(passing, module)

    def _put(self, segment: torch.Tensor) -> None:
        """Completes the update. Raises `CommitFailed` if a piece is missing."""
        passing = self._passing or self._begin()
        if passing.placed != self._whole or any(passing.missing.values()):
            raise CommitFailed(
                f"{passing.placed} of {self._whole} elements arrived, and these modules are incomplete: "
                f"{first_few([name for name, missing in passing.missing.items() if missing])}",
                phase="commit",
            )
        for module, missing in self._elements.items():
            if not missing:  # rebuilt only from storages that other groups write
                self._complete(passing, module)
        self._layout.reset_references()

    def _put_back(self, previous: torch.Tensor | None) -> None:
        self._passing = None
        raise TornReplica("the streamed bytes have overwritten the previous version", phase="commit")

    def finish(self) -> None:
        self._passing = None
        super().finish()

    def discard(self) -> None:
        self._passing = None

    # --- beside the engine's thread ----------------------------------------------------------------------------------

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        """The pieces are already placed; returns the most bytes that rebuilt modules held at once."""
        return self._peak_bytes

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _begin(self) -> _Passing:
        self._layout.look_at_references()
        self._layout.check_references()
        self._drain()
        self._model.note_updated(self._layout.written)
        self._way_back.touched = True
        self._peak_bytes = 0
        self._passing = passing = _Passing(self._layout.live_storages(), dict(self._elements))
        self._fill_constants(passing.storages)
        return passing

    def _storage(self, passing: _Passing, place: _Place) -> torch.Tensor:
        if not place.module:
            return passing.storages[place.key]
        if (memory := passing.memory.get(place.module)) is None:
            memory = {key: self._layout.new_storage(key) for key in self._layout.rebuilt_keys(place.module)}
            self._fill_constants(memory)
            passing.memory[place.module] = memory
            passing.held_bytes += sum(t.nbytes for t in memory.values())
            self._peak_bytes = max(self._peak_bytes, passing.held_bytes)
        return memory[place.key]

    def _complete(self, passing: _Passing, module: str) -> None:
        memory = passing.memory.pop(module, {})
        self._layout.move_in(self._layout.rebuild(module, {**passing.storages, **memory}))
        passing.held_bytes -= sum(t.nbytes for t in memory.values())
        memory.clear()
        return_freed_memory()  # without this, the heap would keep about a model's worth of freed memory

    def _waiting_for(self, place: _Place) -> list[str]:
        """The modules that are rebuilt from the bytes at a place."""
        return [place.module] if place.module else self._awaiting.get(place.key, [])

    def _place_of(self, module: str, placement: Placement) -> _Place:
        if (box := self._agreement.box_read(placement)) is None:
            raise _refused(f"the part of {placement.source.tensor} that the engine takes is no box")
        strides = strides_of_box(box, placement.shape, placement.source, placement.dest)
        return _Place(box, module, placement.dest.tensor, placement.dest.offset, strides)


def _refused(why: str) -> EngineUnsupported:
    return EngineUnsupported(
        f"streaming: {why}", hint="install='auto' chooses a policy that this model allows", phase="open"
    )
