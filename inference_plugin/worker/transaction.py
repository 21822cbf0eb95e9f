"""What a group remembers of its terms, of the update on its way, and of the version that is served. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from inference_plugin.wire.errors import VersionConflict, WeightwireError
from inference_plugin.wire.messages import OpenGroup, Sealed, Sender
from inference_plugin.worker.actions import Mapped, Work

__all__ = ["Installed", "Job", "Opening", "Transaction", "served_already"]


def served_already(version: int, how: str) -> VersionConflict:
    """The error of an update whose number is served, unless its weights are known to be the same."""
    return VersionConflict(
        f"version {version} is served {how}",
        hint="every update needs a number of its own: leave `version` out, or go on with a higher one. This trainer has used the "
        "number before, another manager has, or this one has before it was restarted; if `version` was left out, call update "
        "again: it goes on above the other manager's",
    )


@dataclass(slots=True)
class Installed:
    """The version that is served. `keeps`: its staging is kept as the way back to it."""

    version: int
    txn: str
    digest: str
    sender: Sender
    segment_id: str
    keeps: bool


@dataclass(eq=False, slots=True)
class Transaction:
    """One update on its way."""

    txn: str
    version: int
    sender: Sender
    lease_s: float
    expires_at_s: float
    must_equal: str = ""
    """The digest of weights that are served under this version already."""
    begin_askers: list[Any] = field(default_factory=list)
    mapped: Mapped | None = None
    """Its staging, once it is there: the transaction has begun."""
    stands: bool = False
    """Whether the engine's thread takes streamed bytes."""
    stand_askers: list[tuple[Any, float]] = field(default_factory=list)
    """Askers that wait for it, each with the end of its wait."""
    next_seq: dict[int, int] = field(default_factory=dict)
    """By trainer rank: the bucket that is expected next."""
    sealing: str = ""
    """The digest of the list of pieces that is being checked, or was; "" before the first, and after one was refused."""
    covered: bool = False
    """Whether the list of pieces was accepted."""
    staging: bool = False
    """Whether `Stage` runs for it."""
    seal_askers: list[tuple[Any, float]] = field(default_factory=list)
    """Askers that wait for the seal, each with the end of its wait."""
    sealed: Sealed | None = None
    error: WeightwireError | None = None
    """The error that kept it from being sealed."""
    abort_askers: list[Any] = field(default_factory=list)
    warn_at_s: float = math.inf
    """When to log that its preparation does not end."""

    @property
    def streams(self) -> bool:
        """Whether its bytes go into the live parameters, while it is being committed."""
        return self.mapped is not None and self.mapped.streams


@dataclass(eq=False, slots=True)
class Opening:
    """An `OpenGroup` that is not answered yet."""

    request: OpenGroup
    askers: list[Any]
    error: WeightwireError | None = None


@dataclass(eq=False, slots=True)
class Job:
    """Queued or running work, and the asker that it answers."""

    work: Work
    asker: Any = None
    transaction: Transaction | None = None
    opening: Opening | None = None
