"""What no update brings back, kept on the host while an engine has discarded the memory of its weights.

vLLM's `sleep(level=2)` and SGLang's `release_memory_occupation` keep the served model's registered buffers themselves, and lose
everything else in that memory. An update brings the weights back. It brings back neither tensors that modules hold as plain
attributes, such as the slopes of ALiBi in an attention implementation, nor parameters that no checkpoint fills. LoRA slots are
filled again from the engine's own copies of adapters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import SMALL_ELEMENTS
from inference_plugin.install.contract import AdapterSlots
from inference_plugin.install.graph import tensors_under

__all__ = ["Keepsakes"]


class Keepsakes:
    """Of one rank; used on the engine's own thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Live memory, as bytes, and its copy on the host."""
        self._slots: AdapterSlots | None = None
        """The LoRA slots that are lost."""

    def take(self, models: Sequence[LiveModel]) -> None:
        """Before the memory of the served model and of its drafts is discarded; nothing happens where it is so already."""
        if self._kept:
            return
        with torch.inference_mode():
            self._kept = [
                (held, held.to("cpu", copy=True))
                for model in models
                for held in _lasting(model, with_buffers=model is not models[0])
            ]
        self._slots = models[0].adapter_slots

    def give_back(self) -> None:
        """The memory is there again. Does nothing where nothing is kept."""
        with torch.inference_mode():
            while self._kept:
                held, copy = self._kept.pop()
                held.copy_(copy)
            if self._slots is not None:
                self._slots.refill()
        self._slots = None

    def drop(self) -> None:
        """The memory never went."""
        self._kept.clear()
        self._slots = None


def _lasting(model: LiveModel, with_buffers: bool) -> Iterator[Tensor]:
    """Memory, as bytes, that no update writes.

    That is each module's parameters and the tensors beside them, without the large ones of a module that updates write: these are
    made of the weights. Before the first update nobody knows what updates will write; then it may be any module with parameters.
    `with_buffers`: buffers too, which SGLang keeps for the served model alone.
    """
    names = defaultdict[int, set[str]](set)
    for name, parameter in model.live.named_parameters(remove_duplicate=False):
        names[_address(parameter)].add(name)
    written = {key.rpartition(".")[0] for key in model.updated}
    buffers = {_address(buffer) for buffer in model.live.buffers()}
    working, seen = model.runtime_state | model.derived_caches, set[int]()
    for path, module in model.live.named_modules():
        own = list(module.parameters(recurse=False))
        keeps_large = path not in written if written else not own
        beside = [
            t
            for at, t in tensors_under(module, model.boundary)
            if working.isdisjoint(at) and _address(t) not in buffers
        ]
        for tensor in [*own, *beside, *(module.buffers(recurse=False) if with_buffers else ())]:
            address = _address(tensor)
            if (
                tensor.device.type != model.device.type
                or address in seen
                or not names[address].isdisjoint(model.updated)
            ):
                continue
            if keeps_large or tensor.numel() <= SMALL_ELEMENTS:
                seen.add(address)
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
