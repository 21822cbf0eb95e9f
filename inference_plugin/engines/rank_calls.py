"""Asks all ranks of a replica for one operation. Once a rank is lost, nothing is asked any more."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from inference_plugin.engines.operations import RankOperation, RankReply, agreed_replies
from inference_plugin.wire.errors import PeerLost

__all__ = ["RankCalls"]


class RankCalls:
    """`where` are the fields of its errors. An executor that lost a rank, or mixed up answers, is not asked again."""

    def __init__(self, ranks: int, where: dict[str, Any]) -> None:
        self._ranks = ranks
        self._where = where
        self._lost: str | None = None

    def ask(self, operation: RankOperation, call: Callable[[bytes], list[bytes]]) -> list[RankReply]:
        """Every rank's answer. Raises `PeerLost`."""
        self.check(operation.name)
        if not operation.nonce:
            operation = msgspec.structs.replace(operation, nonce=secrets.token_hex(8))
        try:
            return agreed_replies(call(msgspec.msgpack.encode(operation)), operation, self._ranks)
        except Exception as error:
            lost: PeerLost
            if isinstance(error, PeerLost):
                lost = error
            else:
                lost = PeerLost(f"the engine lost a worker in {operation.name!r}: {type(error).__name__}: {error}")
            self._lost = lost.message
            lost.at(phase=operation.name, **self._where)
            raise lost from error

    def check(self, phase: str) -> None:
        """Raises `PeerLost` where a rank was lost before."""
        if self._lost is not None:
            raise PeerLost(self._lost, phase=phase, **self._where)
