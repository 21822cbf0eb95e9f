"""The state of one transaction on rank 0, and what several of its events do: ask a replica for something, take a replica out.

`machine` handles each event, `answers` each answer.
"""

from __future__ import annotations

import math

from inference_plugin.wire.errors import (
    ManifestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import AskStands
from trainer_adapters.update.hints import LEFT_OUT, STREAMED, UNKNOWN
from trainer_adapters.update.machine_io import (
    AT_WORK,
    INSTALLING_S,
    SEAL_WAIT_S,
    Action,
    Ask,
    AskToOpen,
    Drop,
    EndStream,
    Participant,
    State,
    Step,
    StopWaiting,
    Terms,
)

__all__ = ["TransactionState"]


class TransactionState:
    """The state of each replica, by id (`participants`); the current step; the actions for the current event."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.participants: dict[str, Participant] = {}
        self.step: Step = "agree"
        self.error: WeightwireError | None = None
        self.is_on = False
        """Whether the step still runs; `began_s`, `until_s`: when it began, and when it ends at the latest."""
        self.began_s, self.until_s = 0.0, math.inf
        self.now_s = 0.0
        self.stood_s = math.inf
        """When the first replica stood still to be streamed into."""
        self.segments: dict[str, bytes] = {}
        self.list_digest = ""
        self.actions: list[Action] = []
        self._ended_streams = False

    @property
    def has_committed(self) -> bool:
        """Whether a replica has installed the version in this transaction."""
        return any(each.committed is not None for each in self.participants.values())

    @property
    def may_have_torn(self) -> bool:
        """Whether a replica that did not commit may hold a part of the version already."""
        return any(self.is_streaming(each) for each in self.participants.values())

    def fail(self, one: Participant, error: WeightwireError) -> None:
        """Takes a replica out. Before the commit an error of the trainer's own (another model, an older version) fails the
        whole update instead."""
        if one.committed is not None or (self.is_streaming(one) and not one.has_answered):
            self.end_stream(one, error)
            return
        if isinstance(error, ManifestMismatch | VersionConflict) and self.step != "commit" and not one.has_stood:
            self.error = self.error or error.at(replica=one.replica)
            self.is_on = False
            return
        error.at(replica=one.replica, group=self.terms.group, version=self.terms.version, phase=self.step)
        if isinstance(error, SyncTimeout | PeerLost):
            hint = LEFT_OUT if self.step != "commit" else UNKNOWN
            error.advise(STREAMED if self.is_streaming(one) else hint)
        begun = one.is_in
        one.state, one.error = "failed", error
        self.do(StopWaiting(one.replica))
        routes_around = begun and self.step in ("stage", "seal") and not self.has_committed
        self.do(Drop(one.replica, str(error), begun, routes_around, is_lost=isinstance(error, PeerLost)))

    def do(self, action: Action) -> None:
        """Adds an action for the shell to perform."""
        self.actions.append(action)

    def is_streaming(self, one: Participant) -> bool:
        """Whether some bytes may lie in its parameters, and it has not confirmed all of them."""
        may_be_written_to = self.step != "agree" or not self.is_on
        return one.has_stood and one.committed is None and may_be_written_to

    def end_stream(self, one: Participant, error: WeightwireError) -> None:
        """No more bytes go into its parameters. Its coordinator says what it holds then: it may already have committed."""
        if one.committed is not None:
            one.state = "committed"
            self.do(StopWaiting(one.replica))
        elif one.state != "ending":
            one.state, one.error = "ending", error
            self._ended_streams = True
            one.ends_at_s = min(
                self.now_s + self.terms.silence_s, max(self.now_s + INSTALLING_S, self.terms.installed_by_s)
            )
            self.do(EndStream(one.replica, error.message))

    @property
    def ending(self) -> list[Participant]:
        """Replicas that have not yet said what they hold of the streamed bytes."""
        return self.in_state("ending") if self._ended_streams else []

    def in_state(self, state: State) -> list[Participant]:
        return [each for each in self.participants.values() if each.state == state]

    @property
    def at_work(self) -> list[Participant]:
        """The replicas for which the step waits."""
        states = AT_WORK[self.step]
        return [each for each in self.participants.values() if each.state in states]

    # --- asking a replica --------------------------------------------------------------------------------------------

    def ask_to_open(self, one: Participant) -> None:
        """Asks with the next transport. Fails the replica if none is left."""
        one.answers = {}
        if not one.workers:
            self.fail(one, ProtocolError("its card names no worker", hint="restart the engine"))
        elif not one.left:
            self.fail(one, TransportUnavailable(f"no transport reaches it: {'; '.join(one.refusals)}"))
        else:
            self.do(AskToOpen(one.replica, one.left[0]))

    def ask_to_begin(self, one: Participant) -> None:
        terms = self.terms
        assert one.agreed is not None, "its group is open"
        request = terms.begin(one.agreed.transport, self.segments[one.agreed.transport])
        one.state, one.answers = "beginning", dict(one.begun)
        silence_s = max(0.0, min(terms.silence_s, terms.deadline_s - self.now_s))
        missing = [worker for worker in range(one.workers) if worker not in one.begun]
        self.actions += [Ask(one.replica, worker, request, silence_s) for worker in missing]

    def ask_to_stand(self, one: Participant) -> None:
        """Begins its commit before the bytes come: they go to their places while its generation stands still."""
        one.state, one.answers, one.has_stood = "standing", {}, True
        self.do(Ask(one.replica, None, self.terms.commit(self.now_s), self.terms.silence_s))
        self.actions += [self.ask_stands(one, worker) for worker in range(one.workers)]

    def ask_stands(self, one: Participant, worker: int) -> Ask:
        terms = self.terms
        silence_s = max(0.0, min(terms.silence_s, terms.deadline_s - self.now_s))
        return Ask(one.replica, worker, AskStands(terms.group, terms.txn, SEAL_WAIT_S), silence_s)
