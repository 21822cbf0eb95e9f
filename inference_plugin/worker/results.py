"""What the end of a group's work does to the group."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from inference_plugin.wire.errors import ManifestMismatch, VersionConflict, WeightwireError
from inference_plugin.wire.messages import Begun, Done, Relaying, Sealed
from inference_plugin.worker.actions import (
    AgreeOnTerms,
    CheckPieces,
    CleanUp,
    CloseWork,
    DropStaging,
    KeepTerms,
    Mapped,
    MapStaging,
    PassOn,
    PutInForce,
    ReceiveBucket,
    Stage,
    Terms,
    Warn,
    Work,
)
from inference_plugin.worker.group import WeightUpdateGroup
from inference_plugin.worker.transaction import Job, served_already

__all__ = ["work_ended"]


def work_ended(group: WeightUpdateGroup, job: Job, result: Any, error: WeightwireError | None) -> None:
    """Dispatches a job's result, or its error."""
    kind = type(job.work)
    if kind is not Stage:
        group.job_ended()
    _HANDLERS.get(kind, _answered)(group, job, result, error)
    group.start_next()


def _agreed(group: WeightUpdateGroup, job: Job, terms: Terms, error: WeightwireError | None) -> None:
    opening = job.opening
    assert opening is not None
    try:
        if error is not None:
            raise error
        if group.closed:
            raise VersionConflict("the group was closed while it was being opened")
        group.shared.accept(group, terms)
    except WeightwireError as refused:
        opening.error = copy.copy(refused)
        kept = None if group.closed else group.opened
        group.queue(Job(KeepTerms(kept), opening=opening), first=True)
        return
    group.writes += 1
    previous = group.take_previous()
    group.terms, group.opened = terms, opening.request
    group.openings.remove(opening)
    for asker in opening.askers:
        group.reply_opened(asker)
    group.queue(Job(PutInForce(previous)), first=True)


def _kept_terms(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    if error is not None:
        group.do(Warn(f"group {group.name} could not return to its terms; it must be opened again: {error}"))
        group.opened = None  # its claims stay: no other group may write them, and they may be torn
    assert job.opening is not None and job.opening.error is not None
    group.forget(job.opening, job.opening.error)
    group.shared.left(group)


def _mapped(group: WeightUpdateGroup, job: Job, mapped: Mapped, error: WeightwireError | None) -> None:
    transaction = job.transaction
    assert transaction is not None
    if transaction is not group.transaction:
        return  # it was dropped, and what was mapped is cleaned up
    if isinstance(error, ManifestMismatch):  # the terms no longer fit the engine: the group has to be opened again
        group.opened = None
    if error is not None:  # nothing is remembered: it may be begun again
        group.transaction = None
        if group.state != "torn":
            group.enter("idle")
        group.end_waits(transaction, error)
        return
    transaction.mapped = mapped
    if group.installed is not None and group.installed.keeps and group.installed.segment_id == mapped.segment_id:
        # The trainer writes over it: there is no way back from there.
        group.queue(Job(DropStaging(group.take_previous(), reused=True)), first=True)
    group.renew(transaction)
    for asker in transaction.begin_askers:
        group.reply(asker, Begun(landing=mapped.landing))
    transaction.begin_askers = []


def _received(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    transaction = job.transaction
    assert transaction is not None and isinstance(job.work, ReceiveBucket)
    if error is None:
        transaction.next_seq[job.work.bucket.rank] = job.work.bucket.seq + 1
        group.renew(transaction)
    group.answer(job.asker, Done(), error)


def _checked_pieces(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    transaction = job.transaction
    assert transaction is not None and isinstance(job.work, CheckPieces)
    if transaction is not group.transaction:
        return  # it was dropped
    digest = job.work.digest
    if error is None and transaction.must_equal not in ("", digest):
        error = served_already(transaction.version, "with other weights, or was sent in other pieces")
    if error is not None:  # another list may follow
        transaction.sealing = ""
        for asker, _ in transaction.seal_askers:
            group.fail(asker, error)
        transaction.seal_askers = []
        return
    transaction.covered = transaction.staging = True
    group.shared.start(group, Job(Stage(transaction.txn, digest), transaction=transaction))


def _staged(group: WeightUpdateGroup, job: Job, sealed: Sealed, error: WeightwireError | None) -> None:
    transaction = job.transaction
    assert transaction is not None
    transaction.staging = False
    transaction.warn_at_s = math.inf
    if transaction is not group.transaction:
        return  # it was dropped
    if error is not None:
        transaction.error = copy.copy(error).at(phase="seal", version=transaction.version)
    else:
        transaction.sealed = sealed
        group.renew(transaction)
        if group.state == "receiving":
            group.enter("sealed")
    for asker, _ in transaction.seal_askers:
        group.answer(asker, sealed, transaction.error)
    transaction.seal_askers = []


def _cleaned(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    transaction = job.transaction
    assert transaction is not None
    group.dropped.remove(transaction)
    for asker in transaction.abort_askers:
        group.answer(asker, Done(), error)
    group.shared.left(group)


def _passed_on(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    assert job.transaction is not None
    group.answer(job.asker, Relaying(dict(job.transaction.next_seq)), error)


def _closed(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    group.gone = True
    group.answer(job.asker, Done(), error)


def _answered(group: WeightUpdateGroup, job: Job, _result: None, error: WeightwireError | None) -> None:
    group.answer(job.asker, Done(), error)


_HANDLERS: dict[type[Work], Callable[[WeightUpdateGroup, Job, Any, WeightwireError | None], None]] = {
    AgreeOnTerms: _agreed,
    KeepTerms: _kept_terms,
    MapStaging: _mapped,
    ReceiveBucket: _received,
    CheckPieces: _checked_pieces,
    Stage: _staged,
    CleanUp: _cleaned,
    PassOn: _passed_on,
    CloseWork: _closed,
}
