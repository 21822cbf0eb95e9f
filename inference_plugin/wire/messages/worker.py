"""To a worker, and its answers, in the order of an update. From trainer ranks; `Relay` and `Bucket` also from workers that
relay buckets."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from inference_plugin.wire.errors import Text
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages.common import (
    MAX_PEERS,
    MAX_PIECES,
    Address,
    BootId,
    Boxes,
    Count,
    Description,
    Fingerprint,
    GroupName,
    InstallPolicy,
    Pid,
    Pieces,
    RankNumber,
    ReplicaId,
    Seconds,
    Sender,
    Session,
    StartTicks,
    TransportName,
    Txn,
    Version,
)

__all__ = [
    "Abort", "AskStands", "Begin", "Begun", "Bucket", "CloseGroup", "GroupOpened", "Hop", "OpenGroup", "Relay",
    "Relaying", "Release", "Renew", "Seal", "Sealed", "TakesBytes",
]  # fmt: skip


class OpenGroup(msgspec.Struct, frozen=True, tag="open"):
    """Agrees on a group before its first byte: names, shapes, dtypes, transport, install policy.

    `probe` is the transport's own test that both sides can use it. Opening an open group with the same terms changes
    nothing; other terms replace the group's terms and keep its installed version. The reply comes when the terms are
    agreed. If the same request comes again meanwhile, both get that reply; a request with other terms waits for it first.
    `sharing`: as many replicas of the worker's host open the group at this moment, and each may count on its part of the free
    memory only. `session`: the manager's, as in `Sender`, by which errors name it to another one.
    """

    group: GroupName
    manifest: Manifest
    transport: TransportName
    probe: Description = b""
    install: InstallPolicy = "auto"
    partial: bool = False
    sharing: Annotated[int, msgspec.Meta(ge=1, lt=MAX_PEERS)] = 1
    session: Session = ""


class GroupOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The worker's terms: what it needs of each tensor (one box at most), and how it will install it.

    `written`: how many of the model's parameters and buffers an update writes. `derived`: how many the engine makes anew of
    those. `untouched`: how many stay, because they come from no checkpoint or belong to other groups. The worker logs
    their names. `passed_over`: tensors of the manifest, by index, that the engine's loader passes over, as it does in the
    checkpoint that the engine was started from. `takes_bytes`: the memory beside the live weights that updates will take from
    this worker's host.
    """

    needs: Boxes
    mechanism: Literal["plan", "loader"]
    install: Literal["copy", "standby", "streaming"]
    why: Text = ""
    written: Count = 0
    derived: Count = 0
    untouched: Count = 0
    passed_over: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_PIECES)] = ()
    takes_bytes: Count = 0


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Starts a transaction. `segment` is the transport's description of where the bytes will be.

    `digest` is that of the whole group, where the trainer knows it already: it tells equal weights from an equal version
    number of another trainer. `transport`, `install` and `partial` are those of the trainer's `OpenGroup`: another trainer may
    have opened the group since.
    """

    group: GroupName
    txn: Txn
    version: Version
    sender: Sender
    lease_s: Seconds
    fingerprint: Fingerprint
    segment: Description = b""
    digest: Annotated[str, msgspec.Meta(max_length=64)] = ""
    transport: TransportName = ""
    install: InstallPolicy = "auto"
    partial: bool = False


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """`already`: this version is installed, and nothing need be sent. `landing`: where trainer ranks write, on a transport
    that lands in the worker's own memory."""

    already: bool = False
    landing: Description = b""


class Bucket(msgspec.Struct, frozen=True, tag="bucket"):
    """Bytes, on a transport that sends them in messages: the payload frame holds the pieces one after the other, in C order.

    `seq` counts from 0 for each `rank` of the trainer. `lies_at`: where they lie instead, on a transport that shares its buffers
    with the workers of its host; the answer says that they were read. `sizes`: how many bytes of the frame each piece takes, on a
    transport that sends only what changed.
    """

    group: GroupName
    txn: Txn
    rank: RankNumber
    seq: Count
    pieces: Pieces
    lies_at: Description = b""
    sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_PIECES)] = ()


class AskStands(msgspec.Struct, frozen=True, tag="ask_stands"):
    """Asks a worker that streams whether its engine stands and takes the bytes. The reply comes as soon as it does, or after
    `wait_s` with `stands` false; then ask again."""

    group: GroupName
    txn: Txn
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.5


class TakesBytes(msgspec.Struct, frozen=True, tag="takes_bytes"):
    """Answer to `AskStands`."""

    stands: bool


class Hop(msgspec.Struct, frozen=True, array_like=True):
    """A worker to which another one relays buckets."""

    replica: ReplicaId
    rank: RankNumber
    address: Address
    pid: Pid
    boot_id: BootId
    start_ticks: StartTicks = 0


class Relay(msgspec.Struct, frozen=True, tag="relay"):
    """Tells a worker that the asker will feed it, and that it is to relay every bucket of the transaction to `below`.

    It feeds `degree` of them itself (`transports.spread.branches`), and these feed the rest. Workers that were named before
    stay fed.
    """

    group: GroupName
    txn: Txn
    below: Annotated[tuple[Hop, ...], msgspec.Meta(max_length=MAX_PEERS)]
    degree: Annotated[int, msgspec.Meta(ge=1, lt=65)]


class Relaying(msgspec.Struct, frozen=True, tag="relaying"):
    """Answer to `Relay`: the next bucket that the worker waits for, by trainer rank; a rank is missing if none came from it."""

    next_seq: Annotated[dict[RankNumber, Count], msgspec.Meta(max_length=MAX_PEERS)] = {}


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """Asks for proof that every byte arrived and is right.

    `pieces` is everything that all trainer ranks wrote. The list travels once: `digest`, its `digest_group`, names it in
    later requests. The reply comes when the check is over, or after `wait_s` with `done` false; then ask again, without
    `pieces`. The worker serves others meanwhile.
    """

    group: GroupName
    txn: Txn
    digest: Fingerprint
    pieces: Pieces | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.5


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """Answer to `Seal`. `digest` covers the whole group; the seconds are this worker's, for the check and the preparation."""

    done: bool
    digest: Fingerprint = ""
    checked_bytes: Count = 0
    verify_s: Seconds = 0.0
    prepare_s: Seconds = 0.0
    extra_bytes: Count = 0


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keeps a transaction's lease while the trainer writes."""

    group: GroupName
    txn: Txn


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drops a transaction that is not committed. An unknown or finished transaction is answered `Done` as well."""

    group: GroupName
    txn: Txn
    reason: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Frees what a group keeps between updates: the way back, mapped segments, buffers. The version stays."""

    group: GroupName


class CloseGroup(msgspec.Struct, frozen=True, tag="close"):
    """Forgets a group and frees what it staged. The installed weights stay."""

    group: GroupName
