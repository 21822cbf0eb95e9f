"""What a rollout pool does with peers and users that send what they should not: a typed error, and it goes on."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from inference_plugin.net.channel import Channel
from inference_plugin.wire import codec
from inference_plugin.wire.errors import (
    ArgumentError,
    AuthError,
    BatchError,
    ConfigError,
    PoolClosed,
    ProtocolError,
    SyncTimeout,
    WeightwireError,
)
from inference_plugin.wire.messages import (
    PROTOCOL_VERSION,
    Announce,
    Announced,
    Body,
    Describe,
    Done,
    Failed,
    LeavePool,
    Take,
    Work,
)
from inference_plugin.wire.messages.rollout import MAX_TASK_BYTES, Finished, TaskRef
from tests.batch.rollout_support import LocalWorker, generate
from tests.support.rig import eventually, runtime
from trainer_adapters.batch.records import Entry, Kind, Owner, ShardId
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import RolloutWorker
from trainer_adapters.batch.store import Store

LONG_S = 60.0
OWNER = Owner("store-by-hand", "ipc:///nowhere")
WORKER = "rollout-by-hand"


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def pool(directory: Path) -> Iterator[RolloutPool]:
    with RolloutPool(listen="tcp://127.0.0.1:*", silence_s=3600.0) as one:
        yield one


@pytest.fixture
def asking(pool: RolloutPool) -> Iterator[Channel]:
    with Channel(pool.addresses[1]) as channel:
        yield channel
        channel.request(LeavePool(WORKER, pool.name), Done, timeout_s=LONG_S)  # or the pool's close waits for it


def take(to: RolloutPool, seq: int = 1, **fields: Any) -> Take:
    given = {
        "job": "default", "worker": WORKER, "pool": to.name, "seq": seq, "received": seq - 1,
        "owner": msgspec.msgpack.encode(OWNER), "slots": 4,
    }  # fmt: skip
    return Take(**given | fields)


def entry(task_id: str, key: str = "x", owner: str = OWNER.id, rows: int = 1) -> Entry:
    return Entry(ShardId(task_id, key), rows, Kind.DENSE, "uint8", (), (), rows, 1, None, owner)


def announce(pool: RolloutPool, ref: TaskRef, entries: Any, **fields: Any) -> Announce:
    encoded = entries if isinstance(entries, bytes) else msgspec.msgpack.encode(entries)
    return Announce(WORKER, pool.name, (Finished(ref, encoded, **fields),))


def test_another_jobs_worker_is_refused_with_a_hint(pool: RolloutPool, asking: Channel) -> None:
    with pytest.raises(AuthError, match="is of job 'other', this pool of 'default'") as raised:
        asking.request(take(pool, job="other"), Work, timeout_s=LONG_S)
    assert "WEIGHTWIRE_JOB" in raised.value.hint and raised.value.side == "rollout pool"
    assert pool.stats().workers == 0


def test_a_worker_that_is_refused_says_why_and_serves_its_own_pool(
    pool: RolloutPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_JOB", "other")
    with LocalWorker(pool=pool.addresses[1], silence_s=0.3):
        eventually(lambda: "is of job 'other', this pool of 'default'" in caplog.text, "the reason")
        assert pool.stats().workers == 0
    with LocalWorker(), RolloutPool() as own:
        assert own.submit("a", {}).result(LONG_S).task_id == "a"


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage"], [b""], [b"\x00" * 100], [os.urandom(4096)], [b"a", b"b", b"c"],
        [msgspec.msgpack.encode({"protocol": PROTOCOL_VERSION, "seq": 1, "body": {"type": "take"}})],
        [codec.encode(Describe(), 1), b"a payload that nobody asked for"],
        [pickle.dumps(os.system)],
    ],
    ids=["text", "empty", "zeros", "random", "three frames", "no fields", "payload", "pickle"],
)  # fmt: skip
def test_garbage_gets_an_error_and_the_pool_goes_on(pool: RolloutPool, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(pool.addresses[1])
        raw.send_multipart([b"", *frames])
        assert raw.poll(60_000)
        reply = codec.decode(raw.recv_multipart()[-1]).body
        assert isinstance(reply, Failed) and reply.error.kind == "ProtocolError" and reply.error.side == "rollout pool"
    with LocalWorker():
        assert pool.submit("a", {}).result(LONG_S).task_id == "a"


@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 0}, {"slots": 1 << 20}, {"seq": -1}, {"worker": "../../etc"}, {"worker": ""}, {"owner": b"\x00" * 5000},
        {"pool": "x" * 1000}, {"running": (TaskRef("", 1),)}, {"running": (TaskRef("x" * 600, 1),)},
        {"running": (TaskRef("x", -1),)}, {"job": "j" * 1000},
    ],
)  # fmt: skip
def test_fields_beyond_their_limits_are_refused_by_name(
    pool: RolloutPool, asking: Channel, fields: dict[str, Any]
) -> None:
    name = next(iter(fields))
    with pytest.raises(ProtocolError, match=rf"\$\.body\.{name}"):
        asking.request(take(pool, **fields), Work, timeout_s=LONG_S)
    assert pool.stats().workers == 0


def test_an_owner_that_is_none_and_messages_for_others_are_refused(pool: RolloutPool, asking: Channel) -> None:
    for owner in (b"", b"garbage", pickle.dumps(OWNER)):
        with pytest.raises(ProtocolError, match="not a Owner"):
            asking.request(take(pool, owner=owner), Work, timeout_s=LONG_S)
    for body in (Describe(), Done(), Work(pool.name, 1), Announced()):
        with pytest.raises(ProtocolError, match=f"a rollout pool takes no {type(body).__name__}"):
            asking.request(body, Work, timeout_s=LONG_S)


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        (b"garbage", "not a tuple"), (b"", "not a tuple"), ((), "no rows"), ([5], "not a tuple"),
        ((entry("another"),), "shard 'another':'x'"), ((entry("a", owner="another"),), "of owner 'another'"),
        ((entry("a"), entry("a")), "keys that disagree"), ((entry("a"), entry("a", "y", rows=2)), "keys that disagree"),
    ],
)  # fmt: skip
def test_metadata_that_is_wrong_fails_its_task_with_a_typed_error(
    pool: RolloutPool, asking: Channel, entries: Any, match: str
) -> None:
    future = pool.submit("a", {})
    (task,) = asking.request(take(pool), Work, timeout_s=LONG_S).tasks
    reply = asking.request(announce(pool, TaskRef("a", task.attempt), entries), Announced, timeout_s=LONG_S)
    assert reply == Announced((TaskRef("a", task.attempt),))  # the worker clears the rows that it may hold
    with pytest.raises(ProtocolError, match=match):
        future.result(LONG_S)
    assert pool.stats().ready == 0 and pool.stats().failed == 1


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_executed(pool: RolloutPool, asking: Channel, directory: Path) -> None:
    bomb = pickle.dumps(Bomb(directory / "boom"))
    future = pool.submit("a", {})
    (task,) = asking.request(take(pool), Work, timeout_s=LONG_S).tasks
    asking.request(announce(pool, TaskRef("a", task.attempt), bomb), Announced, timeout_s=LONG_S)
    with pytest.raises(ProtocolError):
        future.result(LONG_S)
    with pytest.raises(ProtocolError):
        asking.request(take(pool, 2, owner=bomb), Work, timeout_s=LONG_S)
    assert not (directory / "boom").exists()
    with pytest.raises(BatchError, match="a Bomb is not a plain value"):
        pool.submit("b", Bomb(directory / "boom"))
    pickle.loads(bomb)  # noqa: S301 -- that it would have worked
    assert (directory / "boom").exists()


def test_announcements_of_strangers_are_dropped_and_counted(
    pool: RolloutPool, asking: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    future = pool.submit("a", {})
    strange = TaskRef("a", 1), TaskRef("b", 1)
    for ref in strange:  # nobody has taken anything
        reply = asking.request(announce(pool, ref, (entry(ref.task_id),)), Announced, timeout_s=LONG_S)
        assert reply == Announced((ref,))
    assert pool.stats().late == 1 and pool.stats().unknown == 1 and not future.done()
    assert "an announcement of an unknown attempt at 'b' is dropped" in caplog.text
    (task,) = asking.request(take(pool), Work, timeout_s=LONG_S).tasks
    other = Announce("rollout-other", pool.name, (Finished(TaskRef("a", task.attempt), b""),))
    assert asking.request(other, Announced, timeout_s=LONG_S).dropped == (TaskRef("a", task.attempt),)
    assert not future.done() and pool.stats().late == 2
    assert asking.request(LeavePool("nobody", pool.name), Done, timeout_s=LONG_S) == Done()


def test_a_flood_of_requests_for_work_parks_one(pool: RolloutPool) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.connect(pool.addresses[1])
        for seq in range(1, 501):
            raw.send_multipart([b"", codec.encode(take(pool, seq), seq)])
        eventually(lambda: pool.stats().takes == 500, "all requests")
        pool.submit("a", {})
        assert raw.poll(60_000)
        reply = codec.decode(raw.recv_multipart()[-1])
        assert reply.seq == 500 and [task.task_id for task in reply.body.tasks] == ["a"]  # type: ignore[union-attr]
        assert not raw.poll(50) and pool.stats().workers == 1
        raw.send_multipart([b"", codec.encode(LeavePool(WORKER, pool.name), 501)])
        assert raw.poll(60_000)


def test_what_a_user_may_not_submit_is_refused_at_once_and_names_its_place(pool: RolloutPool) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    bad: list[tuple[Any, str]] = [
        (torch.zeros(3), "a Tensor is not a plain value"),
        ({"prompt": {"ids": torch.zeros(3)}}, r"\['prompt'\]\['ids'\]: a Tensor is not a plain value"),
        ({1.5: 2}, "keys are str or int"),
        (1 << 70, "64 bits"),
        ("\ud800", "the payload of task 'a'"),
        (cyclic, "deeper than"),
        (object(), "a object is not a plain value"),
        (b"x" * (MAX_TASK_BYTES + 1), f"allowed are {MAX_TASK_BYTES}"),
    ]
    for payload, match in bad:
        with pytest.raises(BatchError, match=match):
            pool.submit("a", payload)
    for task_id in ("", "x" * 513, "\ud800", [1]):
        for call in (lambda: pool.submit(task_id, {}), lambda: pool.cancel(task_id)):  # noqa: B023
            with pytest.raises(BatchError):
                call()
    for deadline_s in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="deadline_s"):
            pool.submit("a", {}, deadline_s=deadline_s)
    assert pool.stats().submitted == 0
    future = pool.submit("a", b"x" * (MAX_TASK_BYTES - 100))  # one that is just allowed
    with pytest.raises(BatchError, match="'a' is pending already"):
        pool.submit("a", {})
    with pytest.raises(ArgumentError, match="callback=5 is a int"):
        future.add_done_callback(5)  # type: ignore[arg-type]
    assert future.cancel()


def test_settings_that_are_invalid_are_refused(pool: RolloutPool, directory: Path) -> None:
    with pytest.raises(ConfigError, match="on_lost='retry'"):
        RolloutPool(on_lost="retry")  # type: ignore[arg-type]
    with pytest.raises(AuthError, match="without authentication"):
        RolloutPool(listen="tcp://0.0.0.0:*")
    with pytest.raises(ConfigError, match="n=0"):
        pool.next_batch(0, timeout_s=1)
    with pytest.raises(ConfigError, match="max_staleness=-1"):
        pool.next_batch(1, timeout_s=1, max_staleness=-1)
    with pytest.raises(ConfigError, match="version=-1"):
        pool.set_version(-1)
    with pytest.raises(SyncTimeout, match="0 workers are connected"):
        pool.next_batch(1, timeout_s=0)
    with pytest.raises(ConfigError, match="slots=0"):
        RolloutWorker(generate, slots=0, store=None)  # type: ignore[arg-type]
    threads = set(threading.enumerate())
    with Store(budget_bytes=1 << 20) as store, pytest.raises(ConfigError, match="put_timeout_s=-1"):
        RolloutWorker(generate, slots=1, store=store, put_timeout_s=-1)
    assert set(threading.enumerate()) <= threads
    assert [path.name for path in directory.glob("default/pool-*")] == [f"{pool.name}.p"]
    assert issubclass(PoolClosed, WeightwireError) and isinstance(Done(), Body)
