"""`cuda_ipc` on a device whose memory lies in the host's: what lands where, who may still write, and when memory is freed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_plugin.devices import DEVICES
from inference_plugin.devices.digests import TorchDigests
from inference_plugin.transports import cuda_ipc
from inference_plugin.transports.base import Delivery, WriteStats
from inference_plugin.transports.cuda_ipc import CardAddress, CudaIpcSender, DeviceZoneReceiver, Probe
from inference_plugin.transports.device_pieces import DevicePieces, KnownRuns, KnownSpots
from inference_plugin.transports.pieces import Lying
from inference_plugin.transports.registry import transport_named
from inference_plugin.transports.shm import ShmReceiver, ShmSender
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, SyncTimeout, TransportUnavailable
from inference_plugin.wire.geometry import Box, c_strides
from inference_plugin.wire.manifest import DTYPE_BYTES, Manifest, TensorSpec
from inference_plugin.wire.messages import Go, GoTransport
from inference_plugin.wire.tensors import bytes_view, torch_dtype
from inference_plugin.wire.zone import Place, ZoneLayout
from tests.support.devices import DeviceTensor, LateDevice, foreach_copy_of_a_gpu
from tests.support.rig import ROOT, eventually
from tests.support.shared_host import UUID, SharedHost, can_be_built, page_locked_bytes, shared_allocations
from tests.transports.cases import any_bits
from tests.transports.test_zone import (
    FAR_S,
    LAYOUT,
    MANIFEST,
    assert_any_slices_land,
    lies_at,
    manifest_of,
    of_box,
    target_of,
    whole_slices,
    write,
)
from trainer_adapters.settings import Settings
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.module import ModuleAdapter
from trainer_adapters.update.agreement import what_differs
from trainer_adapters.update.cutting import cut_slices, edges_of
from trainer_adapters.update.writer import Writer

pytestmark = pytest.mark.skipif(not can_be_built(), reason="needs a C compiler")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, directory: object) -> SharedHost:
    one = SharedHost()
    monkeypatch.setitem(DEVICES, "cpu", one)
    return one


@pytest.fixture
def receiver() -> Iterator[DeviceZoneReceiver]:
    one = DeviceZoneReceiver()
    one.land_in(LAYOUT, "cpu")
    yield one
    one.close()


def own() -> int:
    gc.collect()  # what an earlier test's error still holds must not end between two looks
    return len(shared_allocations(os.getpid()))


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_slices_land_bit_for_bit_in_any_layout_of_any_workers(data: st.DataObject) -> None:
    assert_any_slices_land(data, CudaIpcSender, DeviceZoneReceiver)


def test_a_byte_that_is_not_what_was_written_fails_the_check(receiver: DeviceZoneReceiver) -> None:
    staging = receiver.open(MANIFEST, b"", ())
    pieces = write(CudaIpcSender(), MANIFEST, whole_slices(), [target_of(staging.landing)])
    assert staging.check(MANIFEST, pieces, lambda: None) == 48 + 20
    for at in (0, 47, 512, 531):
        staging.segment[at] ^= 1
        with pytest.raises(DigestMismatch, match="is not what the trainer sent"):
            staging.check(MANIFEST, pieces, lambda: None)
        staging.segment[at] ^= 1


def test_new_terms_move_what_is_written_and_what_is_checked(receiver: DeviceZoneReceiver) -> None:
    """A rank and a worker remember where boxes lie; not beyond the layout that they agreed on."""
    sender = CudaIpcSender()
    first, second = LAYOUT.places
    turned = ZoneLayout(1024, (Place(first.box, 512, first.strides), Place(second.box, 0, second.strides)))
    for layout in (LAYOUT, turned, LAYOUT):
        receiver.land_in(layout, "cpu")
        receiver.drop_kept()
        staging = receiver.open(MANIFEST, b"", ())
        pieces = write(sender, MANIFEST, whole_slices(), [target_of(staging.landing)], slices_last=True)
        for slice_, place in zip(whole_slices(), layout.places, strict=True):
            lies = lies_at(staging.segment, place, slice_.tensor.dtype)
            assert torch.equal(lies, of_box(place.box, slice_.tensor))
            assert staging.check(MANIFEST, pieces, lambda: None) == 48 + 20
        staging.settle()


def test_a_layout_that_is_known_is_checked_again_for_another_manifest(receiver: DeviceZoneReceiver) -> None:
    """Else a rank would write wider elements beyond the zone's end."""
    sender, staged = CudaIpcSender(), [receiver.open(MANIFEST, b"", ()) for _ in range(2)]
    write(sender, MANIFEST, whole_slices(), [target_of(staged[0].landing)])
    wide = manifest_of([slice_.tensor.to(torch.float64) for slice_ in whole_slices()])
    with pytest.raises(ProtocolError, match="has strides"):
        sender.edges(wide, target_of(staged[1].landing))


def contiguous(manifest: Manifest) -> ZoneLayout:
    """All tensors of a manifest, as they lie in a segment."""
    offsets, wholes = manifest.layout.offsets, map(manifest.whole, range(len(manifest.tensors)))
    sizes = [DTYPE_BYTES[spec.dtype] for spec in manifest.tensors]
    strides = [
        tuple(size * step for step in c_strides(spec.shape)) for size, spec in zip(sizes, manifest.tensors, strict=True)
    ]
    return ZoneLayout(manifest.layout.nbytes, tuple(map(Place, wholes, offsets, strides)))


@pytest.mark.parametrize("beside", [(), ("shm",)], ids=["alone", "beside shm"])
def test_an_update_has_one_list_of_pieces_over_all_its_transports_and_for_the_copies_that_ranks_compare(
    receiver: DeviceZoneReceiver, beside: tuple[str, ...]
) -> None:
    """Else `cuda_ipc` and `shm` together would fail every update, and ranks that came apart would not be noticed."""
    tensors = {f"t{i}": any_bits(torch.uint8, 9, 1 << 20, seed=i) for i in range(2)}
    other = {**tensors, "t0": tensors["t0"] ^ 1}  # rank 1 holds another t0 than rank 0 sends
    sources = [ModuleAdapter(model, rank=rank, world_size=2) for rank, model in enumerate((tensors, other))]
    writers = [Writer(Settings("policy", [], Config()), rank) for rank in range(2)]
    manifest = sources[0].manifest()
    receiver.land_in(contiguous(manifest), "cpu")
    staging = receiver.open(manifest, b"", ())
    ways = [GoTransport("cuda_ipc", b"", (target_of(staging.landing),))]
    ways += [
        GoTransport(name, writers[0].sender(transport_named(name)).allocate(manifest, frozenset()), ())
        for name in beside
    ]
    go = Go("t", tuple(ways), FAR_S, copies=True)
    wrote = [
        writer.write(go, manifest, source, time.monotonic() + FAR_S)
        for writer, source in zip(writers, sources, strict=True)
    ]
    assert [each.error for each in wrote] == [None, None]
    pieces = {each.rank: each.pieces for each in wrote}
    assert staging.check(manifest, [piece for each in wrote for piece in each.pieces], lambda: None) == 18 << 20
    apart = what_differs(manifest, pieces, {each.rank: each.kept_equal for each in wrote})
    assert apart.startswith("t0[0:") and "on rank 0" in apart and "on rank 1" in apart
    for writer in writers:
        writer.close()


class Averaged(ModuleAdapter):
    """Sends averages from the place of the weights, and puts the weights back."""

    def __init__(self, weights: dict[str, torch.Tensor], averages: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.weights, self.averages = weights, averages

    def slices(self) -> Iterator[LocalSlice]:
        kept = {name: weight.clone() for name, weight in self.weights.items()}
        torch._foreach_copy_(list(self.weights.values()), list(self.averages.values()))
        yield from super().slices()
        torch._foreach_copy_(list(self.weights.values()), list(kept.values()))


def test_a_class_that_overrides_the_slices_of_a_source_may_change_them_at_the_end(receiver: DeviceZoneReceiver) -> None:
    weights, averages = ({f"t{i}": any_bits(torch.uint8, 40, 64, seed=10 * s + i) for i in range(2)} for s in range(2))
    source, writer = Averaged(weights, averages), Writer(Settings("policy", [], Config()))
    manifest = source.manifest()
    receiver.land_in(contiguous(manifest), "cpu")
    staging = receiver.open(manifest, b"", ())
    go = Go("t", (GoTransport("cuda_ipc", b"", (target_of(staging.landing),)),), FAR_S)
    wrote = writer.write(go, manifest, source, time.monotonic() + FAR_S)
    assert wrote.error is None
    assert staging.check(manifest, wrote.pieces, lambda: None) == 2 * 40 * 64
    for offset, average in zip(manifest.layout.offsets, averages.values(), strict=True):
        assert torch.equal(staging.segment[offset : offset + average.nbytes].view(40, 64), average)
    writer.close()


@pytest.mark.parametrize(("apart", "at_once"), [(1, 128), (2, 16)], ids=["contiguous", "apart"])
def test_a_worker_packs_few_of_the_pieces_whose_rows_lie_apart_at_once(apart: int, at_once: int) -> None:
    """Of pieces of 16 MiB: packed ones take memory that the engine may not leave free."""
    manifest = Manifest(tuple(TensorSpec(f"t{i}", "bfloat16", (1024, 8192)) for i in range(600)))
    wholes = tuple(map(manifest.whole, range(600)))
    places = [Place(box, i * apart << 24, (apart * 16384, 2)) for i, box in enumerate(wholes)]
    layout = ZoneLayout(600 * apart << 24, tuple(places)).check(manifest)

    def lying(manifest: Manifest, box: Box) -> list[Lying]:
        return [Lying(each, torch.bfloat16) for each in layout.landings(manifest, box)]

    found = KnownSpots().of(manifest, wholes, lying)
    assert max(len(each.pieces) for each in found) == at_once
    assert sorted(piece for each in found for piece in each.pieces) == list(range(600))


def test_nobody_maps_a_zone_that_is_sealed_and_nobody_seals_one_that_is_mapped(receiver: DeviceZoneReceiver) -> None:
    staging, sender = receiver.open(MANIFEST, b"", ()), CudaIpcSender()
    target = target_of(staging.landing)

    children: list[int] = []

    def while_it_is_mapped() -> Iterator[LocalSlice]:
        if (child := os.fork()) == 0:  # a data loader's process
            time.sleep(FAR_S)
            os._exit(0)
        children.append(child)
        for item in cut_slices(whole_slices(), edges_of([sender.edges(MANIFEST, target)])):
            with pytest.raises(ProtocolError, match="still has the zone mapped"):
                staging.check(MANIFEST, [], lambda: None)
            yield item

    slices, far_s = while_it_is_mapped(), time.monotonic() + FAR_S
    pieces, _ = sender.write(Delivery("t", "policy", 0, MANIFEST, b"", slices, [target], far_s))
    staging.check(MANIFEST, pieces, lambda: None)
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    with pytest.raises(TransportUnavailable, match="has sealed or dropped its zone"):
        write(sender, MANIFEST, whole_slices(), [target])
    staging.settle()
    for _ in range(2):
        again = receiver.open(MANIFEST, b"", ())
        write(sender, MANIFEST, whole_slices(), [target_of(again.landing)])
        again.settle()


def test_weights_keep_a_zone_and_two_are_used_in_turn(receiver: DeviceZoneReceiver) -> None:
    zones, before = [], own()
    for value in range(4):
        staging = receiver.open(MANIFEST, b"", ())
        staging.segment.fill_(value)
        weights = torch.empty(0, dtype=torch.uint8).set_(staging.segment.untyped_storage()[:16])
        zones.append(staging.segment_id)
        staging.settle()
        staging.close()
        assert weights.tolist() == [value] * 16
    assert zones[0] == zones[2] and zones[1] == zones[3] and zones[0] != zones[1]
    receiver.close()
    eventually(lambda: own() == before + 1, "the end of the zone that nobody computes with")
    assert weights.tolist() == [3] * 16
    del weights, staging
    eventually(lambda: own() == before, "the end of the other one")


def test_what_is_kept_between_updates_is_freed_when_the_trainer_is_gone(receiver: DeviceZoneReceiver) -> None:
    before = own()
    for value in range(3):
        staging = receiver.open(MANIFEST, b"", ())
        staging.segment.fill_(value)
        staging.settle()
        staging.close()
    receiver.drop_kept()
    del staging
    eventually(lambda: own() == before, "the end of both zones")
    again = receiver.open(MANIFEST, b"", ())
    write(CudaIpcSender(), MANIFEST, whole_slices(), [target_of(again.landing)])


def test_a_zone_that_was_dropped_is_not_used_again(receiver: DeviceZoneReceiver) -> None:
    used, before = set(), own()
    for _ in range(4):
        staging = receiver.open(MANIFEST, b"", ())
        assert staging.segment_id not in used
        used.add(staging.segment_id)
        staging.close()
    eventually(lambda: own() == before, "the end of all zones")


def test_a_late_write_says_how_far_it_came_and_leaves_the_zone_unmapped(receiver: DeviceZoneReceiver) -> None:
    staging, sender = receiver.open(MANIFEST, b"", ()), CudaIpcSender()
    target = target_of(staging.landing)
    cut = cut_slices(whole_slices(), edges_of([sender.edges(MANIFEST, target)]))
    with pytest.raises(SyncTimeout, match=r"wrote .* of 116 bytes before the deadline"):
        sender.write(Delivery("t", "policy", 0, MANIFEST, b"", cut, [target], time.monotonic() - 1))
    staging.check(MANIFEST, [], lambda: None)


def test_a_card_or_a_probe_that_is_not_this_worker_s_is_refused(receiver: DeviceZoneReceiver) -> None:
    staging, sender = receiver.open(MANIFEST, b"", ()), CudaIpcSender()
    address = msgspec.msgpack.decode(staging.landing, type=CardAddress)
    for changed in (
        msgspec.structs.replace(address, nbytes=1 << 20),
        msgspec.structs.replace(address, nbytes=address.nbytes - 1),
    ):
        with pytest.raises(ProtocolError):
            sender.edges(MANIFEST, target_of(msgspec.msgpack.encode(changed)))
    other = msgspec.structs.replace(address, segment=msgspec.structs.replace(address.segment, inode=1))
    with pytest.raises(TransportUnavailable, match="is not the segment that was announced"):
        sender.edges(MANIFEST, target_of(msgspec.msgpack.encode(other)))
    offered = msgspec.msgpack.decode(sender.probe(), type=Probe)
    receiver.check_probe(sender.probe())
    with pytest.raises(TransportUnavailable, match="on another host, or has another runtime directory"):
        receiver.check_probe(msgspec.msgpack.encode(Probe("elsewhere", offered.devices)))
    with pytest.raises(TransportUnavailable, match=f"can't map memory of this worker's device {UUID}"):
        receiver.check_probe(msgspec.msgpack.encode(Probe(offered.here, ("GPU-1",))))


def test_a_worker_that_needs_nothing_of_an_update_takes_part_with_an_empty_zone() -> None:
    """As a pipeline stage does that holds nothing of a partial group."""
    receivers, layouts = [DeviceZoneReceiver() for _ in range(2)], [LAYOUT, ZoneLayout(0, ())]
    for receiver, layout in zip(receivers, layouts, strict=True):
        receiver.land_in(layout, "cpu")
    sender = CudaIpcSender()
    for _ in range(3):
        staged = [receiver.open(MANIFEST, b"", ()) for receiver in receivers]
        targets = [target_of(staging.landing, i) for i, staging in enumerate(staged)]
        pieces = write(sender, MANIFEST, whole_slices(), targets)
        assert [staging.check(MANIFEST, pieces, lambda: None) for staging in staged] == [48 + 20, 0]
        for staging in staged:
            staging.settle()
            staging.close()
    for receiver in receivers:
        receiver.close()


def test_memory_that_does_not_fit_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, device: SharedHost, receiver: DeviceZoneReceiver
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: 5 << 20)
    large = ZoneLayout(3 << 20, LAYOUT.places)
    with pytest.raises(TransportUnavailable, match="6 MiB, does not fit: 5 MiB"):
        DeviceZoneReceiver().land_in(large, "cpu")
    monkeypatch.setattr(device, "free_bytes", lambda _: 1000)
    with pytest.raises(TransportUnavailable, match="does not fit"):
        receiver.open(MANIFEST, b"", ())
    with pytest.raises(TransportUnavailable, match="the weights are on cuda"):
        receiver.land_in(LAYOUT, "cuda")


def test_what_digests_on_the_device_hold_counts_as_taken(monkeypatch: pytest.MonkeyPatch, device: SharedHost) -> None:
    large = ZoneLayout(32 << 20, LAYOUT.places)
    sums_bytes = 3 * (32 << 20) // 16  # torch's calls hold 64 bytes for each 1,024, up to three times
    monkeypatch.setattr(device, "new_digests", TorchDigests)
    monkeypatch.setattr(device, "free_bytes", lambda _: 2 * (32 << 20) + sums_bytes - 1)
    with pytest.raises(TransportUnavailable, match="64 MiB and 6 MiB for its digests, does not fit: 69 MiB"):
        DeviceZoneReceiver().land_in(large, "cpu")
    monkeypatch.setattr(device, "free_bytes", lambda _: 2 * (32 << 20) + sums_bytes)
    DeviceZoneReceiver().land_in(large, "cpu")


LATER_WRITE = """
import ctypes
from inference_plugin.devices import DEVICES
from tests.support.shared_host import SharedHost
device = DEVICES["cpu"] = SharedHost()
import os, sys
from tests.transports.test_zone import LAYOUT, MANIFEST, target_of, whole_slices, write
from inference_plugin.transports.cuda_ipc import CudaIpcSender, DeviceZoneReceiver
receiver = DeviceZoneReceiver()
receiver.land_in(LAYOUT, "cpu")
staging = receiver.open(MANIFEST, b"", ())
if os.fork() == 0:
    mapped, attach = [], device.attach
    device.attach = lambda *arguments: mapped.append(attach(*arguments)) or mapped[-1]
    __import__("inference_plugin.devices.cuda_driver")
    import tests.support.shared_host as shared
    shared._driver()._shared.clear()
    write(CudaIpcSender(), MANIFEST, whole_slices(), [target_of(staging.landing)])
    address = mapped[0].tensor.data_ptr()
    print("written", flush=True)
    ctypes.memset(address, 1, 1)
    print("too late", flush=True)
    os._exit(0)
_, status = os.wait()
print(os.waitstatus_to_exitcode(status), bool(staging.segment[:48].any()))
"""


def test_a_write_after_the_end_fails_in_the_trainer() -> None:
    command = [sys.executable, "-c", LATER_WRITE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.stdout == f"written\n{-signal.SIGSEGV} True\n", done


FORK_WHILE_MAPPED = """
import ctypes, os
from tests.support.shared_host import UUID, SharedHost
theirs, ours = os.pipe()
go, gone = os.pipe()
if (owner := os.fork()) == 0:
    shared = SharedHost().share(64, lambda free: free())
    shared.tensor.fill_(7)
    os.write(ours, shared.handle)
    os.read(go, 1)
    os._exit(0)
mapped = SharedHost().attach(os.read(theirs, 64), 64, UUID)
address = mapped.tensor.data_ptr()
if os.fork() == 0:  # a data loader's process
    del mapped
    print(ctypes.string_at(address, 2), flush=True)
    os._exit(0)
_, status = os.wait()
print(os.waitstatus_to_exitcode(status), mapped.tensor[:2].tolist())
os.write(gone, b"x")
os.waitpid(owner, 0)
"""


def test_a_forked_child_closes_no_mapping_of_its_parent() -> None:
    """There the driver answers every call with an error, for each mapping that the child's garbage collector finds."""
    command = [sys.executable, "-c", FORK_WHILE_MAPPED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.stdout == "b'\\x07\\x07'\n0 [7, 7]\n", done


def test_slices_may_change_once_they_were_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sources do that use one buffer for all: the copies and the digests are of what it held."""
    late = LateDevice()
    monkeypatch.setitem(DEVICES, "cuda", late)
    tensors = [any_bits(torch.bfloat16, 40, 64, seed=seed) for seed in range(3)]
    manifest = manifest_of(tensors)
    nbytes = tensors[0].nbytes
    places = [manifest.whole(i) for i in range(3)]
    layout = ZoneLayout(3 * nbytes, tuple(Place(box, i * nbytes, (128, 2)) for i, box in enumerate(places)))
    zone, buffer = late.memory(3 * nbytes), late.memory(nbytes).view(torch.bfloat16).view(40, 64)
    pieces = DevicePieces(manifest, [(zone, layout)], WriteStats(), KnownRuns(), slices_last=False)
    with torch.inference_mode():
        for box, tensor in zip(places, tensors, strict=True):
            late.copy(buffer, tensor)
            pieces.add(LocalSlice(box, buffer))
        buffer.zero_()
    found = pieces.end()
    assert [piece.digest for piece in found] == [SharedHost().digests([tensor])[0] for tensor in tensors]
    assert isinstance(zone, DeviceTensor)
    assert torch.equal(zone.held, bytes_view(torch.stack(tensors)))


def test_a_slice_of_any_dtype_lands_in_the_zones_of_several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy_of_a_gpu)
    tensors = [any_bits(torch_dtype(dtype), 5, 64) for dtype in DTYPE_BYTES]
    manifest = manifest_of(tensors)
    receivers = [DeviceZoneReceiver() for _ in range(2)]
    for receiver in receivers:
        receiver.land_in(contiguous(manifest), "cpu")
    staged = [receiver.open(manifest, b"", ()) for receiver in receivers]
    slices = [LocalSlice(manifest.whole(i), tensor) for i, tensor in enumerate(tensors)]
    pieces = write(CudaIpcSender(), manifest, slices, [target_of(one.landing, i) for i, one in enumerate(staged)])
    for staging in staged:
        assert staging.check(manifest, pieces, lambda: None) == manifest.nbytes
        staging.close()


def test_this_machine_s_processes_can_not_share_the_memory_of_a_device_they_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    why = cuda_ipc.TRANSPORT.why_not()
    assert (
        torch.cuda.is_available()
        or why == "this process computes on the host, whose memory transports zone and shm share"
    )


def test_segments_are_page_locked_as_long_as_they_are_mapped() -> None:
    manifest = manifest_of([any_bits(torch.uint8, size) for size in (9000, 5000)])
    sender, receiver = ShmSender(), ShmReceiver()
    gc.collect()
    before = page_locked_bytes()
    busy: frozenset[str] = frozenset()
    for _ in range(4):
        staging = receiver.open(manifest, sender.allocate(manifest, busy), ())
        busy = frozenset({staging.segment_id})
    locked = page_locked_bytes() - before
    assert locked == 2 * manifest.layout.nbytes
    receiver.close()
    assert page_locked_bytes() == before
    sender.close()
