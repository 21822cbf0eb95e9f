"""What a request from the worker's socket does to one group. Whatever raises has changed nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from inference_plugin.wire.errors import ManifestMismatch, ProtocolError, SyncTimeout, VersionConflict, WeightwireError
from inference_plugin.wire.messages import (
    Abort,
    AskStands,
    Begin,
    Begun,
    Body,
    Bucket,
    Done,
    OpenGroup,
    RankCommit,
    Relay,
    Relaying,
    Release,
    Renew,
    Seal,
    TakesBytes,
)
from inference_plugin.worker.actions import AgreeOnTerms, CheckPieces, MapStaging, PassOn, ReceiveBucket
from inference_plugin.worker.group import WeightUpdateGroup
from inference_plugin.worker.transaction import Job, Opening, Transaction, served_already

__all__ = ["bucket", "handlers", "open_group", "still_committing"]


def another_manager(session: str) -> str:
    """The hint for a manager that meets another one, of that session, in a group."""
    return (
        f"another SyncManager{session and ' '}{session}, of another trainer perhaps, updates this group too: let one manager "
        "update it, or give each trainer and its engines a WEIGHTWIRE_JOB of their own"
    )


def still_committing(transaction: Transaction | None = None, session: str = "") -> SyncTimeout:
    """The error of a request, of the manager `session`, that came during the commit of `transaction`. It concerns this replica
    alone, and only for now."""
    if transaction is not None and transaction.sender.session != session:
        return SyncTimeout(
            "another manager's commit of this group is still under way here",
            hint=another_manager(transaction.sender.session),
        )
    return SyncTimeout(
        "another commit of this group is still under way here",
        hint="the other replicas are not concerned; this one takes the next update after that commit. If it lost a rank in that "
        "commit (`weightwire status` says so), restart the engine",
    )


def terms_of(request: OpenGroup) -> tuple[object, ...]:
    """What requests for the same terms have in common."""
    return request.manifest.fingerprint, request.transport, request.probe, request.install, request.partial


def open_group(group: WeightUpdateGroup, asker: Any, request: OpenGroup) -> None:
    """Agrees on terms; ends the open transaction where they are new.

    The terms in force, and those of the last opening that is not finished, are answered and change nothing. Others
    replace the group's terms when their turn comes. Terms that are refused leave the old ones in force.
    """
    asked_last = group.openings[-1].request if group.openings else group.opened
    if asked_last is not None and terms_of(asked_last) == terms_of(request):
        if group.openings:
            group.openings[-1].askers.append(asker)
        else:
            group.reply_opened(asker)
        return
    if group.state == "committing":
        raise still_committing(group.transaction, request.session)
    group.drop("the group was opened anew", hint=another_manager(request.session))
    opening = Opening(request, [asker])
    group.openings.append(opening)
    group.queue(Job(AgreeOnTerms(request), opening=opening))


def begin(group: WeightUpdateGroup, asker: Any, request: Begin) -> None:
    if group.openings:
        raise ProtocolError("the group is being opened by other terms", hint="open the group again")
    if (agreed := group.opened) is None:
        raise ProtocolError("the group is not open", hint="send OpenGroup before Begin")
    if request.fingerprint != agreed.manifest.fingerprint:
        raise ManifestMismatch("the manifest changed since the group was opened", hint="open the group again")
    if request.transport and (request.transport, request.install, request.partial) != (
        agreed.transport, agreed.install, agreed.partial
    ):  # fmt: skip
        hint = f"open the group again; {another_manager(agreed.session)}"
        raise ProtocolError("another trainer has opened the group since, by other terms", hint=hint)
    current = group.transaction
    if current is not None and current.txn == request.txn:
        if current.mapped is not None:
            group.reply(asker, Begun(landing=current.mapped.landing))
        else:
            current.begin_askers.append(asker)
        return
    if isinstance(finished := group.finished.get(request.txn), WeightwireError):
        raise copy.copy(finished)
    if group.state == "committing":
        raise still_committing(current, request.sender.session)
    must_equal = ""
    if (installed := group.installed) is not None and not group.unknown and group.state != "torn":
        if request.version == installed.version:
            # The number may stand for other weights: of another trainer, of one before it was restarted, of a loop that counts
            # something else than updates. They are sent again, and the digests tell whether they are the same.
            if isinstance(finished, RankCommit) or request.digest == installed.digest:
                group.reply(asker, Begun(already=True))
                return
            if group.terms is not None and group.terms.opened.install == "streaming":
                how = "already, and streaming would write weights before they are compared"
                raise served_already(request.version, how)
            must_equal = installed.digest
        if request.version < installed.version:
            raise VersionConflict(
                f"version {request.version} is not newer than the installed {installed.version}",
                hint="versions of a group must increase, over restarts of the trainer too; without a version the "
                "update takes the next one",
            )
    if isinstance(finished, RankCommit):
        raise VersionConflict(f"transaction {request.txn} is committed already")
    if current is not None and current.version > request.version:
        other = current.sender.session
        hint = another_manager(other) if other != request.sender.session else ""
        raise VersionConflict(f"version {current.version} is on its way, {request.version} is older", hint=hint)
    group.drop("another transaction overtook it", hint=another_manager(request.sender.session))
    expires_at_s = group.shared.now_s + request.lease_s
    transaction = Transaction(request.txn, request.version, request.sender, request.lease_s, expires_at_s, must_equal)
    transaction.begin_askers.append(asker)
    group.transaction = transaction
    group.holds_memory = True
    if group.state != "torn":
        group.enter("receiving")
    group.queue(Job(MapStaging(request.txn, request.version, request.segment), transaction=transaction))


def bucket(group: WeightUpdateGroup, asker: Any, request: Bucket, payload: memoryview) -> None:
    transaction = group.current(request.txn)
    group.queue(Job(ReceiveBucket(request.txn, request, payload), asker, transaction))


def relay(group: WeightUpdateGroup, asker: Any, request: Relay) -> None:
    if isinstance(group.finished.get(request.txn), RankCommit):
        group.reply(asker, Relaying())  # it has everything
        return
    # Workers that ask each other must not outlive the trainer.
    transaction = group.current(request.txn, renew=False)
    group.queue(Job(PassOn(request.txn, request), asker, transaction))


def ask_stands(group: WeightUpdateGroup, asker: Any, request: AskStands) -> None:
    transaction = group.current(request.txn)
    if not transaction.streams:
        raise ProtocolError("nothing is streamed in this transaction")
    if transaction.error is not None:
        raise copy.copy(transaction.error)
    if transaction.stands:
        group.reply(asker, TakesBytes(stands=True))
    else:
        transaction.stand_askers.append((asker, group.shared.now_s + request.wait_s))


def renew(group: WeightUpdateGroup, asker: Any, request: Renew) -> None:
    group.current(request.txn)
    group.reply(asker, Done())


def seal(group: WeightUpdateGroup, asker: Any, request: Seal) -> None:
    """Has the pieces checked; a list that was refused may be followed by another."""
    transaction = group.current(request.txn)
    if not transaction.sealing:
        if request.pieces is None:
            raise ProtocolError(
                "a list of pieces is named that this worker was never sent",
                hint="send the list with the first Seal",
            )
        transaction.sealing = request.digest
        work = CheckPieces(request.txn, request.pieces, request.digest)
        group.queue(Job(work, transaction=transaction))
    elif transaction.sealing != request.digest:
        raise ProtocolError("another list of pieces than at the first seal of this transaction")
    if transaction.error is not None:
        raise copy.copy(transaction.error)
    if transaction.sealed is not None:
        group.reply(asker, transaction.sealed)
    else:
        transaction.seal_askers.append((asker, group.shared.now_s + request.wait_s))


def abort(group: WeightUpdateGroup, asker: Any, request: Abort) -> None:
    """Answered when the work for the transaction has ended and its memory is free, also where it was dropped before."""
    transaction = group.transaction
    if transaction is None or transaction.txn != request.txn:
        if (dropped := next((one for one in group.dropped if one.txn == request.txn), None)) is not None:
            dropped.abort_askers.append(asker)
        else:
            group.reply(asker, Done())
        return
    is_streaming = group.is_streaming
    is_committing = group.state == "committing" and not is_streaming
    if is_committing and transaction.error is None:
        raise VersionConflict("too late to abort: the transaction is being committed")
    transaction.abort_askers.append(asker)
    reason = request.reason or "aborted by the trainer"
    if is_streaming:
        group.end_stream(reason)
    elif not is_committing:
        group.drop(reason)


def release(group: WeightUpdateGroup, asker: Any, _request: Release) -> None:
    group.release_memory(asker)


handlers: dict[type[Body], Callable[[WeightUpdateGroup, Any, Any], None]] = {
    Begin: begin,
    AskStands: ask_stands,
    Relay: relay,
    Renew: renew,
    Seal: seal,
    Abort: abort,
    Release: release,
}
"""What each request does to its group, except for buckets, which come with a payload, and for `OpenGroup` and `CloseGroup`, for
which there need not be a group."""
