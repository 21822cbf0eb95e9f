"""Every message, as msgspec structs. One request gets one reply; both are one tagged union.

To a worker: Describe, OpenGroup, Begin, Bucket, Relay, Seal, Renew, Abort, Release, CloseGroup. From a trainer, and Relay
and Bucket from workers that pass buckets on.
To a front (its ROUTER socket): Describe, Commit, Verify, Pause, RenewPause, Resume.
To the manager rank (its ROUTER socket), from the trainer's other ranks: Ready, Wrote; answered by Go, Outcome.
To the registry of a manager (its ROUTER socket): Register, Leave.
Frame 0 of a message is an `Envelope` in msgpack; frame 1, where there is one, is the payload of a `Bucket`.
Every request may be sent again: it is answered again and applied once.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from inference_plugin.wire.errors import ErrorInfo
from inference_plugin.wire.manifest import Box, Manifest, Piece

__all__ = [
    "PROTOCOL_VERSION",
    "Abort",
    "Begin",
    "Begun",
    "Body",
    "BoxDigest",
    "Bucket",
    "CloseGroup",
    "Commit",
    "Committed",
    "Describe",
    "Done",
    "Envelope",
    "Failed",
    "Go",
    "GoTarget",
    "GoTransport",
    "GroupOpened",
    "GroupState",
    "GroupStatus",
    "Hop",
    "InFlight",
    "InstallPolicy",
    "Leave",
    "MemoryTag",
    "OpenGroup",
    "Outcome",
    "Pause",
    "RankCommit",
    "RankVerify",
    "Ready",
    "Register",
    "Relay",
    "Relaying",
    "Release",
    "Renew",
    "RenewPause",
    "ReplicaCard",
    "ReplicaState",
    "Resume",
    "Seal",
    "Sealed",
    "Sender",
    "SleepLevel",
    "Stands",
    "Verified",
    "Verify",
    "WorkerCard",
    "Wrote",
]

PROTOCOL_VERSION = 1

GroupState = Literal["idle", "receiving", "sealed", "committing", "torn"]
"""Life of a group on one worker. `receiving` until every byte is there and checked, `sealed` until the commit."""

InstallPolicy = Literal["auto", "copy", "standby"]
"""`copy` overwrites the live parameters at the step boundary; `standby` prepares a second set and swaps it in."""

InFlight = Literal["keep", "recompute", "abort", "drain"]
"""What happens to requests in flight at a commit: go on with their KV cache, be computed anew, end, or finish first."""

MemoryTag = Literal["weights", "kv_cache"]
"""What of an engine's device memory is released and comes back by itself."""

SleepLevel = Literal[0, 1, 2]
"""How deep a replica that stands still sleeps: 0 not at all; 1 its memory is released, the weights are kept on the host;
2 the weights are discarded."""

ReplicaState = Literal["serving", "paused", "asleep", "torn"]

GroupName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Txn = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Sender(msgspec.Struct, frozen=True):
    """Who drives an update: its session id, and its process if it runs on this host (for noticing its death at once)."""

    session: str
    pid: int = 0
    boot_id: str = ""


# --- requests --------------------------------------------------------------------------------------------------------


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Asks a worker or a front for its card, its groups included."""


class OpenGroup(msgspec.Struct, frozen=True, tag="open"):
    """Agrees on a group before its first byte: names, shapes, dtypes, transport, install policy.

    `probe` is the transport's own test that both sides can use it. Opening an open group with the same terms changes
    nothing; with other terms it replaces the group's terms and keeps its installed version.
    """

    group: GroupName
    manifest: Manifest
    transport: str
    probe: bytes = b""
    install: InstallPolicy = "auto"
    partial: bool = False


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Starts a transaction. `segment` is the transport's description of where the bytes will be."""

    group: GroupName
    txn: Txn
    version: Version
    sender: Sender
    lease_s: Seconds
    fingerprint: str
    segment: bytes = b""


class Bucket(msgspec.Struct, frozen=True, tag="bucket"):
    """Bytes on a transport that sends them: the payload frame holds the pieces one after the other, in C order.

    `seq` counts from 0 for each `rank` of the trainer.
    """

    group: GroupName
    txn: Txn
    rank: Annotated[int, msgspec.Meta(ge=0)]
    seq: Annotated[int, msgspec.Meta(ge=0)]
    pieces: tuple[Piece, ...]


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """Asks for proof that all is there and right. `pieces` is everything that was written, by all trainer ranks.

    The reply comes when the check is over or after `wait_s`, then with `done` false; ask again. The worker serves
    others meanwhile.
    """

    group: GroupName
    txn: Txn
    pieces: tuple[Piece, ...]
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.5


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """A worker that another one passes buckets on to."""

    replica: str
    rank: int
    address: str
    pid: int
    boot_id: str


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Tells a worker that it will be fed by who asks, and is to pass every bucket of the transaction on to `below`: by
    `transports.spread.branches`, to `degree` of them, and these to the rest. What was said before stays."""

    group: GroupName
    txn: Txn
    below: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=1 << 16)]
    degree: Annotated[int, msgspec.Meta(ge=1, lt=65)]


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keeps a transaction's lease while the trainer writes."""

    group: GroupName
    txn: Txn


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drops a transaction that isn't committed. Unknown or finished transactions are answered `Done` as well."""

    group: GroupName
    txn: Txn
    reason: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Frees what a group keeps between updates (the way back, mapped segments, buffers); the version stays."""

    group: GroupName


class CloseGroup(msgspec.Struct, frozen=True, tag="close"):
    """Forgets a group and frees what it staged. The installed weights stay."""

    group: GroupName


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Installs a sealed transaction on all ranks of the replica at one step boundary."""

    group: GroupName
    txn: Txn
    version: Version
    in_flight: InFlight = "keep"
    timeout_s: Seconds = 60.0


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Asks every rank for digests of what its live parameters hold, as boxes of checkpoint tensors."""

    group: GroupName
    timeout_s: Seconds = 120.0


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stops the replica's generation until its `Resume`, and where `level` says so releases its device memory.

    It stands for as long as `sender` renews it (`lease_s`) and its process lives. Answered by `Stands` once no step runs.
    """

    sender: Sender
    lease_s: Seconds
    in_flight: InFlight = "keep"
    level: SleepLevel = 0
    timeout_s: Seconds = 60.0


class RenewPause(msgspec.Struct, frozen=True, tag="renew_pause"):
    """Keeps the lease of a `Pause`."""

    session: str


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Takes released memory back, all of it or that of `tags`; once it is all there the replica generates again."""

    session: str
    tags: tuple[MemoryTag, ...] = ()
    timeout_s: Seconds = 60.0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A trainer rank entered an operation (an update, a verification) and waits for `Go`, or failed before it began.

    `count` is how many operations the rank has entered: it tells a leftover of an earlier one. `claims` is what it is
    going to write, None if it can't tell, or if they are the `same_claims` as in its last operation.
    """

    count: int
    operation: str
    rank: Annotated[int, msgspec.Meta(ge=0)]
    fingerprint: str = ""
    error: ErrorInfo | None = None
    claims: tuple[Box, ...] | None = None
    same_claims: bool = False


class Wrote(msgspec.Struct, frozen=True, tag="wrote"):
    """A trainer rank wrote its slices, or failed to; it waits for `Outcome`. `lost`: replicas that it couldn't reach.
    `copies`: digests of what it holds too and another sends, where `Go` asked for them."""

    txn: Txn
    rank: Annotated[int, msgspec.Meta(ge=0)]
    pieces: tuple[Piece, ...] = ()
    nbytes: int = 0
    messages: int = 0
    move_s: float = 0.0
    digest_s: float = 0.0
    seconds: float = 0.0
    lost: dict[str, ErrorInfo] = {}
    error: ErrorInfo | None = None
    sent_bytes: int = 0
    copies: tuple[Piece, ...] = ()


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A replica is there, or still there, or changed: its card, believed for `lease_s`."""

    card: ReplicaCard
    lease_s: Seconds


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A replica is about to end. An unknown one is answered `Done` as well."""

    replica: str


# --- replies ---------------------------------------------------------------------------------------------------------


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Success with nothing to tell."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed; nothing of it was applied."""

    error: ErrorInfo


class GroupStatus(msgspec.Struct, frozen=True):
    """One group on one worker. `version` is the installed one, None before the first update; `partial`: it is not the
    whole model."""

    group: str
    state: GroupState
    version: int | None
    txn: str = ""
    transport: str = ""
    install: str = ""
    mechanism: str = ""
    digest: str = ""
    staged_bytes: int = 0
    detail: str = ""
    partial: bool = False


class WorkerCard(msgspec.Struct, frozen=True, tag="worker"):
    """One engine process that holds a model shard. Ranks are within the replica."""

    replica: str
    rank: int
    tp_rank: int
    pp_rank: int
    pid: int
    address: str
    device: str
    free_bytes: int
    groups: tuple[GroupStatus, ...] = ()
    protocol: int = PROTOCOL_VERSION


class ReplicaCard(msgspec.Struct, frozen=True, tag="replica"):
    """One engine instance; its front writes this as a file into the runtime directory."""

    replica: str
    engine: str
    engine_version: str
    model: str
    job: str
    pid: int
    boot_id: str
    address: str
    workers: tuple[WorkerCard, ...]
    tp: int = 1
    pp: int = 1
    dp_rank: int = 0
    parent_pid: int = 0
    package_version: str = ""
    started_at_unix_s: float = 0.0
    state: ReplicaState = "serving"
    detail: str = ""
    protocol: int = PROTOCOL_VERSION


class GroupOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The worker's terms: what it needs of each tensor (one bounding box each), and how it will install it."""

    needs: tuple[Box, ...]
    mechanism: Literal["plan", "loader"]
    install: Literal["copy", "standby"]
    why: str = ""
    version: int | None = None


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """`already` says that this version is installed: nothing need be sent."""

    already: bool = False


class Relaying(msgspec.Struct, frozen=True, tag="relaying"):
    """Answer to `Relay`: for each trainer rank of which it has any, the bucket that it waits for; earlier ones it has."""

    next_seq: dict[int, int] = {}


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """Answer to `Seal`. `digest` covers the whole group; seconds are of this worker's check and preparation."""

    done: bool
    digest: str = ""
    checked_bytes: int = 0
    verify_s: float = 0.0
    prepare_s: float = 0.0
    extra_bytes: int = 0


class RankCommit(msgspec.Struct, frozen=True):
    """What a commit did on one rank."""

    rank: int
    version: int
    install_s: float
    releases_segment: bool
    error: ErrorInfo | None = None
    partial: bool = False


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """All ranks serve `version`. `stopped_s` is how long no step could run; `waited_s` until the boundary came."""

    version: int
    ranks: tuple[RankCommit, ...]
    stopped_s: float
    waited_s: float
    already: bool = False


class Stands(msgspec.Struct, frozen=True, tag="stands"):
    """Answer to `Pause` and `Resume`: how the replica stands now, and which of its memory is released."""

    state: ReplicaState
    asleep: tuple[MemoryTag, ...] = ()


class BoxDigest(msgspec.Struct, frozen=True, array_like=True):
    """A box of a checkpoint tensor as a live parameter holds it.

    `signed_zeros` false: read through a packed layout that keeps no sign of zero; the digest is of the bytes after
    adding +0.0 to each element.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    digest: int
    signed_zeros: bool = True


class RankVerify(msgspec.Struct, frozen=True):
    """What one rank's live parameters hold. `unreadable` names parameters that can't be read back, with the reason."""

    rank: int
    version: int | None
    boxes: tuple[BoxDigest, ...]
    unreadable: dict[str, str] = {}
    error: ErrorInfo | None = None


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """Answer to `Verify`: all ranks."""

    ranks: tuple[RankVerify, ...]


class GoTarget(msgspec.Struct, frozen=True):
    """A worker that trainer ranks send to, on a transport that sends."""

    replica: str
    rank: int
    address: str
    pid: int
    boot_id: str
    needs: tuple[Box, ...]


class GoTransport(msgspec.Struct, frozen=True):
    """One transport of an update: where the bytes go, and to whom."""

    name: str
    segment: bytes
    targets: tuple[GoTarget, ...]


class Go(msgspec.Struct, frozen=True, tag="go"):
    """The manager rank's word to write. Without transports there is nothing to write: every replica has the version."""

    txn: Txn
    transports: tuple[GoTransport, ...]
    timeout_s: Seconds
    copies: bool = False


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """How the operation ended, the same on every rank: a report in msgpack."""

    report: bytes


Body = (
    Describe
    | OpenGroup
    | Begin
    | Bucket
    | Relay
    | Seal
    | Renew
    | Abort
    | Release
    | CloseGroup
    | Commit
    | Verify
    | Pause
    | RenewPause
    | Resume
    | Register
    | Leave
    | Ready
    | Wrote
    | Go
    | Outcome
    | Done
    | Failed
    | WorkerCard
    | ReplicaCard
    | GroupOpened
    | Begun
    | Relaying
    | Sealed
    | Committed
    | Stands
    | Verified
)


class Envelope(msgspec.Struct, frozen=True):
    """Frame 0 of every message. A reply carries its request's `seq`."""

    protocol: int
    seq: int
    body: Body
