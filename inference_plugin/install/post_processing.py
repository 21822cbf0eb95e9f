"""Runs the engine's post-processing after a load on stand-ins for single modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from inference_plugin.install.collectives import Answers, Collectives
from inference_plugin.install.graph import Path, child_at, equivalent
from inference_plugin.install.live_storages import LiveStorages
from inference_plugin.install.stand_in import ABSENT, StandIn
from inference_plugin.install.storages import equal_bytes, flat, storage_id, with_data
from inference_plugin.wire.geometry import region_of
from inference_plugin.wire.tensors import bytes_view

__all__ = ["PostProcessing"]

NOISE_BOUND = 64
"""Trial weights are bytes below this: small positive numbers of every dtype, no NaN."""


class PostProcessing:
    """Post-processes ("finishes") stand-ins as the engine does modules, and compares them with the live modules.

    `filled`: the storages that a checkpoint fills, by key.
    """

    def __init__(self, storages: LiveStorages, filled: Collection[str]) -> None:
        self.storages = storages
        self.model = storages.model
        self.skeleton_modules = dict(self.model.skeleton.named_modules())
        self.live_modules = dict(self.model.live.named_modules())
        # An engine may remove a module after a load; what it derived from that module belongs to the module that read it.
        self.finishers = {n: finish for n, finish in self.model.finishers().items() if n in self.live_modules}
        self._name_of = {id(module): name for name, module in reversed(self.skeleton_modules.items())}
        self._filled = filled
        self._tree = [
            (parent, name, child) for parent in self.live_modules.values() for name, child in parent._modules.items()
        ]

    def is_current(self) -> bool:
        """Whether the live model still computes with `live_modules`: nobody has put other modules into it."""
        return all(parent._modules.get(name) is child for parent, name, child in self._tree)

    @torch.inference_mode(False)  # a tensor that is made in it doesn't tell that post-processing has written to it
    def stand_in(self, module: str, storage: Callable[[str], torch.Tensor], answers: Answers | None = None) -> StandIn:
        """A stand-in for `module` over the storages that `storage` returns by key. `answers`: as for `finish`, for submodules
        that are finished before `module`."""
        given: dict[str, torch.Tensor] = {}
        keys: dict[int, str] = {}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            key = self.storages.key_in_skeleton(tensor)
            if key is None:
                return tensor if tensor.is_meta else tensor.detach().clone().to(self.model.device)
            if key not in given:
                given[key] = storage(key)
                keys[storage_id(given[key])] = key
            whole = given[key]
            data = whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())
            return with_data(tensor, data)

        def key_of(tensor: torch.Tensor, alive: Mapping[str, torch.Tensor] = given) -> str | None:
            return keys.get(
                storage_id(tensor)
            )  # unique while they live: post-processing may let go of them (`.data = ...`)

        return self._made(module, real, key_of, answers)

    def _made(
        self,
        name: str,
        real: Callable[[torch.Tensor], torch.Tensor],
        key_of: Callable[[torch.Tensor], str | None],
        answers: Answers | None,
    ) -> StandIn:
        # A method, not a nested function: a recursive closure refers to itself, and would keep an update's memory until
        # Python collects garbage.
        inner = {attribute: self._made(read, real, key_of, answers) for attribute, read in self.read_by(name).items()}
        for attribute, read in self.read_by(name).items():
            if read in self.finishers and self.model.reads_finished:
                self.finish(read, inner[attribute], answers)
        return StandIn(self.skeleton_modules[name], real, key_of, self.model.boundary, inner)

    def storage_bytes(self, module: str) -> int:
        """The memory that a stand-in for `module` takes where none of its storages is given."""
        tensors = [tensor for tensor in self.skeleton_modules[module]._parameters.values() if tensor is not None]
        keys = {key for tensor in tensors if (key := self.storages.key_in_skeleton(tensor)) is not None}
        read = sum(map(self.storage_bytes, self.read_by(module).values()))
        return sum(self.storages.shapes[key].nbytes for key in keys) + read

    def read_by(self, module: str) -> dict[str, str]:
        """The submodules whose weights the post-processing of `module` reads: attribute -> module."""
        original = self.skeleton_modules[module]
        return {name: self._name_of[id(getattr(original, name))] for name in self.model.reads(original)}

    @torch.inference_mode(False)
    def finish(self, module: str, stand_in: StandIn, answers: Answers | None = None) -> None:
        """Runs the engine's post-processing of `module` on a stand-in for it. `answers` answers its collectives. Raises
        `EngineUnsupported` for collectives that `Collectives` does not know, and for any collective without `answers`."""
        with self.model.computing(), Collectives(f"the engine's post-processing of {module}", answers):
            self.finishers[module](stand_in.module)

    def noise(self, seed: int) -> Callable[[str], torch.Tensor]:
        """Trial weights: random if a checkpoint fills the storage, else as the constructor left them."""

        def storage(key: str) -> torch.Tensor:
            if key in self.model.constants and key not in self._filled:
                return flat(self.model.constants[key]).clone().to(self.model.device)
            random = torch.Generator().manual_seed(seed)
            made = torch.empty(self.storages.shapes[key].shape, dtype=self.storages.shapes[key].dtype)
            bytes_view(made).random_(0, NOISE_BOUND, generator=random)
            return made.to(self.storages.device_of(key))

        return storage

    def weights(self, updated: Mapping[str, torch.Tensor], plain: Collection[str]) -> Callable[[str], torch.Tensor]:
        """The storages of an update. For all others, copies of the engine's own, because post-processing may write to them: of
        the live storage if it is one of `plain`, which may hold a checkpoint's values, else of what the constructor left."""
        live = self.storages.unchanged()

        def storage(key: str) -> torch.Tensor:
            if key in updated:
                return updated[key]
            if key in plain and key in live:
                return live[key].clone()
            if key in self.model.constants:
                return flat(self.model.constants[key]).clone().to(self.model.device)
            return flat(self.storages.tensors[key]).clone()

        return storage

    def settled(self, module: str, path: Path, value: Any, stand_in: StandIn) -> bool:
        """Whether the live module holds the same as a finished stand-in at `path`."""
        live: Any
        try:
            live = child_at(self.live_modules[module], path)
        except (LookupError, AttributeError):
            live = ABSENT
        if value is ABSENT or live is ABSENT:
            return value is live

        def same(held: torch.Tensor, made: torch.Tensor) -> bool:
            region = stand_in.region(made)
            if region is None and not self.storages.is_registered(made):
                return equal_bytes(held, made)
            own = self.storages.tensors.get(region.tensor) if region is not None else made
            shares = own is not None and storage_id(held) == storage_id(own)
            return shares and region_of("", held) == region_of("", made) and held.dtype == made.dtype

        return equivalent(live, stand_in.for_live(value, self.live_modules[module]), same, self.model.boundary)
