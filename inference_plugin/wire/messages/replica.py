"""To the coordinator of a replica, and its answers. From the manager rank."""

from __future__ import annotations

import operator
from typing import Annotated

import msgspec

from inference_plugin.wire.messages.common import (
    GroupName,
    InFlight,
    MemoryTag,
    ReplicaState,
    Seconds,
    Sender,
    Session,
    SleepLevel,
    Txn,
    Version,
)

__all__ = [
    "BoxDigest", "Commit", "Committed", "Pause", "RankCommit", "RankVerify", "RenewPause", "Resume", "Stands",
    "Verified", "Verify",
]  # fmt: skip


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Installs a sealed transaction on all ranks of the replica at one step boundary."""

    group: GroupName
    txn: Txn
    version: Version
    in_flight: InFlight = "keep"
    timeout_s: Seconds = 60.0


class RankCommit(msgspec.Struct, frozen=True):
    """Result of a commit on one rank. `torn`: its groups that are still torn. `checked_bytes`: what it checked and installed.
    `unknown`: its groups whose parameters somebody else has written since their last update. `replaced`: closed groups of which
    it wrote over parameters."""

    rank: int
    version: int
    install_s: float
    releases_segment: bool
    torn: tuple[str, ...] = ()
    checked_bytes: int = 0
    unknown: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """All ranks serve `version`. `stopped_s`: how long no step could run. `waited_s`: how long the boundary took to come."""

    version: int
    ranks: tuple[RankCommit, ...]
    stopped_s: float
    waited_s: float
    already: bool = False


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Asks every rank for digests of what its live parameters hold, as boxes of checkpoint tensors."""

    group: GroupName
    timeout_s: Seconds = 120.0


class BoxDigest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box of a checkpoint tensor as a live parameter holds it.

    `signed_zeros` false: it was read through a packed layout that keeps no sign of zero, and the digest is that of the
    bytes after +0.0 was added to each element.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    digest: int
    signed_zeros: bool = True

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has the box's elements."""
        return len(shape) == len(self.sizes) and all(
            map(operator.ge, shape, map(operator.add, self.offsets, self.sizes))
        )


class RankVerify(msgspec.Struct, frozen=True):
    """Contents of one rank's live parameters. `unreadable`: parameters that can't be read back, with the reason."""

    rank: int
    version: int | None
    boxes: tuple[BoxDigest, ...]
    unreadable: dict[str, str] = {}


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """Answer to `Verify`: all ranks."""

    ranks: tuple[RankVerify, ...]


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stops the replica's generation until its `Resume`, and where `level` says so releases its device memory.

    It lasts as long as `sender` renews it (every `lease_s` at least) and lives. Answered by `Stands` once no step runs.
    """

    sender: Sender
    lease_s: Seconds
    in_flight: InFlight = "keep"
    level: SleepLevel = 0
    timeout_s: Seconds = 60.0


class RenewPause(msgspec.Struct, frozen=True, tag="renew_pause"):
    """Keeps the lease of a `Pause`."""

    session: Session


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Takes released memory back, all of it or that of `tags`. Once all of it is back, the replica generates again."""

    session: Session
    tags: Annotated[tuple[MemoryTag, ...], msgspec.Meta(max_length=8)] = ()
    timeout_s: Seconds = 60.0


class Stands(msgspec.Struct, frozen=True, tag="stands"):
    """Answer to `Pause` and `Resume`: the replica's state now, and which of its memory is released."""

    state: ReplicaState
    asleep: tuple[MemoryTag, ...] = ()
