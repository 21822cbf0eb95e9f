"""The events that the coordinator's machine takes, and the actions that it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from msgspec import Struct

from inference_plugin.engines.actions import EngineAction, Steps, StopSteps
from inference_plugin.engines.standing import Held
from inference_plugin.wire.errors import ErrorInfo, SyncTimeout
from inference_plugin.wire.messages import Body, Commit, Verify

__all__ = [
    "AllRead", "Asked", "Command", "ManagerEnded", "NotSubmitted", "Overwritten", "Perform", "Performed", "PublishCard",
    "Reply", "Start", "Submit", "TellFailure", "Turn", "VersionLost",
]  # fmt: skip

Start: TypeAlias = Callable[[], Steps[Body]]


@dataclass(eq=False, slots=True)
class Command:
    """A request that waits for the engine's thread, or runs there. `asker` gets the reply: the latest sender of the request.

    `due_s` is when to ask the engine's thread for a turn; `awaits` is the action whose result the command waits for.
    """

    phase: str
    start: Start
    body: Body | None = None
    asker: Any = None
    peer: bytes = b""
    due_s: float = math.inf
    expires_at_s: float = math.inf
    late: Callable[[], SyncTimeout] = lambda: SyncTimeout("")
    steps: Steps[Body] | None = None
    awaits: EngineAction | None = None
    is_giving_up: bool = False
    over: bool = False

    def gives_up_at_s(self) -> float:
        """When to end the command if it has not begun, or still waits for a step boundary."""
        waits = self.steps is None or (isinstance(self.awaits, StopSteps) and not self.is_giving_up)
        return self.expires_at_s if waits else math.inf

    def is_asked_again(self, body: Body, peer: bytes) -> bool:
        """Whether `body` repeats this request."""
        if isinstance(body, Commit) and isinstance(self.body, Commit):
            return body.txn == self.body.txn
        return body == self.body and (peer == self.peer or not isinstance(body, Verify))


# --- events -----------------------------------------------------------------------------------------------------------


class Asked(Struct, frozen=True):
    """A request came. `peer` sent it, `asker` gets the answer."""

    asker: Any
    body: Body
    peer: bytes = b""


class Turn(Struct, frozen=True):
    """The engine's thread stands between two steps, and runs this command."""

    command: Command


class Performed(Struct, frozen=True):
    """An action of a command was performed, or failed."""

    command: Command
    action: EngineAction
    value: Any = None
    error: BaseException | None = None


class NotSubmitted(Struct, frozen=True):
    """The engine's thread could not be asked for a turn."""

    command: Command


class AllRead(Struct, frozen=True):
    """Every message that had arrived was handled, so a lease that has run out was not renewed."""


class ManagerEnded(Struct, frozen=True):
    """The process of the manager that holds the replica has ended."""

    held: Held


class Overwritten(Struct, frozen=True):
    """The engine is about to write over its own weights, between two steps, on the thread that this event comes from. `asker` is
    told once generation is refused and the ranks know."""

    asker: Any
    reason: str


class VersionLost(Struct, frozen=True):
    """Somebody else wrote, or is about to write, the weights of this replica, whose ranks know it already. `unknown`: by
    group, who that is."""

    unknown: dict[str, str]


Event: TypeAlias = Asked | Turn | Performed | NotSubmitted | AllRead | ManagerEnded | Overwritten | VersionLost


# --- actions ------------------------------------------------------------------------------------------------------------


class Reply(Struct, frozen=True):
    """Answers a request."""

    asker: Any
    body: Body


class Submit(Struct, frozen=True):
    """Asks the engine's thread for a turn for this command."""

    command: Command


class Perform(Struct, frozen=True):
    """Performs an action on the engine's thread, which the event came from."""

    command: Command
    action: EngineAction


class PublishCard(Struct, frozen=True):
    """Writes and announces how the replica stands, from any thread."""


class TellFailure(Struct, frozen=True):
    """Logs and counts a commit that failed, once, however often its answer is asked for."""

    error: ErrorInfo


Action: TypeAlias = Reply | Submit | Perform | PublishCard | TellFailure
