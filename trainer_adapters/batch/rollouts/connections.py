"""A worker's connections to its pools, and the one thread that all of them share.

A pool has two connections: one for the parked `Take`, one for announcements. The thread waits for the sockets, for the ends
of the pools' processes, and for word from the worker's other threads; it takes the next step of each pool when one is due.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from inference_plugin.net import addresses
from inference_plugin.net.listening import MEND_EVERY_S
from inference_plugin.wire.errors import AuthError, PeerLost, WeightwireError
from inference_plugin.wire.messages import Announced, Done, LeavePool, Work
from trainer_adapters.batch.rollouts.link import Orders, PoolLink
from trainer_adapters.batch.rollouts.pool_connection import HEARTBEATS, PoolConnection

__all__ = ["Connections"]

logger = logging.getLogger(__name__)

LEAVE_S = 1.0
"""Longest time that a worker which ends waits for its pools to hear of it."""


class Connections:
    """Serves the pool at `address`, or with None every pool of this host.

    `new_link()` makes the state for one more pool; `perform(link, orders)` does what a pool wants, on this thread, quickly.
    `lock` guards all links. The thread runs from construction to `close`.
    """

    def __init__(
        self,
        address: str | None,
        *,
        lock: threading.Lock,
        new_link: Callable[[], PoolLink],
        perform: Callable[[PoolLink, Orders], None],
        silence_s: float,
        name: str,
    ) -> None:
        self._address = address
        self._lock = lock
        self._new_link = new_link
        self._perform = perform
        self._silence_s = silence_s
        self.pools: dict[str, PoolConnection] = {}
        self._find_at_s = 0.0
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._news: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._news)
            raise

    def wake(self) -> None:
        """Any thread: a link has something to announce, or is dirty."""
        with self._writing:
            if self._news is not None:
                os.eventfd_write(self._news, 1)

    def close(self, timeout_s: float) -> None:
        """Leaves the pools that can be reached, and gives up the others; may be called twice."""
        self._closing.set()
        self.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("weightwire: the thread %s does not end", self._thread.name)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._find()
                for pool in list(self.pools.values()):
                    self._step(pool)
                self._wait()
            except Exception:  # a bug of ours must not end the worker
                logger.exception("weightwire: an error in the thread %s, which goes on", self._thread.name)
                self._closing.wait(0.1)
        self._leave_all()
        with self._writing:
            assert self._news is not None
            os.close(self._news)
            self._news = None

    def _find(self) -> None:
        """Connects to new pools of this host: each has a file in the runtime directory."""
        if time.monotonic() < self._find_at_s:
            return
        if self._address is not None:
            self._find_at_s = math.inf
            process = (0, 0)
            try:
                process = addresses.local_pools().get(self._address, process)
            except (WeightwireError, OSError) as error:  # a pool of another host needs no runtime directory
                logger.info("weightwire: the runtime directory can't be read: %s", error)
            self.pools[self._address] = PoolConnection(self._address, process, self._new_link(), self._silence_s)
            return
        self._find_at_s = time.monotonic() + MEND_EVERY_S
        try:
            for address, process in addresses.local_pools().items():
                if address not in self.pools:
                    self.pools[address] = PoolConnection(address, process, self._new_link(), self._silence_s)
        except (WeightwireError, OSError) as error:
            logger.warning("weightwire: the runtime directory can't be read: %s", error)

    def _step(self, pool: PoolConnection) -> None:
        """Takes what has come from a pool, and sends it what is due."""
        try:
            if not pool.is_connected and not pool.connect(self._silence_s):
                return
            if (work := pool.take.reply()) is not None:
                self._on_work(pool, work)
            self._take_answer(pool)
            self._send(pool)
        except PeerLost as error:
            self._lost(pool, error)
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with one pool, the others have their turn
            self._complain(pool, WeightwireError.wrap(error))
            pool.close()
            pool.rest()

    def _take_answer(self, pool: PoolConnection) -> None:
        """The answer to the last announcement, if it has come."""
        try:
            answer = pool.announce.reply()
        except (PeerLost, AuthError):
            raise
        except WeightwireError as error:
            self._complain(pool, error)
            with self._lock:
                orders = pool.link.on_refused(error.info())
            pool.rest()
        else:
            if not isinstance(answer, Announced):
                return
            with self._lock:
                orders = pool.link.on_announced(answer)
        self._perform(pool.link, orders)
        if orders.leave:
            self._leave(pool)

    def _complain(self, pool: PoolConnection, error: WeightwireError) -> None:
        if (told := str(error)) != pool.told:
            logger.warning(
                "weightwire: the rollout pool at %s refuses this worker: %s; it keeps trying", pool.address, told
            )
        pool.told = told

    def _on_work(self, pool: PoolConnection, work: Work) -> None:
        with self._lock:
            known = pool.link.pool
            orders = pool.link.on_work(work)
        if pool.link.pool != known:
            logger.info("weightwire: rollout worker %s works for pool %s", pool.link.worker, pool.link.pool)
        pool.told = ""
        pool.silence_s = min(work.silence_s, self._silence_s) or self._silence_s
        pool.take.due_s = time.monotonic() + pool.silence_s / HEARTBEATS if pool.link.stopped else 0.0
        self._perform(pool.link, orders)
        if orders.leave:
            self._leave(pool)

    def _leave(self, pool: PoolConnection) -> None:
        pool.announce.send(LeavePool(pool.link.worker, pool.link.pool), Done)

    def _send(self, pool: PoolConnection) -> None:
        now_s = time.monotonic()
        again_s = now_s + pool.silence_s / HEARTBEATS
        with self._lock:
            link = pool.link
            take = link.take() if now_s >= pool.take.due_s or (link.dirty and not link.stopped) else None
            due = now_s >= pool.announce.due_s if pool.announce.is_open else now_s >= pool.rests_until_s
            announce = link.announce() if link.finished and due and link.pool else None
        if take is not None:
            # A stopped pool answers no more: this request ends with the pool's process, or with its silence.
            pool.take.send(take, Work, math.inf if link.stopped else again_s)
        if announce is not None:
            pool.announce.send(announce, Announced, again_s)

    def _lost(self, pool: PoolConnection, error: PeerLost) -> None:
        with self._lock:
            orders = pool.link.give_up()
        logger.info("weightwire: the rollout pool at %s is lost: %s", pool.address, error)
        self._perform(pool.link, orders)
        del self.pools[pool.address]
        pool.close()
        if self._address is not None:  # another pool may take its address
            self.pools[pool.address] = again = PoolConnection(pool.address, (0, 0), self._new_link(), self._silence_s)
            again.rest()

    def _wait(self) -> None:
        sources: list[Any] = [self._news]
        due_s = self._find_at_s
        for pool in self.pools.values():
            sources += pool.sources
            due_s = min(due_s, pool.due_s)
        timeout_ms = -1 if due_s == math.inf else max(0, int((due_s - time.monotonic()) * 1000) + 1)
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], timeout_ms)
        assert self._news is not None
        with contextlib.suppress(BlockingIOError):  # no word from other threads
            os.eventfd_read(self._news)

    def _leave_all(self) -> None:
        pools, self.pools = list(self.pools.values()), {}
        for pool in pools:
            with self._lock:
                has_left = not pool.link.pool or pool.link.has_left
                orders = pool.link.give_up()
            try:
                if pool.is_connected and not has_left:
                    self._leave(pool)
            except WeightwireError as error:
                logger.info("weightwire: rollout worker %s could not leave: %s", pool.link.worker, error)
            self._perform(pool.link, orders)
        until_s = time.monotonic() + LEAVE_S
        for pool in pools:
            try:
                pool.announce.wait(until_s)
            except WeightwireError as error:
                logger.info("weightwire: rollout worker %s could not leave: %s", pool.link.worker, error)
            pool.close()
