"""Vocabulary and limits of the messages' fields, and what every conversation uses."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from inference_plugin.wire.errors import ErrorInfo
from inference_plugin.wire.geometry import Box, Piece

PROTOCOL_VERSION = 2

GroupState = Literal["idle", "receiving", "sealed", "committing", "torn"]
"""Life of a group on one worker. `receiving` until every byte is there and checked, `sealed` until the commit."""

InstallPolicy = Literal["auto", "copy", "standby", "streaming"]
"""`copy` overwrites the live parameters at the step boundary; `standby` prepares a second set and swaps it in; `streaming` writes
buckets into the live parameters as they come, while generation stands."""

InFlight = Literal["keep", "recompute", "abort", "drain"]
"""Fate of the requests in flight at a commit: they keep their KV cache, are computed anew, end, or finish first."""

MemoryTag = Literal["weights", "kv_cache"]
"""A part of an engine's device memory that is released and taken back by itself."""

SleepLevel = Literal[0, 1, 2]
"""How deep a paused replica sleeps. 0: not at all. 1: its memory is released, the weights are kept on the host. 2: the weights
are discarded."""

ReplicaState = Literal["serving", "paused", "asleep", "torn"]

MAX_PIECES = 1 << 22
"""Pieces in one list: 16 TiB in pieces of 4 MiB."""

MAX_PEERS = 1 << 16
"""Workers, trainer ranks or replicas in one list."""

GROUP_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Part of file names."""

GroupName = Annotated[str, msgspec.Meta(pattern=GROUP_NAME)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Txn = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PEERS)]
Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""0 stands for no process. A `pid_t` is a signed 32-bit number."""
StartTicks = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""When a process of this host started (`processes.start_ticks`), which tells it from a later process with its pid. 0: unknown."""
BootId = Annotated[str, msgspec.Meta(max_length=256)]
Session = Annotated[str, msgspec.Meta(max_length=128)]
ReplicaId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""Part of file names."""
Address = Annotated[str, msgspec.Meta(max_length=1024)]
TransportName = Annotated[str, msgspec.Meta(max_length=64)]
Fingerprint = Annotated[str, msgspec.Meta(max_length=64)]
Word = Annotated[str, msgspec.Meta(max_length=256)]
ProtocolNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Description = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
"""A transport's own bytes; a list of 65536 process ids fits."""
Boxes = Annotated[tuple[Box, ...], msgspec.Meta(max_length=MAX_PIECES)]
Pieces = Annotated[tuple[Piece, ...], msgspec.Meta(max_length=MAX_PIECES)]


class Sender(msgspec.Struct, frozen=True):
    """The driver of an update: its session, and its process if that runs on this host, so that its death is noticed at once."""

    session: Session
    pid: Pid = 0
    boot_id: BootId = ""
    start_ticks: StartTicks = 0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Success with nothing to tell."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed; nothing of it was applied."""

    error: ErrorInfo
