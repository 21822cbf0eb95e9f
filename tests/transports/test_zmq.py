"""Buckets over real sockets, to a real worker server: bit for bit, two buffers, one bucket in flight."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq as libzmq

from inference_plugin.transports.base import Delivery, Target
from inference_plugin.transports.bucket_staging import BucketReceiver
from inference_plugin.transports.zmq import ZmqSender
from inference_plugin.wire import codec
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    DigestMismatch,
    ManifestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    VersionConflict,
)
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Abort, Begin, Begun, Bucket, Done, GroupOpened, OpenGroup, Sealed, Sender
from tests.support.rig import eventually, fork, kill
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


@pytest.fixture(params=["ipc", "tcp"])
def worker(request: pytest.FixtureRequest, directory: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/w" if request.param == "ipc" else "tcp://127.0.0.1:*")
    yield one
    one.close()


def begin(worker: Worker, manifest: Manifest, txn: str = "t", version: int = 1) -> None:
    with worker.channel() as channel:
        channel.request(OpenGroup("policy", manifest, "zmq"), GroupOpened, timeout_s=30)
        request = Begin("policy", txn, version, Sender("s"), FAR_S, manifest.fingerprint)
        assert channel.request(request, Begun, timeout_s=30) == Begun()


def seal(worker: Worker, pieces: list[Piece], txn: str = "t") -> Sealed:
    with worker.channel() as channel:
        while not (sealed := channel.request(worker.seal(txn, pieces), Sealed, timeout_s=30)).done:
            pass
    return sealed


def write(sender: ZmqSender, manifest: Manifest, slices: Any, targets: list[Target], **options: Any) -> Any:
    deadline_s = options.pop("deadline_s", time.monotonic() + FAR_S)
    rank = options.pop("rank", 0)
    return sender.write(Delivery("t", "policy", rank, manifest, b"", slices, targets, deadline_s))


@pytest.mark.parametrize("slices", [whole_slices, column_slices, block_slices], ids=["whole", "columns", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_installed_bit_for_bit(
    worker: Worker, case: str, slices: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = CASES[case]()
    manifest = manifest_for(tensors)
    begin(worker, manifest)
    sender = ZmqSender()
    pieces, stats = write(sender, manifest, slices(tensors), [worker.target(manifest)])
    assert seal(worker, pieces).checked_bytes == stats.nbytes == manifest.nbytes
    worker.commit("t", 1)
    assert_equal_bytes(worker.installer.installed, tensors)
    sender.close()


@pytest.mark.parametrize(("bucket_bytes", "messages"), [("4MiB", 7), ("8MiB", 4), ("32MiB", 1)])
def test_the_size_of_a_bucket_is_the_senders_alone(worker: Worker, bucket_bytes: Any, messages: int) -> None:
    tensors = CASES["around the size of a piece"]()
    manifest = manifest_for(tensors)
    begin(worker, manifest)
    sender = ZmqSender()
    sender.config = Config(bucket_bytes=bucket_bytes)
    pieces, stats = write(sender, manifest, whole_slices(tensors), [worker.target(manifest)])
    assert stats.messages == messages
    assert seal(worker, pieces).checked_bytes == manifest.nbytes
    worker.commit("t", 1)
    assert_equal_bytes(worker.installer.installed, tensors)
    sender.close()


def test_two_ranks_write_to_one_worker_and_a_worker_gets_only_what_it_needs(directory: Path) -> None:
    tensors = {"a": any_bits(torch.float32, 8, 6), "b": any_bits(torch.int8, 5)}
    manifest = manifest_for(tensors)
    need = Box(0, (2, 1), (4, 3))
    worker = Worker(f"ipc://{directory}/w", lambda _: KeepingInstaller(needs=(need,)))
    begin(worker, manifest)
    slices = list(column_slices(tensors, parts=2))
    sent, pieces = 0, []
    for rank in (0, 1):
        sender = ZmqSender()
        written, stats = write(sender, manifest, iter(slices[rank::2]), [worker.target(manifest, (need,))], rank=rank)
        pieces += written
        sent += stats.messages
        sender.close()
    assert sent == 2  # nothing of "b" travelled
    assert seal(worker, pieces).checked_bytes == 8 * 6 * 4
    worker.commit("t", 1)
    held = worker.installer.installed
    assert torch.equal(held["a"][2:6, 1:4].view(torch.int32), tensors["a"][2:6, 1:4].contiguous().view(torch.int32))
    assert not held["b"].any() and not held["a"][0].any()
    worker.close()


# --- buckets, against a peer whose replies the test holds back --------------------------------------------------------


class HeldPeer:
    """A worker's socket whose replies wait for the test. It keeps what arrived, as it arrived."""

    def __init__(self, directory: Path) -> None:
        self.context = libzmq.Context()
        self.socket = self.context.socket(libzmq.REP)
        self.address = f"ipc://{directory}/held"
        self.socket.bind(self.address)
        self._seq = 0

    def take(self) -> tuple[Bucket, bytes]:
        assert self.socket.poll(30_000), "no bucket came"
        head, payload = self.socket.recv_multipart()
        envelope = codec.decode(head)
        self._seq = envelope.seq
        assert isinstance(envelope.body, Bucket)
        return envelope.body, payload

    def answer(self) -> None:
        self.socket.send(codec.encode(Done(), self._seq))


@pytest.fixture
def held(directory: Path) -> Iterator[HeldPeer]:
    peer = HeldPeer(directory)
    yield peer
    peer.context.destroy(linger=0)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> int:
    config = Config()
    msgspec.structs.force_setattr(config, "bucket_bytes", 1000)
    monkeypatch.setattr(ZmqSender, "config", config)
    return 1000


class Drawn:
    """Slices that note how far they were asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.count = 0
        self._slices = list(whole_slices(tensors))

    def __iter__(self) -> Iterator[Any]:
        for item in self._slices:
            self.count += 1
            yield item


def in_thread(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def body() -> None:
        try:
            results.append(run())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, results


def target_at(address: str, manifest: Manifest) -> Target:
    return Target("r", 0, address, 0, "", tuple(manifest.whole(i) for i in range(len(manifest.tensors))))


def test_the_next_bucket_is_packed_while_one_is_unanswered_and_never_the_one_after(
    held: HeldPeer, small_buckets: int
) -> None:
    tensors = {f"t{i}": any_bits(torch.uint8, 500, seed=i) for i in range(8)}  # two to a bucket
    manifest = manifest_for(tensors)
    drawn, sender = Drawn(tensors), ZmqSender()
    thread, results = in_thread(lambda: write(sender, manifest, iter(drawn), [target_at(held.address, manifest)]))
    arrived = []
    for k in range(4):
        bucket, payload = held.take()
        # Bucket k is in flight. Bucket k+1 is packed meanwhile, up to the tensor that doesn't fit in any more.
        ahead = min(8, 2 * (k + 2) + 1)
        eventually(lambda ahead=ahead: drawn.count == ahead, f"{ahead} tensors asked for")  # type: ignore[misc]
        assert drawn.count == ahead, "a third buffer would be needed to go on"
        assert (bucket.seq, len(bucket.pieces)) == (k, 2)
        arrived.append(payload)
        held.answer()
    thread.join()
    assert results[0][1].messages == 4
    meant = [tensors[f"t{2 * k}"].numpy().tobytes() + tensors[f"t{2 * k + 1}"].numpy().tobytes() for k in range(4)]
    assert arrived == meant


def test_with_more_buffers_more_is_packed_ahead_and_still_one_bucket_is_in_flight(
    held: HeldPeer, small_buckets: int
) -> None:
    tensors = {f"t{i}": any_bits(torch.uint8, 1000, seed=i) for i in range(8)}  # one to a bucket
    manifest = manifest_for(tensors)
    drawn, sender = Drawn(tensors), ZmqSender()
    msgspec.structs.force_setattr(sender.config, "buffers", 4)
    thread, results = in_thread(lambda: write(sender, manifest, iter(drawn), [target_at(held.address, manifest)]))
    arrived = []
    for k in range(8):
        bucket, payload = held.take()
        ahead = min(8, k + 5)  # k in flight, two packed, one being packed; the next one doesn't fit in any more
        eventually(lambda ahead=ahead: drawn.count == ahead, f"{ahead} tensors asked for")  # type: ignore[misc]
        assert (bucket.seq, held.socket.poll(0)) == (k, 0)
        arrived.append(payload)
        held.answer()
    thread.join()
    assert results[0][1].messages == 8
    assert arrived == [tensor.numpy().tobytes() for tensor in tensors.values()]


def test_a_buffer_in_flight_is_not_filled_again_before_its_answer(held: HeldPeer, small_buckets: int) -> None:
    tensors = {f"t{i}": any_bits(torch.uint8, 1000, seed=i) for i in range(4)}
    manifest = manifest_for(tensors)
    drawn, sender = Drawn(tensors), ZmqSender()
    thread, results = in_thread(lambda: write(sender, manifest, iter(drawn), [target_at(held.address, manifest)]))
    held.take()
    eventually(lambda: drawn.count == 3, "the bucket after next was reached")
    (lane,) = sender.lanes.values()
    in_memory = {buffer.memory[:1000].tobytes() for buffer in lane.buffers}
    assert in_memory == {tensors[name].numpy().tobytes() for name in ("t0", "t1")}
    held.answer()
    for _ in range(3):
        held.take()
        held.answer()
    thread.join()
    assert results[0][1].messages == 4


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ([999], [999]),
        ([1000], [1000]),
        ([400, 600], [1000]),
        ([400, 600, 1], [1000, 1]),
        ([400, 601], [400, 601]),
        ([1000, 1], [1000, 1]),
        ([1, 1000], [1, 1000]),
        ([0, 5, 0], [5]),
        ([], []),
    ],
    ids=str,
)
def test_only_the_bytes_of_a_bucket_travel(
    held: HeldPeer, small_buckets: int, sizes: list[int], buckets: list[int]
) -> None:
    tensors = {f"t{i}": any_bits(torch.uint8, size, seed=i) for i, size in enumerate(sizes)}
    manifest = manifest_for(tensors)
    sender = ZmqSender()
    thread, results = in_thread(
        lambda: write(sender, manifest, whole_slices(tensors), [target_at(held.address, manifest)])
    )
    payloads = []
    for _ in buckets:
        payloads.append(held.take()[1])
        held.answer()
    thread.join()
    assert [len(payload) for payload in payloads] == buckets
    pieces, stats = results[0]
    assert (stats.nbytes, stats.messages) == (sum(sizes), len(buckets))
    assert b"".join(payloads) == b"".join(t.numpy().tobytes() for t in tensors.values())
    assert len(pieces) == sum(size > 0 for size in sizes)


def test_a_peer_that_is_silent_ends_the_write_at_its_deadline_and_the_next_write_works(
    held: HeldPeer, directory: Path
) -> None:
    tensors = {"a": any_bits(torch.int8, 9)}
    manifest = manifest_for(tensors)
    sender = ZmqSender()
    deadline_s = time.monotonic() + 0.1
    targets = [target_at(held.address, manifest)]
    _, stats = write(sender, manifest, whole_slices(tensors), targets, deadline_s=deadline_s)
    lost = stats.lost["r"]
    assert isinstance(lost, SyncTimeout)
    assert (lost.side, lost.replica, lost.rank) == ("trainer", "r", 0)
    thread, results = in_thread(
        lambda: write(sender, manifest, whole_slices(tensors), [target_at(held.address, manifest)])
    )
    payloads = []
    while thread.is_alive():  # the first one is late, or was not even sent: its answer is for nobody
        if held.socket.poll(20):
            payloads.append(held.take()[1])
            held.answer()
    assert set(payloads) == {tensors["a"].numpy().tobytes()} and results[0][1].messages == 1


def hang_on_the_second_bucket(address: str, out: str) -> None:
    import signal

    socket = libzmq.Context().socket(libzmq.REP)
    socket.bind(address)
    Path(out).touch()
    for k in itertools.count():
        envelope = codec.decode(socket.recv_multipart()[0])
        if k:
            Path(out + ".second").touch()
            signal.pause()
        socket.send(codec.encode(Done(), envelope.seq))


def test_a_worker_killed_between_buckets_is_a_lost_peer_at_once(directory: Path, small_buckets: int) -> None:
    from inference_plugin.net.addresses import boot_id

    address, out = f"ipc://{directory}/w", str(directory / "up")
    pid = fork("tests.transports.test_zmq:hang_on_the_second_bucket", address=address, out=out)
    eventually(Path(out).exists, "the worker's socket")
    tensors = {f"t{i}": any_bits(torch.uint8, 1000, seed=i) for i in range(5)}
    manifest = manifest_for(tensors)
    whole = tuple(manifest.whole(i) for i in range(5))
    sender = ZmqSender()
    thread, results = in_thread(
        lambda: write(sender, manifest, whole_slices(tensors), [Target("r", 3, address, pid, boot_id(), whole)])
    )
    eventually(Path(out + ".second").exists, "the second bucket")
    kill(pid)
    thread.join(600)
    lost = results[0][1].lost["r"]
    assert isinstance(lost, PeerLost), results
    assert (lost.side, lost.replica, lost.rank, lost.phase) == ("trainer", "r", 3, "stage")
    sender.close()


# --- what a worker refuses --------------------------------------------------------------------------------------------


@pytest.fixture
def receiving(directory: Path) -> Iterator[tuple[Worker, Manifest, dict[str, torch.Tensor]]]:
    tensors = {"a": any_bits(torch.int8, 9), "b": any_bits(torch.int8, 5)}
    manifest = manifest_for(tensors)
    worker = Worker(f"ipc://{directory}/w")
    begin(worker, manifest)
    yield worker, manifest, tensors
    worker.close()


def piece_of(tensors: dict[str, torch.Tensor], name: str) -> tuple[Piece, bytes]:
    i = list(tensors).index(name)
    data = tensors[name].numpy().tobytes()
    return Piece(Box(i, (0,), (len(data),)), digest_bytes(data)), data


def put(worker: Worker, seq: int, pieces: list[Piece], payload: bytes, rank: int = 0) -> None:
    with worker.channel() as channel:
        channel.request(Bucket("policy", "t", rank, seq, tuple(pieces)), Done, timeout_s=30, payload=payload)


Receiving = tuple[Worker, Manifest, dict[str, torch.Tensor]]


def test_a_corrupted_byte_is_refused_on_arrival_by_name_and_the_right_bytes_still_count(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    piece, data = piece_of(tensors, "b")
    with pytest.raises(DigestMismatch, match=r"b\[0:5\] is not what the trainer sent") as raised:
        put(worker, 0, [piece], bytes([data[0] ^ 1]) + data[1:])
    assert (raised.value.side, raised.value.rank) == ("worker", 0)
    put(worker, 0, [piece], data)
    piece_a, data_a = piece_of(tensors, "a")
    put(worker, 1, [piece_a], data_a)
    assert seal(worker, [piece, piece_a]).done
    worker.commit("t", 1)
    assert_equal_bytes(worker.installer.installed, tensors)


def test_bytes_that_do_not_match_their_pieces_in_length_are_refused_with_names(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    piece, data = piece_of(tensors, "b")
    for payload in (data[:-1], data + b"x", b""):
        with pytest.raises(ProtocolError, match=rf"a bucket of {len(payload)} bytes whose pieces take 5: b\[0:5\]"):
            put(worker, 0, [piece], payload)


def test_boxes_that_do_not_lie_in_the_manifest_are_refused(receiving: Receiving) -> None:
    worker, _, _ = receiving
    for box in (Box(0, (5,), (5,)), Box(2, (0,), (1,)), Box(0, (), ()), Box(0, (1 << 47,), (1 << 47,))):
        with pytest.raises(ManifestMismatch):
            put(worker, 0, [Piece(box, 0)], b"")


def test_a_bucket_out_of_order_is_refused_and_one_repeated_is_answered_and_not_applied(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    piece, data = piece_of(tensors, "b")
    with pytest.raises(ProtocolError, match="bucket 1 of trainer rank 0 came before bucket 0"):
        put(worker, 1, [piece], data)
    put(worker, 0, [piece], data)
    other = bytes(len(data))
    put(worker, 0, [Piece(piece.box, digest_bytes(other))], other)  # the same number again: answered, dropped
    piece_a, data_a = piece_of(tensors, "a")
    put(worker, 0, [piece_a], data_a, rank=1)  # numbers are counted for each rank
    assert seal(worker, [piece, piece_a]).done
    worker.commit("t", 1)
    assert_equal_bytes(worker.installer.installed, tensors)


def test_a_piece_that_did_not_arrive_is_found_at_the_seal(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    pieces = [piece_of(tensors, name)[0] for name in tensors]
    put(worker, 0, [pieces[0]], piece_of(tensors, "a")[1])
    with pytest.raises(DigestMismatch, match=r"b\[0:5\] did not arrive"):
        seal(worker, pieces)


def test_a_piece_sealed_with_another_digest_than_it_arrived_with_is_refused(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    pieces = []
    for seq, name in enumerate(tensors):
        piece, data = piece_of(tensors, name)
        put(worker, seq, [piece], data)
        pieces.append(piece)
    with pytest.raises(DigestMismatch, match=r"a\[0:9\] is not what the trainer sealed"):
        seal(worker, [Piece(pieces[0].box, pieces[0].digest ^ 1), pieces[1]])


def test_bytes_that_arrived_and_were_not_sealed_cannot_hide_in_the_update(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    pieces = []
    for seq, name in enumerate(tensors):
        piece, data = piece_of(tensors, name)
        put(worker, seq, [piece], data)
        pieces.append(piece)
    over = bytes([255, 255])
    put(worker, 2, [Piece(Box(0, (3,), (2,)), digest_bytes(over))], over)  # over what was checked already
    with pytest.raises(DigestMismatch, match=r"a\[3:5\]"):
        seal(worker, pieces)


def test_a_bucket_after_the_seal_is_refused(receiving: Receiving) -> None:
    worker, _, tensors = receiving
    pieces = []
    for seq, name in enumerate(tensors):
        piece, data = piece_of(tensors, name)
        put(worker, seq, [piece], data)
        pieces.append(piece)
    assert seal(worker, pieces).done
    with pytest.raises(ProtocolError, match="a new bucket after the seal"):
        put(worker, 2, [pieces[0]], piece_of(tensors, "a")[1])
    put(worker, 1, [pieces[1]], piece_of(tensors, "b")[1])  # an old one again is only answered


def test_a_dropped_updates_buckets_are_refused_and_their_bytes_are_not_kept(receiving: Receiving) -> None:
    """A trainer that goes on sending to an update that was dropped must not fill the worker's memory."""
    import gc

    worker, _, _ = receiving
    with worker.channel() as aborting:
        aborting.request(Abort("policy", "t", "the test says so"), Done, timeout_s=60)
    payload = bytes(2 << 20)
    for seq in range(3):
        with pytest.raises(VersionConflict, match="dropped: the test says so"):
            put(worker, seq, [], payload)

    def kept() -> bool:
        frames = [held for held in gc.get_objects() if type(held) is libzmq.Frame]
        return any(len(frame.bytes) >= len(payload) for frame in frames)

    eventually(lambda: not kept(), what="the last one to be given back")  # the answer leaves a little earlier


def test_staging_is_reused_from_one_update_to_the_next_and_never_shows_old_bytes_as_new() -> None:
    tensors = {"a": any_bits(torch.int8, 9)}
    manifest = manifest_for(tensors)
    receiver = BucketReceiver()
    first = receiver.open(manifest, b"", [manifest.whole(0)])
    piece, data = piece_of(tensors, "a")
    first.receive(Bucket("policy", "txn", 0, 0, (piece,)), memoryview(data))
    first.close()
    second = receiver.open(manifest, b"", [manifest.whole(0)])
    with pytest.raises(DigestMismatch, match="did not arrive"):
        second.check(manifest, [piece], lambda: None)
    assert second.segment_id != first.segment_id
    second.close()
    receiver.close()
