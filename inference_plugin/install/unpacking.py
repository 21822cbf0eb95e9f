"""Reads plain parameters out of a packed form, which holds the same elements in another order and may pad them with zeros; in the
same way, reads a module's parameters out of what another module derived from them.

The engine's own post-processing shows the order: it packs a stand-in whose elements are their own indices, a few bits of each
index at a time. A form that scales or rounds its elements shows no order and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from inference_plugin.install.graph import Path, child_at
from inference_plugin.install.post_processing import NOISE_BOUND, PostProcessing
from inference_plugin.install.storages import equal_bytes
from inference_plugin.install.trials import Trial
from inference_plugin.wire.tensors import bytes_view

__all__ = ["Unpacking"]

BYTE_BITS = (NOISE_BOUND - 1).bit_length()


class Unpacking:
    """Unpacks parameters of live modules. Finds the order once for each kind of module, and keeps it as long as this object
    lives: four bytes per element of one module."""

    def __init__(self, post: PostProcessing, trials: Mapping[str, Trial]) -> None:
        self._post = post
        self._trials = trials
        self._orders: dict[tuple[int, str, Sequence[Path]], torch.Tensor | None] = {}

    def read(self, module: str, parameter: str) -> torch.Tensor | None:
        """The plain parameter, flat; None if the live form is not just another order of it."""
        meta = self._post.skeleton_modules[module]._parameters[parameter]
        if meta is None or self._post.live_modules[module]._parameters.get(parameter) is None:
            return None
        key = self._post.storages.key_of[f"{module}.{parameter}"]
        return self._read(module, key, meta.numel(), ((parameter,),))

    def read_derived(self, module: str, key: str) -> torch.Tensor | None:
        """The storage `key` of another module, flat, from everything that the live `module` derived from it; None if that is not
        just another order of the whole storage."""
        paths = tuple(sorted(self._trials[module].moved, key=str))
        return self._read(module, key, self._post.storages.shapes[key].numel(), paths) if paths else None

    def _read(self, module: str, key: str, count: int, paths: Sequence[Path]) -> torch.Tensor | None:
        """The `count` elements of `key`, from the tensors at `paths` of the live module."""
        if (live := _tensors(self._post.live_modules[module], paths)) is None:
            return None
        kind = id(self._trials[module]), key.removeprefix(f"{module}."), paths  # modules of one kind share their trial
        if kind not in self._orders:
            self._orders[kind] = self._order(module, key, count, paths, live)
        order = self._orders[kind]
        return None if order is None else _flat(live)[order]

    def _order(
        self, module: str, key: str, count: int, paths: Sequence[Path], live: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The place of each element in the live form."""
        dtype, size = self._post.storages.shapes[key].dtype, sum(tensor.numel() for tensor in live)
        if size < count or any(tensor.dtype != dtype for tensor in live):
            return None
        bits = BYTE_BITS * dtype.itemsize
        found = torch.zeros(size, dtype=torch.int64, device=live[0].device)
        for shift in range(0, count.bit_length(), bits):
            packed = self._packed(module, key, paths, partial(_number, shift=shift, bits=bits))
            if packed is None or [(t.shape, t.dtype) for t in packed] != [(t.shape, t.dtype) for t in live]:
                return None
            found |= _numbers(_flat(packed).to(found.device)) << shift
        places = found.nonzero().flatten()
        order = torch.full((count,), -1, dtype=torch.int32 if size < 1 << 31 else torch.int64, device=found.device)
        if len(places) != count or int(found.max()) > count:
            return None
        order[found[places] - 1] = places.to(order.dtype)
        if bool((order < 0).any()):
            return None
        others: list[torch.Tensor] = []
        packed = self._packed(module, key, paths, lambda made: others.append(made.clone()))
        # An order that hangs on the elements (GPTQ's groups, sorted) is none.
        return order if packed and equal_bytes(_flat(packed).to(found.device)[order], others[0]) else None

    def _packed(
        self, module: str, key: str, paths: Sequence[Path], note: Callable[[torch.Tensor], None]
    ) -> list[torch.Tensor] | None:
        """What post-processing makes of random storages, of which `note` gets `key` first."""
        post = self._post
        noise = post.noise(1)

        def storage(asked: str) -> torch.Tensor:
            made = noise(asked)
            if asked == key:
                note(made)
            return made

        stand_in = post.stand_in(module, storage)
        post.finish(module, stand_in)
        return _tensors(stand_in.module, paths)


def _tensors(module: nn.Module, paths: Sequence[Path]) -> list[torch.Tensor] | None:
    """The tensors at these places of a module; None unless there is one at each."""
    try:
        found = [child_at(module, path) for path in paths]
    except (LookupError, AttributeError):
        return None
    return found if all(isinstance(tensor, torch.Tensor) for tensor in found) else None


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _number(flat: torch.Tensor, shift: int, bits: int) -> None:
    """Writes the index of each element plus one to it: `bits` bits from `shift` on."""
    _set_numbers(flat, torch.arange(1, flat.numel() + 1, device=flat.device) >> shift & (1 << bits) - 1)


def _set_numbers(flat: torch.Tensor, numbers: torch.Tensor) -> None:
    """Writes a number into the low bits of each byte of each element."""
    parts = bytes_view(flat).view(flat.numel(), flat.element_size())
    for i in range(flat.element_size()):
        parts[:, i] = (numbers >> BYTE_BITS * i & NOISE_BOUND - 1).to(torch.uint8)


def _numbers(packed: torch.Tensor) -> torch.Tensor:
    """What `_set_numbers` wrote."""
    flat = packed.reshape(-1).contiguous()
    parts = bytes_view(flat).view(flat.numel(), flat.element_size())
    numbers = torch.zeros(flat.numel(), dtype=torch.int64, device=flat.device)
    for i in range(flat.element_size()):
        numbers |= parts[:, i].long() << BYTE_BITS * i
    return numbers
