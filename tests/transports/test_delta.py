"""Only what changed travels, over real sockets to a real worker; and whatever happened before, what is sealed is bit for bit what
the trainer meant."""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.transports import delta
from inference_plugin.transports.delta import DeltaReceiver, DeltaSender, changes_between, make_changes
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, TransportUnavailable, WeightwireError
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    Bucket,
    Done,
    GroupOpened,
    OpenGroup,
    Release,
    Sender,
)
from inference_plugin.wire.tensors import bytes_view
from tests.support.worker import KeepingInstaller, Worker
from tests.transports.cases import (
    CASES,
    any_bits,
    block_slices,
    column_slices,
    manifest_for,
    whole_slices,
)
from tests.transports.pairs import FAR_S, Cut, Pair, changed

NAME = msgspec.msgpack.encode({"name": bytes(16)})


# --- changes -----------------------------------------------------------------------------------------------------------------


@given(
    item_bytes=st.sampled_from([1, 2, 4, 8, 16]),
    count=st.sampled_from([0, 1, 3, 1000, 65_535, 65_536, 65_537, 300_000]),
    at=st.lists(st.floats(0, 1, exclude_max=True), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_changes_make_the_new_bytes_of_the_old_ones_wherever_they_lie_and_may_be_made_twice(
    item_bytes: int, count: int, at: list[float], seed: int
) -> None:
    chance = np.random.default_rng(seed)
    old = chance.integers(0, 256, count * item_bytes, dtype=np.uint8)
    new = old.copy()
    for where in {int(each * count) for each in at if count}:
        new[where * item_bytes + chance.integers(item_bytes)] ^= chance.integers(1, 256, dtype=np.uint8)
    changes = changes_between(old, new, item_bytes)
    if changes is None:
        assert count <= 6 * 4, "few changes of many bytes take less"
        return
    assert changes.nbytes <= new.nbytes // 2 and (changes.nbytes > 0) == bool((old != new).any())
    for _ in range(2):
        make_changes(old, changes, item_bytes)
        assert np.array_equal(old, new)


def test_many_changes_are_sent_whole() -> None:
    old, new = np.zeros(1000, np.uint8), np.ones(1000, np.uint8)
    assert changes_between(old, new, 2) is None


@given(data=st.binary(max_size=64), item_bytes=st.sampled_from([1, 2, 4, 8]), count=st.integers(0, 40))
def test_bytes_that_are_no_changes_are_a_typed_error_and_change_nothing_else(
    data: bytes, item_bytes: int, count: int
) -> None:
    held = np.zeros(count * item_bytes, np.uint8)
    before = held.copy()
    try:
        make_changes(held, np.frombuffer(data, np.uint8), item_bytes)
    except ProtocolError:
        assert np.array_equal(held, before)
    else:
        assert len(data) % (2 + item_bytes) == 0
        assert np.count_nonzero((held != before).reshape(-1, item_bytes).any(1)) <= len(data) // (2 + item_bytes)


# --- updates, one after the other -------------------------------------------------------------------------------------------


@pytest.fixture
def worker(directory: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/w")
    yield one
    one.close()


@pytest.mark.parametrize("cut", [whole_slices, column_slices, block_slices], ids=["whole", "columns", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_what_changed_is_installed_bit_for_bit(worker: Worker, case: str, cut: Cut) -> None:
    tensors = CASES[case]()
    pair = Pair([worker], ranks=2, cut=cut)
    whole = pair.update(tensors)
    assert whole == manifest_for(tensors).nbytes
    for seed in range(3):
        tensors = changed(tensors, seed)
        assert pair.update(tensors) <= whole
    pair.close()


def test_one_hundredth_of_the_elements_takes_a_fiftieth_of_the_bytes_and_nothing_takes_none(worker: Worker) -> None:
    tensors = {"w": any_bits(torch.bfloat16, 1000, 1000), "b": any_bits(torch.bfloat16, 1000)}
    pair = Pair([worker])
    whole = pair.update(tensors)
    assert pair.update(tensors) == 0
    tensors = changed(tensors, 1)
    assert 0 < pair.update(tensors) < 0.025 * whole
    tensors = {**tensors, "b": any_bits(torch.bfloat16, 1000, seed=5)}
    assert pair.update(tensors) == 2000, "what changed in most places travels whole, the rest not at all"
    pair.close()


def test_a_worker_that_lacks_the_bytes_before_is_sent_all_and_another_only_what_changed(directory: Path) -> None:
    workers = [Worker(f"ipc://{directory}/{name}") for name in "ab"]
    tensors = {"w": any_bits(torch.bfloat16, 100, 1000)}
    pair = Pair(workers[:1])
    assert pair.update(tensors) == 200_000
    pair.workers = workers  # one more
    tensors = changed(tensors, 1)
    assert 200_000 < pair.update(tensors) < 1.05 * 200_000
    tensors = changed(tensors, 2)
    assert pair.update(tensors) < 0.1 * 200_000
    with workers[0].channel() as channel:
        channel.request(Release("policy"), Done, timeout_s=30)  # it frees what it kept
    tensors = changed(tensors, 3)
    assert 200_000 < pair.update(tensors) < 1.05 * 200_000
    pair.senders = [DeltaSender()]  # the trainer begins anew
    assert pair.update(changed(tensors, 4)) == 400_000
    pair.close()
    for worker in workers:
        worker.close()


def test_the_update_after_one_that_did_not_come_whole_sends_all(worker: Worker) -> None:
    tensors = {"a": any_bits(torch.bfloat16, 100, 1000), "b": any_bits(torch.bfloat16, 100, 1000, seed=1)}
    pair = Pair([worker], ranks=2)
    assert pair.update(tensors) == 400_000
    pair.write(changed(tensors, 1), only=[0])
    pair.abort()
    tensors = changed(tensors, 2)
    assert pair.update(tensors) == 400_000
    assert pair.update(changed(tensors, 3)) < 0.1 * 400_000
    pair.close()


@pytest.mark.parametrize("updates", [150, pytest.param(1000, marks=pytest.mark.full)])
def test_updates_with_faults_between_are_exact(directory: Path, updates: int) -> None:
    """Updates that are dropped after any step, workers and ranks that begin anew, other shapes and cuts, and the way back kept or
    not: two memories in turn, or one."""
    chance = random.Random(7)
    makers = [lambda _: KeepingInstaller(keeps_previous=True), lambda _: KeepingInstaller()]
    workers = [Worker(f"ipc://{directory}/w{i}", makers[i % 2]) for i in range(2)]
    shapes = [{"a": (40, 30), "b": (77,), "c": (3, 5, 7)}, {"a": (40, 30), "b": (60,), "c": (3, 5, 7)}]
    dtypes = {"a": torch.bfloat16, "b": torch.float8_e4m3fn, "c": torch.float32}
    tensors = {name: any_bits(dtypes[name], *shape) for name, shape in shapes[0].items()}
    pair = Pair(workers, ranks=2, cut=column_slices)
    sent = {"whole": 0, "changes": 0}
    for number in range(updates):
        fault = chance.choices(
            ["none", "one rank", "written", "sealed by one", "sealed", "new worker", "new rank", "shape", "cut"],
            [60, 2, 2, 2, 2, 1, 1, 1, 1],
        )[0]
        tensors = changed(tensors, number, chance.choice([0.0, 0.001, 0.02, 0.6]))
        if fault in ("one rank", "written", "sealed by one", "sealed"):
            pieces, _ = pair.write(tensors, only=[chance.randrange(2)] if fault == "one rank" else None)
            for worker in pair.workers[: {"sealed by one": 1, "sealed": 2}.get(fault, 0)]:
                pair.seal(worker, pieces)
            pair.abort()
        elif fault == "new worker":
            index = chance.randrange(2)
            pair.workers[index].close()
            pair.workers[index] = Worker(f"ipc://{directory}/again{number}", makers[index])
        elif fault == "new rank":
            index = chance.randrange(2)
            pair.senders[index].close()
            pair.senders[index] = DeltaSender()
        elif fault == "shape":
            new = shapes[chance.randrange(2)]
            tensors = {name: any_bits(dtypes[name], *shape, seed=number) for name, shape in new.items()}
        elif fault == "cut":
            pair.cut = chance.choice([whole_slices, column_slices, block_slices])
        nbytes = 2 * manifest_for(tensors).nbytes
        sent["whole" if pair.update(tensors) == nbytes else "changes"] += 1
    assert sent["changes"] > updates / 2, sent
    pair.close()
    for worker in pair.workers:
        worker.close()


@pytest.mark.parametrize(("writes_once", "copied"), [(False, 2 << 20), (True, 0)])
def test_copies_are_kept_of_what_a_worker_can_be_sent_the_changes_of_and_none_by_who_writes_once(
    worker: Worker, writes_once: bool, copied: int
) -> None:
    """A catch-up writes once, and several may run at once. Here nobody needs the one tensor, and only a part of the other."""
    tensors = {name: any_bits(torch.bfloat16, 1 << 10, 1 << 10) for name in ("needed", "in part", "not at all")}
    pair = Pair([worker])
    pair.senders[0].writes_once = writes_once
    pair.needs = [Box(0, (0, 0), (1 << 10, 1 << 10)), Box(1, (0, 0), (1 << 10, 1 << 9))]
    pair.write(tensors)
    assert pair.held_bytes == pair.senders[0].config.buffers * pair.senders[0].config.bucket_bytes + copied
    pair.close()


# --- what doesn't belong to an update -----------------------------------------------------------------------------------------


BOX = Box(0, (0,), (8,))


@pytest.mark.parametrize(
    ("sizes", "payload", "error", "words"),
    [
        ((), bytes(16), ProtocolError, "0 sizes"),
        ((16, 0), bytes(16), ProtocolError, "2 sizes"),
        ((15,), bytes(16), ProtocolError, "sizes make 15"),
        ((1 << 61,), bytes(16), ProtocolError, "sizes make"),
        ((4,), bytes(4), ProtocolError, "nothing that they change"),
        ((32,), bytes(32), ProtocolError, "nothing that they change"),
        ((16,), bytes(16), DigestMismatch, "not what the trainer sent"),
    ],
)
def test_a_bucket_that_cannot_be_right_is_a_typed_error(
    worker: Worker, sizes: tuple[int, ...], payload: bytes, error: type[WeightwireError], words: str
) -> None:
    manifest = manifest_for({"w": any_bits(torch.bfloat16, 8)})
    with worker.channel() as channel:
        channel.request(OpenGroup("policy", manifest, "delta"), GroupOpened, timeout_s=30)
        begin = Begin("policy", "t", 1, Sender("s"), FAR_S, manifest.fingerprint, NAME)
        assert channel.request(begin, Begun, timeout_s=30) == Begun()
        bucket = Bucket("policy", "t", 0, 0, (Piece(BOX, digest_bytes(b"other")),), sizes=sizes)
        with pytest.raises(error, match=words):
            channel.request(bucket, Done, payload=payload, timeout_s=30)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (bytes(3), ProtocolError),
        (b"\xff\xff\0\0", ProtocolError),
        (b"\x07\0\0\0\0\0\0\0", ProtocolError),
        (b"", DigestMismatch),
        (b"\x02\0\x01\x01", DigestMismatch),
    ],
    ids=["odd", "too far", "too many", "no change", "another change"],
)
def test_changes_that_do_not_make_what_the_trainer_meant_are_refused_and_the_next_update_sends_all(
    worker: Worker, changes: bytes, error: type[WeightwireError]
) -> None:
    tensors = {"w": any_bits(torch.bfloat16, 8)}
    pair = Pair([worker])
    pair.update(tensors)
    with worker.channel() as channel:
        begin = Begin("policy", "u", 2, Sender("s"), FAR_S, pair.manifest.fingerprint, NAME)
        assert channel.request(begin, Begun, timeout_s=30) == Begun(landing=msgspec.msgpack.decode(pair.names)["name"])
        bucket = Bucket("policy", "u", 0, 0, (Piece(BOX, digest_bytes(b"other")),), sizes=(len(changes),))
        with pytest.raises(error):
            channel.request(bucket, Done, payload=changes, timeout_s=30)
    pair.number = 2
    assert pair.update(tensors) == 16, "what the worker held is not known to be what it was"
    pair.close()


def test_a_piece_that_was_compared_and_then_changed_in_vain_is_never_sealed(worker: Worker) -> None:
    """By a sender that goes on after an error: the second bucket has altered the piece where it lies."""
    tensors = {"w": any_bits(torch.bfloat16, 8)}
    pair = Pair([worker])
    pair.update(tensors)
    right, pieces = changed(tensors, 1)["w"], []
    with worker.channel() as channel:
        begin = Begin("policy", "u", 2, Sender("s"), FAR_S, pair.manifest.fingerprint, NAME)
        channel.request(begin, Begun, timeout_s=30)
        pieces.append(Piece(BOX, digest_bytes(bytes_view(right).numpy())))
        whole = bytes_view(right).numpy().tobytes()
        channel.request(Bucket("policy", "u", 0, 0, tuple(pieces), sizes=(16,)), Done, payload=whole, timeout_s=30)
        wrong = Bucket("policy", "u", 0, 1, (Piece(BOX, digest_bytes(b"other")),), sizes=(4,))
        with pytest.raises(DigestMismatch):
            channel.request(wrong, Done, payload=b"\x02\0\x01\x01", timeout_s=30)
    pair.txn = "u"
    with pytest.raises(DigestMismatch, match="did not arrive"):
        pair.seal(worker, pieces)
    pair.number = 2
    assert pair.update(tensors) == 16
    pair.close()


def test_a_bucket_covers_no_more_elements_than_a_worker_compares_in_time(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": any_bits(torch.int8, 400, seed=i) for i in range(10)}
    pair = Pair([worker])
    pair.update(tensors)
    monkeypatch.setattr(delta, "MOST_ELEMENTS", 1000)
    pieces = pair.write(tensors)[0]
    assert pair.messages == 5, "two tensors to a bucket"
    pair.seal(worker, pieces)
    pair.abort()
    with worker.channel() as channel:
        begin = Begin("policy", "u", 9, Sender("s"), FAR_S, pair.manifest.fingerprint, NAME)
        channel.request(begin, Begun, timeout_s=30)
        bucket = Bucket("policy", "u", 0, 0, tuple(pieces), sizes=(0,) * 10)
        with pytest.raises(ProtocolError, match="4000 elements"):
            channel.request(bucket, Done, payload=b"", timeout_s=30)
    pair.close()


def test_memory_is_free_at_once_where_changes_were_refused(worker: Worker) -> None:
    """Not only when Python next collects its cycles, of which an error's traceback may be a part."""
    tensors = {"w": any_bits(torch.bfloat16, 8)}
    pair = Pair([worker])
    pair.update(tensors)
    gc.collect()
    gc.disable()
    try:
        with worker.channel() as channel:
            begin = Begin("policy", "u", 2, Sender("s"), FAR_S, pair.manifest.fingerprint, NAME)
            channel.request(begin, Begun, timeout_s=30)
            wrong = Bucket("policy", "u", 0, 0, (Piece(BOX, digest_bytes(b"other")),), sizes=(0,))
            with pytest.raises(DigestMismatch):
                channel.request(wrong, Done, payload=b"", timeout_s=30)
            channel.request(Abort("policy", "u"), Done, timeout_s=30)
            held = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, mmap.mmap) and len(each) == 4096]
            assert len(held) == 1
            channel.request(Release("policy"), Done, timeout_s=30)
            assert held[0]() is None
    finally:
        gc.enable()
    pair.close()


def test_no_second_memory_is_kept_where_a_checked_update_and_then_the_way_back_were_given_up() -> None:
    manifest = manifest_for({"w": any_bits(torch.int8, 3 * mmap.PAGESIZE)})
    receiver, needs = DeltaReceiver(), (manifest.whole(0),)

    def memories() -> int:
        gc.collect()
        return sum(isinstance(each, mmap.mmap) and len(each) == manifest.layout.nbytes for each in gc.get_objects())

    stagings = []
    for name in (bytes(16), bytes(15) + b"2"):
        stagings.append(receiver.open(manifest, msgspec.msgpack.encode({"name": name}), needs))
        stagings[-1].check(manifest, [], lambda: None)
    assert memories() == 2
    for staging in reversed(stagings):
        staging.close()
    assert memories() == 1
    assert receiver.open(manifest, NAME, needs).landing == bytes(15) + b"2", "that of the last bytes that were compared"


def test_a_name_of_another_length_is_a_typed_error(worker: Worker) -> None:
    manifest = manifest_for({"w": any_bits(torch.bfloat16, 8)})
    with worker.channel() as channel:
        channel.request(OpenGroup("policy", manifest, "delta"), GroupOpened, timeout_s=30)
        with pytest.raises(ProtocolError, match="truncated"):
            channel.request(Begin("policy", "t", 1, Sender("s"), FAR_S, manifest.fingerprint), Begun, timeout_s=30)


def test_a_copy_that_does_not_fit_is_refused_with_both_numbers(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair([worker])
    monkeypatch.setattr("inference_plugin.wire.host_memory.free_host_bytes", lambda: 4 << 20)
    with pytest.raises(TransportUnavailable, match="64 MiB does not fit: 4 MiB are free") as raised:
        pair.write({"w": any_bits(torch.bfloat16, 1 << 20)})
    assert "transport='zmq'" in raised.value.hint
    pair.close()
