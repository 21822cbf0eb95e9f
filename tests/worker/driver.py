"""A trainer reduced to its requests: one update in single steps, over a real socket."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.transports.base import Delivery
from inference_plugin.transports.shm import ShmSender
from inference_plugin.wire.digest import digest_group
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    Bucket,
    Describe,
    Done,
    GroupOpened,
    OpenGroup,
    Renew,
    Seal,
    Sealed,
    Sender,
    WorkerCard,
)
from tests.support.plain_engine import manifest_of
from tests.transports.cases import any_bits, whole_slices

WAIT_S = 60.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {"a": any_bits(torch.bfloat16, 8, 4, seed=seed), "b": any_bits(torch.float32, 5, seed=seed + 100)}


MANIFEST = manifest_of(weights(0))


class Driver:
    """Each method is one request; `update` is all of them but the commit."""

    def __init__(
        self, address: str, group: str = "policy", manifest: Manifest = MANIFEST, pid: int | None = None
    ) -> None:
        self.channel = Channel(address, pid=os.getpid(), peer_boot_id=addresses.boot_id())
        self.shm = ShmSender()
        self.group, self.manifest = group, manifest
        self.pid = os.getpid() if pid is None else pid
        self.segment = b""
        self.pieces: tuple[Piece, ...] = ()

    def ask(self, body: Any, kind: Any, payload: bytes | None = None) -> Any:
        return self.channel.request(body, kind, timeout_s=WAIT_S, payload=payload)

    def open(self, transport: str = "shm", **options: Any) -> GroupOpened:
        request = OpenGroup(self.group, self.manifest, transport, self.shm.probe(), **options)
        opened: GroupOpened = self.ask(request, GroupOpened)
        return opened

    def begin(
        self, txn: str, version: int, *, lease_s: float = WAIT_S, busy: frozenset[str] = frozenset(), **other: Any
    ) -> Begun:
        self.segment = self.shm.allocate(self.manifest, busy)
        sender = Sender("session", self.pid, addresses.boot_id())
        fingerprint = other.pop("fingerprint", self.manifest.fingerprint)
        segment, digest = other.pop("segment", self.segment), other.pop("digest", "")
        begun: Begun = self.ask(Begin(self.group, txn, version, sender, lease_s, fingerprint, segment, digest), Begun)
        return begun

    def write(self, tensors: dict[str, torch.Tensor]) -> tuple[Piece, ...]:
        pieces, _ = self.shm.write(
            Delivery(
                "", self.group, 0, self.manifest, self.segment, whole_slices(tensors), (), time.monotonic() + WAIT_S
            )
        )
        self.pieces = tuple(pieces)
        return self.pieces

    def seal(self, txn: str, pieces: tuple[Piece, ...] | None = None, *, wait_s: float = 0.5) -> Sealed:
        pieces = self.pieces if pieces is None else pieces
        sealed: Sealed = self.ask(Seal(self.group, txn, self.digest(pieces), pieces, wait_s), Sealed)
        return sealed

    def digest(self, pieces: tuple[Piece, ...]) -> str:
        return digest_group(self.manifest, pieces)

    def seal_fully(self, txn: str) -> Sealed:
        while not (sealed := self.seal(txn)).done:
            pass
        return sealed

    def renew(self, txn: str) -> Done:
        return self.ask(Renew(self.group, txn), Done)  # type: ignore[no-any-return]

    def abort(self, txn: str, reason: str = "") -> Done:
        return self.ask(Abort(self.group, txn, reason), Done)  # type: ignore[no-any-return]

    def bucket(self, txn: str, payload: bytes = b"") -> Done:
        return self.ask(Bucket(self.group, txn, 0, 0, ()), Done, payload)  # type: ignore[no-any-return]

    def describe(self) -> WorkerCard:
        return self.ask(Describe(), WorkerCard)  # type: ignore[no-any-return]

    def update(self, txn: str, version: int, tensors: dict[str, torch.Tensor]) -> Sealed:
        self.begin(txn, version)
        self.write(tensors)
        return self.seal_fully(txn)

    def close(self) -> None:
        self.channel.close()
        self.shm.close()
