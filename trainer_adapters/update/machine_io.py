"""The inputs and outputs of `TransactionMachine`: terms, events and actions; and the state of each replica in it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import Struct

from inference_plugin.wire.errors import PeerLost, SyncTimeout, TransportUnavailable, WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Begin, Body, Commit, Committed, InFlight, InstallPolicy, Sealed, Sender
from trainer_adapters.fleet.machine_io import Agreed
from trainer_adapters.settings import Stragglers

__all__ = [
    "AT_WORK", "TellAbort", "AbortAll", "Action", "Answered", "Ask", "AskToOpen", "BeginAll", "CommitAll", "Drop",
    "Dropped", "EndStream", "Event", "Holds", "INSTALLING_S", "LeaveBehind", "Joining", "ENDED", "OpenAll",
    "Participant", "SEAL_WAIT_S", "SealAll", "State", "Step", "StopWaiting", "TermsAgreed", "Terms", "Tick",
]  # fmt: skip


INSTALLING_S = 4.0
"""An installation that has begun may take this much longer than the deadline; the other ranks wait a little longer still."""

SEAL_WAIT_S = 0.5
"""How long a worker may take to answer that it has not checked all bytes, or does not stand, yet."""


class Terms(Struct, frozen=True):
    """The content of one transaction, its limits, and the replicas for which its commit waits.

    - `transports`: names, in order of preference. `alone`: those of them that serve the only replica of a host. `streams`: those
      that stream into live parameters.
    - `digest`: the whole group's, if it is known before the bytes are written.
    - `deadline_s`: a time; all other seconds are durations.
    - `silence_s`: how long to wait for a sign of life. `control_timeout_s`: how long to wait for a small request.
    """

    group: str
    txn: str
    version: int
    manifest: Manifest
    transports: tuple[str, ...]
    install: InstallPolicy
    partial: bool
    in_flight: InFlight
    stragglers: Stragglers
    sender: Sender
    lease_s: float
    timeout_s: float
    deadline_s: float
    silence_s: float
    control_timeout_s: float
    digest: str = ""
    alone: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()

    @property
    def installed_by_s(self) -> float:
        """When a replica must have said at the latest what it holds."""
        return self.deadline_s + INSTALLING_S

    @property
    def key(self) -> tuple[str, str, bool]:
        """Terms with equal keys are the same for an open group."""
        return self.manifest.fingerprint, self.install, self.partial

    def install_over(self, transport: str) -> InstallPolicy:
        """The policy to ask for over a transport."""
        return "streaming" if transport in self.streams else self.install

    def begin(self, transport: str, segment: bytes) -> Begin:
        """The request that begins the transaction on a worker."""
        return Begin(
            self.group,
            self.txn,
            self.version,
            self.sender,
            self.lease_s,
            self.manifest.fingerprint,
            segment,
            self.digest,
            transport,
            self.install_over(transport),
            self.partial,
        )

    def offered(self, lacks_memory: bool, *, is_alone: bool) -> tuple[str, ...]:
        """The transports by which a replica may be reached. Those that stream are for replicas that stand still and lack the
        memory, or for all replicas; those in `alone` only for the single replica of a host."""
        streaming = tuple(name for name in self.transports if name in self.streams)
        others = tuple(name for name in self.transports if name not in self.streams)
        offered = streaming + others if lacks_memory or not others else others
        shared = tuple(name for name in offered if name not in self.alone)
        return shared if shared and not is_alone else offered

    def commit(self, now_s: float) -> Commit:
        """The request to a coordinator, which gives up a little earlier than this rank, so that its answer arrives."""
        left_s = self.deadline_s - now_s
        return Commit(self.group, self.txn, self.version, self.in_flight, timeout_s=0.9 * left_s)


State: TypeAlias = Literal[
    "opening", "open", "beginning", "standing", "begun", "sealing", "sealed", "committing", "ending", "committed",
    "already", "failed", "aborted",
]  # fmt: skip
Step: TypeAlias = Literal["agree", "stage", "seal", "commit"]

ENDED: tuple[State, ...] = ("committed", "already", "failed", "aborted")


AT_WORK: dict[Step, tuple[State, ...]] = {
    "agree": ("opening", "beginning", "standing"),
    "stage": (),
    "seal": ("sealing",),
    "commit": ("committing",),
}
"""States of replicas for which a step waits."""


@dataclass(eq=False, slots=True)
class Participant:
    """One replica.

    - `answers`: its workers' answers in the current step.
    - `offered`: transports that may reach it. `left`: those of them that it has not refused.
    - `sharing`: number of replicas on its host that are asked to open the group at the same time.
    - `begins_on`: the transport for which the group is opened again. `begun`: the answers of the workers that have begun and need
      not open it.
    - `landings`: where the trainer writes, by worker.
    - `has_stood`: its coordinator was asked to commit before the bytes came. `has_answered`: the coordinator has said how that
      commit ended. `ends_at_s`: when the wait for that ends after a failure.
    - `committed`: the coordinator's answer, which is final.
    """

    replica: str
    workers: int
    state: State = "opening"
    agreed: Agreed | None = None
    offered: tuple[str, ...] = ()
    left: deque[str] = field(default_factory=deque)
    sharing: int = 1
    refusals: list[str] = field(default_factory=list)
    answers: dict[int, object] = field(default_factory=dict)
    begins_on: str = ""
    begun: dict[int, object] = field(default_factory=dict)
    landings: tuple[bytes, ...] = ()
    has_stood: bool = False
    has_answered: bool = False
    ends_at_s: float = math.inf
    sealed: tuple[Sealed, ...] = ()
    committed: Committed | None = None
    error: WeightwireError | None = None

    @property
    def refusal(self) -> WeightwireError | None:
        """Why its workers, or some of them, refuse to open the group by any transport: the words of the lowest rank, because it
        is chance which one answers first."""
        answers = [self.answers[worker] for worker in sorted(self.answers)]
        no_words = TransportUnavailable | PeerLost | SyncTimeout
        return next((e for e in answers if isinstance(e, WeightwireError) and not isinstance(e, no_words)), None)

    @property
    def is_in(self) -> bool:
        """Whether the replica is in the transaction; then its leases are renewed."""
        return self.state not in ENDED and (self.state != "opening" or bool(self.begun))

    @property
    def streams(self) -> bool:
        """Whether the bytes go into its live parameters as they come."""
        return self.agreed is not None and self.agreed.opened[0].install == "streaming"


# --- events ----------------------------------------------------------------------------------------------------------


class Joining(Struct, frozen=True):
    """A replica that takes part: how many workers it has, the terms that were agreed with it before, and its host.
    `lacks_memory`: it stands still, and has no memory in which an update could wait for its commit."""

    replica: str
    workers: int
    agreed: Agreed | None = None
    host: str = ""
    lacks_memory: bool = False


class OpenAll(Struct, frozen=True):
    """Step 1: open the group on all replicas. `unreached`: replicas to which no connection could be made."""

    replicas: Sequence[Joining]
    unreached: Mapping[str, WeightwireError]


class BeginAll(Struct, frozen=True):
    """Step 2: begin the transaction. `segments`: where each transport's bytes will be."""

    segments: Mapping[str, bytes]


class Dropped(Struct, frozen=True):
    """A replica failed on this side: a trainer rank could not write to it."""

    replica: str
    error: WeightwireError


class SealAll(Struct, frozen=True):
    """Step 3: all bytes are written. `digest` names the list of pieces."""

    pieces: tuple[Piece, ...]
    digest: str


class CommitAll(Struct, frozen=True):
    """Step 4: commit the replicas that have sealed."""


class LeaveBehind(Struct, frozen=True):
    """Step 5: replicas for which the commit did not wait drop out."""


class AbortAll(Struct, frozen=True):
    """The update failed: every replica that is still in it drops it."""

    reason: str


class Answered(Struct, frozen=True):
    """The answer, or its failure, of a worker (by its place in the replica's card) or of the coordinator (None)."""

    replica: str
    worker: int | None
    answer: object


class Tick(Struct, frozen=True):
    """The time that `wakes_at_s` named has come."""


Event: TypeAlias = OpenAll | BeginAll | Dropped | SealAll | CommitAll | LeaveBehind | AbortAll | Answered | Tick


# --- actions ---------------------------------------------------------------------------------------------------------


class AskToOpen(Struct, frozen=True):
    """Ask the workers of a replica (none named: all) to open the group over a transport, with one probe of it. They may take
    long."""

    replica: str
    transport: str
    workers: tuple[int, ...] = ()


class Ask(Struct, frozen=True):
    """Sends a request to a worker, or to the coordinator (`worker` None), which may take long; a worker has `silence_s`."""

    replica: str
    worker: int | None
    body: Body
    silence_s: float


class StopWaiting(Struct, frozen=True):
    """The answers of this replica that are still to come change nothing."""

    replica: str


class EndStream(Struct, frozen=True):
    """Tell the workers of the replica that no more bytes come, without waiting for them; its coordinator then answers."""

    replica: str
    reason: str


class TermsAgreed(Struct, frozen=True):
    """The replica has opened the group (None: its terms are no longer known)."""

    replica: str
    agreed: Agreed | None


class Holds(Struct, frozen=True):
    """What the replica has mapped as its way back: the segment of this transaction ("new"), nothing ("none"), or possibly either
    that segment or the one of before ("either"), because nobody knows which version it serves."""

    replica: str
    segments: Literal["new", "none", "either"]


class Drop(Struct, frozen=True):
    """The replica no longer takes part. `tells_abort`: it has begun the transaction. `routes_around`: other replicas may receive
    their bytes through it. `is_lost`: its process or its link is gone."""

    replica: str
    reason: str
    tells_abort: bool
    routes_around: bool
    is_lost: bool


class TellAbort(Struct, frozen=True):
    """Tell the replica to drop the transaction, and wait for its answer a moment."""

    replica: str
    reason: str


Action: TypeAlias = AskToOpen | Ask | StopWaiting | EndStream | TermsAgreed | Holds | Drop | TellAbort
