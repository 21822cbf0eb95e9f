"""Plain parameters read out of a packed form that holds their elements in another order, padded with zeros perhaps.

Which order that is, the engine's own post-processing tells: it packs a stand-in whose elements are their own indices, as many
bits of them at a time as a trial weight can have. A form that computes with its elements (that scales or rounds them) gives no
order, and is not read.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inference_plugin.install.post_processing import NOISE_BOUND, PostProcessing
from inference_plugin.install.trials import Trial
from inference_plugin.wire.tensors import bytes_view

__all__ = ["Unpacking"]

BYTE_BITS = (NOISE_BOUND - 1).bit_length()


class Unpacking:
    """Unpacks parameters of live modules. An order is found once for each kind of module, and kept as long as this lives: four
    bytes per element of one module."""

    def __init__(self, post: PostProcessing, trials: Mapping[str, Trial]) -> None:
        self._post = post
        self._trials = trials
        self._orders: dict[tuple[int, str], torch.Tensor | None] = {}

    def read(self, module: str, parameter: str) -> torch.Tensor | None:
        """The plain parameter, flat; None if its live form is more than another order."""
        live = self._post.live_modules[module]._parameters.get(parameter)
        kind = id(self._trials[module]), parameter  # modules of one kind share their trial
        if live is None:
            return None
        if kind not in self._orders:
            self._orders[kind] = self._order(module, parameter, live)
        order = self._orders[kind]
        return None if order is None else live.detach().reshape(-1)[order]

    def _order(self, module: str, parameter: str, live: torch.Tensor) -> torch.Tensor | None:
        """Where in the live form each element lies."""
        meta = self._post.skeleton_modules[module]._parameters[parameter]
        assert meta is not None
        count = meta.numel()
        if meta.dtype != live.dtype or live.numel() < count:
            return None
        bits = BYTE_BITS * meta.element_size()
        found = torch.zeros(live.numel(), dtype=torch.int64, device=live.device)
        for shift in range(0, count.bit_length(), bits):
            packed = self._packed(module, parameter, shift, bits)
            if packed is None or packed.shape != live.shape or packed.dtype != live.dtype:
                return None
            found |= _numbers(packed.detach().to(live.device), bits) << shift
        places = found.nonzero().flatten()
        order = torch.full(
            (count,), -1, dtype=torch.int32 if live.numel() < 1 << 31 else torch.int64, device=live.device
        )
        if len(places) != count or int(found.max()) > count:
            return None
        order[found[places] - 1] = places.to(order.dtype)
        return None if bool((order < 0).any()) else order

    def _packed(self, module: str, parameter: str, shift: int, bits: int) -> torch.Tensor | None:
        """What post-processing makes of a parameter whose elements are `bits` bits, from `shift` on, of their index plus one."""
        post = self._post
        key = post.storages.key_of[f"{module}.{parameter}"]
        noise = post.noise(1)

        def storage(asked: str) -> torch.Tensor:
            made = noise(asked)
            if asked == key:
                numbers = torch.arange(1, made.numel() + 1, device=made.device) >> shift & (1 << bits) - 1
                _set_numbers(made, numbers)
            return made

        stand_in = post.stand_in(module, storage)
        post.finish(module, stand_in)
        return stand_in.module._parameters.get(parameter)


def _set_numbers(flat: torch.Tensor, numbers: torch.Tensor) -> None:
    """Writes a number into the low bits of each byte of each element."""
    parts = bytes_view(flat).view(flat.numel(), flat.element_size())
    for i in range(flat.element_size()):
        parts[:, i] = (numbers >> BYTE_BITS * i & NOISE_BOUND - 1).to(torch.uint8)


def _numbers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """What `_set_numbers` wrote."""
    flat = packed.reshape(-1).contiguous()
    parts = bytes_view(flat).view(flat.numel(), flat.element_size())
    numbers = torch.zeros(flat.numel(), dtype=torch.int64, device=flat.device)
    for i in range(flat.element_size()):
        numbers |= parts[:, i].long() << BYTE_BITS * i
    return numbers
