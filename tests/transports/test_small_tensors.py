"""Any small tensors of any source, many to a copy, land bit for bit in zones and segments, also after a failed update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.transports.base import Delivery, Sender
from inference_plugin.transports.shm import ShmReceiver, ShmSender
from inference_plugin.transports.zone import ZoneReceiver, ZoneSender
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest
from inference_plugin.wire.tensors import box_view, bytes_view, torch_dtype
from inference_plugin.wire.zone import Place, ZoneLayout
from tests.transports.cases import any_bits
from tests.transports.test_zone import FAR_S, lies_at, of_box, target_of
from trainer_adapters import ModuleAdapter
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.update.cutting import cut_slices, edges_of

LIES = ("packed", "offset", "transposed", "strided", "expanded", "negated", "parameter")

PIECES = (PIECE_BYTES, 64)

Tensors = dict[str, torch.Tensor]


class Fails(Exception):
    """What a source raises in the middle of an update."""


@st.composite
def small_tensors(draw: st.DrawFn) -> Callable[[int], Tensors]:
    """Returns a function from a seed to a model of these shapes and dtypes: every version of it lies in memory alike."""
    sizes = st.lists(st.sampled_from((0, 1, 2, 3, 5, 8, 17, 33)), max_size=3)
    kind = st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), sizes, st.sampled_from(LIES))
    kinds = draw(st.lists(kind, min_size=1, max_size=6))
    repeats = draw(st.sampled_from((1, 3, 40)))

    def version(seed: int) -> Tensors:
        made = (lying(torch_dtype(d), s, how, 1000 * seed + i) for i, (d, s, how) in enumerate(kinds * repeats))
        return {f"t{i}": tensor for i, tensor in enumerate(made)}

    return version


def lying(dtype: torch.dtype, shape: list[int], how: str, seed: int) -> torch.Tensor:
    """Any bits of a shape, that lie in memory as `how` says."""
    if how == "offset":  # as one of many in a flat buffer, not aligned
        return any_bits(dtype, torch.Size(shape).numel() + 3, seed=seed)[3:].view(shape)
    if how == "transposed" and len(shape) > 1:
        return any_bits(dtype, *shape[::-1], seed=seed).permute(*range(len(shape))[::-1])
    if how == "strided" and shape:
        return any_bits(dtype, *shape[:-1], 2 * shape[-1] + 1, seed=seed)[..., 1::2]
    if how == "expanded" and shape:
        return any_bits(dtype, 1, *shape[1:], seed=seed).expand(shape)
    if how == "negated" and dtype.is_floating_point and dtype.itemsize > 1:
        # Without NaN: which bits torch makes of a negated one depends on how many elements it negates at once.
        return torch._neg_view(any_bits(dtype, *shape, seed=seed).nan_to_num())
    if how == "negated" and dtype.is_complex:
        return any_bits(dtype, *shape, seed=seed).conj()
    tensor = any_bits(dtype, *shape, seed=seed)
    is_real = dtype.is_floating_point or dtype.is_complex
    return torch.nn.Parameter(tensor, requires_grad=is_real) if how == "parameter" else tensor


def one_buffer(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in the same memory, which is filled anew for the next one, as a trainer's gathering does."""
    memory = torch.empty(max((t.nbytes for t in tensors.values()), default=0) + 64, dtype=torch.uint8)
    for name, tensor in tensors.items():
        given = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, given.copy_(tensor.detach())
        memory.fill_(0xEE)


def sources(tensors: Tensors, ranks: int, is_generated: bool) -> list[WeightSource]:
    model = (lambda: one_buffer(tensors)) if is_generated else tensors
    return [ModuleAdapter(model, rank=rank, world_size=ranks) for rank in range(ranks)]


@st.composite
def places(draw: st.DrawFn, manifest: Manifest) -> ZoneLayout:
    """A place for most tensors, for some of them two, packed or after gaps, some by columns."""
    found, at = [], 0
    for i, spec in enumerate(manifest.tensors):
        if not spec.nbytes:
            continue
        for _ in range(draw(st.sampled_from((1, 1, 1, 0, 2)))):
            item_bytes = DTYPE_BYTES[spec.dtype]
            order = range(len(spec.shape))[:: draw(st.sampled_from((1, -1, -1)))]
            strides, step = [0] * len(order), item_bytes
            for dim in order:
                strides[dim], step = step, step * spec.shape[dim]
            at = -(-at // (alignment := draw(st.sampled_from((item_bytes, 64))))) * alignment
            found.append(Place(manifest.whole(i), at, tuple(strides)))
            at += step
    return ZoneLayout(at + 1, tuple(found))


def written(
    senders: Sequence[Sender],
    manifest: Manifest,
    piece_bytes: int,
    given: Sequence[WeightSource],
    *,
    description: bytes = b"",
    landing: bytes = b"",
    ends: int = -1,
) -> list[Piece]:
    """Every rank's slices, as a trainer's ranks write them. Raises `Fails` in front of slice `ends` of the last rank."""
    targets = [target_of(landing)] if landing else []
    pieces: list[Piece] = []
    for rank, (sender, source) in enumerate(zip(senders, given, strict=True)):
        edges = edges_of(sender.edges(manifest, target) for target in targets) if targets else {}
        slices = cut_slices(source.slices(), edges)
        if ends >= 0 and rank == len(given) - 1:
            slices = failing(slices, ends)
        far_s = time.monotonic() + FAR_S
        lasts = source.slices_last()
        delivery = Delivery("t", "", rank, manifest, description, slices, targets, far_s, lasts, piece_bytes)
        pieces += sender.write(delivery)[0]
    return pieces


def failing(slices: Iterator[LocalSlice], ends: int) -> Iterator[LocalSlice]:
    for number, item in enumerate(slices):
        if number == ends:
            raise Fails
        yield item
    raise Fails


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


@settings(deadline=None, max_examples=25)
@given(data=st.data(), version=small_tensors(), ranks=st.integers(1, 3), is_generated=st.booleans())
def test_any_small_tensors_land_in_zones_also_after_a_failed_update(
    data: st.DataObject, version: Callable[[int], Tensors], ranks: int, is_generated: bool
) -> None:
    manifest = sources(version(0), 1, is_generated)[0].manifest()
    layout = data.draw(places(manifest))
    receiver, senders = ZoneReceiver(), [ZoneSender() for _ in range(ranks)]
    receiver.land_in(layout, "cpu")
    live, expected = torch.empty(0), torch.empty(0)
    write = partial(written, senders, manifest, data.draw(st.sampled_from(PIECES)))
    for seed in range(4):
        tensors = version(seed)
        given = sources(tensors, ranks, is_generated)
        assert [source.manifest() for source in given] == [manifest] * ranks
        staging = receiver.open(manifest, b"", ())
        staging.segment.fill_(0xAA)
        if data.draw(st.booleans()):
            with pytest.raises(Fails):
                write(given, landing=staging.landing, ends=data.draw(st.integers(0, 80)))
            staging.close()
            assert torch.equal(live, expected), "what is served is as it was"
            continue
        pieces = write(given, landing=staging.landing)
        expected = torch.full((layout.nbytes,), 0xAA, dtype=torch.uint8)
        for place in layout.places:
            tensor = plain(tensors[manifest.tensors[place.box.tensor].name])
            lies_at(expected, place, tensor.dtype).copy_(of_box(place.box, tensor))
        assert torch.equal(staging.segment, expected)
        staging.check(manifest, pieces, lambda: None, data.draw(st.integers(1, 2)))
        live = staging.segment
        staging.settle()
        staging.close()
    for sender in senders:
        sender.close()
    receiver.close()


@settings(deadline=None, max_examples=25)
@given(data=st.data(), version=small_tensors(), ranks=st.integers(1, 3), is_generated=st.booleans())
def test_any_small_tensors_are_in_a_segment_also_after_a_failed_update(
    data: st.DataObject, version: Callable[[int], Tensors], ranks: int, is_generated: bool
) -> None:
    manifest = sources(version(0), 1, is_generated)[0].manifest()
    receiver, senders = ShmReceiver(), [ShmSender() for _ in range(ranks)]
    write = partial(written, senders, manifest, data.draw(st.sampled_from(PIECES)))
    for seed in range(3):
        tensors = version(seed)
        given = sources(tensors, ranks, is_generated)
        assert [source.manifest() for source in given] == [manifest] * ranks
        description = senders[0].allocate(manifest, frozenset())
        staging = receiver.open(manifest, description, [manifest.whole(i) for i in range(len(manifest.tensors))])
        if data.draw(st.booleans()):
            with pytest.raises(Fails):
                write(given, description=description, ends=data.draw(st.integers(0, 80)))
            staging.close()
            continue
        pieces = write(given, description=description)
        for i, spec in enumerate(manifest.tensors):
            found = box_view(staging.segment, manifest, manifest.whole(i))
            assert torch.equal(bytes_view(found.contiguous()), bytes_view(plain(tensors[spec.name]))), spec
        assert staging.check(manifest, pieces, lambda: None, data.draw(st.integers(1, 2))) == manifest.nbytes
        staging.close()
    for sender in senders:
        sender.close()
    receiver.close()
