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
        self._renewed = tuple(cards)
        if self._renewed and not self._begun:
            self._begun = True
            assert self.world.current is not None
            Task(self.world.current, self._rounds())

    def close(self) -> None:
        self._ended.set()

    def _rounds(self) -> Steps:
        channels: dict[str, Any] = {}
        due_s = self.world.now_s + self._every_s
        while not self._ended.is_set() and self.world.now_s < self._until_s:
            if self.world.now_s < due_s:
                yield due_s
                continue
            due_s = self.world.now_s + self._every_s
            self._renew(channels)
        for channel in channels.values():
            channel.close()


class SimulatedTransaction(Transaction):
    """The real transaction, whose waits are generators."""

    world: World
    _aborts: tuple[Any, ...] = ()

    def run(self, event: Event) -> Steps:
        """As `_run`."""
        self._do(event)
        yield from self.waiting()
        if self._machine.error is not None:
            raise self._machine.error

    def waiting(self) -> Steps:
        """As `_wait`."""
        machine, inquiry, world = self._machine, self._inquiry, self.world
        process = world.current
        assert process is not None
        while machine.is_busy:
            taken = inquiry.take(world.now_s)
            for channel, answer in taken:
                self._do(Answered(*self._places[channel], answer))
            if taken and (inquiry._unsent or not machine.is_busy):
                continue
            wakes_at_s = machine.wakes_at_s
            if world.now_s >= wakes_at_s:
                self._do(Tick())
                continue
            wakes_at_s = min(wakes_at_s, inquiry.look_at_s)
            frozen_s = process.frozen_s
            yield max(wakes_at_s, world.now_s + 1e-6)  # the time of a look may be one rounding error too early
            if (late_s := process.frozen_s - frozen_s) > 0:
                inquiry._forgive(late_s)  # `Inquiry.take` sees by its own wait that this process stood still

    def agree_on(self, sessions: list[ReplicaSession], place: Any, unreached: list[tuple[ReplicaCard, Any]]) -> Steps:
        """As `agree`."""
        self._sessions = {each.card.replica: each for each in sessions}
        self._cards = {card.replica: card for card in [*(s.card for s in sessions), *(card for card, _ in unreached)]}
        self._sent_before = {name: each.messages for name, each in self._sessions.items()}
        joining = [Joining(s.card.replica, len(s.workers), s.agreed) for s in sessions]
        yield from self.run(OpenAll(joining, {card.replica: error for card, error in unreached}))
        segments: dict[str, bytes] = {}
        if self._users_of("shm", "open"):
            segments["shm"] = place()
            self._segment_ids["shm"] = segment_id(segments["shm"])
        if self._users_of("stream", "open"):
            segments["stream"] = b""
        yield from self.run(BeginAll(segments))
        return tuple(
            GoTransport(name, at, tuple(target for user in users for target in self._targets(user)))
            for name, at in segments.items()
            if (users := self._users_of(name, "begun"))
        )

    def aborted(self, reason: str) -> Steps:
        """`AbortAll`, and waits a moment for the answers."""
        self._do(AbortAll(reason))
        yield from self.waiting()
        until_s = self.world.now_s + ABORT_TIMEOUT_S
        while any(channel.is_open for channel in self._aborts) and self.world.now_s < until_s:
            yield until_s

    def _tell_abort(self, aborts: Any) -> None:
        asked: list[TellAbort] = list(aborts)
        channels: list[Any] = []
        for each in asked:
            for channel in self._sessions[each.replica].workers:
                channel.send(self._abort_request(each.reason))
                channels.append(channel)
        self._aborts = tuple(channels)
