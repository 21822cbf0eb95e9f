"""The actions that a command asks of the engine. A command is a generator: it yields an action and gets its result.

The shell (`coordinator`) performs each action on the engine's own thread, between two steps. Commands do nothing else:
they read no clock and no socket, so that a simulator can run them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from inference_plugin.engines.operations import RankOperation
from inference_plugin.wire.messages import Committed, InFlight, MemoryTag

__all__ = [
    "AnnounceCommit",
    "Ask",
    "EngineAction",
    "Finish",
    "Hold",
    "NoteSpan",
    "Publish",
    "Refuse",
    "Rest",
    "ResumeSteps",
    "Steps",
    "StopSteps",
    "TellListeners",
]


@dataclass(frozen=True)
class Ask:
    """Runs one operation on all ranks; the result is `list[RankReply]`. Fails with `PeerLost`."""

    operation: RankOperation


@dataclass(frozen=True)
class Finish:
    """Like `Ask`, and drops what the engine cached with the old version."""

    operation: RankOperation
    in_flight: InFlight


@dataclass(frozen=True)
class AnnounceCommit:
    """Tells the ranks which commit they run next, where each rank runs it itself (SGLang)."""

    plan: Any


@dataclass(frozen=True)
class StopSteps:
    """Stops stepping; running requests follow `in_flight`. The result says whether the engine stepped on before it stood."""

    in_flight: InFlight


@dataclass(frozen=True)
class Hold:
    """No step runs until `ResumeSteps`, whatever commits come; `asleep` is the memory that is released."""

    asleep: frozenset[MemoryTag]


@dataclass(frozen=True)
class ResumeSteps:
    """Undoes `StopSteps` and `Hold`."""


@dataclass(frozen=True)
class Refuse:
    """Requests are refused with that reason; None allows generation again."""

    reason: str | None


@dataclass(frozen=True)
class Publish:
    """Writes and announces how the replica stands, if that changed. Never fails."""


@dataclass(frozen=True)
class TellListeners:
    """Tells the log, the counters and third parties that a version was committed. Never fails."""

    group: str
    committed: Committed


@dataclass(frozen=True)
class NoteSpan:
    """Adds a span from `since_s` until now to the trace of the update. Never fails."""

    name: str
    since_s: float
    track: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rest:
    """Lets the engine step for `seconds` before the command goes on."""

    seconds: float


EngineAction: TypeAlias = (
    Ask | Finish | AnnounceCommit | StopSteps | Hold | ResumeSteps | Refuse | Publish | TellListeners | NoteSpan | Rest
)
Result = TypeVar("Result")
Steps: TypeAlias = Generator[EngineAction, Any, Result]
