"""Between the trainer's ranks: every rank tells the manager rank that it is ready and what it wrote, and waits for the
answer."""

from __future__ import annotations

from typing import Annotated

import msgspec

from inference_plugin.wire.errors import ErrorInfo
from inference_plugin.wire.messages.common import (
    MAX_PEERS,
    Address,
    BootId,
    Boxes,
    Count,
    Description,
    Fingerprint,
    Pid,
    Pieces,
    RankNumber,
    ReplicaId,
    Seconds,
    StartTicks,
    TransportName,
    Txn,
    Version,
)

__all__ = ["Go", "GoTransport", "Outcome", "Ready", "Target", "Wrote"]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A trainer rank entered an operation (an update, a verification) and waits for `Go`, or failed before it began.

    `count`: how many operations the rank has entered. `model`: its manifest, compressed, unless the ranks agreed on it before;
    rank 0 reads it if it differs from its own. `claims`: the boxes that it is going to write; None if it can't tell, or
    with `same_claims` if they are those of its last operation. `secret`: what rank 0 gave to its ranks. `given_up`: the rank
    left the operation and waits for no answer.
    """

    count: Count
    operation: Annotated[str, msgspec.Meta(max_length=256)]
    rank: RankNumber
    fingerprint: Fingerprint = ""
    error: ErrorInfo | None = None
    claims: Boxes | None = None
    same_claims: bool = False
    secret: Annotated[str, msgspec.Meta(max_length=64)] = ""
    given_up: bool = False
    model: Annotated[bytes, msgspec.Meta(max_length=1 << 26)] = b""


class Target(msgspec.Struct, frozen=True):
    """A worker to send to: its socket, its process (so that its death is noticed), and what it needs, a box per tensor."""

    replica: ReplicaId
    rank: RankNumber
    address: Address
    pid: Pid
    boot_id: BootId
    needs: Boxes
    start_ticks: StartTicks = 0
    landing: Description = b""
    """Where it lets trainer ranks write, as its `Begun` says it."""


class GoTransport(msgspec.Struct, frozen=True):
    """One transport of an update: where the bytes go, and to whom."""

    name: TransportName
    segment: Description
    targets: Annotated[tuple[Target, ...], msgspec.Meta(max_length=MAX_PEERS)]


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Tells the ranks to write. Without transports there is nothing to write: no replica takes bytes.

    `copies`: each rank also digests what it holds and another rank sends. `version`: the one that rank 0 chose, if it did.
    """

    txn: Txn
    transports: Annotated[tuple[GoTransport, ...], msgspec.Meta(max_length=64)]
    timeout_s: Seconds
    copies: bool = False
    version: Version | None = None


class Wrote(msgspec.Struct, frozen=True, tag="wrote"):
    """A trainer rank wrote its slices, or failed to; it waits for `Outcome`.

    `lost`: replicas that it couldn't reach. `copies`: digests of slices that it holds and another rank sends, where `Go`
    asked for them; `kept_equal`: those of which training keeps both the same.
    """

    txn: Txn
    rank: RankNumber
    pieces: Pieces = ()
    messages: Count = 0
    move_s: Seconds = 0.0
    digest_s: Seconds = 0.0
    lost: Annotated[dict[ReplicaId, ErrorInfo], msgspec.Meta(max_length=MAX_PEERS)] = {}
    error: ErrorInfo | None = None
    sent_bytes: Count = 0
    copies: Pieces = ()
    kept_equal: Pieces = ()
    secret: Annotated[str, msgspec.Meta(max_length=64)] = ""
    held_bytes: Count = 0


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """How the operation ended, the same on every rank: a report in msgpack."""

    report: Annotated[bytes, msgspec.Meta(max_length=64 << 20)]
