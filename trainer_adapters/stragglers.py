"""Which replicas an update waits for before it commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["BestEffort", "Quorum", "Stragglers"]


@dataclass(frozen=True)
class Quorum:
    """Commits as soon as `count` replicas are ready; aborts everywhere where fewer can be. The others keep their version
    until the next update."""

    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"a quorum is a number of replicas from 1 on, not {self.count!r}")


@dataclass(frozen=True)
class BestEffort:
    """Commits those that are ready `deadline_s` after the trainer has written. The others keep their version until the
    next update."""

    deadline_s: float

    def __post_init__(self) -> None:
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s must be positive, not {self.deadline_s!r}")


Stragglers: TypeAlias = Literal["report", "all"] | Quorum | BestEffort
"""`report`: waits for all for as long as the operation's time allows, commits those that are ready, and reports the others;
`all`: commits only where all are ready, else nowhere."""
