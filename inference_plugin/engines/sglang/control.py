"""The ranks' part in turns, and with it the engine as its coordinator sees it.

The first rank leads a turn: it sends each operation to the others, and all gather their answers. A commit it sends once, with
all that the ranks need to know. From then on every rank runs `commit_on_all_ranks` by itself, and they only gather
their answers: after the check, after the installation and at the end.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from inference_plugin.devices import device_of
from inference_plugin.engines.actions import Steps
from inference_plugin.engines.commit import CommitPlan, commit_on_all_ranks
from inference_plugin.engines.control import CommandedEngine, EngineControl, stamp_of
from inference_plugin.engines.coordinator import ReplicaCoordinator
from inference_plugin.engines.monkeypatch import contained
from inference_plugin.engines.operations import RankOperation, RankReply, with_error
from inference_plugin.engines.rank_calls import RankCalls
from inference_plugin.engines.sglang.scheduler import SchedulerRank
from inference_plugin.engines.sglang.turn import EngineOperation, EngineReply, Step, Turn
from inference_plugin.engines.standing import Held, Standing
from inference_plugin.net.channel import context_of_process
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import CommitFailed, PeerLost, TornReplica, WeightwireError
from inference_plugin.wire.messages import Committed, InFlight, MemoryTag, Sender

__all__ = ["FollowerControl", "LeaderControl"]

logger = logging.getLogger("sglang.weightwire")


class _TurnControl(CommandedEngine):
    """The part that is the same on every rank. While `_in_commit`, all ranks run the same commit: nobody sends steps."""

    def __init__(self, rank: SchedulerRank) -> None:
        self._rank = rank
        self._ranks = rank.ranks
        self._in_commit = False
        self.rung = 0
        """How often the bells were rung from here."""

    def handle(self, turn: Turn) -> None:
        """SGLang's handler of a `Turn`. Nothing that fails here may reach SGLang's event loop: it would end the server."""
        try:
            self.take_turn()
        except Exception:
            self._rank.refuse_what_is_unknown()
            logger.exception("weightwire: rank %d left a turn", self._rank.rank)
        with contained("answering the bell", logger):
            self._rank.bell.quiet(turn.rung)

    @abc.abstractmethod
    def take_turn(self) -> None:
        """This rank's part of a turn. Raises where the ranks lose each other."""

    @abc.abstractmethod
    def tear(self, reason: str) -> None:
        """All ranks call it in the same pass, before SGLang writes over the weights: from now on the replica refuses to generate,
        until a full update heals it. Raises on every rank where one could not be told."""

    def wants_turn(self) -> bool:
        """Whether there is something to do; asked in each pass of the event loop."""
        return False

    def call_ranks(self, request: bytes) -> list[bytes]:
        return self._step(Step(rank=request))

    def finish(self, request: bytes, in_flight: InFlight) -> list[bytes]:
        answer = self._rank.perform(Step(rank=request))
        if decode_as(answer, RankReply).error is None:
            try:
                finished = decode_as(request, RankOperation)
                self.installed(finished.group, stamp_of(finished.version, [answer]), finished.txn, in_flight)
            except Exception as error:  # noqa: BLE001 -- the commit tears the replica, and then tells
                answer = with_error(answer, error)
        return self._ranks.gather(answer)

    def pause(self, in_flight: InFlight) -> Future[None] | None:
        device_of(self._rank.model.device).drain(self._rank.model.device)  # a forward pass may be queued
        self._rank.note_stop()  # bytes may be streamed for long
        if in_flight == "keep":
            return None  # no step runs within a turn
        if in_flight == "recompute":
            if not all(reply.done for reply in self._ask("retract")):
                raise CommitFailed("SGLang could not flush its cache with all requests retracted", phase="commit")
            return None
        self._ask(in_flight)
        return Future()

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        self._ask("stand")

    def resume(self) -> None:
        if self._in_commit:
            self._rank.resume()
        else:
            self._ask("resume")

    def installed(self, group: str, stamp: str, txn: str, in_flight: InFlight) -> None:
        self._rank.installed(group, stamp)

    def refuse(self, reason: str | None) -> None:
        try:
            self._rank.refuse(reason)  # this rank first: whoever can't be reached can't keep it from refusing
        finally:
            if reason is not None or not self._in_commit:
                self._ask("refuse", reason=reason)

    def _ask(self, name: Any, reason: str | None = None) -> list[EngineReply]:
        answers = self._step(Step(engine=EngineOperation(name, reason)))
        replies = [decode_as(answer, EngineReply) for answer in answers]
        for rank, reply in enumerate(replies):
            if reply.error is not None:
                raise PeerLost(f"the scheduler of rank {rank} failed in {name!r}: {reply.error}", rank=rank)
        return replies

    def _step(self, step: Step) -> list[bytes]:
        if not self._in_commit:
            self._ranks.broadcast(msgspec.msgpack.encode(step))
        return self._ranks.gather(self._rank.perform(step))


class LeaderControl(_TurnControl, EngineControl):
    """On the first rank, which has the coordinator: its commands wait for a turn. `bells` wake the other ranks."""

    def __init__(self, rank: SchedulerRank, bells: Sequence[str]) -> None:
        super().__init__(rank)
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._waiting: Future[None] | None = None
        self._commit_waits = False
        self._lock = threading.Lock()
        self._bells = [_connected(address) for address in bells if address]
        self._answered = 0
        self.coordinator: ReplicaCoordinator | None = None
        """Set once it serves."""

    def submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with self._lock:
            self.rung += 1
            for bell in self._bells:
                with contextlib.suppress(zmq.Again):  # a bell whose queue is full has been rung
                    bell.send(b"%d" % self.rung, zmq.DONTWAIT)

    def handle(self, turn: Turn) -> None:
        super().handle(turn)
        self._answered = turn.rung

    def wants_turn(self) -> bool:
        if self._waiting is not None and self._rank.is_idle():
            return True
        return bool(self._commands) or self._answered != self.rung

    def take_turn(self) -> None:
        """Runs the submitted commands up to the first commit; a commit is the last of its turn."""
        try:
            if self._waiting is not None and all(reply.done for reply in self._ask("flush")):
                waiting, self._waiting = self._waiting, None
                if self._commit_waits:
                    self._send_commit(Step(stopped=True))
                waiting.set_result(None)
            while self._commands and not self._in_commit:
                self._commands.popleft()()
        finally:
            ended, self._in_commit = self._in_commit, False
            if not ended:
                self._ranks.broadcast(msgspec.msgpack.encode(Step()))

    def tear(self, reason: str) -> None:
        assert self.coordinator is not None
        failed = True
        try:
            self.coordinator.tear(reason)
            failed = False
        finally:
            self._ranks.broadcast(msgspec.msgpack.encode(Step(failed=failed)))

    def announce_commit(self, plan: CommitPlan) -> None:
        self._send_commit(Step(commit=plan))

    def pause(self, in_flight: InFlight) -> Future[None] | None:
        self._waiting = super().pause(in_flight)  # `take_turn` completes it once all ranks are idle
        self._commit_waits = self._in_commit
        return self._waiting

    def resume(self) -> None:
        self._waiting = None
        super().resume()

    def _send_commit(self, step: Step) -> None:
        self._ranks.broadcast(msgspec.msgpack.encode(step))
        self._in_commit = True


class FollowerControl(_TurnControl):
    """On every other rank: it does what the first one sends, and runs commits by itself."""

    def __init__(self, rank: SchedulerRank) -> None:
        super().__init__(rank)
        self._calls = RankCalls(rank.ranks.size, {"side": "worker", "replica": rank.replica, "rank": rank.rank})
        self._commit: Steps[Committed] | None = None
        """The commit that waits until its requests have ended; stale once the first rank has given it up."""

    def take_turn(self) -> None:
        """Follows the first rank to the end of the turn."""
        while True:
            step = decode_as(self._ranks.broadcast(), Step)
            if step.commit is not None:
                self._commit = commit_on_all_ranks(step.commit, _standing_of(step.commit), time.monotonic, 0.0)
                return self._run_commit(None)
            if step.stopped:
                return self._run_commit(True)
            if step.failed:
                raise TornReplica("not all ranks could be told to refuse")
            if step.rank is None and step.engine is None:
                return None
            self._ranks.gather(self._rank.perform(step))

    def tear(self, reason: str) -> None:
        self.take_turn()

    def _run_commit(self, value: Any) -> None:
        """Runs the commit up to its end, or to a wait, which is the end of this turn."""
        commit, self._commit = self._commit, None
        assert commit is not None
        self._in_commit = True
        error: Exception | None = None
        try:
            while True:
                action = commit.send(value) if error is None else commit.throw(error)
                value, error = None, None
                try:
                    value = self.act(action, self._calls)
                except Exception as failed:  # noqa: BLE001 -- the commit decides, as it does on the first rank
                    error = failed
                if isinstance(value, Future):
                    self._commit = commit
                    return
        except StopIteration:
            pass  # committed
        except PeerLost:
            raise  # the ranks have lost each other
        except WeightwireError as failed:
            logger.debug("weightwire: a commit failed on rank %d: %s", self._rank.rank, failed)
        finally:
            self._in_commit = False


def _standing_of(plan: CommitPlan) -> Standing:
    """The replica as the first rank sees it, for a commit."""
    held = Held(Sender(""), 0.0, math.inf, "keep") if plan.held else None
    return Standing(held, dict(plan.torn), plan.must_stand)


def _connected(address: str) -> Any:
    bell: Any = context_of_process().socket(zmq.PUSH)
    bell.setsockopt(zmq.LINGER, 0)
    bell.connect(address)
    return bell
