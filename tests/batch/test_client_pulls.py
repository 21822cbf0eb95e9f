"""Consumers on other hosts, and what goes wrong: rows in pieces over sockets, errors that list every shard, clears."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inference_plugin.net import curve
from inference_plugin.net.addresses import boot_id
from inference_plugin.wire.errors import (
    AuthError,
    FetchFailed,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
)
from tests.batch.owners import (
    MIB,
    as_bytes,
    counted_requests,
    elsewhere,
    fetched,
    memfd_bytes,
    owners,
    rows_of,
    tell,
)
from tests.support.rig import eventually, fork, kill, runtime
from trainer_adapters.batch.client import afetch_entries, clear_tasks
from trainer_adapters.batch.inputs import local_part
from trainer_adapters.batch.records import Owner, ShardId
from trainer_adapters.batch.store import Store

DEADLINE_S = 5.0
LONG_S = 3600.0
"""A fetch that ends long before has not waited for its deadline."""


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WEIGHTWIRE_BUCKET_BYTES", "4MiB")
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(budget_bytes=256 * MIB) as one:
        yield one


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job.key"
    curve.make_key(path)
    monkeypatch.setenv(curve.VARIABLE, str(path))
    return path


def reasons(raised: FetchFailed) -> dict[tuple[str, str], type[WeightwireError]]:
    return {(one.task_id, one.key): type(one.error) for one in raised.failures}


def assert_rows(have: Any, *tasks: str) -> None:
    for task in tasks:
        for name, value in rows_of(task).items():
            assert as_bytes(have[ShardId(task, name)]) == as_bytes(local_part(value))


# --- bytes over sockets --------------------------------------------------------------------------------------------------


def test_large_and_small_shards_come_in_pieces_of_a_bucket(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {
        "large": torch.randn(3, MIB - 7),  # 12 MiB: 3 pieces
        "bucket": torch.randn(1, MIB),
        "small": torch.randn(1, 1000),
        "nothing": torch.empty(1, 0),
        "odd": torch.randint(0, 255, (1, 5 * MIB + 1), dtype=torch.uint8),
    }
    entries = [entry for key, value in wanted.items() for entry in store.put(f"t/{key}", {key: value})]
    entries += [entry for i in range(1000) for entry in store.put(f"many{i}", {"k": torch.full((1, 1000), float(i))})]
    sizes: list[int] = []
    read = store.read

    def noting(cuts: Any) -> Any:
        data, refused = read(cuts)
        sizes.append(data.size)
        return data, refused

    monkeypatch.setattr(store, "read", noting)
    with counted_requests(monkeypatch) as sent:
        have = fetched(entries, elsewhere(store.owner))
    total = sum(entry.nbytes for entry in entries)
    assert sum(sizes) == total and max(sizes) == 4 * MIB
    assert len(sent) == len(sizes) == -(-total // (4 * MIB)) and set(sent) == {"Pull"}
    for key, value in wanted.items():
        assert torch.equal(have[ShardId(f"t/{key}", key)].tensor, value)
    assert all(have[ShardId(f"many{i}", "k")].tensor.eq(i).all() for i in range(1000))
    assert set(have) == {entry.shard for entry in entries}


def test_owners_are_pulled_from_side_by_side_and_on_one_host_mapped(directory: Path) -> None:
    with owners(directory, ["a", "b"], ["c"], ["d", "e"]) as running:
        entries = [entry for owner in running for entry in owner.entries]
        far = [elsewhere(running[0].owner), running[1].owner, elsewhere(running[2].owner)]
        assert_rows(fetched(entries, *far), *"abcde")
        running[0].stop()  # the others have answered nevertheless
        have: dict[Any, Any] = {}
        with pytest.raises(FetchFailed):
            fetched(entries, *far, timeout_s=DEADLINE_S, have=have)
        assert_rows(have, *"cde")


def test_with_a_key_rows_travel_encrypted_and_another_job_s_key_is_refused(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(budget_bytes=64 * MIB, address="tcp://127.0.0.1:*") as store:
        entries = store.put("t", rows_of("t"))
        assert_rows(fetched(entries, elsewhere(store.owner)), "t")
        curve.make_key(tmp_path / "other.key")
        for other in (str(tmp_path / "other.key"), None):
            if other is None:
                monkeypatch.delenv(curve.VARIABLE)
            else:
                monkeypatch.setenv(curve.VARIABLE, other)
            for owner in (store.owner, elsewhere(store.owner)):
                began_s = time.monotonic()
                with pytest.raises(FetchFailed, match="hold different keys") as raised:
                    fetched(entries, owner, timeout_s=LONG_S)
                assert set(reasons(raised.value).values()) == {AuthError} and time.monotonic() - began_s < LONG_S / 10
            report = clear_tasks({store.owner.id: ["t"]}, {store.owner.id: store.owner}, timeout_s=60)
            assert report.cleared == 0 and isinstance(report.failed[0][1], AuthError)
        assert store.stats().tasks == 1


def test_a_store_listens_beyond_this_host_only_with_a_key() -> None:
    with pytest.raises(AuthError, match="without authentication"):
        Store(budget_bytes=1, address="tcp://0.0.0.0:*")


class CutOnce:
    """A TCP link to `address` that is cut once, after `nbytes` have come back over it."""

    def __init__(self, address: str, nbytes: int) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = (host, int(port))
        self._left = nbytes
        self.cuts = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            there = socket.create_connection(self._to)
            for source, target, counts in ((here, there, False), (there, here, True)):
                threading.Thread(target=self._pass, args=(source, target, counts), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counts and not self.cuts:
                    self._left -= len(data)
                    if self._left < 0:
                        self.cuts += 1
                        break
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listening.close()


def test_a_link_that_is_cut_in_the_middle_costs_a_repeated_request() -> None:
    with Store(budget_bytes=64 * MIB, address="tcp://127.0.0.1:*") as store:
        value = torch.randn(1, 3 * MIB)
        entries = store.put("t", {"k": value})
        link = CutOnce(store.owner.address, 5 * MIB)
        try:
            owner = msgspec.structs.replace(elsewhere(store.owner), address=link.address)
            assert torch.equal(fetched(entries, owner)[entries[0].shard].tensor, value)
            assert link.cuts == 1
        finally:
            link.close()


# --- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_far", [False, True])
def test_what_an_owner_refuses_fails_at_once_is_not_asked_for_again_and_costs_nothing_else(
    store: Store, is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [entry for name in ("kept", "cleared") for entry in store.put(name, rows_of(name))]
    store.clear(["cleared"])
    never = msgspec.structs.replace(entries[0], shard=ShardId("never", "tokens"))
    lost = msgspec.structs.replace(entries[1], shard=ShardId("lost", "k"), owner="nobody-knows")
    have: dict[Any, Any] = {}
    owner = elsewhere(store.owner) if is_far else store.owner
    with counted_requests(monkeypatch) as sent, pytest.raises(FetchFailed) as raised:
        fetched([*entries, never, lost], owner, have=have, timeout_s=LONG_S)
    assert len(sent) == 1
    assert_rows(have, "kept")
    assert reasons(raised.value) == dict.fromkeys(
        [("cleared", key) for key in rows_of("t")] + [("never", "tokens"), ("lost", "k")], ProtocolError
    )
    text = str(raised.value)
    for part in (
        *("6 of 10 shards could not be fetched", "'cleared':'ragged'", f"(4 in all) at {store.owner.id}"),
        *(
            "it was cleared",
            "'never':'tokens'",
            "the owner does not have it",
            "the address of owner nobody-knows is not known",
        ),
    ):
        assert part in text, text


def test_a_half_failed_fetch_is_finished_by_another_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store.put("a", rows_of("a")), Store(budget_bytes=MIB)
    more = second.put("b", rows_of("b"))
    have: dict[Any, Any] = {}
    with pytest.raises(FetchFailed, match="4 of 8"):
        fetched([*first, *more], store.owner, have=have)
    assert len(have) == 4
    with counted_requests(monkeypatch) as sent:
        fetched([*first, *more], store.owner, second.owner, have=have)
    assert len(sent) == 1  # what has arrived is not asked for again
    assert_rows(have, "a", "b")
    second.close()


@pytest.mark.parametrize("is_far", [False, True])
def test_an_owner_that_stands_still_costs_its_own_shards_only_and_ends_by_the_deadline(
    store: Store, directory: Path, is_far: bool
) -> None:
    entries = store.put("here", rows_of("here"))
    with owners(directory, ["still"]) as (still,):
        still.stop()
        have: dict[Any, Any] = {}
        other = elsewhere(still.owner) if is_far else still.owner
        with pytest.raises(FetchFailed) as raised:
            fetched([*still.entries, *entries], store.owner, other, timeout_s=DEADLINE_S, have=have)
        assert reasons(raised.value) == dict.fromkeys([("still", key) for key in rows_of("t")], SyncTimeout)
        assert "what arrived is kept" in str(raised.value) and still.owner.id in str(raised.value)
        assert_rows(have, "here")
        report = clear_tasks(
            {still.owner.id: ["still"], store.owner.id: ["here", "x"]},
            {store.owner.id: store.owner, still.owner.id: other},
            timeout_s=DEADLINE_S,
        )
        assert (report.cleared, report.unknown) == (1, 1) and store.stats().tasks == 0
        assert [(owner, type(error)) for owner, error in report.failed] == [(still.owner.id, SyncTimeout)]
        still.resume()
        fetched([], still.owner)


@pytest.mark.parametrize("requests", ["one request", "several requests"])
def test_an_owner_that_is_killed_is_lost_at_once_before_and_during_a_fetch(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch, requests: str
) -> None:
    if requests == "several requests":  # all of them learn of the end at the same time
        monkeypatch.setattr("trainer_adapters.batch.client.MAX_WANTED", 1)
    entries = store.put("here", rows_of("here"))
    with owners(directory, ["before"], ["during"]) as (before, during):
        before.kill()
        during.stop()
        have: dict[Any, Any] = {}
        killer = threading.Timer(0.3, during.kill)
        killer.start()
        every = [*before.entries, *during.entries, *entries]
        with pytest.raises(FetchFailed) as raised:
            fetched(every, before.owner, during.owner, store.owner, timeout_s=LONG_S, have=have)
        killer.join()
        lost = [(task, key) for task in ("before", "during") for key in rows_of("t")]
        assert reasons(raised.value) == dict.fromkeys(lost, PeerLost)
        assert "generate them again" in str(raised.value) and "old version" not in str(raised.value)
        assert_rows(have, "here")


@pytest.mark.parametrize(
    ("address", "kind"),
    [("ray://somewhere", TransportUnavailable), ("nonsense", TransportUnavailable), ("tcp://", ProtocolError)],
)
def test_an_owner_that_can_t_be_spoken_to_costs_its_shards_only(
    store: Store, address: str, kind: type[WeightwireError]
) -> None:
    entries = [*store.put("a", {"k": [1]}), *store.put("b", {"k": [2]})]
    odd = Owner("odd-1", address, boot_id(), 1, 1)
    have: dict[Any, Any] = {}
    with pytest.raises(FetchFailed) as raised:
        fetched([entries[0], msgspec.structs.replace(entries[1], owner="odd-1")], store.owner, odd, have=have)
    assert reasons(raised.value) == {("b", "k"): kind} and list(have) == [entries[0].shard]


def test_a_store_that_closed_is_gone_for_its_consumers(store: Store) -> None:
    entries = store.put("t", rows_of("t"))
    have = fetched(entries, store.owner)
    store.close()
    assert_rows(have, "t")
    with pytest.raises(FetchFailed):
        fetched(entries, store.owner, timeout_s=DEADLINE_S)


# --- in an event loop ----------------------------------------------------------------------------------------------------


def test_fetches_in_an_event_loop_run_side_by_side_and_raise_as_others_do(store: Store, directory: Path) -> None:
    entries = [store.put(f"t{i}", rows_of(f"t{i}")) for i in range(8)]

    async def all_at_once() -> None:
        have: dict[Any, Any] = {}
        owners_by_id = {store.owner.id: store.owner}
        await asyncio.gather(*(afetch_entries(some, owners_by_id, timeout_s=60, have=have) for some in entries))
        assert_rows(have, *(f"t{i}" for i in range(8)))
        with pytest.raises(FetchFailed, match="is not known"):
            await afetch_entries(entries[0], {}, timeout_s=60, have={})

    asyncio.run(all_at_once())


def test_a_fetch_that_is_cancelled_ends(directory: Path) -> None:
    before = set(threading.enumerate())
    with owners(directory, ["t"]) as (still,):
        still.stop()

        async def cancelled() -> None:
            task = asyncio.ensure_future(
                afetch_entries(still.entries, {still.owner.id: still.owner}, timeout_s=LONG_S, have={})
            )
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async def abandoned() -> None:  # as the end of a loop does with what still waits
            fetch = afetch_entries(still.entries, {still.owner.id: still.owner}, timeout_s=LONG_S, have={})
            fetch.send(None)
            fetch.close()

        asyncio.run(cancelled())
        asyncio.run(abandoned())
        eventually(
            lambda: not any(one.name == "weightwire-fetch" for one in set(threading.enumerate()) - before),
            "the thread's end",
        )


# --- clear ---------------------------------------------------------------------------------------------------------------


def test_a_clear_sends_each_owner_its_own_tasks_and_survives_dead_ones(directory: Path) -> None:
    with owners(directory, ["a", "b"], ["c"], ["d"]) as (one, two, dead):
        dead.kill()
        by_id = {owner.owner.id: owner.owner for owner in (one, two, dead)}
        tasks = {one.owner.id: ["a", "gone"], two.owner.id: ["c", "b"], dead.owner.id: ["d"], "nobody-1": ["e"]}
        report = clear_tasks(tasks, by_id, timeout_s=LONG_S)
        # "b" is not two's: it is unknown there, and one still has it.
        assert (report.cleared, report.unknown) == (2, 2)
        assert {owner: type(error) for owner, error in report.failed} == {
            dead.owner.id: PeerLost,
            "nobody-1": ProtocolError,
        }
        assert "not reached" in str(report) and "generate them again" in str(report)
        assert len(fetched([entry for entry in one.entries if entry.shard.task_id == "b"], one.owner)) == 4
        report = clear_tasks(["a", "b", "c", "x"], {k: v for k, v in by_id.items() if k != dead.owner.id}, timeout_s=60)
        assert (report.cleared, report.unknown, report.failed) == (1, 3, ())


def test_a_clear_while_rows_are_pulled_gives_all_of_them_or_says_that_they_are_cleared(store: Store) -> None:
    refusals: list[str] = []
    for i in range(6):
        entries = store.put(f"t{i}", {"k": torch.full((1, 8 * MIB), float(i))})
        cleaner = threading.Timer(0.002 * i, store.clear, args=([f"t{i}"],))
        cleaner.start()
        try:
            assert fetched(entries, elsewhere(store.owner))[entries[0].shard].tensor.eq(i).all()
        except FetchFailed as error:
            refusals.append(str(error))
        cleaner.join()
    assert all("it was cleared" in text for text in refusals)
    assert store.stats().shards == 0
    eventually(lambda: store.stats().leased_bytes == 0, "the end of the last reply")


def test_a_consumer_elsewhere_that_is_killed_leaves_nothing_with_the_owner(store: Store, directory: Path) -> None:
    entries = store.put("t", rows_of("t"))
    tell(directory / "held", store.owner, entries)
    options = {"held": str(directory / "held"), "told": str(directory / "told"), "is_far": True}
    pid = fork("tests.batch.owners:consume", **options)
    eventually(lambda: (directory / "told").exists(), "the consumer has fetched")
    kill(pid)
    store.clear(["t"])
    eventually(lambda: store.stats().leased_bytes == 0, "the end of the last reply")
    assert store.consumers() == set() and memfd_bytes() >= 0
