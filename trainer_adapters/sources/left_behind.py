"""Slices that ranks make together and that nobody takes any more: their update is over, and another rank that failed, or skipped
the update, keeps this one waiting in a collective.

Whatever collective comes next on that rank's side would meet the one that still waits here: tensors of two updates in one, or a
process that the backend aborts. So the ranks ask each other before: each run that a caller has given up is noted here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from inference_plugin.wire.errors import ProtocolError

__all__ = ["any_left", "leave", "still_made_on"]

_left: set[threading.Thread] = set()


def leave(thread: threading.Thread) -> None:
    """Notes a thread that still makes slices, for as long as it does."""
    _left.add(thread)


def any_left(until_s: float = 0.0) -> bool:
    """Whether slices are still made for an update that is over. Waits for their end until `until_s` (of `time.monotonic()`)."""
    for thread in list(_left):
        thread.join(max(0.0, until_s - time.monotonic()))
        if not thread.is_alive():  # also a fork's, where its parent's threads don't run
            _left.discard(thread)
    return bool(_left)


def still_made_on(ranks: Sequence[int]) -> ProtocolError:
    """The error for an operation that must not begin before those slices have ended on these ranks."""
    return ProtocolError(
        f"trainer ranks {list(ranks)} are still in the export of an update that failed",
        hint="a rank that failed, or skipped that update, left them in a collective; start the trainer's ranks anew, or wait for "
        "the time limit of their process group",
        side="trainer",
        rank=ranks[0],
    )
