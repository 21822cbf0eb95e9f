"""Runs real loads on the skeleton, in memory of its own, and shows what a load of trial tensors writes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from inference_plugin.devices import device_of
from inference_plugin.install.plan import LoadWeights, TensorInfo
from inference_plugin.install.storages import flat, keys_by_name, named_tensors, storage_id, storage_views, with_data
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.tensors import bytes_view

__all__ = [
    "LoaderCoverage", "Materialised", "check_trial_fits", "handed_out_bytes", "in_batches", "loaded", "loader_coverage",
    "POISON", "filled_with", "materialised", "poison", "trial_tensors",
]  # fmt: skip

POISON = 0xFF
COMPARED_ELEMENTS = 4 << 20

Item = TypeVar("Item")

Start: TypeAlias = Callable[[str, Tensor], None]
"""Called with a storage's key and memory before a load: writes the storage's first bytes."""


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

    def left(self, skeleton: nn.Module) -> dict[str, Tensor]:
        """Which elements a load left as 0xFF, by parameter; only of parameters that have some."""
        return {
            name: _still(self.places[name], POISON)
            for name, _, is_parameter in named_tensors(skeleton)
            if is_parameter and self.keys[name] in self.flats and _poisoned(self.places[name])
        }

    def left_again(self, left: Mapping[str, Tensor]) -> dict[str, int]:
        """The number of those elements that a load into zeros left as zeros, by parameter. A loader may also compute 0xFF."""
        counts = {name: int((there & _still(self.places[name], 0)).sum()) for name, there in left.items()}
        return {name: count for name, count in counts.items() if count}


@contextmanager
def materialised(skeleton: nn.Module, chosen: set[str], empty: Callable[..., Tensor]) -> Iterator[Materialised]:
    """Gives the storages of these keys real memory, under all their names, until the context ends. `empty(numel, dtype=dtype)`
    makes flat tensors.

    Inside, copies of the tensors take their places: torch refuses `param.data = real` for a parameter on meta. A loader may hold
    a buffer itself, to which it writes beside a parameter (Kimi-K3's in vLLM): what it does to that one is done to the copy.
    """
    keys = keys_by_name(skeleton)
    flats: dict[str, Tensor] = {}
    twins: dict[int, Tensor] = {}
    for name, tensor, _ in named_tensors(skeleton):
        if (key := keys[name]) not in chosen or id(tensor) in twins:
            continue
        if key not in flats:
            flats[key] = empty(flat(tensor).numel(), dtype=tensor.dtype)
        data = flats[key].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        twins[id(tensor)] = with_data(tensor, data)
    tables: list[dict[str, Any]] = [
        table for module in skeleton.modules() for table in (module._parameters, module._buffers)
    ]
    before = [dict(table) for table in tables]
    buffers = {id(each) for module in skeleton.modules() for each in module._buffers.values()} & twins.keys()
    for table in tables:
        table.update({key: twins[id(tensor)] for key, tensor in table.items() if id(tensor) in twins})
    try:
        with _InPlaceOf({each: twins[each] for each in buffers}) if buffers else nullcontext():
            yield Materialised(flats, keys, {name: tensor.detach() for name, tensor, _ in named_tensors(skeleton)})
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


class _InPlaceOf(TorchFunctionMode):
    """Inside, an operation that is given one of some tensors, known by their `id`, gets another tensor in its place."""

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(self._other, args), **{name: self._other(each) for name, each in (kwargs or {}).items()})

    def _other(self, given: Any) -> Any:
        if type(given) in (list, tuple):
            return type(given)(map(self._other, given))
        return self._others.get(id(given), given)


@contextmanager
def loaded(
    skeleton: nn.Module,
    chosen: set[str],
    load_weights: LoadWeights,
    tensors: Iterable[tuple[str, Tensor]],
    start: Start,
    device: torch.device,
) -> Iterator[Materialised]:
    """Gives the storages of these keys memory on `device`, and loads `tensors` for real. Raises what the loader and
    `Materialised.gather` raise."""
    with torch.no_grad(), materialised(skeleton, chosen, partial(torch.empty, device=device)) as held:
        for key, storage in held.flats.items():
            start(key, storage)
        device_of(device).synchronise()  # a loader may copy on threads of its own, which have queues of their own
        load_weights(tensors)
        device_of(device).drain(device)
        held.gather(skeleton)
        yield held


@dataclass(frozen=True)
class LoaderCoverage:
    """The effect of a real load. `unwritten`: number of elements that it left unwritten, by parameter. `written`: keys of the
    storages that it wrote to, including buffers. `sums`: a checksum of each storage after the load, by key."""

    unwritten: Mapping[str, int]
    written: frozenset[str]
    sums: Mapping[str, int]

    def left(self, ties: Mapping[str, str]) -> dict[str, int]:
        """The number of elements that the load left unwritten, by parameter; of tied parameters it must fill one."""
        filled = {ties.get(name, name) for name in self.written}
        tied = {*ties, *ties.values()}
        return {n: count for n, count in self.unwritten.items() if n not in tied or ties.get(n, n) not in filled}


def loader_coverage(
    skeleton: nn.Module,
    load_weights: LoadWeights,
    tensors: Sequence[TensorInfo],
    device: torch.device,
) -> LoaderCoverage:
    """Loads trial tensors for real, to see what the loader writes where no plan describes it.

    The skeleton starts as 0xFF, and no trial tensor holds such a byte. A tensor's bytes follow from its name, so that a load of
    fewer tensors can be compared. Holds the memory of the whole model meanwhile. Raises as `loaded` does.
    """
    every = set(storage_views(skeleton))
    with loaded(skeleton, every, load_weights, trial_tensors(tensors, device), filled_with(POISON), device) as held:
        written = frozenset(key for key, storage in held.flats.items() if _poisoned(storage) < storage.numel())
        sums = {key: zlib.crc32(bytes_view(storage.cpu()).numpy().data) for key, storage in held.flats.items()}
        left = held.left(skeleton)
    del held  # its memory
    unwritten: Mapping[str, int] = {}
    if left:
        with loaded(skeleton, every, load_weights, trial_tensors(tensors, device), filled_with(0), device) as again:
            unwritten = again.left_again(left)
    return LoaderCoverage(unwritten, written, sums)


def check_trial_fits(nbytes: int, free_bytes: float, of: str = "the engine's loader") -> None:
    """Before a trial takes memory: raises `EngineUnsupported`, with both numbers, if this rank has less."""
    if nbytes > free_bytes:
        raise EngineUnsupported(
            f"a trial of {of} takes {nbytes >> 20} MiB, and {int(free_bytes) >> 20} MiB are free for this rank",
            hint="free memory on the engine's host; nothing was changed, and the next update opens the group again",
            phase="open",
        )


def handed_out_bytes(sizes: Iterable[int]) -> int:
    """The most memory that tensors of these sizes take while a loader gets them one after the other: it still holds one when the
    next is made."""
    return sum(sorted(sizes)[-2:])


def in_batches(items: Iterable[Item], nbytes_of: Callable[[Item], int], budget_bytes: float) -> list[list[Item]]:
    """The items, in their order, in batches of at most `budget_bytes`; an item that takes more is a batch of its own."""
    batches: list[list[Item]] = []
    room = 0.0
    for item in items:
        nbytes = nbytes_of(item)
        if not batches or nbytes > room:
            batches.append([])
            room = budget_bytes
        batches[-1].append(item)
        room -= nbytes
    return batches


def trial_tensors(tensors: Iterable[TensorInfo], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Random tensors of small positive numbers, without a byte of 0xFF."""
    for name, shape, dtype in tensors:
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(shape, dtype=dtype)
        bytes_view(tensor).random_(0, 2 if dtype == torch.bool else POISON // 4, generator=random)
        yield name, tensor.to(device)


def poison(tensor: Tensor) -> None:
    """Fills a contiguous tensor with 0xFF, so that a byte that stays unwritten shows up in a comparison."""
    bytes_view(tensor).fill_(POISON)


def filled_with(byte: int) -> Start:
    """Every storage starts as this byte."""

    def start(_: str, storage: Tensor) -> None:
        bytes_view(storage).fill_(byte)

    return start


def _still(tensor: Tensor, byte: int) -> Tensor:
    """Which elements have this byte only, flat."""
    return (bytes_view(tensor.detach().contiguous()).view(-1, tensor.element_size()) == byte).all(1)


def _poisoned(tensor: Tensor) -> int:
    """Number of elements of which all bytes are still 0xFF. Looks at some at a time: a comparison takes a byte for each byte."""
    raw = bytes_view(tensor.detach().contiguous()).view(-1, tensor.element_size())
    parts = torch.split(raw, COMPARED_ELEMENTS)
    return sum(int((part == POISON).all(1).sum()) for part in parts)
