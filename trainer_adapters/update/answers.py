"""What an answer of a worker, or of a coordinator, does to a transaction on rank 0."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

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
from trainer_adapters.update.coverage import check_needs
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

if TYPE_CHECKING:
    from trainer_adapters.update.machine import TransactionMachine

__all__ = ["answered"]


def answered(machine: TransactionMachine, event: Answered, now_s: float) -> None:
    """What an answer does; one that nobody waits for any more does nothing."""
    one = machine.participants.get(event.replica)
    if one is None or one.state in ENDED:
        return
    if event.worker is None:
        if one.state == "committing" or one.has_stood:
            one.has_answered = True
            _take_committed(machine, one, event.answer)
    elif one.state == "standing":
        _take_stands(machine, one, event.worker, event.answer, now_s)
    elif one.state == "opening":
        _take_opened(machine, one, event.worker, event.answer, now_s)
    elif one.state == "beginning":
        _take_begun(machine, one, event.worker, event.answer, now_s)
    elif one.state == "sealing" and machine.step == "seal":
        _take_sealed(machine, one, event.worker, event.answer)


def _take_opened(machine: TransactionMachine, one: Participant, worker: int, answer: object, now_s: float) -> None:
    if not isinstance(answer, GroupOpened | TransportUnavailable):
        machine.fail(one, as_error(answer, GroupOpened))
        return
    one.answers[worker] = answer
    if len(one.answers) < one.workers:
        return
    answers = [one.answers[i] for i in range(one.workers)]
    if refused := [each for each in answers if isinstance(each, TransportUnavailable)]:
        one.refusals.append(f"{one.left.popleft()}: {refused[0].message} ({refused[0].hint})")
        machine.ask_to_open(one)
        return
    opened = tuple(each for each in answers if isinstance(each, GroupOpened))
    try:
        check_needs(machine.terms.manifest, opened, partial=machine.terms.partial)
    except WeightwireError as error:
        machine.fail(one, error)
        return
    one.state, one.agreed = "open", Agreed(machine.terms.key, one.left[0], opened, one.offered)
    machine.do(TermsAgreed(one.replica, one.agreed))
    if not one.begins_on:
        return
    if one.begins_on == one.agreed.transport:
        machine.ask_to_begin(one, now_s)
    else:
        words = f"it is reached by {one.agreed.transport!r} now, and the update begins on {one.begins_on!r}"
        machine.fail(one, TransportUnavailable(words, hint="the next update reaches it"))


def _take_begun(machine: TransactionMachine, one: Participant, worker: int, answer: object, now_s: float) -> None:
    one.answers[worker] = answer
    if len(one.answers) < one.workers:
        return
    answers = [one.answers[i] for i in range(one.workers)]
    begun = [each for each in answers if isinstance(each, Begun)]
    if len(begun) < one.workers:
        error = as_error(next(each for each in answers if not isinstance(each, Begun)), Begun)
        if isinstance(error, ProtocolError | ManifestMismatch) and not one.begins_on:
            _agree_anew(machine, one)
        else:
            machine.fail(one, error)
    elif all(each.already for each in begun):
        one.state = "already"
    elif any(each.already for each in begun):
        machine.fail(one, CommitFailed("its ranks serve different versions", hint="restart the engine"))
    else:
        one.state, one.landings = "begun", tuple(each.landing for each in begun)
        if one.streams:
            machine.ask_to_stand(one, now_s)


def _agree_anew(machine: TransactionMachine, one: Participant) -> None:
    """Once: the terms of the workers that did not begin are another trainer's by now. The others are left alone: to open the
    group there would drop what they have begun."""
    assert one.agreed is not None, "its group was open"
    opened, one.begins_on, one.agreed = one.agreed.opened, one.agreed.transport, None
    one.begun = {i: each for i, each in one.answers.items() if isinstance(each, Begun)}
    one.state, one.left = "opening", deque([one.begins_on])
    one.answers = {i: opened[i] for i in one.begun}
    missing = tuple(i for i in range(one.workers) if i not in one.begun)
    machine.do(TermsAgreed(one.replica, None))
    machine.do(AskToOpen(one.replica, one.begins_on, missing))


def _take_stands(machine: TransactionMachine, one: Participant, worker: int, answer: object, now_s: float) -> None:
    """The bytes may come once all of its workers take them."""
    if not isinstance(answer, TakesBytes):
        machine.fail(one, as_error(answer, TakesBytes))
    elif not answer.stands:
        machine.do(machine.ask_stands(one, worker, now_s))
    else:
        one.answers[worker] = answer
        if len(one.answers) == one.workers:
            one.state = "begun"
            machine.stood_s = min(machine.stood_s, now_s)


def _take_sealed(machine: TransactionMachine, one: Participant, worker: int, answer: object) -> None:
    terms = machine.terms
    if not isinstance(answer, Sealed):
        machine.fail(one, as_error(answer, Sealed))
    elif not answer.done:
        again = Seal(terms.group, terms.txn, machine.list_digest, wait_s=SEAL_WAIT_S)
        machine.do(Ask(one.replica, worker, again, terms.control_timeout_s))
    else:
        one.answers[worker] = answer
        if len(one.answers) == one.workers:
            one.state = "sealed"
            one.sealed = tuple(each for each in one.answers.values() if isinstance(each, Sealed))


def _take_committed(machine: TransactionMachine, one: Participant, answer: object) -> None:
    if isinstance(answer, Committed):
        one.committed = answer
        if one in machine.ending:
            machine.ending.remove(one)
            one.state, one.error = "committed", None
        elif one.state == "committing":
            one.state = "committed"
        released = all(rank.releases_segment for rank in answer.ranks)
        machine.do(Holds(one.replica, "none" if released else "new"))
        return
    error = as_error(answer, Committed)
    if isinstance(error, SyncTimeout | PeerLost):
        machine.do(Holds(one.replica, "either"))
        if not error.phase:  # no answer at all; a coordinator that gave up names its phase, and knows what is served
            error.hint = UNKNOWN
    machine.fail(one, error)


def as_error(answer: object, expected: type) -> WeightwireError:
    """The failure that an answer is, where `expected` was asked for."""
    if isinstance(answer, WeightwireError):
        return answer
    return ProtocolError(f"expected {expected.__name__}, got {type(answer).__name__}")
