"""The store on Ray, in a real Ray: what every store promises, and what becomes of rows when Ray or a process ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from inference_plugin.wire.errors import (
    BatchError,
    DigestMismatch,
    FetchFailed,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
)
from tests.batch.owners import MIB, as_bytes, fetched, rows_of
from tests.batch.rollout_support import generate
from tests.batch.store_promises import SMALL, StorePromises
from tests.support.rig import eventually, gone
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.client import clear_tasks
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.ray_directory import Numbers, RowDirectory, Wanted
from trainer_adapters.batch.ray_rows import NAMESPACE, wanted
from trainer_adapters.batch.ray_store import RayStore
from trainer_adapters.batch.records import Entry, Owner, ShardId, VersionSpan
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import RolloutWorker

pytestmark = pytest.mark.slow

FEW_MIB = 80


class NotedStore(RayStore):
    """Knows what was put, so that one store serves many tests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.noted: set[str] = set()

    def put(self, task_id: str, data: Mapping[str, Any], *args: Any, **options: Any) -> tuple[Entry, ...]:
        self.noted.add(task_id)
        return super().put(task_id, data, *args, **options)


@pytest.fixture(scope="module")
def shared(ray: Any) -> Iterator[NotedStore]:
    with NotedStore(budget_bytes=FEW_MIB * MIB) as one:
        yield one


@pytest.fixture
def store(shared: NotedStore) -> Iterator[RayStore]:
    yield shared
    shared.clear([task_id for task_id in shared.noted if task_id.isascii() or "\ud800" not in task_id])
    shared.noted.clear()
    assert (shared.stats().shards, shared.stats().nbytes) == (0, 0)


@pytest.fixture
def small(ray: Any) -> Iterator[RayStore]:
    with RayStore(budget_bytes=SMALL) as one:
        yield one


class TestOnRay(StorePromises):
    """What every store promises, of the one on Ray."""


def test_a_put_that_was_given_up_holds_no_rows_whichever_call_ray_brings_first() -> None:
    """Its last call may be late: the rows would be held, and the caller told that they are not."""

    async def numbers_after(*calls: str) -> tuple[Numbers, list[str]]:
        directory = RowDirectory(100)
        for ticket, key in ((1, "earlier"), (2, "late")):
            assert await directory.reserve(ticket, 10, 0.0) is None
            for call in calls if ticket == 2 else ["keep"]:
                if call == "keep":
                    shards = [Wanted("t", key, 10, ticket)]
                    refused, _ = await directory.keep(ticket, 1, shards, [b""], [None])
                    assert (not refused) is (ticket == 1 or calls[0] == "keep")
                else:
                    await directory.release(ticket, "t")
        whys, _ = await directory.find([Wanted("t", "earlier", 10, 1), Wanted("t", "late", 10, 2)])
        return await directory.numbers(), whys

    for calls in (("keep", "release"), ("release", "keep")):
        assert asyncio.run(numbers_after(*calls)) == (Numbers(1, 1, 10, 0, 0), ["", "unknown"])


def test_rows_that_a_put_replaced_which_was_then_given_up_are_there_again() -> None:
    async def after(*given_up: int) -> tuple[Numbers, str]:
        directory = RowDirectory(100)
        for ticket in (1, 2, 3):
            assert await directory.reserve(ticket, 10, 0.0) is None
            refused, replaces = await directory.keep(ticket, ticket, [Wanted("t", "k", 10, ticket)], [b""], [None])
            assert (refused, replaces) == ("", ticket > 1)
        for ticket in (2, 3):
            await (directory.release if ticket in given_up else directory.settle)(ticket, "t")
        (held,) = [n for n in (1, 2, 3) if (await directory.find([Wanted("t", "k", 10, n)]))[0] == [""]]
        assert await directory.reserve(4, 10, 0.0) is None
        refused, _ = await directory.keep(4, held + 1, [Wanted("t", "other", 10, 4)], [b""], [None])
        return await directory.numbers(), refused

    refused = "task 't' has {0} rows of 'k', but was put {1} rows of 'other'"
    for given_up, held in (((), 3), ((2,), 3), ((3,), 2), ((2, 3), 1)):
        assert asyncio.run(after(*given_up)) == (Numbers(1, 1, 10, 0, 0), refused.format(held, held + 1))


def test_a_put_that_ctrl_c_interrupts_while_it_waits_takes_no_room_later(small: RayStore) -> None:
    rows = {"k": torch.zeros(1, SMALL - 100, dtype=torch.uint8)}
    small.put("first", rows)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            small.put("interrupted", rows, timeout_s=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert small.clear(["first"]).cleared == 1
    small.put("next", rows, timeout_s=10)


class Holder:
    """An actor that holds rows in a store of its own."""

    def __init__(self) -> None:
        self.store = RayStore(budget_bytes=8 * MIB)

    def put(self, task_ids: list[str]) -> tuple[Owner, list[Entry]]:
        return self.store.owner, [
            entry for task_id in task_ids for entry in self.store.put(task_id, rows_of(task_id), VersionSpan(1, 2))
        ]

    def total(self, batch: DistributedBatch) -> int:
        """Of another store's rows."""
        return int(batch.fetch()["tokens"].sum())


def test_a_forked_child_is_refused_and_closes_nothing_where_it_would_wait_for_ever(ray: Any, store: RayStore) -> None:
    (entry,) = store.put("t", {"k": torch.ones(1)})
    child = os.fork()
    if not child:
        refused = 0
        for use in (lambda: store.put("u", {"k": torch.ones(1)}), lambda: store.get(entry.shard), store.stats):
            try:
                use()
            except BatchError:
                refused += 1
        store.close()
        os._exit(refused)
    try:
        eventually(lambda: gone(child), "the end of the child")
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 3 and store.get(entry.shard).tensor.tolist() == [1.0]
    store.clear(["t"])


def test_actors_read_each_other_s_rows_by_the_batch_alone(ray: Any, store: RayStore) -> None:
    holder = ray.remote(Holder).options(num_cpus=0).remote()
    owner, entries = ray.get(holder.put.remote(["a", "b"]), timeout=600)
    theirs = DistributedBatch.of_entries(entries, [owner]).fetch()
    assert torch.equal(theirs["tokens"], torch.cat([rows_of("a")["tokens"], rows_of("b")["tokens"]]))
    mine = DistributedBatch.of_entries(store.put("c", rows_of("c")), [store.owner])
    assert ray.get(holder.total.remote(mine), timeout=600) == int(rows_of("c")["tokens"].sum())
    assert theirs.clear().cleared == 2
    with pytest.raises(FetchFailed, match="it was cleared"):
        fetched(entries, owner)


def test_rows_of_an_actor_that_is_killed_are_lost_and_those_of_others_are_not(ray: Any, store: RayStore) -> None:
    holder = ray.remote(Holder).options(num_cpus=0).remote()
    owner, entries = ray.get(holder.put.remote(["a"]), timeout=600)
    kept = fetched(entries, owner)
    mine = store.put("mine", rows_of("mine"))
    ray.kill(holder)
    eventually(lambda: lost(entries, owner), "the loss of the killed actor's rows")
    have: dict[ShardId, Any] = {}
    with pytest.raises(FetchFailed, match="4 of 8 shards") as raised:
        fetched([*entries, *mine], owner, store.owner, have=have)
    assert {failure.owner for failure in raised.value.failures} == {owner.id}
    assert "the rows that its process held are lost" in str(raised.value)
    assert set(have) == {entry.shard for entry in mine}
    assert as_bytes(kept[ShardId("a", "tokens")]) == as_bytes(local_part(rows_of("a")["tokens"]))
    report = clear_tasks(["a", "mine"], {owner.id: owner, store.owner.id: store.owner}, timeout_s=60)
    ((who, error),) = report.failed
    assert (report.cleared, who) == (1, owner.id) and isinstance(error, PeerLost)


def test_a_fetch_is_a_view_and_memory_goes_back_when_nobody_reads(ray: Any, store: RayStore) -> None:
    held = []
    for i in range(8):
        (entry,) = store.put(f"t{i}", {"k": torch.full((1, 2 * MIB), float(i))})
        part = fetched([entry], store.owner)[entry.shard]
        assert part.tensor[0, -1] == i
        if i < 3:
            held.append(part)
        del part
        store.clear([f"t{i}"])
    # Ray frees each second; what an earlier test's error still holds goes with the garbage.
    eventually(lambda: gc.collect() >= 0 and plasma_mib(ray) < 32, "the memory of the five that nobody reads")
    assert plasma_mib(ray) >= 24
    assert [int(part.tensor[0, 0]) for part in held] == [0, 1, 2]
    held.clear()
    eventually(lambda: gc.collect() >= 0 and plasma_mib(ray) < 8, "the memory of all rows")


def test_a_byte_that_a_reader_changed_is_a_digest_mismatch_for_the_next(store: RayStore) -> None:
    (good,) = store.put("good", {"k": torch.ones(2, 5000)})
    (bad,) = store.put("bad", {"k": torch.ones(2, 5000)})
    fetched([bad], store.owner)[bad.shard].tensor[1, 7] = 3
    have: dict[ShardId, Any] = {}
    with pytest.raises(FetchFailed, match="1 of 2 shards could not be fetched") as raised:
        fetched([good, bad], store.owner, have=have)
    (failure,) = raised.value.failures
    assert isinstance(failure.error, DigestMismatch) and failure.task_id == "bad" and list(have) == [good.shard]


@pytest.mark.parametrize("value", [{"not": "bytes"}, torch.zeros(4), b"\0" * 4])
def test_an_object_that_is_not_the_bytes_of_the_entry_is_refused(ray: Any, store: RayStore, value: Any) -> None:
    (entry,) = store.put("t", {"k": torch.ones(1)})
    directory = ray.get_actor(store.owner.id, namespace=NAMESPACE)
    assert ray.get(directory.reserve.remote(-1, entry.nbytes, 600), timeout=600) is None
    refused = ray.get(directory.keep.remote(-1, 1, [wanted(entry)], [b""], [ray.put(value)]), timeout=600)
    assert refused == ("", True)
    with pytest.raises(FetchFailed, match="not its 4 bytes") as raised:
        fetched([entry], store.owner)
    assert isinstance(raised.value.failures[0].error, ProtocolError)


def test_a_fetch_from_a_directory_that_stands_still_ends_at_its_deadline_and_keeps_the_rest(
    ray: Any, store: RayStore, small: RayStore
) -> None:
    stuck = small.put("stuck", {"k": [1]})
    here = store.put("here", {"k": [2]})
    pid = ray.get(ray.get_actor(small.owner.id, namespace=NAMESPACE).__ray_call__.remote(pid_of), timeout=600)
    have: dict[ShardId, Any] = {}
    with stopped(pid):
        start_s = time.monotonic()
        with pytest.raises(FetchFailed, match="1 of 2 shards") as raised:
            fetched([*stuck, *here], small.owner, store.owner, timeout_s=6, have=have)
        assert time.monotonic() - start_s < 60
        assert isinstance(raised.value.failures[0].error, SyncTimeout) and list(have) == [here[0].shard]
    fetched(stuck, small.owner, have=have)
    assert len(have) == 2
    with stopped(pid):
        report = clear_tasks(["stuck", "here"], {one.owner.id: one.owner for one in (small, store)}, timeout_s=6)
        ((who, error),) = report.failed
        assert (who, report.cleared) == (small.owner.id, 1) and isinstance(error, SyncTimeout)
    eventually(lambda: "stuck" not in small, "the clear, which was late")


# --- rollouts ----------------------------------------------------------------------------------------------------------


class RolloutActor:
    """A rollout worker as an actor: Ray places it, ends it and starts it again."""

    def __init__(self, pool: str) -> None:
        self.store = RayStore(budget_bytes=8 * MIB)
        self.worker = RolloutWorker(generate, slots=1, store=self.store, pool=pool)

    def close(self) -> None:
        self.worker.close()
        self.store.close()


@pytest.mark.parametrize("on_lost", ["fail", "rerun"])
def test_a_rollout_actor_that_is_killed_is_restarted_by_ray_and_its_task_is_lost_or_runs_again(
    ray: Any, ray_job: None, tmp_path: Path, on_lost: Literal["fail", "rerun"]
) -> None:
    gate, began = tmp_path / "gate", tmp_path / "began"
    with RolloutPool(on_lost=on_lost) as pool:
        actor = ray.remote(RolloutActor).options(num_cpus=0, max_restarts=1).remote(pool.addresses[0])
        before = pool.submit("before", {"number": 5}).result(600)
        batch = DistributedBatch.of_entries(before.entries, [before.owner])
        assert batch.fetch()["ids"][0].tolist() == [5, 6, 7]
        running = pool.submit("running", {"began": str(began), "gate": str(gate)})
        eventually(began.exists, "the start of the task")
        ray.kill(actor, no_restart=False)
        if on_lost == "fail":
            with pytest.raises(PeerLost):
                running.result(600)
        eventually(lambda: gone(before.tags["pid"]), "the end of the actor, which must not finish the task")
        gate.touch()
        if on_lost == "rerun":
            assert running.result(600).tags["pid"] != before.tags["pid"]
        after = pool.submit("after", {"number": 7}).result(600)
        assert after.tags["pid"] != before.tags["pid"]
        assert DistributedBatch.of_entries(after.entries, [after.owner]).fetch()["ids"][0].tolist() == [7, 8, 9]
        assert pool.clear(["after"]).cleared == 1
        eventually(lambda: was_cleared(after.entries, after.owner), "the clear at the worker's store")
        eventually(lambda: lost(before.entries, before.owner), "the loss of the killed actor's rows")
        ray.get(actor.close.remote(), timeout=600)
        ray.kill(actor)


# --- without Ray -------------------------------------------------------------------------------------------------------


def test_nothing_imports_ray_until_a_store_is_made_and_then_it_says_what_to_install() -> None:
    program = """
import sys
import trainer_adapters, weightwire
import trainer_adapters.batch.batch, trainer_adapters.batch.client, trainer_adapters.batch.ray_store
assert "ray" not in sys.modules and "transfer_queue" not in sys.modules
from trainer_adapters.batch.ray_store import RayStore
from inference_plugin.wire.errors import TransportUnavailable
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "ray": raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Hidden())
try:
    RayStore(budget_bytes=1)
except TransportUnavailable as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "pip install '.[ray]' in a checkout of weightwire"


def test_a_process_outside_of_a_cluster_starts_none(ray: Any, store: RayStore, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = store.put("t", {"k": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(TransportUnavailable, match="joined no Ray cluster"):
            RayStore(budget_bytes=1)
        with pytest.raises(FetchFailed, match="call ray"):
            fetched(entries, store.owner)
        report = clear_tasks(["t"], {store.owner.id: store.owner}, timeout_s=60)
        assert isinstance(report.failed[0][1], TransportUnavailable)
    assert "t" in store


def was_cleared(entries: Any, owner: Owner) -> bool:
    try:
        fetched(entries, owner)
    except FetchFailed as error:
        return all("it was cleared" in str(failure.error) for failure in error.failures)
    return False


def lost(entries: Any, owner: Owner) -> bool:
    try:
        fetched(entries, owner)
    except FetchFailed as error:
        return all(isinstance(failure.error, PeerLost) for failure in error.failures)
    return False


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pid_of(_: Any) -> int:
    return os.getpid()


def plasma_mib(ray: Any) -> int:
    """What lies in the object store, as Ray counts it."""
    from ray._private.internal_api import memory_summary

    def answer() -> str | None:
        try:
            return memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)  # type: ignore[no-any-return]
        except ray.exceptions.RaySystemError:  # it gives Ray's server 5 s, which is little on a busy machine
            return None

    summary = eventually(answer, "an answer of Ray's server")
    (line,) = [line for line in summary.splitlines() if line.startswith("Plasma memory usage")]
    return int(line.split()[3])
