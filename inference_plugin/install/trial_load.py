"""Runs real loads on the skeleton, in memory of its own, and shows what a load of trial tensors writes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from inference_plugin.install.plan import LoadWeights, TensorInfo
from inference_plugin.install.storages import named_tensors, storage_id, storage_views, with_data
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.tensors import bytes_view

__all__ = [
    "POISON", "LoaderCoverage", "Materialised", "check_trial_fits", "handed_out_bytes", "loader_coverage", "materialised",
    "poisoned", "trial_tensors",
]  # fmt: skip

POISON = 0xFF
COMPARED_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class Materialised:
    """Some storages of a skeleton in real memory. `flats`: flat tensors by key. `keys`, `places`: key and tensor by name."""

    flats: Mapping[str, Tensor]
    keys: Mapping[str, str]
    places: Mapping[str, Tensor]

    def rebound(self, skeleton: nn.Module) -> set[str]:
        """Keys of storages that at least one of their names no longer leads to."""
        now = {name: storage_id(tensor) for name, tensor, _ in named_tensors(skeleton)}
        return {
            key for name, key in self.keys.items() if key in self.flats and now.get(name) != storage_id(self.flats[key])
        }

    def gather(self, skeleton: nn.Module) -> None:
        """Copies tensors that a load bound anew into the storages that their names led to before.

        Raises `EngineUnsupported` if such a tensor doesn't fit there.
        """
        for name, tensor, _ in named_tensors(skeleton):
            place = self.places.get(name)
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                raise EngineUnsupported(f"the engine's loader replaces {name} by a tensor of another form")
            if storage_id(place) != storage_id(tensor):
                place.copy_(tensor)


@contextmanager
def materialised(skeleton: nn.Module, chosen: set[str], empty: Callable[..., Tensor]) -> Iterator[Materialised]:
    """Gives the storages of these keys real memory, under all their names, until the context ends. `empty(numel, dtype=dtype)`
    makes flat tensors.

    Inside, copies of the parameters take their places: torch refuses `param.data = real` for a parameter on meta.
    """
    first: dict[int, str] = {}
    keys: dict[str, str] = {}
    flats: dict[str, Tensor] = {}
    twins: dict[int, Tensor] = {}
    for name, tensor, _ in named_tensors(skeleton):
        key = keys[name] = first.setdefault(storage_id(tensor), name)
        if key not in chosen or id(tensor) in twins:
            continue
        if key not in flats:
            numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            flats[key] = empty(numel, dtype=tensor.dtype)
        twins[id(tensor)] = with_data(tensor, _like(tensor, flats[key]))
    tables: list[dict[str, Any]] = [
        table for module in skeleton.modules() for table in (module._parameters, module._buffers)
    ]
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({key: twins[id(tensor)] for key, tensor in table.items() if id(tensor) in twins})
    try:
        yield Materialised(flats, keys, {name: tensor.detach() for name, tensor, _ in named_tensors(skeleton)})
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


def _like(tensor: Tensor, flat: Tensor) -> Tensor:
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class LoaderCoverage:
    """The effect of a real load. `unwritten`: number of elements that it left unwritten, by parameter. `written`: keys of the
    storages that it wrote to, including buffers. `sums`: a checksum of each storage after the load, by key."""

    unwritten: Mapping[str, int]
    written: frozenset[str]
    sums: Mapping[str, int]


def loader_coverage(
    skeleton: nn.Module,
    load_weights: LoadWeights,
    tensors: Sequence[TensorInfo],
    device: torch.device,
) -> LoaderCoverage:
    """Loads trial tensors for real, to see what the loader writes where no plan describes it.

    The skeleton starts as 0xFF, and no trial tensor holds such a byte. A tensor's bytes follow from its name, so that a load of
    fewer tensors can be compared. Holds the memory of the whole model meanwhile.
    Raises what the loader and `Materialised.gather` raise.
    """
    with materialised(skeleton, set(storage_views(skeleton)), partial(torch.empty, device=device)) as held:
        for flat in held.flats.values():
            bytes_view(flat).fill_(POISON)
        with torch.no_grad():
            load_weights(trial_tensors(tensors, device))
            held.gather(skeleton)
        unwritten = {}
        for name, tensor, is_parameter in named_tensors(skeleton):
            if is_parameter and tensor.numel() and (count := poisoned(tensor)):
                unwritten[name] = count
        written = frozenset(name for name, flat in held.flats.items() if poisoned(flat) < flat.numel())
        sums = {name: zlib.crc32(bytes_view(flat.cpu()).numpy().data) for name, flat in held.flats.items()}
    return LoaderCoverage(unwritten, written, sums)


def check_trial_fits(nbytes: int, free_bytes: float) -> None:
    """Before a trial load takes host memory: raises `EngineUnsupported`, with both numbers, if this rank has less."""
    if nbytes > free_bytes:
        raise EngineUnsupported(
            f"a trial of the engine's loader takes {nbytes >> 20} MiB, and {int(free_bytes) >> 20} MiB are free for this rank",
            hint="free memory on the engine's host; nothing was changed, and the next update opens the group again",
            phase="open",
        )


def handed_out_bytes(sizes: Iterable[int]) -> int:
    """The most memory that tensors of these sizes take which a loader gets one after the other: it still holds one of them when
    the next is made."""
    return sum(sorted(sizes)[-2:])


def trial_tensors(tensors: Iterable[TensorInfo], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Random tensors of small positive numbers, without a byte of 0xFF."""
    for name, shape, dtype in tensors:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(shape, dtype=dtype)
        bytes_view(tensor).random_(0, 2 if dtype == torch.bool else POISON // 4, generator=random)
        yield name, tensor.to(device)


def poisoned(tensor: Tensor) -> int:
    """Number of elements of which all bytes are still 0xFF. Looks at some at a time: a comparison takes a byte for each byte."""
    raw = bytes_view(tensor.detach().contiguous()).view(-1, tensor.element_size())
    parts = torch.split(raw, COMPARED_ELEMENTS)
    return sum(int((part == POISON).all(1).sum()) for part in parts)
