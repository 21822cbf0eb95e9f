"""What an update and a verification share on rank 0: all ranks come together, write, and what they wrote is whole."""

from __future__ import annotations

import logging
import math
import secrets
import time
from typing import TYPE_CHECKING

from inference_plugin.wire import addresses
from inference_plugin.wire.errors import ManifestMismatch, PeerLost, SyncTimeout, VersionConflict, WeightwireError
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Go, GoTransport, Ready, Wrote
from inference_plugin.wire.tracing import call_it
from trainer_adapters.agreement import what_differs
from trainer_adapters.rank import Rank
from trainer_adapters.replicas import ReplicaSession

if TYPE_CHECKING:
    from trainer_adapters.source import WeightSource

__all__ = ["Operation"]

logger = logging.getLogger(__name__)


class Operation:
    """One operation, on rank 0."""

    def __init__(self, rank: Rank, source: WeightSource, manifest: Manifest, operation: str) -> None:
        self.rank = rank
        self.settings = rank.settings
        self.source = source
        self.manifest = manifest
        self.operation = operation
        self.deadline_s = time.monotonic() + self.settings.timeout_s
        self.txn = secrets.token_hex(12)
        call_it(self.txn)
        self.transports = [(t, rank.sender(t)) for t in rank.settings.transports]

    @property
    def left_s(self) -> float:
        """Seconds until the deadline. Raises `SyncTimeout` when there are none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SyncTimeout(f"{self.operation} took longer than {self.settings.timeout_s:g} s")
        return left_s

    def tick(self) -> None:
        """Called while trainer ranks write."""

    def gather_ready(self) -> None:
        """All ranks are in this operation, with the same model."""
        readies = self.rank.crew.gather(
            Ready,
            lambda ready: ready.count >= self.rank.count,
            deadline_s=self.deadline_s,
            tick=self.tick,
            tick_every_s=self.settings.lease_s / 3,
        )
        for ready in readies:
            if (ready.count, ready.operation) != (self.rank.count, self.operation):
                raise VersionConflict(
                    f"trainer rank {ready.rank} is in its operation {ready.count}, {ready.operation!r}; rank 0 is in its "
                    f"operation {self.rank.count}, {self.operation!r}",
                    hint="call update and verify on every rank, in one order, with the same version",
                    rank=ready.rank,
                )
            if ready.fingerprint != self.manifest.fingerprint:
                raise ManifestMismatch(
                    f"trainer rank {ready.rank} has another model than rank 0 (names, shapes, dtypes, order or ties)",
                    hint="build the same model and the same adapter on every rank",
                    rank=ready.rank,
                )
        self.rank.claims.check(self.manifest, self.source.claims(), readies)

    def write(self, transports: tuple[GoTransport, ...], *, compare_copies: bool) -> list[Wrote]:
        """Every rank writes; what they wrote covers the manifest exactly, or this raises `ManifestMismatch`."""
        go = Go(self.txn, transports, self.left_s, compare_copies)
        self.rank.crew.tell_all(go)
        mine = self.rank.write(go, self.manifest, self.source, self.tick)
        if mine.error is not None:
            raise WeightwireError.of(mine.error)
        others = self.rank.crew.gather(
            Wrote,
            lambda wrote: wrote.txn == self.txn,
            deadline_s=self.deadline_s,
            tick=self.tick,
            tick_every_s=self.settings.lease_s / 3,
        )
        everyone = [mine, *others]
        if transports:
            owners = [wrote.rank for wrote in everyone for _ in wrote.pieces]
            boxes = [piece.box for wrote in everyone for piece in wrote.pieces]
            self.rank.cover(self.manifest).check(boxes, lambda position: f"rank {owners[position]}")
        pieces = {wrote.rank: wrote.pieces for wrote in everyone}
        copies = {wrote.rank: wrote.copies for wrote in everyone}
        if any(copies.values()) and (apart := what_differs(self.manifest, pieces, copies)):
            logger.warning(
                "weightwire: trainer ranks hold copies that have come apart; one of each was sent: %s", apart
            )
        return everyone

    def connect(self, needed: float = math.inf) -> list[ReplicaSession]:
        """Sessions of all living replicas, old ones kept. Those that are being caught up are left out, or waited for, half the
        time at most, where fewer than `needed` would be left. Raises `PeerLost` if there is none."""
        assert self.rank.registry is not None, "rank 0 has it"
        cards = {card.replica: card for card in self.rank.registry.cards()}
        free = self.rank.roster.free(cards, needed, self.left_s / 2)
        self.rank.adopt()
        for gone in set(self.rank.replicas) - set(cards):
            self.rank.lose(gone, "it is no longer among the replicas of the job")
        for name in sorted(free):
            if name not in self.rank.replicas:
                self.rank.replicas[name] = ReplicaSession.connect(cards[name], self.settings.config)
            self.rank.roster.take_in(cards[name])
        if not cards:
            raise PeerLost(
                f"no replica of job {addresses.job_name()!r} is running; looked in {addresses.runtime_dir()}",
                hint="start the engine with the plug-in installed, the same WEIGHTWIRE_JOB and WEIGHTWIRE_RUNTIME_DIR; "
                "`weightwire doctor` tells what is there; on other hosts also the same WEIGHTWIRE_REGISTRY and WEIGHTWIRE_KEY",
                phase="agree",
            )
        return [self.rank.replicas[name] for name in sorted(free)]
