"""Consumers on the owner's host: rows by reference, read-only, under leases that end."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.transports.segment import SharedSegment
from inference_plugin.wire.errors import DigestMismatch, FetchFailed, StoreFull, TransportUnavailable
from tests.batch.interrupts import interrupted
from tests.batch.owners import (
    MIB,
    as_bytes,
    counted_requests,
    descriptors,
    elsewhere,
    fetched,
    mappings,
    memfd_bytes,
    owners,
    rows_of,
    tell,
)
from tests.support.rig import ROOT, eventually, fork, kill, runtime
from trainer_adapters.batch import client, consumer
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.records import ShardId
from trainer_adapters.batch.store import Store


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(budget_bytes=256 * MIB) as one:
        yield one


def leased_to_nobody(store: Store) -> bool:
    return not any(known.leases for known in store.leases.consumers.values())


def test_rows_of_another_process_are_mapped_without_a_copy(directory: Path) -> None:
    with owners(directory, ["a", "b"], items=100_000) as (owner,):
        have = fetched(owner.entries, owner.owner)
        for task in ("a", "b"):
            for key, value in rows_of(task, 100_000).items():
                assert as_bytes(have[ShardId(task, key)]) == as_bytes(local_part(value))
        maps = [
            [int(end, 16) for end in line.split()[0].split("-")]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "memfd:weightwire" in line and line.split()[1] == "rw-p"
        ]
        for shard, part in have.items():
            if shard.key in ("tokens", "logprobs"):
                at = part.tensor.data_ptr()
                assert any(start <= at and at + part.tensor.nbytes <= end for start, end in maps), shard


def test_a_write_into_fetched_rows_is_its_writers_own_and_changes_nothing(store: Store, directory: Path) -> None:
    entries = store.put("t", {"k": torch.ones(4, 5000)})
    before = fetched(entries, store.owner)[entries[0].shard].tensor
    written = fetched(entries, store.owner)[entries[0].shard].tensor
    written.zero_()
    tell(directory / "held", store.owner, entries)
    writer = subprocess.run(
        [sys.executable, "-c", f"from tests.batch.owners import overwrite; overwrite({str(directory / 'held')!r})"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert writer.returncode == 0 and written.eq(0).all()
    after = fetched(entries, store.owner)[entries[0].shard].tensor
    assert before.eq(1).all() and after.eq(1).all(), "neither this process's other fetches nor the owner's rows"


def test_thousands_of_shards_take_a_handful_of_requests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = []
    for i in range(5000):
        entries += store.put(f"task/{i}", {key: torch.full((1, 4), float(i)) for key in "abcd"})
    with counted_requests(monkeypatch) as sent:
        have = fetched(entries, store.owner)
        assert sent == ["Lease"] * 2
        assert len(have) == 20_000 and all(have[ShardId(f"task/{i}", "c")].tensor[0, 3] == i for i in range(5000))
        fetched(entries, store.owner, have=have)  # nothing is missing
        assert sent == ["Lease"] * 2
    have.clear()
    gc.collect()
    eventually(lambda: leased_to_nobody(store), "the end of the leases")


def test_a_lease_lasts_as_long_as_the_last_view_however_it_was_made(store: Store) -> None:
    (entry,) = store.put("t", {"k": torch.arange(10_000.0).reshape(10, 1000)})
    part = fetched([entry], store.owner)[entry.shard]
    views: list[Any] = [
        part.tensor.detach()[3:].view(torch.int32)[1],
        part.tensor.numpy()[5],
        memoryview(part.tensor.numpy()),
    ]
    with torch.inference_mode():
        views.append(part.tensor[7])
    del part
    store.clear(["t"])
    while views:
        gc.collect()
        assert (store.stats().nbytes, store.stats().leased_bytes) == (0, 40_000)
        views.pop()
    eventually(lambda: store.stats().leased_bytes == 0, "the end of the lease")
    assert leased_to_nobody(store)


def test_ctrl_c_at_any_point_of_a_fetch_leaves_no_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest's keeps frames, and with them rows
    entries = [entry for i in range(3) for entry in store.put(f"t{i}", {"a": torch.full((1, 2000), i), "b": [i]})]
    after = whole = 0
    while whole < 20:  # some Ctrl-C is swallowed where Python has nobody to raise it to
        after += 1
        whole = 0 if interrupted(lambda: fetched(entries, store.owner), after) else whole + 1
    gc.collect()
    eventually(lambda: leased_to_nobody(store), "the end of all leases")


def test_every_row_of_groups_keeps_the_lease_of_its_shard_and_lies_where_its_group_does(store: Store) -> None:
    groups = {f"t{i}": [torch.full((i + j, 3), float(10 * i + j)) for j in range(3 + i)] for i in range(1, 4)}
    groups |= {"even": [torch.full((4, 3), float(j)) for j in range(2)], "one": [torch.full((7, 3), 7.0)]}
    entries = [entry for task, rows in groups.items() for entry in store.put(task, {"k": rows})]
    batch = DistributedBatch.of_entries(entries, [store.owner]).fetch()
    for chosen in (list(range(len(batch))), list(range(9, len(batch))) + list(range(4)), [8, 2, 5]):
        wanted = [row for rows in groups.values() for row in rows]
        some = batch.reorder(chosen)
        rows = some.rows("k")
        assert all(torch.equal(row, wanted[i]) for row, i in zip(rows, chosen, strict=True)) and len(rows) == len(
            chosen
        )
    rows = batch.rows("k")
    rows[1].zero_()
    assert not batch.reorder([1])["k"].values().any(), "a row views its group's memory"
    kept = rows[5]
    del batch, some, rows
    store.clear(groups)
    gc.collect()
    shard_bytes = sum(row.nbytes for row in groups["t2"])
    eventually(lambda: store.stats().leased_bytes == shard_bytes, "the end of the other leases")
    assert torch.equal(kept, groups["t2"][1])
    del kept
    eventually(lambda: store.stats().leased_bytes == 0, "the end of the last lease")


def test_rows_of_a_tensor_that_autograd_knows_are_views_of_it(store: Store) -> None:
    batch = DistributedBatch.of_entries(store.put("t", {"k": torch.ones(2, 3)}), [store.owner]).fetch()
    whole = batch["k"].requires_grad_()
    (2 * batch.rows("k")[1]).sum().backward()
    assert whole.grad.tolist() == [[0.0] * 3, [2.0] * 3]


def test_cleared_rows_stay_as_they_are_for_their_reader_and_then_the_memory_is_used_again(directory: Path) -> None:
    with Store(budget_bytes=64 * MIB) as store:
        gc.collect()
        before = memfd_bytes()
        entries = store.put("t", {"k": torch.ones(1, 4 * MIB)})
        have = fetched(entries, store.owner)
        store.clear(["t"])
        for i in range(3):  # whatever comes afterwards does not come where the reader reads
            store.put(f"later{i}", {"k": torch.full((1, 2 * MIB), float(i))})
        assert have[entries[0].shard].tensor.eq(1).all()
        assert store.stats().leased_bytes == 16 * MIB
        for owner in (store.owner, elsewhere(store.owner)):
            with pytest.raises(FetchFailed, match="it was cleared"):
                fetched(entries, owner)
        assert memfd_bytes() - before >= 40 * MIB
        with pytest.raises(StoreFull):  # what is read is not spare
            store.put("too much", {"k": torch.ones(1, 7 * MIB)})
        assert have[entries[0].shard].tensor.eq(1).all()
        have.clear()
        eventually(lambda: store.stats().leased_bytes == 0, "the end of the lease")
        store.clear([f"later{i}" for i in range(3)])
        (again,) = store.put("again", {"k": torch.full((1, 10 * MIB), 7.0)})
        assert memfd_bytes() - before <= 64 * MIB + 65536  # the budget
        assert fetched([again], store.owner)[again.shard].tensor.eq(7).all()
    gc.collect()
    eventually(lambda: memfd_bytes() <= before, "all memory goes back")


def put_over(store: Store, old: list[str], nbytes: int) -> None:
    """Clears tasks, and puts so much that all spare memory is written to."""
    store.clear(old)
    while store.stats().nbytes + store.stats().leased_bytes + nbytes <= store.stats().budget_bytes:
        store.put(f"over{store.stats().tasks}", {"k": torch.full((1, nbytes), 99, dtype=torch.uint8)})


@pytest.mark.parametrize("parent_dies", [False, True])
def test_a_forked_child_never_sees_other_rows_under_the_tensors_that_it_inherited(
    directory: Path, parent_dies: bool
) -> None:
    """A data loader's worker, say: it reads on when its parent has dropped the batch, or is gone."""
    with Store(budget_bytes=64 * MIB) as store:
        entries = store.put("t", {"k": torch.full((1, MIB), 5, dtype=torch.uint8)})
        tell(directory / "held", store.owner, entries)
        parent = fork(
            "tests.batch.owners:fork_and_drop",
            held=str(directory / "held"),
            told=str(directory / "told"),
            stays=not parent_dies,
        )
        eventually(lambda: (directory / "told").exists(), "the child")
        child = int((directory / "told").read_text())
        if parent_dies:
            kill(parent)
            eventually(lambda: not store.consumers(), "the end of the parent's leases")
        put_over(store, ["t"], MIB)
        (directory / "told.look").touch()
        eventually(lambda: (directory / "told.seen").exists(), "what the child sees")
        assert (directory / "told.seen").read_text() == "5"
        kill(child)
        eventually(lambda: store.stats().leased_bytes == 0, "the end of what the child reads")
        if not parent_dies:
            kill(parent)


def test_a_consumer_that_is_stopped_finds_its_rows_as_they_were(directory: Path) -> None:
    with Store(budget_bytes=64 * MIB) as store:
        entries = store.put("t", {"k": torch.full((1, MIB), 5, dtype=torch.uint8)})
        tell(directory / "held", store.owner, entries)
        pid = fork(
            "tests.batch.owners:fork_and_drop",
            held=str(directory / "held"),
            told=str(directory / "told"),
            stays=True,
            forks=False,
        )
        eventually(lambda: (directory / "told").exists(), "the consumer has fetched")
        os.kill(pid, signal.SIGSTOP)
        put_over(store, ["t"], MIB)
        assert store.stats().leased_bytes == MIB
        (directory / "told.look").touch()
        os.kill(pid, signal.SIGCONT)
        eventually(lambda: (directory / "told.seen").exists(), "what the consumer sees")
        assert (directory / "told.seen").read_text() == "5"
        kill(pid)


def test_the_leases_of_a_consumer_that_is_killed_end(store: Store, directory: Path) -> None:
    entries = [entry for i in range(50) for entry in store.put(f"t{i}", rows_of(f"t{i}"))]
    tell(directory / "held", store.owner, entries)
    pid = fork("tests.batch.owners:consume", held=str(directory / "held"), told=str(directory / "told"))
    eventually(lambda: (directory / "told").exists(), "the consumer has fetched")
    held = store.stats().nbytes
    store.clear([f"t{i}" for i in range(50)])
    # Tensors stay mapped. Plain values are decoded, and their lease goes back in its own time.
    eventually(lambda: held > store.stats().leased_bytes > held * 0.9, "tensors alone to be leased")
    kill(pid)
    eventually(lambda: store.stats().leased_bytes == 0, "the end of the dead consumer's leases")
    assert not store.consumers()


def test_views_outlive_their_owner(directory: Path) -> None:
    with owners(directory, ["t"]) as (owner,):
        have = fetched(owner.entries, owner.owner)
        owner.kill()
        assert as_bytes(have[ShardId("t", "tokens")]) == as_bytes(local_part(rows_of("t")["tokens"]))
        have.clear()  # the lease goes back to nobody
        gc.collect()
        with owners(directory, ["u"]) as (another,):  # and the thread that gives leases back goes on
            fetched(another.entries, another.owner)
            gc.collect()


def test_an_owner_that_stands_still_gets_its_leases_back_later_and_costs_the_others_nothing(
    store: Store, directory: Path
) -> None:
    with owners(directory, ["t"]) as (owner,):
        far = fetched(owner.entries, owner.owner)
        entries = store.put("here", {"k": torch.ones(1, 100)})
        here = fetched(entries, store.owner)
        owner.stop()
        far.clear()
        here.clear()
        gc.collect()
        eventually(lambda: leased_to_nobody(store), "the end of the lease at the owner that runs")
        owner.resume()


@pytest.mark.parametrize("is_far", [False, True])
def test_a_byte_that_changed_is_a_digest_mismatch_that_names_shard_and_owner(store: Store, is_far: bool) -> None:
    entries = [*store.put("good", {"k": torch.ones(2, 50)}), *store.put("bad", {"k": torch.ones(2, 5000)})]
    store.tasks["bad"]["k"].block.memory[4321] ^= 1
    have: dict[Any, Any] = {}
    with pytest.raises(FetchFailed, match="1 of 2 shards could not be fetched") as raised:
        fetched(entries, elsewhere(store.owner) if is_far else store.owner, have=have)
    (failure,) = raised.value.failures
    assert isinstance(failure.error, DigestMismatch) and (failure.task_id, failure.key) == ("bad", "k")
    assert (
        failure.owner == store.owner.id and "'bad':'k'" in str(failure.error) and store.owner.id in str(failure.error)
    )
    assert list(have) == [entries[0].shard]
    have.clear()
    eventually(lambda: leased_to_nobody(store), "the end of the leases")


def test_rows_that_can_t_be_mapped_are_pulled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> SharedSegment:
        raise TransportUnavailable("the test refuses")

    entries = [entry for i in range(5) for entry in store.put(f"t{i}", rows_of(f"t{i}"))]
    monkeypatch.setattr(SharedSegment, "attach", refuses)
    with counted_requests(monkeypatch) as sent:
        have = fetched(entries, store.owner)
    assert sent == ["Lease", "Pull"] and len(have) == 20
    assert as_bytes(have[ShardId("t3", "ragged")]) == as_bytes(local_part(rows_of("t3")["ragged"]))
    eventually(lambda: leased_to_nobody(store), "the end of the leases")


def test_rows_that_can_t_be_mapped_are_pulled_by_one_connection_where_there_is_no_second(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where descriptors run out, both fail: mapping rows, and another connection to pull them."""
    entries = store.put("t", rows_of("t", 100_000))
    connect = client.connect
    made: list[Any] = []

    def scarce(*_: Any, **__: Any) -> Any:
        raise TransportUnavailable("no descriptor is free")

    def connected(owner: Any) -> Any:
        made.append(scarce() if made else connect(owner))
        return made[-1]

    monkeypatch.setattr(client, "MAX_PULL_BYTES", 1 << 16)  # several pulls
    monkeypatch.setattr(SharedSegment, "attach", scarce)
    monkeypatch.setattr(client, "connect", connected)
    have = fetched(entries, store.owner)
    assert all(as_bytes(have[entry.shard]) == as_bytes(store.get(entry.shard)) for entry in entries)


def test_a_lease_of_which_every_shard_is_refused_leaves_nothing_at_the_owner(store: Store) -> None:
    entries = store.put("t", rows_of("t"))
    store.clear(["t"])
    with pytest.raises(FetchFailed, match="it was cleared"):
        fetched(entries, store.owner)
    eventually(lambda: leased_to_nobody(store), "the end of the lease")


def test_both_processes_that_two_threads_fork_at_once_keep_the_leases(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may change threads between the hooks of a fork: both run those before it, then both those after it."""
    (entry, *_) = store.put("t", rows_of("t"))
    have = fetched([entry], store.owner)
    forks: list[int] = []
    monkeypatch.setattr(consumer.Consumer, "forked", lambda _, fd: forks.append(fd))
    both = threading.Barrier(2)

    def fork_hooks() -> None:
        consumer.before_fork()
        both.wait(60)
        consumer.after_fork_in_parent()

    threads = [threading.Thread(target=fork_hooks) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(forks)) == 2
    for fd in forks:
        os.close(fd)
    have.clear()


def test_a_process_that_was_forked_fetches_for_itself_and_ends_no_lease_of_its_parent(store: Store) -> None:
    entries = store.put("t", {"k": torch.ones(1, 1000)})
    have = fetched(entries, store.owner)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            have.clear()
            gc.collect()
            status = 0 if fetched(entries, store.owner)[entries[0].shard].tensor.eq(1).all() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store.clear(["t"])
    eventually(lambda: len(store.consumers()) == 1, "the end of the child's leases")
    time.sleep(0.05)
    assert store.stats().leased_bytes == 4000 and have[entries[0].shard].tensor.eq(1).all()


def test_descriptors_of_a_consumer_are_bounded_by_what_it_reads(directory: Path) -> None:
    others = mappings()
    with owners(directory, ["t"]) as (owner,):

        def fetch_and_drop() -> tuple[int, int]:
            have = fetched(owner.entries, owner.owner)
            assert mappings() > others
            have.clear()
            gc.collect()
            return descriptors(), mappings()

        fetch_and_drop()
        eventually(lambda: mappings() <= others, "the mapping's end")
        before = descriptors()
        for _ in range(8):
            fetch_and_drop()
        eventually(lambda: mappings() <= others and descriptors() <= before + 2, "the descriptors' end")
