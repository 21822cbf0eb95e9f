"""The actions that a command asks of the engine. A command is a generator: it yields an action and gets its result.

The shell (`coordinator`) performs each action on the engine's own thread, between two steps. Commands do nothing else:
they read no clock and no socket, so that a simulator can run them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from inference_plugin.engines.operations import RankOperation
from inference_plugin.wire.messages import Committed, InFlight, MemoryTag

__all__ = [
    "AnnounceCommit", "Ask", "EngineAction", "Finish", "Hold", "NoteSpan", "Publish", "Refuse", "Rest", "ResumeSteps",
    "Steps", "StopSteps", "TellListeners",
]  # fmt: skip


class Ask(Struct, frozen=True):
    """Runs one operation on all ranks; the result is `list[RankReply]`. Fails with `PeerLost`."""

    operation: RankOperation


class Finish(Struct, frozen=True):
    """Like `Ask`, and drops what the engine cached with the old version."""

    operation: RankOperation
    in_flight: InFlight


class AnnounceCommit(Struct, frozen=True):
    """Tells the ranks which commit they run next, where each rank runs it itself (SGLang)."""

    plan: Any


class StopSteps(Struct, frozen=True):
    """Stops stepping; running requests follow `in_flight`. The result says whether the engine stepped on before it stood."""

    in_flight: InFlight


class Hold(Struct, frozen=True):
    """No step runs until `ResumeSteps`, whatever commits come; `asleep` is the memory that is released."""

    asleep: frozenset[MemoryTag]


class ResumeSteps(Struct, frozen=True):
    """Undoes `StopSteps` and `Hold`."""


class Refuse(Struct, frozen=True):
    """Requests are refused with that reason; None allows generation again."""

    reason: str | None


class Publish(Struct, frozen=True):
    """Writes and announces how the replica stands, if that changed. Never fails."""


class TellListeners(Struct, frozen=True):
    """Tells the log, the counters and third parties that a version was committed. Never fails."""

    group: str
    committed: Committed


class NoteSpan(Struct, frozen=True):
    """Adds a span from `since_s` until now to the trace of the update. Never fails."""

    name: str
    since_s: float
    track: str
    facts: dict[str, Any] = {}


class Rest(Struct, frozen=True):
    """Lets the engine step for `seconds` before the command goes on."""

    seconds: float


EngineAction: TypeAlias = (
    Ask | Finish | AnnounceCommit | StopSteps | Hold | ResumeSteps | Refuse | Publish | TellListeners | NoteSpan | Rest
)
Result = TypeVar("Result")
Steps: TypeAlias = Generator[EngineAction, Any, Result]
