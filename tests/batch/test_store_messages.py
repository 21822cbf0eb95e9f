"""No message ends a store's thread or changes what it holds: any field with any value, garbage, pickles, floods."""

from __future__ import annotations

import os
import pickle
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from hypothesis import HealthCheck, example, given, settings

from inference_plugin.net.addresses import boot_id
from inference_plugin.net.processes import start_ticks
from inference_plugin.wire import codec, host_memory
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import FetchFailed, TransportUnavailable
from inference_plugin.wire.host_memory import free_host_bytes
from inference_plugin.wire.messages import (
    PROTOCOL_VERSION,
    ClearTasks,
    Describe,
    Done,
    EndLeases,
    Failed,
    Lease,
    Leased,
    Pull,
    Pulled,
    TasksCleared,
)
from inference_plugin.wire.messages.batch import MAX_PULL_BYTES, Cut, LeaseEnd, Place, RefusedShard, WantedShard
from inference_plugin.wire.messages.common import Sender
from tests.batch.owners import MIB, counted_requests, elsewhere, fetched
from tests.support.rig import LONG_S, runtime
from tests.worker.test_extreme_messages import Peer, extreme
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Owner, ShardId
from trainer_adapters.batch.store import Store

HERE = Sender("stranger", os.getpid(), boot_id(), start_ticks())
KEPT = torch.arange(4000.0).reshape(4, 1000)


@pytest.fixture(scope="module")
def held() -> Iterator[tuple[Store, Entry, Peer]]:
    with pytest.MonkeyPatch.context() as patch, runtime(patch), Store(budget_bytes=64 * MIB) as store:
        (entry,) = store.put("kept", {"k": KEPT})
        peer = Peer(store.owner.address)
        yield store, entry, peer
        peer.close()


REAL = WantedShard("kept", "k", 16_000, digest_bytes(KEPT.numpy()))
TO_A_STORE: list[Any] = [
    Lease(HERE, 1, (REAL, WantedShard("other", "k", 1, 2))),
    EndLeases("stranger", (LeaseEnd(1, (0,)), LeaseEnd(2))),
    Pull((Cut(REAL, 0, 16_000), Cut(REAL, 5, 6))),
    ClearTasks("stranger", 1, ("other",)),
]


def assert_serves(store: Store, entry: Entry) -> None:
    assert torch.equal(fetched([entry], store.owner)[entry.shard].tensor, KEPT)
    assert (store.stats().tasks, store.stats().nbytes) == (1, KEPT.nbytes)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(extreme(TO_A_STORE))
@example(codec.encode(Lease(msgspec.structs.replace(HERE, pid=0), 1, (REAL,))))
@example(codec.encode(Lease(msgspec.structs.replace(HERE, boot_id="x"), 1, (REAL,))))
@example(codec.encode(Lease(msgspec.structs.replace(HERE, pid=2**31 - 1), 1, (REAL,) * (1 << 14))))
@example(codec.encode(EndLeases("stranger", (LeaseEnd(1, ((1 << 14) - 1,)),))))
@example(codec.encode(Pull((Cut(WantedShard("kept", "k", 1 << 60, 1), 0, 1 << 60),))))
@example(codec.encode(Pull((Cut(REAL, 7, 3),))))
@example(codec.encode(Leased((), ())))
@example(codec.encode(Describe()))
@example(b"")
@example(b"\x91" * 100_000)
def test_whatever_a_store_is_sent_it_answers_and_goes_on(held: tuple[Store, Entry, Peer], message: bytes) -> None:
    store, _, peer = held
    peer.ask(message)
    assert peer.ask(codec.encode(ClearTasks("x", 0, ()))) == TasksCleared()
    assert (store.stats().tasks, store.stats().nbytes) == (1, KEPT.nbytes)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ((), "a message of 0 frames"),
        ((b"x", b"y", b"z"), "a message of 3 frames"),
        ((codec.encode(Pull(())), b"payload"), "a Pull takes no payload frame"),
        ((b"\x80\x04garbage",), "not a message of this protocol"),
        ((codec.encode(Describe()),), "a store takes no Describe"),
        (
            (codec.encode(Lease(msgspec.structs.replace(HERE, boot_id="x"), 9, ())),),
            "for processes of the owner's host",
        ),
        ((codec.encode(Pull((Cut(REAL, 7, 3),))),), "bytes 7 to 3 of the 16000 of shard 'kept':'k'"),
        (
            (codec.encode(Pull((Cut(WantedShard("a", "k", 1 << 40, 0), 0, MAX_PULL_BYTES + 1),))),),
            "67108865 bytes are asked for in one reply",
        ),
        (
            (
                msgspec.msgpack.encode(
                    {"protocol": PROTOCOL_VERSION + 1, "seq": 1, "body": {"type": "pull", "cuts": []}}
                ),
            ),
            "the peer speaks protocol",
        ),
    ],
)
def test_what_is_no_request_gets_an_error_that_says_why(
    held: tuple[Store, Entry, Peer], frames: tuple[bytes, ...], text: str
) -> None:
    store, _, peer = held
    reply = peer.ask(*frames)
    assert isinstance(reply, Failed) and text in reply.error.message, reply
    assert (reply.error.side, reply.error.replica) == ("owner", store.owner.id)
    assert isinstance(peer.ask(codec.encode(EndLeases("x", ()))), Done)


class Bomb:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with runtime(monkeypatch), Store(budget_bytes=MIB) as store:
        bomb = pickle.dumps(Bomb(tmp_path / "executed"))
        peer = Peer(store.owner.address)
        assert isinstance(peer.ask(bomb), Failed)
        assert isinstance(peer.ask(codec.encode(Pull(())), bomb), Failed)
        # As values they are bytes like any others, stored and given back unread.
        (entry,) = store.put("t", {"k": [bomb]})
        assert fetched([entry], store.owner)[entry.shard].values == [bomb]
        assert not (tmp_path / "executed").exists()
        peer.close()


def test_a_frame_that_is_too_large_costs_its_sender_the_connection_and_nobody_else(
    held: tuple[Store, Entry, Peer],
) -> None:
    store, entry, _ = held
    with zmq.Context() as context, context.socket(zmq.DEALER) as greedy:
        greedy.linger = 0
        greedy.connect(store.owner.address)
        greedy.send_multipart([b"", bytes(129 << 20)])
        assert not greedy.poll(300)
    assert_serves(store, entry)


def test_a_clear_whose_reply_was_lost_is_answered_again_and_applied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with runtime(monkeypatch), Store(budget_bytes=MIB) as store:
        store.put("t", {"k": [1]})
        peer = Peer(store.owner.address)
        first = peer.ask(codec.encode(ClearTasks("s", 7, ("t", "x"))))
        store.put("t", {"k": [2]})
        assert first == peer.ask(codec.encode(ClearTasks("s", 7, ("t", "x")))) == TasksCleared(("x",))
        assert store.stats().tasks == 1
        peer.close()


def test_a_lease_that_was_given_up_does_not_begin_with_a_late_copy_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with runtime(monkeypatch), Store(budget_bytes=MIB) as store:
        (entry,) = store.put("t", {"k": KEPT})
        lease = codec.encode(Lease(HERE, 3, (WantedShard("t", "k", entry.nbytes, entry.digest),) * 2))
        peer = Peer(store.owner.address)
        for _ in range(2):  # the same lease, not two
            assert len(peer.ask(lease).places) == 2
        assert store.tasks["t"]["k"].readers == 2
        assert peer.ask(codec.encode(EndLeases("stranger", (LeaseEnd(3),)))) == Done()
        late = peer.ask(lease)
        assert isinstance(late, Failed) and "lease 3 has ended" in late.error.message
        assert store.tasks["t"]["k"].readers == 0
        other = Lease(msgspec.structs.replace(HERE, pid=1), 4, ())
        assert "belongs to another process" in peer.ask(codec.encode(other)).error.message
        peer.close()


def test_a_lease_whose_reply_is_late_is_what_it_was_when_its_request_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with runtime(monkeypatch), Store(budget_bytes=MIB) as store:
        entries = [store.put(task, {"k": KEPT})[0] for task in ("t", "u")]
        lease = codec.encode(
            Lease(HERE, 3, tuple(WantedShard(e.shard.task_id, "k", e.nbytes, e.digest) for e in entries))
        )
        peer = Peer(store.owner.address)
        first = peer.ask(lease)  # on its way to the consumer, which will read at these places
        store.clear(["t"])
        second = peer.ask(lease)
        assert second == first and len(first.places) == 2
        assert store.stats().leased_bytes == KEPT.nbytes, "nobody has given it back"
        peer.ask(codec.encode(EndLeases("stranger", (LeaseEnd(3, (0,)),))))
        assert store.stats().leased_bytes == 0
        assert isinstance(peer.ask(lease), Failed)
        peer.close()


# --- owners that answer wrongly ------------------------------------------------------------------------------------------


class Liar:
    """An owner that gives one reply to whatever it is asked."""

    def __init__(self, directory: Path, reply: Any, payload: bytes | None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self.address = f"ipc://{directory}/liar"
        self._socket.bind(self.address)
        self._reply, self._payload = reply, payload
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(20):
                seq = codec.decode(self._socket.recv_multipart()[0]).seq
                message = self._reply if isinstance(self._reply, bytes) else codec.encode(self._reply, seq)
                self._socket.send_multipart([message] if self._payload is None else [message, self._payload])
        self._socket.close(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LONG_S)
        self._context.term()


@pytest.mark.parametrize(
    ("reply", "payload", "is_far", "text"),
    [
        (Pulled(), b"short", True, "5 bytes came where 16000 were asked for"),
        (Pulled(), None, True, "was answered with Pulled, without bytes"),
        (Pulled(), bytes(16_000), True, "have the digest"),
        (Pulled((RefusedShard(5, "cleared"),)), b"", True, "refuses shard 5 of 1"),
        (Done(), None, True, "was answered with Done"),
        (b"garbage", None, True, "not a message of this protocol"),
        (pickle.dumps([1]), None, True, "not a message of this protocol"),
        (Leased((), ()), None, False, "leased 0 shards, not 1"),
        (Leased((), (Place(3, 0),)), None, False, "outside of the segments that it named"),
        (Leased((b"x",), (Place(0, 0),)), None, False, "not a SegmentAddress"),
        (Done(), None, False, "answered a lease with Done"),
        (Done(), b"x", False, "a Done takes no payload frame"),
    ],
)
def test_an_owner_that_answers_wrongly_is_a_typed_error_for_its_shards(
    held: tuple[Store, Entry, Peer], tmp_path: Path, reply: Any, payload: bytes | None, is_far: bool, text: str
) -> None:
    _, entry, _ = held
    liar = Liar(tmp_path, reply, payload)
    try:
        boot = "elsewhere" if is_far else boot_id()
        owner = Owner(entry.owner, liar.address, boot, os.getpid(), start_ticks())
        with pytest.raises(FetchFailed, match="1 of 1 shards") as raised:
            fetched([entry], owner)
        assert text in str(raised.value)
    finally:
        liar.close()


def test_an_entry_of_more_bytes_than_the_process_may_take_fails_at_once(held: tuple[Store, Entry, Peer]) -> None:
    """Be it for `ulimit -v`, or for a container's limit, whatever the host has: an allocation would fail, or end the process."""
    store, entry, _ = held
    large = msgspec.structs.replace(entry, shard=ShardId("large", "k"), item_shape=(1 << 26,), nbytes=1 << 30)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 29), before[1]))
    try:
        with pytest.raises(FetchFailed, match="1073741824 bytes by its entry"):
            fetched([large], elsewhere(store.owner))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("is_far", [False, True])
def test_an_entry_that_claims_more_than_any_memory_fails_at_once_and_costs_the_others_nothing(
    held: tuple[Store, Entry, Peer], is_far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, entry, _ = held
    huge = msgspec.structs.replace(entry, shard=ShardId("huge", "k"), item_shape=(1 << 40,), nbytes=1 << 44)
    owner = elsewhere(store.owner) if is_far else store.owner
    have: dict[ShardId, LocalPart] = {}
    with counted_requests(monkeypatch) as sent, pytest.raises(FetchFailed, match="1 of 2 shards") as raised:
        fetched([huge, entry], owner, have=have)
    (failure,) = raised.value.failures
    assert (failure.task_id, failure.owner) == ("huge", owner.id) and torch.equal(have[entry.shard].tensor, KEPT)
    assert ("17592186044416 bytes by its entry" if is_far else "does not have it") in str(failure.error)
    assert sent == ["Pull" if is_far else "Lease"]


def test_what_one_owner_s_rows_will_fill_is_not_free_for_those_of_another(held: tuple[Store, Entry, Peer]) -> None:
    store, entry, _ = held
    items = free_host_bytes() * 6 // 10 // 16
    large = [
        msgspec.structs.replace(entry, shard=ShardId(name, "k"), item_shape=(items,), nbytes=16 * items, owner=name)
        for name in ("a", "b")
    ]
    with pytest.raises(FetchFailed) as raised:
        fetched(large, *(msgspec.structs.replace(elsewhere(store.owner), id=name) for name in ("a", "b")))
    failures = {failure.owner: str(failure.error) for failure in raised.value.failures}
    assert "does not have it" in failures["a"] and f"{16 * items} bytes by its entry" in failures["b"]


def test_what_one_fetch_will_fill_is_free_for_no_other_and_for_no_put_until_it_ends(
    held: tuple[Store, Entry, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, entry, _ = held
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 100 * MIB)

    def why(mib: int, owner: Owner) -> str:
        nbytes = mib * MIB
        large = msgspec.structs.replace(
            entry, shard=ShardId("a", "k"), item_shape=(nbytes // 16,), nbytes=nbytes, owner=owner.id
        )
        with pytest.raises(FetchFailed) as raised:
            fetched([large], owner, timeout_s=LONG_S)
        return str(raised.value)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        silent = Owner("silent", f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        fetch = threading.Thread(target=why, args=(60, silent), daemon=True)
        fetch.start()
        asker, *_ = socket.recv_multipart()
        rows = {"k": torch.ones(1, 40 * MIB, dtype=torch.uint8)}
        assert "41943040 bytes of memory are left for it here" in why(60, elsewhere(store.owner))
        assert "does not have it" in why(30, elsewhere(store.owner))
        with Store(budget_bytes=64 * MIB) as other:
            with pytest.raises(TransportUnavailable, match="rows of 72 MiB does not fit: 40 MiB are free"):
                other.put("t", rows)
            socket.send_multipart([asker, b"garbage"])
            fetch.join(LONG_S)
            other.put("t", rows)
    assert "does not have it" in why(60, elsewhere(store.owner))
