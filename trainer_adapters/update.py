"""One update, on rank 0: agree, stage, seal, commit, report. What the steps are: `trainer_adapters.manager`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire import addresses
from inference_plugin.wire.channel import Channel, Outgoing, fan_out, take_ready
from inference_plugin.wire.errors import (
    CommitFailed,
    ManifestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    VersionConflict,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.manifest import Manifest, Piece
from inference_plugin.wire.messages import (
    Abort,
    Begin,
    Begun,
    Commit,
    Committed,
    Done,
    GoTransport,
    Renew,
    Seal,
    Sealed,
    Sender,
    Wrote,
)
from inference_plugin.wire.reports import ReplicaReport, UpdateReport
from inference_plugin.wire.tracing import span, span_since
from trainer_adapters.operation import Operation
from trainer_adapters.rank import Rank, as_target
from trainer_adapters.replicas import ReplicaSession
from trainer_adapters.roster import Kept
from trainer_adapters.stragglers import BestEffort, Quorum

if TYPE_CHECKING:
    from trainer_adapters.source import WeightSource

__all__ = ["Update"]

logger = logging.getLogger(__name__)

SEAL_WAIT_S = 0.5
ABORT_TIMEOUT_S = 5.0
COMMIT_SHARE = 0.2
"""Of an operation's time: what is left for the commit when a replica is slow to seal."""


class Update(Operation):
    """One update, on rank 0."""

    def __init__(self, rank: Rank, source: WeightSource, manifest: Manifest, version: int) -> None:
        super().__init__(rank, source, manifest, f"update:{version}")
        self.version = version
        self.phases: dict[str, float] = {}
        self._phase_name = ""
        self.reports: dict[str, ReplicaReport] = {}
        self.active: dict[str, ReplicaSession] = {}
        self.segments: dict[str, str] = {}
        self._sent_before: dict[str, int] = {}
        self._sessions: dict[str, ReplicaSession] = {}
        self._renewed_s = time.monotonic()
        self._spreading = False

    def run(self) -> UpdateReport:
        self.phases["scan"] = time.perf_counter() - self.rank.began_s
        if self.version < 0:
            raise VersionConflict(f"a version is a non-negative int, not {self.version}")
        try:
            with self._phase("agree"):
                self.gather_ready()
                ways = self._agree()
            with self._phase("stage"):
                self._spreading = True
                wrote = self.write(ways, compare_copies=bool(ways) and self.rank.claims.copies_are_due())
                self._drop_lost(wrote)
            self._tell_staged()
            with self._phase("seal"):
                sealed = self._seal(tuple(piece for w in wrote for piece in w.pieces))
                self._spreading = False
            with self._phase("commit"):
                self._commit(sealed)
            seconds = time.perf_counter() - self.rank.began_s
            self._leave_behind()
        except BaseException as error:
            self._abort(str(error))
            raise
        finally:
            took = self.rank.roster.settle(self.version, self.reports.values())
        if took:
            self._keep(ways, tuple(piece for w in wrote for piece in w.pieces))
        for kind in ("move", "digest"):
            self.phases[f"stage.{kind}"] = max((getattr(w, f"{kind}_s") for w in wrote), default=0.0)
        report = UpdateReport(
            group=self.settings.group,
            version=self.version,
            txn=self.txn,
            bytes=self.manifest.nbytes,
            seconds=seconds,
            phases=self.phases,
            messages=self._sent() + sum(w.messages for w in wrote) + 2 * (self.rank.crew.size - 1),
            egress_bytes=sum(w.sent_bytes for w in wrote),
            copies_per_byte=max((transport_named(way.name).copies_per_byte for way in ways), default=0.0),
            replicas=tuple(self.reports[name] for name in sorted(self.reports)),
        )
        self._publish(report)
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

    def _tell_staged(self) -> None:
        seconds = time.perf_counter() - self.rank.began_s
        self.rank.events.tell("staged", group=self.settings.group, version=self.version, seconds=seconds)

    def _publish(self, report: UpdateReport) -> None:
        report.save()

    def _keep(self, ways: tuple[GoTransport, ...], pieces: tuple[Piece, ...]) -> None:
        """From now on replicas that come late are caught up from this update's bytes, where they still lie somewhere."""
        for way in ways if self.settings.catch_up != "never" else ():
            sender = self.rank.sender(transport_named(way.name))
            memory = sender.memory(way.segment)
            if memory is not None:
                described = sender.probe(), way.segment, _segment_id(way.segment)
                self.rank.roster.keep(Kept(self.version, self.manifest, pieces, way.name, *described, memory))
                return

    def tick(self) -> None:
        """Renews the workers' leases in time."""
        self._renew(self.active.values())

    def _renew(self, sessions: Iterable[ReplicaSession]) -> None:
        """Renews leases, where it is time; not of replicas that owe an answer: another request would take its place."""
        if time.monotonic() - self._renewed_s < self.settings.lease_s / 3:
            return
        self._renewed_s = time.monotonic()
        for session in list(sessions):
            with self._replica(session):
                session.ask_workers(Renew(self.settings.group, self.txn), Done)

    # --- the steps, in order -----------------------------------------------------------------------------------------

    def _agree(self) -> tuple[GoTransport, ...]:
        """Opens the group where it isn't and begins the transaction everywhere; where and to whom the ranks write."""
        policy = self.settings.stragglers
        for session in self.connect(policy.count if isinstance(policy, Quorum) else 1):
            self._sessions[session.card.replica] = session
            self._sent_before[session.card.replica] = session.messages
            with self._replica(session), span("open", replica=session.card.replica):
                self._open(session)
                self.active[session.card.replica] = session
        ways = []
        busy = self.rank.roster.segments_needed().union(*(s.held_segments for s in self.rank.replicas.values()))
        for transport, sender in self.transports:
            users = [s for s in self.active.values() if s.transport == transport.name]
            if not users:
                continue
            targets = [as_target(t) for s in users for t in s.targets()]
            sender.meet(targets, self.rank.crew.size, self.left_s, self.settings.fan_out)
            segment = self._allocate(transport.name, sender, busy)
            with span("begin", replicas=len(users)):
                self._begin(users, segment)
            begun = tuple(t for s in users if s.card.replica in self.active for t in s.targets())
            if begun:
                ways.append(GoTransport(transport.name, segment, begun))
        if ways and self.settings.catch_up == "always" and "shm" not in self.segments:
            sender = self.rank.sender(transport_named("shm"))
            ways.append(GoTransport("shm", self._allocate("shm", sender, busy), ()))
        return tuple(ways)

    def _allocate(self, transport: str, sender: TransportSender, busy: frozenset[str]) -> bytes:
        """Where the bytes will be; the last version's may have been there."""
        segment = sender.allocate(self.manifest, busy)
        self.segments[transport] = _segment_id(segment)
        self.rank.roster.overwrites(transport, self.segments[transport], busy, self.manifest)
        return segment

    def _open(self, session: ReplicaSession) -> None:
        session.agree(
            self.settings.group,
            self.manifest,
            self.transports,
            self.settings.install,
            partial=self.settings.partial,
            timeout_s=self.left_s,
        )

    def _begin(self, sessions: Sequence[ReplicaSession], segment: bytes) -> None:
        """Begins the transaction on all workers of these replicas at once."""
        request = Begin(
            group=self.settings.group,
            txn=self.txn,
            version=self.version,
            sender=Sender(self.rank.session, os.getpid(), addresses.boot_id()),
            lease_s=self.settings.lease_s,
            fingerprint=self.manifest.fingerprint,
            segment=segment,
        )
        requests = [Outgoing(channel, request) for session in sessions for channel in session.workers]
        replies = iter(fan_out(requests, Begun, timeout_s=self.settings.config.control_timeout_s))
        for session in sessions:
            begun = [next(replies) for _ in session.workers]
            with self._replica(session):
                self._take_begun(session, request, begun)

    def _take_begun(self, session: ReplicaSession, request: Begin, replies: list[Begun | WeightwireError]) -> None:
        error = next((reply for reply in replies if isinstance(reply, WeightwireError)), None)
        if isinstance(error, ProtocolError | ManifestMismatch):
            # The worker's terms are another trainer's by now: agree anew, once.
            session.agreed = None
            self._open(session)
            replies = session.ask_workers(request, Begun)
        elif error is not None:
            raise error
        begun = [reply for reply in replies if isinstance(reply, Begun)]
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
        """Asks all workers of all replicas until those have sealed that the commit waits for; a replica with a failing
        worker drops out at once. Those that aren't waited for any longer are still in `active`."""
        policy = self.settings.stragglers
        request = Seal(self.settings.group, self.txn, pieces, SEAL_WAIT_S)
        # One that is slow or silent must not use up the time in which the others are to commit.
        until_s = self.deadline_s - COMMIT_SHARE * self.settings.timeout_s
        if isinstance(policy, BestEffort):
            until_s = min(until_s, time.monotonic() + policy.deadline_s)
        sealing = {name: Sealing(session) for name, session in self.active.items()}
        for each in sealing.values():
            with self._replica(each.session):
                each.ask(request)

        def waiting() -> list[Sealing]:
            return [each for name, each in sealing.items() if name in self.active and not each.done]

        def sealed() -> dict[str, list[Sealed]]:
            return {name: list(each.answers.values()) for name, each in sealing.items() if each.done}

        while waiting() and (left_s := until_s - time.monotonic()) > 0:
            if isinstance(policy, Quorum) and len(sealed()) >= policy.count:
                break
            owners = {channel: each for each in waiting() for channel in each.asked_at_s}
            asked_s = min(at_s for each in waiting() for at_s in each.asked_at_s.values())
            silent_s = asked_s + self.settings.config.control_timeout_s
            wait_s = min(left_s, self.settings.lease_s / 3, silent_s - time.monotonic())
            for channel, reply in take_ready(list(owners), Sealed, timeout_s=max(0.0, wait_s)):
                with self._replica(owners[channel].session):
                    owners[channel].take(channel, reply, request)
            for each in waiting():
                with self._replica(each.session):
                    each.check_silence()
            self._renew([each.session for name, each in sealing.items() if name in self.active and each.done])
        ready = {name: answers for name, answers in sealed().items() if name in self.active}
        served = sum(report.status == "already" for report in self.reports.values())
        everyone = len(self._sessions) - served
        wanted = policy.count - served if isinstance(policy, Quorum) else everyone if policy == "all" else 0
        if len(ready) < wanted:
            others = [f"{r.replica}: {r.error.message}" for r in self.reports.values() if r.error is not None]
            others += [f"{each.session.card.replica}: not ready in time" for each in waiting()]
            raise CommitFailed(
                f"{len(ready)} of {everyone} replicas are ready, the commit wants {wanted}; none commits",
                hint=f"the others: {first_few(others)}",
            )
        return ready

    def _commit(self, sealed: dict[str, list[Sealed]]) -> None:
        """Commits every replica that sealed, all at once."""
        sessions = [session for name, session in self.active.items() if name in sealed]
        if not sessions:
            return
        left_s = self.left_s
        # The front gives up a little earlier than we do, so that its answer arrives.
        request = Commit(self.settings.group, self.txn, self.version, self.settings.in_flight, timeout_s=0.9 * left_s)
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

    def _leave_behind(self) -> None:
        """Replicas that the commit did not wait for; telling them is left until the others serve the version."""
        self._phase_name = "seal"
        for session in list(self.active.values()):
            with self._replica(session):
                raise SyncTimeout(
                    "its workers had not checked the update in time",
                    hint="it is caught up, or the next update brings it up",
                    side="worker",
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
        error.at(replica=session.card.replica, group=self.settings.group, version=self.version, phase=self._phase_name)
        if self.active.pop(session.card.replica, None) is not None:
            self._route_around(session)
            self._tell_abort(session, str(error))
        self._report(session, "failed", None, error=error.info())
        session.agreed = None
        if isinstance(error, PeerLost):
            self.rank.lose(session.card.replica, str(error))

    def _route_around(self, lost: ReplicaSession) -> None:
        """Those to whom a lost replica passed the bytes on get them from others, where there are others that have them."""
        if self._spreading:
            sender = next(sender for transport, sender in self.transports if transport.name == lost.transport)
            sender.without(lost.card.replica)

    def _sent(self) -> int:
        """Requests that rank 0 sent in this update."""
        return sum(s.messages - self._sent_before[name] for name, s in self._sessions.items())

    def _tell_abort(self, session: ReplicaSession, reason: str) -> None:
        requests = [Outgoing(c, Abort(self.settings.group, self.txn, reason[:4096])) for c in session.workers]
        for reply in fan_out(requests, Done, timeout_s=ABORT_TIMEOUT_S):
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
            with span(name):
                yield
        except WeightwireError as error:
            raise error.at(phase=name) from error.__cause__
        finally:
            self.phases[name] = time.perf_counter() - started_s


class Sealing:
    """One replica between seal and commit: which of its workers are asked, and what they answered."""

    def __init__(self, session: ReplicaSession) -> None:
        self.session = session
        self.began_s = time.perf_counter()
        self.asked_at_s: dict[Channel, float] = {}
        self.answers: dict[Channel, Sealed] = {}

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.session.workers)

    def ask(self, request: Seal) -> None:
        for channel in self.session.workers:
            channel.send(request)
            self.asked_at_s[channel] = time.monotonic()

    def take(self, channel: Channel, reply: Sealed | WeightwireError, request: Seal) -> None:
        """Raises the error that a worker answered, or that its silence is."""
        del self.asked_at_s[channel]
        if isinstance(reply, WeightwireError):
            raise reply
        if reply.done:
            self.answers[channel] = reply
            if self.done:
                span_since(self.began_s, "seal", self.session.card.replica)
        else:
            channel.send(request)
            self.asked_at_s[channel] = time.monotonic()

    def check_silence(self) -> None:
        limit_s = self.session.config.control_timeout_s
        for channel, at_s in self.asked_at_s.items():
            if time.monotonic() - at_s >= limit_s:
                raise SyncTimeout(f"no reply from {channel.address} within {limit_s:g} s", **channel.where)


def _segment_id(description: bytes) -> str:
    """The id inside a transport's description, if it has one: what workers report as held."""
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, ProtocolError):
        found = msgspec.msgpack.decode(description) if description else {}
        if isinstance(found, dict):
            return str(found.get("segment_id", ""))
    return ""
