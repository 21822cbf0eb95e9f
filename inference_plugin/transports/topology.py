"""Ranks of process groups: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_plugin.wire.errors import ProtocolError, TransportUnavailable

__all__ = ["SENDER", "GroupPlan", "plan_groups"]

SENDER = 0
"""The sender's rank in its own group."""


@dataclass(frozen=True)
class GroupPlan:
    """One group: trainer rank `sender` is its rank 0; the workers, by pid, are 1, 2, ... in order."""

    sender: int
    receivers: tuple[int, ...]

    @property
    def size(self) -> int:
        return 1 + len(self.receivers)

    def rank_of(self, pid: int) -> int:
        """A worker's rank. Raises `ProtocolError` for a process outside the group."""
        try:
            return 1 + self.receivers.index(pid)
        except ValueError:
            raise ProtocolError(f"process {pid} has no part in this update's groups") from None


def plan_groups(senders: int, receivers: Sequence[int]) -> tuple[GroupPlan, ...]:
    """A group per trainer rank, in their order, each with all receivers in the order given; none where nobody receives.

    Depends on its arguments only, so both sides come to the same groups. Raises `TransportUnavailable` where two workers
    are one process, which can't be two ranks.
    """
    if len(set(receivers)) != len(receivers):
        raise TransportUnavailable(
            "collective: two workers live in one process, which can't be two ranks of a group",
            hint="use transport 'shm' or 'zmq', or engines with processes of their own",
        )
    return tuple(GroupPlan(sender, tuple(receivers)) for sender in range(senders)) if receivers else ()
