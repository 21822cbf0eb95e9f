"""One named weight-update group on a worker, and what each request does to it.

                 begin            all bytes checked           commit
    idle  ------------> receiving ----------------> sealed ----------> committing ---> idle (new version)
      ^                     |                         |                    |
      +---------------------+-------- abort, lease ---+      undo failed:  +---> torn (until a full update commits)

Three threads meet here, under one lock: the socket's thread, the group's stager thread (checks digests, prepares a
standby), and the engine's own thread (`check_sealed`, `install`, `undo`, `finish`, `verify`), which alone touches the live
model.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from inference_plugin.hooks import plugin_manager
from inference_plugin.install.adapter import GROUP_PREFIX
from inference_plugin.install.contract import Brake, Installer, InstallTerms
from inference_plugin.transports.base import Receiver, Staging
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire.config import Config
from inference_plugin.wire.digest import digest_group
from inference_plugin.wire.errors import (
    CommitFailed,
    ManifestMismatch,
    ProtocolError,
    SyncTimeout,
    TornReplica,
    VersionConflict,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.manifest import ExactCover, Manifest, Piece
from inference_plugin.wire.messages import (
    Begin,
    Begun,
    BoxDigest,
    Bucket,
    Done,
    GroupOpened,
    GroupState,
    GroupStatus,
    OpenGroup,
    RankCommit,
    RankVerify,
    Relay,
    Relaying,
    Seal,
    Sealed,
    Sender,
)
from inference_plugin.wire.tracing import Trace, save, span, under

__all__ = ["WeightUpdateGroup"]

FINISHED_KEPT = 16
"""How many finished transactions a group remembers, to answer a request that comes again."""


@dataclass
class Installed:
    """The version that is served, and the way back to it while its bytes are kept."""

    version: int
    txn: str
    digest: str
    sender: Sender
    staging: Staging | None


@dataclass
class Transaction:
    """One update on its way."""

    txn: str
    version: int
    sender: Sender
    lease_s: float
    staging: Staging
    expires_at_s: float
    next_seq: dict[int, int] = field(default_factory=dict)
    pieces: tuple[Piece, ...] | None = None
    wanted: Sequence[Piece] = ()
    cancelled: threading.Event = field(default_factory=threading.Event)
    stager: threading.Thread | None = None
    error: WeightwireError | None = None
    answer: Sealed | None = None
    trace: Trace | None = None


class WeightUpdateGroup:
    """One named group on one worker. Methods are called with the table's lock held unless they say otherwise."""

    def __init__(
        self,
        name: str,
        rank: int,
        replica: str,
        lock: threading.RLock,
        installer: Installer,
        decoding: Callable[[], bool],
        config: Config,
        on_checked: Callable[[], None],
    ) -> None:
        self._decoding = decoding
        self._config = config
        self._on_checked = on_checked
        self.name = name
        self.rank = rank
        self.replica = replica
        self.installer = installer
        self.manifest: Manifest | None = None
        self.terms: InstallTerms | None = None
        self.installed: Installed | None = None
        self.transaction: Transaction | None = None
        self.detail = ""
        self._holds_memory = False
        self._opened: OpenGroup | None = None
        self._cover: ExactCover | None = None
        self._receiver: Receiver | None = None
        self._lock = lock
        self._state: GroupState = "idle"
        self._before_commit: GroupState = "idle"
        self._finished: dict[str, RankCommit | WeightwireError] = {}

    @property
    def state(self) -> GroupState:
        return self._state

    # --- the socket's thread ----------------------------------------------------------------------------------------------

    def open(self, request: OpenGroup, others: Mapping[str, frozenset[str]]) -> GroupOpened:
        """Agrees on terms; `others` are the parameters that other groups write.

        With the same terms again it changes nothing, else the group's terms are replaced.

        Takes the lock itself, and not while the installer thinks: another group's commit needs it.
        """
        if self._opened != request:
            with self._lock:
                if self._state == "committing":
                    raise VersionConflict("the group is being committed")
                self._drop("the group was opened anew")
            receiver = transport_named(request.transport).receiver()
            try:
                receiver.check_probe(request.probe)
                terms = self.installer.open(request.manifest, request.install, partial=request.partial)
                for name, claims in others.items():
                    if shared := sorted(claims & self.installer.claims):
                        raise ManifestMismatch(
                            f"parameters that group {name!r} writes already: {first_few(shared)}",
                            hint=f"update them as group {name!r}, or close that group first",
                        )
            except BaseException:
                receiver.close()
                if (old := self._opened) is not None:  # its terms stay in force: the installer must go by them too
                    self.installer.open(old.manifest, old.install, partial=old.partial)
                raise
            with self._lock:
                self._forget_previous()
                if self._receiver is not None:
                    self._receiver.close()
                self.manifest, self.terms, self._receiver, self._opened = (
                    request.manifest,
                    terms,
                    receiver,
                    request,
                )
                self._cover = ExactCover(request.manifest, terms.needs)
        assert self.terms is not None
        return GroupOpened(
            needs=self.terms.needs,
            mechanism=self.terms.mechanism,
            install=self.terms.install,
            why=self.terms.why,
            version=self.installed.version if self.installed else None,
        )

    def begin(self, request: Begin) -> Begun:
        manifest, receiver = self._ready()
        if request.fingerprint != manifest.fingerprint:
            raise ManifestMismatch("the manifest changed since the group was opened", hint="open the group again")
        current = self.transaction
        if current is not None and current.txn == request.txn:
            return Begun()
        if isinstance(finished := self._finished.get(request.txn), WeightwireError):
            raise copy.copy(finished)
        if self._state == "committing":
            raise VersionConflict("the group is being committed")
        if self.installed is not None and self._state != "torn":
            if request.version == self.installed.version:
                return Begun(already=True)
            if request.version < self.installed.version:
                raise VersionConflict(
                    f"version {request.version} is not newer than the installed {self.installed.version}"
                )
        if current is not None and current.version > request.version:
            raise VersionConflict(f"version {current.version} is on its way, {request.version} is older")
        self._drop("another transaction overtook it")
        assert self.terms is not None
        named = {"role": "worker", "rank": self.rank, "replica": self.replica, "group": self.name}
        trace = Trace.begun(self._config.profile_dir, version=request.version, txn=request.txn, **named)
        with under(trace), span("open staging"):
            staging = receiver.open(manifest, request.segment, self.terms.needs)
        self._holds_memory = True
        if self.installed and self.installed.staging and self.installed.staging.segment_id == staging.segment_id:
            self.installed.staging = None  # the trainer writes over it: no way back from there
        self.transaction = Transaction(
            txn=request.txn,
            version=request.version,
            sender=request.sender,
            lease_s=request.lease_s,
            staging=staging,
            expires_at_s=time.monotonic() + request.lease_s,
            trace=trace,
        )
        if self._state != "torn":
            self._enter("receiving")
        return Begun()

    def bucket(self, request: Bucket, payload: memoryview) -> Done:
        transaction = self._current(request.txn)
        expected = transaction.next_seq.get(request.rank, 0)
        if request.seq > expected:
            raise ProtocolError(f"bucket {request.seq} of trainer rank {request.rank} came before bucket {expected}")
        if request.seq == expected:
            if transaction.pieces is not None and not transaction.staging.takes_late:
                raise ProtocolError("a new bucket after the seal")
            with under(transaction.trace), span("receive", trainer=request.rank, bytes=len(payload)):
                transaction.staging.receive(request.pieces, payload)
            transaction.next_seq[request.rank] = expected + 1
            transaction.staging.pass_on(request, payload)
        return Done()

    def relay(self, request: Relay) -> Relaying:
        if isinstance(self._finished.get(request.txn), RankCommit):
            return Relaying()  # it has everything
        # Workers that ask each other must not outlive the trainer.
        transaction = self._current(request.txn, renew=False)
        transaction.staging.relay(request)
        return Relaying(dict(transaction.next_seq))

    def renew(self, txn: str) -> Done:
        self._current(txn)
        return Done()

    def start_seal(self, request: Seal) -> Transaction:
        """Checks that the pieces cover what this worker needs, and starts the stager."""
        transaction = self._current(request.txn)
        if transaction.pieces is None:
            self._ready()
            assert self._cover is not None
            wanted = self._cover.check([piece.box for piece in request.pieces], lambda _: "the trainer")
            transaction.pieces = request.pieces
            transaction.wanted = [request.pieces[i] for i in wanted]
            transaction.stager = threading.Thread(
                target=self._stage, args=(transaction,), name=f"weightwire-stage-{self.name}", daemon=True
            )
            transaction.stager.start()
        elif transaction.pieces != request.pieces:
            raise ProtocolError("another list of pieces than at the first seal of this transaction")
        return transaction

    def answer_seal(self, transaction: Transaction) -> Sealed:
        """What to reply now."""
        if transaction.error is not None:
            raise copy.copy(transaction.error)
        return transaction.answer or Sealed(done=False)

    def abort(self, txn: str, reason: str) -> Done:
        if self.transaction is not None and self.transaction.txn == txn:
            if self._state == "committing":
                raise VersionConflict("too late to abort: the transaction is being committed")
            self._drop(reason or "aborted by the trainer")
        return Done()

    def expire(self, now_s: float, sender_is_gone: Callable[[Sender], bool]) -> None:
        """Drops a transaction whose trainer is gone or whose lease ran out, and what is kept for a trainer that is gone."""
        if self._state == "committing":
            return
        transaction = self.transaction
        if transaction is not None and sender_is_gone(transaction.sender):
            self._drop("the trainer's process ended")
        elif transaction is not None and now_s >= transaction.expires_at_s:
            self._drop(
                f"the trainer was silent for {transaction.lease_s:g} s",
                SyncTimeout,
                hint="the next update brings it up; give lease_s more time where replicas stall",
            )
        if self.holds_memory and (self.installed is None or sender_is_gone(self.installed.sender)):
            self.release_memory()

    @property
    def expires_at_s(self) -> float:
        """When the open transaction's lease ends; a little later than now while it is being committed."""
        assert self.transaction is not None
        held = self._state == "committing"
        return max(self.transaction.expires_at_s, time.monotonic() + 1) if held else self.transaction.expires_at_s

    @property
    def holds_memory(self) -> bool:
        """Whether memory is kept between updates: the way back, mapped segments, buffers."""
        return self._holds_memory

    def release_memory(self) -> None:
        """Frees what is kept between updates; the next update takes it anew."""
        if self.transaction is not None or self._state == "committing":
            return
        self._forget_previous()
        self.installer.forget_segments()
        if self._receiver is not None:
            self._receiver.drop_kept()
        self._holds_memory = False

    def close(self) -> None:
        """Frees all that the group holds; the live weights stay."""
        self._drop("the group was closed")
        self._forget_previous()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self.installer.close()
        self._opened = None

    def status(self) -> GroupStatus:
        transaction = self.transaction
        return GroupStatus(
            group=self.name,
            state=self._state,
            version=self.installed.version if self.installed else None,
            txn=transaction.txn if transaction else "",
            transport=self._opened.transport if self._opened else "",
            install=self.terms.install if self.terms else "",
            mechanism=self.terms.mechanism if self.terms else "",
            digest=self.installed.digest if self.installed else "",
            staged_bytes=self.manifest.nbytes if transaction and self.manifest else 0,
            detail=self.detail,
            partial=self.partial,
        )

    @property
    def partial(self) -> bool:
        """Whether an update of the group is not one of the whole model."""
        return self.name.startswith(GROUP_PREFIX) or (self._opened is not None and self._opened.partial)

    # --- the engine's own thread -------------------------------------------------------------------------------------

    def check_sealed(self, txn: str, version: int) -> RankCommit | None:
        """First half of a commit: nothing is written. Returns the earlier answer if the transaction is committed.

        Takes the lock itself, as do the methods below.
        """
        with self._lock:
            finished = self._finished.get(txn)
            if isinstance(finished, RankCommit):
                return finished
            transaction = self._current(txn)
            if transaction.version != version:
                raise ProtocolError(f"transaction {txn} is of version {transaction.version}, not {version}")
            if transaction.error is not None:
                raise copy.copy(transaction.error)
            if transaction.answer is None:
                raise ProtocolError(f"transaction {txn} is not sealed")
            self._before_commit = self._state
            self._enter("committing")
            return None

    def release(self) -> None:
        """Takes `check_sealed` back: another rank was not ready."""
        with self._lock:
            if self._state == "committing":
                self._enter(self._before_commit)

    def install(self, txn: str) -> None:
        """Writes the live model. No lock is held meanwhile: the state keeps everybody else away."""
        with self._lock:
            if self._state != "committing" or self.transaction is None or self.transaction.txn != txn:
                raise ProtocolError(f"transaction {txn} is not being committed")
            transaction = self.transaction
        plugin_manager().hook.weightwire_installing(
            group=self.name, version=transaction.version, rank=self.rank, step="install"
        )
        with under(transaction.trace), span("install"):
            self.installer.install(transaction.staging.segment)

    def undo(self, reason: str) -> None:
        """Back to the version before; raises `TornReplica`, and the state is `torn`, if that can't be done."""
        with self._lock:
            if self._state == "torn":
                raise TornReplica(self.detail)
            transaction, previous = self.transaction, self.installed
        try:
            plugin_manager().hook.weightwire_installing(
                group=self.name, version=previous.version if previous else -1, rank=self.rank, step="undo"
            )
            with under(transaction.trace if transaction else None), span("undo"):
                self.installer.undo(previous.staging.segment if previous and previous.staging else None)
        except Exception as error:
            self.tear(f"{reason}; the way back failed: {error}")
            raise TornReplica(self.detail) from error
        with self._lock:
            if transaction is not None:
                self._finished[transaction.txn] = CommitFailed(reason)
            torn = self._before_commit == "torn"
            self._enter("torn" if torn else "idle")
            self._drop(reason)
            if torn:
                raise TornReplica(f"{self.detail}; the update that was to heal it failed: {reason}")

    def tear(self, reason: str) -> None:
        """This rank no longer knows what it holds."""
        with self._lock:
            self.detail = reason
            if self.transaction is not None:
                transaction, self.transaction = self.transaction, None
                transaction.cancelled.set()
                transaction.staging.close()
                save(transaction.trace)
            self._enter("torn")

    def finish(self, txn: str, install_s: float) -> RankCommit:
        """The new version is on all ranks: it becomes the installed one."""
        with self._lock:
            transaction = self.transaction
            if transaction is None or transaction.txn != txn or transaction.answer is None:
                raise ProtocolError(f"transaction {txn} is not being committed")
            with under(transaction.trace), span("finish"):
                self.installer.finish()
                self._forget_previous()
            keep = self.installer.needs_previous
            if keep:
                transaction.staging.settle()
            else:
                transaction.staging.close()
            self.installed = Installed(
                transaction.version,
                txn,
                transaction.answer.digest,
                transaction.sender,
                transaction.staging if keep else None,
            )
            self.transaction = None
            save(transaction.trace)
            self.detail = ""
            self._enter("idle")
            done = RankCommit(
                self.rank, transaction.version, install_s, releases_segment=not keep, partial=self.partial
            )
            self._finished[txn] = done
            while len(self._finished) > FINISHED_KEPT:
                self._finished.pop(next(iter(self._finished)))
            return done

    def verify(self) -> RankVerify:
        """Digests of what the live parameters hold."""
        boxes: list[BoxDigest] = []
        unreadable: dict[str, str] = {}
        for found in self.installer.read_back():
            if isinstance(found, BoxDigest):
                boxes.append(found)
            else:
                unreadable[found[0]] = found[1]
        with self._lock:
            version = self.installed.version if self.installed else None
        return RankVerify(self.rank, version, tuple(boxes), unreadable)

    # --- the stager thread -------------------------------------------------------------------------------------------

    def _stage(self, transaction: Transaction) -> None:
        """Checks the digests of what this worker needs, then lets the installer prepare."""
        try:
            manifest, pieces = self.manifest, transaction.pieces
            assert manifest is not None and pieces is not None
            threads = min(self._config.check_threads, len(os.sched_getaffinity(0)))
            with under(transaction.trace), span("wait for bytes"):
                transaction.staging.wait_for(transaction.wanted, transaction.cancelled)
            started_s = time.perf_counter()
            with under(transaction.trace), span("check"):
                checked_bytes = transaction.staging.check(
                    manifest, transaction.wanted, self._brake(transaction, threads), threads
                )
            checked_s = time.perf_counter()
            with under(transaction.trace), span("prepare"):
                extra_bytes = self.installer.prepare(transaction.staging.segment, self._brake(transaction))
            answer = Sealed(
                done=True,
                digest=digest_group(manifest, pieces),
                checked_bytes=checked_bytes,
                verify_s=checked_s - started_s,
                prepare_s=time.perf_counter() - checked_s,
                extra_bytes=extra_bytes + transaction.staging.extra_bytes,
            )
            with self._lock:
                if not transaction.cancelled.is_set():
                    transaction.answer = answer
                    transaction.expires_at_s = time.monotonic() + transaction.lease_s
                    if self._state == "receiving":
                        self._enter("sealed")
        except Exception as error:  # noqa: BLE001 -- whatever it is, the next Seal answers it
            transaction.error = WeightwireError.wrap(error).at(phase="seal", version=transaction.version)
            transaction.staging.close()
        finally:
            self._on_checked()

    def _brake(self, transaction: Transaction, threads: int = 1) -> Brake:
        """Gives way to decoding: after each stretch of work, a rest as long as `background_share` asks of all `threads`
        together. Ends at a cancel."""
        began = threading.local()
        made_s = time.perf_counter()
        share = self._config.background_share / threads

        def between(nbytes: int) -> None:
            rest_s = 0.0
            if self._decoding():
                rest_s = (time.perf_counter() - getattr(began, "s", made_s)) * (1 - share) / share
            if transaction.cancelled.wait(rest_s) if rest_s else transaction.cancelled.is_set():
                raise VersionConflict("the transaction was dropped")
            began.s = time.perf_counter()

        return between

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Manifest, Receiver]:
        if self.manifest is None or self._receiver is None:
            raise ProtocolError("the group is not open", hint="send OpenGroup before Begin")
        return self.manifest, self._receiver

    def _current(self, txn: str, *, renew: bool = True) -> Transaction:
        """The transaction of that id; asking for it renews its lease, unless `renew` is false."""
        if (finished := self._finished.get(txn)) is not None:
            if isinstance(finished, WeightwireError):
                raise copy.copy(finished)  # an error that is kept must not collect tracebacks: they hold payloads
            raise VersionConflict(f"transaction {txn} is committed already")
        if self.transaction is None or self.transaction.txn != txn:
            raise ProtocolError(f"no transaction {txn} is open", hint="send Begin first")
        if renew:
            self.transaction.expires_at_s = time.monotonic() + self.transaction.lease_s
        return self.transaction

    def _drop(self, reason: str, kind: type[WeightwireError] = VersionConflict, **more: str) -> None:
        """Ends the open transaction; whoever asks for it again is answered with an error of `kind`."""
        transaction, self.transaction = self.transaction, None
        if transaction is None:
            return
        transaction.cancelled.set()
        self._finished.setdefault(transaction.txn, kind(f"the transaction was dropped: {reason}", **more))  # type: ignore[arg-type]
        if transaction.stager is not None and transaction.stager is not threading.current_thread():
            self._lock.release()  # the stager takes it at its end
            try:
                transaction.stager.join()
            finally:
                self._lock.acquire()
        self.installer.discard()
        transaction.staging.close()
        save(transaction.trace)
        if self._state != "torn":
            self._enter("idle")

    def _forget_previous(self) -> None:
        if self.installed is not None and self.installed.staging is not None:
            self.installed.staging.close()
            self.installed.staging = None

    def _enter(self, state: GroupState) -> None:
        if self._state != state:
            self._state = state
            plugin_manager().hook.weightwire_state_changed(
                replica=self.replica, rank=self.rank, group=self.name, state=state
            )
