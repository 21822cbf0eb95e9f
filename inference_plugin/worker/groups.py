"""The shell around the state machine of a worker's groups: it owns the lock, the groups' threads and their memory.

Any thread posts an event: the machine decides under one short lock, and its actions are performed outside of it. Nothing is
copied, digested, mapped, joined or called back while the lock is held.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any

from inference_plugin.devices import in_use
from inference_plugin.install.contract import Installer
from inference_plugin.net.addresses import boot_id
from inference_plugin.net.processes import ProcessId
from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError, first_few
from inference_plugin.wire.messages import Body, GroupStatus, OpenGroup, Release
from inference_plugin.worker.actions import Action, Cancel, Fail, Reply, StartWork, StateChanged, Warn
from inference_plugin.worker.engine_side import EngineSide, Reading
from inference_plugin.worker.events import (
    Awake,
    CloseAll,
    Event,
    FellAsleep,
    ForgetVersions,
    MaySleep,
    Request,
    Tear,
    TearAll,
    Tick,
    WorkEnded,
)
from inference_plugin.worker.lane import Lane
from inference_plugin.worker.machine import WorkerGroups
from inference_plugin.worker.work import GroupWork, Where

__all__ = ["GroupTable"]

logger = logging.getLogger(__name__)

MAX_UNTOLD = 1000
"""At most this many changes of state wait for listeners that do not return; later ones are dropped."""

CLOSE_S = 5.0
"""A table that closes waits this long for its groups' work to end."""


class GroupTable:
    """All groups of one worker. Make it on the engine's own thread.

    It calls `sooner`, on any thread, when `wakes_at_s` becomes earlier. `beside`: the workers that decode together on the same
    cores.
    """

    def __init__(
        self,
        replica: str,
        rank: int,
        make_installer: Callable[[str], Installer],
        decoding: Callable[[], bool] = lambda: False,
        config: Config | None = None,
        beside: int = 1,
    ) -> None:
        self.sooner: Callable[[], None] = lambda: None
        self._where = Where(replica, rank, in_use().current(), config or Config(), decoding, beside)
        self._make_installer = make_installer
        self._machine = WorkerGroups(rank, boot_id())
        self._lock = threading.Lock()
        self._works: dict[int, GroupWork] = {}
        self._readings: dict[int, Reading] = {}
        self._listeners = Lane("weightwire-listeners", self._where.device)
        self._listeners.start()

    # --- the reply server's thread -----------------------------------------------------------------------------------

    def handle(self, asker: Any, request: Body, payload: memoryview | None) -> None:
        """Handles a request: calls `asker.reply` or `asker.fail` once, now or later."""
        if isinstance(request, OpenGroup):
            _ = request.manifest.fingerprint  # remembered: the machine asks for it under the lock
        self._post(Request(asker, request, payload))

    def tick(self, now_s: float, ended: Collection[ProcessId]) -> None:
        """Drops transactions that nobody will finish, as of `now_s`. Handle all requests that had arrived by then before."""
        self._post(Tick(ended), now_s)

    def wakes_at_s(self) -> float:
        """When to call `tick`, on `time.monotonic()`'s clock."""
        with self._lock:
            return self._machine.wakes_at_s

    def processes(self) -> Collection[ProcessId]:
        """Trainers on this host that have a transaction open, or memory kept for the next one."""
        with self._lock:
            return self._machine.processes()

    # --- any thread --------------------------------------------------------------------------------------------------

    def statuses(self) -> tuple[GroupStatus, ...]:
        with self._lock:
            return self._machine.statuses()

    # --- the engine's own thread -------------------------------------------------------------------------------------

    def named(self, name: str) -> EngineSide:
        """The group of that name. Raises `ProtocolError` that lists those there are."""
        with self._lock:
            group = self._machine.named(name)
            work = self._works[group.member]
        return EngineSide(group, work, self._where.rank, self._ask, self._readings)

    def may_sleep(self, *, discard: bool) -> None:
        """From now on no update begins, because the memory of the weights goes. Raises `VersionConflict` if one is on its
        way, `EngineUnsupported` if it is to `discard` weights that no open group could bring back."""
        self._ask(MaySleep, discard)

    def falls_asleep(self) -> None:
        """A command of the engine's own is about to release the memory of the weights: no update begins before `awake`. Waits
        for the threads that read that memory."""
        self._post(FellAsleep())
        limit_s = self._where.config.rank_timeout_s / 2
        if not self._where.live_memory.release(limit_s):
            logger.warning(
                "weightwire: weights are released that an update has been reading for more than %g s", limit_s
            )

    def free_kept(self) -> None:
        """Frees what the groups keep between updates, the way back too, but for a group whose update is on its way. Waits for
        it."""
        limit_s, answers = self._where.config.rank_timeout_s / 2, []
        for status in self.statuses():
            answers.append(_Answer())
            self._post(Request(answers[-1], Release(status.group)))
        if wait(answers, limit_s).not_done:
            logger.warning("weightwire: what updates keep on the device was not freed within %g s", limit_s)

    def awake(self) -> None:
        """The memory of the weights is there."""
        self._where.live_memory.take_back()
        self._post(Awake())

    def tear(self, group: str, txn: str, reason: str) -> None:
        """After the commit of `txn` this rank no longer knows what the group's parameters hold; nothing happens where there is no
        such group."""
        self._post(Tear(group, txn, reason))

    def tear_all(self, reason: str) -> None:
        """This rank no longer knows what any of its parameters hold."""
        self._post(TearAll(reason))

    def forget_versions(self, reason: str) -> dict[str, str]:
        """Somebody else writes the served model's weights: their versions are unknown until the next update. Without a `reason`
        only asks. Returns the groups whose version is unknown, and why."""
        why: dict[str, str] = self._ask(ForgetVersions, reason)
        return why

    def close(self) -> None:
        """Closes every group, and waits at most `CLOSE_S` for their work; work that goes on is a daemon thread's, and
        touches nothing that is live."""
        self._post(CloseAll())
        self._listeners.end()
        until_s = time.monotonic() + CLOSE_S
        works = list(self._works.values())
        hanging = sorted(work.name for work in works if not work.ends_within(max(0.0, until_s - time.monotonic())))
        if hanging:
            logger.warning(
                "weightwire: work for these groups did not end within %g s of closing: %s", CLOSE_S, first_few(hanging)
            )

    # --- events and actions ------------------------------------------------------------------------------------------

    def _ask(self, event: Callable[..., Event], *fields: Any) -> Any:
        """Returns the machine's answer to an event of the engine's thread, or raises its error. It comes at once."""
        answer = _Answer()
        self._post(event(answer, *fields))
        return answer.result(timeout=0)

    def _post(self, event: Event, now_s: float | None = None) -> None:
        with self._lock:
            before_s = self._machine.wakes_at_s
            actions = self._machine.on(event, time.monotonic() if now_s is None else now_s)
            is_sooner = self._machine.wakes_at_s < before_s
            for action in actions:
                if isinstance(action, StateChanged):  # under the lock for their order; it only puts them into a queue
                    self._tell(action)
        for action in actions:
            self._perform(action)
        if is_sooner:
            self.sooner()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Reply):
            action.asker.reply(action.body)
        elif isinstance(action, Fail):
            action.asker.fail(action.error)
        elif isinstance(action, Warn):
            logger.warning("weightwire: %s", action.text)
        elif isinstance(action, Cancel):
            if (work := self._works.get(action.member)) is not None:
                work.cancel(action.txn)
        elif isinstance(action, StartWork):
            try:
                self._work_of(action).start(action.number, action.work)
            except Exception as error:  # no thread can be started, say
                logger.exception("weightwire: work of group %s could not be started", action.group)
                self._post(WorkEnded(action.number, error=WeightwireError.wrap(error)))

    def _work_of(self, action: StartWork) -> GroupWork:
        if (work := self._works.get(action.member)) is None:
            work = GroupWork(action.group, self._where, self._make_installer, self._ended)
            self._works[action.member] = work
        return work

    def _ended(self, event: WorkEnded) -> None:
        self._post(event)
        for member in [member for member, work in list(self._works.items()) if work.over.is_set()]:
            self._works.pop(member, None)
            self._readings.pop(member, None)

    def _tell(self, change: StateChanged) -> None:
        """Calls listeners on a lane of their own, so that one that does not return blocks nothing else. The lane sleeps if there
        are none: while generation stands, it would take the interpreter from the engine's thread."""
        hook = plugin_manager().hook.weightwire_state_changed
        if hook.get_hookimpls() and self._listeners.waiting() < MAX_UNTOLD:
            told = {"replica": self._where.replica, "rank": self._where.rank}
            self._listeners.put(functools.partial(hook, **told, group=change.group, state=change.state))


class _Answer(Future[Any]):
    """The asker of the engine's own thread."""

    reply = Future.set_result
    fail = Future.set_exception
