"""Merges what several ranks hold of one model: one manifest for all, and one sender for each byte.

If no rank knows the whole model (pipeline stages, experts), each tells the others once, in one exchange, which boxes of
which checkpoint tensors it holds. Everything else is a pure function of all inventories, so that all ranks come to the same
result without further communication.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import msgspec
import torch.distributed as dist

from inference_plugin.wire import codec
from inference_plugin.wire.cover import check_exact_cover
from inference_plugin.wire.errors import ErrorInfo, ManifestMismatch, WeightwireError, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.tensors import dtype_name, torch_dtype
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.sources.exchange import Collectives, exchange_bytes
from trainer_adapters.sources.selection import DtypeRules, NameFilter
from trainer_adapters.sources.sharing import share_boxes, some_of

__all__ = ["ExchangedSource", "HeldBox", "Inventory", "SendAssignment", "divide", "merge"]


class HeldBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a checkpoint tensor that a rank holds. `shape` and `dtype` are the whole tensor's; dtype by torch's name, before
    dtype rules. If several ranks have the same box, those with the lowest `turn` send it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    turn: int


class Inventory(msgspec.Struct, frozen=True):
    """What one rank tells the others: the boxes that it holds; `facts` that must be equal on all ranks; `parts`, of which the
    source checks that each is on some rank; or `error`, if the rank failed."""

    boxes: list[HeldBox] = []
    facts: dict[str, str] = {}
    parts: list[tuple[str, int, int]] = []
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class SendAssignment:
    """A box that this rank sends, or leaves to another: all or part of the box at position `held` of its inventory."""

    held: int
    box: Box


class ExchangedSource(WeightSource):
    """A source whose ranks exchange what each of them holds when it is made, and don't communicate afterwards.

    Collective over `process_group` (None: the default group). Each rank calls `look` once. Raises on all ranks: the first
    failing rank's error, and `ManifestMismatch` if their facts differ.
    """

    def __init__(self, look: Callable[[], Inventory], process_group: dist.ProcessGroup | None) -> None:
        self._everybody = _exchange(look, process_group)
        self._own_rank = dist.get_rank(process_group) if len(self._everybody) > 1 else 0

    def _settle(
        self, ties: Mapping[str, str], rules: DtypeRules, names: NameFilter, *, in_natural_order: bool = True
    ) -> None:
        """Derives the manifest and what each rank sends, by `merge` and `divide`. A subclass calls it once, after its own checks
        of `_everybody`."""
        self._rules = rules
        self._merge = partial(
            merge, self._everybody, tied=ties, rules=rules, names=names, in_natural_order=in_natural_order
        )
        self._divide()
        if not rules.follow_engine:
            self._everybody.clear()  # as large as the model's list of tensors, for each rank

    def _divide(self) -> None:
        self._manifest = self._merge()
        self._sent, self._left, self._equal = divide(self._manifest, self._everybody, self._own_rank)
        self._claims = tuple(assignment.box for assignment in self._sent)

    def adopt_dtypes(self, rules: Mapping[str, str]) -> bool:
        if not self._rules.adopt(rules):
            return False
        self._divide()
        return True

    @property
    def follows_engine(self) -> bool:
        return self._rules.follow_engine

    @property
    def engine_dtypes(self) -> Mapping[str, str]:
        return self._rules.adopted

    def manifest(self) -> Manifest:
        return self._manifest

    def claims(self) -> tuple[Box, ...]:
        return self._claims


def _exchange(look: Callable[[], Inventory], group: dist.ProcessGroup | None) -> list[Inventory]:
    """The inventory that `look` returns on each rank, in order of rank. Collective over `group`: raises `SyncTimeout`, which
    names the missing ranks, where some never call it.

    Raises the first failing rank's error on all ranks, so that no rank waits for one whose `look` failed; but a rank that stands
    in a collective of its own `look` waits for the group's time limit. On its own rank, an error that is no `WeightwireError` is
    raised unchanged.
    """
    are_several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    together = Collectives(group, making="adapter") if are_several else None
    own: Exception | None = None
    try:
        mine = look()
    except Exception as error:  # noqa: BLE001 -- raised below, when the others know
        own = error
        of_kind = isinstance(error, TypeError) and not isinstance(error, WeightwireError)  # not a model of this kind
        told = ManifestMismatch(f"TypeError: {error}") if of_kind else WeightwireError.wrap(error)
        mine = Inventory(error=told.info())
    everybody = [mine]
    if together is not None:
        try:
            together.end(mine.error)
        except WeightwireError as other:
            raise (own or other) from None
        raw = exchange_bytes(msgspec.msgpack.encode(mine), group)
        everybody = [codec.decode_as(one, Inventory) for one in raw]
    if own is not None and not isinstance(own, WeightwireError):
        raise own
    _raise_first(everybody)
    return everybody


def _raise_first(inventories: Sequence[Inventory]) -> None:
    """Raises the same on every rank: the first failing rank's error, or `ManifestMismatch` if facts differ."""
    for rank, inventory in enumerate(inventories):
        if inventory.error is not None:
            raise WeightwireError.of(inventory.error).at(side="trainer", rank=rank)
    first = inventories[0].facts
    for rank, inventory in enumerate(inventories):
        if inventory.facts != first:
            differ = [
                f"{key} is {inventory.facts.get(key)}, on rank 0 {first.get(key)}"
                for key in sorted({*first, *inventory.facts})
                if inventory.facts.get(key) != first.get(key)
            ]
            raise ManifestMismatch(
                f"the ranks hold different models: {first_few(differ)}",
                hint="build the model and the adapter from one config on all ranks",
                side="trainer",
                rank=rank,
            )


def merge(
    inventories: Sequence[Inventory],
    *,
    tied: Mapping[str, str],
    rules: DtypeRules,
    names: NameFilter,
    in_natural_order: bool = True,
) -> Manifest:
    """The manifest of all boxes that `names` keeps, with dtype rules applied: in natural order of names (layer 2 before layer
    10), or in the order of the ranks' lists one after the other.

    Raises `ManifestMismatch` if ranks disagree about a tensor, or if an element is on no rank or in two different boxes (the
    same box on several ranks is a copy), and as `NameFilter` and `DtypeRules` do.
    """
    whole: dict[str, tuple[HeldBox, int]] = {}
    disagree = []
    for rank, inventory in enumerate(inventories):
        for item in inventory.boxes:
            other, other_rank = whole.setdefault(item.name, (item, rank))
            if (other.shape, other.dtype) != (item.shape, item.dtype):
                disagree.append(f"{_told(item)} on rank {rank}, {_told(other)} on rank {other_rank}")
    if disagree:
        raise ManifestMismatch(f"the ranks hold different models: {first_few(disagree)}", side="trainer")
    chosen = names.keep(whole)
    kept = sorted(chosen, key=_natural) if in_natural_order else [name for name in whole if name in chosen]
    tied = {name: source for name, source in tied.items() if source in set(kept)}
    dtypes = rules.resolve({name: torch_dtype(whole[name][0].dtype) for name in kept}, tied)
    specs = (TensorSpec(name, dtype_name(dtypes[name]), whole[name][0].shape) for name in kept)
    manifest = Manifest(tuple(specs), dict(tied)).check()
    boxes = {box: rank for rank, inventory in enumerate(inventories) for box in _boxes(manifest, inventory)}
    check_exact_cover(manifest, [(box, f"rank {rank}") for box, rank in boxes.items()])
    return manifest


def divide(
    manifest: Manifest, inventories: Sequence[Inventory], rank: int
) -> tuple[list[SendAssignment], list[SendAssignment], list[SendAssignment]]:
    """Three lists in the manifest's order: what `rank` sends; what it also holds but leaves to ranks of a lower turn; and, of
    boxes that it divides with others, a few of the parts that the next rank sends.

    Copies of the lowest turn are divided by bytes: each rank sends about the same number, and large tensors are cut between
    rows. Boxes left to others are cut as the others send them, so that the digests of both can be compared.
    """
    holders: dict[Box, tuple[int, list[int]]] = {}
    for holder, inventory in enumerate(inventories):
        for box, position in _boxes(manifest, inventory).items():
            turn = inventory.boxes[position].turn
            lowest, ranks = holders.get(box, (turn, []))
            if turn < lowest:
                lowest, ranks = turn, []
            holders[box] = lowest, [*ranks, holder] if turn == lowest else ranks
    copies: dict[tuple[int, ...], list[Box]] = {}
    for box in sorted(holders):
        copies.setdefault(tuple(holders[box][1]), []).append(box)
    mine = _boxes(manifest, inventories[rank])
    sent: list[SendAssignment] = []
    left: list[SendAssignment] = []
    equal: list[SendAssignment] = []
    for senders, boxes in copies.items():
        next_one = senders[(senders.index(rank) + 1) % len(senders)] if rank in senders else None
        for place, sender in enumerate(senders):
            if sender not in (rank, next_one) and (rank in senders or mine.keys().isdisjoint(boxes)):
                continue
            shares = share_boxes(manifest, boxes, place, len(senders))
            found = sent if sender == rank else equal if sender == next_one else left
            for position, part in (some_of(manifest, shares) if found is equal else shares).items():
                if boxes[position] in mine:
                    found.append(SendAssignment(mine[boxes[position]], part))
    by_box = attrgetter("box")
    return sorted(sent, key=by_box), sorted(left, key=by_box), sorted(equal, key=by_box)


def _boxes(manifest: Manifest, inventory: Inventory) -> dict[Box, int]:
    """The boxes of an inventory that are in the manifest, with their positions; of a rank's own copies, the first."""
    boxes: dict[Box, int] = {}
    for position, item in enumerate(inventory.boxes):
        if item.name in manifest.index:
            boxes.setdefault(Box(manifest.index[item.name], item.offsets, item.sizes), position)
    return boxes


def _told(item: HeldBox) -> str:
    return f"{item.name} is {item.dtype} {list(item.shape)}"


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
