"""Bytes go through a directory that both sides see, over real sockets to a real worker; and whatever happens to what lies there,
what is sealed is bit for bit what the trainer meant."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inference_plugin.transports import chain, objects, registry
from inference_plugin.transports.objects import ByteRange, ObjectStore, merged_ranges
from inference_plugin.transports.store import TRANSPORT
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, SyncTimeout, TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.messages import (
    Begin,
    Begun,
    Bucket,
    Describe,
    Done,
    GroupOpened,
    OpenGroup,
    Release,
    Sender,
    WorkerCard,
)
from tests.support.rig import eventually
from tests.support.stores import PROTOCOL, Gate, StrangeStore
from tests.support.worker import KeepingInstaller, Worker
from tests.transports.cases import CASES, any_bits, block_slices, column_slices, manifest_for, whole_slices
from tests.transports.pairs import FAR_S, Cut, Pair, changed


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the store, which is strange."""
    place = tmp_path / "store"
    place.mkdir()
    monkeypatch.setenv("WEIGHTWIRE_STORE_URL", f"{PROTOCOL}://{place}")
    monkeypatch.setenv("WEIGHTWIRE_CONTROL_TIMEOUT_S", "2")
    StrangeStore.reset()
    yield place
    StrangeStore.reset()


@pytest.fixture
def worker(directory: Path, place: Path) -> Iterator[Worker]:
    one = Worker(f"ipc://{directory}/w")
    yield one
    one.close()


def files(place: Path) -> list[Path]:
    """The objects, without the probe."""
    return sorted(each for each in place.glob("*/*") if each.name != "probe")


def pair_of(*workers: Worker, ranks: int = 1, cut: Cut = whole_slices) -> Pair:
    return Pair(workers, ranks=ranks, cut=cut, transport=TRANSPORT)


@pytest.mark.parametrize("cut", [whole_slices, column_slices, block_slices], ids=["whole", "columns", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_what_changed_is_installed_bit_for_bit(worker: Worker, case: str, cut: Cut) -> None:
    tensors = CASES[case]()
    pair = pair_of(worker, ranks=2, cut=cut)
    whole = pair.update(tensors)
    assert whole == manifest_for(tensors).nbytes
    for seed in range(3):
        tensors = changed(tensors, seed)
        assert pair.update(tensors) <= whole
    pair.close()


def test_what_changed_is_uploaded_once_for_any_number_of_workers(directory: Path, place: Path) -> None:
    workers = [Worker(f"ipc://{directory}/{name}") for name in "abc"]
    tensors = {"w": any_bits(torch.bfloat16, 1000, 1000)}
    pair = pair_of(*workers)
    assert pair.update(tensors) == 2_000_000 == sum(each.stat().st_size for each in files(place))
    tensors = changed(tensors, 1)
    assert 0 < pair.update(tensors) < 0.025 * 2_000_000
    count = len(files(place))
    assert pair.update(tensors) == 0 and len(files(place)) == count, "nothing changed"
    pair.close()
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("keeps_previous", [False, True])
def test_a_worker_that_comes_late_or_missed_updates_costs_the_trainer_no_byte(
    directory: Path, place: Path, keeps_previous: bool
) -> None:
    workers = [
        Worker(f"ipc://{directory}/{name}", lambda _: KeepingInstaller(keeps_previous=keeps_previous)) for name in "ab"
    ]
    first, second = workers
    tensors = {"w": any_bits(torch.bfloat16, 100, 1000), "b": any_bits(torch.float32, 50)}
    whole = manifest_for(tensors).nbytes
    pair = pair_of(first)
    assert pair.update(tensors) == whole

    def uploaded() -> int:
        nonlocal tensors
        tensors = changed(tensors, pair.number)
        return pair.update(tensors)

    assert uploaded() < 0.1 * whole and uploaded() < 0.1 * whole
    pair.workers = [first, second]  # one that comes late: it is told the anchor and all since
    assert uploaded() < 0.1 * whole
    pair.workers = [first]
    assert uploaded() < 0.1 * whole and uploaded() < 0.1 * whole
    pair.workers = [first, second]  # it missed two updates, and is told these and the new one
    StrangeStore.reads.clear()
    assert uploaded() < 0.1 * whole
    assert sum(end - start for _, start, end in StrangeStore.reads) < 0.5 * whole
    with second.channel() as channel:
        channel.request(Release("policy"), Done, timeout_s=30)  # it frees what it kept
    assert uploaded() < 0.1 * whole and uploaded() < 0.1 * whole
    pair.senders = [pair.new_sender()]  # the trainer begins anew
    assert uploaded() == whole
    pair.close()
    for worker in workers:
        worker.close()


def test_a_worker_that_comes_late_reads_of_each_piece_what_lies_after_it_was_whole(
    directory: Path, place: Path
) -> None:
    tensors = {"w": any_bits(torch.int8, 100_000), "all": any_bits(torch.int8, 100_000)}
    workers = [Worker(f"ipc://{directory}/{name}") for name in "ab"]
    pair = pair_of(workers[0])
    for seed in range(2):
        pair.update(tensors | {"all": any_bits(torch.int8, 100_000, seed=seed)})
    pair.workers = workers[1:]
    StrangeStore.reads.clear()
    pair.update(tensors | {"all": any_bits(torch.int8, 100_000, seed=3)})
    assert sum(end - start for path, start, end in StrangeStore.reads if not path.endswith("probe")) == 200_000
    pair.close()
    for worker in workers:
        worker.close()


def test_an_update_that_is_dropped_costs_no_second_reading_where_the_bytes_before_are_kept(
    directory: Path, place: Path
) -> None:
    worker = Worker(f"ipc://{directory}/w", lambda _: KeepingInstaller(keeps_previous=True))
    tensors = {"w": any_bits(torch.bfloat16, 100, 1000)}
    pair = pair_of(worker)
    for seed in range(2):
        pair.update(tensors := changed(tensors, seed))
    for sealed in (False, True):
        pieces, _ = pair.write(tensors := changed(tensors, 2))
        if sealed:
            pair.seal(worker, pieces)
        pair.abort()
        StrangeStore.reads.clear()
        pair.update(tensors := changed(tensors, 3 + sealed))
        assert sum(end - start for _, start, end in StrangeStore.reads) < 0.2 * 200_000
    pair.close()
    worker.close()


def test_a_worker_reads_only_what_it_needs_and_what_lies_close_to_it_at_once(directory: Path, place: Path) -> None:
    tensors = {name: any_bits(torch.int8, 100_000, seed=i) for i, name in enumerate("abcdef")}
    needs = tuple(Box(i, (0,), (100_000,)) for i in (0, 1, 4))
    worker = Worker(f"ipc://{directory}/w", lambda _: KeepingInstaller(needs=needs))
    pair = pair_of(worker)
    pieces, _ = pair.write(tensors)
    pair.seal(worker, pieces)
    assert [(start, end) for path, start, end in StrangeStore.reads if not path.endswith("probe")] == [
        (0, 200_000),
        (400_000, 500_000),
    ]
    pair.close()
    worker.close()


def test_ranges_cover_what_is_asked_and_read_over_small_gaps() -> None:
    assert merged_ranges([]) == []
    assert merged_ranges([ByteRange(0, 5), ByteRange(5, 9), ByteRange(70_000, 80_000)]) == [(0, 9), (70_000, 80_000)]
    assert merged_ranges([ByteRange(1, 5), ByteRange(60_000, 60_001)]) == [(1, 60_001)]


def test_an_anchor_follows_many_changes_and_what_it_replaces_is_deleted(worker: Worker, place: Path) -> None:
    """Who holds the version before reads only what changed, also of that update."""
    tensors = {"w": any_bits(torch.bfloat16, 100, 1000)}
    pair = pair_of(worker)
    pair.update(tensors)
    anchors, before = 0, {each.name for each in files(place)}
    for number in range(30):
        tensors = changed(tensors, number, 0.05)
        StrangeStore.reads.clear()
        if pair.update(tensors) > 200_000:
            anchors += 1
            eventually(lambda old=before: not old & {each.name for each in files(place)}, "the old objects are deleted")
            before = {each.name for each in files(place)}
        assert sum(end - start for _, start, end in StrangeStore.reads) < 0.25 * 200_000
    assert anchors == 2
    pair.close()
    assert not list(place.iterdir()), "nothing is left"


def test_a_chain_has_a_limit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "MOST_LINKS", 3)
    tensors = {"w": any_bits(torch.bfloat16, 100, 1000)}
    pair = pair_of(worker)
    sent = [pair.update(tensors := changed(tensors, number)) > 200_000 - 1 for number in range(9)]
    assert sent == [True, False, False, False, True, False, False, False, True]
    pair.close()


# --- what befalls the objects ------------------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


FAULTS = {"missing": _remove, "truncated": _truncate, "other bytes": _flip, "zeros": _zero}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", ["anchor", "changes"])
def test_an_object_that_is_not_what_was_written_is_refused_and_the_next_update_heals(
    directory: Path, place: Path, fault: str, where: str
) -> None:
    workers = [Worker(f"ipc://{directory}/{name}") for name in "ab"]
    tensors = {"w": any_bits(torch.bfloat16, 100, 1000)}
    pair = pair_of(workers[0])
    pair.update(tensors)
    pair.update(tensors := changed(tensors, 1))
    FAULTS[fault](files(place)[["anchor", "changes"].index(where)])
    pair.workers = workers  # one that comes late needs both
    with pytest.raises((DigestMismatch, ProtocolError)) as raised:  # as the object is told, or at the seal
        pair.update(tensors := changed(tensors, 2))
    assert "not there" in raised.value.message if fault == "missing" else isinstance(raised.value, DigestMismatch)
    pair.abort()
    tensors = changed(tensors, 3)
    assert pair.update(tensors) >= 200_000, "an anchor"
    assert pair.update(changed(tensors, 4)) < 0.1 * 200_000
    pair.close()
    for worker in workers:
        worker.close()


def test_the_update_after_one_that_did_not_come_whole_uploads_what_that_rank_lacks(worker: Worker, place: Path) -> None:
    tensors = {"a": any_bits(torch.bfloat16, 100, 1000), "b": any_bits(torch.bfloat16, 100, 1000, seed=1)}
    pair = pair_of(worker, ranks=2)
    assert pair.update(tensors) == 400_000
    full = OSError(errno.ENOSPC, "No space left on device")
    StrangeStore.before_write = staticmethod(lambda path, data: (_ for _ in ()).throw(full))  # type: ignore[assignment]
    tensors = changed(tensors, 1)
    with pytest.raises(TransportUnavailable, match=r"No space left on device") as raised:
        pair.write(tensors)
    assert "free space" in raised.value.hint and str(place) in raised.value.message
    pair.abort()
    StrangeStore.reset()
    eventually(lambda: len(files(place)) == 1, "the rank that failed makes room for its next anchor")
    assert 200_000 < pair.update(changed(tensors, 2)) < 1.2 * 200_000, "the other rank's chain goes on"
    pair.close()
    assert not list(place.iterdir())


def test_a_write_that_ends_half_way_leaves_nothing_that_looks_like_an_object(worker: Worker, place: Path) -> None:
    pair = pair_of(worker)

    def half(path: str, data: bytes) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(data[: len(data) // 2])
        raise OSError(errno.EIO, "the disk has died")

    pair.senders[0].probe()
    StrangeStore.before_write = staticmethod(half)
    with pytest.raises(TransportUnavailable, match="the disk has died"):
        pair.write({"w": any_bits(torch.int8, 1000)})
    assert files(place) == []
    pair.close()


def test_an_object_that_is_not_there_yet_is_waited_for(worker: Worker) -> None:
    """A replica of a store lags."""
    lacks = iter([True, True])

    def lag(path: str, start: int, end: int) -> None:
        if not path.endswith("probe") and next(lacks, False):
            raise FileNotFoundError(path)

    pair = pair_of(worker)
    StrangeStore.before_read = staticmethod(lag)
    pair.update({"w": any_bits(torch.int8, 1000)})
    assert next(lacks, None) is None
    pair.close()


@pytest.mark.parametrize("updates", [120, pytest.param(1000, marks=pytest.mark.full)])
def test_updates_with_faults_between_are_exact_or_refused_and_the_next_heals(
    directory: Path, place: Path, updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that vanish or change, workers that come late, miss updates or begin anew, ranks that fail or begin anew, tensors
    that another rank sends, other shapes and cuts, the way back kept or not."""
    monkeypatch.setattr(chain, "MOST_LINKS", 6)
    chance = random.Random(11)
    makers = [lambda _: KeepingInstaller(keeps_previous=True), lambda _: KeepingInstaller()]
    workers = [Worker(f"ipc://{directory}/w{i}", makers[i % 2]) for i in range(2)]
    shapes = [{"a": (40, 30), "b": (77,), "c": (3, 5, 7)}, {"a": (40, 30), "b": (60,), "c": (3, 5, 7)}]
    dtypes = {"a": torch.bfloat16, "b": torch.float8_e4m3fn, "c": torch.float32}
    tensors = {name: any_bits(dtypes[name], *shape) for name, shape in shapes[0].items()}
    pair = pair_of(*workers, ranks=2, cut=column_slices)
    counts = dict.fromkeys(["whole", "changes", "refused"], 0)
    kinds = ["none", "object", "miss", "new worker", "new rank", "rank fails", "dropped", "swap", "shape", "cut"]
    is_hurt = False
    for number in range(updates):
        fault = chance.choices(kinds, [60, 6, 8, 3, 1, 3, 3, 3, 1, 1])[0]
        tensors = changed(tensors, number, chance.choice([0.0, 0.001, 0.02, 0.6]))
        pair.workers = workers
        if fault == "object" and (there := files(place)):
            FAULTS[chance.choice(list(FAULTS))](chance.choice(there))
            is_hurt = True
            with workers[chance.randrange(2)].channel() as channel:
                channel.request(Release("policy"), Done, timeout_s=30)  # it needs the anchor, which is hurt or not
        elif fault == "miss":
            pair.workers = [chance.choice(workers)]
        elif fault == "new worker":
            index = chance.randrange(2)
            workers[index].close()
            workers[index] = Worker(f"ipc://{directory}/again{number}", makers[index])
        elif fault == "new rank":
            index = chance.randrange(2)
            pair.senders[index].close()
            pair.senders[index] = pair.new_sender()
        elif fault == "rank fails":
            refuse = lambda path, data: (_ for _ in ()).throw(PermissionError(path))  # noqa: E731
            StrangeStore.before_write = staticmethod(refuse)
            with pytest.raises(TransportUnavailable):
                pair.write(changed(tensors, -1 - number, 0.5), only=[chance.randrange(2)])
            StrangeStore.reset()
            pair.abort()
        elif fault == "dropped":
            pair.write(tensors, only=chance.choice([None, [0]]))
            pair.abort()
        elif fault == "swap":
            pair.senders.reverse()
        elif fault == "shape":
            new = shapes[chance.randrange(2)]
            tensors = {name: any_bits(dtypes[name], *shape, seed=number) for name, shape in new.items()}
        elif fault == "cut":
            pair.cut = chance.choice([whole_slices, column_slices, block_slices])
        try:
            whole = pair.update(tensors) >= manifest_for(tensors).nbytes
            counts["whole" if whole else "changes"] += 1
        except (DigestMismatch, ProtocolError):
            assert is_hurt, fault
            is_hurt = False
            counts["refused"] += 1
            pair.abort()
            pair.update(tensors)
    assert counts["changes"] > updates / 3 and counts["refused"], counts
    pair.close()
    for worker in workers:
        worker.close()


# --- a store that hangs, is slow, or isn't the same ---------------------------------------------------------------------------


def test_a_store_that_hangs_while_a_rank_writes_ends_by_the_deadline_and_names_the_store(
    worker: Worker, place: Path
) -> None:
    pair, gate = pair_of(worker), Gate()
    pair.senders[0].probe()
    StrangeStore.before_write = staticmethod(gate)
    gate.shut()
    pair.timeout_s = 2.0
    tensors = {"w": any_bits(torch.int8, 1000)}
    began_s = time.monotonic()
    with pytest.raises(SyncTimeout, match=str(place)):
        pair.write(tensors)
    assert time.monotonic() - began_s < 2.0, "in time to abort"
    gate.open()
    pair.abort()
    pair.timeout_s = FAR_S
    pair.update(tensors)
    pair.close()
    assert not list(place.iterdir()), "what was written too late is deleted as well"


def test_a_store_that_hangs_while_a_worker_reads_keeps_no_request_waiting_and_changes_nothing_later(
    worker: Worker, place: Path
) -> None:
    pair, gate = pair_of(worker), Gate()
    tensors = {"w": any_bits(torch.int8, 1000)}
    pair.update(tensors)
    StrangeStore.before_read = staticmethod(lambda path, *_: None if path.endswith("probe") else gate())
    gate.shut()
    pair.timeout_s = 2.0
    pieces, _ = pair.write(changed(tensors, 1))
    assert gate.waiting.wait(30)
    with worker.channel() as channel:
        channel.request(Describe(), WorkerCard, timeout_s=5)
    with pytest.raises(SyncTimeout, match="reading object") as raised:
        pair.seal(worker, pieces)
    assert str(place) in raised.value.message
    pair.write(changed(tensors, 2))
    assert gate.waiting.wait(30)
    pair.abort()  # while it waits
    StrangeStore.reset()
    pair.timeout_s = FAR_S
    tensors = changed(tensors, 3)
    pieces, _ = pair.write(tensors)
    gate.open()  # what was read for the dropped updates comes now
    pair.seal(worker, pieces)
    worker.commit(pair.txn, pair.number)
    assert torch.equal(worker.installer.installed["w"], tensors["w"])
    pair.close()


def test_bytes_that_are_placed_after_their_update_was_dropped_reach_no_later_update(worker: Worker) -> None:
    pair, gate = pair_of(worker), Gate()
    tensors = {"w": any_bits(torch.int8, 1000)}
    pair.update(tensors)

    class Held(bytes):
        def __len__(self) -> int:
            gate()
            return super().__len__()

    StrangeStore.after_read = staticmethod(lambda path, data: data if path.endswith("probe") else Held(data))
    gate.shut()
    pair.write({"w": any_bits(torch.int8, 1000, seed=1)})
    assert gate.waiting.wait(30)  # the worker has the bytes, and is about to place them
    pair.abort()
    StrangeStore.reset()
    tensors = {"w": any_bits(torch.int8, 1000, seed=2)}
    pieces, _ = pair.write(tensors)
    pair.seal(worker, pieces)
    gate.open()
    eventually(
        lambda: not [each for each in threading.enumerate() if each.name == "weightwire-store-reader"], "its end"
    )
    worker.commit(pair.txn, pair.number)
    assert torch.equal(worker.installer.installed["w"], tensors["w"])
    pair.close()


def test_a_read_may_take_longer_than_a_small_request(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_CONTROL_TIMEOUT_S", "1")
    pair = pair_of(worker)
    StrangeStore.before_read = staticmethod(lambda path, *_: None if path.endswith("probe") else time.sleep(1.2))
    pair.timeout_s = 30.0
    pair.update({"w": any_bits(torch.int8, 1000)})
    pair.close()


def opened(worker: Worker, probe: bytes) -> GroupOpened:
    with worker.channel() as channel:
        manifest = manifest_for({"w": any_bits(torch.int8, 8)})
        return channel.request(OpenGroup("policy", manifest, "store", probe), GroupOpened, timeout_s=30)


def test_who_has_no_store_says_so_on_either_side(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = pair_of(worker).senders[0].probe()
    monkeypatch.delenv("WEIGHTWIRE_STORE_URL")
    with pytest.raises(TransportUnavailable, match="WEIGHTWIRE_STORE_URL is not set") as raised:
        opened(worker, probe)
    assert "file:///mnt/weights" in raised.value.hint
    with pytest.raises(TransportUnavailable, match="WEIGHTWIRE_STORE_URL is not set"):
        pair_of().senders[0].probe()


def test_another_store_is_refused_when_the_group_is_opened_and_both_are_named(
    worker: Worker, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = pair_of(worker).senders[0]
    probe = sender.probe()
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("WEIGHTWIRE_STORE_URL", f"file://user:secret@{other}")
    with pytest.raises(TransportUnavailable) as raised:
        opened(worker, probe)
    shutil.copytree(place, other, dirs_exist_ok=True)
    (found,) = other.glob("*/probe")
    found.write_bytes(bytes(32))
    monkeypatch.setenv("WEIGHTWIRE_STORE_URL", f"file://{other}")
    assert str(place) in raised.value.message and str(other) in raised.value.message
    assert "secret" not in raised.value.message
    with pytest.raises(TransportUnavailable, match="different objects of one name") as raised:
        opened(worker, probe)
    assert str(place) in raised.value.message and str(other) in raised.value.message
    sender.close()


@pytest.mark.parametrize(
    ("url", "words", "hint"),
    [
        ("file:///no/such/directory", "FileNotFoundError", "must exist"),
        ("nosuch://bucket/folder", "Protocol not known", "configuration"),
        ("s3://bucket/folder", "s3fs", "install the package"),
    ],
)
def test_a_store_that_cannot_be_used_is_a_typed_error(url: str, words: str, hint: str) -> None:
    sender = TRANSPORT.sender()
    sender.config = Config(store_url=url)
    with pytest.raises(TransportUnavailable, match=words) as raised:
        sender.probe()
    assert hint in raised.value.hint and url in raised.value.message
    assert not Path("/no").exists()
    sender.close()


def test_calls_that_never_come_back_have_a_limit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_CALLS", 3)
    store, gate = ObjectStore(os.environ["WEIGHTWIRE_STORE_URL"]), Gate()
    StrangeStore.before_write = staticmethod(gate)
    gate.shut()
    calls = [store.write(f"a/{i}", b"x") for i in range(3)]
    with pytest.raises(SyncTimeout, match="3 calls have not come back"):
        store.write("a/b", b"x")
    gate.open()
    eventually(lambda: all(call.done() for call in calls), "their end")
    store.result(store.write("a/b", b"x"), "writing", time.monotonic() + 10)


def test_an_error_of_the_probe_is_told_to_all_replicas_of_an_update_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_CONTROL_TIMEOUT_S", "1")
    gate = Gate()
    gate.shut()
    StrangeStore.before_write = staticmethod(gate)
    sender = pair_of().senders[0]
    began_s = time.monotonic()
    for _ in range(10):
        with pytest.raises(SyncTimeout, match="probe"):
            sender.probe()
    assert time.monotonic() - began_s < 4
    gate.open()
    sender.close()


def test_without_fsspec_the_transport_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(TransportUnavailable, match="the extra `store` brings it"):
        registry.transport_named("store")


def test_auto_never_takes_it(place: Path) -> None:
    assert "store" not in [each.name for each in registry.available_transports()]
    assert registry.transport_named("store") is TRANSPORT


# --- what doesn't belong to an update -----------------------------------------------------------------------------------------


BOX = Box(0, (0,), (8,))
TERMS: dict[str, Any] = {"name": bytes(16), "folder": "f", "at_once": 2, "read_s": 5.0, "wait_s": 0.0}


def begun(worker: Worker, txn: str, terms: dict[str, Any]) -> None:
    manifest = manifest_for({"w": any_bits(torch.bfloat16, 8)})
    sender = pair_of().senders[0]
    with worker.channel() as channel:
        channel.request(OpenGroup("policy", manifest, "store", sender.probe()), GroupOpened, timeout_s=30)
        described = msgspec.msgpack.encode(terms)
        begin = Begin("policy", txn, 1, Sender("s"), FAR_S, manifest.fingerprint, described)
        channel.request(begin, Begun, timeout_s=30)
    sender.close()


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a/b/c",
        "a",
        "a/",
        "/a",
        "a//b",
        "A/b",
        "a/.b",
        "a/b\n",
        "a" * 65 + "/b",
        "s3://b/c",
    ],
)
def test_a_key_that_leads_elsewhere_is_refused_and_nothing_is_read(worker: Worker, place: Path, key: str) -> None:
    begun(worker, "t", TERMS)
    StrangeStore.reads.clear()
    lies_at = msgspec.msgpack.encode({"key": key, "follows": b"", "offsets": [0]})
    bucket = Bucket("policy", "t", 0, 0, (Piece(BOX, 0),), lies_at, (16,))
    with worker.channel() as channel, pytest.raises(ProtocolError, match="key"):
        channel.request(bucket, Done, timeout_s=30)
    assert StrangeStore.reads == []


@pytest.mark.parametrize(
    ("offsets", "sizes", "payload"),
    [
        ([0], (), b""),
        ([], (16,), b""),
        ([0, 0], (16, 16), b""),
        ([0], (17,), b""),
        ([1 << 61], (16,), b""),
        ([-1], (16,), b""),
        ([0], (16,), bytes(16)),
    ],
)
def test_a_bucket_that_cannot_lie_in_an_object_is_a_typed_error(
    worker: Worker, offsets: list[int], sizes: tuple[int, ...], payload: bytes
) -> None:
    begun(worker, "t", TERMS)
    lies_at = msgspec.msgpack.encode({"key": "a/b", "follows": b"", "offsets": offsets})
    bucket = Bucket("policy", "t", 0, 0, (Piece(BOX, 0),) * max(1, len(sizes)), lies_at, sizes)
    with worker.channel() as channel, pytest.raises(ProtocolError):
        channel.request(bucket, Done, payload=payload or None, timeout_s=30)


@pytest.mark.parametrize(
    "terms",
    [{}, {**TERMS, "name": b""}, {**TERMS, "folder": "../x"}, {**TERMS, "at_once": 1000}, {**TERMS, "read_s": 1e9}],
)
def test_terms_that_cannot_be_are_a_typed_error(worker: Worker, terms: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        begun(worker, "t", terms)


@pytest.mark.parametrize("data", [bytes(3), b"\xff\xff\0\0", b"\x02\0\x01\x01"], ids=["odd", "too far", "others"])
def test_changes_of_what_a_worker_does_not_hold_are_never_sealed(worker: Worker, place: Path, data: bytes) -> None:
    begun(worker, "t", TERMS)
    store = ObjectStore(os.environ["WEIGHTWIRE_STORE_URL"])
    store.result(store.write("a/b", data), "writing", time.monotonic() + 5)
    lies_at = msgspec.msgpack.encode({"key": "a/b", "follows": bytes(16), "offsets": [0]})
    piece = Piece(BOX, digest_bytes(b"other"))
    with worker.channel() as channel:
        channel.request(Bucket("policy", "t", 0, 0, (piece,), lies_at, (len(data),)), Done, timeout_s=30)
    pair = pair_of(worker)
    pair.txn = "t"
    with pytest.raises((ProtocolError, DigestMismatch)):
        pair.seal(worker, [piece])


def test_memory_is_free_at_once_where_changes_were_refused(worker: Worker) -> None:
    """Not only when Python next collects its cycles, of which an error's traceback may be a part."""
    tensors = {"w": any_bits(torch.bfloat16, 8)}
    pair = pair_of(worker)
    pair.update(tensors)
    StrangeStore.after_read = staticmethod(lambda path, data: data if path.endswith("probe") else b"\xff" * len(data))
    gc.collect()
    gc.disable()
    try:
        pieces, _ = pair.write(changed(tensors, 1))
        with pytest.raises(ProtocolError, match="a change of element"):
            pair.seal(worker, pieces)
        pair.abort()
        held = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, mmap.mmap) and len(each) == 4096]
        assert len(held) == 1
        with worker.channel() as channel:
            channel.request(Release("policy"), Done, timeout_s=30)
        assert held[0]() is None
    finally:
        gc.enable()
    pair.close()
