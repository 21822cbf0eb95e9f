"""Standbys that the engine's own `load_weights` fills, for models of which no plan was proven as a whole."""

from __future__ import annotations

from functools import partial

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import Throttle
from inference_plugin.install.parts import Part
from inference_plugin.install.policies import StandbyInstaller, Tensors, WayBack
from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.standby import StandbyWeights
from inference_plugin.install.storages import storage_views
from inference_plugin.install.trial_load import handed_out_bytes, loaded
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.tensors import bytes_view

__all__ = ["LoaderInstaller", "PartLoaderInstaller"]


class _FilledByLoader(StandbyInstaller):
    mechanism = "loader"

    def _load(self, chosen: set[str], sources: Tensors) -> dict[str, torch.Tensor]:
        """The skeleton's storages of these keys after a real load of copies of the tensors, flat, by key."""
        model, live = self._model, self._layout.live_storages()

        def start(key: str, storage: torch.Tensor) -> None:
            if self._agreement.partial and key in live:
                storage.copy_(live[key])
            else:
                self._layout.start_storage(key, storage)

        load, copies = partial(model.load_weights, model.skeleton), ((n, view.clone()) for n, view in sources.items())
        with model.lock, loaded(model.skeleton, chosen, load, copies, start, model.device) as held:
            return dict(held.flats)


class PartLoaderInstaller(_FilledByLoader):
    """A standby that the plan fills, except for some parts that the engine's own loader fills one after the other."""

    def _sources(self, segment: torch.Tensor) -> Tensors:
        return {**super()._sources(segment), **self._agreement.tensors_in(segment)}

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        storages, sources = self._second_storages(), self._sources(segment)
        for part in self._agreement.parts:
            if plain := storages.keys() & set(part.destinations):
                loaded = self._load_part(part, sources)
                for key in plain:
                    storages[key].copy_(loaded[key])
                throttle()
        return storages, self._fill_rest(storages, sources, throttle)

    def _memory_of(self, module: str, sources: Tensors, throttle: Throttle) -> dict[str, torch.Tensor]:
        memory = super()._memory_of(module, sources, throttle)
        for part in self._agreement.parts:
            if not memory.keys().isdisjoint(part.destinations):
                memory |= {key: t for key, t in self._load_part(part, sources).items() if key in memory}
        return memory

    def _load_part(self, part: Part, sources: Tensors) -> Tensors:
        return self._load(set(part.destinations), {name: sources[name] for name in part.sources})


class LoaderInstaller(_FilledByLoader):
    """A standby that the engine's own loader fills from copies of the staged tensors, in memory for the whole model."""

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._reducing: dict[str, Tensors] = {}
        """The storages from which the modules in `LiveLayout.reducing` are rebuilt at the commit."""

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        every, own = self._load_all(segment), self._layout.own_storages()
        storages = {key: storage for key, storage in every.items() if key in own}
        self._reducing = {
            name: {key: every[key] for key in self._layout.rebuilt_keys(name)} for name in self._layout.reducing
        }
        modules = self._make_beforehand(every, storages, throttle)
        self._note_operands(every, lambda _: storages, throttle)
        return storages, modules

    def _memory_of(self, module: str, sources: Tensors, throttle: Throttle) -> dict[str, torch.Tensor]:
        return {key: sources[key] for key in self._layout.rebuilt_keys(module)}

    def _make_at_commit(self, segment: torch.Tensor, storages: Tensors) -> list[RebuiltModule]:
        kept = {key: tensor for memory in self._reducing.values() for key, tensor in memory.items()}
        return list(self._rebuild(self._layout.reducing, kept, storages, lambda: None))

    def discard(self) -> None:
        self._reducing = {}
        super().discard()

    def finish(self) -> None:
        self._reducing = {}
        super().finish()

    def _load_all(self, segment: torch.Tensor) -> dict[str, torch.Tensor]:
        """The skeleton's storages after a real load, by key."""
        ignored = self._agreement.ignored  # their bytes were never sent
        sources = {name: view for name, view in self._agreement.tensors_in(segment).items() if name not in ignored}
        self._check_fits(self._layout.nbytes + handed_out_bytes(view.nbytes for view in sources.values()))
        storages = self._load(set(storage_views(self._model.skeleton)), sources)
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
