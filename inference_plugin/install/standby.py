"""A complete second set of weights, and its swap with the live one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from inference_plugin.install.rebuilt import RebuiltModule, before_writing
from inference_plugin.install.storages import flat
from inference_plugin.wire.errors import CommitFailed, first_few

__all__ = ["LiveTensor", "StandbyWeights"]


class LiveTensor(NamedTuple):
    """A tensor of the live model: `holder[name] is tensor`, and `key` names its storage."""

    key: str
    holder: dict[str, Any]
    name: str
    tensor: torch.Tensor


@dataclass
class StandbyWeights:
    """What each of some live tensors is to hold, in the same order (`data`), and parts of rebuilt modules."""

    tensors: list[LiveTensor]
    data: list[torch.Tensor]
    modules: list[RebuiltModule]

    @property
    def storages(self) -> dict[str, torch.Tensor]:
        """The plain storages of the set, flat, by their keys."""
        found: dict[str, torch.Tensor] = {}
        for live, data in zip(self.tensors, self.data, strict=True):
            if live.key not in found:
                found[live.key] = flat(data)
        return found

    def check_current(self) -> None:
        """Raises `CommitFailed` where the engine replaced a parameter since the set was made."""
        if gone := [live.key for live in self.tensors if live.holder.get(live.name) is not live.tensor]:
            raise CommitFailed(
                f"the engine replaced parameters while the update was prepared: {first_few(gone)}",
                hint="the next update prepares anew",
                phase="commit",
            )

    def swap(self, live_modules: Mapping[str, nn.Module], *, in_place: bool) -> StandbyWeights:
        """Engine's thread: puts this set in the place of the live one; returns what was there.

        No bytes move unless `in_place`, where addresses of parameters must stay. Generation stands meanwhile, and a model has
        hundreds of tensors: the loops do nothing else. Raises `CommitFailed` where the live set is as it was.
        """
        held = [live.tensor.data for live in self.tensors]
        if in_place:
            held = [before_writing(data) for data in held]  # all of them first: tensors may share memory
        replaced = StandbyWeights(self.tensors, held, [])
        self._place(in_place=in_place)
        try:
            for module in self.modules:
                replaced.modules.append(module.move_into(live_modules[module.module], in_place=in_place))
        except CommitFailed:
            replaced._place(in_place=in_place)
            for module in replaced.modules:
                module.move_into(live_modules[module.module], in_place=in_place)
            raise
        return replaced

    def _place(self, *, in_place: bool) -> None:
        if in_place:
            for live, new in zip(self.tensors, self.data, strict=True):
                live.tensor.data.copy_(new)
        else:
            for live, new in zip(self.tensors, self.data, strict=True):
                live.tensor.data = new
