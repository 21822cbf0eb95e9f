"""Matches the live model's storages with those of its skeleton."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inference_plugin.install.contract import EngineModel
from inference_plugin.install.storages import flat, keys_by_name, named_tensors, storage_id, storage_views
from inference_plugin.wire.errors import EngineUnsupported, VersionConflict

__all__ = ["LiveStorages", "live_ties"]


class LiveStorages:
    """The live tensor of each storage of the skeleton, by key. `ties`: what `live_ties` returned. Raises `VersionConflict` while
    the engine's own load has taken the weights out of the live model."""

    def __init__(self, model: EngineModel, ties: Mapping[str, str]) -> None:
        self.model = model
        self.shapes = storage_views(model.skeleton)
        self.key_of = {name: ties.get(key, key) for name, key in keys_by_name(model.skeleton).items()}
        """The key of each parameter and buffer by name, including those that the engine added to the live model as views."""
        self._key_of_skeleton = {
            storage_id(tensor): self.key_of[name] for name, tensor, _ in named_tensors(model.skeleton)
        }
        self.tensors: dict[str, torch.Tensor] = {}
        """One live tensor of each storage, by key."""
        self._key_of_live: dict[int, str] = {}
        self._live_ids: set[int] = set()
        for name, tensor, _ in named_tensors(model.live):
            _check_has_values(name, tensor)
            self._live_ids.add(id(tensor))
            if (key := self.key_of.get(name)) is not None:
                self.tensors.setdefault(key, tensor)
                if tensor.numel():
                    self._key_of_live.setdefault(storage_id(tensor), key)
        for name, tensor, _ in named_tensors(model.live):
            if name not in self.key_of and tensor.numel() and (key := self.key_in_live(tensor)) is not None:
                self.key_of[name] = key

    def key_in_skeleton(self, tensor: torch.Tensor) -> str | None:
        """The key of the skeleton's storage that `tensor` lies in, if it lies in one."""
        return self._key_of_skeleton.get(storage_id(tensor))

    def key_in_live(self, tensor: torch.Tensor) -> str | None:
        """The key of the live storage that `tensor` lies in, if the skeleton has it. Describes the time of construction: an
        update may give live tensors other memory."""
        return self._key_of_live.get(storage_id(tensor))

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is itself a parameter or buffer of the live model."""
        return id(tensor) in self._live_ids

    def unchanged(self) -> dict[str, torch.Tensor]:
        """The live storages that have the skeleton's size and dtype, as flat tensors by key."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor, _ in named_tensors(self.model.live):
            key = self.key_of.get(name)
            if key is None or key in found:
                continue
            if self._has_form(key, storage := flat(tensor)):
                found[key] = storage
        return found

    def _has_form(self, key: str, storage: torch.Tensor) -> bool:
        shape = self.shapes[key]
        return storage.dtype == shape.dtype and storage.numel() == shape.numel() and bool(storage.numel())

    def device_of(self, key: str) -> torch.device:
        held = self.tensors.get(key)
        return held.device if held is not None else self.model.device


def live_ties(model: EngineModel) -> dict[str, str]:
    """Storages that the live model ties and the skeleton keeps apart: the second storage's key -> the first one's.

    An engine may tie a head to its embedding after the load, if both turned out equal. Raises `EngineUnsupported` for
    the reverse, a tie of the skeleton that the live model doesn't have; `VersionConflict` as `LiveStorages` does.
    """
    keys = keys_by_name(model.skeleton)
    ties: dict[str, str] = {}
    key_of_storage: dict[int, str] = {}
    storage_of_key: dict[str, tuple[int, str]] = {}
    for name, tensor, _ in named_tensors(model.live):
        _check_has_values(name, tensor)
        if not tensor.numel() or (key := keys.get(name)) is None:
            continue
        first = key_of_storage.setdefault(storage_id(tensor), key)
        if first != key:
            ties[key] = first
        storage, other = storage_of_key.setdefault(key, (storage_id(tensor), name))
        if storage != storage_id(tensor):
            raise EngineUnsupported(
                f"{name} and {other} are tied by the model's class, and are two weights in the running engine",
                hint="start the engine from a checkpoint whose configuration says how its weights are tied; if the engine "
                "packs one of the two for its processor (a convolution in bfloat16 on a CPU), serve the model in another dtype",
                phase="open",
            )
    return ties


def _check_has_values(name: str, live: torch.Tensor) -> None:
    """vLLM's `reload_weights` puts parameters on meta, and the ones of before back once each layer is loaded."""
    if live.is_meta and live.numel():
        raise VersionConflict(
            f"a command of the engine's own is loading weights: {name} has no values at the moment",
            hint="update again once that command has ended",
            phase="open",
        )
