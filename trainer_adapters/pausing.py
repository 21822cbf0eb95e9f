"""Pauses and sleeps of all replicas at once, on rank 0.

They are asked for in the manager's thread, so that they come in one order with its updates; a thread of their own renews
their leases. A replica whose lease isn't renewed any longer, because this process ended or the link is lost, goes on by
itself (`inference_plugin.engines.hold` says when one that is asleep doesn't).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from inference_plugin.wire import addresses
from inference_plugin.wire.channel import Channel, Outgoing, fan_out
from inference_plugin.wire.errors import PeerLost, VersionConflict, WeightwireError
from inference_plugin.wire.messages import (
    Body,
    Done,
    InFlight,
    MemoryTag,
    Pause,
    RenewPause,
    ReplicaCard,
    Resume,
    Sender,
    SleepLevel,
    Stands,
)
from inference_plugin.wire.reports import PauseReport, ReplicaPause
from trainer_adapters.rank import Rank

__all__ = ["Pauses"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

Reply = TypeVar("Reply")


class Pauses:
    """What a manager holds. Above rank 0 nothing: all of it is rank 0's."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._held: dict[str, tuple[ReplicaCard, ReplicaPause]] = {}
        self._changing = threading.Lock()
        self._closing = threading.Event()
        self._renewer: threading.Thread | None = None

    def pause(self, in_flight: InFlight, level: SleepLevel) -> PauseReport:
        """Pauses every living replica, or puts it to sleep. Raises the first error if none stands, `PeerLost` if there is
        none."""
        if self._rank.registry is None:
            return PauseReport(())
        cards = self._rank.registry.cards()
        if not cards:
            raise PeerLost(
                f"no replica of job {addresses.job_name()!r} is running",
                hint="`weightwire doctor` tells what is there",
                side="manager",
                phase="pause",
            )
        settings = self._rank.settings
        request = Pause(
            Sender(self._rank.session, os.getpid(), addresses.boot_id()),
            settings.lease_s,
            in_flight,
            level,
            timeout_s=0.9 * settings.timeout_s,  # the front gives up a little earlier, so that its answer arrives
        )
        report = self._ask(cards, request)
        self._note(cards, report)
        if self._renewer is None:
            self._renewer = threading.Thread(target=self._renew, name="weightwire-pauses", daemon=True)
            self._renewer.start()
        if len(report.failed) == len(cards):
            report.raise_failed()
        return report

    def resume(self, tags: Sequence[MemoryTag] = ()) -> PauseReport:
        """Wakes every living replica, or only `tags` of its memory, and lets it go on once all of it is there. Raises the
        first error if none could."""
        if self._rank.registry is None:
            return PauseReport(())
        cards = self._rank.registry.cards()
        request = Resume(self._rank.session, tuple(tags), timeout_s=0.9 * self._rank.settings.timeout_s)
        report = self._ask(cards, request)
        self._note(cards, report)
        if cards and len(report.failed) == len(cards):
            report.raise_failed()
        return report

    def close(self) -> None:
        """Lets paused replicas go on. Those that are asleep stay so for as long as this process lives: it may be using
        their memory. May be called twice."""
        self._closing.set()
        with self._changing:
            awake = [card for card, stands in self._held.values() if not stands.asleep]
            self._held.clear()
        request = Resume(self._rank.session, timeout_s=CLOSE_TIMEOUT_S)
        for replica in self._ask(awake, request, timeout_s=CLOSE_TIMEOUT_S).failed:
            logger.warning("weightwire: replica %s was left paused: %s", replica.replica, replica.error)
        if self._renewer is not None:
            self._renewer.join()

    def _note(self, cards: Sequence[ReplicaCard], report: PauseReport) -> None:
        """Keeps whom to renew. One that failed to do as it was asked stands as it did."""
        with self._changing:
            there = {card.replica: card for card in cards}
            for gone in set(self._held) - set(there):
                del self._held[gone]
            for replica in report.replicas:
                if replica.state in ("paused", "asleep"):
                    self._held[replica.replica] = there[replica.replica], replica
                elif replica.state != "failed":
                    self._held.pop(replica.replica, None)

    def _ask(self, cards: Sequence[ReplicaCard], request: Body, timeout_s: float | None = None) -> PauseReport:
        timeout_s = timeout_s or self._rank.settings.timeout_s
        answers = ask_fronts(cards, request, Stands, timeout_s=timeout_s, silence_s=self._silence_s)
        return PauseReport(tuple(_replica(card, answer) for card, answer in zip(cards, answers, strict=True)))

    @property
    def _silence_s(self) -> float:
        return self._rank.settings.config.silence_s

    def _renew(self) -> None:
        every_s = self._rank.settings.lease_s / 3
        while not self._closing.wait(every_s):
            with self._changing:
                cards = [card for card, _ in self._held.values()]
            renew = RenewPause(self._rank.session)
            answers = ask_fronts(cards, renew, Done, timeout_s=every_s, silence_s=self._silence_s)
            for card, answer in zip(cards, answers, strict=True):
                if not isinstance(answer, WeightwireError):
                    continue
                logger.warning("weightwire: the pause of %s was not renewed: %s", card.replica, answer)
                if isinstance(answer, VersionConflict | PeerLost):  # and won't be
                    with self._changing:
                        self._held.pop(card.replica, None)


def ask_fronts(
    cards: Sequence[ReplicaCard], request: Body, kind: type[Reply], *, timeout_s: float, silence_s: float
) -> list[Reply | WeightwireError]:
    """The same request to the fronts of all these replicas at once, over sockets of the calling thread's own."""
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {"side": "front", "silence_s": silence_s}
        channels = [
            stack.enter_context(
                Channel(card.address, pid=card.pid, peer_boot_id=card.boot_id, replica=card.replica, **where)
            )
            for card in cards
        ]
        return fan_out([Outgoing(channel, request) for channel in channels], kind, timeout_s=timeout_s)


def _replica(card: ReplicaCard, answer: Stands | WeightwireError) -> ReplicaPause:
    if isinstance(answer, WeightwireError):
        return ReplicaPause(card.replica, card.engine, "failed", error=answer.at(replica=card.replica).info())
    return ReplicaPause(card.replica, card.engine, answer.state, answer.asleep)
