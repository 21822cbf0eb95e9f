"""Asks replicas which version of a group they serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from inference_plugin.wire.errors import MAX_NUMBER, VersionConflict, WeightwireError
from inference_plugin.wire.messages import Describe, GroupStatus, ReplicaCard, WorkerCard
from trainer_adapters.fleet.session import ask_workers

__all__ = ["NextVersion", "versions_of"]

logger = logging.getLogger(__name__)


def versions_of(cards: Sequence[ReplicaCard], group: str, timeout_s: float, silence_s: float) -> dict[str, int | None]:
    """Asks all replicas at once, over sockets of the calling thread. A replica that does not answer, is torn, or has not taken
    the group counts as None. Raises the first error if no replica answers."""
    torn = {card.replica for card in cards if card.state == "torn"}  # its workers may not know it
    statuses, silent = _statuses(cards, group, timeout_s, silence_s)
    versions: dict[str, int | None] = {}
    for replica, of_ranks in statuses.items():
        held = {status.version if status.state != "torn" else None for status in of_ranks}
        versions[replica] = held.pop() if len(held) == 1 and replica not in torn | silent else None
    return versions


def _statuses(
    cards: Sequence[ReplicaCard], group: str, timeout_s: float, silence_s: float
) -> tuple[dict[str, list[GroupStatus]], set[str]]:
    """What the workers of each replica say of the group, and the replicas of which not all workers answered. Raises the first
    error if those are all."""
    answers = ask_workers(cards, Describe(), WorkerCard, timeout_s=timeout_s, silence_s=silence_s)
    statuses: dict[str, list[GroupStatus]] = {card.replica: [] for card in cards}
    errors: dict[str, WeightwireError] = {}
    for card, answers_of_replica in zip(cards, answers, strict=True):
        for answer in answers_of_replica:
            if isinstance(answer, WeightwireError):
                errors.setdefault(card.replica, answer)
            else:
                statuses[card.replica] += [status for status in answer.groups if status.group == group]
    if errors and len(errors) == len(statuses):
        raise next(iter(errors.values()))
    for name, error in errors.items():
        logger.warning("weightwire: replica %s did not say which version it serves: %s", name, error)
    return statuses, set(errors)


class NextVersion:
    """The version that comes next, on rank 0: one more than the highest that this manager has sent or that a replica serves, or
    served before it was torn."""

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
        """The next version. Asks the replicas that were not asked before; those that do not answer count as serving none. Raises
        `VersionConflict` after the last one that there is."""
        fresh = [card for card in cards if card.replica not in self._asked]
        if fresh:
            try:
                statuses, _ = _statuses(fresh, group, timeout_s, silence_s)
            except WeightwireError as error:
                logger.warning("weightwire: new replicas did not say which version they serve: %s", error)
            else:
                self._asked = {card.replica for card in cards}
                held = [status.version for of_ranks in statuses.values() for status in of_ranks]
                self._highest = max([self._highest, *(version for version in held if version is not None)])
        if self._highest + 1 >= MAX_NUMBER:
            raise VersionConflict(
                f"no version comes after {self._highest}: a version is below 2**62",
                hint="call close_group(), then number the versions of a new SyncManager from 0",
            )
        return self._highest + 1
