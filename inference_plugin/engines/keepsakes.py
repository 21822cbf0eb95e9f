"""What no update brings back, kept on the host while an engine has discarded the memory of its weights.

vLLM's `sleep(level=2)` and SGLang's `release_memory_occupation` keep registered buffers themselves, and lose everything else in
that memory. An update brings the weights back. It brings back neither tensors that modules hold as plain attributes, such as the
slopes of ALiBi in an attention implementation, nor parameters that no checkpoint fills.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import SMALL_ELEMENTS
from inference_plugin.install.graph import tensors_under

__all__ = ["Keepsakes"]


class Keepsakes:
    """Of one rank; used on the engine's own thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Live memory, as bytes, and its copy on the host."""

    def take(self, models: Iterable[LiveModel]) -> None:
        """Before the memory of these models is discarded; nothing happens where it is so already."""
        if self._kept:
            return
        with torch.inference_mode():
            self._kept = [(held, held.to("cpu", copy=True)) for model in models for held in _lasting(model)]

    def give_back(self) -> None:
        """The memory is there again. Does nothing where nothing is kept."""
        with torch.inference_mode():
            while self._kept:
                held, copy = self._kept.pop()
                held.copy_(copy)


def _lasting(model: LiveModel) -> Iterator[Tensor]:
    """The memory, as bytes, that no update writes: of parameters that none has written so far, and of tensors that are not
    registered. Before the first update nobody knows which parameters it will write: then small ones alone."""
    parameters, names = dict[int, nn.Parameter](), defaultdict[int, set[str]](set)
    for name, parameter in model.live.named_parameters(remove_duplicate=False):
        if parameter.device.type == model.device.type:
            parameters[_address(parameter)] = parameter
            names[_address(parameter)].add(name)
    for address, parameter in parameters.items():
        if names[address].isdisjoint(model.updated) if model.updated else parameter.numel() <= SMALL_ELEMENTS:
            yield _bytes_of(parameter)
    seen = {*parameters, *(_address(buffer) for buffer in model.live.buffers())}
    working = model.runtime_state | model.derived_caches
    for module in model.live.modules():
        for path, tensor in tensors_under(module, model.boundary):
            on_device = tensor.device.type == model.device.type and working.isdisjoint(path)
            if on_device and (address := _address(tensor)) not in seen:
                seen.add(address)
                yield _bytes_of(tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
