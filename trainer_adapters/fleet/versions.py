"""Asks replicas which version of a group they serve."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from inference_plugin.net.channel import Outgoing, fan_out
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Describe, ReplicaCard, WorkerCard
from trainer_adapters.fleet.session import worker_connections

__all__ = ["NextVersion", "versions_of"]

logger = logging.getLogger(__name__)


def versions_of(cards: Sequence[ReplicaCard], group: str, timeout_s: float, silence_s: float) -> dict[str, int | None]:
    """Asks all replicas at once, over sockets of the calling thread. A replica that does not answer, is torn, or has not taken
    the group counts as None. Raises the first error if no replica answers."""
    with contextlib.ExitStack() as stack:
        requests = [
            Outgoing(stack.enter_context(connect()), Describe())
            for card in cards
            for connect in worker_connections(card, silence_s).values()
        ]
        replies = iter(fan_out(requests, WorkerCard, timeout_s=timeout_s))
        by_replica = {card.replica: [next(replies) for _ in card.workers] for card in cards}
    errors = {
        name: error
        for name, answers in by_replica.items()
        if (error := next((answer for answer in answers if isinstance(answer, WeightwireError)), None)) is not None
    }
    if errors and len(errors) == len(by_replica):
        raise next(iter(errors.values()))
    for name, error in errors.items():
        logger.warning("weightwire: replica %s did not say which version it serves: %s", name, error)
    found: dict[str, int | None] = {}
    for name, answers in by_replica.items():
        groups = [status for answer in answers if isinstance(answer, WorkerCard) for status in answer.groups]
        held = {status.version if status.state != "torn" else None for status in groups if status.group == group}
        found[name] = held.pop() if len(held) == 1 and name not in errors else None
    return found


class NextVersion:
    """The version that comes next, on rank 0: one more than the highest that this manager has sent or that a replica serves."""

    def __init__(self) -> None:
        self._highest = 0
        self._asked: set[str] = set()

    def sent(self, version: int) -> None:
        """An update to this version was tried; it may be installed somewhere even if the update failed."""
        self._highest = max(self._highest, version)

    def ask_again(self) -> None:
        """A replica serves more than was known here: another manager updates it too."""
        self._asked.clear()

    def after(self, cards: Sequence[ReplicaCard], group: str, timeout_s: float, silence_s: float) -> int:
        """The next version. Asks the replicas that were not asked before; those that do not answer count as serving none."""
        fresh = [card for card in cards if card.replica not in self._asked]
        if fresh:
            try:
                found = versions_of(fresh, group, timeout_s, silence_s)
            except WeightwireError as error:
                logger.warning("weightwire: new replicas did not say which version they serve: %s", error)
            else:
                self._asked = {card.replica for card in cards}
                self._highest = max([self._highest, *(version for version in found.values() if version is not None)])
        return self._highest + 1
