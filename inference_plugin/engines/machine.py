"""The decisions of a replica's coordinator: an event and the time go in, actions come out.

Commits, pauses and resumes take turns on the engine's thread, in the order in which they came. Verifications are read one at
a time, in portions that may fall between the turns of the others. Each of these is a `Command`: a generator that yields what
it wants of the engine (`actions`) and gets the result. A command that waits (for requests to end, or between two portions)
lets the engine step.

Nothing here blocks, reads a clock, or knows a socket, a thread or an engine. The shell (`coordinator`) does, and calls `on` under
a lock, from the thread of its socket and from the engine's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from inference_plugin.engines import pauses
from inference_plugin.engines.actions import AnnounceCommit, Rest, Steps, StopSteps, TellListeners
from inference_plugin.engines.commit import CommitPlan, commit_on_all_ranks
from inference_plugin.engines.events import (
    Action,
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
    Start,
    Submit,
    TellFailure,
    Turn,
    VersionLost,
)
from inference_plugin.engines.standing import Held, Standing, printable
from inference_plugin.engines.verifications import Reading, verify
from inference_plugin.wire.errors import (
    ErrorInfo,
    ProtocolError,
    SyncTimeout,
    TornReplica,
    WeightwireError,
)
from inference_plugin.wire.messages import (
    Body,
    Commit,
    Committed,
    Done,
    Failed,
    Pause,
    RenewPause,
    Resume,
    Verify,
)
from inference_plugin.worker.requests import still_committing

__all__ = ["ReplicaMachine"]

logger = logging.getLogger(__name__)

MAX_COMMANDS = 1024
"""Longest queue of commits, pauses and resumes."""
MAX_VERIFICATIONS = 64
SUBMIT_AGAIN_S = 0.1
"""Rest before the engine's thread is asked again for a turn, where it could not be reached."""


class ReplicaMachine:
    """The coordinator of one replica. `where` are the fields of its errors; `boot_id` is this host's."""

    def __init__(self, where: dict[str, Any], boot_id: str) -> None:
        self.standing = Standing()
        self._where = where
        self._boot_id = boot_id
        self._now_s = 0.0
        self._count = 0
        self.commands: list[Command] = []
        """Commits, pauses and resumes, in the order in which they came. The first one has the engine's thread."""
        self._verifications: list[Command] = []
        self._actions: list[Action] = []
        self._answers: dict[str, tuple[str, Committed | Failed]] = {}
        """Of each group's last commit that committed or tore: its transaction, and the answer, which may get lost and be asked
        for again. Where a rank was lost, no turn would come for a second attempt."""

    def on(self, event: Event, now_s: float) -> list[Action]:
        """The actions that follow from `event`. Never raises, whatever a peer asks."""
        self._now_s, self._actions = now_s, []
        if isinstance(event, Performed):
            if event.command.awaits is event.action:
                self._advance(event.command, event.value, event.error)
        elif isinstance(event, Asked):
            try:
                self._take(event)
            except Exception as error:  # noqa: BLE001 -- it is the answer
                self._reply(event.asker, self._failed(error))
        elif isinstance(event, Turn):
            self._turn(event.command)
        elif isinstance(event, NotSubmitted):
            event.command.due_s = now_s + SUBMIT_AGAIN_S
        elif isinstance(event, AllRead):
            if (held := self.standing.held) is not None and held.expires_at_s <= now_s:
                self._let_go(held, gone=False)
        elif isinstance(event, ManagerEnded):
            self._let_go(event.held, gone=True)
        elif isinstance(event, Overwritten):
            self._tear(event)
        elif isinstance(event, VersionLost):
            self.standing.unknown = {group: printable(why) for group, why in event.unknown.items()}
            self._actions.append(PublishCard())
        self._tick()
        return self._actions

    def wakes_at_s(self) -> float:
        """When to send `AllRead`, if every message was read, and nothing happened before."""
        every = [*self.commands, *self._verifications]
        heads = [*self.commands[:1], *self._verifications[:1]]
        times_s = [command.gives_up_at_s() for command in every] + [command.due_s for command in heads]
        if (held := self.standing.held) is not None:
            times_s.append(held.expires_at_s)
        return min(times_s, default=math.inf)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _take(self, asked: Asked) -> None:
        body = asked.body
        if isinstance(body, RenewPause):
            was_orphaned = self.standing.renew(body.session, self._now_s)
            self._reply(asked.asker, Done())
            if was_orphaned:
                self._actions.append(PublishCard())
            return
        if not isinstance(body, Commit | Pause | Resume | Verify):
            raise ProtocolError(f"a coordinator takes no {type(body).__name__}")
        queue, limit = self.commands, MAX_COMMANDS
        if isinstance(body, Verify):
            queue, limit = self._verifications, MAX_VERIFICATIONS
        for known in queue:
            if known.is_asked_again(body, asked.peer):
                known.asker = asked.asker
                return
        if isinstance(body, Commit):
            txn, answer = self._answers.get(body.group, ("", None))
            torn = self.standing.torn
            holds = body.group in torn if isinstance(answer, Failed) else not torn
            if answer is not None and txn == body.txn and holds:
                self._reply(asked.asker, answer)
                return
        if len(queue) >= limit:
            raise ProtocolError(
                f"{limit} requests of this kind wait for the engine", hint="wait for the answers to earlier ones"
            )
        first = self.commands[0].body if self.commands and self.commands[0].steps is not None else None
        if isinstance(body, Commit) and isinstance(first, Commit) and first.group == body.group:
            raise still_committing()
        phase, now_s = type(body).__name__.lower(), self._now_s
        start, late = self._command_of(body)
        queue.append(Command(phase, start, body, asked.asker, asked.peer, now_s, now_s + body.timeout_s, late))

    def _command_of(self, body: Commit | Pause | Resume | Verify) -> tuple[Start, Callable[[], SyncTimeout]]:
        """How the command of a request begins, and its error where it comes too late."""
        standing, submitted_s = self.standing, self._now_s
        if isinstance(body, Commit):
            return partial(self._commit, body, submitted_s), lambda: SyncTimeout(
                f"no step boundary by policy {body.in_flight!r} within {body.timeout_s:g} s",
                hint="the old version is served; give the commit more time, or use another policy for requests in flight",
            )
        if isinstance(body, Pause):
            return partial(pauses.pause, standing, body, self._clock), lambda: SyncTimeout(
                f"no step boundary by policy {pauses.pause_policy(body)!r} within {body.timeout_s:g} s",
                hint="the replica goes on; give the pause more time, or use another policy for requests in flight",
            )
        if isinstance(body, Resume):
            return partial(pauses.resume, standing, body), lambda: SyncTimeout(
                f"the engine's thread was not free within {body.timeout_s:g} s"
            )
        reading = Reading(body, self._unique("verify"))
        return partial(verify, standing, reading, self._clock), reading.late

    def _commit(self, request: Commit, submitted_s: float) -> Steps[Committed]:
        standing, in_flight = self.standing, request.in_flight
        forbidden: ErrorInfo | None = None
        try:
            in_flight = standing.policy(in_flight)
        except WeightwireError as error:
            forbidden = error.info()
        plan = CommitPlan(
            nonce=self._unique(request.txn),
            group=request.group,
            txn=request.txn,
            version=request.version,
            asked_in_flight=request.in_flight,
            in_flight=in_flight,
            forbidden=forbidden,
            held=standing.held is not None,
            must_stand=standing.must_stand,
            torn=dict(standing.torn),
        )
        yield AnnounceCommit(plan)
        try:
            committed = yield from commit_on_all_ranks(plan, standing, self._clock, submitted_s)
        except Exception as failure:
            if standing.torn.get(plan.group) != plan.torn.get(plan.group):
                place = {"phase": "commit", "group": plan.group, "version": plan.version, **self._where}
                self._answers[plan.group] = (plan.txn, Failed(WeightwireError.wrap(failure).at(**place).info()))
            raise
        self._answers[request.group] = (request.txn, committed)
        if not committed.already:
            yield TellListeners(request.group, committed)
        return committed

    def _tear(self, event: Overwritten) -> None:
        """Runs at once, ahead of the queue: the engine's thread waits for it."""

        def start() -> Steps[Body]:
            yield from self.standing.tear_model(event.reason)
            logger.warning("weightwire: %s: generation is refused until a full update", event.reason)
            if self.standing.must_stand:
                raise TornReplica(
                    "not all of the engine could be told to refuse, so its weights must not be written over"
                )
            return Done()

        self._advance(Command("overwrite", start, asker=event.asker, steps=start()))

    def _let_go(self, held: Held, *, gone: bool) -> None:
        """Has the replica resumed, once for each reason."""
        held.expires_at_s = math.inf
        sender = held.sender
        stays_asleep = bool(sender.pid) and sender.boot_id == self._boot_id

        def start() -> Steps[Body]:
            if self.standing.held is not held or (not gone and held.expires_at_s < math.inf):
                return Done()  # it was resumed or renewed meanwhile
            return (yield from pauses.let_go(self.standing, held, gone=gone, stays_asleep=stays_asleep))

        self.commands.append(Command("resume", start, due_s=self._now_s))

    # --- the queue ----------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Ends the commands that are late, and asks for the turns that are due."""
        for command in [*self.commands, *self._verifications]:
            if command.gives_up_at_s() > self._now_s:
                continue
            if command.steps is None:
                self._end(command, self._failed(command.late(), command))
            else:  # on the engine's thread, which resumes it
                command.is_giving_up, command.due_s = True, self._now_s
        for head in [*self.commands[:1], *self._verifications[:1]]:
            if head.due_s <= self._now_s:
                head.due_s = math.inf
                self._actions.append(Submit(head))

    def _turn(self, command: Command) -> None:
        if command.over or command.gives_up_at_s() <= self._now_s:
            return  # the engine isn't stopped for a request that nobody waits for: `_tick` answers it
        if command.steps is None:
            command.steps = command.start()
            self._advance(command)
        elif command.is_giving_up and isinstance(command.awaits, StopSteps):
            self._advance(command, error=command.late())
        elif isinstance(command.awaits, Rest):
            self._advance(command, error=command.late() if command.expires_at_s <= self._now_s else None)

    def _advance(self, command: Command, value: Any = None, error: BaseException | None = None) -> None:
        """Runs a command up to its next action, or to its end."""
        assert command.steps is not None
        command.awaits = None
        try:
            action = command.steps.send(value) if error is None else command.steps.throw(error)
        except StopIteration as done:
            self._end(command, done.value)
        except Exception as failure:  # noqa: BLE001 -- it is the answer
            self._end(command, self._failed(failure, command))
        else:
            command.awaits = action
            if isinstance(action, Rest):
                command.due_s = self._now_s + action.seconds
            else:
                self._actions.append(Perform(command, action))

    def _end(self, command: Command, body: Body) -> None:
        command.over = True
        for queue in (self.commands, self._verifications):
            if command in queue:
                queue.remove(command)
        if command.asker is not None:
            self._reply(command.asker, body)
        if isinstance(command.body, Commit) and isinstance(body, Failed):
            self._actions.append(TellFailure(body.error))

    def _reply(self, asker: Any, body: Body) -> None:
        self._actions.append(Reply(asker, body))

    def _failed(self, error: Exception, command: Command | None = None) -> Failed:
        if not isinstance(error, WeightwireError) or (command is not None and command.asker is None):
            logger.error("weightwire: a request to the coordinator failed", exc_info=error)
        place: dict[str, Any] = {}
        if command is not None:
            place = {"phase": command.phase, "group": getattr(command.body, "group", "")}
            place["version"] = getattr(command.body, "version", None)
        return Failed(WeightwireError.wrap(error).at(**place, **self._where).info())

    def _unique(self, name: str) -> str:
        self._count += 1
        return f"{name}.{self._count}"

    def _clock(self) -> float:
        return self._now_s
