"""Asks all ranks of a replica for one operation. Once a rank is lost, nothing is asked any more."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import PeerLost

__all__ = ["RankCalls"]

RESTART = "restart the engine: it can no longer ask all of its ranks for anything"


class RankCalls:
    """`where` are the fields of its errors. An executor that lost a rank, or mixed up answers, is not asked again."""

    def __init__(self, ranks: int, where: dict[str, Any]) -> None:
        self._ranks = ranks
        self._where = where
        self._lost: str | None = None

    def ask(self, operation: RankOperation, call: Callable[[bytes], list[bytes]]) -> list[RankReply]:
        """Every rank's answer. Raises `PeerLost` where one is missing or answers another call."""
        name = operation.name
        self.check(name)
        if not operation.nonce:
            operation = msgspec.structs.replace(operation, nonce=secrets.token_hex(8))
        try:
            replies = [decode_as(answer, RankReply) for answer in call(msgspec.msgpack.encode(operation))]
            if any(reply.nonce != operation.nonce for reply in replies):
                raise PeerLost(f"the engine's executor returned another call's answer to {name!r}")
            if len(replies) != self._ranks:
                raise PeerLost(f"{len(replies)} of {self._ranks} workers answered {name!r}")
        except Exception as error:
            lost = error
            if not isinstance(lost, PeerLost):
                lost = PeerLost(f"the engine lost a worker in {name!r}: {type(error).__name__}: {error}")
            self._lost = lost.message
            lost.at(phase=name, **self._where).advise(RESTART)
            raise lost from error
        return replies

    def check(self, phase: str) -> None:
        """Raises `PeerLost` where a rank was lost before."""
        if self._lost is not None:
            raise PeerLost(self._lost, hint=RESTART, phase=phase, **self._where)
