"""Judges which operation each trainer rank is in, and what follows if they are in different ones. Pure.

Operations are told apart by name ("update:7", "verify"), never by how many each rank has begun: a rank that leaves one out, or
calls one twice, is together with the others again as soon as all are in the same operation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Turns", "Verdict"]

REMEMBERED = 64
"""Number of operations remembered per rank: a rank is rarely more than one or two behind."""

Verdict = Literal["joins", "late", "ahead", "astray", "waits"]
"""What becomes of a rank that reports for an operation:

- "joins": rank 0 is in that operation;
- "late": rank 0 has left it: that rank is told, and rank 0 goes on waiting for it;
- "ahead": that rank has left rank 0's operation: rank 0 fails, and that rank waits for rank 0's next one;
- "astray": neither is known: both fail, so that each goes on to its next operation;
- "waits": rank 0 is in no operation.
"""


@dataclass
class Turns:
    """What rank 0 knows. `now`: the operation that it is in."""

    now: str = ""
    _left: OrderedDict[str, set[int]] = field(default_factory=OrderedDict)
    _reported: dict[int, OrderedDict[str, None]] = field(default_factory=dict)

    def enter(self, operation: str) -> None:
        """Rank 0 begins an operation; the same one may have failed before."""
        self.now = operation
        self._left.pop(operation, None)

    def leave(self, untold: set[int]) -> None:
        """Rank 0's operation is over; the ranks in `untold` haven't heard how it ended."""
        if self.now:
            self._left[self.now] = set(untold)
        self.now = ""
        while len(self._left) > REMEMBERED:
            self._left.popitem(last=False)

    def knows_the_end(self, rank: int, operation: str) -> None:
        """A rank has heard how an operation ended, or has given it up: it may begin the same one again."""
        self._left.get(operation, set()).discard(rank)

    def has_left(self, operation: str) -> bool:
        """Whether rank 0 was in this operation, so that a rank that gives it up only gives up what is over."""
        return operation in self._left

    def judge(self, rank: int, operation: str) -> Verdict:
        """What becomes of a rank that is in `operation` and waits for rank 0."""
        if operation == self.now:
            return "joins"
        if rank in self._left.get(operation, ()):
            return "late"
        if not self.now:
            return "waits"
        if operation in self._left and _is_unique(operation):
            return "late"
        return "ahead" if self.now in self._reported.get(rank, ()) and _is_unique(self.now) else "astray"

    def reported(self, rank: int, operation: str) -> None:
        """A rank has begun `operation`."""
        mine = self._reported.setdefault(rank, OrderedDict())
        mine[operation] = None
        mine.move_to_end(operation)
        while len(mine) > REMEMBERED:
            mine.popitem(last=False)


def _is_unique(operation: str) -> bool:
    """Whether the name says which operation it is: an update has its version, a verification has no number."""
    return ":" in operation
