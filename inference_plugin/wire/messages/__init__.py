"""Every message, as msgspec structs. One request gets one reply; both are one tagged union.

`worker`: to a worker. `replica`: to a coordinator. `trainer`: between trainer ranks. `cards`: cards of workers and replicas.
`batch`: to the store of a distributed batch's owner. `rollout`: between rollout workers and a pool. `common`: what they share.

Frame 0 of a message is an `Envelope` in msgpack; frame 1, where there is one, is the payload of a `Bucket` or a `Pulled`.
Every request may be sent again: it is answered again and applied once.
"""

from __future__ import annotations

import msgspec

from inference_plugin.wire.messages.batch import ClearTasks, EndLeases, Lease, Leased, Pull, Pulled, TasksCleared
from inference_plugin.wire.messages.cards import Describe, GroupStatus, Leave, Register, ReplicaCard, WorkerCard
from inference_plugin.wire.messages.common import (
    PROTOCOL_VERSION,
    Count,
    Done,
    Failed,
    GroupState,
    InFlight,
    InstallPolicy,
    MemoryTag,
    ReplicaState,
    Sender,
    SleepLevel,
)
from inference_plugin.wire.messages.replica import (
    BoxDigest,
    Commit,
    Committed,
    Pause,
    RankCommit,
    RankVerify,
    RenewPause,
    Resume,
    Stands,
    Verified,
    Verify,
)
from inference_plugin.wire.messages.rollout import Announce, Announced, LeavePool, Take, Work
from inference_plugin.wire.messages.trainer import Go, GoTransport, Outcome, Ready, Target, Wrote
from inference_plugin.wire.messages.worker import (
    Abort,
    AskStands,
    Begin,
    Begun,
    Bucket,
    CloseGroup,
    GroupOpened,
    Hop,
    OpenGroup,
    Relay,
    Relaying,
    Release,
    Renew,
    Seal,
    Sealed,
    TakesBytes,
)

__all__ = [
    "PROTOCOL_VERSION", "Abort", "Announce", "Announced", "AskStands", "Begin", "Begun", "Body", "BoxDigest", "Bucket",
    "ClearTasks", "CloseGroup", "Commit", "Committed", "Describe", "Done", "EndLeases", "Envelope", "Failed", "Go",
    "GoTransport", "GroupOpened", "GroupState", "GroupStatus", "Hop", "InFlight", "InstallPolicy", "Lease", "Leased",
    "Leave", "LeavePool", "MemoryTag", "OpenGroup", "Outcome", "Pause", "Pull", "Pulled", "RankCommit", "RankVerify",
    "Ready", "Register", "Relay", "Relaying", "Release", "Renew", "RenewPause", "ReplicaCard", "ReplicaState", "Resume",
    "Seal", "Sealed", "Sender", "SleepLevel", "Stands", "Take", "TakesBytes", "Target", "TasksCleared", "Verified",
    "Verify", "Work", "WorkerCard", "Wrote",
]  # fmt: skip

Body = (
    Describe | ReplicaCard | WorkerCard | Register | Leave | Done | Failed
    | OpenGroup | GroupOpened | Begin | Begun | Bucket | AskStands | TakesBytes | Relay | Relaying  # to a worker
    | Seal | Sealed | Renew | Abort | Release | CloseGroup
    | Commit | Committed | Verify | Verified | Pause | RenewPause | Resume | Stands  # to a coordinator
    | Ready | Go | Wrote | Outcome  # between trainer ranks
    | Take | Work | Announce | Announced | LeavePool  # between rollout workers and a pool
    | Lease | Leased | EndLeases | Pull | Pulled | ClearTasks | TasksCleared  # to an owner's store
)  # fmt: skip


class Envelope(msgspec.Struct, frozen=True):
    """Frame 0 of every message. A reply carries its request's `seq`."""

    protocol: int
    seq: Count
    body: Body
