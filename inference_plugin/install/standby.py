"""A complete second set of weights, and its swap with the live one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.storages import flat
from inference_plugin.wire.errors import CommitFailed, first_few

__all__ = ["Move", "StandbyWeights"]


class Move(NamedTuple):
    """One live tensor and the data that it is to hold: `holder[name] is tensor`, and `key` names its storage."""

    key: str
    holder: dict[str, Any]
    name: str
    tensor: torch.Tensor
    data: torch.Tensor


@dataclass
class StandbyWeights:
    """Data of plain parameters, and parts of rebuilt modules."""

    moves: list[Move]
    modules: list[RebuiltModule]

    @property
    def storages(self) -> dict[str, torch.Tensor]:
        """The plain storages of the set, flat, by their keys."""
        found: dict[str, torch.Tensor] = {}
        for move in self.moves:
            if move.key not in found:
                found[move.key] = flat(move.data)
        return found

    def check_current(self) -> None:
        """Raises `CommitFailed` where the engine replaced a parameter since the set was made."""
        if gone := [move.key for move in self.moves if move.holder.get(move.name) is not move.tensor]:
            raise CommitFailed(
                f"the engine replaced parameters while the update was prepared: {first_few(gone)}",
                hint="the next update prepares anew",
                phase="commit",
            )

    def swap(self, live_modules: Mapping[str, nn.Module], *, in_place: bool) -> StandbyWeights:
        """Engine's thread: puts this set in the place of the live one; returns what was there.

        No bytes move unless `in_place`, where addresses of parameters must stay.
        """
        replaced = StandbyWeights([], [])
        for move in self.moves:
            tensor = move.tensor
            held = tensor.data
            replaced.moves.append(move._replace(data=held.clone() if in_place else held))
            if in_place:
                held.copy_(move.data)
            else:
                tensor.data = move.data
        for module in self.modules:
            replaced.modules.append(module.move_into(live_modules[module.module], in_place=in_place))
        return replaced
