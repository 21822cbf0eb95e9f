"""The decisions of one transaction on rank 0, without sockets, threads or clocks: which replicas still take part, when each step
is over, for which replicas the commit waits, and how the update ended for each replica.

    opening -> open -> beginning -> begun -> sealing -> sealed -> committing -> committed
                           |    |     ^             any of these -> failed
                           |    +-> standing        a replica that streams is asked to commit before the bytes come
                           +-> already              the replica serves the version

The events `OpenAll`, `BeginAll`, `SealAll` and `CommitAll` begin a step; `is_busy` says whether it still runs. `error`: why the
update failed as a whole; then only `AbortAll` has an effect. An outcome never changes after `committed`, `already` or `failed`.
"""

from __future__ import annotations

import collections
import math

from inference_plugin.wire.errors import (
    CommitFailed,
    SyncTimeout,
    WeightwireError,
    first_few,
)
from inference_plugin.wire.messages import Seal
from trainer_adapters.settings import BestEffort, Quorum
from trainer_adapters.update.answers import answered
from trainer_adapters.update.hints import UNKNOWN
from trainer_adapters.update.machine_io import (
    ENDED,
    SEAL_WAIT_S,
    AbortAll,
    Action,
    Answered,
    Ask,
    BeginAll,
    CommitAll,
    Dropped,
    Event,
    Holds,
    LeaveBehind,
    OpenAll,
    Participant,
    SealAll,
    State,
    Step,
    StopWaiting,
    TellAbort,
)
from trainer_adapters.update.state import TransactionState

__all__ = ["TransactionMachine"]

OPEN_SHARE = 0.4
"""Share of the operation's time, as it opens the group, that is kept for later steps when one replica is slow to open it."""

COMMIT_SHARE = 0.2
"""Share of the operation's time that is left once all is written, which is kept for the commit when one replica is slow to
seal."""


class TransactionMachine(TransactionState):
    """`on` takes one event and returns the actions to perform."""

    @property
    def wakes_at_s(self) -> float:
        """When a `Tick` is due if nothing happens before; infinity if none is."""
        at_s = math.inf
        if self.is_on:
            at_s = min([self.until_s, *map(self._ends_at_s, {one.state for one in self.at_work})])
        for one in self.ending:
            at_s = min(at_s, one.ends_at_s)
        return at_s

    @property
    def is_busy(self) -> bool:
        """Whether a step still runs, or a replica has not yet said what it holds of the streamed bytes."""
        return self.is_on or bool(self.ending)

    def on(self, event: Event, now_s: float) -> list[Action]:
        self.now_s = now_s
        match event:
            case AbortAll():
                self._abort(event.reason)
            case LeaveBehind():
                self._leave_behind()
            case Answered() if self.ending or self.error is None:
                answered(self, event)
            case _ if self.error is not None:
                pass
            case OpenAll():
                self._open(event)
            case BeginAll():
                self._begin(event)
            case Dropped():
                self._drop(event)
            case SealAll():
                self._seal(event)
            case CommitAll():
                self._commit()
        self._look_whether_over()
        actions, self.actions = self.actions, []
        return actions

    # --- steps -------------------------------------------------------------------------------------------------------

    def _open(self, event: OpenAll) -> None:
        terms = self.terms
        if not self._starts("agree", terms.deadline_s):
            return
        on_host = collections.Counter(joining.host for joining in event.replicas)
        for joining in event.replicas:
            one = self.participants[joining.replica] = Participant(joining.replica, joining.workers)
            one.offered = terms.offered(joining.lacks_memory, is_alone=on_host[joining.host] == 1)
            one.left.extend(one.offered)
            agreed = joining.agreed
            if agreed is not None and (agreed.key, agreed.offered) == (terms.key, one.offered):
                one.state, one.agreed = "open", agreed
        for name, error in event.unreached.items():
            self.participants[name] = Participant(name, 0, "failed", error=error)
        opening = {one.replica: one for one in self.in_state("opening")}
        beside = collections.Counter(joining.host for joining in event.replicas if joining.replica in opening)
        for joining in event.replicas:
            if (asked := opening.get(joining.replica)) is not None:
                asked.sharing = beside[joining.host]
                self.ask_to_open(asked)

    def _begin(self, event: BeginAll) -> None:
        self.segments = dict(event.segments)
        if self._starts("agree", self.terms.deadline_s):
            for one in self.in_state("open"):
                self.ask_to_begin(one)

    def _drop(self, event: Dropped) -> None:
        self.step = "stage"
        if (one := self.participants.get(event.replica)) is not None and one.is_in:
            self.fail(one, event.error)

    def _seal(self, event: SealAll) -> None:
        terms = self.terms
        # A replica that is slow or silent must not use up the time in which the others are to commit.
        until_s = terms.deadline_s - COMMIT_SHARE * (terms.deadline_s - self.now_s)
        if isinstance(terms.stragglers, BestEffort):
            until_s = min(until_s, self.now_s + terms.stragglers.deadline_s)
        if not self._starts("seal", until_s):
            return
        self.list_digest = event.digest
        request = Seal(terms.group, terms.txn, event.digest, event.pieces, SEAL_WAIT_S)
        for one in self.in_state("begun"):
            one.state, one.answers = "sealing", {}
            for worker in range(one.workers):
                self.do(Ask(one.replica, worker, request, terms.control_timeout_s))

    def _commit(self) -> None:
        terms = self.terms
        if not self._starts("commit", terms.installed_by_s):
            return
        request = terms.commit(self.now_s)
        for one in self.in_state("sealed"):
            one.state = "committing" if one.committed is None else "committed"
            if not one.has_stood:
                self.do(Ask(one.replica, None, request, terms.silence_s))

    def _leave_behind(self) -> None:
        """Drops the replicas that the commit did not wait for. This comes once the others serve the version, or when something
        fails on this side after one of them does: then nobody knows what those serve that were asked to commit."""
        self.is_on = False
        for one in [each for each in self.participants.values() if each.is_in]:
            if one.state == "committing":
                self.step = "commit"
                self.fail(one, self._too_late(one))
                continue
            self.step = "seal"
            hint = "it is caught up, or the next update brings it up"
            self.fail(one, SyncTimeout("its workers had not checked the update in time", hint=hint, side="worker"))

    def _abort(self, reason: str) -> None:
        for one in [each for each in self.participants.values() if each.state not in ENDED]:
            if one.committed is not None or self.is_streaming(one):
                self.end_stream(one, CommitFailed(f"the update failed: {reason}"))
            else:
                self.do(StopWaiting(one.replica))
                if one.state == "committing":  # it may be too late to abort
                    self.do(Holds(one.replica, "either"))
                if one.is_in:
                    self.do(TellAbort(one.replica, reason))
                one.state = "aborted"
        self.is_on = False

    def _starts(self, step: Step, until_s: float) -> bool:
        """Begins a step; false if the operation's time is over."""
        self.step, self.began_s, self.until_s, self.is_on = step, self.now_s, until_s, True
        if self.now_s >= self.terms.deadline_s:
            words = f"update:{self.terms.version} took longer than {self.terms.timeout_s:g} s"
            self.error, self.is_on = SyncTimeout(words), False
        return self.is_on

    # --- when a step is over -----------------------------------------------------------------------------------------

    def _ends_at_s(self, state: State) -> float:
        """When the wait for replicas in a state ends. The wait for an opening ends earlier once another replica is open, because
        the later steps need time. The wait for a replica to stop ends earlier too, because others stand still meanwhile."""
        if state == "opening" and self._others_wait:
            return self.until_s - OPEN_SHARE * (self.until_s - self.began_s)
        if state == "standing":
            return min(self.until_s, self.stood_s + self.terms.silence_s)
        return self.until_s

    @property
    def _others_wait(self) -> bool:
        there = self.participants.values()
        return any((each.is_in and each.state != "opening") or each.state == "already" for each in there)

    def _look_whether_over(self) -> None:
        for one in self.ending:
            if self.now_s < one.ends_at_s:
                continue
            self.do(Holds(one.replica, "either"))
            words = f"{one.error.message if one.error else ''}; and it did not say in time what it holds"
            one.has_answered = True
            self.fail(one, SyncTimeout(words, hint=UNKNOWN, side="coordinator", phase="commit"))
        if not self.is_on or self.error is not None:
            return
        at_work = self.at_work
        if self.step == "seal":
            quorum = self.terms.stragglers
            enough = isinstance(quorum, Quorum) and len(self.in_state("sealed")) >= quorum.count
            self.is_on = bool(at_work) and self.now_s < self.until_s and not enough
            if not self.is_on:
                self.actions += [StopWaiting(one.replica) for one in at_work]
                self._judge()
            return
        over = {state for state in {one.state for one in at_work} if self.now_s >= self._ends_at_s(state)}
        for one in at_work:
            if one.state in over:
                self.fail(one, self._too_late(one))
        self.is_on = bool(self.at_work)

    def _too_late(self, one: Participant) -> WeightwireError:
        if one.state == "opening":
            if (refusal := one.refusal) is not None:
                return refusal
            waits = "the group was still being opened when the others had to go on"
            hint = "the first opening traces and proves a plan, some seconds per GB: give timeout_s more"
            words = waits if self._others_wait else "the group was not opened"
            return SyncTimeout(words, hint=hint, side="worker", phase="open")
        if one.state == "standing":
            hint = "the others stood still meanwhile; in_flight='keep' waits for one step only"
            return SyncTimeout("its generation did not stop in time to take the update", hint=hint, side="coordinator")
        if one.state == "beginning":
            return SyncTimeout("its workers did not begin the update in time", side="worker")
        self.do(Holds(one.replica, "either"))
        return SyncTimeout("it did not say in time whether the update is installed", hint=UNKNOWN, side="coordinator")

    def _judge(self) -> None:
        """Fails the update if fewer replicas are ready than the policy requires."""
        policy = self.terms.stragglers
        ready = len(self.in_state("sealed"))
        served = len(self.in_state("already"))
        everyone = len(self.participants) - served
        wanted = policy.count - served if isinstance(policy, Quorum) else everyone if policy == "all" else 0
        if ready < wanted:
            others = [f"{p.replica}: {p.error.message}" for p in self.participants.values() if p.error is not None]
            others += [f"{one.replica}: not ready in time" for one in self.in_state("sealing")]
            self.error = CommitFailed(
                f"{ready} of {everyone} replicas are ready, the commit wants {wanted}; none commits",
                hint=f"the others: {first_few(others)}",
            )
