"""Zones: any slices of any ranks land bit for bit in any engine layout, or are refused; nothing stays mapped."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.transports.base import Delivery, Sender, Target
from inference_plugin.transports.zone import ZoneAddress, ZoneReceiver, ZoneSender
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    ManifestMismatch,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
)
from inference_plugin.wire.geometry import Box, Piece, Region, c_strides, merge_dims
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.tensors import bytes_view, dtype_name
from inference_plugin.wire.zone import Place, ZoneLayout, strides_of_box
from tests.support.rig import ROOT
from tests.transports.cases import any_bits
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.update.cutting import cut_slices, edges_of

FAR_S = 3600.0
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, tensor: int, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True))
    return Box(tensor, offsets, sizes)


def of_box(box: Box, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def cut_at_random(draw: st.DrawFn, tensor: int, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a tensor."""
    spans = []
    for size in shape:
        at = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        spans.append(list(itertools.pairwise(at)))
    return [
        Box(tensor, tuple(start for start, _ in part), tuple(end - start for start, end in part))
        for part in itertools.product(*spans)
    ]


@st.composite
def layouts(draw: st.DrawFn, manifest: Manifest) -> ZoneLayout:
    """Places of random boxes, in any order of dimensions, with gaps."""
    places, at = [], 0
    for i, spec in enumerate(manifest.tensors):
        item_bytes = spec.nbytes // max(1, math.prod(spec.shape))
        for _ in range(draw(st.integers(0, 2))):
            box = draw(boxes(i, spec.shape))
            order = draw(st.permutations(range(len(spec.shape))))
            strides, step = [0] * len(order), item_bytes
            for dim in order:
                strides[dim] = step
                step *= box.sizes[dim] + draw(st.integers(0, 1))
            alignment = draw(st.sampled_from((item_bytes, 64)))
            at = -(-at // alignment) * alignment + alignment * draw(st.integers(0, 3))
            places.append(Place(box, at, tuple(strides)))
            at += step * item_bytes
    return ZoneLayout(at + 1, tuple(places))


def target_of(landing: bytes, rank: int = 0) -> Target:
    return Target("r", rank, "ipc:///nowhere", os.getpid(), "boot", (), 0, landing)


def write(
    sender: Sender, manifest: Manifest, slices: list[LocalSlice], targets: list[Target], *, slices_last: bool = False
) -> list[Piece]:
    edges = edges_of(sender.edges(manifest, target) for target in targets)
    cut = cut_slices(slices, edges)
    far_s = time.monotonic() + FAR_S
    pieces, _ = sender.write(Delivery("t", "policy", 0, manifest, b"", cut, targets, far_s, slices_last))
    return pieces


def lies_at(zone: torch.Tensor, place: Place, dtype: torch.dtype) -> torch.Tensor:
    """What lies at a place, by its definition."""
    typed = zone[: zone.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    strides = [stride // dtype.itemsize for stride in place.strides]
    return typed.as_strided(place.box.sizes, strides, place.offset // dtype.itemsize)


def manifest_of(tensors: list[torch.Tensor]) -> Manifest:
    specs = (TensorSpec(f"t{i}", dtype_name(t.dtype), tuple(t.shape)) for i, t in enumerate(tensors))
    return Manifest(tuple(specs)).check()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_slices_land_bit_for_bit_in_any_layout_of_any_workers(data: st.DataObject) -> None:
    assert_any_slices_land(data, ZoneSender, ZoneReceiver)


def assert_any_slices_land(
    data: st.DataObject, make_sender: Callable[[], ZoneSender], make_receiver: Callable[[], ZoneReceiver]
) -> None:
    kinds = data.draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=3))
    tensors = [any_bits(dtype, *shape, seed=i) for i, (shape, dtype) in enumerate(kinds)]
    manifest = manifest_of(tensors)
    receivers = [make_receiver() for _ in range(data.draw(st.integers(1, 2)))]
    chosen = [data.draw(layouts(manifest)) for _ in receivers]
    for receiver, layout in zip(receivers, chosen, strict=True):
        receiver.land_in(layout, "cpu")
    staged = [receiver.open(manifest, b"", ()) for receiver in receivers]
    for staging in staged:
        staging.segment.fill_(0xAA)
    targets = [target_of(staging.landing, i) for i, staging in enumerate(staged)]
    parts = [part for i, t in enumerate(tensors) for part in cut_at_random(data.draw, i, tuple(t.shape))]
    ranks = [make_sender(), make_sender()]
    pieces: list[Piece] = []
    for number, sender in enumerate(ranks):
        slices = [LocalSlice(part, of_box(part, tensors[part.tensor])) for part in parts[number::2]]
        pieces += write(sender, manifest, slices, targets, slices_last=data.draw(st.booleans()))
    for staging, layout in zip(staged, chosen, strict=True):
        expected = torch.full((layout.nbytes,), 0xAA, dtype=torch.uint8)
        for place in layout.places:
            lies_at(expected, place, tensors[place.box.tensor].dtype).copy_(
                of_box(place.box, tensors[place.box.tensor])
            )
        assert torch.equal(staging.segment, expected)
        staging.check(manifest, pieces, lambda: None)
        staging.close()
    for one in (*ranks, *receivers):
        one.close()


@pytest.mark.parametrize("slices_last", [True, False], ids=["that last", "one at a time"])
def test_many_small_slices_hold_their_values_until_they_are_copied(
    receiver: ZoneReceiver, sender: ZoneSender, slices_last: bool
) -> None:
    """A source may give up a slice once the next one is taken, or keep only its memory's values: nobody else holds the tensor."""
    tensors = [any_bits(torch.bfloat16, 3 * size, 32, seed=size) for size in range(1, 151)]
    manifest = manifest_of(tensors)
    starts = itertools.accumulate((t.nbytes for t in tensors), initial=0)
    whole = [manifest.whole(i) for i in range(len(tensors))]
    places = [Place(box, at, (64, 2)) for box, at in zip(whole, starts, strict=False)]
    receiver.land_in(ZoneLayout(sum(t.nbytes for t in tensors), tuple(places)), "cpu")
    staging = receiver.open(manifest, b"", ())
    buffer = torch.empty(450, 32, dtype=torch.bfloat16)

    def slices() -> Iterator[LocalSlice]:
        for box, tensor in zip(whole, tensors, strict=True):
            given = tensor.clone() if slices_last else buffer[: len(tensor)].copy_(tensor)
            yield LocalSlice(box, given)

    far_s = time.monotonic() + FAR_S
    delivery = Delivery("t", "policy", 0, manifest, b"", slices(), [target_of(staging.landing)], far_s, slices_last)
    pieces, stats = sender.write(delivery)
    assert [piece.box for piece in pieces] == whole and stats.nbytes == manifest.nbytes
    assert [piece.digest for piece in pieces] == [digest_bytes(bytes_view(t).numpy()) for t in tensors]
    assert torch.equal(staging.segment, torch.cat([bytes_view(t) for t in tensors]))
    assert staging.check(manifest, pieces, lambda: None) == manifest.nbytes
    staging.close()


def test_a_slice_whose_memory_was_freed_is_an_error_and_nothing_is_read(
    receiver: ZoneReceiver, sender: ZoneSender
) -> None:
    tensor = any_bits(torch.float32, 64, 64)
    manifest = manifest_of([tensor])
    receiver.land_in(ZoneLayout(tensor.nbytes, (Place(manifest.whole(0), 0, (256, 4)),)), "cpu")
    staging = receiver.open(manifest, b"", ())
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        write(sender, manifest, [LocalSlice(manifest.whole(0), tensor)], [target_of(staging.landing)], slices_last=True)
    staging.close()


def test_a_slice_whose_memory_is_freed_while_it_waits_to_be_copied_is_an_error(
    receiver: ZoneReceiver, sender: ZoneSender
) -> None:
    """Small slices that last are copied together: by then the allocator may have given the memory to somebody else."""
    tensors = [any_bits(torch.float32, 64, seed=seed) for seed in range(3)]
    manifest = manifest_of(tensors)
    places = tuple(Place(manifest.whole(i), 256 * i, (4,)) for i in range(3))
    receiver.land_in(ZoneLayout(3 * 256, places), "cpu")
    staging = receiver.open(manifest, b"", ())

    def slices() -> Iterator[LocalSlice]:
        for i, tensor in enumerate(tensors):
            yield LocalSlice(manifest.whole(i), tensor)
        tensors[1].untyped_storage().resize_(0)

    delivery = Delivery(
        "t", "", 0, manifest, b"", slices(), [target_of(staging.landing)], time.monotonic() + FAR_S, True
    )
    with pytest.raises(ManifestMismatch, match="the memory of a tensor was freed before its bytes were copied"):
        sender.write(delivery)
    staging.close()


@given(st.data())
def test_strides_of_a_box_are_those_of_its_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    box = data.draw(boxes(0, shape))
    order, given_strides, step = data.draw(st.permutations(range(len(shape)))), [0] * len(shape), 1
    for dim in order:
        given_strides[dim] = step
        step *= box.sizes[dim] + data.draw(st.integers(0, 1))
    units = c_strides(shape)
    start = sum(o * unit for o, unit in zip(box.offsets, units, strict=True))
    sizes, (source, dest) = merge_dims(box.sizes, units, given_strides)
    found = strides_of_box(box, shape, Region("s", start, sizes, source), Region("d", 0, sizes, dest))
    assert [f for f, n in zip(found, box.sizes, strict=True) if n > 1] == [
        g for g, n in zip(given_strides, box.sizes, strict=True) if n > 1
    ]


# --- one zone of two matrices ---------------------------------------------------------------------------------------------

TENSORS = [any_bits(torch.bfloat16, 8, 6, seed=1), any_bits(torch.float32, 5, seed=2)]
MANIFEST = manifest_of(TENSORS)
LAYOUT = ZoneLayout(1024, (Place(Box(0, (2, 0), (4, 6)), 0, (12, 2)), Place(Box(1, (0,), (5,)), 512, (4,))))


@pytest.fixture
def receiver() -> Iterator[ZoneReceiver]:
    one = ZoneReceiver()
    one.land_in(LAYOUT, "cpu")
    yield one
    one.close()


@pytest.fixture
def sender() -> Iterator[ZoneSender]:
    one = ZoneSender()
    yield one
    one.close()


def whole_slices() -> list[LocalSlice]:
    return [LocalSlice(MANIFEST.whole(i), tensor) for i, tensor in enumerate(TENSORS)]


def test_a_byte_that_changed_after_it_was_written_fails_the_check(receiver: ZoneReceiver, sender: ZoneSender) -> None:
    staging = receiver.open(MANIFEST, b"", ())
    pieces = write(sender, MANIFEST, whole_slices(), [target_of(staging.landing)])
    assert staging.check(MANIFEST, pieces, lambda: None) == 48 + 20
    for at in (0, 47, 512, 531):
        staging.segment[at] ^= 1
        with pytest.raises(DigestMismatch, match="is not what the trainer sent"):
            staging.check(MANIFEST, pieces, lambda: None)
        staging.segment[at] ^= 1


def test_every_update_is_checked_by_its_own_digests_and_its_own_cuts(
    receiver: ZoneReceiver, sender: ZoneSender
) -> None:
    cuts = [[(0, 8)], [(0, 8)], [(0, 3), (3, 8)], [(0, 4), (4, 8)], [(0, 8)]]
    for round_, rows in enumerate(cuts):
        staging = receiver.open(MANIFEST, b"", ())
        tensor = any_bits(torch.bfloat16, 8, 6, seed=10 + round_)
        slices = [LocalSlice(Box(0, (a, 0), (b - a, 6)), tensor[a:b]) for a, b in rows]
        pieces = write(sender, MANIFEST, [*slices, whole_slices()[1]], [target_of(staging.landing)])
        assert staging.check(MANIFEST, pieces, lambda: None) == 48 + 20
        staging.segment[24] ^= 1
        with pytest.raises(DigestMismatch, match=r"t0\[.*\] is not what the trainer sent"):
            staging.check(MANIFEST, pieces, lambda: None)
        staging.segment[24] ^= 1
        staging.settle()


def test_pieces_that_were_not_cut_where_a_place_begins_are_refused(receiver: ZoneReceiver, sender: ZoneSender) -> None:
    staging = receiver.open(MANIFEST, b"", ())
    target = target_of(staging.landing)
    sender.edges(MANIFEST, target)
    with pytest.raises(ProtocolError, match=r"t0\[0:8, 0:6\] is not cut where t0\[2:6, 0:6\] begins or ends"):
        sender.write(
            Delivery("t", "policy", 0, MANIFEST, b"", iter(whole_slices()), [target], time.monotonic() + FAR_S)
        )
    with pytest.raises(ProtocolError, match="is not cut where"):
        staging.check(MANIFEST, [Piece(MANIFEST.whole(0), 0)], lambda: None)


def test_a_layout_that_does_not_fit_the_manifest_or_the_zone_is_refused(sender: ZoneSender) -> None:
    places = {
        ManifestMismatch: Place(Box(0, (2, 0), (7, 6)), 0, (12, 2)),
        ProtocolError: Place(Box(0, (2, 0), (4, 6)), 1000, (12, 2)),
    }
    for kind, place in places.items():
        receiver = ZoneReceiver()
        receiver.land_in(ZoneLayout(1024, (place,)), "cpu")
        staging = receiver.open(MANIFEST, b"", ())
        with pytest.raises(kind):
            sender.edges(MANIFEST, target_of(staging.landing))
        staging.close()
        receiver.close()


def test_an_address_that_is_no_zone_is_refused(receiver: ZoneReceiver, sender: ZoneSender) -> None:
    staging = receiver.open(MANIFEST, b"", ())
    address = msgspec.msgpack.decode(staging.landing, type=ZoneAddress)
    for changed in (
        msgspec.structs.replace(address, layout_at=1 << 40),
        msgspec.structs.replace(address, layout_at=address.layout_at + 1),
        msgspec.structs.replace(address, layout_at=512),
    ):
        with pytest.raises(ProtocolError):
            sender.edges(MANIFEST, target_of(msgspec.msgpack.encode(changed)))
    other = msgspec.structs.replace(address, segment=msgspec.structs.replace(address.segment, inode=1))
    with pytest.raises(TransportUnavailable, match="is not the segment that was announced"):
        sender.edges(MANIFEST, target_of(msgspec.msgpack.encode(other)))


def test_a_write_that_is_late_says_how_far_it_came_and_leaves_nothing_mapped(
    receiver: ZoneReceiver, sender: ZoneSender
) -> None:
    staging = receiver.open(MANIFEST, b"", ())
    target = target_of(staging.landing)
    cut = cut_slices(whole_slices(), edges_of([sender.edges(MANIFEST, target)]))
    before = mappings()
    with pytest.raises(SyncTimeout, match=r"wrote .* of 116 bytes before the deadline"):
        sender.write(Delivery("t", "policy", 0, MANIFEST, b"", cut, [target], time.monotonic() - 1))
    assert mappings() == before - 1, "not even to read"


LATER_WRITE = """
import ctypes
from tests.transports.test_zone import LAYOUT, MANIFEST, ZoneReceiver, ZoneSender, target_of, whole_slices, write
receiver, sender = ZoneReceiver(), ZoneSender()
receiver.land_in(LAYOUT, "cpu")
staging = receiver.open(MANIFEST, b"", ())
target = target_of(staging.landing)
write(sender, MANIFEST, whole_slices(), [target])
address = sender._zone(MANIFEST, target).segment.tensor.data_ptr()
print(ctypes.c_uint8.from_address(address).value == staging.segment[0].item(), flush=True)
ctypes.memset(address, 1, 1)
print("written", flush=True)
"""


def test_a_write_after_the_end_faults_in_the_trainer() -> None:
    command = [sys.executable, "-c", LATER_WRITE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "True\n"), done


def test_a_zone_that_became_live_is_kept_by_its_weights_and_its_turn_comes_again(receiver: ZoneReceiver) -> None:
    zones = []
    for i in range(4):
        staging = receiver.open(MANIFEST, b"", ())
        staging.segment.fill_(i)
        weights = torch.from_numpy(staging.segment.numpy()[:16])
        zones.append(staging.segment_id)
        staging.settle()
        staging.close()
        assert weights.tolist() == [i] * 16
    assert zones[0] == zones[2] and zones[1] == zones[3] and zones[0] != zones[1]
    receiver.close()
    assert weights.tolist() == [3] * 16


def test_a_zone_that_was_dropped_is_never_used_again(receiver: ZoneReceiver) -> None:
    used = set()
    for _ in range(5):
        staging = receiver.open(MANIFEST, b"", ())
        assert staging.segment_id not in used
        used.add(staging.segment_id)
        staging.close()


def mappings() -> int:
    gc.collect()  # what an earlier test's error still holds must not end between two looks
    return sum("/memfd:weightwire" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_zone_that_was_dropped_is_not_kept_and_one_that_is_live_is(
    receiver: ZoneReceiver, sender: ZoneSender
) -> None:
    staging = receiver.open(MANIFEST, b"", ())
    target = target_of(staging.landing)
    pieces = write(sender, MANIFEST, whole_slices(), [target])
    kept = sender.kept(MANIFEST, b"", [target])
    assert kept is not None
    found = {piece.box: kept(piece.box) for piece in pieces}
    inner = Box(0, (2, 0), (4, 6))
    assert torch.equal(found[inner], of_box(inner, TENSORS[0])) and found[Box(0, (0, 0), (2, 6))] is None
    staging.close()
    assert sender.kept(MANIFEST, b"", [target]) is None
