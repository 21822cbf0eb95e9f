"""Shared memory: bit for bit, without names, files or leftovers, whoever is killed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec
import pytest
import torch

from inference_plugin.transports import shm
from inference_plugin.transports.base import Delivery
from inference_plugin.transports.segment import SegmentAddress, SharedSegment
from inference_plugin.transports.shm import ShmReceiver, ShmSender
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, SyncTimeout, TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import Bucket
from inference_plugin.wire.tensors import box_view
from tests.support.memory import held_bytes
from tests.support.rig import ROOT, eventually, fork, kill
from tests.transports.cases import (
    CASES,
    any_bits,
    assert_equal_bytes,
    block_slices,
    column_slices,
    manifest_for,
    whole_slices,
)

FAR_S = 3600.0


def send(
    sender: ShmSender, manifest: Manifest, slices: object, description: bytes, *, slices_last: bool = False
) -> tuple[list[Piece], shm.WriteStats]:
    deadline_s = time.monotonic() + FAR_S
    return sender.write(Delivery("t", "policy", 0, manifest, description, slices, (), deadline_s, slices_last))  # type: ignore[arg-type]


def open_files() -> set[str]:
    """The descriptors of this process, each with what it leads to. Those of an earlier test may still be closed, by the garbage
    collector."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that this reads
            found.add(f"{file.name}: {file.readlink()}")
    return {one for one in found if not one.endswith("/fd")}


def wholes(manifest: Manifest) -> list[Box]:
    return [manifest.whole(i) for i in range(len(manifest.tensors))]


def read(segment: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    return {s.name: box_view(segment, manifest, box) for s, box in zip(manifest.tensors, wholes(manifest), strict=True)}


@pytest.mark.parametrize("slices", [whole_slices, column_slices, block_slices], ids=["whole", "columns", "blocks"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slices_last", [True, False], ids=["that last", "one at a time"])
def test_what_is_written_is_read_bit_for_bit_and_passes_its_digests(
    case: str, slices: Callable[[dict[str, torch.Tensor]], object], slices_last: bool
) -> None:
    tensors = CASES[case]()
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    description = sender.allocate(manifest, frozenset())
    staging = receiver.open(manifest, description, wholes(manifest))
    pieces, stats = send(sender, manifest, slices(tensors), description, slices_last=slices_last)
    assert staging.check(manifest, pieces, lambda: None) == manifest.nbytes
    assert (stats.nbytes, stats.messages) == (manifest.nbytes, 0)
    assert_equal_bytes(read(staging.segment, manifest), tensors)
    staging.close()
    receiver.close()
    sender.close()


def test_a_piece_whose_bytes_changed_after_their_digest_is_named() -> None:
    tensors = {"first": any_bits(torch.float32, 9), "second": any_bits(torch.bfloat16, 4, 5)}
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    description = sender.allocate(manifest, frozenset())
    staging = receiver.open(manifest, description, wholes(manifest))
    pieces, _ = send(sender, manifest, whole_slices(tensors), description)
    segment = next(iter(sender.owned.values())).tensor
    segment[manifest.layout.offsets[1] + 7] ^= 1
    with pytest.raises(DigestMismatch, match=r"second\[0:4, 0:5\] is not what the trainer sent"):
        staging.check(manifest, pieces, lambda: None)
    segment[manifest.layout.offsets[1] + 7] ^= 1
    segment[manifest.tensors[0].nbytes] ^= 1  # padding belongs to nobody
    assert staging.check(manifest, pieces, lambda: None) == manifest.nbytes
    staging.close(), receiver.close(), sender.close()


def test_pieces_are_as_small_as_another_transport_of_the_update_wants_them() -> None:
    tensors = {"w": any_bits(torch.int8, 1000)}
    manifest = manifest_for(tensors)
    sender = ShmSender()
    description, far_s = sender.allocate(manifest, frozenset()), time.monotonic() + FAR_S
    delivery = Delivery("t", "policy", 0, manifest, description, whole_slices(tensors), (), far_s, piece_bytes=256)
    assert [piece.box.sizes for piece in sender.write(delivery)[0]] == [(256,), (256,), (256,), (232,)]
    sender.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_a_wrong_byte_is_found_by_however_many_threads(threads: int) -> None:
    tensors = {f"t{i}": any_bits(torch.int8, 5 + i) for i in range(9)} | {"empty": any_bits(torch.int8, 0)}
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    description = sender.allocate(manifest, frozenset())
    staging = receiver.open(manifest, description, wholes(manifest))
    pieces, _ = send(sender, manifest, whole_slices(tensors), description)
    segment = next(iter(sender.owned.values())).tensor
    assert staging.check(manifest, pieces, lambda: None, threads) == manifest.nbytes
    for i, piece in enumerate(pieces):
        where = manifest.layout.offsets[piece.box.tensor]
        segment[where] ^= 1
        with pytest.raises(DigestMismatch, match=rf"t{i}\[.* is not what the trainer sent"):
            staging.check(manifest, pieces, lambda: None, threads)
        segment[where] ^= 1
    staging.close(), receiver.close(), sender.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_of_columns_side_by_side_the_one_with_a_wrong_byte_is_named(threads: int) -> None:
    tensors = {name: any_bits(torch.float32, 5, 96) for name in ("a", "b")} | {
        "stacked": any_bits(torch.int8, 3, 6, 128)
    }
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    description = sender.allocate(manifest, frozenset())
    staging = receiver.open(manifest, description, wholes(manifest))
    pieces, _ = send(sender, manifest, column_slices(tensors), description)
    segment = next(iter(sender.owned.values())).tensor
    looks: list[None] = []
    assert staging.check(manifest, pieces, lambda: looks.append(None), threads) == manifest.nbytes
    assert len(looks) < len(pieces), "side by side: one look"
    for piece in pieces:
        row = box_view(segment, manifest, piece.box).flatten(0, -2)[-1]
        row.view(torch.uint8)[-1] ^= 1
        with pytest.raises(
            DigestMismatch, match=re.escape(f"{manifest.describe(piece.box)} is not what the trainer sent")
        ):
            staging.check(manifest, pieces, lambda: None, threads)
        row.view(torch.uint8)[-1] ^= 1
    staging.close(), receiver.close(), sender.close()


def test_checking_can_be_cancelled_between_two_pieces() -> None:
    tensors = {"a": any_bits(torch.int8, PIECE_BYTES), "b": any_bits(torch.int8, 5)}
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    description = sender.allocate(manifest, frozenset())
    staging = receiver.open(manifest, description, wholes(manifest))
    pieces, _ = send(sender, manifest, whole_slices(tensors), description)
    passes: list[None] = []

    def between() -> None:
        passes.append(None)
        raise ProtocolError("cancelled")

    with pytest.raises(ProtocolError, match="cancelled"):
        staging.check(manifest, pieces, between)
    assert len(passes) == 1
    staging.close(), receiver.close(), sender.close()


def test_bytes_in_messages_are_refused() -> None:
    manifest = Manifest((TensorSpec("w", "int8", (4,)),))
    sender, receiver = ShmSender(), ShmReceiver()
    staging = receiver.open(manifest, sender.allocate(manifest, frozenset()), wholes(manifest))
    with pytest.raises(ProtocolError, match="takes no bytes in messages"):
        staging.receive(Bucket("policy", "txn", 0, 0, ()), memoryview(b""))
    staging.close(), receiver.close(), sender.close()


def test_a_write_that_is_late_ends_with_how_far_it_came() -> None:
    tensors = {"a": any_bits(torch.int8, 9), "b": any_bits(torch.int8, 5)}
    manifest = manifest_for(tensors)
    sender = ShmSender()
    description = sender.allocate(manifest, frozenset())
    with pytest.raises(SyncTimeout, match="wrote 9 of 14 bytes before the deadline"):
        sender.write(Delivery("t", "policy", 0, manifest, description, whole_slices(tensors), (), 0.0))
    sender.close()


# --- segments ---------------------------------------------------------------------------------------------------------


def address_of(description: bytes) -> SegmentAddress:
    return msgspec.msgpack.decode(description, type=SegmentAddress)


def test_two_segments_are_used_in_turn_while_one_is_held_and_one_alone_when_none_is() -> None:
    manifest = manifest_for({"a": any_bits(torch.int8, 9)})
    sender = ShmSender()
    first = address_of(sender.allocate(manifest, frozenset())).segment_id
    assert address_of(sender.allocate(manifest, frozenset())).segment_id == first
    second = address_of(sender.allocate(manifest, frozenset({first}))).segment_id
    assert second != first
    assert address_of(sender.allocate(manifest, frozenset({second}))).segment_id == first
    assert set(sender.owned) == {first, second}
    sender.allocate(manifest, frozenset())
    assert len(sender.owned) == 1
    sender.close()


def test_bytes_that_no_worker_takes_go_where_nobody_needs_what_is_there() -> None:
    tensors = {"a": any_bits(torch.int8, 9)}
    manifest = manifest_for(tensors)
    sender = ShmSender()
    first = address_of(sender.allocate(manifest, frozenset()))
    second = address_of(sender.allocate(manifest, frozenset({first.segment_id})))
    for needed, used in ((first, second), (second, first)):
        with sender.scratch(manifest, frozenset({needed.segment_id})) as (place, segment):
            assert address_of(place) == used
            send(sender, manifest, whole_slices(tensors), place)
            assert_equal_bytes(read(segment.tensor, manifest), tensors)
    assert set(sender.owned) == {first.segment_id, second.segment_id}
    sender.close()


@pytest.mark.parametrize("error", [None, KeyError])
def test_where_everything_is_needed_they_take_memory_that_goes_on_all_ranks(error: type[Exception] | None) -> None:
    tensors = {"a": any_bits(torch.int8, 9), "b": any_bits(torch.bfloat16, 4, 5)}
    manifest = manifest_for(tensors)
    sender, other = ShmSender(), ShmSender()
    needed = address_of(sender.allocate(manifest, frozenset())).segment_id
    held = [address_of(sender.allocate(manifest, frozenset({needed})))]
    send(other, manifest, whole_slices(tensors), msgspec.msgpack.encode(held[0]))
    maps = weightwire_maps()
    with (
        contextlib.suppress(KeyError),
        sender.scratch(manifest, frozenset({needed, held[0].segment_id})) as (place, segment),
    ):
        assert address_of(place).segment_id not in (needed, held[0].segment_id)
        send(other, manifest, whole_slices(tensors), place)
        assert_equal_bytes(read(segment.tensor, manifest), tensors)
        assert weightwire_maps() == maps + 1, "the other rank has unmapped it"
        if error is not None:
            raise error
    assert weightwire_maps() == maps and set(sender.owned) == {needed, held[0].segment_id}
    with pytest.raises(TransportUnavailable):
        SharedSegment.attach(address_of(place), writable=False)
    sender.close(), other.close()
    assert weightwire_maps() == maps - 3


def test_of_a_new_segment_only_the_pages_exist_that_lie_under_the_slices_of_a_rank() -> None:
    tensors = {name: any_bits(torch.int8, 3 << 20) for name in ("a", "b", "c")} | {"none": any_bits(torch.int8, 0)}
    manifest = manifest_for(tensors)
    sender = ShmSender()
    place = sender.allocate(manifest, frozenset())
    segment = next(iter(sender.owned.values()))
    segment.ask_for_large_pages(False)

    def existing_bytes() -> int:
        return os.fstat(segment.fd).st_blocks * 512

    def slices() -> Iterator[object]:
        for item in whole_slices(tensors):
            if item.box.tensor in (1, 3):
                before = existing_bytes()
                yield item
                assert existing_bytes() == before + manifest.tensors[item.box.tensor].nbytes

    pieces, _ = send(sender, manifest, slices(), place)
    assert [piece.box.tensor for piece in pieces] == [1] and existing_bytes() == 3 << 20
    assert not segment.is_fresh
    sender.close()


FULL = """
import os, time
import torch
from inference_plugin.transports import shm
from inference_plugin.transports.base import Delivery
from inference_plugin.transports.segment import SharedSegment
from inference_plugin.wire.errors import TransportUnavailable
from tests.transports.cases import manifest_for, whole_slices

def made(nbytes):
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, nbytes)
    return SharedSegment(fd, nbytes, "segment", writable=True)

SharedSegment.create = staticmethod(made)
shm.check_fits = lambda *_: None
tensors = {name: torch.full((3 << 20,), i, dtype=torch.uint8) for i, name in enumerate("abcdef", 1)}
manifest, sender = manifest_for(tensors), shm.ShmSender()
descriptors = len(os.listdir("/proc/self/fd"))
place = sender.allocate(manifest, frozenset())
try:
    sender.write(Delivery("t", "policy", 0, manifest, place, whole_slices(tensors), (), time.monotonic() + 3600))
    raise SystemExit("18 MiB found room in 8 MiB")
except TransportUnavailable as error:
    assert "the system has no memory for c[0:3145728]" in str(error), error
    assert error.hint.startswith("free memory") and "'zmq'" in error.hint, error
memory = sender.owned["segment"].tensor
assert memory[: 3 << 20].eq(1).all() and memory[3 << 20 : 6 << 20].eq(2).all()
del memory
sender.close()
assert len(os.listdir("/proc/self/fd")) == descriptors
assert os.statvfs("/dev/shm").f_bfree == os.statvfs("/dev/shm").f_blocks, "nothing is left behind"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_memory_that_ends_while_a_rank_writes_is_a_typed_error_and_no_signal() -> None:
    enter = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m none /dev/shm && exec "$0" "$@"']
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    ran = subprocess.run(
        [*enter, sys.executable, "-c", FULL], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_a_model_of_another_size_gets_a_segment_of_its_size_and_the_old_memory_goes() -> None:
    small, large = (manifest_for({"a": any_bits(torch.int8, n)}) for n in (9, 100_000))
    sender = ShmSender()
    first = address_of(sender.allocate(small, frozenset()))
    second = address_of(sender.allocate(large, frozenset()))
    assert (first.nbytes, second.nbytes) == (4096, large.layout.nbytes)
    assert set(sender.owned) == {second.segment_id}
    with pytest.raises(TransportUnavailable):
        SharedSegment.attach(first, writable=False)
    sender.close()


def test_a_receiver_keeps_two_segments_mapped_and_lets_older_ones_go() -> None:
    manifest = manifest_for({"a": any_bits(torch.int8, 9)})
    receiver = ShmReceiver()
    senders = [ShmSender() for _ in range(3)]
    before = weightwire_maps()
    for sender in senders:
        receiver.open(manifest, sender.allocate(manifest, frozenset()), wholes(manifest)).close()
    assert weightwire_maps() == before + len(senders) + 2
    receiver.close()
    receiver.close()
    for sender in senders:
        sender.close()
        sender.close()


def weightwire_maps(pid: int | str = "self") -> int:
    gc.collect()
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:weightwire")


def test_closing_everything_leaves_no_mapping_and_no_descriptor() -> None:
    before = weightwire_maps(), open_files()
    tensors = {"a": any_bits(torch.int8, 9)}
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    receiver.check_probe(sender.probe())
    description = sender.allocate(manifest, frozenset())
    staging = receiver.open(manifest, description, wholes(manifest))
    send(sender, manifest, whole_slices(tensors), description)
    assert weightwire_maps() > before[0]
    staging.close(), receiver.close(), sender.close()
    assert weightwire_maps() == before[0] and open_files() <= before[1]


def test_pythons_resource_tracker_never_hears_of_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    def heard(*arguments: object) -> None:
        raise AssertionError(f"the resource tracker was told {arguments}")

    monkeypatch.setattr(resource_tracker, "register", heard)
    monkeypatch.setattr(resource_tracker, "ensure_running", heard)
    segment = SharedSegment.create(5000)
    SharedSegment.attach(segment.address, writable=True).close()
    segment.close()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_size_that_no_system_has_is_refused_and_leaves_no_descriptor() -> None:
    descriptors = open_files()
    for nbytes in (1 << 62, 1 << 64):
        with pytest.raises(TransportUnavailable, match="can't be made"):
            SharedSegment.create(nbytes)
    assert open_files() <= descriptors


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    made = SharedSegment.create(8192)
    yield made
    made.close()


def refused(address: SegmentAddress, match: str) -> TransportUnavailable:
    descriptors = open_files()
    with pytest.raises(TransportUnavailable, match=match) as raised:
        SharedSegment.attach(address, writable=False)
    assert open_files() <= descriptors
    return raised.value


def test_an_address_with_another_size_or_inode_is_refused(segment: SharedSegment) -> None:
    good = segment.address
    for bad in ({"nbytes": 4096}, {"nbytes": 0}, {"nbytes": 1 << 40}, {"inode": good.inode + 1}):
        error = refused(msgspec.structs.replace(good, **bad), "is not the segment that was announced")
        assert "another SyncManager" in error.hint


def test_a_file_a_pipe_or_a_socket_in_its_place_is_refused_at_once(segment: SharedSegment, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 8192)
    file = os.open(tmp_path / "file", os.O_RDWR)
    os.mkfifo(tmp_path / "fifo")  # to open a FIFO that nobody writes to would block for ever
    read_end = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    one, other = socket.socketpair()
    for fd in (file, read_end, one.fileno()):
        status = os.fstat(fd)
        refused(msgspec.structs.replace(segment.address, fd=fd, inode=status.st_ino, nbytes=status.st_size), "shm: ")
    os.close(file), os.close(read_end), one.close(), other.close()


def test_a_memfd_that_could_shrink_under_its_reader_is_refused(segment: SharedSegment) -> None:
    fd = os.memfd_create("weightwire")
    os.ftruncate(fd, 8192)
    refused(
        msgspec.structs.replace(segment.address, fd=fd, inode=os.fstat(fd).st_ino),
        "is not the segment that was announced|can't be mapped",
    )
    os.close(fd)


def test_a_segment_of_another_host_is_refused_with_the_way_out(segment: SharedSegment) -> None:
    error = refused(msgspec.structs.replace(segment.address, boot_id="elsewhere"), "on another host")
    assert "zmq" in error.hint


def test_a_size_that_is_sealed_cannot_be_changed_under_a_reader(segment: SharedSegment) -> None:
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


@pytest.mark.parametrize("description", [b"", b"\xff", msgspec.msgpack.encode({"segment_id": "x"})])
def test_a_description_that_is_none_is_a_protocol_error(description: bytes) -> None:
    receiver = ShmReceiver()
    with pytest.raises(ProtocolError):
        receiver.check_probe(description)
    with pytest.raises(ProtocolError):
        receiver.open(Manifest(()), description, [])


def test_a_segment_smaller_than_the_manifest_is_refused() -> None:
    sender, receiver = ShmSender(), ShmReceiver()
    description = sender.allocate(manifest_for({"a": any_bits(torch.int8, 9)}), frozenset())
    with pytest.raises(TransportUnavailable, match="has 4096 bytes, the manifest needs 100352"):
        receiver.open(manifest_for({"a": any_bits(torch.int8, 100_000)}), description, [])
    sender.close()


def test_a_segment_that_cannot_be_made_says_so_and_leaves_nothing() -> None:
    descriptors = open_files()
    with pytest.raises(TransportUnavailable, match=f"a segment of {1 << 62} bytes can't be made") as raised:
        SharedSegment.create(1 << 62)
    assert "ulimit" in raised.value.hint
    assert open_files() <= descriptors


@pytest.mark.parametrize("private", [False, True])
def test_a_segment_for_which_a_reader_lacks_addresses_says_what_to_raise_and_leaves_nothing(private: bool) -> None:
    made = SharedSegment.create(1 << 40)  # no page of it exists
    descriptors = open_files()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (3 << 39, before[1]))
    try:
        with pytest.raises(TransportUnavailable, match=r"can't be mapped: .*Cannot allocate memory") as raised:
            SharedSegment.attach(made.address, writable=False, private=private)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert "ulimit -v" in raised.value.hint
    assert open_files() <= descriptors
    made.close()


def test_a_private_mapping_keeps_no_descriptor_hides_what_it_wrote_and_ends_with_its_last_view() -> None:
    def mappings() -> int:
        return sum(line.split()[4] == str(made.address.inode) for line in maps.read_text().splitlines())

    made, maps = SharedSegment.create(1 << 16), Path("/proc/self/maps")
    made.tensor.fill_(3)
    descriptors, own = open_files(), mappings()
    attached = SharedSegment.attach(made.address, writable=False, private=True)
    view = attached.tensor.view(torch.int16)[7:]
    attached.close()
    assert open_files() <= descriptors
    view[0] = 9
    if (child := os.fork()) == 0:
        held = view[:2].tolist() == [9, 0x303]
        view.fill_(1)
        os._exit(0 if held else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert view[:2].tolist() == [9, 0x303]
    assert set(made.tensor.tolist()) == {3}
    array = view.numpy()
    del view
    assert mappings() == own + 1 and array[0] == 9
    del array
    assert mappings() == own
    made.close()


# --- other processes --------------------------------------------------------------------------------------------------


def make_and_wait(out: str) -> None:
    """A process that makes a segment, writes to it, says where it is, and waits to be killed."""
    import signal

    made = SharedSegment.create(1 << 20)
    made.tensor[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    Path(out + ".new").write_bytes(msgspec.msgpack.encode(made.address))
    Path(out + ".new").rename(out)
    signal.pause()


def attach_and_wait(at: str, out: str) -> None:
    import signal

    attached = SharedSegment.attach(address_of(Path(at).read_bytes()), writable=False)
    Path(out).write_bytes(bytes(attached.tensor[:3].tolist()))
    signal.pause()


def test_a_creator_killed_leaves_readers_their_bytes_and_newcomers_a_reason(tmp_path: Path) -> None:
    before = weightwire_maps()
    out = tmp_path / "address"
    pid = fork("tests.transports.test_shm:make_and_wait", out=str(out))
    eventually(lambda: out.exists() and out.read_bytes(), "the segment")
    address = address_of(out.read_bytes())
    attached = SharedSegment.attach(address, writable=False)
    kill(pid)
    assert attached.tensor[:3].tolist() == [1, 2, 3]
    error = refused(address, f"can't open /proc/{pid}/fd/{address.fd}: No such file or directory")
    assert "pid namespace" in error.hint and "zmq" in error.hint
    attached.close()
    assert weightwire_maps() == before
    assert not list(Path("/dev/shm").glob("*weightwire*")), "a memfd has no name"


def test_a_reader_killed_takes_nothing_from_the_creator(tmp_path: Path) -> None:
    before = weightwire_maps()
    made = SharedSegment.create(1 << 20)
    made.tensor[:3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    at, out = tmp_path / "address", tmp_path / "read"
    at.write_bytes(msgspec.msgpack.encode(made.address))
    pid = fork("tests.transports.test_shm:attach_and_wait", at=str(at), out=str(out))
    eventually(lambda: out.exists() and out.read_bytes() == bytes([7, 8, 9]), "what the reader read")
    kill(pid)
    assert made.tensor[:3].tolist() == [7, 8, 9]
    SharedSegment.attach(made.address, writable=True).close()
    made.close()
    assert weightwire_maps() == before


def test_a_write_through_a_readers_mapping_is_impossible(segment: SharedSegment) -> None:
    """The mapping is read-only: a worker's bug can't change what another worker reads."""
    attached = SharedSegment.attach(segment.address, writable=False)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # it is meant to crash
        ctypes.memset(attached.tensor.data_ptr(), 1, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0
    assert segment.tensor[0] == 0


TINY = """
import os, torch
from inference_plugin.transports.segment import SharedSegment
from inference_plugin.transports.shm import TRANSPORT
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 10
assert TRANSPORT.why_not() is None
made = SharedSegment.create(8 << 20)
made.tensor.fill_(5)
read = SharedSegment.attach(made.address, writable=False)
assert int(read.tensor.sum(dtype=torch.int64)) == 5 * (8 << 20)
print("ok")
"""


HOLDS = """
import mmap, os, sys
nbytes = int(sys.argv[1])
fd = os.memfd_create("weightwire")
os.ftruncate(fd, nbytes)
mapping = mmap.mmap(fd, nbytes)
print("mapped", flush=True), sys.stdin.readline()
for page in range(0, nbytes // 2, mmap.PAGESIZE):
    mapping[page] = 0xFF
print("written", flush=True), sys.stdin.readline()
mapping.madvise(mmap.MADV_DONTNEED)  # unmaps the pages and keeps their bytes, as the kernel does on its own
print("unmapped", flush=True), sys.stdin.readline()
assert mapping[nbytes // 2 - mmap.PAGESIZE] == 0xFF
"""


def test_a_segment_counts_with_the_pages_that_it_has_whether_or_not_a_mapping_has_them() -> None:
    """How `held_bytes` measures, with which other tests compare what a report says of memory. In a process that waits while it
    is measured: the memory of this one changes with every test."""
    nbytes, held = 16 << 20, {}
    holds = [sys.executable, "-c", HOLDS, str(nbytes)]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for step in ("mapped", "written", "unmapped"):
            assert process.stdout.readline() == f"{step}\n"
            held[step] = held_bytes([process.pid])
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    assert held["written"] - held["mapped"] == pytest.approx(nbytes // 2, abs=1 << 20)
    assert held["unmapped"] == pytest.approx(held["written"], abs=1 << 20)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_dev_shm_of_64_kib_does_not_matter() -> None:
    enter = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$@"']
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    ran = subprocess.run(
        [*enter, sys.executable, "-c", TINY], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.stdout == "ok\n", ran.stderr


def test_a_description_that_names_a_kept_segment_and_means_another_gets_the_one_that_it_means() -> None:
    tensors = {"a": any_bits(torch.int8, 9)}
    manifest = manifest_for(tensors)
    sender, receiver = ShmSender(), ShmReceiver()
    first = msgspec.msgpack.decode(sender.allocate(manifest, frozenset()), type=SegmentAddress)
    receiver.open(manifest, msgspec.msgpack.encode(first), wholes(manifest)).close()
    other = SharedSegment.create(2 * first.nbytes)
    other.tensor.fill_(7)
    meant = msgspec.structs.replace(other.address, segment_id=first.segment_id)
    staging = receiver.open(manifest, msgspec.msgpack.encode(meant), wholes(manifest))
    assert staging.segment[:9].tolist() == [7] * 9
    for closed in (staging, receiver, sender, other):
        closed.close()
