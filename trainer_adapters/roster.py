"""What rank 0 knows of each replica of its group: from its card, from updates, from its process or its silence.

    joining --> current <--> behind     by updates, and by catching up in between
       any  --> torn                    until the next full update, or a restart as a new replica
       any  --> lost --> joining, behind    when it is back

It also knows whose bytes could bring a replica up: those of the last version, while the next update has not taken their
memory; and who reads them now.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from inference_plugin.wire.errors import (
    ManifestMismatch,
    PeerLost,
    SyncTimeout,
    TornReplica,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.manifest import Manifest, Piece
from inference_plugin.wire.messages import ReplicaCard
from inference_plugin.wire.reports import ReplicaReport
from trainer_adapters.events import Event
from trainer_adapters.replicas import ReplicaSession

__all__ = ["Kept", "ReplicaState", "ReplicaStatus", "Roster"]

ReplicaState: TypeAlias = Literal["joining", "current", "behind", "torn", "lost"]
"""`joining`: it has not taken the group yet. `current`: it serves the group's last version. `behind`: an older one, or nobody
knows which. `torn`: it refuses to generate. `lost`: gone, silent, or its link is down."""

LOST_KEPT = 32
"""So many lost replicas are listed, the last ones: where replicas come and go, ids are never used twice."""

TRIES = 3
"""For each version: a replica that can't be caught up must not be asked for ever, and the next update tries it anyway."""

AT_ONCE = 4
"""Replicas caught up at the same time: they share the trainer's cores and links with the training."""

OVERTAKEN = 2
"""A replica that updates overtook so often while it was caught up is left to the next one for a while, as long as catching up
took, then twice as long, ...: where updates follow each other faster than it is caught up, it would never get there."""

HOPELESS = (ManifestMismatch, VersionConflict, TransportUnavailable)
"""Errors that the same bytes would bring about again."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as the manager knows it. `version`: what it serves, None if that isn't known; `reason`: why it is behind,
    torn or lost."""

    replica: str
    engine: str
    state: ReplicaState
    version: int | None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Kept:
    """The last version's bytes, laid out by the manifest in a transport's segment on this host, and their digests as the
    trainer made them."""

    version: int
    manifest: Manifest
    pieces: tuple[Piece, ...]
    transport: str
    probe: bytes
    segment: bytes
    segment_id: str
    memory: torch.Tensor


@dataclass
class _Known:
    card: ReplicaCard
    version: int | None = None
    reason: str = ""
    takes_part: bool = False
    taken: bool = False
    torn: bool = False
    lost: bool = False
    lost_s: float = 0.0
    reads: Kept | None = None
    claimed_s: float = 0.0
    overtaken: int = 0
    not_before_s: float = 0.0
    tried: int | None = None
    tries: int = 0
    failed_s: float = 0.0
    told: tuple[ReplicaState, str] | None = None


class Roster:
    """Any thread may call anything. Events wait here for the thread that tells them."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._known: dict[str, _Known] = {}
        self._latest: int | None = None
        self._kept: Kept | None = None
        self._updating = False
        self._closed = False
        self._events: deque[tuple[Event, dict[str, Any]]] = deque()
        self._sessions: dict[str, ReplicaSession] = {}
        self._news = True
        self._due_s = math.inf
        self._changed = threading.Condition(threading.RLock())

    def statuses(self) -> list[ReplicaStatus]:
        """All replicas, by id."""
        with self._changed:
            return [self._status(known) for _, known in sorted(self._known.items())]

    # --- what becomes of replicas ------------------------------------------------------------------------------------

    def look(self, cards: Callable[[], Iterable[ReplicaCard]], heard_s: Callable[[str], float]) -> None:
        """Sees who is there now. One that was lost in an update is back once it was heard of since."""
        with self._changed:
            living = {card.replica: card for card in cards()}
            for name, card in living.items():
                known = self._known.setdefault(name, _Known(card))
                known.card = card
                if known.lost and heard_s(name) >= known.lost_s:
                    known.lost, known.reason = False, ""
                self._note(known)
            for known in [each for name, each in self._known.items() if name not in living]:
                self._lose(known, "it is no longer among the replicas of the job", since_s=0.0)

    def lose(self, replica: str, reason: str) -> None:
        """It could not be reached."""
        with self._changed:
            if (known := self._known.get(replica)) is not None:
                self._lose(known, reason, since_s=time.monotonic())

    def take_in(self, card: ReplicaCard) -> None:
        """It takes part in an update, or is caught up."""
        with self._changed:
            known = self._known.setdefault(card.replica, _Known(card))
            if not known.takes_part:
                known.takes_part = True
                self._tell("replica_joined", card=card)

    def settle(self, version: int, reports: Iterable[ReplicaReport]) -> bool:
        """What an update came to, or its failure; whether anybody took the version."""
        with self._changed:
            took = False
            for report in reports:
                if (known := self._known.get(report.replica)) is None:
                    continue
                known.overtaken, known.not_before_s = 0, 0.0
                if report.error is not None:
                    self._failed(known, WeightwireError.of(report.error))
                else:
                    took = True
                    self._took(known, version)
            if took:
                self._latest = max(version, -1 if self._latest is None else self._latest)
            for known in self._known.values():
                self._note(known)
            return took

    def forget(self) -> None:
        """The group is closed: nobody has a version of it any more."""
        with self._changed:
            self._latest = self._kept = None
            for known in self._known.values():
                known.version, known.taken, known.torn, known.tried = None, False, False, None
                self._note(known)

    # --- during an update --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Nobody begins to be caught up meanwhile; whoever is goes on."""
        with self._changed:
            self._updating = True
        try:
            yield
        finally:
            with self._changed:
                self._updating = False
            self.poke()

    def free(self, replicas: Iterable[str], needed: float, timeout_s: float) -> set[str]:
        """Those of `replicas` that aren't being caught up. Where they are fewer than `needed`, the others are waited for;
        raises `SyncTimeout` if there is none in the end."""
        names = set(replicas)

        def free() -> set[str]:
            return {name for name in names if name not in self._known or self._known[name].reads is None}

        with self._changed:
            self._changed.wait_for(lambda: len(free()) >= min(needed, len(names)), timeout_s)
            if names and not free():
                raise SyncTimeout(f"all replicas are still being caught up after {timeout_s:g} s", phase="agree")
            return free()

    def sessions(self) -> dict[str, ReplicaSession]:
        """Connections to those that were caught up since the last call; the caller owns them."""
        with self._changed:
            taken, self._sessions = self._sessions, {}
            return taken

    def segments_needed(self) -> frozenset[str]:
        """Ids of segments from which somebody is caught up, or that somebody who was has as the way back."""
        with self._changed:
            read = {known.reads.segment_id for known in self._known.values() if known.reads is not None}
            return frozenset(read.union(*(session.held_segments for session in self._sessions.values())))

    def overwrites(self, transport: str, segment_id: str, busy: frozenset[str], manifest: Manifest) -> None:
        """An update takes a segment. The last version's bytes stay only where somebody else needs theirs."""
        with self._changed:
            kept = self._kept
            if kept is None or kept.transport != transport:
                return
            if kept.segment_id not in busy - {segment_id} or kept.manifest.fingerprint != manifest.fingerprint:
                self._kept = None

    def keep(self, kept: Kept) -> None:
        """From these bytes replicas are caught up until an update overwrites them."""
        with self._changed:
            self._kept = kept

    # --- catching up -------------------------------------------------------------------------------------------------

    def claim(self, heard_s: Callable[[str], float]) -> list[tuple[ReplicaCard, Kept]]:
        """Who is to be caught up now, and from what; `caught_up` or `not_caught_up` is to follow for each."""
        claimed: list[tuple[ReplicaCard, Kept]] = []
        with self._changed:
            kept = self._kept
            if kept is None or kept.version != self._latest or self._updating or self._closed:
                return claimed
            now_s = time.monotonic()
            busy = sum(known.reads is not None for known in self._known.values())
            for name, known in sorted(self._known.items()):
                if known.reads is not None or self._status(known).state not in ("joining", "behind"):
                    continue
                if known.tried != kept.version:
                    known.tried, known.tries = kept.version, 0
                again = known.tries == 0 or (known.tries < TRIES and heard_s(name) > known.failed_s)
                if known.not_before_s > now_s:
                    self._due_s = min(self._due_s, known.not_before_s)
                elif again and busy + len(claimed) < AT_ONCE:
                    known.tries += 1
                    known.claimed_s = now_s
                    known.reads = kept
                    self.take_in(known.card)
                    claimed.append((known.card, kept))
        return claimed

    def caught_up(self, session: ReplicaSession) -> None:
        """It serves the version that it was given."""
        with self._changed:
            known = self._known[session.card.replica]
            assert known.reads is not None
            version, known.reads = known.reads.version, None
            known.overtaken = 0 if version == self._latest else known.overtaken + 1
            if known.overtaken >= OVERTAKEN:
                now_s = time.monotonic()
                known.not_before_s = now_s + (now_s - known.claimed_s) * 2 ** (known.overtaken - OVERTAKEN)
            self._took(known, version)
            self._hand_over(session)
            self._note(known)
        self.poke()

    def not_caught_up(self, session: ReplicaSession, error: WeightwireError) -> None:
        """It is tried again when it is heard of, a few times."""
        session.agreed = None
        with self._changed:
            known = self._known[session.card.replica]
            known.reads = None
            known.failed_s = time.monotonic()
            if isinstance(error, HOPELESS):
                known.tries = TRIES
            self._failed(known, error)
            self._hand_over(session)
            self._note(known)
        self.poke()

    # --- for the thread that looks after all this --------------------------------------------------------------------

    def poke(self) -> None:
        """There may be news."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def wait_for_news(self) -> bool:
        """Also returns when somebody is to be caught up who was left alone for a while. False once the roster is closed."""
        with self._changed:
            left_s = None if self._due_s == math.inf else max(0.0, self._due_s - time.monotonic())
            self._changed.wait_for(lambda: self._news, left_s)
            self._news, self._due_s = False, math.inf  # `claim` tells anew when to wake
            return not self._closed

    def events(self) -> list[tuple[Event, dict[str, Any]]]:
        """What is to be told, in order; each once."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    def close(self) -> None:
        """Nobody is caught up any more, and the bytes are let go."""
        with self._changed:
            self._closed = True
            self._kept = None
        self.poke()

    # --- with the lock held ------------------------------------------------------------------------------------------

    def _hand_over(self, session: ReplicaSession) -> None:
        replica = session.card.replica
        if (before := self._sessions.pop(replica, None)) is not None:
            session.replaces(before)
        if self._closed or self._known[replica].lost:
            session.close()
        else:
            self._sessions[replica] = session

    def _took(self, known: _Known, version: int) -> None:
        known.version, known.reason = version, ""
        known.taken, known.torn, known.tries = True, False, 0
        known.lost = known.lost and known.lost_s == 0  # its card is gone: it ended since

    def _failed(self, known: _Known, error: WeightwireError) -> None:
        known.reason = error.message
        known.torn = known.torn or isinstance(error, TornReplica)
        if known.torn or (error.phase == "commit" and isinstance(error, (SyncTimeout, PeerLost))):
            known.version = None  # it may serve either
        if isinstance(error, PeerLost):
            self._lose(known, error.message, since_s=time.monotonic())

    def _lose(self, known: _Known, reason: str, since_s: float) -> None:
        if known.takes_part:
            known.takes_part = False
            self._tell("replica_lost", replica=known.card.replica, reason=reason)
        if known.lost:
            known.lost_s = min(known.lost_s, since_s)
            return
        known.lost, known.lost_s, known.reason = True, since_s, reason
        known.tried = None
        self._note(known)
        del self._known[known.card.replica]  # the last one lost is the last one listed
        self._known[known.card.replica] = known
        lost = [name for name, each in self._known.items() if each.lost and each.reads is None]
        for name in lost[:-LOST_KEPT]:
            del self._known[name]

    def _status(self, known: _Known) -> ReplicaStatus:
        card = known.card
        state: ReplicaState
        reason = known.reason
        if known.lost:
            state = "lost"
        elif known.torn or card.state == "torn":
            state, reason = "torn", card.detail or reason
        elif not known.taken:
            state = "joining"
        else:
            state = "current" if known.version == self._latest else "behind"
        return ReplicaStatus(card.replica, card.engine, state, known.version, "" if state == "current" else reason)

    def _note(self, known: _Known) -> None:
        """Tells what is new of it: another state, or another failure to leave it."""
        status = self._status(known)
        news = status.state, status.reason if status.state in ("joining", "behind") else ""
        if news != known.told:
            known.told = news
            self._tell("replica_state", status=status)

    def _tell(self, event: Event, **facts: Any) -> None:
        self._events.append((event, {"group": self._group, **facts}))
        self.poke()
