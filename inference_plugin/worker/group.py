"""One named weight-update group on a worker, as a pure state machine.

                 begin            all bytes checked           commit
    idle  ------------> receiving ----------------> sealed ----------> committing ---> idle (new version)
      ^                     |                         |                    |
      +---------------------+-------- abort, lease ---+      undo failed:  +---> torn (until a full update commits)

Here are the state and the steps that several events share; what each event does is in `requests` (from the socket),
`results` (of work that ended) and `commit` (from the engine's thread). Work that takes time is queued: one job runs at a
time, in the order of the requests, and a bucket is judged when its turn comes. Only the check and preparation of a sealed
update (`Stage`) run beside the queue.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from inference_plugin.wire.errors import (
    ProtocolError,
    SyncTimeout,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import (
    Bucket,
    Done,
    GroupState,
    GroupStatus,
    OpenGroup,
    RankCommit,
    Sealed,
    Sender,
    TakesBytes,
)
from inference_plugin.worker.actions import (
    Action,
    AgreeOnTerms,
    Cancel,
    CleanUp,
    CloseWork,
    Fail,
    FreeMemory,
    ReceiveBucket,
    Reply,
    StartWork,
    StateChanged,
    Terms,
    Warn,
)
from inference_plugin.worker.closed import ClosedGroups
from inference_plugin.worker.torn import TornParameters
from inference_plugin.worker.transaction import Installed, Job, Opening, Transaction

__all__ = ["FINISHED_KEPT", "Shared", "WeightUpdateGroup"]

FINISHED_KEPT = 16
"""How many finished transactions a group remembers, to answer a request that comes again."""

MAX_DETAIL_CHARACTERS = 4000

WARN_EVERY_S = 30.0
"""Interval of the warning that a dropped transaction is still being prepared."""


@dataclass(eq=False)
class Shared:
    """What all groups of one worker share. `accept` registers a group's terms, and raises if they conflict with another
    group's. `left` hears of a group that has just lost an opening. `unknown`: the groups whose version is unknown, closed ones
    too, and why."""

    rank: int
    accept: Callable[[WeightUpdateGroup, Terms], None]
    left: Callable[[WeightUpdateGroup], None]
    unknown: Callable[[], dict[str, str]]
    torn: TornParameters = field(default_factory=TornParameters)
    closed: ClosedGroups = field(default_factory=ClosedGroups)
    actions: list[Action] = field(default_factory=list)
    under_way: dict[int, tuple[WeightUpdateGroup, Job]] = field(default_factory=dict)
    last_number: int = 0
    now_s: float = 0.0

    def start(self, group: WeightUpdateGroup, job: Job) -> None:
        self.last_number += 1
        self.under_way[self.last_number] = group, job
        self.actions.append(StartWork(group.member, group.name, self.last_number, job.work))


class WeightUpdateGroup:
    """State of one group, and what each event does to it. `member` tells groups of one name apart."""

    def __init__(self, name: str, member: int, shared: Shared) -> None:
        self.name = name
        self.member = member
        self.state: GroupState = "idle"
        self.before_commit: GroupState = "idle"
        self.terms: Terms | None = None
        self.opened: OpenGroup | None = None
        self.openings: list[Opening] = []
        self.installed: Installed | None = None
        self.transaction: Transaction | None = None
        self.dropped: list[Transaction] = []
        """Transactions whose work has not ended, or whose memory is not free."""
        self.finished: dict[str, RankCommit | WeightwireError] = {}
        self.detail = ""
        self.unknown = ""
        """Why the version is unknown that the parameters hold, after an update; "" where it is known."""
        self.written: frozenset[str] = frozenset()
        """The parameters that the group's updates have written."""
        self.foreign: frozenset[str] = frozenset()
        """Those of them that somebody else has written since."""
        self.holds_memory = False
        """Whether memory is kept between updates: the way back, mapped segments, buffers."""
        self.writes = 0
        """How often the live parameters may have been written: a verification that this overtakes begins again."""
        self.closed = False
        self.gone = False
        self.shared = shared
        self._queue: collections.deque[Job] = collections.deque()
        self._running: Job | None = None

    # --- what there is -----------------------------------------------------------------------------------------------

    @property
    def claims(self) -> frozenset[str]:
        """The parameters that the group writes, by its terms in force."""
        return self.terms.claims if self.terms is not None and not self.closed else frozenset()

    @property
    def partial(self) -> bool:
        """Whether an update of the group is not one of the whole model."""
        return self.terms is None or not self.terms.whole

    @property
    def busy(self) -> bool:
        """Whether the group works for a transaction or an opening, abandoned ones included."""
        return self.transaction is not None or bool(self.openings or self.dropped)

    @property
    def senders(self) -> list[Sender]:
        """Who has a transaction open, or memory kept for its next one."""
        senders = [self.transaction.sender] if self.transaction is not None else []
        return [*senders, self.installed.sender] if self.installed is not None and self.holds_memory else senders

    @property
    def wakes_at_s(self) -> float:
        """When a `tick` is due if nothing happens before; infinity if none is."""
        times_s, transaction = [math.inf], self.transaction
        if transaction is not None:
            if self.state != "committing" or self.is_streaming:
                times_s.append(transaction.expires_at_s)
            if transaction.seal_askers or transaction.stand_askers:
                times_s += [until_s for _, until_s in (*transaction.seal_askers, *transaction.stand_askers)]
        if self.dropped:
            times_s += [dropped.warn_at_s for dropped in self.dropped]
        return min(times_s)

    def status(self) -> GroupStatus:
        transaction, terms, installed = self.transaction, self.terms, self.installed
        return GroupStatus(
            group=self.name,
            state=self.state,
            version=self.version,
            txn=transaction.txn if transaction else "",
            transport=self.opened.transport if self.opened else "",
            install=terms.opened.install if terms else "",
            mechanism=terms.opened.mechanism if terms else "",
            digest=installed.digest if installed else "",
            detail=(self.detail or self.unknown)[:MAX_DETAIL_CHARACTERS],
            partial=self.partial,
        )

    def release_memory(self, asker: Any = None) -> None:
        """Frees what is kept between updates; the next update takes it anew."""
        if self.transaction is not None:
            self.reply(asker, Done())
            return
        self.holds_memory = False
        self.queue(Job(FreeMemory(self.take_previous()), asker))

    def close(self, asker: Any = None) -> None:
        """Frees all that the group holds; the live weights stay. It takes no request from now on."""
        self.closed = True
        self.writes += 1
        self.drop("the group was closed")
        for opening in [job.opening for job in self._queue if isinstance(job.work, AgreeOnTerms)]:
            assert opening is not None
            self.forget(opening, VersionConflict("the group was closed before it was opened"))
        self._queue = collections.deque(job for job in self._queue if not isinstance(job.work, AgreeOnTerms))
        self.queue(Job(CloseWork(self.take_previous()), asker))

    # --- time --------------------------------------------------------------------------------------------------------

    def tick(self, is_gone: Callable[[Sender], bool]) -> None:
        """Drops transactions that nobody will finish, and answers the seals whose waiting time is over."""
        now_s, transaction = self.shared.now_s, self.transaction
        if transaction is not None:
            transaction.seal_askers = self._still_waiting(transaction.seal_askers, Sealed(done=False))
            transaction.stand_askers = self._still_waiting(transaction.stand_askers, TakesBytes(stands=False))
        for dropped in self.dropped:
            if dropped.warn_at_s <= now_s:
                dropped.warn_at_s = now_s + WARN_EVERY_S
                self.do(
                    Warn(
                        f"group {self.name}: the preparation of version {dropped.version} was dropped and does not end; "
                        "until it does the group takes no update"
                    )
                )
        if self.state == "committing" and not self.is_streaming:
            return
        give_up = self.end_stream if self.is_streaming else self.drop
        if transaction is not None and is_gone(transaction.sender):
            give_up("the trainer's process ended")
        elif transaction is not None and now_s >= transaction.expires_at_s:
            give_up(
                f"the trainer was silent for {transaction.lease_s:g} s",
                SyncTimeout,
                hint="the next update brings it up; give lease_s more time where replicas stall",
            )
        nobodys = self.installed is None or is_gone(self.installed.sender)
        if self.holds_memory and self.transaction is None and nobodys:
            self.release_memory()

    def _still_waiting(self, askers: list[tuple[Any, float]], not_yet: Any) -> list[tuple[Any, float]]:
        """Answers the askers whose waiting time is over; returns the others."""
        for asker, until_s in askers:
            if until_s <= self.shared.now_s:
                self.reply(asker, not_yet)
        return [each for each in askers if each[1] > self.shared.now_s]

    # --- the queue ---------------------------------------------------------------------------------------------------

    def queue(self, job: Job, *, first: bool = False) -> None:
        """Queues the job, at the front if `first`."""
        (self._queue.appendleft if first else self._queue.append)(job)
        self.start_next()

    def start_next(self) -> None:
        """Starts what is first in the queue, if it may run."""
        while self._running is None and self._queue and self._may_start(self._queue[0]):
            job = self._queue.popleft()
            if isinstance(job.work, ReceiveBucket) and not self._is_expected(job, job.work.bucket):
                continue
            self._running = job
            self.shared.start(self, job)

    def _may_start(self, job: Job) -> bool:
        """A dropped transaction is cleaned up once its preparation has noticed."""
        waits = isinstance(job.work, CleanUp) and job.transaction is not None and job.transaction.staging
        if waits and job.transaction is not None and job.transaction.warn_at_s == math.inf:
            job.transaction.warn_at_s = self.shared.now_s + WARN_EVERY_S
        return not waits

    def _is_expected(self, job: Job, bucket: Bucket) -> bool:
        """Whether the bucket is to be received; else it is answered."""
        transaction = job.transaction
        assert transaction is not None
        expected = transaction.next_seq.get(bucket.rank, 0)
        if bucket.seq < expected:
            self.reply(job.asker, Done())
        elif bucket.seq > expected:
            said = f"bucket {bucket.seq} of trainer rank {bucket.rank} came before bucket {expected}"
            self.fail(job.asker, ProtocolError(said))
        elif transaction.covered and not (transaction.mapped and transaction.mapped.takes_late):
            self.fail(job.asker, ProtocolError("a new bucket after the seal"))
        else:
            return True
        return False

    # --- steps that several events have in common --------------------------------------------------------------------

    def current(self, txn: str, *, renew: bool = True) -> Transaction:
        """The transaction of that id; asking for it renews its lease, unless `renew` is false."""
        if (finished := self.finished.get(txn)) is not None:
            if isinstance(finished, WeightwireError):
                raise copy.copy(finished)  # an error that is kept must not collect tracebacks: they hold payloads
            raise VersionConflict(f"transaction {txn} is committed already")
        if self.transaction is None or self.transaction.txn != txn:
            raise ProtocolError(f"no transaction {txn} is open", hint="send Begin first")
        if renew:
            self.renew(self.transaction)
        return self.transaction

    def drop(self, reason: str, kind: type[WeightwireError] = VersionConflict, **more: str) -> None:
        """Ends the open transaction, if there is one; requests for it, waiting ones included, get an error of `kind`.
        Its work ends later, and then its memory is freed."""
        transaction, self.transaction = self.transaction, None
        if transaction is None:
            return
        error = kind(f"the transaction was dropped: {reason}", **more)  # type: ignore[arg-type]
        if transaction.txn not in self.finished:
            self.remember(transaction.txn, error)
        self.end_waits(transaction, error)
        if self.state != "torn":
            self.enter("idle")
        self.do(Cancel(self.member, transaction.txn))
        self.dropped.append(transaction)
        self.queue(Job(CleanUp(transaction.txn), transaction=transaction))

    @property
    def is_streaming(self) -> bool:
        """Whether bytes may still come into the live parameters."""
        transaction = self.transaction
        return (
            self.state == "committing"
            and transaction is not None
            and transaction.streams
            and transaction.sealed is None
            and transaction.error is None
        )

    def end_stream(self, reason: str, kind: type[WeightwireError] = VersionConflict, **more: str) -> None:
        """No more bytes come into the live parameters: the engine's thread, which waits for them, hears why."""
        transaction = self.transaction
        assert transaction is not None
        transaction.error = kind(reason, **more)  # type: ignore[arg-type]
        self.end_waits(transaction, transaction.error)
        self.do(Cancel(self.member, transaction.txn))

    def end_waits(self, transaction: Transaction, error: WeightwireError) -> None:
        """Answers every request that waits for the transaction with `error`, and drops its queued jobs."""
        waiting = [*transaction.begin_askers]
        waiting += [asker for asker, _ in (*transaction.seal_askers, *transaction.stand_askers)]
        waiting += [job.asker for job in self._queue if job.transaction is transaction and job.asker is not None]
        self._queue = collections.deque(job for job in self._queue if job.transaction is not transaction)
        transaction.begin_askers, transaction.seal_askers, transaction.stand_askers = [], [], []
        for asker in waiting:
            self.fail(asker, error)

    def forget(self, opening: Opening, error: WeightwireError) -> None:
        """Answers an opening that failed."""
        self.openings.remove(opening)
        for asker in opening.askers:
            self.fail(asker, error)

    def remember(self, txn: str, outcome: RankCommit | WeightwireError) -> None:
        """How a transaction ended. The oldest are forgotten, but never that of the version which is served."""
        self.finished.pop(txn, None)
        self.finished[txn] = outcome
        served = self.installed.txn if self.installed is not None else ""
        for oldest in [known for known in self.finished if known != served][:-FINISHED_KEPT]:
            del self.finished[oldest]

    def take_previous(self) -> str:
        """The transaction of the way back, for work to free it; "" if there is none. From now on there is none."""
        if self.installed is None or not self.installed.keeps:
            return ""
        self.installed.keeps = False
        return self.installed.txn

    def job_ended(self) -> None:
        """The job that ran has ended; the next one is not started yet."""
        self._running = None

    def enter(self, state: GroupState) -> None:
        if self.state != state:
            self.state = state
            self.do(StateChanged(self.name, state))

    @property
    def version(self) -> int | None:
        """The version that all of the group's parameters hold; None if there is none, or nobody knows it."""
        return self.installed.version if self.installed is not None and not self.unknown else None

    def renew(self, transaction: Transaction) -> None:
        transaction.expires_at_s = self.shared.now_s + transaction.lease_s

    def do(self, action: Action) -> None:
        self.shared.actions.append(action)

    def reply(self, asker: Any, body: Any) -> None:
        if asker is not None:
            self.do(Reply(asker, body))

    def fail(self, asker: Any, error: WeightwireError) -> None:
        if asker is not None:
            self.do(Fail(asker, copy.copy(error)))

    def reply_opened(self, asker: Any) -> None:
        """Answers an `OpenGroup` by the terms in force."""
        assert self.terms is not None
        self.reply(asker, self.terms.opened)

    def answer(self, asker: Any, body: Any, error: WeightwireError | None) -> None:
        if error is not None:
            self.fail(asker, error)
        else:
            self.reply(asker, body)
