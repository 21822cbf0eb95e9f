"""What happens to a worker's groups.

Plain data. An `asker` is the shell's handle for one answer; the machine hands it back exactly once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import Struct

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Body

__all__ = [
    "Awake", "CheckCommitting", "CheckSealed", "CloseAll", "Event", "Finished", "Install", "LookAtWeights", "MaySleep",
    "Process", "ReleaseCheck", "Request", "StartUndo", "Tear", "TearAll", "Tick", "Undone", "WorkEnded",
]  # fmt: skip

Process = tuple[int, int]
"""A process of this host: its pid and its start."""


class Request(Struct, frozen=True):
    """A request came in at the worker's socket. `payload` is a bucket's."""

    asker: Any
    body: Body
    payload: memoryview | None = None


class Tick(Struct, frozen=True):
    """Time has passed, and every earlier request was handled. `ended`: processes that have ended, as far as the shell knows."""

    ended: Collection[Process] = ()


class WorkEnded(Struct, frozen=True):
    """The work that `StartWork` numbered has ended: its result, or the error that it raised."""

    number: int
    result: Any = None
    error: WeightwireError | None = None


class CheckSealed(Struct, frozen=True):
    """First half of a commit; answered with the earlier `RankCommit` if it is committed already, else with None."""

    asker: Any
    group: str
    txn: str
    version: int


class ReleaseCheck(Struct, frozen=True):
    """Takes `CheckSealed` back: another rank was not ready. Answered with None."""

    asker: Any
    group: str


class Install(Struct, frozen=True):
    """The engine's thread is about to write the live model; answered with the version that it may write."""

    asker: Any
    group: str
    txn: str


class CheckCommitting(Struct, frozen=True):
    """Is the transaction being committed? Answered with whether all bytes are sealed, or with the error that keeps some away."""

    asker: Any
    group: str
    txn: str


class Finished(Struct, frozen=True):
    """The installer has finished; answered with `RankCommit`. `keeps`: it needs the new version's bytes as the way back."""

    asker: Any
    group: str
    txn: str
    install_s: float
    keeps: bool


class StartUndo(Struct, frozen=True):
    """The engine's thread is about to go back; answered with `WayBack`."""

    asker: Any
    group: str


class Undone(Struct, frozen=True):
    """The engine's thread went back to the previous version, or failed to (`error`). Answered with None, or `TornReplica`."""

    asker: Any
    group: str
    reason: str
    error: str | None = None


class Tear(Struct, frozen=True):
    """This rank no longer knows what the group's parameters hold, after the commit of `txn`."""

    group: str
    txn: str
    reason: str


class TearAll(Struct, frozen=True):
    """This rank no longer knows what any of its parameters hold."""

    reason: str


class ForgetVersions(Struct, frozen=True):
    """Somebody else writes, or has written, the served model's weights: which version they are is unknown until the next update.
    Answered with the groups whose version is unknown, and why. Without a `reason` it is only that question."""

    asker: Any
    reason: str


class MaySleep(Struct, frozen=True):
    """The memory of the weights is about to go, with `discard` for good; answered with None if it may."""

    asker: Any
    discard: bool


class FellAsleep(Struct, frozen=True):
    """A command of the engine's own releases the memory of the weights."""


class Awake(Struct, frozen=True):
    """The memory of the weights is there again."""


class LookAtWeights(Struct, frozen=True):
    """A verification is about to read the live parameters, or has read some; answered with `WeightsState`."""

    asker: Any
    group: str


class CloseAll(Struct, frozen=True):
    """The worker shuts down."""


Event = (
    Request
    | Tick
    | WorkEnded
    | CheckSealed
    | ReleaseCheck
    | Install
    | CheckCommitting
    | Finished
    | StartUndo
    | Undone
    | Tear
    | TearAll
    | ForgetVersions
    | MaySleep
    | FellAsleep
    | Awake
    | LookAtWeights
    | CloseAll
)
