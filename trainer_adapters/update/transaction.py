"""Brings one version into a set of replicas: opens the group, begins, seals, commits.

`TransactionMachine` decides; this class owns the sockets, the clock and the leases. An update of all replicas and the catch-up
of one use it in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel, Outgoing, fan_out
from inference_plugin.net.processes import start_ticks
from inference_plugin.transports.base import Sender as TransportSender
from inference_plugin.transports.base import Transport
from inference_plugin.wire.digest import digest_group
from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, TornReplica, WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Abort, Done, GoTransport, OpenGroup, Renew, ReplicaCard, Sender, Target
from inference_plugin.wire.reports import ReplicaReport
from inference_plugin.wire.tracing import call_it, span, span_since
from trainer_adapters.events import harmless, phase_begins
from trainer_adapters.fleet import asking
from trainer_adapters.fleet.session import ReplicaSession
from trainer_adapters.settings import Settings, Stragglers
from trainer_adapters.update.hints import NOTHING_APPLIED, STREAMED, UNKNOWN
from trainer_adapters.update.leases import Leases
from trainer_adapters.update.machine import TransactionMachine
from trainer_adapters.update.machine_io import (
    AbortAll,
    Action,
    Answered,
    Ask,
    AskToOpen,
    BeginAll,
    CommitAll,
    Drop,
    Dropped,
    EndStream,
    Event,
    Holds,
    Joining,
    LeaveBehind,
    OpenAll,
    Participant,
    SealAll,
    State,
    StopWaiting,
    TellAbort,
    Terms,
    TermsAgreed,
    Tick,
)
from trainer_adapters.update.reporting import replica_report

__all__ = ["Place", "Transaction", "segment_id"]

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0

Place = Callable[[Transport, TransportSender, Sequence[ReplicaSession]], bytes]
"""Says where a transport's bytes for these replicas will be: the description that travels in `Begin`."""


class Transaction:
    """One transaction, for one thread. `offers`: the transports, in order of preference, with this rank's halves.
    `trainer`: the session id under which workers know this trainer. `digest`: the whole group's, if it is known already."""

    def __init__(
        self,
        operation: str,
        settings: Settings,
        offers: Sequence[tuple[Transport, TransportSender]],
        manifest: Manifest,
        version: int,
        *,
        trainer: str,
        deadline_s: float,
        stragglers: Stragglers = "report",
        digest: str = "",
        lost: Callable[[str, str], None] = lambda _replica, _reason: None,
    ) -> None:
        self.txn = secrets.token_hex(12)
        call_it(self.txn, version)
        self.phases: dict[str, float] = {}
        self._operation = operation
        self._settings = settings
        self._opens_with: OpenGroup | None = None
        self._offers = {transport.name: (transport, sender) for transport, sender in offers}
        self._lost = lost
        self.sessions: dict[str, ReplicaSession] = {}
        self.cards: dict[str, ReplicaCard] = {}
        self.sent_before: dict[str, int] = {}
        self.segment_ids: dict[str, str] = {}
        self._opened_s = self._sealed_s = 0.0
        self.places: dict[Channel, tuple[str, int | None]] = {}
        self._states: dict[str, State] = {}
        """Of the participants, after the last event."""
        terms = Terms(
            group=settings.group,
            txn=self.txn,
            version=version,
            manifest=manifest,
            transports=tuple(self._offers),
            install=settings.install,
            partial=settings.partial,
            in_flight=settings.in_flight,
            stragglers=stragglers,
            sender=Sender(trainer, os.getpid(), addresses.boot_id(), start_ticks()),
            lease_s=settings.lease_s,
            timeout_s=settings.timeout_s,
            deadline_s=deadline_s,
            silence_s=settings.silence_s(),
            control_timeout_s=settings.config.control_timeout_s,
            digest=digest,
            alone=frozenset(transport.name for transport, _ in offers if transport.lands_in_zone),
            streams=frozenset(transport.name for transport, _ in offers if transport.streams),
        )
        self.terms = terms
        self.machine = TransactionMachine(terms)
        self.inquiry = asking.Inquiry(msgspec.Struct, silence_s=terms.silence_s)
        self.leases = Leases(
            Renew(settings.group, self.txn),
            lease_s=settings.lease_s,
            silence_s=settings.config.silence_s,
            until_s=deadline_s,
        )

    # --- the steps, in order -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps. What raises before the commit aborts the transaction everywhere; what raises after it is logged:
        it cannot change the outcome. In the end replicas for which the commit did not wait are left behind."""
        try:
            try:
                yield
            except BaseException as error:
                if not isinstance(error, Exception) or not self.machine.has_committed:
                    with harmless("aborting an update"):
                        self.do(AbortAll(WeightwireError.wrap(error).message))
                        self._wait()
                    self._raise_failed(error)
                logger.exception("weightwire: version %d is committed, and then something failed", self.terms.version)
            with harmless("leaving behind the replicas that were not ready"):
                self.do(LeaveBehind())
                self._wait()
        finally:
            self.leases.close()
            self.inquiry.close()

    def _raise_failed(self, error: BaseException) -> None:
        """Raises the error of an aborted update, which says what is torn; unless a replica had committed before the others."""
        if self.machine.has_committed and isinstance(error, Exception):
            return
        torn = [f"{name} is torn" for name, each in self.errors.items() if isinstance(each, TornReplica)]
        if not (torn and isinstance(error, Exception)):
            raise error
        failed = WeightwireError.wrap(error)
        own = failed.hint if failed.hint != failed.default_hint else ""  # a class's own says that nothing was applied
        failed.hint = "; ".join(filter(None, [own, *torn, STREAMED]))
        raise failed from error.__cause__

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around one phase: its seconds are in the report, and errors name it."""
        started_s = time.perf_counter()
        try:
            phase_begins(self._operation, self._settings.group, self.terms.version, name)
            with span(name):
                yield
        except WeightwireError as error:
            machine = self.machine
            if isinstance(error, SyncTimeout | PeerLost) and not (machine.has_committed or machine.may_have_torn):
                error.advise(NOTHING_APPLIED if name != "commit" else UNKNOWN)
            raise error.at(phase=name) from error.__cause__
        finally:
            self.phases[name] = time.perf_counter() - started_s

    def agree(
        self,
        sessions: Sequence[ReplicaSession],
        place: Place,
        unreached: Sequence[tuple[ReplicaCard, WeightwireError]] = (),
    ) -> tuple[GoTransport, ...]:
        """Opens the group where it is not open and begins the transaction everywhere. Returns where, and to whom, the trainer
        ranks write. `place` says where the bytes will be."""
        self.sessions = {session.card.replica: session for session in sessions}
        self.cards = {card.replica: card for card in [*(s.card for s in sessions), *(card for card, _ in unreached)]}
        self.sent_before = {name: session.messages for name, session in self.sessions.items()}
        nbytes = self.terms.manifest.nbytes
        joining = [
            Joining(s.card.replica, len(s.workers), s.agreed, s.card.boot_id, s.lacks_memory(nbytes)) for s in sessions
        ]
        self._opened_s = time.perf_counter()
        self._run(OpenAll(joining, {card.replica: error for card, error in unreached}))
        segments: dict[str, bytes] = {}
        for name, (transport, sender) in self._offers.items():
            if users := self.users_of(name, "open"):
                segments[name] = place(transport, sender, users)
                self.segment_ids[name] = segment_id(segments[name])
        with span("begin", replicas=len(self.machine.participants)):
            self._run(BeginAll(segments))
        return tuple(
            GoTransport(name, segment, tuple(target for user in users for target in self.targets(user)))
            for name, segment in segments.items()
            if (users := self.users_of(name, "begun"))
        )

    def drop(self, lost: Mapping[str, WeightwireError]) -> None:
        """Replicas that some trainer rank could not write to drop out."""
        for replica, error in lost.items():
            self._run(Dropped(replica, error))

    def seal(self, pieces: tuple[Piece, ...]) -> None:
        """Has all workers check the pieces, until those replicas are ready for which the commit waits."""
        self._sealed_s = time.perf_counter()
        self._run(SealAll(pieces, digest_group(self.terms.manifest, pieces)))
        for one in self.machine.in_state("sealed"):
            self.sessions[one.replica].to_take = 0

    def commit(self) -> None:
        """Commits every replica that is ready, all at once."""
        self._run(CommitAll())

    # --- the results -------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> int:
        """Requests that this rank sent."""
        asked = sum(session.messages - self.sent_before[name] for name, session in self.sessions.items())
        return asked + self.leases.sent_messages

    @property
    def errors(self) -> dict[str, WeightwireError | None]:
        """Each replica's error, or None if it serves the version. Replicas of an aborted update that did not fail are absent."""
        ended = [one for one in self.machine.participants.values() if one.state != "aborted"]
        return {one.replica: one.error for one in ended}

    def reports(self) -> tuple[ReplicaReport, ...]:
        """The report of each replica, by id."""
        ended = sorted(self.machine.participants.values(), key=lambda one: one.replica)
        return tuple(replica_report(self.cards[one.replica], one, self.terms.version) for one in ended)

    # --- performing the machine's actions ----------------------------------------------------------------------------

    def _run(self, event: Event) -> None:
        """Begins a step and returns when it is over. Raises the error with which the update as a whole failed."""
        self.do(event)
        self._wait()
        if self.machine.error is not None:
            raise self.machine.error

    def _wait(self) -> None:
        """Returns once the current step is over."""
        while self.machine.is_busy:
            taken = self.inquiry.take(self.machine.wakes_at_s)
            for channel, answer in taken:
                self.do(Answered(*self.places[channel], answer))
            if not taken:
                self.do(Tick())

    def do(self, event: Event) -> None:
        before = self._states
        events = [event]
        aborts: list[TellAbort] = []
        while events:
            for action in self.machine.on(events.pop(0), time.monotonic()):
                if isinstance(action, (Ask, AskToOpen)):
                    events += self._ask(action)
                elif isinstance(action, TellAbort):
                    aborts.append(action)
                else:
                    self._perform(action)
        if aborts:
            self.tell_abort(aborts)
        participants = self.machine.participants
        states = self._states = {name: one.state for name, one in participants.items()}
        if states != before:
            begun = [name for name, one in participants.items() if one.is_in and one.state != "open"]
            self.leases.renew(self.cards[name] for name in begun)
            for name, state in states.items():
                if state != before.get(name):
                    self._trace(participants[name])

    def _perform(self, action: Action) -> None:
        session = self.sessions[action.replica]
        match action:
            case StopWaiting():
                for channel in (session.coordinator, *session.workers):
                    self.inquiry.give_up(channel)
            case EndStream():
                for channel in session.workers:
                    self.inquiry.give_up(channel)
                with harmless("ending a stream"):
                    self._send_abort(session, action.reason)
            case TermsAgreed():
                session.agree(action.agreed)
            case Holds():
                used = session.agreed.transport if session.agreed is not None else ""
                new = frozenset({self.segment_ids[used]} if used in self.segment_ids else ())
                before = session.held_segments
                session.held_segments = {"new": new, "none": frozenset[str](), "either": before | new}[action.segments]
            case Drop():
                agreed, session.agreed = session.agreed, None
                with harmless("leaving a replica out"):
                    if action.routes_around and agreed is not None:
                        self._offers[agreed.transport][1].without(action.replica)
                    if action.tells_abort:
                        self._send_abort(session, action.reason)
                    if action.is_lost:
                        self._lost(action.replica, action.reason)

    def _ask(self, action: Ask | AskToOpen) -> list[Event]:
        """Sends a request. If it cannot be sent, its error is the answer, and fails this replica only."""
        session = self.sessions[action.replica]
        workers: Sequence[int | None] = (
            action.workers or range(len(session.workers)) if isinstance(action, AskToOpen) else (action.worker,)
        )
        failed: list[Event] = []
        try:
            body = self._open_request(action) if isinstance(action, AskToOpen) else action.body
        except Exception as error:  # noqa: BLE001 -- of a probe
            return [Answered(action.replica, worker, WeightwireError.wrap(error)) for worker in workers]
        for worker in workers:
            try:
                if worker is None:
                    ask = session.ask_of_coordinator(body)
                elif isinstance(action, AskToOpen):
                    ask = session.ask_of_worker(worker, body, patient=True)
                else:
                    ask = session.ask_of_worker(worker, body, silence_s=action.silence_s)
                self.places[ask.channel] = action.replica, worker
                self.inquiry.ask(ask)
            except Exception as error:  # noqa: BLE001
                failed.append(Answered(action.replica, worker, WeightwireError.wrap(error)))
        return failed

    def _open_request(self, action: AskToOpen) -> OpenGroup:
        terms, (_, sender) = self.terms, self._offers[action.transport]
        install, sharing = terms.install_over(action.transport), self.machine.participants[action.replica].sharing
        probe = sender.probe()
        me = terms.sender.session
        request = OpenGroup(terms.group, terms.manifest, action.transport, probe, install, terms.partial, sharing, me)
        if request != self._opens_with:
            self._opens_with = request
        return self._opens_with  # the same object for the next replica: what goes to many is encoded once

    def tell_abort(self, aborts: Sequence[TellAbort]) -> None:
        """Tells all of these replicas at once to drop the transaction; their leases do it if this cannot."""
        channels = [(each.reason, channel) for each in aborts for channel in self.sessions[each.replica].workers]
        requests = [Outgoing(channel, self.abort_request(reason)) for reason, channel in channels]
        for outgoing, reply in zip(requests, fan_out(requests, Done, timeout_s=ABORT_TIMEOUT_S), strict=True):
            if isinstance(reply, WeightwireError):
                logger.info("weightwire: abort of %s at %s: %s", self.txn, outgoing.channel.address, reply)

    def _send_abort(self, session: ReplicaSession, reason: str) -> None:
        """Sends the abort without waiting for the answer, because the other replicas go on to the commit."""
        for channel in session.workers:
            try:
                channel.send(self.abort_request(reason))
            except WeightwireError as error:
                logger.info("weightwire: abort of %s at %s: %s", self.txn, channel.address, error)

    def abort_request(self, reason: str) -> Abort:
        return Abort(self.terms.group, self.txn, reason[:4096])

    def users_of(self, transport: str, state: State) -> list[ReplicaSession]:
        """The replicas that are reached by a transport and have come as far as `state`."""
        users = [self.sessions[one.replica] for one in self.machine.in_state(state)]
        return [user for user in users if user.agreed is not None and user.agreed.transport == transport]

    def targets(self, session: ReplicaSession) -> tuple[Target, ...]:
        return session.targets(self.machine.participants[session.card.replica].landings)

    def _trace(self, one: Participant) -> None:
        if one.state == "open":
            span_since(self._opened_s, "open", one.replica, replica=one.replica)
        elif one.state == "sealed":
            span_since(self._sealed_s, "seal", one.replica)


def segment_id(description: bytes) -> str:
    """The id that workers report as held, from a transport's description of its segment; "" if there is none."""
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, ProtocolError):
        found = msgspec.msgpack.decode(description) if description else {}
        if isinstance(found, dict):
            return str(found.get("segment_id", ""))
    return ""
