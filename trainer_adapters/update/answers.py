"""Applies the answers of workers and coordinators to a transaction on rank 0."""

from __future__ import annotations

from collections import deque

from inference_plugin.wire.errors import (
    CommitFailed,
    ManifestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    WeightwireError,
)
from inference_plugin.wire.messages import Begun, Committed, GroupOpened, Seal, Sealed, TakesBytes
from trainer_adapters.fleet.machine_io import Agreed
from trainer_adapters.update.coverage import check_needs, passed_over
from trainer_adapters.update.hints import UNKNOWN
from trainer_adapters.update.machine_io import (
    ENDED,
    SEAL_WAIT_S,
    Answered,
    Ask,
    AskToOpen,
    Holds,
    Participant,
    TermsAgreed,
)
from trainer_adapters.update.state import TransactionState

__all__ = ["answered"]


def answered(state: TransactionState, event: Answered) -> None:
    """Applies one answer. An answer for which nobody waits any more changes nothing."""
    one = state.participants.get(event.replica)
    if one is None or one.state in ENDED:
        return
    if event.worker is None:
        if one.state == "committing" or one.has_stood:
            one.has_answered = True
            _take_committed(state, one, event.answer)
    elif one.state == "standing":
        _take_stands(state, one, event.worker, event.answer)
    elif one.state == "opening":
        _take_opened(state, one, event.worker, event.answer)
    elif one.state == "beginning":
        _take_begun(state, one, event.worker, event.answer)
    elif one.state == "sealing" and state.step == "seal":
        _take_sealed(state, one, event.worker, event.answer)


def _take_opened(state: TransactionState, one: Participant, worker: int, answer: object) -> None:
    one.answers[worker] = answer if isinstance(answer, GroupOpened) else as_error(answer, GroupOpened)
    is_lost = isinstance(answer, PeerLost | SyncTimeout)  # it answers no more, so nothing is worth waiting for
    if len(one.answers) < one.workers and not is_lost:
        return
    if (refusal := one.refusal) is not None or is_lost:
        state.fail(one, refusal or as_error(answer, GroupOpened))
        return
    answers = [one.answers[i] for i in range(one.workers)]
    if refused := [each for each in answers if isinstance(each, TransportUnavailable)]:
        one.refusals.append(f"{one.left.popleft()}: {refused[0].message} ({refused[0].hint})")
        state.ask_to_open(one)
        return
    opened = tuple(each for each in answers if isinstance(each, GroupOpened))
    try:
        check_needs(state.terms.manifest, opened, partial=state.terms.partial)
    except WeightwireError as error:
        state.fail(one, error)
        return
    skipped = passed_over(state.terms.manifest, opened)
    one.state, one.agreed = "open", Agreed(state.terms.key, one.left[0], opened, one.offered, skipped)
    state.do(TermsAgreed(one.replica, one.agreed))
    if not one.begins_on:
        return
    if one.begins_on == one.agreed.transport:
        state.ask_to_begin(one)
    else:
        words = f"it is reached by {one.agreed.transport!r} now, and the update begins on {one.begins_on!r}"
        state.fail(one, TransportUnavailable(words, hint="the next update reaches it"))


def _take_begun(state: TransactionState, one: Participant, worker: int, answer: object) -> None:
    one.answers[worker] = answer
    if len(one.answers) < one.workers:
        return
    answers = [one.answers[i] for i in range(one.workers)]
    begun = [each for each in answers if isinstance(each, Begun)]
    if len(begun) < one.workers:
        error = as_error(next(each for each in answers if not isinstance(each, Begun)), Begun)
        if isinstance(error, ProtocolError | ManifestMismatch) and not one.begins_on:
            _agree_anew(state, one)
        else:
            state.fail(one, error)
    elif all(each.already for each in begun):
        one.state = "already"
    elif any(each.already for each in begun):
        state.fail(one, CommitFailed("its ranks serve different versions", hint="the next version brings it up"))
    else:
        one.state, one.landings = "begun", tuple(each.landing for each in begun)
        if one.streams:
            state.ask_to_stand(one)


def _agree_anew(state: TransactionState, one: Participant) -> None:
    """Opens the group again, once, on the workers that did not begin, because another trainer has replaced their terms. The other
    workers are not asked: opening the group there would drop the transaction that they have begun."""
    assert one.agreed is not None, "its group was open"
    opened, one.begins_on, one.agreed = one.agreed.opened, one.agreed.transport, None
    one.begun = {i: each for i, each in one.answers.items() if isinstance(each, Begun)}
    one.state, one.left = "opening", deque([one.begins_on])
    one.answers = {i: opened[i] for i in one.begun}
    missing = tuple(i for i in range(one.workers) if i not in one.begun)
    state.do(TermsAgreed(one.replica, None))
    state.do(AskToOpen(one.replica, one.begins_on, missing))


def _take_stands(state: TransactionState, one: Participant, worker: int, answer: object) -> None:
    """The bytes may come once all of its workers take them."""
    if not isinstance(answer, TakesBytes):
        state.fail(one, as_error(answer, TakesBytes))
    elif not answer.stands:
        state.do(state.ask_stands(one, worker))
    else:
        one.answers[worker] = answer
        if len(one.answers) == one.workers:
            one.state = "begun"
            state.stood_s = min(state.stood_s, state.now_s)


def _take_sealed(state: TransactionState, one: Participant, worker: int, answer: object) -> None:
    terms = state.terms
    if not isinstance(answer, Sealed):
        state.fail(one, as_error(answer, Sealed))
    elif not answer.done:
        again = Seal(terms.group, terms.txn, state.list_digest, wait_s=SEAL_WAIT_S)
        state.do(Ask(one.replica, worker, again, terms.control_timeout_s))
    else:
        one.answers[worker] = answer
        if len(one.answers) == one.workers:
            one.state = "sealed"
            one.sealed = tuple(each for each in one.answers.values() if isinstance(each, Sealed))


def _take_committed(state: TransactionState, one: Participant, answer: object) -> None:
    if isinstance(answer, Committed):
        one.committed = answer
        if one.state == "ending":
            one.state, one.error = "committed", None
        elif one.state == "committing":
            one.state = "committed"
        released = all(rank.releases_segment for rank in answer.ranks)
        state.do(Holds(one.replica, "none" if released else "new"))
        return
    error = as_error(answer, Committed)
    if isinstance(error, SyncTimeout | PeerLost):
        state.do(Holds(one.replica, "either"))
        if not error.phase:  # no answer at all; a coordinator that gave up names its phase, and knows what is served
            error.hint = UNKNOWN
            error.at(phase="commit")  # a stream's coordinator begins its commit while others still stage or seal
    state.fail(one, error)


def as_error(answer: object, expected: type) -> WeightwireError:
    """The error for an answer that is not of type `expected`."""
    if isinstance(answer, WeightwireError):
        return answer
    return ProtocolError(f"expected {expected.__name__}, got {type(answer).__name__}")
