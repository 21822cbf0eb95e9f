"""`copy` on a device: the new bytes are in the device's memory before the engine stops."""

from __future__ import annotations

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import Throttle
from inference_plugin.install.plan import in_place
from inference_plugin.install.policies import CopyInstaller, Tensors, WayBack, poisoned_like
from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.replay import Replay
from inference_plugin.wire.errors import CommitFailed

__all__ = ["StagedInstaller"]


class StagedInstaller(CopyInstaller):
    """`copy` for a device that has room for a second set: the bytes reach the device before the engine stops, and at the commit
    they only move within its memory. Addresses stay."""

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._staged: tuple[Replay, list[RebuiltModule]] | None = None
        self._memory: dict[str, torch.Tensor] = {}

    @property
    def holds_second_set(self) -> bool:
        return bool(self._memory)

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        live, sources = self._layout.live_storages(), self._sources(segment)
        if not self._memory:
            self._memory = {key: poisoned_like(storage) for key, storage in self._layout.own_storages().items()}
        memory = self._memory
        upload = self._kept("memory", segment.data_ptr(), memory, lambda: self._bind("", sources, memory))
        upload.run(between=throttle)
        modules = self._make_beforehand(sources, memory, throttle)
        self._note_operands(sources, lambda _: memory, throttle)
        self._staged = self._kept("within", 0, live, lambda: self._bind_within(memory, live)), modules
        return sum(t.nbytes for t in self._memory.values()) + self._layout.rebuilt_nbytes

    def _bind_within(self, memory: Tensors, live: Tensors) -> Replay:
        return Replay(self._copies(in_place(self._layout.plain_placements), live), memory, live).ready()

    def _put(self, segment: torch.Tensor) -> None:
        if self._staged is None:
            raise CommitFailed("nothing was prepared for this transaction", phase="commit")
        (replay, modules), self._staged = self._staged, None
        at_commit = self._rebuild(self._layout.reducing, self._sources(segment), self._memory, lambda: None)
        self._way_back.touched = True
        replay.run()
        for module in (*modules, *at_commit):
            self._layout.move_in(module, in_place=True)  # the next update is staged in the same memory
        self._layout.reset_references()

    def discard(self) -> None:
        self._staged = None

    def drop_second_set(self) -> None:
        self._staged, self._memory = None, {}
        for kind in ("memory", "within"):  # whose copies hold that memory
            self._bound.pop(kind, None)

    def close(self) -> None:
        self.drop_second_set()
        super().close()
