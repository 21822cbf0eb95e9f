"""`RolloutWorker`: runs the tasks of pools beside an engine, keeps their rows, and announces them.

Four threads, so that none of them keeps another's work waiting: one runs the user's async functions, one copies rows into
the store (which may wait for room there), one talks with the pools, one runs `collectives`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inference_plugin.devices import start_thread
from inference_plugin.net.addresses import job_name, new_replica_id
from inference_plugin.net.gate import no_thread
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    ArgumentError,
    BatchError,
    ConfigError,
    RolloutFailed,
    SyncTimeout,
    WeightwireError,
)
from inference_plugin.wire.messages.rollout import (
    MAX_ENTRIES_BYTES,
    MAX_SLOTS,
    AssignedTask,
    Finished,
    TaskRef,
)
from trainer_adapters.batch.limits import checked_count, checked_seconds
from trainer_adapters.batch.rollouts.connections import Connections
from trainer_adapters.batch.rollouts.generated import Generate, Generated, RowStore, checked_tags
from trainer_adapters.batch.rollouts.link import Orders, PoolLink
from trainer_adapters.serial import SerialExecutor

__all__ = ["Generate", "Generated", "RolloutWorker"]

logger = logging.getLogger(__name__)

PRUNE_FROM = 1024
"""From this length on, the list of tasks held for a pool is compared with the store each time it has doubled."""


END_S = 0.5
"""Time for a thread to end after its work has ended, in seconds."""


@dataclass
class _Attempt:
    """An attempt at a task, for one pool in one of its eras. `future`: what runs the user's function."""

    link: PoolLink
    era: int
    task: AssignedTask
    future: asyncio.Task[Any] | None = None

    @property
    def ref(self) -> TaskRef:
        return TaskRef(self.task.task_id, self.task.attempt)

    @property
    def key(self) -> tuple[int, int, TaskRef]:
        return id(self.link), self.era, self.ref


@dataclass
class _Turns:
    """Attempts at one task take turns: the rows of two would lie under one id in the store. The first one is at work."""

    by_task: dict[str, deque[_Attempt]] = field(default_factory=dict)

    def enter(self, attempt: _Attempt) -> bool:
        """Whether it is the attempt's turn; else it follows those before it."""
        queue = self.by_task.setdefault(attempt.task.task_id, deque())
        queue.append(attempt)
        return len(queue) == 1

    def leave(self, task_id: str) -> _Attempt | None:
        """The attempt at work is settled; returns the next one."""
        queue = self.by_task[task_id]
        queue.popleft()
        if queue:
            return queue[0]
        del self.by_task[task_id]
        return None


class RolloutWorker(Closing):
    """Runs tasks of rollout pools with `generate`, up to `slots` at a time, and puts what they make into `store`.

    `pool` is the address of a pool; without it the worker works for every pool of this host and job, also for those that start
    later. `put_timeout_s`: longest wait for room in the store; then the task fails. `silence_s` is used on TCP; the default is
    the environment's (see `Config`). Rows of a pool whose process has ended are cleared. Close the worker before the store.

    `collectives` runs calls that may touch a process group: one after the other, on one thread, beside everything else.

    Raises `ConfigError` for `slots` and times outside their limits, `ArgumentError` for a `generate` that can't be called, a
    `pool` that is no address and a `store` that is none.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        slots: int,
        store: RowStore,
        pool: str | None = None,
        put_timeout_s: float = 60.0,
        silence_s: float | None = None,
    ) -> None:
        if checked_count("slots", slots, 1) > MAX_SLOTS:
            raise ConfigError(f"slots={slots}: allowed are 1 to {MAX_SLOTS}")
        silence_s = Config.from_environment().but(silence_s=silence_s).silence_s
        if not callable(generate):
            raise ArgumentError(
                f"generate={generate!r:.300} is a {type(generate).__name__}", hint="give it an async function"
            )
        if not isinstance(pool, str | None):
            raise ArgumentError(
                f"pool={pool!r:.300} is a {type(pool).__name__}", hint="give it an address, pool.addresses[0]"
            )
        if not hasattr(store, "owner"):
            raise ArgumentError(
                f"store={store!r:.300} is a {type(store).__name__}", hint="give it a Store(budget_bytes=...)"
            )
        self.store = store
        self.name = new_replica_id("rollout")
        self._generate = generate
        self._slots = slots
        self._put_timeout_s = checked_seconds("put_timeout_s", put_timeout_s)
        self._job = job_name()
        self._owner = msgspec.msgpack.encode(store.owner)
        self._links = 0
        self._lock = threading.Lock()
        self._turns = _Turns()
        self._attempts: dict[tuple[int, int, TaskRef], _Attempt] = {}
        self.prune_at: float = PRUNE_FROM
        self._closed = self._loop_ends = False
        self._pid = os.getpid()
        self._running = asyncio.Semaphore(slots)
        # Threads begin here: what is above may raise, and leaves none behind.
        with contextlib.ExitStack() as if_it_fails:
            try:
                self.collectives = SerialExecutor("weightwire-collectives")
                if_it_fails.callback(self.collectives.close, END_S)
                self._puts = SerialExecutor("weightwire-rollout-puts")
                if_it_fails.callback(self._puts.close, END_S)
                self._loop = asyncio.new_event_loop()
                if_it_fails.callback(lambda: self._loop.is_running() or self._loop.close())
                self._thread = start_thread(
                    self._run_loop, name="weightwire-rollouts", stop=lambda: self._to_loop(self._end_loop)
                )
                if_it_fails.callback(self._thread.join, END_S)
                if_it_fails.callback(self._to_loop, self._end_loop)
                self.connections = Connections(
                    pool,
                    lock=self._lock,
                    new_link=self._new_link,
                    perform=self._perform,
                    silence_s=silence_s,
                    name="weightwire-rollout-worker",
                )
            except RuntimeError as error:
                raise no_thread(error, "a rollout worker") from error
            if_it_fails.pop_all()

    def close(self, timeout_s: float = 10.0) -> None:
        """Leaves the pools, cancels what runs, clears what it put into the store, and drains `collectives`; may be called twice.

        Raises `SyncTimeout` where a call on `collectives` still runs after `timeout_s`, after everything else is closed. In a
        forked child it does nothing.
        """
        timeout_s = checked_seconds("timeout_s", timeout_s)
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        until_s = time.monotonic() + timeout_s
        self.connections.close(timeout_s)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            asyncio.run_coroutine_threadsafe(self._end_attempts(until_s), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(0.0, until_s - time.monotonic()) + END_S)
            if self._thread.is_alive():
                logger.error("weightwire: rollout worker %s is closed, but a function that it ran goes on", self.name)
        try:
            self._puts.close(max(0.0, until_s - time.monotonic()) + END_S)
        except SyncTimeout as error:  # it waits for room; what it puts is cleared as soon as it has it
            logger.error("weightwire: rollout worker %s: %s", self.name, error)
        self.collectives.close(max(0.0, until_s - time.monotonic()))

    # --- the thread of the connections -----------------------------------------------------------------------------------

    def _new_link(self) -> PoolLink:
        self._links += 1
        return PoolLink(f"{self.name}.{self._links}", self._job, self._owner, self._slots)

    def _perform(self, link: PoolLink, orders: Orders) -> None:
        """Any thread: carries out a link's orders, one after the other."""
        self._clear(orders.clear)
        if orders.cancel:
            self._to_loop(self._cancel, link, orders.cancel)
        begun = [_Attempt(link, link.era, task) for task in orders.begin]
        with self._lock:
            begun = [attempt for attempt in begun if self._turns.enter(attempt)]
            begun += [after for task_id in orders.settled if (after := self._turns.leave(task_id)) is not None]
            if prunes := len(link.held) >= self.prune_at:
                self.prune_at = math.inf  # until the store has answered
        if begun:
            self._to_loop(self._begin, begun)
        if prunes:
            with contextlib.suppress(WeightwireError):  # the worker is closed
                self._puts.submit(self._prune, link)

    def _clear(self, task_ids: tuple[str, ...]) -> None:
        if not task_ids:
            return
        try:
            self.store.clear(task_ids)
        except Exception:  # it was closed, say
            logger.exception("weightwire: %d tasks could not be cleared from the store", len(task_ids))

    def _to_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every attempt
            self._loop.call_soon_threadsafe(call, *arguments)

    # --- the thread of the user's functions ------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._loop_ends:
            try:
                self._loop.run_forever()
            except BaseException:  # a SystemExit of a task that the user's function began, say: it is no reason to end
                logger.exception(
                    "weightwire: an error in the event loop of rollout worker %s, which goes on", self.name
                )
        self._loop.close()

    def _begin(self, attempts: list[_Attempt]) -> None:
        for attempt in attempts:
            with self._lock:
                wanted = attempt.link.wants(attempt.ref, attempt.era)
            if not wanted or self._closed:
                self._ended(attempt, None)
                continue
            self._attempts[attempt.key] = attempt
            attempt.future = self._loop.create_task(self._run(attempt))
            attempt.future.add_done_callback(lambda future, attempt=attempt: self._done(attempt, future))  # type: ignore[misc]

    async def _run(self, attempt: _Attempt) -> None:
        """Settles the attempt in the step in which the function returns: the loop's next step may be one that blocks it."""
        async with self._running:
            self._settle(attempt, await self._result(attempt.task))

    async def _result(self, task: AssignedTask) -> Generated | BaseException:
        try:
            (payload,) = msgspec.msgpack.decode(task.payload, type=list[Any])
            made: Any = self._generate(task.task_id, payload)
            if not inspect.isawaitable(made):
                hint = "write `async def`; a function that blocks would hold up the other tasks: await asyncio.to_thread(...)"
                raise BatchError(f"the worker's function returned a {type(made).__name__}, not an awaitable", hint=hint)
            result = await made
            return result if isinstance(result, Generated) else Generated(result)
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return error  # the function cancelled itself
        except BaseException as error:  # noqa: BLE001 -- even a SystemExit must not end the loop: it fails its task
            return error

    def _cancel(self, link: PoolLink, refs: tuple[TaskRef, ...]) -> None:
        unwanted = set(refs)
        for (linked, _, ref), attempt in list(self._attempts.items()):
            if linked == id(link) and ref in unwanted and attempt.future is not None:
                attempt.future.cancel()

    def _settle(self, attempt: _Attempt, made: Generated | BaseException) -> None:
        del self._attempts[attempt.key]
        if isinstance(made, BaseException):
            self._ended(attempt, self._failed(attempt, made))
            return
        try:
            self._puts.submit(self._put, attempt, made)
        except WeightwireError:  # the worker is closed
            self._ended(attempt, None)

    def _done(self, attempt: _Attempt, future: asyncio.Task[None]) -> None:
        if self._attempts.pop(attempt.key, None) is not None:  # cancelled before it was settled
            self._ended(attempt, None)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("weightwire: task %r could not be settled", attempt.task.task_id, exc_info=error)

    async def _end_attempts(self, until_s: float) -> None:
        """Cancels every attempt, and ends the loop once they have ended or at the deadline."""
        futures = [attempt.future for attempt in self._attempts.values() if attempt.future is not None]
        for future in futures:
            future.cancel()
        if futures:
            await asyncio.wait(futures, timeout=max(0.0, until_s - time.monotonic()))
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop_ends = True
        self._loop.call_soon(self._loop.stop)

    # --- the thread of the store -----------------------------------------------------------------------------------------

    def _put(self, attempt: _Attempt, made: Generated) -> None:
        ref = attempt.ref
        with self._lock:
            wanted = attempt.link.wants(ref, attempt.era)
        finished: Finished | None = None
        if wanted:
            try:
                tags = checked_tags(made)
                entries = self.store.put(ref.task_id, made.data, versions=made.versions, timeout_s=self._put_timeout_s)
                encoded = msgspec.msgpack.encode(entries)
                if len(encoded) > MAX_ENTRIES_BYTES:
                    raise BatchError(f"its metadata has {len(encoded)} bytes; allowed are {MAX_ENTRIES_BYTES}")
                finished = Finished(ref, encoded, tags)
            except Exception as error:  # noqa: BLE001 -- the task fails with it
                self._clear((ref.task_id,))
                finished = self._failed(attempt, error)
        self._ended(attempt, finished)

    def _prune(self, link: PoolLink) -> None:
        """Forgets tasks that their consumers have cleared, so that the list does not grow for ever. A store on Ray is asked over
        the network; nothing is put meanwhile."""
        with self._lock:
            listed = set(link.held)
        try:
            listed -= self.store.held(listed)
        except Exception:  # it was closed, say: no reason to give up the pool
            logger.exception("weightwire: the store of rollout worker %s did not say what it holds", self.name)
            listed = set()
        with self._lock:
            link.held -= listed
            self.prune_at = max(PRUNE_FROM, 2 * len(link.held))

    def _ended(self, attempt: _Attempt, finished: Finished | None) -> None:
        with self._lock:
            orders = attempt.link.on_end(attempt.ref, attempt.era, finished)
        self._perform(attempt.link, orders)
        self.connections.wake()

    def _failed(self, attempt: _Attempt, error: BaseException) -> Finished:
        task_id = attempt.task.task_id
        logger.warning("weightwire: task %r failed", task_id, exc_info=error)
        if not isinstance(error, WeightwireError):
            try:
                text = str(error)
            except Exception as broken:  # noqa: BLE001 -- the user's class; the task must fail all the same
                text = f"its text can't be made: {type(broken).__name__}"
            error = RolloutFailed(f"task {task_id!r} failed: {type(error).__name__}{': ' if text else ''}{text}")
        return Finished(attempt.ref, error=error.at(side="rollout worker", phase="rollout").info())
