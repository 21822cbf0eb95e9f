"""Pauses and sleeps of all replicas at once, on rank 0.

The manager's thread asks for them, so that they are in one order with its updates; a thread of their own renews their leases.
A replica whose lease is no longer renewed, because this process ended or the link is lost, resumes by itself
(`inference_plugin.engines.pauses` says when a sleeping replica does not).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import get_args

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel, coordinator_channel, take_ready
from inference_plugin.net.gate import no_thread
from inference_plugin.net.processes import start_ticks
from inference_plugin.wire.errors import ConfigError, PeerLost, SyncTimeout, VersionConflict, WeightwireError
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
from trainer_adapters.fleet.asking import Ask, ask_all
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.fleet.session import all_connections
from trainer_adapters.settings import CHOICES, Settings, check_choice

__all__ = ["Pauses"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

RENEWED_S = 1.0
"""How long the renewing thread waits for answers; later answers are read the next time."""


class Pauses:
    """Pauses every replica of the fleet, and keeps the pauses alive. `trainer`: the id under which replicas know this trainer."""

    def __init__(self, settings: Settings, fleet: Fleet, trainer: str) -> None:
        self._settings = settings
        self._fleet = fleet
        self._trainer = trainer
        self._closing = threading.Event()
        self._renewer: threading.Thread | None = None
        self._paused: dict[str, tuple[ReplicaCard, ReplicaPause]] = {}
        """The replicas whose pauses are to be renewed, by id; under the lock."""
        self._lock = threading.Lock()

    def pause(self, in_flight: InFlight, level: SleepLevel, deadline_s: float) -> PauseReport:
        """Pauses every living replica, or puts it to sleep, all at once. The pause of a replica is renewed while the others are
        waited for. Raises the first error if no replica stands still, `PeerLost` if there is none, `ConfigError` for an unknown
        policy."""
        check_choice("in_flight", in_flight, CHOICES["in_flight"])
        cards = self._fleet.cards()
        if not cards:
            raise self._fleet.nobody("pause")
        left_s = self._left_s(deadline_s)
        request = Pause(
            Sender(self._trainer, os.getpid(), addresses.boot_id(), start_ticks()),
            self._settings.lease_s,
            in_flight,
            level,
            timeout_s=0.9 * left_s,  # the coordinator gives up a little earlier, so that its answer arrives
        )
        if self._renewer is None:
            renewer = threading.Thread(target=self._renew, name="weightwire-pauses", daemon=True)
            try:
                renewer.start()
            except RuntimeError as error:
                raise no_thread(error, "a pause, whose lease it renews,") from error
            self._renewer = renewer
        report = self._ask(cards, request, left_s)
        if len(report.failed) == len(cards):
            report.raise_failed()
        return report

    def resume(self, tags: Sequence[MemoryTag], deadline_s: float) -> PauseReport:
        """Wakes every living replica, or only `tags` of its memory, and lets it generate once all memory is there. Raises the
        first error if no replica could, `ConfigError` for unknown tags."""
        if not isinstance(tags, list | tuple):  # the letters of "weights" are no tags either
            raise ConfigError(f"tags={tags!r} is no list", hint='such as ["weights"]; leave it out for all memory')
        for tag in tags:
            check_choice("tag", tag, get_args(MemoryTag))
        cards = self._fleet.cards()
        left_s = self._left_s(deadline_s)
        request = Resume(self._trainer, tuple(tags), timeout_s=0.9 * left_s)
        report = self._ask(cards, request, left_s)
        if cards and len(report.failed) == len(cards):
            report.raise_failed()
        return report

    def close(self) -> None:
        """Resumes paused replicas. Sleeping replicas stay asleep while this process lives: it may be using their memory. May be
        called twice."""
        self._closing.set()
        paused = self._to_renew()
        awake = [card for card, pause in paused.values() if not pause.asleep]
        self._forget(paused)
        request = Resume(self._trainer, timeout_s=CLOSE_TIMEOUT_S)
        try:
            for replica in self._ask(awake, request, CLOSE_TIMEOUT_S).failed:
                logger.warning("weightwire: replica %s was left paused: %s", replica.replica, replica.error)
        finally:
            if self._renewer is not None and self._renewer is not threading.current_thread():
                self._renewer.join(CLOSE_TIMEOUT_S)

    def _note(self, card: ReplicaCard, pause: ReplicaPause) -> None:
        """A replica answered a pause or a resumption. If it failed to do so, its state is as before."""
        with self._lock:
            if pause.state in ("paused", "asleep"):
                self._paused[card.replica] = card, pause
            elif pause.state != "failed":
                self._paused.pop(card.replica, None)

    def _to_renew(self) -> dict[str, tuple[ReplicaCard, ReplicaPause]]:
        with self._lock:
            return dict(self._paused)

    def _forget(self, replicas: Iterable[str]) -> None:
        """The pauses of these replicas are over, or cannot be renewed."""
        with self._lock:
            for name in replicas:
                self._paused.pop(name, None)

    def _left_s(self, deadline_s: float) -> float:
        """Seconds that a pause or a resumption has. Raises `SyncTimeout` if there are none."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            words = f"the manager was busy with other operations for {self._settings.timeout_s:g} s"
            raise SyncTimeout(
                words, hint="nothing was asked of the replicas; call it again", side="manager", phase="pause"
            )
        return left_s

    def _ask(self, cards: Sequence[ReplicaCard], request: Body, timeout_s: float) -> PauseReport:
        """Asks the coordinators of all these replicas at once, over sockets of the calling thread. A replica is given up when one
        of its processes gives no sign of life."""
        if not self._closing.is_set():
            self._forget(set(self._to_renew()) - {card.replica for card in cards})
        link_silence_s = self._settings.config.silence_s
        pauses: dict[str, ReplicaPause] = {}

        def note(card: ReplicaCard, answer: Stands | WeightwireError) -> None:
            pauses[card.replica] = pause = _pause_of(card, answer)
            self._note(card, pause)

        with contextlib.ExitStack() as stack:
            asked: list[ReplicaCard] = []
            asks: list[Ask] = []
            for card in cards:
                try:
                    channel = stack.enter_context(coordinator_channel(card, link_silence_s))
                except Exception as error:  # noqa: BLE001 -- it costs this replica only
                    note(card, WeightwireError.wrap(error))
                else:
                    asked.append(card)
                    asks.append(Ask(channel, request, all_connections(card, link_silence_s)))
            ask_all(
                asks,
                Stands,
                timeout_s=timeout_s,
                silence_s=self._settings.silence_s(timeout_s),
                heard=lambda place, answer: note(asked[place], answer),
            )
        return PauseReport(tuple(pauses[card.replica] for card in cards))

    def _renew(self) -> None:
        """Sends renewals every third of the lease, whether or not the last ones were answered."""
        every_s = self._settings.lease_s / 3
        channels: dict[str, Channel] = {}
        due_s = time.monotonic() + every_s
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            due_s = time.monotonic() + every_s
            try:
                self._renew_all(channels, min(RENEWED_S, every_s / 2))
            except Exception:  # a descriptor too few, say: the next time it may be there
                logger.exception("weightwire: pauses were not renewed")
        for channel in channels.values():
            channel.close()

    def _renew_all(self, channels: dict[str, Channel], wait_s: float) -> None:
        cards = {name: card for name, (card, _) in self._to_renew().items()}
        for name in set(channels) - set(cards):
            channels.pop(name).close()
        self._hear(channels, 0.0)  # answers that came late
        for name, card in cards.items():
            try:
                if name not in channels:
                    channels[name] = coordinator_channel(card, self._settings.config.silence_s)
                channels[name].send(RenewPause(self._trainer))
            except Exception as error:  # noqa: BLE001 -- it costs this replica only
                self._not_renewed(name, WeightwireError.wrap(error))
        until_s = time.monotonic() + wait_s
        while any(channel.is_open for channel in channels.values()) and (left_s := until_s - time.monotonic()) > 0:
            self._hear(channels, left_s)

    def _hear(self, channels: dict[str, Channel], timeout_s: float) -> None:
        names = {channel: name for name, channel in channels.items() if channel.is_open}
        for channel, answer in take_ready(list(names), Done, timeout_s=timeout_s) if names else ():
            if isinstance(answer, WeightwireError):
                self._not_renewed(names[channel], answer)
                channels.pop(names[channel]).close()

    def _not_renewed(self, name: str, error: WeightwireError) -> None:
        logger.warning("weightwire: the pause of %s was not renewed: %s", name, error)
        if isinstance(error, VersionConflict | PeerLost):  # and cannot be
            self._forget([name])


def _pause_of(card: ReplicaCard, answer: Stands | WeightwireError) -> ReplicaPause:
    if isinstance(answer, WeightwireError):
        return ReplicaPause(card.replica, card.engine, "failed", error=answer.at(replica=card.replica).info())
    return ReplicaPause(card.replica, card.engine, answer.state, answer.asleep)
