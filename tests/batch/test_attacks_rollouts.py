"""Attacks on the way of a rollout: whatever a function, a callback or a user does, every future ends and the others go on."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import BatchError, ConfigError, PoolClosed, WeightwireError
from inference_plugin.wire.messages import Announce, Announced, Done, LeavePool, Take, Work
from inference_plugin.wire.messages.rollout import Finished, TaskRef
from tests.batch.interrupts import answers, interrupted
from tests.batch.rollout_support import LocalWorker
from tests.support.rig import eventually, runtime
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.rollouts.worker import Generated
from trainer_adapters.batch.store import Store

LONG_S = 60.0


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def hostile(task_id: str, payload: str) -> Any:
    rows = {key: torch.zeros(2) for key in payload.split(",")} if payload.startswith("key") else {"a": torch.zeros(2)}
    match payload:
        case "no text":
            raise NoText
        case "surrogate in a tag":
            return Generated(rows, None, {"tag": "\ud800"})
        case "surrogate in a tag's name":
            return Generated(rows, None, {"\ud800": 1})
        case "exit":

            async def leave() -> None:
                raise SystemExit(3)

            began = asyncio.create_task(leave())
            await asyncio.wait([began])
            began.exception()
        case "stop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
    return rows


@pytest.mark.parametrize("payload", ["no text", "surrogate in a tag", "surrogate in a tag's name"])
def test_a_function_whose_failure_cant_be_told_as_it_is_fails_its_task_alone(directory: Path, payload: str) -> None:
    with RolloutPool() as pool, LocalWorker(hostile):
        bad, good = pool.submit("bad", payload), pool.submit("good", "")
        with pytest.raises(WeightwireError, match=r"text can't be made|surrogate"):
            bad.result(LONG_S)
        assert good.result(LONG_S).task_id == "good"


@pytest.mark.parametrize("payload", ["exit", "stop"])
def test_a_function_that_ends_the_workers_event_loop_ends_nothing(directory: Path, payload: str) -> None:
    with RolloutPool() as pool, LocalWorker(hostile):
        assert pool.submit("bad", payload).result(LONG_S).task_id == "bad"
        assert pool.submit("good", "").result(LONG_S).task_id == "good"


def test_a_user_who_interrupts_next_batch_loses_no_rollouts(directory: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        check_an_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def check_an_interrupt() -> None:
    with RolloutPool() as pool, LocalWorker(hostile):
        waits = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            waits.start()
            pool.next_batch(1, timeout_s=LONG_S)
        pool.submit("t", "")
        assert pool.next_batch(1, timeout_s=LONG_S).task_ids == ("t",)


def test_a_submit_that_the_user_interrupts_costs_no_other_task(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the worst moment: the pool has the task, and nobody its future. In a notebook the pool lives on."""
    with RolloutPool() as pool:
        machine = pool.machine
        take = machine.on

        def interrupted(event: Any, now_s: float) -> Any:
            take(event, now_s)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(machine, "on", interrupted)
            for task in ("cleared", "runs"):
                with pytest.raises(KeyboardInterrupt):
                    pool.submit(task, "")
        heard: list[str] = []
        pool.on_complete(lambda future: heard.append(future.task_id))
        assert pool.clear(["cleared"]).cleared == 1
        with LocalWorker(hostile):
            assert pool.submit("good", "").result(LONG_S).task_id == "good"
            assert set(pool.next_batch(2, timeout_s=LONG_S).task_ids) == {"good", "runs"}
        eventually(lambda: set(heard) == {"cleared", "runs", "good"}, "the callbacks")


def test_ctrl_c_at_any_point_of_a_call_leaves_the_pool_usable(directory: Path) -> None:
    with RolloutPool() as pool:
        version = 1
        while interrupted(functools.partial(pool.set_version, version), after=version):
            assert answers(pool.stats), "the lock stays taken"
            version += 1
        assert version > 5, "fewer calls than `set_version` makes"
        assert pool.stats().version == version


def test_a_wait_that_is_too_long_for_the_clock_loses_no_rollouts(directory: Path) -> None:
    with RolloutPool() as pool, LocalWorker(hostile):
        with pytest.raises(ConfigError, match="at most a year"):
            pool.next_batch(1, timeout_s=1e300)
        pool.submit("t", "")
        assert pool.next_batch(1, timeout_s=LONG_S).task_ids == ("t",)


def test_a_callback_that_exits_keeps_no_other_callback_from_its_turn(directory: Path) -> None:
    def leave(_: object) -> None:
        raise SystemExit(3)

    with RolloutPool() as pool, LocalWorker(hostile):
        heard: list[str] = []
        pool.on_complete(leave)
        future = pool.submit("t", "")
        future.add_done_callback(leave)
        future.add_done_callback(lambda each: heard.append("first"))
        future.result(LONG_S)
        eventually(lambda: heard == ["first"], "the callback behind the one that exits")


def test_a_callback_that_is_added_after_the_pool_closed_is_called(directory: Path) -> None:
    pool = RolloutPool()
    future = pool.submit("t", "")
    pool.close()

    async def ends() -> None:
        with pytest.raises(PoolClosed):
            await asyncio.wait_for(asyncio.wrap_future(future), LONG_S)

    asyncio.run(ends())


def test_rollouts_with_other_keys_are_never_put_side_by_side(directory: Path) -> None:
    with RolloutPool() as pool, LocalWorker(hostile):
        for task_id, keys in (("both", "key x,key y"), ("x", "key x"), ("y", "key y")):
            pool.submit(task_id, keys).result(LONG_S)
        with pytest.raises(BatchError, match="'x'"):
            pool.next_batch(3, timeout_s=LONG_S)
        assert pool.clear(["x", "y"]).cleared == 2  # the others are still there
        assert pool.next_batch(1, timeout_s=LONG_S).task_ids == ("both",)


def test_what_a_worker_tells_another_pool_changes_nothing(directory: Path) -> None:
    """A pool that takes the address of an earlier one finds that one's messages in the sockets, and numbers attempts anew."""
    with RolloutPool() as pool, Store(budget_bytes=1 << 20) as store, Channel(pool.addresses[0]) as channel:
        future = pool.submit("t", "")
        owner = msgspec.msgpack.encode(store.owner)
        take = Take("default", "rollout-1-1", "", 1, 0, owner, 1)
        known = channel.request(take, Work, timeout_s=LONG_S).pool
        take = msgspec.structs.replace(take, pool=known, seq=2)
        (task,) = channel.request(take, Work, timeout_s=LONG_S).tasks
        ref = TaskRef(task.task_id, task.attempt)
        finished = Finished(ref, msgspec.msgpack.encode(store.put("t", {"a": torch.zeros(2)})))
        answer = channel.request(Announce("rollout-1-1", "pool-0-0", (finished,)), Announced, timeout_s=LONG_S)
        assert answer.dropped == (ref,) and not future.done()
        channel.request(LeavePool("rollout-1-1", "pool-0-0"), Done, timeout_s=LONG_S)
        assert not future.done() and pool.stats().workers == 1
        answer = channel.request(Announce("rollout-1-1", known, (finished,)), Announced, timeout_s=LONG_S)
        assert answer.dropped == () and future.result(LONG_S).task_id == "t"
