"""Makes whole tensors of the ranks' slices of any source, for consumers that can't take slices. A collective generator.

1. the ranks exchange manifest and claims; a contradiction, or a failure of one rank, is an error on all ranks;
2. all ranks derive the same buckets from the claims: pieces in the manifest's order, each rank's pieces side by side;
3. two buffers take turns: while one bucket is unpacked, the next is packed and sent asynchronously;
4. each tensor is assembled in one scratch buffer, and yielded when its last piece has arrived.

So a rank holds two buckets and the largest tensor beside the model; where the ranks make slices together, also a copy of its
own slices.
Bytes travel in the manifest's dtype and are only copied, so the result equals the slices bit for bit. A rank that fails
during this marks its part of the bucket, and all ranks stop there. A rank whose consumer closes the generator early still takes
part in the remaining buckets. The deadline of a collective is the process group's timeout.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.cover import check_exact_cover
from inference_plugin.wire.errors import ConfigError, ErrorInfo, ManifestMismatch, WeightwireError
from inference_plugin.wire.geometry import Box, box_volume, split_box
from inference_plugin.wire.manifest import Manifest, aligned
from inference_plugin.wire.tensors import narrowed, torch_dtype
from inference_plugin.wire.tracing import span
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.sources.differing import another_model, packed, unpacked
from trainer_adapters.sources.exchange import exchange_bytes, exchange_device, in_buckets

__all__ = ["gathered"]

logger = logging.getLogger(__name__)

PIECE_ALIGNMENT_BYTES = 16
HEADER_BYTES = PIECE_ALIGNMENT_BYTES
"""Stand before each rank's part of a bucket: a nonzero first byte means that the rank failed."""


def gathered(
    source: WeightSource, *, bucket_bytes: int | None = None, process_group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name, tensor)` for every tensor of the manifest, in its order and dtype, on every rank of `process_group` (default
    all of torch.distributed). All these ranks call it and iterate to the end.

    A tensor is valid until the next one is requested. Raises on all ranks: `ManifestMismatch` if the manifests differ or the
    claims don't cover them; if a rank's source raises, its error on that rank and `WeightwireError` on the others.
    `bucket_bytes`: rank 0's applies; default the environment's (see `Config`). `ConfigError` without torch.distributed.
    """
    if bucket_bytes is None:
        bucket_bytes = Config.from_environment().bucket_bytes
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "gathered() needs torch.distributed, which is not initialised",
            hint="call dist.init_process_group before; one process alone holds the tensors that its source's slices() yields",
            side="trainer",
        )
    group = process_group or dist.distributed_c10d._get_default_group()
    device = exchange_device(group)
    manifest, claims, bucket_bytes, scratch = _agree(source, bucket_bytes, device, group)
    buckets = _buckets(manifest, claims, bucket_bytes)
    size = max((bucket.nbytes for bucket in buckets), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(2, len(buckets)))]
    packer = _Packer(source, manifest, dist.get_rank(group))
    arrived = _arrivals(buckets, buffers, packer, group)
    missing = -1
    done = 0
    try:
        for bucket, buffer in arrived:
            for piece in bucket.pieces:
                for i in range(done, piece.box.tensor):  # tensors without elements, in the manifest's order
                    yield manifest.tensors[i].name, _tensor(manifest, i, scratch)
                done = piece.box.tensor
                whole = _tensor(manifest, done, scratch)
                missing = whole.numel() if missing < 0 else missing
                narrowed(whole, piece.box.offsets, piece.box.sizes).copy_(_typed(buffer, piece, whole.dtype))
                missing -= box_volume(piece.box)
                if missing == 0:
                    yield manifest.tensors[done].name, whole
                    done, missing = done + 1, -1
    except BaseException:
        try:
            for _ in arrived:  # nobody needs these here, but the other ranks' broadcasts need this rank
                pass
        except Exception as error:  # noqa: BLE001 -- whatever ended the tensors is the error to raise
            logger.warning("weightwire: gathering the remaining tensors for the other ranks failed: %s", error)
        raise
    for i in range(done, len(manifest.tensors)):
        yield manifest.tensors[i].name, _tensor(manifest, i, scratch)


@dataclass(frozen=True)
class _PlacedPiece:
    """A piece of a rank's slice, and the byte of a bucket at which it starts."""

    box: Box
    rank: int
    start: int


@dataclass
class _Bucket:
    """Pieces in the manifest's order, and the place of each rank's part: `(rank, start, end)` in bytes."""

    pieces: list[_PlacedPiece] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    nbytes: int = 0


class _RankClaims(msgspec.Struct, frozen=True):
    """A rank's manifest (its fingerprint), claims and bucket size, which the ranks exchange before the first bucket."""

    fingerprint: str = ""
    claims: tuple[Box, ...] = ()
    bucket_bytes: int = 0
    error: ErrorInfo | None = None


def _agree(
    source: WeightSource, bucket_bytes: int, device: torch.device, group: dist.ProcessGroup
) -> tuple[Manifest, list[tuple[Box, ...]], int, torch.Tensor]:
    """The manifest, every rank's claims, the size of a bucket, and memory of the largest tensor. Raises the same error on all
    ranks if these contradict each other, or if a rank lacks that memory."""
    failure: Exception | None = None
    manifest = Manifest(())
    scratch = torch.empty(0, dtype=torch.uint8)
    try:
        manifest = source.manifest()
        claims = source.claims()
        boxes = tuple(s.box for s in source.slices()) if claims is None else claims
        scratch = torch.empty(max((s.nbytes for s in manifest.tensors), default=0), dtype=torch.uint8, device=device)
        told = _RankClaims(manifest.fingerprint, boxes, bucket_bytes)
    except Exception as error:  # noqa: BLE001 -- raised below, when the others know
        failure = error
        told = _RankClaims(error=WeightwireError.wrap(error).at(side="trainer", rank=dist.get_rank(group)).info())
    heard = [decode_as(one, _RankClaims) for one in exchange_bytes(msgspec.msgpack.encode(told), group)]
    if failure is not None:
        raise failure
    for other in heard:
        if other.error is not None:
            raise WeightwireError.of(other.error)
    if differ := [rank for rank, other in enumerate(heard) if other.fingerprint != heard[0].fingerprint]:
        models = exchange_bytes(packed(manifest), group)
        raise another_model(unpacked(models[0]), differ[0], models[differ[0]])
    owned = [(box, f"rank {rank}") for rank, other in enumerate(heard) for box in other.claims]
    check_exact_cover(manifest, owned)
    return manifest, [other.claims for other in heard], heard[0].bucket_bytes, scratch


def _buckets(manifest: Manifest, claims: Sequence[tuple[Box, ...]], bucket_bytes: int) -> list[_Bucket]:
    """Cuts boxes to `bucket_bytes` at most and packs them into buckets: in the manifest's order, by rank within a tensor."""
    pieces: list[tuple[int, Box]] = []
    owned = sorted((box.tensor, rank, position) for rank, own in enumerate(claims) for position, box in enumerate(own))
    for _, rank, position in owned:
        box = claims[rank][position]
        item_bytes = torch_dtype(manifest.tensors[box.tensor].dtype).itemsize
        pieces += [(rank, part) for part in split_box(box, item_bytes, bucket_bytes)]
    chunks = in_buckets(pieces, lambda piece: manifest.box_nbytes(piece[1]), bucket_bytes)
    return [_bucket(manifest, chunk) for chunk in chunks]


def _bucket(manifest: Manifest, chunk: list[tuple[int, Box]]) -> _Bucket:
    bucket = _Bucket()
    starts: dict[int, int] = {}
    for rank in sorted({rank for rank, _ in chunk}):
        first = at = bucket.nbytes
        at += HEADER_BYTES
        for position, (owner, box) in enumerate(chunk):
            if owner == rank:
                starts[position] = at
                at += aligned(manifest.box_nbytes(box), PIECE_ALIGNMENT_BYTES)
        bucket.parts.append((rank, first, at))
        bucket.nbytes = at
    bucket.pieces = [_PlacedPiece(box, rank, starts[position]) for position, (rank, box) in enumerate(chunk)]
    return bucket


class _Packer:
    """Fills this rank's part of the buckets from its slices, one after the other."""

    def __init__(self, source: WeightSource, manifest: Manifest, rank: int) -> None:
        self._source = source
        self._manifest = manifest
        self._rank = rank
        self._slices: Iterator[LocalSlice] | None = None
        self._now: LocalSlice | None = None
        self.failure: Exception | None = None
        try:
            if source.made_together():  # run them on all ranks now, before the first collective of a bucket
                self._slices = iter(_run_through(source))
        except Exception as error:  # noqa: BLE001 -- as in `fill`
            self.failure = error

    def fill(self, bucket: _Bucket, buffer: torch.Tensor) -> None:
        """Never raises: keeps an error, and marks it in the bucket for the other ranks."""
        own = next(((start, end) for rank, start, end in bucket.parts if rank == self._rank), None)
        try:
            if self.failure is None:
                for piece in bucket.pieces:
                    if piece.rank == self._rank:
                        self._pack(piece, buffer)
        except Exception as error:  # noqa: BLE001 -- raised by `_arrivals`, when the others know
            self.failure = error
        if own is not None:
            buffer[own[0] : own[0] + HEADER_BYTES] = int(self.failure is not None)

    def _pack(self, piece: _PlacedPiece, buffer: torch.Tensor) -> None:
        while self._now is None or not _within(piece.box, self._now.box):
            if self._slices is None:
                self._slices = self._source.slices()
            self._now = next(self._slices, None)
            if self._now is None:
                raise ManifestMismatch(
                    f"claims() listed {self._manifest.describe(piece.box)}, but slices() didn't yield it",
                    hint="slices() must yield the boxes that claims() lists",
                    side="trainer",
                    rank=self._rank,
                )
        offsets = tuple(o - first for o, first in zip(piece.box.offsets, self._now.box.offsets, strict=True))
        part = narrowed(self._now.tensor, offsets, piece.box.sizes)
        dtype = torch_dtype(self._manifest.tensors[piece.box.tensor].dtype)
        _typed(buffer, piece, dtype).copy_(part)


def _run_through(source: WeightSource) -> list[LocalSlice]:
    """Copies of all slices, in the manifest's order: each is valid until the next one is requested."""
    items = [LocalSlice(item.box, item.tensor.clone()) for item in source.slices()]
    return sorted(items, key=lambda item: item.box.tensor)


def _arrivals(
    buckets: list[_Bucket], buffers: list[torch.Tensor], packer: _Packer, group: dist.ProcessGroup
) -> Iterator[tuple[_Bucket, torch.Tensor]]:
    """Each bucket with its buffer when it has arrived; the next one travels meanwhile."""

    def start(bucket: _Bucket, buffer: torch.Tensor) -> list[Any]:
        with span("pack", bytes=bucket.nbytes):
            packer.fill(bucket, buffer)
        return [
            dist.broadcast(buffer[first:last], group=group, group_src=rank, async_op=True)
            for rank, first, last in bucket.parts
        ]

    turns = list(zip(buckets, itertools.cycle(buffers), strict=False))
    on_the_way = start(*turns[0]) if turns else []
    for number, (bucket, buffer) in enumerate(turns):
        following = start(*turns[number + 1]) if number + 1 < len(turns) else []
        with span("gather", bytes=bucket.nbytes):
            for work in on_the_way:
                work.wait()
        if failed := [rank for rank, first, _ in bucket.parts if int(buffer[first])]:
            for work in following:
                work.wait()
            if packer.failure is not None:
                raise packer.failure
            raise WeightwireError(
                f"trainer rank {failed[0]} failed while its slices were gathered",
                hint="that rank's own error says why",
                side="trainer",
                rank=failed[0],
            )
        yield bucket, buffer
        on_the_way = following
    if packer.failure is not None:
        raise packer.failure


def _tensor(manifest: Manifest, index: int, scratch: torch.Tensor) -> torch.Tensor:
    spec = manifest.tensors[index]
    return scratch[: spec.nbytes].view(torch_dtype(spec.dtype)).view(spec.shape)


def _typed(buffer: torch.Tensor, piece: _PlacedPiece, dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(piece.box.sizes) * dtype.itemsize
    return buffer[piece.start : piece.start + nbytes].view(dtype).view(piece.box.sizes)


def _within(inner: Box, outer: Box) -> bool:
    return inner.tensor == outer.tensor and all(
        o <= i and i + m <= o + n
        for i, m, o, n in zip(inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True)
    )
