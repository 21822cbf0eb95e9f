"""The coordinator: where an engine orders its work. It commits on all ranks of its replica at one step boundary.

A reply server (`net.reply_server`) reads requests on a thread of its own, so that a commit that waits for its boundary holds
nobody up. What to do about a request is decided in `machine`, under one short lock; what the machine asks of the engine is
performed here, on the engine's own thread, which `EngineControl.submit` reaches. No failure there reaches the engine's loop.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any

from inference_plugin.engines.actions import AnnounceCommit, EngineAction, NoteSpan, Publish, TellListeners
from inference_plugin.engines.commit import CommitPlan
from inference_plugin.engines.control import EngineControl
from inference_plugin.engines.events import (
    AllRead,
    Asked,
    Command,
    Event,
    ManagerEnded,
    NotSubmitted,
    Overwritten,
    Perform,
    Performed,
    PublishCard,
    Reply,
    Submit,
    TellFailure,
    Turn,
    VersionLost,
)
from inference_plugin.engines.machine import ReplicaMachine
from inference_plugin.engines.published_card import PublishedCard, replica_card
from inference_plugin.engines.rank_calls import RankCalls
from inference_plugin.engines.reach import check_reached
from inference_plugin.engines.recorder import CommitListeners, CommitRecorder
from inference_plugin.engines.standing import Held
from inference_plugin.net import addresses
from inference_plugin.net.processes import ProcessId
from inference_plugin.net.reply_server import Asker, ReplyServer, Service
from inference_plugin.wire.config import Config, misspelt_variables
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Body, Describe, Failed, ReplicaCard, ReplicaState, WorkerCard
from inference_plugin.wire.tracing import Trace, save, span_since, under

__all__ = ["ReplicaCoordinator", "open_coordinator"]

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20


def open_coordinator(
    control: EngineControl, replica: str, workers: Iterable[WorkerCard], **card: Any
) -> ReplicaCoordinator:
    """Starts a replica's coordinator and publishes its card: from now on trainers find it.

    `card`: the fields of `ReplicaCard` that the engine knows (engine, engine_version, model, tp, ...). Raises `EngineUnsupported`
    if a worker of another host can't be reached.
    """
    ordered = tuple(sorted(workers, key=lambda worker: worker.rank))
    check_reached(ordered)
    address = addresses.listen_address(replica, "f")
    coordinator = ReplicaCoordinator(
        control,
        address,
        {"side": "coordinator", "replica": replica},
        lambda listening: replica_card(replica=replica, address=listening, workers=ordered, **card),
    )
    for text in misspelt_variables():
        logger.warning("weightwire: %s", text)
    logger.info("weightwire: replica %s is ready for weight updates at %s", replica, coordinator.address)
    return coordinator


class ReplicaCoordinator(Service):
    """The coordinator's thread of one replica, and the engine's thread on its behalf."""

    def __init__(
        self, control: EngineControl, address: str, where: dict[str, Any], make_card: Callable[[str], ReplicaCard]
    ) -> None:
        """Serves at once. `make_card` gets the address."""
        self._control = control
        self._where = where
        self.machine = ReplicaMachine(where, addresses.boot_id())
        self._deciding = threading.Lock()
        self._traces: dict[Command, Trace | None] = {}
        self._profile_dir = Config.from_environment().profile_dir
        self._let_go: Held | None = None
        self._listeners = CommitListeners(where["replica"])
        self._recorder = CommitRecorder(where["replica"])
        self._warned: set[tuple[str, str]] = set()
        self._stopping = False
        self._published: PublishedCard | None = None
        self._server = ReplyServer(
            self,
            [address],
            name="weightwire-coordinator",
            where=where,
            max_bytes=MAX_REQUEST_BYTES,
            waits_for_room=True,
        )
        (self.address,) = self._server.addresses
        try:
            self._published = PublishedCard(make_card(self.address), self._described)
            self._calls = RankCalls(len(self.card.workers), where)
            self._server.start()
            self._listeners.start()
            self._recorder.start()
            self._published.start()
        except BaseException:
            self.close()
            raise

    @property
    def card(self) -> ReplicaCard:
        assert self._published is not None
        return self._published.card

    def close(self) -> None:
        """Stops serving and takes card and sockets away; may be called twice."""
        if self._stopping:
            return
        self._stopping = True
        if self._published is not None:
            self._published.close()
        self._server.close()
        self._listeners.close()
        self._recorder.close()
        if self._published is not None:
            with contextlib.suppress(OSError, WeightwireError):
                addresses.remove_replica(self.card.replica, self.card.job)

    # --- the coordinator's thread ------------------------------------------------------------------------------------------

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body | None:
        if isinstance(body, Describe):
            return self.card
        self._on(Asked(asker.reply, body, asker.peer))
        return None

    def processes(self) -> Collection[ProcessId]:
        """The process of the manager that holds the replica, if it is on this host, until the machine knows of its end."""
        held = self._held()
        if held is None or held is self._let_go or held.sender.boot_id != addresses.boot_id() or not held.sender.pid:
            return ()
        return ((held.sender.pid, held.sender.start_ticks),)

    def wakes_at_s(self) -> float:
        with self._deciding:
            return self.machine.wakes_at_s()

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        held = self._held()
        if held is not None and (held.sender.pid, held.sender.start_ticks) in ended:
            self._let_go = held
            self._on(ManagerEnded(held))
        self._on(AllRead())

    # --- any thread ---------------------------------------------------------------------------------------------------

    def _held(self) -> Held | None:
        with self._deciding:
            return self.machine.standing.held

    def _described(self) -> tuple[ReplicaState, str, dict[str, str]]:
        with self._deciding:
            standing = self.machine.standing
            return (*standing.described(), dict(standing.unknown))

    def _on(self, event: Event) -> None:
        """Has the machine decide about `event` under the lock, and acts outside of it. The result of an action on the engine is
        the next event."""
        command: Command | None = getattr(event, "command", None)
        following: Event | None = event
        perform: Perform | None
        while following is not None:
            with self._deciding:
                actions = self.machine.on(following, time.monotonic())
            following, perform = None, None
            for action in actions:
                if isinstance(action, Perform):
                    perform = action  # one at most, and the last to be acted on: it takes its time
                elif isinstance(action, Reply):
                    action.asker(action.body)
                elif isinstance(action, TellFailure):
                    self._recorder.tell_failure(action.error)
                elif isinstance(action, Submit):
                    self._submit(action.command)
                elif isinstance(action, PublishCard):
                    self._show()
            if perform is not None:
                following = self._perform(perform.command, perform.action)
        if command is not None and command.over:
            save(self._traces.pop(command, None))
        self._server.wake()  # the machine may have another time to wake at

    def _submit(self, command: Command) -> None:
        try:
            self._control.submit(lambda: self._contained(Turn(command)))
        except Exception:
            logger.exception("weightwire: the engine's thread can't be reached; trying on")
            self._on(NotSubmitted(command))

    def _show(self) -> None:
        if self._published is not None:
            self._published.show()

    # --- the engine's own thread --------------------------------------------------------------------------------------

    def tear(self, reason: str) -> None:
        """Between two steps, before the engine writes over its own weights: from now on the replica refuses to generate, until a
        full update heals it. Raises `TornReplica` where not all of the engine could be told."""
        told: list[Body] = []
        self._on(Overwritten(told.append, reason))
        if told and isinstance(told[0], Failed):
            raise WeightwireError.of(told[0].error)

    def lose_version(self, unknown: dict[str, str]) -> None:
        """Between two steps: somebody else writes the weights of these groups, and all ranks know it. Their version is unknown
        until their next update."""
        with self._deciding:
            if self.machine.standing.unknown == unknown:
                return
        for group, who in unknown.items():  # a trainer on the same devices has the engine sleep in each step
            level = logging.INFO if (group, who) in self._warned else logging.WARNING
            logger.log(level, "weightwire: %s: the version of %s is unknown until its next update", who, group)
            self._warned.add((group, who))
        self._on(VersionLost(unknown))
        self._recorder.tell_unknown(tuple(unknown))

    def _contained(self, event: Event) -> None:
        """`_on`, as the engine may call it: an exception would end its loop."""
        try:
            self._on(event)
        except Exception:
            logger.exception("weightwire: a command failed on the engine's thread")

    def _perform(self, command: Command, action: EngineAction) -> Performed | None:
        """Performs an action; None where its result comes later."""
        try:
            with under(self._traces.get(command)):
                value = self._do(command, action)
        except Exception as error:
            if isinstance(action, Publish | TellListeners | NoteSpan):  # nothing told can change what was done
                logger.exception("weightwire: %s failed", type(action).__name__)
                return Performed(command, action)
            return Performed(command, action, error=error)
        if not isinstance(value, Future):
            return Performed(command, action, value)

        def reached(future: Future[None]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            self._contained(Performed(command, action, True, error))

        value.add_done_callback(reached)
        return None

    def _do(self, command: Command, action: EngineAction) -> Any:
        match action:
            case AnnounceCommit(plan):
                self._begin_trace(command, plan)
                self._calls.check("check")
                self._control.announce_commit(plan)
            case Publish():
                self._show()
            case TellListeners(group, committed):
                self._recorder.tell_commit(group, committed)
                self._listeners.tell(group, committed.version, committed.stopped_s)
            case NoteSpan(name, since_s, track, facts):
                span_since(since_s, name, track, **facts)
            case _:
                return self._control.act(action, self._calls)
        return None

    def _begin_trace(self, command: Command, plan: CommitPlan) -> None:
        named = {"role": "coordinator", "replica": self._where["replica"], "group": plan.group}
        trace = Trace.begun(self._profile_dir, version=plan.version, txn=plan.txn, **named)
        if trace is not None:
            self._traces[command] = trace
