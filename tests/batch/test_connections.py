"""Connections to owners of this host: one is used again, a few are kept, and none for long."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import FetchFailed, PeerLost
from tests.batch.owners import MIB, elsewhere, fetched, owners
from tests.support.rig import eventually, kill, runtime
from trainer_adapters.batch import connections
from trainer_adapters.batch.client import clear_tasks
from trainer_adapters.batch.connections import MOST_KEPT, Connections
from trainer_adapters.batch.consumer import REST_S, consumer
from trainer_adapters.batch.store import Store


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which the fetches and clears of this process connect."""
    addresses: list[str] = []

    def connect(address: str, **named: object) -> Channel:
        addresses.append(address)
        return Channel(address, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("trainer_adapters.batch.owner_link.Channel", connect)
    return addresses


def test_fetches_and_clears_of_one_owner_use_one_connection_again(made: list[str]) -> None:
    with Store(budget_bytes=MIB) as store, Store(budget_bytes=MIB) as other:
        for i in range(5):
            for each in (store, other):
                (entry,) = each.put("t", {"k": torch.full((4,), i)})
                assert fetched([entry], each.owner)[entry.shard].tensor.tolist() == [i] * 4
        clear_tasks(["t"], {each.owner.id: each.owner for each in (store, other)}, timeout_s=60)
        assert made == [store.owner.address, other.owner.address]


def test_a_connection_to_another_host_is_not_kept(made: list[str]) -> None:
    with Store(budget_bytes=MIB, address="tcp://127.0.0.1:*") as store:
        (entry,) = store.put("t", {"k": torch.ones(4)})
        for _ in range(2):
            fetched([entry], elsewhere(store.owner))
        assert len(made) == 2


def test_a_kept_connection_tells_at_once_that_its_owner_has_died_and_is_then_closed(
    directory: Path, made: list[str]
) -> None:
    with owners(directory, ["t"]) as (owner,):
        fetched(owner.entries, owner.owner)
        kill(owner.pid)
        with pytest.raises(FetchFailed, match="PeerLost"):
            fetched(owner.entries, owner.owner)
        assert len(made) == 1 and consumer().connection(owner.owner) is None


def test_a_forked_child_makes_connections_of_its_own(made: list[str]) -> None:
    with Store(budget_bytes=MIB) as store:
        entries = store.put("t", {"k": torch.ones(4)})
        fetched(entries, store.owner)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os._exit(0 if fetched(entries, store.owner) and len(made) == 2 else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert fetched(entries, store.owner) and len(made) == 1


def test_what_nobody_takes_is_closed(monkeypatch: pytest.MonkeyPatch, made: list[str]) -> None:
    monkeypatch.setattr(connections, "KEPT_S", 0.05)
    with Store(budget_bytes=MIB) as store:
        entries = store.put("t", {"k": torch.ones(4)})
        have = fetched(entries, store.owner)
        eventually(lambda: consumer().connection(store.owner) is None, "the end of the connection")
        assert have and fetched(entries, store.owner) and len(made) == 2


def test_of_too_many_the_one_that_waits_longest_is_closed() -> None:
    kept = Connections()
    with Store(budget_bytes=MIB) as store:
        channels = [Channel(store.owner.address) for _ in range(MOST_KEPT + 3)]
        for channel in channels:
            kept.keep(store.owner, channel)
        assert [channel.socket.closed for channel in channels] == [True] * 3 + [False] * MOST_KEPT
        taken = [kept.take(store.owner) for _ in range(MOST_KEPT)]
        assert taken == channels[3:] and kept.take(store.owner) is None and kept.due_s == float("inf")
        for channel in channels:
            channel.close()


def test_a_connection_on_which_a_request_is_open_is_not_kept(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(budget_bytes=MIB) as store:
        entries = store.put("t", {"k": torch.ones(4)})
        with pytest.raises(FetchFailed, match="not delivered within 0 s"):
            fetched(entries, store.owner, timeout_s=0)
        assert consumer().connection(store.owner) is None


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_connection_is_kept_where_descriptors_are_scarce(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SPARE_DESCRIPTORS", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with Store(budget_bytes=MIB) as store:
        (entry,) = store.put("t", {"k": torch.arange(4)})
        for _ in range(3):
            assert fetched([entry], store.owner)[entry.shard].tensor.tolist() == [0, 1, 2, 3]
        assert len(made) == 3 and consumer().connection(store.owner) is None


def test_a_fetch_that_lacks_descriptors_gives_up_the_kept_connections_so_that_the_next_one_has_them(
    directory: Path, made: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(Store(budget_bytes=MIB)) for _ in range(MOST_KEPT)]
        for store in kept:
            fetched(store.put("t", {"k": torch.ones(4)}), store.owner)
        other = stack.enter_context(Store(budget_bytes=MIB))
        (entry,) = other.put("t", {"k": torch.arange(4)})

        def next_fetch() -> object:
            with contextlib.suppress(FetchFailed):  # libzmq's thread frees the descriptors a little later
                return fetched([entry], other.owner)[entry.shard].tensor.tolist()
            return None

        with no_more_descriptors():
            with pytest.raises(FetchFailed, match="too few file descriptors"):
                fetched([entry], other.owner)
            assert eventually(next_fetch, "descriptors of the kept connections") is not None


def test_a_library_that_destroys_the_context_which_pyzmq_shares_costs_neither_connections_nor_leases(
    made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Store(budget_bytes=MIB) as store:
        entries = store.put("t", {"k": torch.ones(4)})
        zmq.Context.instance().socket(zmq.REQ).close()  # it is there
        for _ in range(5):
            held = fetched(entries, store.owner)
            zmq.Context.instance().destroy(linger=0)
            del held  # while the thread has a connection on which it gives leases back
        assert len(made) == 1
        store.clear(["t"])
        eventually(lambda: not store.stats().leased_bytes, "the end of the leases")
    assert "giving leases back failed" not in caplog.text


def watched_processes() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += "pidfd" in str(descriptor.readlink())
    return found


def test_leases_of_an_owner_that_has_closed_while_its_process_lives_on_keep_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference_plugin.net.channel.CLOSED_S", 0.05)
    consumer().close_connections()
    before = watched_processes()
    held = []
    for _ in range(20):
        with Store(budget_bytes=MIB) as store:
            held.append(fetched(store.put("t", {"k": torch.ones(4)}), store.owner))
    consumer().close_connections()
    held.clear()
    eventually(lambda: watched_processes() <= before, "the end of the connections to closed owners")


def test_rows_of_an_owner_that_has_closed_while_its_process_lives_on_are_lost_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inference_plugin.net.channel.CLOSED_S", 0.05)
    with Store(budget_bytes=MIB) as store:
        entries, owner = store.put("t", {"k": torch.ones(4)}), store.owner
    with pytest.raises(FetchFailed) as raised:
        fetched(entries, owner)
    assert [type(failure.error) for failure in raised.value.failures] == [PeerLost]
    ((_, error),) = clear_tasks(["t"], {owner.id: owner}, timeout_s=60).failed
    assert isinstance(error, PeerLost) and "is closed, although its process lives" in error.message


def test_leases_that_end_while_no_descriptor_is_free_are_given_back_later_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Store(budget_bytes=MIB) as store, Store(budget_bytes=MIB) as other:
        held = [fetched(each.put("t", {"k": torch.ones(4)}), each.owner) for each in (store, other)]
        for each in (store, other):
            each.clear(["t"])
        consumer().close_connections()
        with no_more_descriptors():
            held.clear()
            eventually(lambda: "leases can't be given back now" in caplog.text, "the warning")
            time.sleep(3 * REST_S)
        eventually(lambda: not store.stats().leased_bytes and not other.stats().leased_bytes, "the end of the leases")
        assert caplog.text.count("can't be given back") == 1 and "Traceback" not in caplog.text
