"""The SyncManager: one update of one group, from the trainer's ranks into every replica of the job on this host.

Rank 0 drives; the other ranks write what they hold and wait for the outcome:

1. scan: every rank looks at its model and makes the manifest;
2. agree: discover the replicas, open the group on new ones, begin the transaction on all workers;
3. stage: every trainer rank writes its slices; rank 0 keeps the workers' leases alive meanwhile;
4. seal: every worker checks the digests of what it needs and prepares its standby;
5. commit: the front of every replica whose workers all sealed installs at one step boundary;
6. report: the same on every rank. An error on any rank is raised on all.

All sockets belong to one thread of the manager's own; `update` waits for it, `update_async` returns its future.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.base import Target, Transport, WriteStats
from inference_plugin.transports.registry import available_transports, transport_named
from inference_plugin.wire import addresses
from inference_plugin.wire.channel import Outgoing, fan_out
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import (
    CommitFailed,
    ManifestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.manifest import Box, ExactCover, Manifest, Piece
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    Commit,
    Committed,
    Describe,
    Done,
    Go,
    GoTransport,
    InFlight,
    InstallPolicy,
    Outcome,
    Ready,
    Release,
    Renew,
    ReplicaCard,
    Seal,
    Sealed,
    Sender,
    Verified,
    Verify,
    WorkerCard,
    Wrote,
)
from inference_plugin.wire.reports import (
    ReplicaReport,
    ReplicaVerify,
    UpdateReport,
    VerifyReport,
    compare_rank,
    missing_boxes,
)
from inference_plugin.wire.tensors import box_view
from trainer_adapters.agreement import Claims, digests_of, what_differs
from trainer_adapters.crew import Crew
from trainer_adapters.replicas import ReplicaSession

if TYPE_CHECKING:
    import torch.distributed as dist

    from trainer_adapters.source import LocalSlice, WeightSource

__all__ = ["SyncManager"]

Report = TypeVar("Report", UpdateReport, VerifyReport)

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0
"""For small requests to a living peer."""

SEAL_WAIT_S = 0.5
DAY_S = 86400.0
COMMIT_SHARE = 0.2
"""Of an operation's time: what is left for the commit when a replica is slow to seal."""


class SyncManager:
    """Moves a trainer's weights into the replicas of its job. Construct it on every rank; `update`,
    `update_async` and `verify` are collective: every rank calls them, in one order.

    - `group`: name of the weight-update group on the workers.
    - `transport`: a name, or "auto": the first that works between this host and each replica.
    - `install`: "copy" (overwrite at the step boundary), "standby" (swap a prepared set in) or "auto".
    - `in_flight`: what happens to running requests: "keep", "recompute", "abort" or "drain".
    - `timeout_s`: for a whole operation; every wait inside it ends by then. The first update of a replica takes longer
      than later ones: its placement plan is traced and proven (some seconds per GB).
    - `lease_s`: after this silence a worker drops an unfinished update.
    - `process_group`: the trainer's ranks, default all of torch.distributed (used once, here), or this process alone.

    Raises typed errors (`inference_plugin.wire.errors`), the same on every rank.
    """

    def __init__(
        self,
        group: str = "policy",
        *,
        transport: str = Transport.AUTO,
        install: InstallPolicy = "auto",
        in_flight: InFlight = "keep",
        timeout_s: float = 120.0,
        lease_s: float = 30.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (0 < timeout_s <= DAY_S and 0 < lease_s <= DAY_S):
            raise ValueError(f"timeout_s and lease_s must be positive, a day at most, not {timeout_s} and {lease_s}")
        for value, allowed in (
            (install, ("auto", "copy", "standby")),
            (in_flight, ("keep", "recompute", "abort", "drain")),
        ):
            if value not in allowed:
                raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
        self.group = group
        self.install: InstallPolicy = install
        self.in_flight: InFlight = in_flight
        self.timeout_s = timeout_s
        self.lease_s = lease_s
        self._transports = available_transports() if transport == Transport.AUTO else [transport_named(transport)]
        self._senders: dict[str, TransportSender] = {}
        self._crew = Crew(process_group)
        self._claims = Claims()
        self._session = secrets.token_hex(8)
        self._replicas: dict[str, ReplicaSession] = {}
        self._covered: tuple[Manifest, ExactCover] | None = None
        self._count = 0
        self._began_s = 0.0
        cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1,
            thread_name_prefix="weightwire-manager",
            initializer=_use_device,
            initargs=(torch.cuda.current_device() if cuda else None,),
        )

    @property
    def rank(self) -> int:
        return self._crew.rank

    def update(self, source: WeightSource, version: int) -> UpdateReport:
        """Brings `version` of the source's weights into every replica; returns the report, the same on every rank.

        Raises if no replica took it. A replica that failed beside others that didn't is in `report.failed`; it serves
        what it served before and is caught up by the next update. The source must not change until this returns.
        """
        return self.update_async(source, version).result()

    def update_async(
        self,
        source: WeightSource,
        version: int,
        callback: Callable[[concurrent.futures.Future[UpdateReport]], None] | None = None,
    ) -> concurrent.futures.Future[UpdateReport]:
        """As `update`, in the manager's thread. `callback` gets the finished future, in that thread."""
        future = self._thread.submit(self._update, source, version)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def verify(self, source: WeightSource) -> VerifyReport:
        """Compares what every replica's live parameters hold with the source, byte for byte, in engine coordinates."""
        return self._thread.submit(self._verify, source).result()

    def discover(self) -> list[ReplicaCard]:
        """The living replicas of the job, from the runtime directory."""
        return addresses.discover()

    def versions(self) -> dict[str, int | None]:
        """The version that each living replica serves, by replica id; None before its first update. Not collective."""
        return self._thread.submit(self._versions).result()

    def close(self) -> None:
        """Closes sockets and frees segments; may be called twice."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(self._close).result()
        self._thread.shutdown()

    def __enter__(self) -> SyncManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- every rank, in the manager's thread -------------------------------------------------------------------------

    def _update(self, source: WeightSource, version: int) -> UpdateReport:
        where = {"group": self.group, "version": version}
        return self._together(
            f"update:{version}",
            source,
            where,
            lambda m: _Update(self, source, m, version).run(),
            UpdateReport,
        )

    def _verify(self, source: WeightSource) -> VerifyReport:
        where = {"group": self.group, "phase": "verify"}
        return self._together("verify", source, where, lambda m: _Verification(self, source, m).run(), VerifyReport)

    def _together(
        self,
        operation: str,
        source: WeightSource,
        where: dict[str, Any],
        lead: Callable[[Manifest], Report],
        kind: type[Report],
    ) -> Report:
        """One collective operation: rank 0 leads, the others follow; an error on any rank is raised on all."""
        self._count += 1
        self._began_s = time.perf_counter()
        deadline_s = time.monotonic() + self.timeout_s
        if self.rank != 0:
            return decode_as(self._follow(operation, source), kind)
        try:
            report = lead(source.manifest())
        except BaseException as error:
            failed = WeightwireError.wrap(error).at(side="manager", **where)
            self._crew.fail_all(failed, deadline_s=deadline_s)
            if isinstance(error, Exception):
                raise failed from error.__cause__
            raise
        self._crew.tell_all(Outcome(msgspec.msgpack.encode(report)))
        return report

    def _follow(self, operation: str, source: WeightSource) -> bytes:
        """A rank above 0: report, write, report."""
        manifest: Manifest | None = None
        claims: tuple[Box, ...] | None = None
        error: WeightwireError | None = None
        try:
            manifest = source.manifest()
            claims = source.claims()
        except Exception as raised:  # noqa: BLE001 -- it travels to rank 0 and is raised on all
            error = WeightwireError.wrap(raised).at(side="trainer", rank=self.rank)
        ready = Ready(
            self._count,
            operation,
            self.rank,
            manifest.fingerprint if manifest else "",
            error.info() if error else None,
            *(self._claims.news(self.rank, manifest, claims) if manifest else (None, False)),
        )
        # The manager answers by its own deadline; a little more lets its answer arrive first.
        timeout_s = self.timeout_s + 10
        go = self._crew.ask_go(ready, timeout_s=timeout_s)
        assert manifest is not None
        self._claims.agree(self.rank, manifest, claims)
        wrote = self._write(go, manifest, source, tick=lambda: None)
        return self._crew.ask_outcome(wrote, timeout_s=timeout_s)

    def _write(self, go: Go, manifest: Manifest, source: WeightSource, tick: Callable[[], None]) -> Wrote:
        """Writes this rank's slices over every transport of the update. An error is in the result, never raised."""
        deadline_s = time.monotonic() + go.timeout_s
        started_s = time.perf_counter()
        pieces: list[Piece] | None = None
        copies: tuple[Piece, ...] = ()
        total = WriteStats()
        passes = 0
        try:
            for way in go.transports:
                sender = self._sender(transport_named(way.name))
                passes += 1
                with _taken(source) as slices:
                    written, stats = sender.write(
                        go.txn,
                        self.group,
                        self.rank,
                        manifest,
                        way.segment,
                        _ticking(slices, tick),
                        [Target(t.replica, t.rank, t.address, t.pid, t.boot_id, t.needs) for t in way.targets],
                        deadline_s=deadline_s,
                    )
                if pieces is not None and pieces != written:
                    raise ManifestMismatch("the source gave other slices, or other bytes, the second time")
                pieces = written
                total.nbytes += stats.nbytes
                total.messages += stats.messages
                total.move_s += stats.move_s
                total.digest_s += stats.digest_s
                total.lost |= stats.lost
            if go.copies:
                copies = tuple(digests_of(manifest, _ticking(source.copies(), tick)))
        except Exception as error:  # noqa: BLE001 -- it travels to rank 0 and is raised on all
            info = (
                WeightwireError.wrap(error).at(side="trainer", rank=self.rank, group=self.group, phase="stage").info()
            )
            _keep_company(source, len(go.transports) - passes)
            return Wrote(go.txn, self.rank, error=info)
        return Wrote(
            go.txn,
            self.rank,
            tuple(pieces or ()),
            total.nbytes,
            total.messages,
            total.move_s,
            total.digest_s,
            time.perf_counter() - started_s,
            {replica: error.info() for replica, error in total.lost.items()},
            copies=copies,
        )

    def _versions(self) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for card in addresses.discover():
            session = self._replicas.get(card.replica) or ReplicaSession.connect(card)
            try:
                workers: list[WorkerCard] = session.ask_workers(Describe(), WorkerCard, timeout_s=CONTROL_TIMEOUT_S)
            finally:
                if card.replica not in self._replicas:
                    session.close()
            held = {group.version for worker in workers for group in worker.groups if group.group == self.group}
            found[card.replica] = held.pop() if len(held) == 1 else None
        return found

    def _cover(self, manifest: Manifest) -> ExactCover:
        if self._covered is None or self._covered[0] is not manifest:
            self._covered = manifest, ExactCover(manifest)
        return self._covered[1]

    def _sender(self, transport: Transport) -> TransportSender:
        if transport.name not in self._senders:
            self._senders[transport.name] = transport.sender()
        return self._senders[transport.name]

    def _close(self) -> None:
        for replica in self._replicas.values():
            requests = [Outgoing(channel, Release(self.group)) for channel in replica.workers]
            for reply in fan_out(requests, Done, timeout_s=2.0):
                if isinstance(reply, WeightwireError):
                    logger.info("weightwire: release on %s: %s", replica.card.replica, reply)
            replica.close()
        self._replicas.clear()
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        self._crew.close()


class _Operation:
    """What an update and a verification share on rank 0."""

    def __init__(self, manager: SyncManager, source: WeightSource, manifest: Manifest, operation: str) -> None:
        self.manager = manager
        self.source = source
        self.manifest = manifest
        self.operation = operation
        self.deadline_s = time.monotonic() + manager.timeout_s
        self.txn = secrets.token_hex(12)
        self.transports = [(t, manager._sender(t)) for t in manager._transports]

    @property
    def left_s(self) -> float:
        """Seconds until the deadline. Raises `SyncTimeout` when there are none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SyncTimeout(f"{self.operation} took longer than {self.manager.timeout_s:g} s")
        return left_s

    def tick(self) -> None:
        """Called while trainer ranks write."""

    def gather_ready(self) -> None:
        """All ranks are in this operation, with the same model."""
        manager = self.manager
        readies = manager._crew.gather(
            Ready,
            lambda ready: ready.count >= manager._count,
            deadline_s=self.deadline_s,
            tick=self.tick,
            tick_every_s=manager.lease_s / 3,
        )
        for ready in readies:
            if (ready.count, ready.operation) != (manager._count, self.operation):
                raise VersionConflict(
                    f"trainer rank {ready.rank} is in its operation {ready.count}, {ready.operation!r}; rank 0 is in its "
                    f"operation {manager._count}, {self.operation!r}",
                    hint="call update and verify on every rank, in one order, with the same version",
                    rank=ready.rank,
                )
            if ready.fingerprint != self.manifest.fingerprint:
                raise ManifestMismatch(
                    f"trainer rank {ready.rank} has another model than rank 0 (names, shapes, dtypes, order or ties)",
                    hint="build the same model and the same adapter on every rank",
                    rank=ready.rank,
                )
        manager._claims.check(self.manifest, self.source.claims(), readies)

    def write(self, transports: tuple[GoTransport, ...], *, compare_copies: bool) -> list[Wrote]:
        """Every rank writes; what they wrote covers the manifest exactly, or this raises `ManifestMismatch`."""
        manager = self.manager
        go = Go(self.txn, transports, self.left_s, compare_copies)
        manager._crew.tell_all(go)
        mine = manager._write(go, self.manifest, self.source, self.tick)
        if mine.error is not None:
            raise WeightwireError.of(mine.error)
        others = manager._crew.gather(
            Wrote,
            lambda wrote: wrote.txn == self.txn,
            deadline_s=self.deadline_s,
            tick=self.tick,
            tick_every_s=manager.lease_s / 3,
        )
        everyone = [mine, *others]
        if transports:
            owners = [wrote.rank for wrote in everyone for _ in wrote.pieces]
            boxes = [piece.box for wrote in everyone for piece in wrote.pieces]
            manager._cover(self.manifest).check(boxes, lambda position: f"rank {owners[position]}")
        pieces = {wrote.rank: wrote.pieces for wrote in everyone}
        copies = {wrote.rank: wrote.copies for wrote in everyone}
        if any(copies.values()) and (apart := what_differs(self.manifest, pieces, copies)):
            logger.warning(
                "weightwire: trainer ranks hold copies that have come apart; one of each was sent: %s", apart
            )
        return everyone

    def connect(self) -> list[ReplicaSession]:
        """Sessions of all living replicas, old ones kept. Raises `PeerLost` if there is none."""
        manager = self.manager
        cards = {card.replica: card for card in addresses.discover()}
        for gone in set(manager._replicas) - set(cards):
            manager._replicas.pop(gone).close()
        for name, card in cards.items():
            if name not in manager._replicas:
                manager._replicas[name] = ReplicaSession.connect(card)
        if not cards:
            raise PeerLost(
                f"no replica of job {addresses.job_name()!r} is running; looked in {addresses.runtime_dir()}",
                hint="start the engine with the plug-in installed, the same WEIGHTWIRE_JOB and WEIGHTWIRE_RUNTIME_DIR; "
                "`weightwire doctor` tells what is there",
                phase="agree",
            )
        return [manager._replicas[name] for name in sorted(cards)]


class _Update(_Operation):
    """One update, on rank 0."""

    def __init__(self, manager: SyncManager, source: WeightSource, manifest: Manifest, version: int) -> None:
        super().__init__(manager, source, manifest, f"update:{version}")
        self.version = version
        self.phases: dict[str, float] = {}
        self._phase_name = ""
        self.reports: dict[str, ReplicaReport] = {}
        self.active: dict[str, ReplicaSession] = {}
        self.segments: dict[str, str] = {}
        self._sent_before: dict[str, int] = {}
        self._sessions: dict[str, ReplicaSession] = {}
        self._renewed_s = time.monotonic()

    def run(self) -> UpdateReport:
        self.phases["scan"] = time.perf_counter() - self.manager._began_s
        if self.version < 0:
            raise VersionConflict(f"a version is a non-negative int, not {self.version}")
        try:
            with self._phase("agree"):
                self.gather_ready()
                ways = self._agree()
            with self._phase("stage"):
                wrote = self.write(ways, compare_copies=bool(ways) and self.manager._claims.copies_are_due())
                self._drop_lost(wrote)
            with self._phase("seal"):
                sealed = self._seal(tuple(piece for w in wrote for piece in w.pieces))
            with self._phase("commit"):
                self._commit(sealed)
        except BaseException as error:
            self._abort(str(error))
            raise
        for kind in ("move", "digest"):
            self.phases[f"stage.{kind}"] = max((getattr(w, f"{kind}_s") for w in wrote), default=0.0)
        report = UpdateReport(
            group=self.manager.group,
            version=self.version,
            txn=self.txn,
            bytes=self.manifest.nbytes,
            seconds=time.perf_counter() - self.manager._began_s,
            phases=self.phases,
            messages=self._sent() + sum(w.messages for w in wrote) + 2 * (self.manager._crew.size - 1),
            copies_per_byte=max((transport_named(way.name).copies_per_byte for way in ways), default=0.0),
            replicas=tuple(self.reports[name] for name in sorted(self.reports)),
        )
        report.save()
        failed = report.failed
        if len(failed) == len(report.replicas):
            report.raise_failed()
        for replica in failed:
            logger.warning(
                "weightwire: replica %s failed to take version %d: %s",
                replica.replica,
                self.version,
                replica.error,
            )
        return report

    def tick(self) -> None:
        """Renews the workers' leases in time."""
        if time.monotonic() - self._renewed_s < self.manager.lease_s / 3:
            return
        self._renewed_s = time.monotonic()
        for session in list(self.active.values()):
            with self._replica(session):
                session.ask_workers(Renew(self.manager.group, self.txn), Done, timeout_s=CONTROL_TIMEOUT_S)

    # --- the steps, in order -----------------------------------------------------------------------------------------

    def _agree(self) -> tuple[GoTransport, ...]:
        """Opens the group where it isn't and begins the transaction everywhere; where and to whom the ranks write."""
        manager = self.manager
        for session in self.connect():
            self._sessions[session.card.replica] = session
            self._sent_before[session.card.replica] = session.messages
            with self._replica(session):
                session.agree(manager.group, self.manifest, self.transports, manager.install, timeout_s=self.left_s)
                self.active[session.card.replica] = session
        ways = []
        busy = frozenset().union(*(s.held_segments for s in manager._replicas.values()))
        for transport, sender in self.transports:
            users = [s for s in self.active.values() if s.transport == transport.name]
            if not users:
                continue
            segment = sender.allocate(self.manifest, busy)
            self.segments[transport.name] = _segment_id(segment)
            for session in users:
                with self._replica(session):
                    self._begin(session, segment)
            targets = tuple(t for s in users if s.card.replica in self.active for t in s.targets())
            if targets:
                ways.append(GoTransport(transport.name, segment, targets))
        return tuple(ways)

    def _begin(self, session: ReplicaSession, segment: bytes) -> None:
        manager = self.manager
        request = Begin(
            group=manager.group,
            txn=self.txn,
            version=self.version,
            sender=Sender(manager._session, os.getpid(), addresses.boot_id()),
            lease_s=manager.lease_s,
            fingerprint=self.manifest.fingerprint,
            segment=segment,
        )
        try:
            begun: list[Begun] = session.ask_workers(request, Begun, timeout_s=CONTROL_TIMEOUT_S)
        except (ProtocolError, ManifestMismatch):
            # The worker's terms are another trainer's by now: agree anew, once.
            session.agreed = None
            session.agree(manager.group, self.manifest, self.transports, manager.install, timeout_s=self.left_s)
            begun = session.ask_workers(request, Begun, timeout_s=CONTROL_TIMEOUT_S)
        if all(answer.already for answer in begun):
            self.active.pop(session.card.replica)
            self._report(session, "already", self.version)
        elif any(answer.already for answer in begun):
            raise CommitFailed(
                "its ranks serve different versions", hint="restart the engine", replica=session.card.replica
            )

    def _drop_lost(self, wrote: list[Wrote]) -> None:
        """Replicas that some trainer rank couldn't write to drop out."""
        for lost in (w.lost for w in wrote):
            for name, info in lost.items():
                if (session := self.active.get(name)) is not None:
                    with self._replica(session):
                        raise WeightwireError.of(info)

    def _seal(self, pieces: tuple[Piece, ...]) -> dict[str, list[Sealed]]:
        """Asks all workers of all replicas until each has sealed; a replica with a failing worker drops out."""
        request = Seal(self.manager.group, self.txn, pieces, SEAL_WAIT_S)
        sealed: dict[str, list[Sealed]] = {}
        while waiting := [s for name, s in self.active.items() if name not in sealed]:
            # One that is slow or silent must not use up the time in which the others are to commit.
            left_s = self.left_s - COMMIT_SHARE * self.manager.timeout_s
            if left_s <= 0:
                for session in waiting:
                    with self._replica(session):
                        raise SyncTimeout("its workers had not checked the update in time", side="worker")
                break
            asked = [(session, channel) for session in waiting for channel in session.workers]
            replies = fan_out(
                [Outgoing(channel, request) for _, channel in asked],
                Sealed,
                timeout_s=min(left_s, CONTROL_TIMEOUT_S),
            )
            for session in waiting:
                own = [reply for (s, _), reply in zip(asked, replies, strict=True) if s is session]
                with self._replica(session):
                    for reply in own:
                        if isinstance(reply, WeightwireError):
                            raise reply
                    if all(reply.done for reply in own if isinstance(reply, Sealed)):
                        sealed[session.card.replica] = [reply for reply in own if isinstance(reply, Sealed)]
        return sealed

    def _commit(self, sealed: dict[str, list[Sealed]]) -> None:
        """Commits every replica that sealed, all at once."""
        sessions = [session for name, session in self.active.items() if name in sealed]
        if not sessions:
            return
        left_s = self.left_s
        # The front gives up a little earlier than we do, so that its answer arrives.
        request = Commit(self.manager.group, self.txn, self.version, self.manager.in_flight, timeout_s=0.9 * left_s)
        replies = fan_out([Outgoing(s.front, request) for s in sessions], Committed, timeout_s=left_s)
        for session, reply in zip(sessions, replies, strict=True):
            with self._replica(session):
                if isinstance(reply, WeightwireError):
                    if isinstance(reply, (SyncTimeout, PeerLost)):  # it may serve either: keep both segments
                        session.held_segments |= {self.segments.get(session.transport, "")}
                    raise reply
                own = sealed[session.card.replica]
                released = all(rank.releases_segment for rank in reply.ranks)
                session.held_segments = (
                    frozenset() if released else frozenset({self.segments.get(session.transport, "")})
                )
                self.active.pop(session.card.replica)
                self._report(
                    session,
                    "committed",
                    reply.version,
                    digest=own[0].digest,
                    stopped_s=reply.stopped_s,
                    waited_s=reply.waited_s,
                    install_s=max(rank.install_s for rank in reply.ranks),
                    verify_s=max(s.verify_s for s in own),
                    prepare_s=max(s.prepare_s for s in own),
                    extra_bytes=sum(s.extra_bytes for s in own),
                )

    def _abort(self, reason: str) -> None:
        """Tells every replica that is still in the transaction to drop it; their leases do it if this can't."""
        for session in list(self.active.values()):
            self._tell_abort(session, reason)
        self.active.clear()

    # --- helpers -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _replica(self, session: ReplicaSession) -> Iterator[None]:
        """What fails here fails this replica only; until the commit, not where the trainer itself is wrong."""
        try:
            yield
        except WeightwireError as error:
            wrong_trainer = isinstance(error, (ManifestMismatch, VersionConflict))
            if not wrong_trainer or self._phase_name == "commit":
                self._fail(session, error)
                return
            raise error.at(replica=session.card.replica) from None

    def _fail(self, session: ReplicaSession, error: WeightwireError) -> None:
        """Takes a replica out of the update, with its reason in the report."""
        error.at(replica=session.card.replica, group=self.manager.group, version=self.version, phase=self._phase_name)
        if self.active.pop(session.card.replica, None) is not None:
            self._tell_abort(session, str(error))
        self._report(session, "failed", None, error=error.info())
        session.agreed = None
        if isinstance(error, PeerLost):
            self.manager._replicas.pop(session.card.replica, None)
            session.close()

    def _sent(self) -> int:
        """Requests that rank 0 sent in this update."""
        return sum(s.messages - self._sent_before[name] for name, s in self._sessions.items())

    def _tell_abort(self, session: ReplicaSession, reason: str) -> None:
        requests = [Outgoing(c, Abort(self.manager.group, self.txn, reason[:4096])) for c in session.workers]
        for reply in fan_out(requests, Done, timeout_s=5.0):
            if isinstance(reply, WeightwireError):
                logger.info("weightwire: abort of %s on %s: %s", self.txn, session.card.replica, reply)

    def _report(self, session: ReplicaSession, status: Any, version: int | None, **fields: Any) -> None:
        terms = session.opened[0] if session.opened else None
        self.reports[session.card.replica] = ReplicaReport(
            replica=session.card.replica,
            engine=session.card.engine,
            status=status,
            version=version,
            transport=session.transport,
            install=terms.install if terms else "",
            mechanism=terms.mechanism if terms else "",
            why=terms.why if terms else "",
            **fields,
        )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        self._phase_name = name
        try:
            yield
        except WeightwireError as error:
            raise error.at(phase=name) from error.__cause__
        finally:
            self.phases[name] = time.perf_counter() - started_s


class _Verification(_Operation):
    """One verification, on rank 0: the ranks write into a segment of their own, which the replicas are compared with."""

    def __init__(self, manager: SyncManager, source: WeightSource, manifest: Manifest) -> None:
        super().__init__(manager, source, manifest, "verify")

    def run(self) -> VerifyReport:
        from inference_plugin.transports.shm import SharedSegment

        manager = self.manager
        self.gather_ready()
        scratch = SharedSegment.create(self.manifest.layout.nbytes)
        try:
            segment = msgspec.msgpack.encode(scratch.address)
            self.write((GoTransport("shm", segment, ()),), compare_copies=True)
            sessions = self.connect()
            requests = [Outgoing(s.front, Verify(manager.group, self.left_s)) for s in sessions]
            replies = fan_out(requests, Verified, timeout_s=self.left_s)
            return VerifyReport(
                manager.group,
                tuple(
                    self._compare(session, reply, scratch.tensor)
                    for session, reply in zip(sessions, replies, strict=True)
                ),
            )
        finally:
            scratch.close()

    def _compare(
        self, session: ReplicaSession, reply: Verified | WeightwireError, segment: torch.Tensor
    ) -> ReplicaVerify:
        if isinstance(reply, WeightwireError):
            return ReplicaVerify(session.card.replica, None, 0, (), (), reply.at(replica=session.card.replica).info())
        manifest = self.manifest

        def tensor_named(name: str) -> torch.Tensor | None:
            i = manifest.index.get(name)
            return None if i is None else box_view(segment, manifest, manifest.whole(i))

        differ = [words for rank in reply.ranks for words in compare_rank(rank, tensor_named)]
        if missing := missing_boxes(reply.ranks, (s.name for s in manifest.tensors if s.nbytes)):
            differ.append(missing)
        unreadable = [f"rank {r.rank}: {name}: {why}" for r in reply.ranks for name, why in r.unreadable.items()]
        return ReplicaVerify(
            session.card.replica,
            reply.ranks[0].version if reply.ranks else None,
            sum(len(rank.boxes) for rank in reply.ranks),
            tuple(differ[:8]),
            tuple(unreadable[:8]),
        )


def _ticking(slices: Iterator[LocalSlice], tick: Callable[[], None]) -> Iterator[LocalSlice]:
    for item in slices:
        yield item
        tick()


def _use_device(device: int | None) -> None:
    """A new thread has the first GPU as its own; sources that gather there need the one that this rank was given."""
    if device is not None:
        torch.cuda.set_device(device)


@contextlib.contextmanager
def _taken(source: WeightSource) -> Iterator[Iterator[LocalSlice]]:
    """The source's slices, closed in the end: a source that works together with other ranks then finishes its part."""
    slices = source.slices()
    try:
        yield slices
    finally:
        if isinstance(slices, Generator):
            slices.close()


def _keep_company(source: WeightSource, passes: int) -> None:
    """Runs through the slices as often as the other ranks still will, after an error, where they need this one for it."""
    for _ in range(passes if source.made_together() else 0):
        with contextlib.suppress(Exception), _taken(source) as slices:
            for _ in slices:
                pass


def _segment_id(description: bytes) -> str:
    """The id inside a transport's description, if it has one: what workers report as held."""
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, ProtocolError):
        found = msgspec.msgpack.decode(description) if description else {}
        if isinstance(found, dict):
            return str(found.get("segment_id", ""))
    return ""
