"""`RolloutPool`: hands tasks to rollout workers, and learns from their announcements what has finished."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from inference_plugin.net import addresses
from inference_plugin.net.gate import no_thread
from inference_plugin.net.listening import listens_on, remove_socket
from inference_plugin.net.processes import ProcessId
from inference_plugin.net.reply_server import Asker, ReplyServer, Service
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.codec import MAX_CONTROL_BYTES, decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    ArgumentError,
    AuthError,
    BatchError,
    ConfigError,
    ProtocolError,
    WeightwireError,
)
from inference_plugin.wire.messages import Announce, Announced, Body, Done, LeavePool, Take
from inference_plugin.wire.messages.rollout import Finished
from trainer_adapters.batch.limits import checked_count, checked_seconds
from trainer_adapters.batch.records import ClearReport, Entry, Owner, ShardId, listed_tasks
from trainer_adapters.batch.rollouts.batches import BatchWaiters
from trainer_adapters.batch.rollouts.checks import check_entries, encoded_payload
from trainer_adapters.batch.rollouts.futures import CallbackThread, RolloutFuture, in_loop
from trainer_adapters.batch.rollouts.machine import PoolMachine
from trainer_adapters.batch.rollouts.machine_io import (
    Action,
    AnnounceCame,
    CancelAsked,
    ClearAsked,
    Cleared,
    Closed,
    Drop,
    Event,
    FailBatch,
    Finish,
    GiveBatch,
    Log,
    PoolStats,
    ProcessesEnded,
    Reply,
    Result,
    Rollout,
    Submitted,
    TakeCame,
    Tick,
    VersionSet,
    WorkerLeft,
)

if TYPE_CHECKING:
    from trainer_adapters.batch.batch import DistributedBatch

__all__ = ["Rollout", "RolloutPool"]
logger = logging.getLogger(__name__)

STOP_S = 1.0
"""Longest time that `close` waits for the workers to stop."""

CALLBACKS_S = 30.0
"""Longest time that `close` waits for callbacks that have begun or wait their turn."""


class RolloutPool(Closing, Service):
    """Hands submitted tasks to workers, and gives their rollouts as futures, to callbacks, or as batches. Any thread may call.

    Workers of this host find the pool in the runtime directory. `listen` is a further address, `tcp://HOST:PORT`, by default what
    `WEIGHTWIRE_LISTEN` says; one that other hosts reach needs a key (`weightwire keygen`). `addresses` are those that are bound.
    A worker that is not heard of for `silence_s`, or whose process has ended, is lost: with `on_lost="fail"` its tasks fail with
    `PeerLost`, with "rerun" other workers run them (a task that has lost three workers fails). Close the pool, or use it as a
    context manager.

    A rollout belongs to the pool until `next_batch` takes it or `clear` clears it. With futures or callbacks alone, call
    `clear` for what was used. A process that is forked from this one can't use the pool: it raises `BatchError` there.
    """

    def __init__(
        self,
        *,
        listen: str | None = None,
        on_lost: Literal["fail", "rerun"] = "fail",
        silence_s: float | None = None,
    ) -> None:
        if on_lost not in ("fail", "rerun"):
            raise ConfigError(f"on_lost={on_lost!r}: allowed are 'fail' and 'rerun'")
        further = listen or listens_on()
        config = Config.from_environment().but(silence_s=silence_s)
        self.name = addresses.new_replica_id("pool")
        self._pid = os.getpid()
        self.machine = PoolMachine(self.name, silence_s=config.silence_s, rerun=on_lost == "rerun")
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._futures: dict[str, RolloutFuture] = {}
        self._batches = BatchWaiters(self.machine, self._lock, self._on, self.stats)
        self._listeners: dict[object, tuple[CallbackThread, Callable[[RolloutFuture], Any]]] = {}
        self._job = addresses.job_name()
        local = addresses.ipc_address(self.name, "p")
        self._path = Path(local.removeprefix("ipc://"))
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(remove_socket, self._path)
            self._server = ReplyServer(
                self,
                [local, *([further] if further != "ipc" else [])],
                name="weightwire-rollout-pool",
                where={"side": "rollout pool"},
                max_bytes=MAX_CONTROL_BYTES,
            )
            if_it_fails.callback(self._server.close)
            self.addresses = tuple(self._server.addresses)
            try:
                self._callbacks = CallbackThread("weightwire-rollout-futures")
            except RuntimeError as error:
                raise no_thread(error, "a rollout pool") from error
            if_it_fails.callback(self._callbacks.end)
            self._server.start()
            if_it_fails.pop_all()

    # --- tasks -----------------------------------------------------------------------------------------------------------

    def submit(self, task_id: str, payload: Any, *, deadline_s: float | None = None) -> RolloutFuture:
        """Has a worker run `generate(task_id, payload)`.

        `task_id` is unique over a whole training. `payload`: None, bool, int, float, str, bytes, lists and dicts of these, up to
        16 MiB. A task that has not finished after `deadline_s` is cancelled and fails with `SyncTimeout`. Raises `BatchError`
        for an id that the pool knows or a payload that can't travel, `PoolClosed`.
        """
        if deadline_s is not None:
            deadline_s = checked_seconds("deadline_s", deadline_s, above_zero=True)
        ShardId(task_id, "-")  # raises for what can't be an id
        event = Submitted(task_id, encoded_payload(task_id, payload), deadline_s)
        future = RolloutFuture(task_id, self._cancel, self._callbacks)
        self._on(event, future=future)
        return future

    async def asubmit(self, task_id: str, payload: Any, *, deadline_s: float | None = None) -> Rollout:
        """As `submit`, and waits for the rollout in asyncio. If it is cancelled, so is the task."""
        future = self.submit(task_id, payload, deadline_s=deadline_s)
        try:
            return await in_loop(future, future.on_end)
        except BaseException:  # cancelled, or the loop ends; a task that has ended stays as it is
            future.cancel()
            raise

    def on_complete(self, callback: Callable[[RolloutFuture], Any]) -> Callable[[], None]:
        """Has `callback(future)` called for every task that ends from now on, in order, on a thread of its own.

        A rollout that is dropped after it had completed, because it is too stale for a batch or its worker is lost, is
        reported again, as a future that failed. Returns a function that removes the callback. Raises `ArgumentError` for what
        can't be called.
        """
        self._check_process()
        if not callable(callback):
            raise ArgumentError(
                f"callback={callback!r:.300} is a {type(callback).__name__}", hint="a callback takes a future"
            )
        key = object()
        with self._lock:
            self._listeners[key] = CallbackThread("weightwire-rollout-callback"), callback

        def remove() -> None:
            with self._lock:
                found = self._listeners.pop(key, None)
            if found is not None:
                found[0].end()

        return remove

    def cancel(self, task_id: str) -> bool:
        """Cancels a task that has not ended, at its worker too; returns whether there was such a task."""
        return any(isinstance(action, Finish) for action in self._on(CancelAsked(ShardId(task_id, "-").task_id)))

    def clear(self, task_ids: Iterable[str]) -> ClearReport:
        """Has the rows of tasks cleared by their workers, in whatever state they are; those that run are cancelled.

        Workers are told at once, and do it in the background. Ids that the pool doesn't know (any more) are counted.
        """
        actions = self._on(ClearAsked(tuple(listed_tasks(task_ids))))
        said = next(action for action in actions if isinstance(action, Cleared))
        return ClearReport(cleared=said.cleared, unknown=said.unknown)

    # --- batches ---------------------------------------------------------------------------------------------------------

    def next_batch(self, n: int, timeout_s: float, max_staleness: int | None = None) -> DistributedBatch:
        """The first `n` rollouts that complete, in order of completion, as a REMOTE batch; their tags are in `batch.tags`.

        With `max_staleness`, a rollout is dropped whose first weight version is more than that behind `set_version`, or
        unknown. Raises `SyncTimeout` where fewer complete in time; they stay for the next call. Raises `PoolClosed`.
        """
        return self._batches.wait(n, timeout_s, max_staleness)

    async def anext_batch(self, n: int, timeout_s: float, max_staleness: int | None = None) -> DistributedBatch:
        """As `next_batch`, in asyncio."""
        return await self._batches.await_(n, timeout_s, max_staleness)

    def set_version(self, version: int) -> None:
        """Says which version the weights have now; staleness is counted from it."""
        self._on(VersionSet(checked_count("version", version, 0)))

    def stats(self) -> PoolStats:
        """What the pool holds, and what it has counted."""
        with self._lock:
            stats = self.machine.stats
        return dataclasses.replace(
            stats, received_bytes=self._server.received_bytes, sent_bytes=self._server.sent_bytes
        )

    def close(self) -> None:
        """Fails what is pending with `PoolClosed`, has the workers stop and clear what was not taken; may be called twice.

        Rows of batches that were taken stay until they are cleared or the process ends; on other hosts, until the workers have
        not heard of the pool for their `silence_s`. In a forked child it does nothing.
        """
        if os.getpid() != self._pid:
            return
        self._on(Closed())
        with self._lock:
            self._changed.wait_for(lambda: all(each.silent for each in self.machine.workers.values()), STOP_S)
            listeners, self._listeners = self._listeners, {}
        self._server.close()
        remove_socket(self._path)
        for thread in (self._callbacks, *(thread for thread, _ in listeners.values())):
            thread.close(CALLBACKS_S)

    # --- the server's thread ---------------------------------------------------------------------------------------------

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body | None:
        match body:
            case Take():
                if body.job != self._job:
                    raise AuthError(
                        f"worker {body.worker} is of job {body.job!r}, this pool of {self._job!r}",
                        hint="give worker and controller the same WEIGHTWIRE_JOB",
                    )
                owner = decode_as(body.owner, Owner)
                local = owner.pid and owner.boot_id == addresses.boot_id()
                self._on(TakeCame(asker, body, owner, (owner.pid, owner.start_ticks) if local else None))
                return None
            case Announce():
                if body.pool != self.name:  # an earlier pool at this address, whose attempts have the same numbers
                    return Announced(tuple(finished.ref for finished in body.finished))
                self._on(
                    AnnounceCame(asker, body.worker, tuple(self._result(body.worker, one) for one in body.finished))
                )
                return None
            case LeavePool():
                if body.pool == self.name:
                    self._on(WorkerLeft(body.worker))
                return Done()
        raise ProtocolError(f"a rollout pool takes no {type(body).__name__}")

    def processes(self) -> Collection[ProcessId]:
        with self._lock:
            return {worker.process for worker in self.machine.workers.values() if worker.process is not None}

    def wakes_at_s(self) -> float:
        with self._lock:
            return self.machine.wakes_at_s

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        if ended:
            self._on(ProcessesEnded(frozenset(ended)))
        if now_s >= self.wakes_at_s():
            self._on(Tick(), now_s)

    def _result(self, worker: str, finished: Finished) -> Result:
        """A finished task as the machine takes it; metadata that is wrong makes it a failure."""
        if finished.error is not None:
            return Result(finished.ref, error=WeightwireError.of(finished.error))
        try:
            entries = decode_as(finished.entries, tuple[Entry, ...])
            with self._lock:
                known = self.machine.workers.get(worker)
            check_entries(finished.ref.task_id, entries, known.owner.id if known is not None else None)
        except WeightwireError as error:
            return Result(finished.ref, error=error.at(side="rollout pool"), is_refused=True)
        return Result(finished.ref, entries, finished.tags)

    # --- events and actions ----------------------------------------------------------------------------------------------

    def _cancel(self, future: RolloutFuture) -> bool:
        """As `cancel`, but not the task of another future: an id may be submitted again."""
        return any(isinstance(action, Finish) for action in self._on(CancelAsked(future.task_id), of=future))

    def _on(
        self,
        event: Event,
        now_s: float | None = None,
        *,
        future: RolloutFuture | None = None,
        of: RolloutFuture | None = None,
    ) -> Sequence[Action]:
        """Any thread: gives an event to the machine and performs the actions. `future`: that of a submitted task. Does nothing if
        the future `of` has ended."""
        self._check_process()
        with self._lock:
            if of is not None and self._futures.get(of.task_id) is not of:
                return ()
            actions = self.machine.on(event, time.monotonic() if now_s is None else now_s)
            if future is not None:
                self._futures[future.task_id] = future
            # An id may be submitted again as soon as its task has ended, and a rollout be dropped as soon as it has completed:
            # futures end here, in this order, not later.
            bound = [(action, self._bound(action)) for action in actions]
            self._changed.notify_all()
        for action, waiting in bound:
            self._perform(action, waiting)
        self._server.wake()
        return actions

    def _check_process(self) -> None:
        """Raises `BatchError` in a forked child: no thread serves tasks there, and it would give out rollouts a second time."""
        if os.getpid() != self._pid:
            raise BatchError(
                f"the rollout pool {self.name} is of process {self._pid}; this is one that was forked from it",
                hint="submit tasks and take batches in the process that made the pool",
            )

    def _bound(self, action: Action) -> Any:
        """Under the lock: ends the future of a task and has callbacks called, which runs no code of the user. Returns the future
        of a batch."""
        match action:
            case Finish():
                future = self._futures.pop(action.task_id, None)  # none if Ctrl-C interrupted the task's `submit`
                self._tell(future or self._lone_future(action.task_id), action.outcome)
            case Drop():
                self._tell(self._lone_future(action.task_id), action.error)
            case GiveBatch() | FailBatch():
                return self._batches.pop(action.waiter)
        return None

    def _perform(self, action: Action, future: Any) -> None:
        """Without the lock. Nothing here waits, or runs code of the user."""
        match action:
            case Reply():
                action.asker.reply(action.body)
            case Drop():
                logger.warning("weightwire: a completed rollout was dropped: %s", action.error)
            case GiveBatch():
                future.set_result(action.rollouts)
            case FailBatch():
                future.set_exception(action.error)
            case Log():
                logger.log(logging.WARNING if action.warning else logging.INFO, "weightwire: %s", action.text)

    def _lone_future(self, task_id: str) -> RolloutFuture:
        """A future that nobody has yet: for callbacks."""
        return RolloutFuture(task_id, lambda _: False, self._callbacks)

    def _tell(self, future: RolloutFuture, outcome: Rollout | WeightwireError | None) -> None:
        future.end(outcome)
        for thread, callback in self._listeners.values():
            thread.call(callback, future)
