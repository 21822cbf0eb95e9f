"""The channels to one replica, and the terms agreed with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel, Outgoing, coordinator_channel, fan_out, worker_channel
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.host_memory import free_host_bytes
from inference_plugin.wire.messages import Body, ReplicaCard, Target, WorkerCard
from trainer_adapters.fleet.asking import Ask, Connect
from trainer_adapters.fleet.machine_io import Agreed

__all__ = ["ReplicaSession", "all_connections", "ask_workers", "worker_connections"]

Reply = TypeVar("Reply")


def worker_connections(card: ReplicaCard, silence_s: float) -> dict[str, Connect]:
    """For each worker's address, a function that connects to the worker."""
    return {w.address: functools.partial(worker_channel, card, w, silence_s) for w in card.workers}


def all_connections(card: ReplicaCard, silence_s: float) -> tuple[Connect, ...]:
    """Functions that connect to each process of a replica, the coordinator's first: a commit, a pause or a verification depends
    on all of them."""
    return (lambda: coordinator_channel(card, silence_s), *worker_connections(card, silence_s).values())


def ask_workers(
    cards: Sequence[ReplicaCard], body: Body, kind: type[Reply], *, timeout_s: float, silence_s: float
) -> list[list[Reply | WeightwireError]]:
    """Asks the workers of all replicas at once, over sockets of the calling thread; returns the answers of each replica's."""
    with contextlib.ExitStack() as stack:
        requests = [
            Outgoing(stack.enter_context(connect()), body)
            for card in cards
            for connect in worker_connections(card, silence_s).values()
        ]
        replies = iter(fan_out(requests, kind, timeout_s=timeout_s))
        return [[next(replies) for _ in card.workers] for card in cards]


@dataclass(eq=False)
class ReplicaSession:
    """Channels to one replica, for one thread. `card`: its current one. `agreed`: None until the group is open, and again once
    the replica may have other terms. `to_take`: memory of this host that its workers will allocate for updates, and have not yet.
    `held_segments`: ids of the segments that the replica has mapped as its way back."""

    card: ReplicaCard
    config: Config
    coordinator: Channel
    workers: list[Channel]
    agreed: Agreed | None = None
    to_take: int = 0
    held_segments: frozenset[str] = field(default_factory=frozenset)

    @staticmethod
    def connect(card: ReplicaCard, config: Config) -> ReplicaSession:
        """Connects without sending anything. If a descriptor is missing, nothing stays open."""
        with contextlib.ExitStack() as opened:
            connections = all_connections(card, config.silence_s)
            coordinator, *workers = [opened.enter_context(connect()) for connect in connections]
            opened.pop_all()
        return ReplicaSession(card, config, coordinator, workers)

    def agree(self, agreed: Agreed | None) -> None:
        """Takes new terms; None if the group has to be opened again."""
        self.agreed = agreed
        opened = zip(self.card.workers, agreed.opened, strict=True) if agreed is not None else ()
        self.to_take = sum(each.takes_bytes for worker, each in opened if _is_here(worker))

    def lacks_memory(self, nbytes: int) -> bool:
        """Whether the replica stands still and one of its hosts has less free memory than a segment, or a second set, of `nbytes`
        needs. Of another host, only what its workers reported at their start is known. A device's memory doesn't matter: `copy`
        needs none."""
        if self.card.state not in ("paused", "asleep"):
            return False
        here = [free_host_bytes()] if any(map(_is_here, self.card.workers)) else []
        said = [worker.free_bytes for worker in self.card.workers if worker.device == "cpu"]
        return min([*here, *said], default=nbytes) < nbytes

    @property
    def messages(self) -> int:
        """Requests sent so far."""
        return self.coordinator.sent_messages + sum(channel.sent_messages for channel in self.workers)

    def ask_of_coordinator(self, body: Body) -> Ask:
        """A request to the coordinator on which all processes of the replica work."""
        return Ask(self.coordinator, body, self._to_all)

    def ask_of_worker(self, worker: int, body: Body, *, patient: bool = False, silence_s: float | None = None) -> Ask:
        """A request to one worker, by its place in the card. `patient`: it may take as long as the worker gives signs of
        life; else `silence_s`."""
        processes = (self._to_all[1 + worker],) if patient else ()
        return Ask(self.workers[worker], body, processes, silence_s)

    @functools.cached_property
    def _to_all(self) -> tuple[Connect, ...]:
        return all_connections(self.card, self.config.silence_s)

    def targets(self, landings: Sequence[bytes] = ()) -> tuple[Target, ...]:
        """The replica's workers, for a transport that sends to each. `landings`: what each said of where to write."""
        if self.agreed is None:
            return ()
        card, landings = self.card, landings or [b""] * len(self.card.workers)
        return tuple(
            Target(card.replica, w.rank, w.address, w.pid, w.boot_id, terms.needs, w.start_ticks, landing)
            for w, terms, landing in zip(card.workers, self.agreed.opened, landings, strict=True)
        )

    def replaces(self, before: ReplicaSession) -> None:
        """Closes an earlier session of the same replica. If this one agreed on nothing, the replica's way back is as before."""
        if self.agreed is None:
            self.held_segments |= before.held_segments
        before.close()

    def close(self) -> None:
        """Closes the channels; may be called twice."""
        self.coordinator.close()
        for channel in self.workers:
            channel.close()


def _is_here(worker: WorkerCard) -> bool:
    return worker.boot_id == addresses.boot_id()
