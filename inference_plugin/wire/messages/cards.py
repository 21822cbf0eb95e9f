"""The cards of workers and replicas, and how replicas register with a manager."""

from __future__ import annotations

from typing import Annotated

import msgspec

from inference_plugin.wire.errors import Text
from inference_plugin.wire.messages.common import (
    PROTOCOL_VERSION,
    Address,
    Count,
    GroupState,
    Pid,
    ProtocolNumber,
    RankNumber,
    ReplicaId,
    ReplicaState,
    Seconds,
    StartTicks,
    Version,
    Word,
)

__all__ = ["Describe", "GroupStatus", "Leave", "Register", "ReplicaCard", "WorkerCard"]


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Asks a worker or a coordinator for its card, with its groups."""


class GroupStatus(msgspec.Struct, frozen=True):
    """One group on one worker. `version` is the installed one, None before the first update; `partial`: it is not the
    whole model."""

    group: Word
    state: GroupState
    version: Version | None
    txn: Word = ""
    transport: Word = ""
    install: Word = ""
    mechanism: Word = ""
    digest: Word = ""
    detail: Text = ""
    partial: bool = False


class WorkerCard(msgspec.Struct, frozen=True, tag="worker"):
    """One engine process that holds a model shard. Ranks are within the replica. `boot_id`: of the worker's host, which may be
    another one than its coordinator's, and where alone its pid means its process."""

    replica: ReplicaId
    rank: RankNumber
    tp_rank: RankNumber
    pp_rank: RankNumber
    pid: Pid
    boot_id: Word
    address: Address
    device: Word
    free_bytes: Count
    groups: Annotated[tuple[GroupStatus, ...], msgspec.Meta(max_length=1024)] = ()
    protocol: ProtocolNumber = PROTOCOL_VERSION
    start_ticks: StartTicks = 0


class ReplicaCard(msgspec.Struct, frozen=True, tag="replica"):
    """One engine instance; its coordinator writes this as a file into the runtime directory. `lacks`: what users of this
    version of the engine miss, in words. `dtype`: in which the engine computes, such as "bfloat16"; "" where it does not
    say. `unknown`: by group, who wrote the weights since its last update, so that their version is unknown."""

    replica: ReplicaId
    engine: Word
    engine_version: Word
    model: Text
    job: Word
    pid: Pid
    boot_id: Word
    address: Address
    workers: Annotated[tuple[WorkerCard, ...], msgspec.Meta(max_length=1 << 14)]
    tp: RankNumber = 1
    pp: RankNumber = 1
    dp_rank: RankNumber = 0
    parent_pid: Pid = 0
    package_version: Word = ""
    state: ReplicaState = "serving"
    detail: Text = ""
    protocol: ProtocolNumber = PROTOCOL_VERSION
    start_ticks: StartTicks = 0
    lacks: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()
    dtype: Word = ""
    unknown: Annotated[dict[Word, Text], msgspec.Meta(max_length=1024)] = {}


class Register(msgspec.Struct, frozen=True, tag="register"):
    """A replica appears, renews its registration or changed. Its card is valid for `lease_s`."""

    card: ReplicaCard
    lease_s: Seconds


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A replica is about to end. An unknown replica is answered `Done` as well."""

    replica: ReplicaId
