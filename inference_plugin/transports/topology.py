"""Ranks of process groups: plain values in, plain values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from inference_plugin.wire.errors import ProtocolError, TransportUnavailable

__all__ = ["SENDER", "GroupPlan", "Process", "plan_groups"]

SENDER = 0
"""The sender's rank in its own group."""


class Process(NamedTuple):
    """A process of any host: the host's boot and pid namespace (`net.addresses.boot_id`), and the pid there."""

    boot_id: str
    pid: int


@dataclass(frozen=True)
class GroupPlan:
    """One group: trainer rank `sender` is its rank 0; the workers' processes are 1, 2, ... in order."""

    sender: int
    receivers: tuple[Process, ...]

    @property
    def size(self) -> int:
        return 1 + len(self.receivers)

    def rank_of(self, worker: Process) -> int:
        """A worker's rank. Raises `ProtocolError` for a process outside the group."""
        try:
            return 1 + self.receivers.index(worker)
        except ValueError:
            raise ProtocolError(f"process {worker.pid} has no part in this update's groups") from None


def plan_groups(senders: int, receivers: Sequence[Process]) -> tuple[GroupPlan, ...]:
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
