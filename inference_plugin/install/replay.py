"""Replays a plan as prebound copies, and reads live parameters back, which is the inverse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from msgspec.structs import replace
from torch import Tensor

from inference_plugin.devices import ByteCopy, device_of
from inference_plugin.install.plan import Fill, Placement
from inference_plugin.install.row_copies import RowTable, row_table
from inference_plugin.install.upload import LARGE_BYTES, Upload
from inference_plugin.wire.geometry import Box, Region, bounding_box, c_strides, in_box
from inference_plugin.wire.tensors import copyable

__all__ = ["Copies", "Replay", "read_back"]


STEP_BYTES = 16 << 20
"""About as many bytes are copied at once while the engine generates."""

PORTION_BYTES = 8 << 20
"""The most that a verification reads back between two steps of the engine."""


class Copies:
    """Placements, and constants written before them, with all that is known of them without the memory: made once, and bound to
    an update's memory by `Replay`."""

    def __init__(self, placements: Iterable[Placement], fills: Iterable[Fill] = ()) -> None:
        self.placements, self.fills = tuple(placements), tuple(fills)
        self._sources, self._destinations = _Needs("source"), _Needs("destination")
        for placement in self.placements:
            self._sources.add(placement.source, placement.dtype)
            self._destinations.add(placement.dest, placement.dtype)
        for fill in self.fills:
            self._destinations.add(fill.dest, fill.dtype)

    @cached_property
    def rows(self) -> RowTable | None:
        """For the host's memory; None where torch has to copy."""
        return row_table(self.placements)

    def check(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Raises ValueError if a name is missing, or a dtype, device, layout or extent doesn't fit."""
        self._sources.check(sources)
        self._destinations.check(destinations)


class Replay:
    """Copies that are bound to memory, so that an installation only copies.

    `sources`: C-contiguous tensors by checkpoint name; `destinations`: flat storages by key. All sources are on one device, and
    all destinations are. Once a storage has moved on either side, make a new `Replay`. Raises ValueError as `Copies.check` does.
    """

    def __init__(self, copies: Copies, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        copies.check(sources, destinations)
        self._placements, self._sources, self._destinations = copies.placements, sources, destinations
        with torch.inference_mode():
            self._fills = [(fill.dest.of(destinations[fill.dest.tensor]), fill.value) for fill in copies.fills]
        on_host = all(tensor.device.type == "cpu" for tensor in self._first())
        self._rows = copies.rows.bound(sources, destinations) if on_host and copies.rows is not None else None
        self._steps: dict[int | None, list[_Step]] = {}

    def writes_to(self, destinations: Mapping[str, Tensor]) -> bool:
        """Whether it was bound to this memory."""
        return {k: t.data_ptr() for k, t in self._destinations.items()} == {
            k: t.data_ptr() for k, t in destinations.items()
        }

    def run(self, *, between: Callable[[], None] | None = None) -> None:
        """Writes everything. Calls `between` between steps of about `STEP_BYTES`; without it, all cores of this process write CPU
        memory at once, and a device's memory is written in copies as large as they come.

        Copies into a device's memory are only queued; the caller waits for them.
        """
        with torch.inference_mode():  # live parameters may be inference tensors, which can be written in no other mode
            for view, value in self._fills:
                view.fill_(value)
            for index, copy in enumerate(self._work(between is not None)):
                if between is not None and index:
                    between()
                copy()

    def _work(self, in_steps: bool) -> Iterator[Callable[[], object]]:
        """Functions that make the copies."""
        if self._rows is not None:
            for part in self._rows.steps(STEP_BYTES) if in_steps else [self._rows]:
                yield part.copy
            return
        steps = self._steps_of(self._limit_bytes(in_steps))
        copy = self._copying(steps)
        for step in steps:
            yield partial(copy, step)

    def ready(self) -> Replay:
        """Prepares `run()`, so that a commit only copies, or queues copies. Returns itself."""
        if self._rows is None:
            for step in self._steps_of(self._limit_bytes(in_steps=False)):
                if self._is_on_one_device:
                    step.divided()
        return self

    def _limit_bytes(self, in_steps: bool) -> int | None:
        """How much is copied at once; None where that is as much as comes, because nothing is staged on the way."""
        return None if self._is_on_one_device and not in_steps else STEP_BYTES

    def _first(self) -> list[Tensor]:
        """A tensor of each side; none if nothing is copied."""
        return [
            t for p in self._placements[:1] for t in (self._sources[p.source.tensor], self._destinations[p.dest.tensor])
        ]

    @cached_property
    def _copies(self) -> list[tuple[Placement, Tensor, Tensor]]:
        with torch.inference_mode():
            return [
                (
                    p,
                    copyable(p.dest.of(self._destinations[p.dest.tensor])),
                    copyable(p.source.of(self._sources[p.source.tensor])),
                )
                for p in self._placements
            ]

    @property
    def _is_on_one_device(self) -> bool:
        return len({tensor.device for tensor in self._first()}) <= 1

    def _steps_of(self, limit_bytes: int | None) -> list[_Step]:
        if (steps := self._steps.get(limit_bytes)) is None:
            steps = self._steps[limit_bytes] = self._cut(limit_bytes)
        return steps

    def _copying(self, steps: Sequence[_Step]) -> Callable[[_Step], object]:
        """The function that makes the copies of one step."""
        if not steps or (device := steps[0].targets[0].device).type == "cpu":
            return lambda step: torch._foreach_copy_(step.targets, step.sources)
        if self._is_on_one_device:
            return _copy_within_device
        upload = Upload(device_of(device), max(sum(map(Upload.room, step.sources)) for step in steps))
        return lambda step: upload.copy(step.targets, step.sources)

    def _cut(self, limit_bytes: int | None) -> list[_Step]:
        """Groups small copies; splits those of more than `limit_bytes`, if that is given. Copies that may overlap never share
        a step, because a fused GPU kernel copies in any order."""
        steps = [_Step()]
        for placement, target, source in self._copies:
            name, start, end = placement.dest.tensor, placement.dest.offset, placement.dest.end
            if start < steps[-1].ends.get(name, 0):
                steps.append(_Step())
            steps[-1].ends[name] = max(end, steps[-1].ends.get(name, 0))
            rows = target.shape[0] if target.dim() else 1
            count = rows if limit_bytes is None else max(1, rows * limit_bytes // max(1, target.nbytes))
            for row in range(0, rows, max(1, count)):
                if limit_bytes is not None and steps[-1].nbytes >= limit_bytes:
                    steps.append(_Step(ends={name: end}))
                steps[-1].add(_rows(target, row, count), _rows(source, row, count))
        return [step for step in steps if step.targets]


def read_back(placements: Iterable[Placement], destinations: Mapping[str, Tensor]) -> Iterator[tuple[str, Box, Tensor]]:
    """The inverse of a replay, to verify live parameters: (source name, box, C-contiguous copy) per box.

    A placement that reads a box of its checkpoint tensor yields that box. Any other placement is cut into boxes, so that every
    element that it wrote is yielded. Boxes larger than `PORTION_BYTES` are cut if possible. In doubled destinations the boxes
    hold what the last writer left.
    """
    for placement in placements:
        for part in _portions(placement):
            box, _ = bounding_box(part.source, part.shape)
            held = part.dest.of(destinations[part.dest.tensor].detach())
            out = torch.empty(box.sizes, dtype=held.dtype, device=held.device)
            in_box(part.source, part.shape, box).of(out).copy_(held)
            yield part.source.tensor, box, out


def _portions(placement: Placement) -> Iterator[Placement]:
    """`placement` in boxes of the checkpoint tensor, each of `PORTION_BYTES` at most if possible."""
    for part in _boxes_of(placement):
        if part.nbytes <= PORTION_BYTES:
            yield part
            continue
        source = part.source
        cut = source.strides.index(max(source.strides))
        stride, size = source.strides[cut], source.sizes[cut]
        # Cut into whole slices of the outermost dimension that the placement runs through: other cuts would be no boxes.
        units = [unit // stride for unit in c_strides(part.shape) if unit % stride == 0 and unit < size * stride]
        if not units:
            yield part
            continue
        count = max(1, PORTION_BYTES * size // part.nbytes // max(units)) * max(units)
        for start in range(0, size, count):
            n = min(count, size - start)
            narrowed = part.dest.narrow(cut, start, n)
            yield from _portions(replace(part, source=source.narrow(cut, start, n), dest=narrowed))


def _boxes_of(placement: Placement) -> Iterator[Placement]:
    """`placement` in parts that each read a box of the checkpoint tensor."""
    source, dest = placement.source, placement.dest
    _, exact = bounding_box(source, placement.shape)
    if exact:
        yield placement
        return
    # Cut repeated elements first, then the outermost dimension: the inner dimensions are the likeliest to be boxes.
    cut = source.strides.index(0) if 0 in source.strides else source.strides.index(max(source.strides))
    for i in range(source.sizes[cut]):
        yield from _boxes_of(replace(placement, source=source.select(cut, i), dest=dest.select(cut, i)))


@dataclass
class _Step:
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    nbytes: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    _divided: tuple[list[ByteCopy], list[Tensor], list[Tensor]] | None = None

    def add(self, target: Tensor, source: Tensor) -> None:
        self.targets.append(target)
        self.sources.append(source)
        self.nbytes += target.nbytes

    def divided(self) -> tuple[list[ByteCopy], list[Tensor], list[Tensor]]:
        """Large copies, and the targets and sources of the others. Within a device's memory a fused kernel reaches half of the
        speed of separate copies (measured on an H100)."""
        if self._divided is None:
            large: list[ByteCopy] = []
            small: list[tuple[Tensor, Tensor]] = []
            for target, source in zip(self.targets, self.sources, strict=True):
                if target.nbytes >= LARGE_BYTES and target.is_contiguous() and source.is_contiguous():
                    large.append(ByteCopy(target, 0, source, 0, target.nbytes))
                else:
                    small.append((target, source))
            self._divided = large, [target for target, _ in small], [source for _, source in small]
        return self._divided


def _copy_within_device(step: _Step) -> None:
    large, targets, sources = step.divided()
    if large:
        device_of(large[0].target.device).copy_bytes(large)
    if targets:
        torch._foreach_copy_(targets, sources)


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    return tensor.narrow(0, first, min(count, tensor.shape[0] - first)) if tensor.dim() else tensor


class _Needs:
    """What copies need of the tensors on one side: where the regions in each begin and end at the utmost, and their dtypes."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._of: dict[str, tuple[int, int, set[torch.dtype]]] = {}

    def add(self, region: Region, dtype: torch.dtype) -> None:
        start, end, dtypes = self._of.get(region.tensor, (region.offset, region.end, set()))
        dtypes.add(dtype)
        self._of[region.tensor] = min(start, region.offset), max(end, region.end), dtypes

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        first: tuple[torch.device, str] | None = None
        for name, (start, end, dtypes) in self._of.items():
            where = f"{self._side} {name}"
            if name not in tensors:
                raise ValueError(f"{where} is missing")
            tensor = tensors[name]
            if start < 0 or end > tensor.numel():
                raise ValueError(f"{where} has {tensor.numel()} elements; the plan needs {end}")
            if dtypes != {tensor.dtype}:
                raise ValueError(f"{where} is {tensor.dtype}; the plan has {', '.join(sorted(map(str, dtypes)))}")
            if not tensor.is_contiguous():
                raise ValueError(f"{where} is not contiguous")
            device, other = first = first or (tensor.device, name)
            if tensor.device != device or device.type == "meta":
                raise ValueError(f"{where} is on {tensor.device}, {other} on {device}")
