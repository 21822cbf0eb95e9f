"""Rank 0's half of an operation: it brings all ranks together, and runs the transaction. The other half is `follower`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from inference_plugin.net.records import save_report
from inference_plugin.transports.base import Sender, Transport
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire.errors import ManifestMismatch, TransportUnavailable, VersionConflict, WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.host_memory import free_host_bytes
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Go, GoTransport, Outcome, Wrote
from inference_plugin.wire.reports import UpdateReport, VerifyReport
from inference_plugin.wire.tracing import span
from trainer_adapters.events import harmless, phase_begins
from trainer_adapters.fleet.machine_io import RetainedVersion
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.settings import Quorum
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.sources.differing import another_model
from trainer_adapters.update.agreement import what_differs
from trainer_adapters.update.rank_context import RankContext
from trainer_adapters.update.transaction import Transaction, segment_id

__all__ = ["gather_ready", "keep", "lead", "update", "write"]

logger = logging.getLogger(__name__)

Report = TypeVar("Report", UpdateReport, VerifyReport)


def lead(
    context: RankContext,
    operation: str,
    source: WeightSource,
    work: Callable[[Manifest], Report],
    answered: Callable[[Report], None],
    **where: Any,
) -> Report:
    """Runs one operation of all ranks. An error on any rank is raised on all, with `where` in its empty fields. `answered` gets
    the report before any rank is told of it; the report is final from then on."""
    ranks = context.ranks
    ranks.enter(operation, deadline_s=context.deadline_s)
    try:
        with span("scan"):
            manifest = context.scan(source)
        report = work(manifest)
    except BaseException as error:
        failed = WeightwireError.wrap(error).at(side="manager", **where)
        with harmless("telling the other ranks of a failure"):
            ranks.fail_all(failed)
        if isinstance(error, Exception):
            raise failed from error.__cause__
        raise
    answered(report)
    with harmless("telling the other ranks"):
        ranks.tell_all(Outcome(msgspec.msgpack.encode(report)))
    return report


def gather_ready(context: RankContext, source: WeightSource, manifest: Manifest) -> None:
    """Waits until all ranks are in this operation, with the same model."""
    readies = context.ranks.gather_ready()
    for ready in readies:
        if ready.fingerprint != manifest.fingerprint:
            raise another_model(manifest, ready.rank, ready.model)
    context.claims.check(manifest, source.claims(), readies)


def write(context: RankContext, go: Go, source: WeightSource, manifest: Manifest) -> list[Wrote]:
    """Has every rank write. Raises `ManifestMismatch` unless the pieces cover the manifest exactly."""
    with context.claims.comparing(go.copies):
        return _write(context, go, source, manifest)


def _write(context: RankContext, go: Go, source: WeightSource, manifest: Manifest) -> list[Wrote]:
    context.ranks.tell_all(go)
    mine = context.writer.write(go, manifest, source, context.deadline_s, released=context.released)
    if mine.error is not None:
        raise WeightwireError.of(mine.error)
    everyone = [mine, *context.ranks.gather_wrote()]
    if go.transports:
        owners = [wrote.rank for wrote in everyone for _ in wrote.pieces]
        boxes = [piece.box for wrote in everyone for piece in wrote.pieces]
        context.cover.check(boxes, lambda position: f"rank {owners[position]}")
    pieces = {wrote.rank: wrote.pieces for wrote in everyone}
    copies = {wrote.rank: wrote.copies for wrote in everyone}
    if any(copies.values()) and (apart := what_differs(manifest, pieces, copies)):
        logger.warning("weightwire: trainer ranks hold copies that have come apart; one of each was sent: %s", apart)
    if mixed := what_differs(manifest, pieces, {wrote.rank: wrote.kept_equal for wrote in everyone}):
        raise ManifestMismatch(
            f"the trainer's ranks hold different weights, and each would send a part of its own weights: {mixed}",
            hint="data-parallel ranks must hold one model: broadcast it from one rank (DistributedDataParallel does), or send "
            "one rank's with ModuleAdapter(model, only_rank_0=True), or by an export that yields nothing on the others; what a "
            "rank has of its own (its experts, its part of a layer) goes by ExportAdapter, under its own names or whole; with "
            "Megatron's overlap_param_gather call start_param_sync(force_sync=True) first",
            side="trainer",
        )
    return everyone


def update(context: RankContext, source: WeightSource, manifest: Manifest, version: int | None) -> UpdateReport:
    """Brings one version into all replicas. Returns the report once the update is over for each of them: nothing that comes
    after the commit changes it. `version`: None stands for the next one. Raises if the update failed as a whole, before any
    replica was asked to commit."""
    assert context.fleet is not None, "rank 0 has the fleet"
    if version is None:
        control_timeout_s = context.settings.config.control_timeout_s
        version = context.fleet.next_version(min(control_timeout_s, context.left_s("update") / 4))
    may_be_installed = True
    try:
        return _Update(context, source, manifest, version).run()
    except WeightwireError as error:
        if isinstance(error, VersionConflict):
            context.fleet.versions.ask_again()
        may_be_installed = not (isinstance(error, ManifestMismatch) and error.dtypes)  # refused as the group was opened
        raise error.at(version=version) from error.__cause__
    finally:
        if may_be_installed:
            context.fleet.versions.sent(version)


def keep(report: UpdateReport) -> None:
    """Writes an update's report and logs its failures, after all ranks have been told it: nobody's answer waits for a disk."""
    with harmless("writing the report"):
        phase_begins("update", report.group, report.version, "report")
        try:
            save_report(report)
        except OSError as error:  # a full disk, say: a traceback at each update would tell no more
            words = "weightwire: the report of %s version %d can't be written into the runtime directory: %s"
            logger.warning(words, report.group, report.version, error)
    for replica in report.failed:
        words = "weightwire: replica %s failed to take version %d: %s"
        text = WeightwireError.of(replica.error) if replica.error is not None else "lost"
        logger.warning(words, replica.replica, report.version, text)


class _Update:
    def __init__(self, context: RankContext, source: WeightSource, manifest: Manifest, version: int) -> None:
        assert context.fleet is not None, "rank 0 has the fleet"
        self.context = context
        self.fleet = context.fleet
        self.settings = context.settings
        self.source = source
        self.manifest = manifest
        self.version = version
        self.ways: tuple[GoTransport, ...] = ()
        self.wrote: list[Wrote] = []
        self.transaction = Transaction(
            "update",
            self.settings,
            [(transport, context.writer.sender(transport)) for transport in self.settings.offered()],
            manifest,
            version,
            trainer=context.trainer,
            deadline_s=context.deadline_s,
            stragglers=self.settings.stragglers,
            lost=self.fleet.lose,
        )
        self.transaction.phases["scan"] = time.perf_counter() - context.began_s

    def run(self) -> UpdateReport:
        transaction = self.transaction
        try:
            with transaction.running():
                with transaction.phase("agree"):
                    gather_ready(self.context, self.source, self.manifest)
                    self.ways = self._agree()
                with transaction.phase("stage"):
                    left_s = self._left_s()
                    copies = bool(self.ways) and self.context.claims.copies_are_due()
                    go = Go(transaction.txn, self.ways, left_s, copies, self.version)
                    self.wrote = write(self.context, go, self.source, self.manifest)
                    lost = {name: info for wrote in self.wrote for name, info in wrote.lost.items()}
                    transaction.drop({name: WeightwireError.of(info) for name, info in lost.items()})
                seconds = time.perf_counter() - self.context.began_s
                self.context.events.tell("staged", group=self.settings.group, version=self.version, seconds=seconds)
                with transaction.phase("seal"):
                    transaction.seal(self._pieces())
                with transaction.phase("commit"):
                    transaction.commit()
        except BaseException:
            with harmless("noting a failed update"):
                self.fleet.settle(self.version, transaction.errors)
            raise
        seconds = time.perf_counter() - self.context.began_s
        with harmless("noting what became of the replicas"):
            self.fleet.settle(self.version, transaction.errors)
            if None in transaction.errors.values():
                self._retain()
        return self._make_report(seconds)

    def _agree(self) -> tuple[GoTransport, ...]:
        """Opens the group and begins on all replicas. Returns where the ranks write."""
        policy = self.settings.stragglers
        needed = policy.count if isinstance(policy, Quorum) else math.inf if policy == "all" else 1
        part = self.fleet.take_part(needed, self._left_s() / 2)
        ways = self.transaction.agree(part.sessions, self._place, part.unreached)
        if ways and self.settings.catch_up == "always" and {"shm", "zone"}.isdisjoint(way.name for way in ways):
            shm = transport_named("shm")
            ways += (GoTransport("shm", self._allocate(shm, self.context.writer.sender(shm)), ()),)
        return ways

    def _place(self, transport: Transport, sender: Sender, users: Sequence[ReplicaSession]) -> bytes:
        targets = [target for user in users for target in user.targets()]
        sender.meet(targets, self.context.ranks.size, self._left_s(), self.settings.fan_out)
        self._check_memory(transport, sender, users)
        return self._allocate(transport, sender)

    def _check_memory(self, transport: Transport, sender: Sender, users: Sequence[ReplicaSession]) -> None:
        """Before anything is allocated: the second sets of all replicas of this host and the segment come from one memory."""
        sets = sum(user.to_take for user in users)
        segment = sender.takes_bytes(self.manifest, self._segments_in_use())
        if sets + segment and sets + segment > (free := free_host_bytes()):
            raise TransportUnavailable(
                f"{transport.name}: second sets of {sets >> 20} MiB and a segment of {segment >> 20} MiB do not fit: "
                f"{free >> 20} MiB are free on this host",
                hint=("install='copy' needs no second set; " if sets else "") + "partial=True sends a part",
            )

    def _allocate(self, transport: Transport, sender: Sender) -> bytes:
        """The place for the bytes, in which the last version may lie now."""
        busy = self._segments_in_use()
        if not (segment := sender.allocate(self.manifest, busy)):
            return segment
        self.fleet.segment_taken(transport.name, segment_id(segment), busy, self.manifest.fingerprint)
        return segment

    def _segments_in_use(self) -> frozenset[str]:
        """Ids of the segments that are not to be written; those of lost replicas alone are given up."""
        self.context.writer.retire(self.fleet.take_left_segments())
        return self.fleet.segments_in_use()

    def _retain(self) -> None:
        """From now on late replicas are caught up from this update's bytes, if these are still in memory."""
        for way in self.ways if self.settings.catch_up != "never" else ():
            sender = self.context.writer.sender(transport_named(way.name))
            if (kept := sender.kept(self.manifest, way.segment, way.targets)) is not None:
                described = sender.probe(), way.segment, segment_id(way.segment)
                self.fleet.retain(
                    RetainedVersion(self.version, self.manifest, self._pieces(), way.name, *described, kept)
                )
                return

    def _make_report(self, seconds: float) -> UpdateReport:
        phases = self.transaction.phases
        for kind in ("move", "digest"):
            phases[f"stage.{kind}"] = max((getattr(wrote, f"{kind}_s") for wrote in self.wrote), default=0.0)
        copies, engine_dtypes = 0.0, {}
        with harmless("counting copies"):
            copies = max((transport_named(way.name).copies_per_byte for way in self.ways), default=0.0)
        with harmless("asking the source for the engine's dtypes"):
            engine_dtypes = {str(name): str(dtype) for name, dtype in self.source.engine_dtypes.items()}
        own = self.transaction.messages + 2 * (self.context.ranks.size - 1)
        return UpdateReport(
            group=self.settings.group,
            version=self.version,
            txn=self.transaction.txn,
            bytes=self.manifest.nbytes,
            seconds=seconds,
            phases=phases,
            messages=own + sum(wrote.messages for wrote in self.wrote),
            egress_bytes=sum(wrote.sent_bytes for wrote in self.wrote),
            held_bytes=sum(wrote.held_bytes for wrote in self.wrote),
            copies_per_byte=copies,
            replicas=self.transaction.reports(),
            engine_dtypes=engine_dtypes,
        )

    def _pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for wrote in self.wrote for piece in wrote.pieces)

    def _left_s(self) -> float:
        return self.context.left_s(f"update:{self.version}")
