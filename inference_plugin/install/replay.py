"""A plan as copies, prebound; and its inverse, which reads what live parameters hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from inference_plugin.install.regions import Box, Fill, Placement, bounding_box, boxes_of, in_box

__all__ = [
    "Replay",
    "read_back",
    "rebase",
]


def rebase(placements: Iterable[Placement], boxes: Mapping[str, Box]) -> tuple[Placement, ...]:
    """The same placements for sources of which only ``boxes`` are there, each C-contiguous by itself.

    ``boxes`` is `PlacementPlan.needs` or larger boxes; `ValueError` where a box doesn't hold what a placement
    reads.
    """
    moved = []
    for placement in placements:
        box = boxes[placement.source.tensor]
        source = in_box(placement.source, placement.shape, box)
        moved.append(replace(placement, source=source, shape=box[1]))
    return tuple(moved)


class Replay:
    """The placements as prebound views, so that an installation is nothing but copies.

    ``sources``: checkpoint name -> C-contiguous tensor; ``destinations``: `storage_views` of the live model.
    Sources and destinations may be on two devices, each side on one. Bind again when a storage has moved on
    either side. `ValueError` if a name is missing, or a dtype, device, layout or extent doesn't fit.
    """

    nbytes: int
    """Bytes that one run writes."""

    def __init__(
        self,
        placements: Iterable[Placement],
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
        fills: Iterable[Fill] = (),
    ) -> None:
        placements, fills = tuple(placements), tuple(fills)
        _check_sides(placements, fills, sources, destinations)
        with torch.inference_mode():
            self._fills = [(fill.dest.of(destinations[fill.dest.tensor]), fill.value) for fill in fills]
            self._copies = [
                (p, p.dest.of(destinations[p.dest.tensor]), p.source.of(sources[p.source.tensor])) for p in placements
            ]
        self.nbytes = sum(p.nbytes for p in placements) + sum(f.dest.numel * f.dtype.itemsize for f in fills)
        self._pieces: dict[int, list[_Piece]] = {}

    def run(self, *, between: Callable[[int], None] | None = None, piece_bytes: int = 16 << 20) -> None:
        """Write everything. ``between(bytes_done)`` is called between pieces of about ``piece_bytes`` bytes.

        On a GPU the copies are queued on the current stream; the caller waits for it.
        """
        if piece_bytes not in self._pieces:
            self._pieces[piece_bytes] = self._cut(piece_bytes)
        with torch.inference_mode():  # only so may live parameters that are inference tensors be written
            done = 0
            for view, value in self._fills:
                view.fill_(value)
                done += view.nbytes
            for index, piece in enumerate(self._pieces[piece_bytes]):
                if between is not None and index:
                    between(done)
                torch._foreach_copy_(piece.targets, piece.sources)
                done += piece.nbytes

    def _cut(self, piece_bytes: int) -> list[_Piece]:
        """Group small copies, split large ones. Copies that may overlap never share a piece: a fused GPU
        kernel gives no order within one."""
        pieces = [_Piece()]
        for placement, target, source in self._copies:
            name, start, end = placement.dest.tensor, placement.dest.offset, placement.dest.end
            if start < pieces[-1].ends.get(name, 0):
                pieces.append(_Piece())
            pieces[-1].ends[name] = max(end, pieces[-1].ends.get(name, 0))
            rows = target.shape[0] if target.dim() else 1
            step = max(1, rows * piece_bytes // max(1, target.nbytes)) if target.dim() else 1
            for row in range(0, rows, step):
                if pieces[-1].nbytes >= piece_bytes:
                    pieces.append(_Piece(ends={name: end}))
                pieces[-1].add(_rows(target, row, step), _rows(source, row, step))
        return [piece for piece in pieces if piece.targets]


def read_back(
    placements: Iterable[Placement], destinations: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """The inverse of a replay, to verify live parameters: (source name, offsets, sizes, C-contiguous copy)
    per box.

    A placement that reads a box of its checkpoint tensor yields that box; any other is cut into boxes, so
    every element that a placement wrote is yielded. Where destinations are ``doubled``, the boxes hold what
    the last writer left.
    """
    for placement in placements:
        for part in boxes_of(placement):
            box, _ = bounding_box(part.source, part.shape)
            held = part.dest.of(destinations[part.dest.tensor].detach())
            out = torch.empty(box[1], dtype=held.dtype, device=held.device)
            in_box(part.source, part.shape, box).of(out).copy_(held)
            yield part.source.tensor, box[0], box[1], out


@dataclass
class _Piece:
    targets: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    nbytes: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    def add(self, target: Tensor, source: Tensor) -> None:
        self.targets.append(target)
        self.sources.append(source)
        self.nbytes += target.nbytes


def _rows(tensor: Tensor, first: int, count: int) -> Tensor:
    return tensor[first : first + count] if tensor.dim() else tensor


def _check_sides(
    placements: Iterable[Placement],
    fills: Iterable[Fill],
    sources: Mapping[str, Tensor],
    destinations: Mapping[str, Tensor],
) -> None:
    checked: set[tuple[str, str]] = set()
    devices: dict[str, tuple[torch.device, str]] = {}
    ends = itertools.chain(
        (
            end
            for p in placements
            for end in (
                ("source", p.source, p.dtype, sources),
                ("destination", p.dest, p.dtype, destinations),
            )
        ),
        (("destination", f.dest, f.dtype, destinations) for f in fills),
    )
    for side, region, dtype, tensors in ends:
        name = region.tensor
        if name not in tensors:
            raise ValueError(f"{side} {name} is missing")
        tensor = tensors[name]
        if region.offset < 0 or region.end > tensor.numel():
            raise ValueError(f"{side} {name} has {tensor.numel()} elements; the plan needs {region.end}")
        if (side, name) in checked:
            continue
        checked.add((side, name))
        if tensor.dtype != dtype:
            raise ValueError(f"{side} {name} is {tensor.dtype}; the plan has {dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{side} {name} is not contiguous")
        device, other = devices.setdefault(side, (tensor.device, name))
        if tensor.device != device or device.type == "meta":
            raise ValueError(f"{side} {name} is on {tensor.device}, {other} on {device}")
