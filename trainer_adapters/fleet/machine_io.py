"""The inputs and outputs of `FleetMachine`: events, actions, and the status of a replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import GroupOpened, ReplicaCard

if TYPE_CHECKING:
    from inference_plugin.transports.base import Kept

__all__ = [
    "Action", "Agreed", "CardsSeen", "CatchUp", "CaughtUp", "Closed", "Event", "Generation", "GroupClosed",
    "NotCaughtUp", "ReplicaState", "ReplicaStatus", "Retained", "RetainedVersion", "SegmentTaken", "Settled", "Tell",
    "Tick", "TookPart", "Unreachable", "UpdateBegan", "UpdateEnded",
]  # fmt: skip

ReplicaState: TypeAlias = Literal["joining", "current", "behind", "torn", "lost"]
"""`joining`: the replica has not taken the group yet. `current`: it serves the group's last version. `behind`: it serves an
older version, or nobody knows which. `torn`: it refuses to generate. `lost`: it is gone, silent, or its link is down."""


Generation: TypeAlias = Literal["running", "paused", "asleep", "refused", "unknown"]
"""Whether a replica generates. `asleep`: it is paused and has released memory. `refused`: it is torn. `unknown`: it is lost."""


class ReplicaStatus(Struct, frozen=True):
    """One replica as the manager knows it. `state` compares its version with the group's. `version`: the one that it serves, None
    if unknown. `reason`: why it is behind, torn or lost. `generation`: whether it generates, no matter who paused it."""

    replica: str
    engine: str
    state: ReplicaState
    version: int | None
    reason: str = ""
    generation: Generation = "running"


class Agreed(Struct, frozen=True):
    """The terms under which a replica opened the group: `key` names them; `opened` is each worker's answer. `offered`: the
    transports of which it took the first that it could. `passed_over`: names of the tensors that all of its workers pass over."""

    key: tuple[str, str, bool]
    transport: str
    opened: tuple[GroupOpened, ...]
    offered: tuple[str, ...]
    passed_over: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RetainedVersion:
    """The last version's bytes where they lie on this host, with the trainer's digests. `segment`: the description of the
    transport's segment that holds them, "" if they lie in the zones of a replica."""

    version: int
    manifest: Manifest
    pieces: tuple[Piece, ...]
    transport: str
    probe: bytes
    segment: bytes
    segment_id: str
    kept: Kept


# --- events ----------------------------------------------------------------------------------------------------------


class CardsSeen(Struct, frozen=True):
    """The cards of the living replicas, and when each replica was last heard of."""

    cards: Mapping[str, ReplicaCard]
    heard_s: Mapping[str, float]


class Unreachable(Struct, frozen=True):
    """A replica could not be reached."""

    replica: str
    reason: str


class TookPart(Struct, frozen=True):
    """A replica takes part in an update."""

    card: ReplicaCard


class UpdateBegan(Struct, frozen=True):
    """No new catch-up starts during an update; one already running continues."""


class UpdateEnded(Struct, frozen=True):
    """Catch-ups may start again."""


class Settled(Struct, frozen=True):
    """How an update ended for each replica: its error, or None if it serves `version`."""

    version: int
    errors: Mapping[str, WeightwireError | None]


class GroupClosed(Struct, frozen=True):
    """The group is closed on all replicas: none has a version of it any more."""


class Retained(Struct, frozen=True):
    """An update's bytes stay where they are: replicas are caught up from them until another update takes their memory."""

    retained: RetainedVersion


class SegmentTaken(Struct, frozen=True):
    """An update writes into a segment. `busy`: segments that the transport did not use, because somebody needs them."""

    transport: str
    segment_id: str
    busy: frozenset[str]
    fingerprint: str


class CaughtUp(Struct, frozen=True):
    """A catch-up succeeded."""

    replica: str


class NotCaughtUp(Struct, frozen=True):
    """A catch-up failed."""

    replica: str
    error: WeightwireError


class Tick(Struct, frozen=True):
    """Time to start the catch-ups that are due, if the manager's settings want any."""

    catch_up: bool = True


class Closed(Struct, frozen=True):
    """The manager is closed: no catch-up starts any more, and no bytes are kept."""


Event: TypeAlias = (
    CardsSeen
    | Unreachable
    | TookPart
    | UpdateBegan
    | UpdateEnded
    | Settled
    | GroupClosed
    | Retained
    | SegmentTaken
    | CaughtUp
    | NotCaughtUp
    | Tick
    | Closed
)


# --- actions ---------------------------------------------------------------------------------------------------------


class Tell(Struct, frozen=True):
    """Tell the listeners of an event (`trainer_adapters.events`)."""

    event: Literal["replica_joined", "replica_lost", "replica_state"]
    facts: Mapping[str, Any]


class CatchUp(Struct, frozen=True):
    """Bring one replica up from these bytes; `CaughtUp` or `NotCaughtUp` is to follow."""

    card: ReplicaCard
    retained: RetainedVersion


Action: TypeAlias = Tell | CatchUp
