"""Rank 0's transaction and leases, whose waits are generators instead of blocking calls and threads."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from inference_plugin.wire.messages import GoTransport, ReplicaCard
from tests.simulation.world import Task, World
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.update.leases import Leases
from trainer_adapters.update.machine_io import AbortAll, Answered, BeginAll, Event, Joining, OpenAll, TellAbort, Tick
from trainer_adapters.update.transaction import ABORT_TIMEOUT_S, Transaction, segment_id

__all__ = ["SimulatedLeases", "SimulatedTransaction", "Steps"]

Steps: TypeAlias = Generator[float, None, Any]
"""Yields until when to sleep; goes on earlier where there is news."""


class SimulatedLeases(Leases):
    """The real round of renewals, as a task instead of a thread."""

    world: World
    _begun = False

    def renew(self, cards: Any) -> None:
        self.renewed = tuple(cards)
        if self.renewed and not self._begun:
            self._begun = True
            assert self.world.current is not None
            Task(self.world.current, self._rounds())

    def close(self) -> None:
        self.ended.set()

    def _rounds(self) -> Steps:
        channels: dict[str, Any] = {}
        due_s = self.world.now_s + self.every_s
        while not self.ended.is_set() and self.world.now_s < self.until_s:
            if self.world.now_s < due_s:
                yield due_s
                continue
            due_s = self.world.now_s + self.every_s
            self.renew_round(channels)
        for channel in channels.values():
            channel.close()


class SimulatedTransaction(Transaction):
    """The real transaction, whose waits are generators."""

    world: World
    _aborts: tuple[Any, ...] = ()

    def run(self, event: Event) -> Steps:
        """As `_run`."""
        self.do(event)
        yield from self.waiting()
        if self.machine.error is not None:
            raise self.machine.error

    def waiting(self) -> Steps:
        """As `_wait`."""
        machine, inquiry, world = self.machine, self.inquiry, self.world
        process = world.current
        assert process is not None
        while machine.is_busy:
            taken = inquiry.take(world.now_s)
            for channel, answer in taken:
                self.do(Answered(*self.places[channel], answer))
            if taken and (inquiry.unsent or not machine.is_busy):
                continue
            wakes_at_s = machine.wakes_at_s
            if world.now_s >= wakes_at_s:
                self.do(Tick())
                continue
            wakes_at_s = min(wakes_at_s, inquiry.look_at_s)
            frozen_s = process.frozen_s
            yield max(wakes_at_s, world.now_s + 1e-6)  # the time of a look may be one rounding error too early
            if (late_s := process.frozen_s - frozen_s) > 0:
                inquiry.forgive(late_s)  # `Inquiry.take` sees by its own wait that this process stood still

    def agree_on(self, sessions: list[ReplicaSession], place: Any, unreached: list[tuple[ReplicaCard, Any]]) -> Steps:
        """As `agree`."""
        self.sessions = {each.card.replica: each for each in sessions}
        self.cards = {card.replica: card for card in [*(s.card for s in sessions), *(card for card, _ in unreached)]}
        self.sent_before = {name: each.messages for name, each in self.sessions.items()}
        joining = [Joining(s.card.replica, len(s.workers), s.agreed) for s in sessions]
        yield from self.run(OpenAll(joining, {card.replica: error for card, error in unreached}))
        segments: dict[str, bytes] = {}
        if self.users_of("shm", "open"):
            segments["shm"] = place()
            self.segment_ids["shm"] = segment_id(segments["shm"])
        if self.users_of("stream", "open"):
            segments["stream"] = b""
        yield from self.run(BeginAll(segments))
        return tuple(
            GoTransport(name, at, tuple(target for user in users for target in self.targets(user)))
            for name, at in segments.items()
            if (users := self.users_of(name, "begun"))
        )

    def aborted(self, reason: str) -> Steps:
        """`AbortAll`, and waits a moment for the answers."""
        self.do(AbortAll(reason))
        yield from self.waiting()
        until_s = self.world.now_s + ABORT_TIMEOUT_S
        while any(channel.is_open for channel in self._aborts) and self.world.now_s < until_s:
            yield until_s

    def tell_abort(self, aborts: Any) -> None:
        asked: list[TellAbort] = list(aborts)
        channels: list[Any] = []
        for each in asked:
            for channel in self.sessions[each.replica].workers:
                channel.send(self.abort_request(each.reason))
                channels.append(channel)
        self._aborts = tuple(channels)
