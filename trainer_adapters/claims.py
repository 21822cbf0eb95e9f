"""What several ranks hold of one model, put together: one manifest for all, and one sender for each byte.

Where no rank knows the whole model (pipeline stages, experts), each says which boxes of which checkpoint tensors it
holds (`Claim`), once, by one exchange. The rest is a pure function of everybody's claims, so that all ranks come to the
same result without talking again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.wire import codec
from inference_plugin.wire.errors import ErrorInfo, ManifestMismatch, WeightwireError, first_few
from inference_plugin.wire.manifest import Box, Manifest, TensorSpec, check_exact_cover
from inference_plugin.wire.tensors import torch_dtype
from trainer_adapters.source import DtypeRules, share_by_bytes

__all__ = ["Claim", "Record", "Share", "exchange", "merge", "raise_first", "shares"]


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A box of a checkpoint tensor that a rank holds. `shape` and `dtype` are the whole tensor's, dtype by torch's
    name, before dtype rules. Of several ranks with the same box those with the lowest `turn` send it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    turn: int


class Record(msgspec.Struct, frozen=True):
    """What one rank tells the others: its claims; `facts` that must be the same everywhere; `parts` that must be there
    on some rank (what they are is the adapter's affair); or why it has nothing to tell."""

    claims: list[Claim] = []
    facts: dict[str, str] = {}
    parts: list[tuple[str, int, int]] = []
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A box that this rank sends: all or part of the claim at position `claim` of its own list."""

    claim: int
    box: Box


def exchange(record: Record, group: dist.ProcessGroup | None) -> list[Record]:
    """Every rank's record, in order of rank, as bytes (no pickle). Collective over `group` (None: the default group)."""
    if not (dist.is_available() and dist.is_initialized()):
        return [record]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    raw = torch.frombuffer(bytearray(msgspec.msgpack.encode(record)), dtype=torch.uint8)
    size = torch.tensor([raw.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one.item()) for one in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    mine[: raw.numel()] = raw.to(device)
    everybody = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everybody, mine, group=group)
    return [
        codec.decode_as(one.cpu().numpy()[:length].tobytes(), Record)
        for one, length in zip(everybody, lengths, strict=True)
    ]


def raise_first(records: Sequence[Record]) -> None:
    """Raises, the same on every rank, the first rank's error; or `ManifestMismatch` where facts differ."""
    for rank, record in enumerate(records):
        if record.error is not None:
            raise WeightwireError.of(record.error).at(side="trainer", rank=rank)
    first = records[0].facts
    for rank, record in enumerate(records):
        if record.facts != first:
            differ = [
                f"{key} is {record.facts.get(key)}, on rank 0 {first.get(key)}"
                for key in sorted({*first, *record.facts})
                if record.facts.get(key) != first.get(key)
            ]
            raise ManifestMismatch(
                f"the ranks hold different models: {first_few(differ)}",
                hint="build the model and the adapter from one config on all ranks",
                side="trainer",
                rank=rank,
            )


def merge(records: Sequence[Record], *, tied: Mapping[str, str], rules: DtypeRules) -> Manifest:
    """The manifest of all claims: in natural order of names (layer 2 before layer 10), dtype rules applied.

    Raises `ManifestMismatch` where ranks disagree about a tensor, where nobody or more than one box claims an element
    (the same box on several ranks are copies), and for dtype rules as `DtypeRules.resolve` does.
    """
    whole: dict[str, tuple[Claim, int]] = {}
    disagree = []
    for rank, record in enumerate(records):
        for claim in record.claims:
            other, other_rank = whole.setdefault(claim.name, (claim, rank))
            if (other.shape, other.dtype) != (claim.shape, claim.dtype):
                disagree.append(f"{_told(claim)} on rank {rank}, {_told(other)} on rank {other_rank}")
    if disagree:
        raise ManifestMismatch(f"the ranks hold different models: {first_few(disagree)}", side="trainer")
    names = sorted(whole, key=_natural)
    dtypes = rules.resolve({name: torch_dtype(whole[name][0].dtype) for name in names}, tied)
    specs = (TensorSpec(name, str(dtypes[name]).removeprefix("torch."), whole[name][0].shape) for name in names)
    manifest = Manifest(tuple(specs), dict(tied)).check()
    boxes = {_box(manifest, c): rank for rank, record in enumerate(records) for c in record.claims}
    check_exact_cover(manifest, [(box, f"rank {rank}") for box, rank in boxes.items()])
    return manifest


def shares(manifest: Manifest, records: Sequence[Record], rank: int) -> list[Share]:
    """What `rank` sends, in the manifest's order. Of copies only those of the lowest turn are sent, by bytes if there
    are several: each rank about as much, large tensors cut between rows."""
    holders: dict[Box, tuple[int, list[int]]] = {}
    for holder, record in enumerate(records):
        for claim in record.claims:
            box = _box(manifest, claim)
            turn, ranks = holders.get(box, (claim.turn, []))
            if claim.turn < turn:
                turn, ranks = claim.turn, []
            if claim.turn == turn and holder not in ranks:
                ranks.append(holder)
            holders[box] = turn, ranks
    copies: dict[tuple[int, ...], list[Box]] = {}
    for box in sorted(holders):
        copies.setdefault(tuple(holders[box][1]), []).append(box)
    position = {_box(manifest, claim): i for i, claim in enumerate(records[rank].claims)}
    mine = [
        Share(position[box], part)
        for ranks, boxes in copies.items()
        if rank in ranks
        for box, part in _divided(manifest, boxes, ranks.index(rank), len(ranks))
        if math.prod(part.sizes)
    ]
    return sorted(mine, key=lambda share: share.box)


def _divided(manifest: Manifest, boxes: list[Box], place: int, ways: int) -> list[tuple[Box, Box]]:
    """Of boxes that `ways` ranks hold: each that the one at `place` sends something of, and what."""
    if ways == 1:
        return [(box, box) for box in boxes]
    specs = (TensorSpec(str(i), manifest.tensors[box.tensor].dtype, box.sizes) for i, box in enumerate(boxes))
    divided = share_by_bytes(Manifest(tuple(specs)), range(len(boxes)), place, ways)
    return [
        (
            boxes[i],
            Box(boxes[i].tensor, tuple(a + b for a, b in zip(boxes[i].offsets, part.offsets, strict=True)), part.sizes),
        )
        for i, part in divided.items()
    ]


def _box(manifest: Manifest, claim: Claim) -> Box:
    return Box(manifest.index[claim.name], claim.offsets, claim.sizes)


def _told(claim: Claim) -> str:
    return f"{claim.name} is {claim.dtype} {list(claim.shape)}"


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
