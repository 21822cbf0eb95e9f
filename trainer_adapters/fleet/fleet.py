"""All that rank 0 knows of the replicas of its group: cards, sessions, states and what each holds.

`FleetMachine` decides; this class owns the lock, the sessions and the clock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.channel import Outgoing, fan_out
from inference_plugin.net.processes import has_ended
from inference_plugin.wire.errors import ArgumentError, ManagerClosed, PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import CloseGroup, Done, Release, ReplicaCard
from trainer_adapters.fleet.machine import FleetMachine
from trainer_adapters.fleet.machine_io import (
    CardsSeen,
    CatchUp,
    CaughtUp,
    Closed,
    Event,
    GroupClosed,
    NotCaughtUp,
    ReplicaStatus,
    Retained,
    RetainedVersion,
    SegmentTaken,
    Settled,
    Tell,
    Tick,
    TookPart,
    Unreachable,
    UpdateBegan,
    UpdateEnded,
)
from trainer_adapters.fleet.registry import Registry
from trainer_adapters.fleet.session import ReplicaSession, ask_workers
from trainer_adapters.fleet.versions import NextVersion
from trainer_adapters.settings import Settings

__all__ = ["Fleet", "TakingPart", "leading"]

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 2.0

LONGEST_S = 366 * 86400.0
"""Longest wait for replicas: the system knows no much longer one."""

CARDS_AGAIN_S = 5.0
"""Replicas whose runtime directory somebody removed are there again within two seconds (`net.listening.MEND_EVERY_S`)."""


@dataclass(frozen=True)
class TakingPart:
    """The replicas of one operation: sessions of those that could be connected to, and the errors of the others."""

    sessions: list[ReplicaSession]
    unreached: list[tuple[ReplicaCard, WeightwireError]]


def leading(fleet: Fleet | None) -> Fleet:
    """Rank 0's fleet. Raises on the other ranks, which have none."""
    if fleet is None:
        raise RuntimeError("only rank 0 knows the replicas; its update waits for the others anyway")
    return fleet


class Fleet:
    """Any thread may call anything, except what is marked as the manager's thread's: sessions belong to it."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.registry = registry
        self.versions = NextVersion()
        self._settings = settings
        self.machine = FleetMachine(settings.group)
        self.sessions: dict[str, ReplicaSession] = {}
        self._caught_up: dict[str, ReplicaSession] = {}
        self._left_to_lost: frozenset[str] = frozenset()
        """Segments that a lost replica may still read, if its process lives."""
        self._tells: list[Tell] = []
        self._news = True
        self._changed = threading.Condition(threading.RLock())
        self._looking = threading.RLock()

    def cards(self) -> list[ReplicaCard]:
        """The living replicas of the job that the manager is for, by id."""
        return self._settings.chosen(self.registry.cards())

    def wait(self, count: Any, timeout_s: Any) -> list[ReplicaCard]:
        """`cards()` once there are at least `count`, an int. Raises `SyncTimeout`, `ManagerClosed` once the fleet is closed, and
        `ArgumentError` for another kind of argument."""
        if not hasattr(count, "__index__"):
            raise ArgumentError(
                f"count={count!r} is a {type(count).__name__}", hint="give the number of replicas, an int"
            )
        if not isinstance(timeout_s, Real) or not math.isfinite(timeout_s):
            raise ArgumentError(f"timeout_s={timeout_s!r} is no number of seconds", hint="every wait has a limit")
        return self.registry.wait(count, min(float(timeout_s), LONGEST_S), self._cards_while_open)

    def _cards_while_open(self) -> list[ReplicaCard]:
        if self.machine.closed:
            raise ManagerClosed("the manager was closed while replicas were waited for", side="manager")
        return self.cards()

    def nobody(self, phase: str) -> PeerLost:
        """The error of an operation that finds no replica."""
        job = addresses.job_name()
        if others := self.registry.cards():
            return PeerLost(
                f"replicas= leaves out every replica of job {job!r} ({len(others)} in all)",
                hint="name the model as the engine was started with it; `weightwire status` shows it",
                side="manager",
                phase=phase,
            )
        return PeerLost(
            diagnosis.none_runs(),
            hint="if an engine is starting, call wait_for_replicas() on rank 0; else start one with the plug-in and "
            "the trainer's WEIGHTWIRE_JOB and WEIGHTWIRE_RUNTIME_DIR (on another host WEIGHTWIRE_REGISTRY and WEIGHTWIRE_KEY); "
            "`weightwire doctor` looks for problems",
            side="manager",
            phase=phase,
        )

    def look(self) -> None:
        """Notes which replicas there are now, and when each was last heard of."""
        with self._looking:  # so that events are reported in the order in which they were seen
            cards = {card.replica: card for card in self.cards()}
            self.on(CardsSeen(cards, {name: self.registry.heard_s(name) for name in cards}))

    def next_version(self, timeout_s: float) -> int:
        """One more than the highest version that was sent or that a replica serves."""
        return self.versions.after(self.cards(), self._settings.group, timeout_s, self._settings.config.silence_s)

    def statuses(self) -> list[ReplicaStatus]:
        """All current replicas and those lost lately, by id."""
        self.look()
        with self._changed:
            return self.machine.statuses()

    # --- updates: the manager's thread -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """No new catch-up starts meanwhile; one already running continues."""
        self.on(UpdateBegan())
        try:
            yield
        finally:
            self.on(UpdateEnded())
            self.poke()

    def take_part(self, needed: float, timeout_s: float) -> TakingPart:
        """Connects to all living replicas; sessions from before are kept. Replicas that are being caught up are left out, or
        waited for if fewer than `needed` are left; where all are needed, they are not reached in the end. Raises `PeerLost` if
        there is no replica, and the first error if none could be connected to."""
        self.adopt()
        cards = {card.replica: card for card in self.cards() or self._cards_again(timeout_s)}
        free = self._wait_for_free(cards, needed, timeout_s)
        self.adopt()
        for gone in set(self.sessions) - set(cards):
            self.lose(gone, "it is no longer among the replicas of the job")
        if not cards:
            raise self.nobody("agree")
        part = TakingPart([], [])
        for name in sorted(free):
            try:
                session = self.sessions.get(name) or ReplicaSession.connect(cards[name], self._settings.config)
            except Exception as error:  # noqa: BLE001 -- no free descriptor, say: only this replica is left out
                failed = WeightwireError.wrap(error).at(side="manager", replica=name, phase="agree")
                logger.warning("weightwire: replica %s was not connected to: %s", name, failed)
                part.unreached.append((cards[name], failed))
            else:
                session.card = cards[name]
                self.sessions[name] = session
                self.on(TookPart(session.card))
                part.sessions.append(session)
        for name in sorted(set(cards) - free) if math.isinf(needed) else ():  # whoever wants all is told of these
            hint = "catching up ends by its own deadline; call it again then"
            missing = SyncTimeout("it is still being caught up", hint=hint, side="manager", replica=name, phase="agree")
            part.unreached.append((cards[name], missing))
        if not part.sessions:
            raise part.unreached[0][1]
        return part

    def _cards_again(self, timeout_s: float) -> list[ReplicaCard]:
        """Waits for a card where there is none, while a replica of this host that took part lives: somebody removed the runtime
        directory, and replicas make it again."""
        cards = [session.card for session in self.sessions.values()]
        if all(card.boot_id != addresses.boot_id() or has_ended(card.pid, card.start_ticks) for card in cards):
            return []
        with contextlib.suppress(SyncTimeout):
            return self.registry.wait(1, min(timeout_s, CARDS_AGAIN_S), self.cards)
        return []

    def settle(self, version: int, errors: Mapping[str, WeightwireError | None]) -> None:
        """Notes how an update ended for each replica: its error, or None if it serves `version`."""
        self.on(Settled(version, errors))

    def lose(self, replica: str, reason: str) -> None:
        """A replica no longer takes part; it is connected to again if it comes back."""
        with self._changed:
            if (session := self.sessions.pop(replica, None)) is not None:
                self._close_lost(session)
            self.on(Unreachable(replica, reason))

    def segments_in_use(self) -> frozenset[str]:
        """Ids of the segments that replicas hold as their way back, are being caught up from, or may still read although they are
        lost."""
        with self._changed:
            return self._segments_of_living() | self._left_to_lost

    def segments_needed(self) -> frozenset[str]:
        """As `segments_in_use`, and that of the retained version."""
        with self._changed:
            return self.segments_in_use() | self._segment_retained()

    def take_left_segments(self) -> frozenset[str]:
        """Ids of the segments that only lost replicas may still read, each once: nobody may write to them again."""
        with self._changed:
            needed = self._segments_of_living() | self._segment_retained()
            left, self._left_to_lost = self._left_to_lost - needed, self._left_to_lost & needed
            return left

    def _segments_of_living(self) -> frozenset[str]:
        sessions = [*self.sessions.values(), *self._caught_up.values()]
        return self.machine.segments_read().union(*(session.held_segments for session in sessions))

    def _segment_retained(self) -> frozenset[str]:
        retained = self.machine.retained
        return frozenset({retained.segment_id}) if retained is not None else frozenset()

    def _close_lost(self, session: ReplicaSession) -> None:
        """A replica that only fell silent may be about to install a version: its segments must keep their bytes."""
        card = session.card
        if card.boot_id == addresses.boot_id() and not has_ended(card.pid, card.start_ticks):
            self._left_to_lost |= session.held_segments
        session.close()

    def segment_taken(self, transport: str, segment_id: str, busy: frozenset[str], fingerprint: str) -> None:
        """An update writes into this segment; see `SegmentTaken`."""
        self.on(SegmentTaken(transport, segment_id, busy, fingerprint))

    def retain(self, retained: RetainedVersion) -> None:
        """Replicas are caught up from these bytes until an update takes their memory."""
        self.on(Retained(retained))

    def adopt(self) -> None:
        """Takes over the sessions of replicas that were caught up: from now on they are replicas like the others."""
        with self._changed:
            caught_up, self._caught_up = self._caught_up, {}
        for name, session in caught_up.items():
            if (before := self.sessions.pop(name, None)) is not None:
                session.replaces(before)
            self.sessions[name] = session

    def close_group(self, timeout_s: float) -> None:
        """Has all replicas forget the group, once none is being caught up; raises the first error."""
        config, request = self._settings.config, CloseGroup(self._settings.group)
        with self.updating():
            cards = self.cards()
            self._wait_for_free([card.replica for card in cards], len(cards), timeout_s)
            self.adopt()
            for session in self.sessions.values():
                session.agreed = None
            self.on(GroupClosed())
            replies = ask_workers(cards, request, Done, timeout_s=config.control_timeout_s, silence_s=config.silence_s)
            for reply in itertools.chain.from_iterable(replies):
                if isinstance(reply, WeightwireError):
                    raise reply

    def release(self) -> None:
        """Tells all replicas to free what they keep for the next update, and closes the sessions."""
        self.adopt()
        sessions = list(self.sessions.values())
        requests = [Outgoing(channel, Release(self._settings.group)) for s in sessions for channel in s.workers]
        for outgoing, reply in zip(requests, fan_out(requests, Done, timeout_s=RELEASE_TIMEOUT_S), strict=True):
            if isinstance(reply, WeightwireError):
                logger.info("weightwire: release at %s: %s", outgoing.channel.address, reply)
        for session in sessions:
            session.close()
        self.sessions.clear()

    def _wait_for_free(self, names: Iterable[str], needed: float, timeout_s: float) -> set[str]:
        names = set(names)
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.machine.free(names, needed)) >= min(needed, len(names)), max(0.0, timeout_s)
            )
            free = self.machine.free(names, needed)
        if names and not free:
            raise SyncTimeout(f"all replicas are still being caught up after {timeout_s:g} s", phase="agree")
        return free

    # --- catching up -------------------------------------------------------------------------------------------------

    def caught_up(self, session: ReplicaSession) -> None:
        """The replica serves the version that it was given; its session is handed over to the manager's thread."""
        with self._changed:
            self.on(CaughtUp(session.card.replica))
            self._hand_over(session)
        self.poke()

    def not_caught_up(self, replica: str, error: WeightwireError, session: ReplicaSession | None) -> None:
        """A catch-up failed. `session`: the connections to the replica, if they were made."""
        with self._changed:
            self.on(NotCaughtUp(replica, error))
            if session is not None:
                session.agreed = None
                self._hand_over(session)
        self.poke()

    def _hand_over(self, session: ReplicaSession) -> None:
        name = session.card.replica
        if (before := self._caught_up.pop(name, None)) is not None:
            session.replaces(before)
        if self.machine.closed or self.machine.replicas[name].lost:
            self._close_lost(session)
        else:
            self._caught_up[name] = session

    # --- for the thread that catches replicas up ---------------------------------------------------------------------

    def poke(self) -> None:
        """Wakes the thread: something may have changed."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def wait_for_news(self) -> bool:
        """Waits for `poke`, or until a catch-up is due. Returns False once the fleet is closed."""
        with self._changed:
            wakes_at_s = self.machine.wakes_at_s
            left_s = None if wakes_at_s is None else max(0.0, wakes_at_s - time.monotonic())
            self._changed.wait_for(lambda: self._news, left_s)
            self._news = False
            return not self.machine.closed

    def due(self) -> list[CatchUp]:
        """The catch-ups to start now; `caught_up` or `not_caught_up` is to follow for each."""
        return self.on(Tick(self._settings.catch_up != "never"))

    def to_tell(self) -> list[Tell]:
        """The events to report to listeners, in order; each once."""
        with self._changed:
            tells, self._tells = self._tells, []
        return tells

    def close(self) -> None:
        """No replica is caught up or waited for any more, and the retained bytes are dropped."""
        self.on(Closed())
        self.poke()
        self.registry.wake()

    # -----------------------------------------------------------------------------------------------------------------

    def on(self, event: Event) -> list[CatchUp]:
        """Handles an event. Returns the catch-ups to start, which only a `Tick` brings."""
        with self._changed:
            actions = self.machine.on(event, time.monotonic())
            self._tells += [action for action in actions if isinstance(action, Tell)]
            if actions:
                self.poke()
        return [action for action in actions if isinstance(action, CatchUp)]
