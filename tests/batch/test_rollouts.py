"""Rollouts that report themselves, in real processes and on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, as_completed, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.net.addresses import local_pools
from inference_plugin.net.processes import has_ended
from inference_plugin.wire.errors import (
    BatchError,
    ConfigError,
    PeerLost,
    PoolClosed,
    RolloutFailed,
    StaleRollout,
    StoreFull,
    SyncTimeout,
    WeightwireError,
)
from inference_plugin.wire.messages import Announce, Announced, Take, Work
from tests.batch.rollout_support import LocalWorker, Proxy, RemoteWorker, generate, start
from tests.support.rig import eventually, kill, runtime
from trainer_adapters.batch.rollouts.futures import RolloutFuture
from trainer_adapters.batch.rollouts.pool import Rollout, RolloutPool
from trainer_adapters.batch.rollouts.worker import Generated

LONG_S = 60.0
FOREVER_S = 3600.0
"""A silence limit that no test reaches: what is noticed under it is noticed by something else."""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


@pytest.fixture
def pools(directory: Path) -> Iterator[Callable[..., RolloutPool]]:
    made: list[RolloutPool] = []

    def make(**options: Any) -> RolloutPool:
        made.append(RolloutPool(**options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("weightwire-rollout")], "no thread left"
    )


@pytest.fixture
def workers(directory: Path) -> Iterator[Callable[..., RemoteWorker]]:
    made: list[RemoteWorker] = []

    def make(**options: Any) -> RemoteWorker:
        made.append(RemoteWorker(directory, **options))
        return made[-1]

    yield make
    for worker in made:
        if not has_ended(worker.pid):
            worker.kill()


def test_futures_callbacks_and_asyncio_all_learn_of_a_task_and_nobody_polls(pools: Any, workers: Any) -> None:
    pool = pools(silence_s=FOREVER_S)
    heard: list[str] = []
    pool.on_complete(lambda future: heard.append(future.task_id))
    worker = workers()
    future = pool.submit("one", {"number": 7})
    rollout = future.result(LONG_S)
    assert rollout.task_id == "one" and rollout.tags == {"pid": worker.pid}
    assert {entry.shard.key: (entry.rows, entry.dtype) for entry in rollout.entries} == {
        "ids": (2, "int64"),
        "text": (2, ""),
    }
    called: list[Any] = []
    future.add_done_callback(lambda done: called.append((done, threading.current_thread().name)))
    eventually(lambda: called, "the future's callback")
    assert called == [(future, "weightwire-rollout-futures")]

    async def several() -> list[str]:
        found = await asyncio.gather(*(pool.asubmit(f"async-{i}", {}) for i in range(20)))
        found.append(await asyncio.wrap_future(pool.submit("wrapped", {})))
        return [one.task_id for one in found]

    assert asyncio.run(several()) == [*(f"async-{i}" for i in range(20)), "wrapped"]
    futures = [pool.submit(f"many-{i}", {}) for i in range(50)]
    assert {done.result().task_id for done in as_completed(futures, LONG_S)} == {f"many-{i}" for i in range(50)}
    eventually(lambda: len(heard) == 72, "every callback")
    assert sorted(heard) == sorted(
        ["one", "wrapped", *(f"async-{i}" for i in range(20)), *(f"many-{i}" for i in range(50))]
    )

    def asks_nobody() -> bool:
        before = pool.stats()
        time.sleep(0.3)
        return (pool.stats().takes, pool.stats().announces) == (before.takes, before.announces)

    eventually(asks_nobody, "that there is nothing to do")
    stats = pool.stats()
    assert stats.completed == stats.submitted == 72 and stats.announces <= 72
    assert stats.received_bytes > 72 * 60 and stats.sent_bytes > 72 * 10  # what was announced and what was handed out
    assert pool.clear(heard).cleared == 72
    eventually(worker.is_empty, "an empty store")


def test_an_announcement_that_is_lost_or_whose_answer_is_lost_is_delivered_again_and_a_double_one_is_harmless(
    pools: Any, directory: Path
) -> None:
    pool = pools(listen="tcp://127.0.0.1:*", silence_s=1.5)
    proxy = Proxy(pool.addresses[1])
    lose = {Announce: 1, Announced: 1, Work: 0, Take: 0}

    def swallows(body: Any) -> bool:
        lost = lose.get(type(body), 0) > 0
        lose[type(body)] = lose.get(type(body), 0) - 1
        return lost

    with LocalWorker(pool=proxy.address) as local:
        eventually(lambda: pool.stats().workers == 1, "the worker")
        proxy.swallows = swallows
        assert pool.submit("a", {}).result(LONG_S).task_id == "a"
        eventually(lambda: pool.stats().duplicates == 1, "the announcement, again")
        lose[Work] = 2
        proxy.repeats = lambda body: isinstance(body, Announce | Announced)
        futures = [pool.submit(f"b{i}", {}) for i in range(6)]
        assert [future.result(LONG_S).task_id for future in futures] == [f"b{i}" for i in range(6)]
        stats = pool.stats()
        assert stats.completed == 7 and stats.handed_again >= 1 and stats.late == stats.unknown == 0
        assert local.store.stats().tasks == 7  # nothing was cleared by mistake
        assert pool.clear(["a", *(f"b{i}" for i in range(6))]).cleared == 7
        eventually(lambda: local.store.stats().tasks == 0, "an empty store")
    proxy.close()


def test_a_pool_that_stands_still_for_longer_than_the_silence_limit_loses_nothing(
    directory: Path, workers: Any
) -> None:
    path = directory / "pool"
    gate = directory / "gate"
    worker = workers()
    began = [directory / f"began{i}" for i in range(4)]
    payloads = {f"t{i}": {"gate": str(gate), "began": str(began[i])} for i in range(4)}
    pid = start("run_pool", path=str(path), payloads=payloads, silence_s=6.0, take=0)
    eventually(lambda: all(path.exists() for path in began), "the functions")
    os.kill(pid, signal.SIGSTOP)
    gate.touch()
    eventually(lambda: worker.stats["tasks"] == 4, "four tasks in the store")
    time.sleep(8)  # longer than the silence that it allows
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: path.exists() and len(path.read_text().split("done")) == 5, "all four")
    assert worker.stats["tasks"] == 4
    kill(pid)
    eventually(worker.is_empty, "an empty store")


def test_a_task_that_raises_fails_its_future_with_the_text_and_leaves_nothing(pools: Any, directory: Path) -> None:
    async def function(task_id: str, payload: Any) -> Any:
        if payload == "full":
            return {"x": torch.zeros(1 << 24, dtype=torch.uint8)[None]}
        if payload == "cancels":
            raise asyncio.CancelledError
        if isinstance(payload, str):
            return RESULTS[payload]
        return await generate(task_id, payload)

    pool = pools()
    with LocalWorker(function) as local:
        with pytest.raises(RolloutFailed, match=r"task 'a' failed: ValueError: the prompt is bad") as raised:
            pool.submit("a", {"error": "the prompt is bad"}).result(LONG_S)
        assert raised.value.side == "rollout worker" and "submitted again" in raised.value.hint
        with pytest.raises(RolloutFailed, match="SystemExit: 3"):
            pool.submit("b", {"exit": True}).result(LONG_S)
        with pytest.raises(RolloutFailed, match="CancelledError"):
            pool.submit("c", "cancels").result(LONG_S)
        with pytest.raises(StoreFull):
            pool.submit("d", "full").result(LONG_S)
        for name, (match, _) in BAD.items():
            with pytest.raises(BatchError, match=match):
                pool.submit(name, name).result(LONG_S)
        assert pool.submit("a", {}).result(LONG_S).task_id == "a"  # it failed, so the id may be used again
        assert local.store.stats().tasks == 1
        assert pool.stats().failed == 4 + len(BAD)


BAD: dict[str, tuple[str, Any]] = {
    "a number": ("returned a int", 5),
    "no rows": ("no keys|no rows", {}),
    "uneven": ("different numbers of rows", {"x": [1], "y": [1, 2]}),
    "no version": ("give a VersionSpan", Generated({"x": [1]}, 3)),  # type: ignore[arg-type]
    "a tensor tag": ("tag 't' is a Tensor", Generated({"x": [1]}, None, {"t": torch.zeros(1)})),  # type: ignore[dict-item]
    "a long tag": ("5000 characters", Generated({"x": [1]}, None, {"t": "x" * 5000})),
    "many tags": ("65 tags", Generated({"x": [1]}, None, {str(i): i for i in range(65)})),
}
RESULTS = {name: result for name, (_, result) in BAD.items()}


def test_a_forked_child_can_neither_use_nor_close_its_parents_pool_and_worker(pools: Any, directory: Path) -> None:
    """No thread of it would end a future; it gave out rollouts that its parent gave out too, and removed the pool's socket."""
    pool = pools()
    with LocalWorker() as local:
        pool.submit("parent's", {}).result(LONG_S)
        child = os.fork()
        if not child:
            refused = 0
            for use in (
                lambda: pool.submit("child's", {}),
                lambda: pool.next_batch(1, 1),
                lambda: pool.cancel("parent's"),
                lambda: pool.clear(["parent's"]),
                lambda: pool.set_version(1),
                lambda: pool.on_complete(print),
            ):
                with contextlib.suppress(BatchError):
                    use()
                    break
                refused += 1
            local.worker.close()
            pool.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
        assert list(local_pools()), "workers that start now find the pool"
        assert pool.next_batch(1, LONG_S).row_tasks() == ["parent's"] * 2
        pool.submit("another", {}).result(LONG_S)


def test_a_killed_workers_tasks_fail_at_once_with_peer_lost(pools: Any, workers: Any, directory: Path) -> None:
    pool = pools(silence_s=FOREVER_S)
    dropped: list[Any] = []
    pool.on_complete(lambda future: dropped.append((future.task_id, type(future.exception()))))
    worker = workers()
    assert pool.submit("done", {}).result(LONG_S)
    began = directory / "began"
    running = pool.submit("running", {"began": str(began), "gate": str(directory / "never")})
    eventually(began.exists, "the function")
    worker.kill()
    with pytest.raises(PeerLost, match="has ended"):
        running.result(LONG_S)
    eventually(lambda: len(dropped) == 3, "the rollout that is lost")  # it had completed; its rows are gone
    assert dropped[0] == ("done", type(None)) and set(dropped[1:]) == {("running", PeerLost), ("done", PeerLost)}
    assert pool.stats().workers == pool.stats().ready == 0 and pool.stats().lost == 2


def test_a_killed_workers_tasks_run_elsewhere_and_complete_exactly_once(
    pools: Any, workers: Any, directory: Path
) -> None:
    pool = pools(silence_s=FOREVER_S, on_lost="rerun")
    heard: list[str] = []
    pool.on_complete(lambda future: heard.append(future.task_id))
    first = workers(slots=3)
    eventually(lambda: pool.stats().workers == 1, "the worker")
    gate = directory / "gate"
    futures = [pool.submit(f"t{i}", {"began": f"{directory}/began{i}", "gate": str(gate)}) for i in range(3)]
    eventually(lambda: all((directory / f"began{i}").exists() for i in range(3)), "the functions")
    second = workers(slots=3)
    eventually(lambda: pool.stats().workers == 2, "the other worker")
    first.kill()
    gate.touch()
    assert [future.result(LONG_S).tags["pid"] for future in futures] == [second.pid] * 3
    eventually(lambda: len(heard) == 3, "every callback")
    assert sorted(heard) == ["t0", "t1", "t2"] and pool.stats().reruns == 3 and pool.stats().workers == 1


def test_a_worker_that_stands_still_is_lost_and_what_it_announces_later_is_ignored_and_cleared(
    pools: Any, workers: Any, directory: Path
) -> None:
    pool = pools(silence_s=5.0)
    worker = workers()
    assert pool.submit("done", {}).result(LONG_S)
    began, gate = directory / "began", directory / "gate"
    future = pool.submit("late", {"began": str(began), "gate": str(gate)})
    eventually(began.exists, "the function")
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(PeerLost, match="silent for 5 s"):
        future.result(LONG_S)
    assert pool.stats().workers == 0
    gate.touch()
    os.kill(worker.pid, signal.SIGCONT)
    eventually(lambda: pool.stats().workers == 1, "the worker, again")
    eventually(worker.is_empty, "an empty store")
    assert pool.submit("next", {}).result(LONG_S).tags["pid"] == worker.pid
    assert pool.stats().completed == 2


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_cancelled_and_a_late_task_end_at_once_and_leave_nothing_at_the_worker(
    pools: Any, directory: Path, stubborn: bool
) -> None:
    pool = pools()
    gate = directory / "gate"
    with LocalWorker(slots=2) as local:
        eventually(lambda: pool.stats().workers == 1, "the worker")
        payload = {"gate": str(gate), "stubborn": stubborn}
        cancelled = pool.submit("cancelled", payload | {"began": f"{directory}/began"})
        late = pool.submit("late", payload, deadline_s=2)  # it takes a slot before
        queued = pool.submit("queued", {})
        eventually((directory / "began").exists, "the function")
        assert cancelled.cancel() and cancelled.cancelled() and not pool.cancel("cancelled")
        with pytest.raises(CancelledError):
            cancelled.result(0)
        with pytest.raises(SyncTimeout, match="'late' did not finish by its deadline"):
            late.result(LONG_S)
        if stubborn:
            assert not queued.done()  # the function holds its slot for as long as it runs
            gate.touch()
        assert queued.result(LONG_S).task_id == "queued"
        eventually(lambda: local.store.stats().tasks == 1, "nothing but the third task")
        assert not cancelled.cancel() or cancelled.cancelled()
        assert not queued.cancel() and pool.stats().cancelled == pool.stats().timed_out == 1


def test_cancelling_what_waits_in_asyncio_cancels_the_task(pools: Any, directory: Path) -> None:
    pool = pools()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.asubmit("a", {"gate": str(directory / "never")}), 0.05)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(pool.submit("b", {})), 0.05)

    asyncio.run(give_up())
    abandoned = pool.asubmit("c", {})

    async def abandon() -> None:  # as the end of a loop does with what still waits
        abandoned.send(None)
        abandoned.close()

    asyncio.run(abandon())
    assert pool.stats().cancelled == 3 and pool.stats().queued == 0


def test_the_future_of_a_task_that_ended_cancels_no_other_task_of_its_id(pools: Any) -> None:
    pool = pools()
    earlier = pool.submit("t", {})
    assert earlier.cancel()
    again = pool.submit("t", {})
    assert earlier.cancel()  # it is cancelled already
    assert not again.done() and pool.stats().queued == 1
    assert again.cancel() and pool.stats().queued == 0


def test_close_fails_what_is_pending_stops_the_workers_and_may_be_called_twice(pools: Any, directory: Path) -> None:
    pool = pools()
    with LocalWorker(slots=1) as local:
        assert pool.submit("ready", {}).result(LONG_S)
        began = directory / "began"
        running = pool.submit("running", {"began": str(began), "gate": str(directory / "never")})
        queued = pool.submit("queued", {})
        eventually(began.exists, "the function")
        failures: list[BaseException] = []

        def take() -> None:
            try:
                pool.next_batch(9, timeout_s=LONG_S)
            except WeightwireError as error:
                failures.append(error)

        waiting = threading.Thread(target=take)
        waiting.start()
        eventually(lambda: pool.machine.waiters, "a waiting user")
        pool.close()
        pool.close()
        waiting.join(LONG_S)
        assert [type(error) for error in failures] == [PoolClosed]
        for future in (running, queued):
            with pytest.raises(PoolClosed, match="was closed before the task had finished"):
                future.result(0)
        with pytest.raises(PoolClosed):
            pool.submit("more", {})
        with pytest.raises(PoolClosed):
            pool.next_batch(1, timeout_s=LONG_S)
        assert local.store.stats().tasks == 0  # the workers have stopped when close returns
        again = pools()  # and serve the next pool of the same process
        assert again.submit("ready", {}).result(LONG_S).task_id == "ready"


@pytest.mark.parametrize("taken", [0, 2])
def test_a_killed_pools_rows_are_cleared_and_the_next_pool_is_served(
    pools: Any, workers: Any, directory: Path, taken: int
) -> None:
    worker = workers()
    path = directory / "pool"
    payloads: dict[str, Any] = {"a": {}, "b": {}, "c": {"gate": str(directory / "never")}}
    pid = start("run_pool", path=str(path), payloads=payloads, silence_s=FOREVER_S, take=taken)
    eventually(lambda: worker.stats["tasks"] == 2, "two tasks in the store")
    eventually(lambda: not taken or Path(f"{path}.taken").exists(), "the batch")
    kill(pid)
    eventually(worker.is_empty, "an empty store")
    pool = pools()
    assert pool.submit("a", {}).result(LONG_S).tags["pid"] == worker.pid
    pool.clear(["a"])
    eventually(worker.is_empty, "an empty store")


def test_a_slow_callback_keeps_no_other_completion_waiting(pools: Any, directory: Path) -> None:
    pool = pools()
    ends = threading.Event()
    heard: list[str] = []
    pool.on_complete(lambda future: ends.wait(LONG_S))
    pool.on_complete(lambda future: heard.append(future.task_id))
    pool.on_complete(lambda future: 1 // 0)
    with LocalWorker():
        first = pool.submit("a", {})
        first.add_done_callback(lambda _: ends.wait(LONG_S))
        assert first.result(LONG_S)
        assert [pool.submit(name, {}).result(LONG_S).task_id for name in "bc"] == ["b", "c"]
        assert asyncio.run(pool.asubmit("d", {})).task_id == "d"
        eventually(lambda: heard == ["a", "b", "c", "d"], "the other callback")
        ends.set()


def test_a_function_that_blocks_its_worker_delays_no_announcement_and_is_no_silence(
    pools: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools(silence_s=3)
    gate, began = directory / "gate", directory / "began"
    with LocalWorker(slots=2) as local:
        put = local.store.put

        def put_meanwhile(*what: Any, **options: Any) -> Any:
            eventually(began.exists, "the other function")
            return put(*what, **options)

        monkeypatch.setattr(local.store, "put", put_meanwhile)
        first = pool.submit("first", {})
        eventually(lambda: pool.stats().running, "the first function")
        blocked = pool.submit("blocked", {"block": True, "gate": str(gate), "began": str(began)})
        assert first.result(LONG_S).task_id == "first" and began.exists()  # announced while the other one blocks
        time.sleep(6)  # twice the silence that the pool allows
        assert pool.stats().workers == 1 and not blocked.done()
        gate.touch()
        assert blocked.result(LONG_S).task_id == "blocked"


def test_a_function_that_returns_in_the_step_before_another_blocks_the_loop_is_announced(pools: Any) -> None:
    pool = pools()
    go, gate = asyncio.Event(), threading.Event()
    waits: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def function(task_id: str, payload: Any) -> dict[str, Any]:
        loops.append(asyncio.get_running_loop())
        waits.append(task_id)
        await go.wait()  # both wake up in one turn of the loop, in the order in which they came
        if task_id == "blocks":
            gate.wait(LONG_S)
        return {"ids": torch.arange(3)}

    with LocalWorker(function):
        returns = pool.submit("returns", {})
        eventually(lambda: waits == ["returns"], "the first function")
        blocks = pool.submit("blocks", {})
        eventually(lambda: waits == ["returns", "blocks"], "the second function")
        loops[0].call_soon_threadsafe(go.set)
        try:
            assert returns.result(LONG_S).task_id == "returns" and not blocks.done()
        finally:
            gate.set()
        assert blocks.result(LONG_S).task_id == "blocks"


def test_collectives_run_in_order_on_one_thread_beside_announcements_and_are_drained_at_close(
    pools: Any, directory: Path
) -> None:
    pool = pools()
    order: list[tuple[int, str]] = []
    gate = threading.Event()

    def call(number: int) -> int:
        gate.wait(LONG_S)
        order.append((number, threading.current_thread().name))
        if number == 1:
            raise ValueError("the call fails")
        if number == 2:
            raise SystemExit(1)
        return number

    local = LocalWorker()
    futures = [local.worker.collectives.submit(call, number) for number in range(5)]
    assert pool.submit("a", {}).result(LONG_S).task_id == "a" and not wait(futures, 0).done
    threading.Timer(0.1, gate.set).start()
    local.__exit__()
    assert order == [(number, "weightwire-collectives") for number in range(5)]
    assert [future.result(0) for future in (futures[0], *futures[3:])] == [0, 3, 4]
    with pytest.raises(ValueError, match="the call fails"):
        futures[1].result(0)
    with pytest.raises(SystemExit):
        futures[2].result(0)
    with pytest.raises(WeightwireError, match="closed"):
        local.worker.collectives.submit(call, 9)


def test_a_call_that_hangs_is_reported_and_keeps_close_no_longer_than_its_limit(directory: Path) -> None:
    hangs = threading.Event()
    local = LocalWorker()
    local.worker.collectives.submit(hangs.wait, LONG_S)
    with pytest.raises(SyncTimeout, match="weightwire-collectives still runs after"):
        local.worker.close(timeout_s=3)
    local.worker.close()
    hangs.set()
    local.store.close()


def test_what_is_too_stale_fails_with_a_typed_error_and_is_cleared(pools: Any, directory: Path) -> None:
    pool = pools()
    heard: list[Any] = []
    pool.on_complete(lambda future: heard.append((future.task_id, type(future.exception()).__name__)))
    with LocalWorker() as local:
        with pytest.raises(ConfigError, match="call set_version"):
            pool.next_batch(1, timeout_s=LONG_S, max_staleness=2)
        pool.set_version(7)
        for name, version in (("old", 4), ("fresh", 5), ("unknown", None), ("newer", 7)):
            assert pool.submit(name, {"version": version}).result(LONG_S)
        batch = pool.next_batch(2, timeout_s=LONG_S, max_staleness=2)
        assert batch.task_ids == ("fresh", "newer") and str(batch.versions) == "5..7"
        eventually(lambda: len(heard) == 6, "the dropped ones")
        assert heard[4:] == [("old", "StaleRollout"), ("unknown", "StaleRollout")]
        eventually(lambda: local.store.stats().tasks == 2, "nothing but the batch")
        assert pool.stats().stale == 2 and pool.stats().ready == 0
        waiting = asyncio.run(_stale_while_a_batch_is_waited_for(pool))
        assert isinstance(waiting, StaleRollout) and "max_staleness is 0" in waiting.message


async def _stale_while_a_batch_is_waited_for(pool: RolloutPool) -> BaseException | None:
    batch = asyncio.create_task(pool.anext_batch(1, timeout_s=LONG_S, max_staleness=0))
    await asyncio.sleep(0.05)
    error = await asyncio.gather(pool.asubmit("stale", {"version": 6}), return_exceptions=True)
    assert (await pool.asubmit("good", {"version": 7})).task_id == "good"
    assert (await batch).task_ids == ("good",)
    return error[0] if isinstance(error[0], BaseException) else None


def test_a_batch_that_is_late_says_how_many_tasks_failed_and_why_the_last_one_did(pools: Any, directory: Path) -> None:
    pool = pools()
    with LocalWorker(generate):
        for number in range(3):
            future = pool.submit(f"t{number}", {"error": f"bad prompt {number}"})
            assert future.exception(LONG_S) is not None
        with pytest.raises(
            SyncTimeout, match=r"0 of 3 rollouts .*; 3 have failed, the last: .*ValueError: bad prompt 2"
        ):
            pool.next_batch(3, timeout_s=0)
        pool.set_version(7)
        pool.submit("old", {"version": 3}).result(LONG_S)
        with pytest.raises(SyncTimeout, match=r"; 3 have failed, the last: .*'old' was generated with version .* at 7"):
            pool.next_batch(1, timeout_s=0, max_staleness=1)


def test_batches_are_in_order_of_completion_and_hold_the_rows_of_their_workers(
    pools: Any, workers: Any, directory: Path
) -> None:
    pool = pools()
    there = [workers(slots=4), workers(slots=4)]
    eventually(lambda: pool.stats().workers == 2, "the workers")
    gates = [directory / f"gate{i}" for i in range(4)]
    futures = [
        pool.submit(f"t{i}", {"gate": str(gate), "number": 100 * i, "rows": i + 1}) for i, gate in enumerate(gates)
    ]
    order = [
        3,
        0,
        1,
        2,
    ]  # t0 and t1 are at different workers: the second was handed out while only the other one waited
    for i in order:
        gates[i].touch()
        futures[i].result(LONG_S)
    batch = pool.next_batch(3, timeout_s=LONG_S)
    assert batch.task_ids == ("t3", "t0", "t1") and len(batch) == 4 + 1 + 2 and len(batch.owners) == 2
    assert batch.status.name == "REMOTE" and set(batch.keys()) == {"ids", "text"}
    assert {batch.tags[task]["pid"] for task in batch.task_ids} == {worker.pid for worker in there}
    batch.fetch(timeout_s=LONG_S)
    rows = [torch.arange((i + 1) * 3).reshape(i + 1, 3) + 100 * i for i in (3, 0, 1)]
    assert torch.equal(batch["ids"], torch.cat(rows))
    assert batch["text"] == [f"t{i}/{row}" for i in (3, 0, 1) for row in range(i + 1)]
    del rows
    report = batch.clear(timeout_s=LONG_S)
    assert report.cleared == 3 and not report.failed
    with pytest.raises(
        SyncTimeout, match=r"1 of 2 rollouts are ready after 0\.1 s; 0 tasks run, 0 are queued, 2 workers"
    ):
        pool.next_batch(2, timeout_s=0.1)
    assert pool.next_batch(1, timeout_s=LONG_S).task_ids == ("t2",)
    assert pool.clear(["t2", "t2", "t0", "nobody"]).unknown == 1
    del batch
    eventually(lambda: sum(worker.stats["tasks"] for worker in there) == 0, "empty stores")


def test_a_batch_that_nobody_takes_any_more_comes_first_again(pools: Any, directory: Path) -> None:
    pool = pools()

    async def give_up() -> tuple[str, ...]:
        waiting = asyncio.create_task(pool.anext_batch(2, timeout_s=LONG_S))
        await asyncio.sleep(0.05)
        await pool.asubmit("a", {})
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await pool.asubmit("b", {})
        return (await pool.anext_batch(2, timeout_s=LONG_S)).task_ids

    with LocalWorker():
        assert asyncio.run(give_up()) == ("a", "b")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_bound_address_is_the_advertised_one_on_ipv4_and_ipv6(pools: Any, workers: Any, host: str) -> None:
    pool = pools(listen=f"tcp://{host}:*", silence_s=5)
    local, address = pool.addresses
    assert local.startswith("ipc://") and Path(local.removeprefix("ipc://")).exists()
    assert address.startswith(f"tcp://{host}:") and not address.endswith((":*", ":0"))
    worker = workers(pool=address)
    assert pool.submit("a", {}).result(LONG_S).tags == {"pid": worker.pid}
    time.sleep(7)  # longer than the silence: heartbeats keep it there
    assert pool.stats().workers == 1


def test_a_worker_that_closes_tells_the_pool_at_once_and_takes_its_rows_along(pools: Any, directory: Path) -> None:
    pool = pools(silence_s=FOREVER_S)
    began = directory / "began"
    with LocalWorker():
        assert pool.submit("ready", {}).result(LONG_S)
        running = pool.submit("running", {"began": str(began), "gate": str(directory / "never")})
        eventually(began.exists, "the function")
    with pytest.raises(PeerLost, match="left the pool"):
        running.result(LONG_S)
    assert pool.stats().workers == pool.stats().ready == 0 and pool.stats().lost == 2


def test_a_worker_that_closes_after_its_pool_waits_for_no_answer(pools: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = pools()
    with LocalWorker():
        assert pool.submit("ready", {}).result(LONG_S)
        pool.close()
    assert "works for pool" in caplog.text and "could not leave" not in caplog.text


def test_the_worker_forgets_tasks_that_their_consumers_cleared(
    pools: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools()
    with LocalWorker() as local:
        local.worker.prune_at = 8
        for i in range(40):
            assert pool.submit(f"t{i}", {}).result(LONG_S)
            pool.next_batch(1, timeout_s=LONG_S).clear(timeout_s=LONG_S)
        (link,) = (one.link for one in local.worker.connections.pools.values())
        eventually(lambda: "t39" in link.held, "the pool's answer to the last announcement")
        asked: list[set[str]] = []
        held = local.store.held
        monkeypatch.setattr(local.store, "held", lambda task_ids: asked.append(set(task_ids)) or held(task_ids))
        local.worker.prune_at = 0
        assert pool.submit("last", {}).result(LONG_S)
        eventually(lambda: link.held == {"last"}, "a short list")
        assert len(asked) == 1 and len(asked[0]) > 1, "one question about all: it is a round trip in a store on Ray"


def test_attempts_at_one_task_take_turns_so_that_one_never_clears_the_rows_of_another(
    pools: Any, directory: Path
) -> None:
    pool = pools()
    gate = directory / "gate"
    with LocalWorker(slots=4) as local:
        first = pool.submit("a", {"gate": str(gate), "stubborn": True, "began": f"{directory}/began"})
        eventually((directory / "began").exists, "the function")
        assert first.cancel()
        second = pool.submit("a", {"rows": 5, "began": f"{directory}/again"})
        assert pool.submit("b", {}).result(LONG_S).task_id == "b"
        assert not (directory / "again").exists()
        gate.touch()
        assert {entry.rows for entry in second.result(LONG_S).entries} == {5}
        assert local.store.stats().tasks == 2
        assert len(pool.next_batch(2, timeout_s=LONG_S).fetch(timeout_s=LONG_S)["ids"]) == 2 + 5


def test_callbacks_hear_that_a_rollout_completed_before_they_hear_that_it_was_dropped(
    pools: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's thread ends the future, and a user's thread drops the rollout meanwhile."""
    ends, dropped = threading.Event(), threading.Event()
    end = RolloutFuture.end

    def slow_end(future: RolloutFuture, outcome: Any) -> None:
        if isinstance(outcome, Rollout):
            ends.set()
            dropped.wait(0.5)
        end(future, outcome)

    monkeypatch.setattr(RolloutFuture, "end", slow_end)
    pool = pools()
    heard: list[type[BaseException] | None] = []
    pool.on_complete(lambda future: heard.append(None if future.exception() is None else type(future.exception())))
    with LocalWorker():
        pool.set_version(9)
        pool.submit("t", {"version": 1})
        assert ends.wait(LONG_S)
        with pytest.raises(SyncTimeout):
            pool.next_batch(1, timeout_s=0, max_staleness=1)
        dropped.set()
        eventually(lambda: len(heard) == 2, "both callbacks")
    assert heard == [None, StaleRollout]


def test_a_callback_that_is_removed_is_called_no_more(pools: Any, directory: Path) -> None:
    pool = pools()
    heard: list[str] = []
    remove = pool.on_complete(lambda future: heard.append(future.task_id))
    with LocalWorker():
        assert pool.submit("a", {}).result(LONG_S)
        eventually(lambda: heard, "the callback")
        remove()
        remove()
        assert pool.submit("b", {}).result(LONG_S)
        eventually(lambda: len(threads_named("weightwire-rollout-callback")) == 0, "the end of its thread")
    assert heard == ["a"]


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_a_pool_listens_where_the_environment_says_as_a_store_does(
    pools: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_LISTEN", "tcp://127.0.0.1:*")
    pool = pools()
    local, further = pool.addresses
    assert local.startswith("ipc://") and further.startswith("tcp://127.0.0.1:")
    with LocalWorker(pool=further) as far:
        assert far.store.owner.address.startswith("tcp://127.0.0.1:")
        assert pool.submit("t", {}).result(LONG_S).task_id == "t"
        pool.clear(["t"])
        eventually(lambda: far.store.stats().tasks == 0, "the clear")
    assert [address.partition(":")[0] for address in pools(listen="tcp://127.0.0.2:*").addresses] == ["ipc", "tcp"]
