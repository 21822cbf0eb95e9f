"""What an engine gives its coordinator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from inference_plugin.engines.actions import Ask, EngineAction, Finish, Hold, Refuse, ResumeSteps, StopSteps
from inference_plugin.engines.commit import CommitPlan
from inference_plugin.engines.operations import RankOperation, RankReply, with_error
from inference_plugin.engines.rank_calls import RankCalls
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.messages import InFlight, MemoryTag
from inference_plugin.wire.tracing import span

__all__ = ["UNKNOWN_VERSION", "CommandedEngine", "EngineControl", "stamp_of"]

UNKNOWN_VERSION = "unknown"
"""The stamp of answers by weights that somebody else wrote since the last update."""


class CommandedEngine(ABC):
    """What commands do with an engine, on its own thread between two steps. On an engine whose ranks run commits by themselves
    every rank has one."""

    @abstractmethod
    def call_ranks(self, request: bytes) -> list[bytes]:
        """Runs `RankRuntime.call(request)` on every rank between the same two steps. Raises if a rank is lost."""

    @abstractmethod
    def pause(self, in_flight: InFlight) -> Future[None] | None:
        """Stops stepping; running requests follow `in_flight`. Returns None if the engine stands. Otherwise it steps on, and
        completes the future on its own thread once it stands.

        No step runs between that and `resume`. On a replica that is held, `pause` only applies the policy to requests;
        "drain" is not asked for there.
        """

    @abstractmethod
    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        """After `pause`: no step runs until `resume`, whatever commits come. `asleep` is the memory that is released; called
        again as it changes."""

    @abstractmethod
    def resume(self) -> None:
        """Undoes `pause` and `hold`, also before the engine stands still; harmless if nothing is paused."""

    @abstractmethod
    def installed(self, group: str, stamp: str, txn: str, in_flight: InFlight) -> None:
        """All ranks hold a new version: drops the caches of the old one, and from now on outputs get that stamp. `txn`: the
        transaction that brought it; no other one of any training run has this id."""

    @abstractmethod
    def refuse(self, reason: str | None) -> None:
        """From now on every request is refused with `reason`; None allows generation again."""

    def announce_commit(self, plan: CommitPlan) -> None:  # noqa: B027 -- most engines have nothing to announce
        """The calls up to the next `resume` belong to this commit. An engine whose ranks run commits by themselves sends them
        the plan."""

    def act(self, action: EngineAction, calls: RankCalls) -> Any:
        """Performs what a command asks of the engine; returns the result. Does nothing for the coordinator's own actions."""
        match action:
            case Ask(operation):
                with span(operation.name):
                    return calls.ask(operation, self.call_ranks)
            case Finish(operation, in_flight):
                with span(operation.name):
                    return calls.ask(operation, lambda request: self.finish(request, in_flight))
            case StopSteps(in_flight):
                return self.pause(in_flight)
            case Hold(asleep):
                self.hold(asleep)
            case ResumeSteps():
                self.resume()
            case Refuse(reason):
                self.refuse(reason)
        return None

    def finish(self, request: bytes, in_flight: InFlight) -> list[bytes]:
        """`call_ranks` and `installed`, as one step of a commit."""
        answers = self.call_ranks(request)
        try:
            finished = decode_as(request, RankOperation)
            with span("caches"):
                self.installed(finished.group, stamp_of(finished.version, answers), finished.txn, in_flight)
        except Exception as error:  # noqa: BLE001 -- the commit tears the replica, and then tells
            return [with_error(answer, error) for answer in answers]
        return answers


class EngineControl(CommandedEngine):
    """The engine as its coordinator sees it. All but `submit` are called on the engine's own thread, between two steps."""

    @abstractmethod
    def submit(self, command: Callable[[], None]) -> None:
        """Any thread: has `command` run on the engine's own thread between two steps, soon even if the engine is idle."""


def stamp_of(version: int, finished: Sequence[bytes]) -> str:
    """The stamp of outputs once ranks have finished that version. A version of one group does not tell what somebody else wrote
    to the parameters of another."""
    commits = [decode_as(answer, RankReply).commit for answer in finished]
    return UNKNOWN_VERSION if any(commit is not None and commit.unknown for commit in commits) else str(version)
