"""Exports of another library's converter: any iterable of checkpoint names and tensors that the ranks make together.

Converters gather: they run on all ranks, in step, and yield each tensor on all ranks, on rank 0, or on those of the
stage that has it. So a rank that stops iterating leaves the others waiting in a collective, and a rank that sees no tensors
doesn't know the model. Therefore:
1. at construction all ranks run through one export and exchange names, shapes and dtypes (`inventory`); from these each rank
   derives by itself the manifest and which rank sends what. A converter that knows them beforehand saves that run;
2. `slices()` runs through an export again, holding one tensor at a time;
3. a rank whose consumer gives up still runs its export to the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.tensors import dtype_name, narrowed
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.inspection import why_not_plain
from trainer_adapters.sources.inventory import ExchangedSource, HeldBox, Inventory
from trainer_adapters.sources.selection import DtypeRules, NameFilter, Rules
from trainer_adapters.sources.sharing import beginnings

__all__ = ["ExportAdapter", "TensorMetadata"]

logger = logging.getLogger(__name__)

Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Metadata = Callable[[], Iterable[tuple[str, "TensorMetadata"]]]

HINT = (
    "an export must yield the same names, shapes and dtypes in the same order each time; if the model changed, make a new "
    "ExportAdapter, on all ranks"
)


class TensorMetadata(NamedTuple):
    """Shape and dtype that a tensor of an export will have."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ExportAdapter(ExchangedSource):
    """A source for `export`, a function that the ranks call together and that returns a fresh iterable of `(name,
    tensor)`, for example Megatron-Bridge's `lambda: bridge.export_hf_weights(model, cpu=True)`.

    Names are the checkpoint's; tensors are whole and on any device. A rank may yield all of them, some or none: of a tensor
    that several ranks yield, each sends a share. The manifest lists the ranks' exports one after the other. `metadata`:
    returns `(name, TensorMetadata)` of each tensor that this rank's export yields, in its order; without it, the export itself
    runs once to find out. `tied` maps names that don't travel to those that travel in their place (an iterable doesn't show
    shared memory). `dtype_rules`, `include` and `exclude` as in `ModuleAdapter`.

    Collective over `process_group` (default: all of torch.distributed), and so is every run of the export, in the
    manager's thread: while an `update_async` runs, no other thread may use the export's process groups. An export that fails
    on one rank leaves the others in its collectives: their update ends at its deadline, the export by the timeout of its
    process groups, and until then another update with such a source is refused.

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
        self._export = export
        self._first: list[HeldBox] = []
        self._kept: list[LocalSlice] = []

        def look() -> Inventory:
            self._first = _look(export() if metadata is None else metadata())
            return Inventory(self._first)

        super().__init__(look, process_group)
        self._settle(tied or {}, DtypeRules(dtype_rules), NameFilter(include, exclude), in_natural_order=False)

    def made_together(self) -> frozenset[int]:
        return frozenset(range(len(self._manifest.tensors)))

    def kept_equal(self) -> Iterator[LocalSlice]:
        """What the last run kept of tensors of which another rank sends this part."""
        kept, self._kept = self._kept, []
        return iter(kept)

    def slices(self) -> Iterator[LocalSlice]:
        boxes: dict[int, list[Box]] = {}
        for assignment in self._sent:
            boxes.setdefault(assignment.held, []).append(assignment.box)
        others = {assignment.held: assignment.box for assignment in self._equal}
        equal, self._kept = beginnings(self._manifest, others), []
        pairs = iter(self._export())
        try:
            # Counted by hand, and deleted: `enumerate` and the loop's variable would keep the last tensor alive.
            position = 0
            for name, tensor in pairs:
                self._check(position, name, tensor)
                for box in boxes.get(position, ()):
                    yield LocalSlice(box, narrowed(tensor.detach(), box.offsets, box.sizes))
                if position in equal:
                    box = equal[position]
                    copied = narrowed(tensor.detach(), box.offsets, box.sizes).to("cpu", copy=True)
                    self._kept.append(LocalSlice(box, copied))
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

    def _check(self, position: int, name: str, tensor: Any) -> None:
        first = self._first[position] if position < len(self._first) else None
        if first is None or not isinstance(tensor, torch.Tensor) or _whole(name, tensor) != first:
            found = f"{name}: {getattr(tensor, 'dtype', type(tensor))} {list(getattr(tensor, 'shape', ()))}"
            before = f"{first.name}: torch.{first.dtype} {list(first.shape)}" if first else "nothing more"
            raise _changed(f"tensor {position} is {found}, the first time it was {before}")


def _look(pairs: Iterable[Any]) -> list[HeldBox]:
    """Runs through an export, or its metadata, to its end even if something is wrong with it. Raises `ManifestMismatch` for
    tensors that can't be sent."""
    items: dict[str, HeldBox] = {}
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
        elif isinstance(tensor, torch.Tensor) and (problem := why_not_plain(tensor)):
            problems.append(f"{name} {problem}")
        else:
            try:
                items[name] = _whole(name, tensor)
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


def _whole(name: str, tensor: torch.Tensor | TensorMetadata) -> HeldBox:
    shape = tuple(tensor.shape)
    return HeldBox(name, dtype_name(tensor.dtype), shape, (0,) * len(shape), shape, 0)


def _changed(how: str) -> ManifestMismatch:
    return ManifestMismatch(f"the export changed: {how}", hint=HINT, side="trainer")
