"""The operations that a coordinator runs on every rank of its replica, and a rank's answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, ErrorInfo, TornReplica, WeightwireError
from inference_plugin.wire.messages import PROTOCOL_VERSION, MemoryTag, RankCommit, RankVerify, SleepLevel, WorkerCard

__all__ = ["RankOperation", "RankReply", "first_error", "raise_first", "started_cards", "with_error"]


class RankOperation(msgspec.Struct, frozen=True):
    """One operation on every rank. The answer repeats `nonce`, which detects an executor that mixes up answers. `txn` names
    a transaction or a verification. `shares`: what all ranks told in their answers to "check"."""

    nonce: str
    name: Literal[
        "check", "release", "install", "undo", "finish", "tear", "verify", "read_on", "stop_reading", "may_sleep", "sleep",
        "wake", "tear_all", "forget", "note_sleep", "note_wake_up",
    ]  # fmt: skip
    group: str = ""
    txn: str = ""
    version: int = 0
    reason: str = ""
    install_s: float = 0.0
    level: SleepLevel = 0
    tags: tuple[MemoryTag, ...] = ()
    shares: tuple[bytes, ...] = ()


class RankReply(msgspec.Struct, frozen=True):
    """Answer of one rank; an operation never raises across the executor. `left`: a verification has "more" to read, or the
    weights "changed" since it began; an installation waits for "more" bytes. `share`: what the other ranks' post-processing needs
    of this one. `scales_cache`: the update may change how cached keys and values are read. `unknown`: by group, who wrote its
    weights."""

    nonce: str
    rank: int
    seconds: float = 0.0
    error: ErrorInfo | None = None
    commit: RankCommit | None = None
    verify: RankVerify | None = None
    card: WorkerCard | None = None
    left: Literal["", "more", "changed"] = ""
    share: bytes = b""
    scales_cache: bool = False
    unknown: dict[str, str] = {}


def started_cards(answers: Iterable[bytes], replica: str) -> list[WorkerCard]:
    """The cards of ranks that have started, from their replies. Raises the first one's error, and `EngineUnsupported` for ranks
    whose releases don't understand each other."""
    replies = [decode_as(answer, RankReply) for answer in answers]
    for reply in replies:
        if reply.error is not None:
            raise WeightwireError.of(reply.error).at(side="worker", rank=reply.rank, replica=replica, phase="start")
        if reply.card is not None and reply.card.protocol != PROTOCOL_VERSION:
            raise EngineUnsupported(
                f"rank {reply.rank} has a release of weightwire with protocol {reply.card.protocol}, the coordinator one with "
                f"{PROTOCOL_VERSION}",
                hint="install the same release on every host of the engine",
                phase="start",
            )
    return [reply.card for reply in replies if reply.card is not None]


def with_error(answer: bytes, error: Exception) -> bytes:
    """Turns a rank's answer into a failure. After an unexpected `error` nobody knows what the rank serves."""
    failed = error if isinstance(error, WeightwireError) else TornReplica(f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(msgspec.structs.replace(decode_as(answer, RankReply), error=failed.info()))


def first_error(replies: Sequence[RankReply]) -> WeightwireError | None:
    return next((WeightwireError.of(reply.error) for reply in replies if reply.error is not None), None)


def raise_first(replies: Sequence[RankReply]) -> None:
    """Raises the first error among the ranks' answers."""
    if (error := first_error(replies)) is not None:
        raise error
