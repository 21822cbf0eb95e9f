"""The work of one group that takes time: opening, mapping, receiving, checking, preparing, freeing.

The group's lane does one job after the other; `Stage` has a thread of its own, because it waits for bytes that the lane
receives meanwhile. Nothing here decides: `machine` orders the work and is told how it ended. No lock is held meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_plugin.devices import in_use, start_thread
from inference_plugin.install.contract import Installer, InstallTerms, Throttle
from inference_plugin.transports.base import Receiver, Staging
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire.config import Config
from inference_plugin.wire.cover import ExactCover
from inference_plugin.wire.digest import digest_group
from inference_plugin.wire.errors import (
    ProtocolError,
    TransportUnavailable,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.groups import is_apart
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import GroupOpened, Sealed
from inference_plugin.wire.tracing import Trace, save, span, under
from inference_plugin.worker.actions import (
    AgreeOnTerms,
    CheckPieces,
    CleanUp,
    CloseWork,
    DropStaging,
    FreeMemory,
    KeepTerms,
    Mapped,
    MapStaging,
    PassOn,
    PutInForce,
    ReceiveBucket,
    SettleStaging,
    Stage,
    Terms,
    Work,
)
from inference_plugin.worker.events import WorkEnded
from inference_plugin.worker.lane import Lane
from inference_plugin.worker.live_memory import LiveMemory
from inference_plugin.worker.throttle import DecodingThrottle, TeamTime

__all__ = ["GroupWork", "Update", "Where"]

logger = logging.getLogger(__name__)

SETTLE_AFTER_S = 0.005
"""A commit's staging is settled this long after the engine's thread has finished: generation may stand until all ranks have, and
another thread would take the interpreter from it, or make a zone."""


@dataclass(frozen=True)
class Where:
    """The worker that the work is done in. `device` is its accelerator, as `Device.use` takes it; `beside` are the workers that
    decode together on the same cores."""

    replica: str
    rank: int
    device: int | None
    config: Config
    decoding: Callable[[], bool]
    beside: int = 1
    live_memory: LiveMemory = field(default_factory=LiveMemory)


@dataclass(eq=False)
class Update:
    """What one transaction holds here."""

    trace: Trace | None
    staging: Staging
    wanted: Sequence[Piece] = ()
    """What this worker needs of it, with the trainer's digests."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    is_told: bool = False
    """Whether listeners know that it is being installed."""
    is_installed: bool = False
    """Whether the installer has written all of it."""


@dataclass(frozen=True)
class _Agreed:
    """Terms, and the objects made for them."""

    manifest: Manifest
    terms: InstallTerms
    receiver: Receiver
    cover: ExactCover


class GroupWork:
    """Does one group's work. `make_installer` is called once, with the first terms. `ended` hears of each work's end."""

    def __init__(
        self,
        name: str,
        where: Where,
        make_installer: Callable[[str], Installer],
        ended: Callable[[WorkEnded], None],
    ) -> None:
        self.name = name
        self.over = threading.Event()
        """Set after the group's last work."""
        self._where = where
        self._make_installer = make_installer
        self._ended = ended
        self._installer: Installer | None = None
        self._in_force: _Agreed | None = None
        self._candidate: _Agreed | None = None
        self._updates: dict[str, Update] = {}
        self._lane = Lane(f"weightwire-group-{name}", where.device, self._cancel_all)
        self._lane.start()
        self._device = in_use()
        self._queue = self._device.new_queue()
        self._do: dict[type, Callable[[Any], Any]] = {
            AgreeOnTerms: self._agree,
            PutInForce: self._put_in_force,
            KeepTerms: self._keep_terms,
            MapStaging: self._map,
            ReceiveBucket: self._receive,
            PassOn: self._pass_on,
            CheckPieces: self._check_pieces,
            Stage: self._stage,
            CleanUp: self._clean_up,
            SettleStaging: self._settle,
            DropStaging: self._drop_staging,
            FreeMemory: self._free_memory,
            CloseWork: self._close,
        }

    @property
    def installer(self) -> Installer:
        """Of an open group."""
        assert self._installer is not None
        return self._installer

    @property
    def manifest(self) -> Manifest | None:
        """Of the terms in force."""
        return self._in_force.manifest if self._in_force is not None else None

    def update(self, txn: str) -> Update:
        """The transaction's bytes and state on this worker. Raises `ProtocolError` if it has none."""
        if (update := self._updates.get(txn)) is None:
            raise ProtocolError(f"no transaction {txn} is open", hint="send Begin first")
        return update

    def trace(self, txn: str) -> Trace | None:
        """The transaction's trace, if it has one."""
        return update.trace if (update := self._updates.get(txn)) is not None else None

    def start(self, number: int, work: Work) -> None:
        """Any thread: begins the work; `ended` is told of its end."""
        if isinstance(work, Stage):
            name = f"weightwire-stage-{self.name}"
            start_thread(lambda: self._run(number, work), name=name, stop=self._cancel_all)
        else:
            self._lane.put(lambda: self._run(number, work))

    def cancel(self, txn: str) -> None:
        """Any thread: work for the transaction ends as soon as it can."""
        if (update := self._updates.get(txn)) is not None:
            update.cancelled.set()
            update.staging.cancel()

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for the end of the group's thread: after its last work, or before it where the process ends."""
        return self._lane.join(timeout_s)

    def _cancel_all(self) -> None:
        for txn in list(self._updates):
            self.cancel(txn)

    # --- the lane, and the thread of a `Stage` -----------------------------------------------------------------------

    def _run(self, number: int, work: Work) -> None:
        try:
            self._device.enter(self._queue)  # beside the engine's own
            try:
                event = WorkEnded(number, self._do[type(work)](work))
            finally:
                self._device.synchronise()
        except BaseException as error:  # any error is the answer
            if not isinstance(error, WeightwireError):
                logger.error("weightwire: %s of group %s failed", type(work).__name__, self.name, exc_info=error)
            event = WorkEnded(number, error=WeightwireError.wrap(error))
        if isinstance(work, CloseWork):
            self._lane.end()
            self.over.set()
        try:
            self._ended(event)
        except Exception:  # a bug of ours; the thread has nobody to tell
            logger.exception("weightwire: the end of %s of group %s was not taken", type(work).__name__, self.name)
        del event  # its error's traceback would hold this frame, and all that the work looked at

    def _agree(self, work: AgreeOnTerms) -> Terms:
        request = work.request
        if self._installer is None:
            self._installer = self._make_installer(self.name)
        transport = transport_named(request.transport)
        receiver = transport.receiver()
        try:
            receiver.check_probe(request.probe)
            with self._where.live_memory.read():
                terms = self._installer.open(
                    request.manifest,
                    request.install,
                    partial=request.partial,
                    zone=transport.lands_in_zone,
                    sharing=request.sharing,
                )
            if transport.streams != (terms.install == "streaming"):
                raise TransportUnavailable(
                    f"{transport.name} and install={terms.install!r} do not go together",
                    hint="install='streaming' has a transport of its own, `stream`",
                )
            if terms.zone is not None:
                receiver.land_in(terms.zone, terms.device)
            self._candidate = _Agreed(request.manifest, terms, receiver, ExactCover(request.manifest, terms.needs))
            claims = self._installer.claims
            opened = GroupOpened(
                needs=terms.needs,
                mechanism=terms.mechanism,
                install=terms.install,
                why=terms.why,
                written=len(claims),
                derived=len(terms.derived),
                untouched=len(terms.untouched),
                passed_over=terms.passed_over,
                takes_bytes=terms.takes_bytes,
            )
            return Terms(opened, claims, whole=not request.partial and not is_apart(self.name))
        except BaseException:
            self._candidate = None
            receiver.close()
            raise

    def _put_in_force(self, work: PutInForce) -> None:
        replaced, self._in_force, self._candidate = self._in_force, self._candidate, None
        assert self._in_force is not None
        terms, sent = self._in_force.terms, self._in_force.manifest.tensors
        names = [
            first_few(list(each)) if each else "nothing"
            for each in (
                sorted(self.installer.claims),
                terms.derived,
                terms.untouched,
                [sent[i].name for i in terms.passed_over],
            )
        ]
        logger.info(
            "weightwire: an update of group %s writes %s; derives %s; leaves %s; passes over %s", self.name, *names
        )
        try:
            if replaced is not None:
                replaced.receiver.close()
        finally:
            self._free(work.previous)

    def _keep_terms(self, work: KeepTerms) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.receiver.close()
        if (old := work.request) is not None:
            zone = transport_named(old.transport).lands_in_zone
            with self._where.live_memory.read():
                self.installer.open(old.manifest, old.install, partial=old.partial, zone=zone, sharing=old.sharing)

    def _map(self, work: MapStaging) -> Mapped:
        assert self._in_force is not None
        self.installer.check_terms()
        manifest, terms = self._in_force.manifest, self._in_force.terms
        where = {"rank": self._where.rank, "replica": self._where.replica, "group": self.name}
        trace = Trace.begun(self._where.config.profile_dir, role="worker", version=work.version, txn=work.txn, **where)
        with under(trace), span("open staging"):
            staging = self._in_force.receiver.open(manifest, work.segment, terms.needs)
        self._updates[work.txn] = Update(trace, staging)
        return Mapped(staging.segment_id, staging.takes_late, staging.landing, staging.streams)

    def _receive(self, work: ReceiveBucket) -> None:
        update, bucket = self.update(work.txn), work.bucket
        with under(update.trace), span("receive", trainer=bucket.rank, bytes=len(work.payload)):
            update.staging.receive(bucket, work.payload)
        update.staging.pass_on(bucket, work.payload)

    def _pass_on(self, work: PassOn) -> None:
        self.update(work.txn).staging.relay(work.relay)

    def _check_pieces(self, work: CheckPieces) -> None:
        update, agreed = self.update(work.txn), self._in_force
        assert agreed is not None
        wanted = agreed.cover.check([piece.box for piece in work.pieces], lambda _: "the trainer")
        if digest_group(agreed.manifest, work.pieces) != work.digest:
            raise ProtocolError("the list of pieces is not the one that its digest names")
        update.wanted = [work.pieces[i] for i in wanted]

    def _stage(self, work: Stage) -> Sealed:
        """Checks the digests of what this worker needs, and lets the installer prepare; a device may check meanwhile."""
        update, manifest = self.update(work.txn), self.manifest
        staging = update.staging
        assert manifest is not None
        threads = min(self._where.config.check_threads, len(os.sched_getaffinity(0)))
        try:
            with under(update.trace), span("wait for bytes"):
                staging.wait_for(update.wanted, update.cancelled)
            started_s = time.perf_counter()
            with under(update.trace), span("check"):
                throttle = self._throttle(update, threads, time.thread_time)
                end_check = staging.start_check(manifest, update.wanted, throttle, threads)
            prepares_s = time.perf_counter()
            with under(update.trace), span("prepare"), self._where.live_memory.read():
                extra_bytes = self.installer.prepare(staging.segment, self._throttle(update, 1, TeamTime()))
            prepared_s = time.perf_counter()
            with under(update.trace), span("end check"):
                checked_bytes = end_check()
        except BaseException:
            staging.close()
            raise
        return Sealed(
            done=True,
            digest=work.digest,
            checked_bytes=checked_bytes,
            verify_s=time.perf_counter() - prepared_s + prepares_s - started_s,
            prepare_s=prepared_s - prepares_s,
            extra_bytes=extra_bytes + staging.extra_bytes,
        )

    def _throttle(self, update: Update, threads: int, worked_s: Callable[[], float]) -> Throttle:
        where = self._where
        share = where.config.background_share
        return DecodingThrottle(share, threads * where.beside, where.decoding, update.cancelled, worked_s)

    def _clean_up(self, work: CleanUp) -> None:
        update = self._updates.pop(work.txn, None)
        try:
            self.installer.discard()
        finally:
            if update is not None:
                update.staging.close()
                save(update.trace)

    def _settle(self, work: SettleStaging) -> None:
        update = self.update(work.txn)
        update.cancelled.wait(SETTLE_AFTER_S)
        update.staging.settle()

    def _drop_staging(self, work: DropStaging) -> None:
        if work.reused:
            self._updates.pop(work.txn, None)
            return
        if (update := self._updates.get(work.txn)) is not None:
            update.cancelled.wait(SETTLE_AFTER_S)
            update.staging.settle()
        self._free(work.txn)

    def _free_memory(self, work: FreeMemory) -> None:
        self._free(work.previous)
        self.installer.free_kept()
        if self._in_force is not None:
            self._in_force.receiver.drop_kept()

    def _close(self, work: CloseWork) -> None:
        try:
            self._free(work.previous)
            if self._in_force is not None:
                self._in_force.receiver.close()
        finally:
            if self._installer is not None:
                self._installer.close()

    def _free(self, txn: str) -> None:
        """Closes the staging of a committed transaction, if it is there."""
        if (update := self._updates.pop(txn, None)) is not None:
            update.staging.close()
