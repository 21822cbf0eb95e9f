"""The decisions of `Fleet`, without sockets, threads or clocks: the state of each replica, which replicas an update takes,
which are caught up, and when a failed catch-up is tried again.

    joining --> current <--> behind          by updates, and by catching up in between
       any  --> torn                         until the next full update, or a restart as a new replica
       any  --> lost --> joining, behind     once the replica is heard of again

The machine also knows whose bytes could bring a replica up: the last version's, until the next update takes their memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from inference_plugin.wire.errors import (
    ManifestMismatch,
    PeerLost,
    SyncTimeout,
    TornReplica,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import ReplicaCard
from trainer_adapters.fleet.machine_io import (
    Action,
    CardsSeen,
    CatchUp,
    CaughtUp,
    Closed,
    Event,
    Generation,
    GroupClosed,
    NotCaughtUp,
    ReplicaState,
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

__all__ = ["FleetMachine"]

LOST_KEPT = 32
"""Number of lost replicas that stay in the list, which would grow without end because ids are never reused."""

COMMITTING = ("commit", "install", "finish")
"""Phases in which a replica may change its version: where it fell silent or lost a rank in one, nobody knows which it serves."""

TRIES = 3
"""Number of catch-ups of one replica per version: a replica that refuses the bytes must not be asked for ever, and the next
update tries it anyway. A silent replica, or one for which this process had no descriptor or thread, is tried for as long as it
is behind."""

RETRY_S = 1.0
"""Pause after a failed catch-up, unless the replica is heard of before; it doubles with each failure."""

LONGEST_RETRY_S = 60.0

AT_ONCE = 4
"""Replicas caught up at the same time: they share the trainer's cores and links with the training."""

OVERTAKEN = 2
"""A replica that updates overtook this often during its catch-ups is left to the next update for a while: as long as its
last catch-up took, then twice as long, and so on. If updates come faster than catch-ups end, it would never be current."""

TRANSIENT = (SyncTimeout, PeerLost, WeightwireError)
"""Silence, a lost connection, and errors of other code (no descriptor, no thread): nobody refused the bytes."""

HOPELESS = (ManifestMismatch, VersionConflict, TransportUnavailable)
"""Errors that the same bytes would cause again."""


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. `reads`: the bytes from which it is being caught up. `took_group`: it has taken a version of the group."""

    card: ReplicaCard
    version: int | None = None
    reason: str = ""
    takes_part: bool = False
    took_group: bool = False
    torn: bool = False
    lost: bool = False
    lost_s: float = 0.0
    heard_s: float = 0.0
    reads: RetainedVersion | None = None
    claimed_s: float = 0.0
    overtaken: int = 0
    not_before_s: float = 0.0
    tried_version: int | None = None
    tries: int = 0
    failed_s: float = 0.0
    failures: int = 0
    again_s: float = math.inf
    late: bool = False
    told: tuple[ReplicaState, str, Generation] | None = None


@dataclass
class FleetMachine:
    """`on` takes one event and returns the actions to perform. `wakes_at_s`: when the next `Tick` is due."""

    group: str
    replicas: dict[str, Replica] = field(default_factory=dict)
    latest: int | None = None
    retained: RetainedVersion | None = None
    wakes_at_s: float | None = None
    updating: bool = False
    closed: bool = False
    _actions: list[Action] = field(default_factory=list)

    def on(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case CardsSeen():
                self._see(event)
            case Unreachable():
                if (replica := self.replicas.get(event.replica)) is not None:
                    self._lose(replica, event.reason, since_s=now_s)
            case TookPart():
                self._take_in(event.card)
            case UpdateBegan():
                self.updating = True
            case UpdateEnded():
                self.updating = False
            case Settled():
                self._settle(event, now_s)
            case GroupClosed():
                self._forget()
            case Retained():
                self.retained = event.retained
            case SegmentTaken():
                self._segment_taken(event)
            case CaughtUp():
                self._caught_up(event.replica, now_s)
            case NotCaughtUp():
                self._not_caught_up(event.replica, event.error, now_s)
            case Tick():
                self._start_catch_ups(event.catch_up, now_s)
            case Closed():
                self.closed, self.retained = True, None
        actions, self._actions = self._actions, []
        return actions

    # --- queries -----------------------------------------------------------------------------------------------------

    def statuses(self) -> list[ReplicaStatus]:
        """All replicas, by id."""
        return [self._status(replica) for _, replica in sorted(self.replicas.items())]

    def free(self, names: Iterable[str], needed: float) -> set[str]:
        """The replicas of `names` that an update takes: those that are not being caught up, without those that were too late
        for the retained version. Late replicas are left to catching up, so that they do not hold up every update; they are
        taken only if there are fewer than `needed` others, or if they are torn: only an update heals those."""
        names = set(names)
        idle = {name for name in names if name not in self.replicas or self.replicas[name].reads is None}
        known = {name: self.replicas[name] for name in idle & set(self.replicas)} if self.retained is not None else {}
        late = {name for name, replica in known.items() if replica.late and self._status(replica).state != "torn"}
        return idle if len(idle - late) < min(needed, len(names)) else idle - late

    def segments_read(self) -> frozenset[str]:
        """Ids of the segments from which replicas are being caught up."""
        return frozenset(replica.reads.segment_id for replica in self.replicas.values() if replica.reads is not None)

    # --- what each event does ----------------------------------------------------------------------------------------

    def _see(self, event: CardsSeen) -> None:
        for name, card in event.cards.items():
            replica, heard_s = self._known(card), event.heard_s.get(name, 0.0)
            if replica.card is card and replica.heard_s == heard_s and replica.told is not None and not replica.lost:
                continue  # nothing was heard of it
            replica.card, replica.heard_s = card, heard_s
            if replica.lost and replica.heard_s >= replica.lost_s:
                replica.lost, replica.reason = False, ""
            if replica.heard_s > replica.failed_s:
                replica.late = False
            self._note(replica)
        for replica in [each for name, each in self.replicas.items() if name not in event.cards]:
            self._lose(replica, "it is no longer among the replicas of the job", since_s=0.0)

    def _take_in(self, card: ReplicaCard) -> None:
        replica = self._known(card)
        if not replica.takes_part:
            replica.takes_part = True
            self._tell("replica_joined", card=card)

    def _settle(self, event: Settled, now_s: float) -> None:
        took = False
        for name, error in event.errors.items():
            if (replica := self.replicas.get(name)) is None:
                continue
            replica.overtaken, replica.not_before_s = 0, 0.0
            if error is not None:
                self._failed(replica, error, now_s)
            else:
                took = True
                self._took(replica, event.version)
        if took:
            self.latest = max(event.version, -1 if self.latest is None else self.latest)
        for replica in self.replicas.values():
            self._note(replica)

    def _forget(self) -> None:
        self.latest = self.retained = None
        for replica in self.replicas.values():
            replica.version, replica.took_group, replica.torn, replica.tried_version = None, False, False, None
            self._note(replica)

    def _segment_taken(self, event: SegmentTaken) -> None:
        """The last version's bytes survive only in a segment that the transport left alone, and with the same layout."""
        retained = self.retained
        if retained is None or retained.transport != event.transport:
            return
        survives = retained.segment_id in event.busy - {event.segment_id}
        if not survives or retained.manifest.fingerprint != event.fingerprint:
            self.retained = None

    def _start_catch_ups(self, wanted: bool, now_s: float) -> None:
        self.wakes_at_s = None
        retained = self.retained
        if not wanted or retained is None or retained.version != self.latest or self.updating or self.closed:
            return
        running = sum(replica.reads is not None for replica in self.replicas.values())
        for _, replica in sorted(self.replicas.items()):
            if replica.reads is not None or self._status(replica).state not in ("joining", "behind"):
                continue
            if self.group in replica.card.unknown:
                continue  # whoever wrote these weights may not be done; the next update replaces them
            if replica.tried_version != retained.version:
                replica.tried_version, replica.tries = retained.version, 0
            due = replica.heard_s > replica.failed_s or now_s >= replica.again_s
            again = replica.tries == 0 or (replica.tries < TRIES and due)
            if replica.not_before_s > now_s:
                self._wake(replica.not_before_s)
            elif not again and replica.tries < TRIES:
                self._wake(replica.again_s)
            elif again and running < AT_ONCE:
                running += 1
                replica.tries += 1
                replica.claimed_s, replica.reads = now_s, retained
                self._take_in(replica.card)
                self._actions.append(CatchUp(replica.card, retained))

    def _caught_up(self, name: str, now_s: float) -> None:
        replica = self.replicas[name]
        retained, replica.reads = replica.reads, None
        assert retained is not None, f"{name} was not being caught up"
        replica.overtaken = 0 if retained.version == self.latest else replica.overtaken + 1
        if replica.overtaken >= OVERTAKEN:
            took_s = now_s - replica.claimed_s
            replica.not_before_s = now_s + took_s * 2 ** (replica.overtaken - OVERTAKEN)
        self._took(replica, retained.version)
        self._note(replica)

    def _not_caught_up(self, name: str, error: WeightwireError, now_s: float) -> None:
        replica = self.replicas[name]
        replica.reads = None
        replica.again_s = now_s + min(LONGEST_RETRY_S, RETRY_S * 2 ** min(replica.failures, 10))
        replica.failures += 1
        if isinstance(error, HOPELESS):
            replica.tries = TRIES
        elif type(error) in TRANSIENT:
            replica.tries = min(replica.tries, TRIES - 1)
        self._failed(replica, error, now_s)
        self._note(replica)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _known(self, card: ReplicaCard) -> Replica:
        if (replica := self.replicas.get(card.replica)) is None:
            replica = self.replicas[card.replica] = Replica(card)
        return replica

    def _took(self, replica: Replica, version: int) -> None:
        replica.version, replica.reason = version, ""
        replica.took_group, replica.torn, replica.tries = True, False, 0
        replica.failures, replica.again_s, replica.late = 0, math.inf, False
        replica.lost = replica.lost and replica.lost_s == 0  # at 0 its card is gone: it has ended since

    def _failed(self, replica: Replica, error: WeightwireError, now_s: float) -> None:
        replica.late = isinstance(error, SyncTimeout)
        replica.failed_s = now_s
        replica.reason = error.message
        replica.torn = replica.torn or isinstance(error, TornReplica)
        if replica.torn or (error.phase in COMMITTING and isinstance(error, SyncTimeout | PeerLost)):
            replica.version = None  # it may serve the old version or the new one
        if isinstance(error, PeerLost):
            self._lose(replica, error.message, since_s=now_s)

    def _lose(self, replica: Replica, reason: str, since_s: float) -> None:
        name = replica.card.replica
        if replica.takes_part:
            replica.takes_part = False
            self._tell("replica_lost", replica=name, reason=reason)
        if replica.lost:
            replica.lost_s = min(replica.lost_s, since_s)
            return
        replica.lost, replica.lost_s, replica.reason = True, since_s, reason
        replica.tried_version = None
        self._note(replica)
        self.replicas[name] = self.replicas.pop(name)  # the last one lost is the last one listed
        lost = [name for name, each in self.replicas.items() if each.lost and each.reads is None]
        for name in lost[:-LOST_KEPT]:
            del self.replicas[name]

    def _status(self, replica: Replica) -> ReplicaStatus:
        card = replica.card
        state: ReplicaState
        reason, version = replica.reason, replica.version
        if replica.lost:
            state = "lost"
            if card.state == "torn":
                reason, version = card.detail, None
        elif replica.torn or card.state == "torn":
            state, reason, version = "torn", card.detail or reason, None
        elif not replica.took_group:
            state = "joining"
        elif who := card.unknown.get(self.group):
            state, reason, version = "behind", who, None
        else:
            state = "current" if replica.version == self.latest else "behind"
        generation: Generation = "running"
        if state in ("lost", "torn"):
            generation = "unknown" if state == "lost" else "refused"
        elif card.state in ("paused", "asleep"):
            generation = card.state
        said = "" if state == "current" else reason
        return ReplicaStatus(card.replica, card.engine, state, version, said, generation)

    def _note(self, replica: Replica) -> None:
        """Tells listeners of a new state, of a pause and its end, and of a new reason for `joining` or `behind`."""
        status = self._status(replica)
        news = status.state, status.reason if status.state in ("joining", "behind") else "", status.generation
        if news != replica.told:
            replica.told = news
            self._tell("replica_state", status=status)

    def _tell(self, event: Literal["replica_joined", "replica_lost", "replica_state"], **facts: Any) -> None:
        self._actions.append(Tell(event, {"group": self.group, **facts}))

    def _wake(self, at_s: float) -> None:
        self.wakes_at_s = at_s if self.wakes_at_s is None else min(self.wakes_at_s, at_s)
