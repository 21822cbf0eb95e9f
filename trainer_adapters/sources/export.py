"""Exports of another library's converter: any iterable of checkpoint names and tensors that the ranks make together.

Converters gather: they run on all ranks, in step, and yield each tensor on all ranks, on rank 0, or on those of the
stage that has it; or they rename and reshape, and yield DTensors. So a rank that stops iterating leaves the others waiting in
a collective, and a rank that sees no tensors doesn't know the model. Therefore:
1. at construction all ranks run through one export and exchange names, shapes and dtypes (`inventory`); from these each rank
   derives by itself the manifest and which rank sends what. A converter that knows them beforehand saves that run;
2. `slices()` runs through an export again, holding one tensor at a time;
3. a rank whose consumer gives up still runs its export to the end.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.tensors import dtype_name, narrowed
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.inspection import why_not_plain
from trainer_adapters.sources.inventory import ExchangedSource, HeldBox, Inventory
from trainer_adapters.sources.plan import Dims, LocalShard, whole_shard
from trainer_adapters.sources.selection import DtypeRules, NameFilter, Rules
from trainer_adapters.sources.sharded import is_dtensor
from trainer_adapters.sources.sharing import beginnings
from trainer_adapters.sources.streams import Pairs, pairs_of

if TYPE_CHECKING:
    from trainer_adapters.sources.placements import Spread

__all__ = ["ExportAdapter", "TensorMetadata"]

logger = logging.getLogger(__name__)

Export = Callable[[], Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]]
Metadata = Callable[[], Iterable[tuple[str, "TensorMetadata"]]]

HINT = (
    "an export must yield the same names, shapes and dtypes in the same order each time; if the model changed, make a new "
    "ExportAdapter, on all ranks"
)


class TensorMetadata(NamedTuple):
    """Shape and dtype that a tensor of an export will have."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Item(NamedTuple):
    """A tensor that an export yields, and this rank's shards of it: all of it, if it is no DTensor. `turn`: the lowest rank of
    a DTensor's mesh; of copies on several meshes, the ranks of the first send theirs."""

    name: str
    dtype: str
    shape: Dims
    shards: tuple[LocalShard, ...]
    turn: int = 0

    def boxes(self) -> list[HeldBox]:
        return [HeldBox(self.name, self.dtype, self.shape, one.offsets, one.sizes, self.turn) for one in self.shards]


class ExportAdapter(ExchangedSource):
    """A source for `export`, a function that the ranks call together and that returns a fresh iterable of `(name,
    tensor)`, or a mapping, for example Megatron-Bridge's `lambda: bridge.export_hf_weights(model, cpu=True)`.

    Names are the checkpoint's; tensors are on any device, and whole or DTensors, of which each rank sends its shards. A rank may
    yield all of them, some or none: of a tensor or shard that several ranks yield, each sends a share; of DTensors on several
    meshes, which nothing keeps equal, only the ranks of the mesh with the lowest rank. The manifest lists the
    ranks' exports one after the other. `metadata`: returns `(name, TensorMetadata)` of each tensor that this rank's export
    yields, in its order, all of them whole; without it, the export itself runs once to find out. `tied` maps names that don't
    travel to those that travel in their place (an iterable doesn't show shared memory). `dtype_rules`, `include` and `exclude`
    as in `ModuleAdapter`.

    Collective over `process_group` (default: all of torch.distributed), and so is every run of the export, in the
    manager's thread: while an `update_async` runs, no other thread may use the export's process groups. An export that fails
    on one rank leaves the others in its collectives: their update ends at its deadline, the export by the timeout of its
    process groups, and until then another update with such a source, or another adapter, is refused.

    Raises `ManifestMismatch`, on all ranks and naming the rank that caused it, for names that occur twice, tensors that
    can't be sent, and ranks that yield the same name with another shape or dtype. `slices()` raises it during the iteration if
    an export differs from the first one.
    """

    def __init__(
        self,
        export: Export,
        *,
        metadata: Metadata | None = None,
        tied: Mapping[str, str] | None = None,
        dtype_rules: Rules = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        given: object = export
        if not callable(given) or isinstance(given, torch.nn.Module):
            raise ArgumentError(
                f"a {type(given).__name__} is no function that returns (name, tensor) pairs",
                hint="such as model.named_parameters, without the brackets; `update(model)` takes the model itself",
            )
        told: object = metadata
        if told is not None and not callable(told):
            hint = "a function that returns (name, TensorMetadata) pairs"
            raise ArgumentError(f"metadata={told!r:.300} is a {type(told).__name__}", hint=hint)
        if not isinstance(tied, Mapping | None):
            raise ArgumentError(f"tied={tied!r} is no mapping", hint='such as tied={"lm_head.weight": "embed.weight"}')
        self._export: Callable[[], Pairs] = lambda: _WithoutGradients(export)
        self._first: list[_Item] = []
        self._shards: list[tuple[int, LocalShard]] = []
        """Of each box of this rank's inventory, the position of its tensor in the export, and where it lies."""
        self._kept: list[LocalSlice] = []
        self._spread = functools.cache(_spread)  # meshes are slow to ask, and models repeat their shapes

        def look() -> Inventory:
            self._first = self._look(self._export() if metadata is None else _pairs(metadata(), "metadata"))
            self._shards = [(position, shard) for position, item in enumerate(self._first) for shard in item.shards]
            return Inventory([box for item in self._first for box in item.boxes()])

        super().__init__(look, process_group)
        self._settle(tied or {}, DtypeRules(dtype_rules), NameFilter(include, exclude), in_natural_order=False)

    def made_together(self) -> frozenset[int]:
        return frozenset(range(len(self._manifest.tensors)))

    def kept_equal(self) -> Iterator[LocalSlice]:
        """What the last run kept of tensors of which another rank sends this part."""
        kept, self._kept = self._kept, []
        return iter(kept)

    def slices(self) -> Iterator[LocalSlice]:
        sent = self._by_position((one.held, one.box) for one in self._sent)
        others = {assignment.held: assignment.box for assignment in self._equal}
        equal, self._kept = self._by_position(beginnings(self._manifest, others).items()), []
        pairs = iter(self._export())
        try:
            # Counted by hand, and deleted: `enumerate` and the loop's variable would keep the last tensor alive.
            position = 0
            for name, tensor in pairs:
                self._check(position, name, tensor)
                for shard, box in sent.get(position, ()):
                    yield LocalSlice(box, _part(tensor, shard, box))
                for shard, box in equal.get(position, ()):
                    self._kept.append(LocalSlice(box, _part(tensor, shard, box).to("cpu", copy=True)))
                del tensor
                position += 1
            if position != len(self._first):
                raise _changed(f"it yielded {position} tensors, the first time {len(self._first)}")
        finally:
            try:
                for _ in pairs:  # the other ranks' exports need this rank
                    pass
            except Exception as error:  # noqa: BLE001 -- whatever ended the slices is the error to raise; this one follows from it
                logger.warning("weightwire: the rest of an export, made for the other ranks, failed: %s", error)

    def _by_position(self, boxes: Iterable[tuple[int, Box]]) -> dict[int, list[tuple[LocalShard, Box]]]:
        """These boxes, given by position in the inventory, by the position of their tensor in the export."""
        found: dict[int, list[tuple[LocalShard, Box]]] = {}
        for held, box in boxes:
            position, shard = self._shards[held]
            found.setdefault(position, []).append((shard, box))
        return found

    def _check(self, position: int, name: str, tensor: Any) -> None:
        first = self._first[position] if position < len(self._first) else None
        if isinstance(tensor, torch.Tensor) and (problem := self._problem(tensor)):
            raise _changed(f"{name} {problem}")
        now = self._item(name, tensor) if isinstance(tensor, torch.Tensor) else None
        if first is None or now != first:
            found = f"{name}: {getattr(tensor, 'dtype', type(tensor))} {list(getattr(tensor, 'shape', ()))}"
            before = f"{first.name}: torch.{first.dtype} {list(first.shape)}" if first else "nothing more"
            if found == before:
                raise _changed(f"tensor {position}, {found}, lies in other shards than the first time")
            raise _changed(f"tensor {position} is {found}, the first time it was {before}")

    def _look(self, pairs: Iterable[Any]) -> list[_Item]:
        """Runs through an export, or its metadata, to its end even if something is wrong with it. Raises `ManifestMismatch` for
        tensors that can't be sent."""
        items: dict[str, _Item] = {}
        problems = []
        for pair in pairs:
            try:
                name, tensor = pair
            except (TypeError, ValueError):
                problems.append(f"{pair!r:.60} is no pair of a name and a tensor")
                continue
            if not isinstance(name, str):
                problems.append(f"the name {name!r:.60} is a {type(name).__name__}")
            elif name in items:
                problems.append(f"{name} occurs twice")
            elif not isinstance(tensor, torch.Tensor | TensorMetadata):
                problems.append(f"{name} is a {type(tensor).__name__}")
            elif isinstance(tensor, torch.Tensor) and (problem := self._problem(tensor)):
                problems.append(f"{name} {problem}")
            else:
                try:
                    items[name] = self._item(name, tensor)
                except ManifestMismatch as error:
                    problems.append(f"{name}: {error.message}")
            del tensor
        if problems:
            raise ManifestMismatch(
                f"this export can't be sent: {first_few(problems)}",
                hint="correct these tensors, or let the export leave them out",
                side="trainer",
            )
        return list(items.values())

    def _problem(self, tensor: torch.Tensor) -> str:
        """Why a tensor can't be sent; "" if it can."""
        if not is_dtensor(tensor):
            return why_not_plain(tensor)
        spread = self._spread_of(tensor)
        return spread.problem or (why_not_plain(_local(tensor)) if spread.shards else "")

    def _item(self, name: str, tensor: torch.Tensor | TensorMetadata) -> _Item:
        shape = tuple(tensor.shape)
        if isinstance(tensor, torch.Tensor) and is_dtensor(tensor) and tensor.numel():
            spread = self._spread_of(tensor)
            return _Item(name, dtype_name(tensor.dtype), shape, spread.shards, spread.mesh.ranks[0])
        return _Item(name, dtype_name(tensor.dtype), shape, (whole_shard(shape),))

    def _spread_of(self, tensor: Any) -> Spread:
        return self._spread(
            tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(_local(tensor).shape)
        )


class _WithoutGradients:
    """One run of an export. Nobody differentiates what it yields, and a `torch.no_grad()` of the caller's does not reach the
    manager's thread. Not a generator: that would hold the last tensor while the next one is made."""

    @torch.no_grad()
    def __init__(self, export: Export) -> None:
        self._pairs = iter(_pairs(export(), "the export"))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self

    @torch.no_grad()
    def __next__(self) -> tuple[str, Any]:
        return next(self._pairs)


def _pairs(made: Any, what: str) -> Pairs:
    """What a user's function returned, as pairs. Raises `ArgumentError`."""
    pairs = pairs_of(made)
    if not isinstance(pairs, Iterable):
        raise ArgumentError(f"{what} returned a {type(made).__name__}", hint="it returns (name, tensor) pairs")
    return pairs


def _spread(mesh: Any, placements: tuple[Any, ...], shape: Dims, local: Dims) -> Spread:
    from trainer_adapters.sources.placements import Mesh, Spread  # imports torch's DTensors

    known = Mesh(mesh, placements)
    return Spread(known, (), known.problem) if known.problem else Spread.of(known, shape, local)


@torch.no_grad()
def _local(tensor: Any) -> torch.Tensor:
    """What this rank holds of a tensor, which a collective may still be making."""
    local: Any = tensor.to_local() if is_dtensor(tensor) else tensor
    made: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return made


def _part(tensor: torch.Tensor, shard: LocalShard, box: Box) -> torch.Tensor:
    """The values of `box`, which lies in `shard`."""
    at = (place + first - offset for place, first, offset in zip(shard.at, box.offsets, shard.offsets, strict=True))
    return narrowed(_local(tensor).detach(), tuple(at), box.sizes)


def _changed(how: str) -> ManifestMismatch:
    return ManifestMismatch(f"the export changed: {how}", hint=HINT, side="trainer")
