"""Hints about a replica that was silent or lost, for each stage of an update."""

from __future__ import annotations

__all__ = ["LEFT_OUT", "NOTHING_APPLIED", "STREAMED", "UNKNOWN"]

NOTHING_APPLIED = "nothing was applied: the old version is served, and the next update needs no restart"

LEFT_OUT = (
    "if it still runs, it serves the version that it had, and is caught up, or the next update brings it up; else start "
    "it again"
)

STREAMED = "a replica with streamed bytes refuses to generate (torn) until the next update of the whole group"

UNKNOWN = (
    "if it still runs, it serves the old version or the new one: `versions()` asks it, the next update brings it up; else "
    "start it again"
)
