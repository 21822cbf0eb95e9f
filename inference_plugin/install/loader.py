"""Standbys that the engine's own `load_weights` fills, for models of which no plan was proven as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import Throttle
from inference_plugin.install.parts import Part, load_part
from inference_plugin.install.policies import StandbyInstaller, Tensors, WayBack
from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.standby import StandbyWeights
from inference_plugin.install.storages import storage_views
from inference_plugin.install.trial_load import POISON, handed_out_bytes, materialised
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.tensors import bytes_view

__all__ = ["LoaderInstaller", "PartLoaderInstaller"]


class PartLoaderInstaller(StandbyInstaller):
    """A standby that the plan fills, except for some parts that the engine's own loader fills one after the other."""

    mechanism = "loader"

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        storages, sources = self._second_storages(), self._sources(segment)
        for part in self._agreement.parts:
            if plain := storages.keys() & set(part.destinations):
                loaded = self._load_part(part, sources)
                for key in plain:
                    storages[key].copy_(loaded[key])
                throttle(sum(t.nbytes for t in loaded.values()))
        return storages, self._fill_rest(storages, sources, throttle)

    def _memory_of(self, module: str, sources: Tensors, throttle: Throttle) -> dict[str, torch.Tensor]:
        memory = super()._memory_of(module, sources, throttle)
        for part in self._agreement.parts:
            if not memory.keys().isdisjoint(part.destinations):
                memory |= {key: t for key, t in self._load_part(part, sources).items() if key in memory}
        return memory

    def _load_part(self, part: Part, sources: Tensors) -> Tensors:
        model, live = self._model, self._layout.live_storages()

        def start(key: str, storage: torch.Tensor) -> None:
            if self._agreement.partial and key in live:
                storage.copy_(live[key])
            elif (constant := model.constants.get(key)) is not None and constant.numel() == storage.numel():
                storage.copy_(constant.reshape(-1))
            else:
                bytes_view(storage).fill_(POISON)

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
            return model.load_weights(model.skeleton, tensors)

        with model.lock:
            return load_part(part, model.skeleton, load, sources, start, model.device)


class LoaderInstaller(StandbyInstaller):
    """A standby that the engine's own loader fills from copies of the staged tensors, in memory for the whole model."""

    mechanism = "loader"

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._reducing: dict[str, Tensors] = {}
        """The storages from which the modules in `LiveLayout.reducing` are rebuilt at the commit."""

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        loaded = self._load(segment)
        own = self._layout.own_storages()
        storages = {key: storage for key, storage in loaded.items() if key in own}
        self._reducing = {
            name: {key: loaded[key] for key in self._layout.rebuilt_keys(name)} for name in self._layout.reducing
        }
        modules = list(self._rebuild(self._layout.beforehand, loaded, storages, throttle))
        self._note_operands(loaded, lambda _: storages, throttle)
        return storages, modules

    def _memory_of(self, module: str, sources: Tensors, throttle: Throttle) -> dict[str, torch.Tensor]:
        return {key: sources[key] for key in self._layout.rebuilt_keys(module)}

    def _make_at_commit(self, segment: torch.Tensor, storages: Tensors) -> list[RebuiltModule]:
        loaded = {key: tensor for memory in self._reducing.values() for key, tensor in memory.items()}
        return list(self._rebuild(self._layout.reducing, loaded, storages, lambda _: None))

    def discard(self) -> None:
        self._reducing = {}
        super().discard()

    def finish(self) -> None:
        self._reducing = {}
        super().finish()

    def _load(self, segment: torch.Tensor) -> dict[str, torch.Tensor]:
        """The skeleton's storages after a real load, by key."""
        ignored = self._agreement.ignored  # their bytes were never sent
        sources = {name: view for name, view in self._sources(segment).items() if name not in ignored}
        self._check_fits(self._layout.nbytes + handed_out_bytes(view.nbytes for view in sources.values()))
        skeleton, constants = self._model.skeleton, self._model.constants
        live = self._layout.live_storages()
        empty = partial(torch.empty, device=self._model.device)
        with self._model.lock, materialised(skeleton, set(storage_views(skeleton)), empty) as held:
            storages = dict(held.flats)
            for key, storage in storages.items():
                constant = constants.get(key)
                if self._agreement.partial and key in live and live[key].numel() == storage.numel():
                    storage.copy_(live[key])
                elif constant is not None and constant.numel() == storage.numel():
                    storage.copy_(constant.reshape(-1))
                else:
                    bytes_view(storage).fill_(POISON)
            self._model.load_weights(skeleton, ((name, view.clone()) for name, view in sources.items()))
            held.gather(skeleton)
        for second, first in self._agreement.ties.items():
            one, other = storages.get(second), storages.get(first)
            if one is not None and other is not None and not torch.equal(bytes_view(one), bytes_view(other)):
                raise ManifestMismatch(
                    f"{second} and {first} are one weight in the running engine, and the trainer sent two",
                    hint="tie them in the trainer too",
                )
        return storages

    def _keep(self, weights: StandbyWeights) -> StandbyWeights:
        return weights
