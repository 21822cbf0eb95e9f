"""Workers read the trainer's memory, by a real NIXL over UCX: bit for bit, each piece packed once; and what a peer names
wrongly, or stops in, is a typed error."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from inference_plugin.net.channel import Channel
from inference_plugin.transports import nixl_agent
from inference_plugin.transports.base import Delivery
from inference_plugin.transports.nixl import TRANSPORT, NixlReceiver, NixlSender, Place, Probe
from inference_plugin.transports.nixl_agent import Agent
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    PeerLost,
    ProtocolError,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Abort, Begin, Begun, Bucket, Done, GroupOpened, OpenGroup, Sealed, Sender
from inference_plugin.wire.tensors import bytes_view
from tests.support.rig import eventually, fork, gone, kill, stands_still
from tests.support.worker import KeepingInstaller, Worker
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


@pytest.fixture
def worker(directory: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/w")
    yield one
    one.close()


@pytest.fixture
def sender() -> Iterator[NixlSender]:
    one = NixlSender()
    yield one
    one.close()


def begin(worker: Worker, manifest: Manifest, probe: bytes, txn: str = "t", version: int = 1) -> None:
    with worker.channel() as channel:
        channel.request(OpenGroup("policy", manifest, "nixl", probe), GroupOpened, timeout_s=30)
        request = Begin("policy", txn, version, Sender("s"), FAR_S, manifest.fingerprint)
        assert channel.request(request, Begun, timeout_s=30) == Begun()


def seal(worker: Worker, pieces: list[Piece], txn: str = "t") -> Sealed:
    with worker.channel() as channel:
        while not (sealed := channel.request(worker.seal(txn, pieces), Sealed, timeout_s=30)).done:
            pass
    return sealed


def write(sender: NixlSender, manifest: Manifest, slices: Any, targets: Any, rank: int = 0, txn: str = "t") -> Any:
    return sender.write(Delivery(txn, "policy", rank, manifest, b"", slices, targets, time.monotonic() + FAR_S))


@pytest.mark.parametrize(
    ("case", "cut"), list(zip(CASES, itertools.cycle([block_slices, column_slices, whole_slices]), strict=False))
)
def test_what_is_read_is_installed_bit_for_bit(
    worker: Worker, sender: NixlSender, case: str, cut: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = CASES[case]()
    manifest = manifest_for(tensors)
    begin(worker, manifest, sender.probe())
    pieces, stats = write(sender, manifest, cut(tensors), [worker.target(manifest)])
    assert seal(worker, pieces).checked_bytes == stats.nbytes == manifest.nbytes
    worker.commit("t", 1)
    assert_equal_bytes(worker.installer.installed, tensors)


@pytest.mark.parametrize(("bucket_bytes", "messages"), [("4MiB", 7), ("8MiB", 4), ("32MiB", 1)])
def test_the_size_of_a_bucket_is_the_senders_alone(
    worker: Worker, sender: NixlSender, bucket_bytes: Any, messages: int
) -> None:
    tensors = CASES["around the size of a piece"]()
    manifest = manifest_for(tensors)
    sender.config = Config(bucket_bytes=bucket_bytes)
    begin(worker, manifest, sender.probe())
    for version in (1, 2):
        pieces, stats = write(sender, manifest, whole_slices(tensors), [worker.target(manifest)], txn="t" * version)
        assert (stats.messages, stats.sent_bytes) == (messages, manifest.nbytes)
        assert seal(worker, pieces, "t" * version).checked_bytes == manifest.nbytes
        worker.commit("t" * version, version)
        assert_equal_bytes(worker.installer.installed, tensors)
        tensors = {name: any_bits(tensor.dtype, *tensor.shape, seed=9) for name, tensor in tensors.items()}
        if version == 1:
            begin(worker, manifest, sender.probe(), "tt", 2)


def test_ranks_pack_once_for_all_workers_and_each_reads_only_what_it_needs(directory: Path) -> None:
    tensors = {"a": any_bits(torch.float32, 8, 6), "b": any_bits(torch.int8, 5), "c": any_bits(torch.int16, 700)}
    manifest = manifest_for(tensors)
    need = Box(0, (2, 1), (4, 3))
    some = Worker(f"ipc://{directory}/some", lambda _: KeepingInstaller(needs=(need,)))
    whole = Worker(f"ipc://{directory}/whole")
    targets = [some.target(manifest, (need,)), whole.target(manifest)]
    senders = [NixlSender(), NixlSender()]
    slices = list(column_slices(tensors, parts=2))
    for worker in (some, whole):
        begin(worker, manifest, senders[0].probe())
    pieces, sent_bytes, held_bytes = [], 0, set()
    for rank, sender in enumerate(senders):
        written, stats = write(sender, manifest, iter(slices[rank::2]), targets, rank)
        pieces += written
        sent_bytes += stats.sent_bytes
        held_bytes.add(stats.held_bytes)
    assert manifest.nbytes < sent_bytes <= manifest.nbytes + 8 * 6 * 4, "nothing but pieces of `a` went to both"
    assert max(held_bytes) < 2 * (8 << 20) + 4096, "the buckets of one worker"
    for worker in (some, whole):
        seal(worker, pieces)
        worker.commit("t", 1)
    assert_equal_bytes(whole.installer.installed, tensors)
    part = some.installer.installed["a"]
    assert torch.equal(bytes_view(part[2:6, 1:4].contiguous()), bytes_view(tensors["a"][2:6, 1:4].contiguous()))
    assert not part[0].any() and not some.installer.installed["b"].any()
    for each in (*senders, some, whole):
        each.close()


# --- messages that can't be right ----------------------------------------------------------------------------------------------


BOX = Box(0, (0,), (16,))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"lies_at": b""}, ProtocolError, "payload"),
        ({"lies_at": b"\xc1"}, ProtocolError, "malformed"),
        ({"starts": ()}, ProtocolError, "0 places"),
        ({"starts": (0, 0)}, ProtocolError, "2 places"),
        ({"starts": (8,)}, PeerLost, "can't be read"),
        ({"starts": ((1 << 62) - 1,)}, PeerLost, "can't be read"),
        ({"metadata": b"nothing of NIXL's"}, PeerLost, "can't be read"),
        ({"past": 1 << 20}, PeerLost, "can't be read"),
        ({"holds": bytes(16)}, DigestMismatch, "not what the trainer sent"),
    ],
    ids=[
        "nothing",
        "no message",
        "no place",
        "two places",
        "address 8",
        "largest",
        "metadata",
        "past the end",
        "others",
    ],
)
def test_a_message_that_cannot_be_right_is_a_typed_error_and_the_next_one_is_read(
    worker: Worker, wrong: dict[str, Any], error: type[WeightwireError], words: str
) -> None:
    manifest = manifest_for({"w": any_bits(torch.int8, 16)})
    agent = Agent()
    memory = agent.register(1 << 16).memory
    memory[:16] = torch.arange(16)
    right = memory[:16].numpy().tobytes()
    sender = NixlSender()
    begin(worker, manifest, sender.probe())

    def ask_twice(channel: Channel) -> None:
        """Pieces are compared after the answer: the next message hears of what differs."""
        ask(channel, 0, **wrong)
        ask(channel, 1)

    def ask(channel: Channel, seq: int, **wrong: Any) -> None:
        digest = digest_bytes(right)
        start = memory.data_ptr() + wrong.get("past", 16 if "holds" in wrong else 0)
        place = Place(wrong.get("metadata", agent.metadata()), wrong.get("starts", (start,)))
        lies_at = wrong.get("lies_at", msgspec.msgpack.encode(place))
        bucket = Bucket("policy", "t", 0, seq, (Piece(BOX, digest),), lies_at)
        channel.request(bucket, Done, timeout_s=30)

    with worker.channel() as channel:
        with pytest.raises(error, match=words):
            ask_twice(channel)
        channel.request(Abort("policy", "t"), Done, timeout_s=30)
    begin(worker, manifest, sender.probe(), "u")
    slices = whole_slices({"w": memory[:16].view(torch.int8)})
    pieces, _ = write(sender, manifest, slices, [worker.target(manifest)], txn="u")
    seal(worker, pieces, "u")
    worker.commit("u", 1)
    assert worker.installer.installed["w"].tolist() == list(range(16))
    sender.close()
    agent.close()


def test_a_trainer_whose_memory_a_worker_cannot_read_is_refused_when_the_group_is_opened(sender: NixlSender) -> None:
    receiver = NixlReceiver()
    receiver.check_probe(sender.probe())
    probe = msgspec.msgpack.decode(sender.probe())
    for other in ({"start": 8}, {"holds": bytes(64)}, {"metadata": b"x"}):
        with pytest.raises(TransportUnavailable, match="on lo, can't read the memory of the trainer, on lo") as raised:
            receiver.check_probe(msgspec.msgpack.encode(probe | other))
        assert "UCX_NET_DEVICES" in raised.value.hint
    receiver.check_probe(sender.probe())
    receiver.close()


def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_9:1")
    with pytest.raises(TransportUnavailable, match=r"devices mlx5_9:1") as raised:
        NixlSender().probe()
    assert "UCX_NET_DEVICES" in raised.value.hint


def test_without_its_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("no_such_package",))
    assert "pip install nixl-cu12" in (TRANSPORT.why_not() or "")


def test_buckets_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(TransportUnavailable, match="nixl: buckets"):
        NixlSender().probe()


# --- peers that stop, die or leave ---------------------------------------------------------------------------------------------


def lend_memory(out: str) -> None:
    """A trainer rank whose memory can be read, for as long as it lives."""
    agent = Agent()
    memory = agent.register(64 << 20).memory
    memory[:] = 7
    half = Path(f"{out}.half")
    half.write_bytes(msgspec.msgpack.encode((agent.metadata(), memory.data_ptr())))
    half.rename(out)
    signal.pause()


@pytest.fixture
def lent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, bytes, int]]:
    """The pid of such a rank, what NIXL must know to read there, and where its memory begins. Over TCP, so that its process takes
    part in each read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    out = directory / "lent"
    pid = fork("tests.transports.test_nixl:lend_memory", {"UCX_TLS": "tcp"}, out=str(out))
    eventually(out.exists, "memory to read")
    metadata, start = msgspec.msgpack.decode(out.read_bytes())
    yield pid, metadata, start
    kill(pid)


def test_a_read_from_a_rank_that_stops_ends_with_its_transaction_and_what_comes_late_goes_nowhere(
    directory: Path, lent: tuple[int, bytes, int], sender: NixlSender
) -> None:
    pid, metadata, start = lent
    worker = Worker(f"ipc://{directory}/w")
    tensors = {f"w{i}": any_bits(torch.int8, 4 << 20, seed=i) for i in range(8)}
    manifest = manifest_for(tensors)
    begin(worker, manifest, sender.probe())
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: stands_still(pid), "the rank standing still")
    boxes = [manifest.whole(i) for i in range(8)]
    place = Place(metadata, tuple(start + i * (4 << 20) for i in range(8)))
    pieces = tuple(Piece(box, 0) for box in boxes)
    bucket = Bucket("policy", "t", 1, 0, pieces, msgspec.msgpack.encode(place))
    ended: list[BaseException] = []

    def tell() -> None:
        with worker.channel() as channel:
            try:
                channel.request(bucket, Done, timeout_s=60)
            except WeightwireError as error:
                ended.append(error)

    teller = threading.Thread(target=tell)
    teller.start()
    time.sleep(0.2)  # most of the time the read has begun
    with worker.channel() as channel:
        channel.request(Abort("policy", "t"), Done, timeout_s=30)
    teller.join(30)
    assert not teller.is_alive() and isinstance(ended[0], VersionConflict)

    begin(worker, manifest, sender.probe(), "u")
    written, _ = write(sender, manifest, whole_slices(tensors), [worker.target(manifest)], txn="u")
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.2)
    seal(worker, written, "u")
    worker.commit("u", 1)
    assert_equal_bytes(worker.installer.installed, tensors)
    worker.close()


def test_a_rank_lives_on_whose_reader_gave_up_and_closed(lent: tuple[int, bytes, int]) -> None:
    """UCX, over TCP, aborts a process that answers a read of an agent that has gone."""
    pid, metadata, start = lent
    probe = msgspec.msgpack.encode(Probe(metadata, start, bytes([7]) * 64, "lo"))
    receiver = NixlReceiver()
    receiver.check_probe(probe)
    manifest = manifest_for({"w": any_bits(torch.int8, 64 << 20)})
    staging = receiver.open(manifest, b"", [manifest.whole(0)])
    bucket = Bucket(
        "policy", "t", 0, 0, (Piece(manifest.whole(0), 0),), msgspec.msgpack.encode(Place(metadata, (start,)))
    )
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: stands_still(pid), "the rank standing still")
    staging.cancel()
    for _ in range(2):
        with pytest.raises(VersionConflict):
            staging.receive(bucket, memoryview(b""))
    staging.close()
    receiver.close()
    os.kill(pid, signal.SIGCONT)
    other = NixlReceiver()
    other.check_probe(probe)
    other.close()
    assert not gone(pid)


def test_a_cut_connection_costs_one_read(lent: tuple[int, bytes, int]) -> None:
    _, metadata, start = lent
    probe = msgspec.msgpack.encode(Probe(metadata, start, bytes([7]) * 64, "lo"))
    connections = psutil.Process().net_connections
    before = {each.fd for each in connections("tcp")}
    receiver = NixlReceiver()
    receiver.check_probe(probe)
    cut = 0
    for each in connections("tcp"):
        if each.fd not in before and each.status == psutil.CONN_ESTABLISHED:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(each.fd)) as one,
            ):  # UCX may have closed it since
                one.shutdown(socket.SHUT_RDWR)
                cut += 1
    assert cut
    time.sleep(0.2)  # UCX hears of it
    with pytest.raises(TransportUnavailable):
        receiver.check_probe(probe)
    receiver.check_probe(probe)
    receiver.close()


def test_a_rank_that_dies_while_it_is_read_is_a_typed_error(lent: tuple[int, bytes, int]) -> None:
    pid, metadata, start = lent
    agent = Agent()
    peer = agent.meet(metadata)
    into = agent.register(64 << 20)
    os.kill(pid, signal.SIGSTOP)
    reading = agent.read(peer, [(start, 64 << 20)], into.memory.data_ptr())
    assert not reading.is_over()
    kill(pid)

    def lost() -> bool:
        try:
            reading.is_over()
        except PeerLost:
            return True
        return False

    eventually(lost, "the end of the read")
    agent.close()


def test_agents_leave_no_thread_and_no_file_behind(sender: NixlSender) -> None:
    process = psutil.Process()

    def counts() -> tuple[int, int]:
        return process.num_threads(), process.num_fds()

    def open_and_close() -> None:
        receiver, other = NixlReceiver(), NixlSender()
        receiver.check_probe(other.probe())
        other.close()
        receiver.close()

    open_and_close()
    before = counts()
    for _ in range(5):
        open_and_close()
    assert all(now <= then + 1 for now, then in zip(counts(), before, strict=True)), (before, counts())


def test_it_listens_on_the_devices_that_are_named_and_without_any_it_is_not_there(
    sender: NixlSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listens_at() -> set[str]:
        return {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    before = listens_at()
    sender.probe()
    assert os.environ["UCX_NET_DEVICES"] == "lo" and listens_at() - before <= {"127.0.0.1"}
    monkeypatch.delenv("UCX_NET_DEVICES")
    assert "a network that you trust" in (TRANSPORT.why_not() or "")
    with pytest.raises(TransportUnavailable, match="names no devices"):
        transport_named("nixl")
