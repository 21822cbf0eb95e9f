"""Finds out whether post-processing writes over what no checkpoint fills: an engine may pad experts, and zero the padding later.

vLLM makes the experts of `fp8_per_block` as large as whole blocks of 128, and before it quantises them, it zeroes what lies
beyond the checkpoint's rows and columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

import torch

from inference_plugin.install.collectives import Noted
from inference_plugin.install.plan import PlacementPlan
from inference_plugin.install.post_processing import PostProcessing
from inference_plugin.install.stand_in import StandIn
from inference_plugin.install.storages import equal_bytes
from inference_plugin.install.trial_load import poison
from inference_plugin.install.trials import finished_alike
from inference_plugin.wire.geometry import Region

__all__ = ["Padding"]


class Padding:
    """Elements that `plan` leaves unwritten in the storages `uncovered`, by key. Each module has a trial of its own: how far
    post-processing zeroes may hang on any number that a module or its helpers hold."""

    def __init__(self, post: PostProcessing, plan: PlacementPlan, uncovered: Collection[str]) -> None:
        self._post = post
        self._planned = plan.extents.keys()
        self._uncovered = uncovered
        self._filled: dict[str, list[Region]] = defaultdict(list)
        for region in (*(p.dest for p in plan.placements), *(f.dest for f in plan.fills)):
            if region.tensor in uncovered:
                self._filled[region.tensor].append(region)
        self._known: dict[tuple[str, ...], bool] = {}

    def is_overwritten(self, module: str, keys: Collection[str]) -> bool:
        """Whether `module` is finished to the same, whatever the unwritten elements of the storages `keys` hold."""
        padded = sorted(key for key in keys if key in self._uncovered)
        if not padded or not self._planned >= set(padded):
            return not padded
        known = (module, *padded)
        if known not in self._known:
            self._known[known] = self._try(module, padded)
        return self._known[known]

    def _try(self, module: str, padded: Collection[str]) -> bool:
        noise = self._post.noise(1)

        def poisoned(key: str) -> torch.Tensor:
            whole = noise(key)
            if key not in padded:
                return whole
            storage = torch.empty_like(whole)
            poison(storage)
            for region in self._filled[key]:
                region.of(storage).copy_(region.of(whole))
            return storage

        (one, noted), (other, noted_too) = self._finished(module, noise), self._finished(module, poisoned)
        held, again = ({**each.module._parameters, **each.module._buffers} for each in (one, other))
        return (
            noted.operands == noted_too.operands
            and finished_alike(self._post, one, other)
            and all(tensor is None or equal_bytes(again.get(name), tensor) for name, tensor in held.items())
        )

    def _finished(self, module: str, storage: Callable[[str], torch.Tensor]) -> tuple[StandIn, Noted]:
        noted = Noted()
        stand_in = self._post.stand_in(module, storage, noted)
        self._post.finish(module, stand_in, noted)
        return stand_in, noted
