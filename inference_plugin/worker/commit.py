"""What the engine's own thread does to one group: commit, undo, tear, verify. A function that raises has changed nothing, unless
its docstring says otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from inference_plugin.wire.errors import CommitFailed, ProtocolError, TornReplica
from inference_plugin.wire.messages import RankCommit, TakesBytes
from inference_plugin.worker.actions import DropStaging, SettleStaging, WayBack, WeightsState
from inference_plugin.worker.events import (
    CheckCommitting,
    CheckSealed,
    Finished,
    Install,
    LookAtWeights,
    ReleaseCheck,
    StartUndo,
    Undone,
)
from inference_plugin.worker.group import WeightUpdateGroup
from inference_plugin.worker.transaction import Installed, Job, Transaction

__all__ = ["forget_version", "handlers", "tear"]


def check_sealed(group: WeightUpdateGroup, event: CheckSealed) -> None:
    """The group is `committing` from now on. A transaction that is committed already gets its earlier answer."""
    txn = event.txn
    if isinstance(done := group.finished.get(txn), RankCommit):
        group.reply(event.asker, done)
        return
    transaction = group.current(txn)
    if transaction.version != event.version:
        raise ProtocolError(f"transaction {txn} is of version {transaction.version}, not {event.version}")
    if transaction.error is not None:
        raise copy.copy(transaction.error)
    if transaction.sealed is None and not transaction.streams:
        raise ProtocolError(f"transaction {txn} is not sealed")
    if group.state != "committing":
        group.before_commit = group.state
    group.enter("committing")
    group.reply(event.asker, None)


def release_check(group: WeightUpdateGroup, event: ReleaseCheck) -> None:
    """The update is sealed again, and may be committed or aborted."""
    if group.state == "committing":
        group.enter(group.before_commit)
    group.reply(event.asker, None)


def committing(group: WeightUpdateGroup, txn: str) -> Transaction:
    """The transaction that is being committed. Raises `ProtocolError` for another one."""
    transaction = group.transaction
    if group.state != "committing" or transaction is None or transaction.txn != txn:
        raise ProtocolError(f"transaction {txn} is not being committed")
    return transaction


def install(group: WeightUpdateGroup, event: Install) -> None:
    """The engine's thread is about to write: a verification under way must begin again, and streaming trainers may send."""
    transaction = committing(group, event.txn)
    group.writes += 1
    transaction.stands = True
    for waiting, _ in transaction.stand_askers:
        group.reply(waiting, TakesBytes(stands=True))
    transaction.stand_askers = []
    group.reply(event.asker, transaction.version)


def check_committing(group: WeightUpdateGroup, event: CheckCommitting) -> None:
    """Answers whether all bytes have arrived and been checked. Raises the reason if the rest will never arrive."""
    transaction = committing(group, event.txn)
    if transaction.error is not None:
        raise copy.copy(transaction.error)
    group.reply(event.asker, transaction.sealed is not None)


def finished(group: WeightUpdateGroup, event: Finished) -> None:
    """Makes the transaction's version the installed one."""
    transaction = committing(group, event.txn)
    assert transaction.sealed is not None and transaction.mapped is not None
    previous = group.take_previous()
    group.installed = Installed(
        transaction.version,
        event.txn,
        transaction.sealed.digest,
        transaction.sender,
        transaction.mapped.segment_id,
        event.keeps,
    )
    group.transaction = None
    group.detail = ""
    group.written |= group.claims
    group.foreign -= group.claims
    if not group.foreign or not group.partial:
        group.unknown = ""
    group.shared.torn.heal(group.claims, whole=not group.partial)
    replaced = group.shared.closed.replace(group.claims, whole=not group.partial)
    group.enter("idle")
    done = RankCommit(
        group.shared.rank,
        transaction.version,
        event.install_s,
        releases_segment=not event.keeps,
        torn=group.shared.torn.groups,
        unknown=tuple(group.shared.unknown()),
        checked_bytes=transaction.sealed.checked_bytes,
        replaced=replaced,
    )
    group.remember(event.txn, done)
    group.queue(Job(SettleStaging(event.txn) if event.keeps else DropStaging(event.txn)))
    if previous:
        group.queue(Job(DropStaging(previous)))
    group.reply(event.asker, done)


def start_undo(group: WeightUpdateGroup, event: StartUndo) -> None:
    if group.state == "torn":
        raise TornReplica(group.detail)
    group.writes += 1
    installed, undone_txn = group.installed, group.transaction.txn if group.transaction is not None else ""
    if installed is None:
        group.reply(event.asker, WayBack(undone=undone_txn))
    else:
        group.reply(event.asker, WayBack(installed.version, installed.txn if installed.keeps else "", undone_txn))


def undone(group: WeightUpdateGroup, event: Undone) -> None:
    """The previous version is served again. Raises `TornReplica`, after the change, if the group is torn."""
    reason = event.reason
    if event.error is not None:
        tear(group, f"{reason}; the roll-back failed: {event.error}")
        raise TornReplica(group.detail)
    if group.transaction is not None:
        group.remember(group.transaction.txn, CommitFailed(reason))
    was_torn = group.before_commit == "torn"
    group.enter("torn" if was_torn else "idle")
    group.drop(reason)
    if was_torn:
        raise TornReplica(f"{group.detail}; the update that was to heal it failed: {reason}")
    group.reply(event.asker, None)


def tear(group: WeightUpdateGroup, reason: str, txn: str = "") -> None:
    """The content of the group's parameters is unknown until an update of all of them commits. An update that began after
    `txn` goes on, as it may be the one that heals the group."""
    group.detail = reason
    group.writes += 1
    group.shared.torn.add(group.name, group.claims)
    began_since = txn and group.transaction is not None and group.transaction.txn != txn
    group.enter("torn")
    if not began_since:
        group.drop(reason, TornReplica)


def forget_version(group: WeightUpdateGroup, reason: str) -> None:
    """Somebody else wrote the group's parameters: the next update may have any version, and there is no way back to the last one.
    An update that is on its way goes on, as it replaces what it sends. The first who wrote is the one that is named."""
    group.writes += 1
    if group.installed is None:
        return
    if previous := group.take_previous():
        group.queue(Job(DropStaging(previous)))
    group.installed, group.unknown, group.foreign = None, reason, group.written


def look_at_weights(group: WeightUpdateGroup, event: LookAtWeights) -> None:
    group.reply(event.asker, WeightsState(group.version, group.writes))


handlers: dict[type, Callable[[WeightUpdateGroup, Any], None]] = {
    CheckSealed: check_sealed,
    ReleaseCheck: release_check,
    Install: install,
    LookAtWeights: look_at_weights,
    CheckCommitting: check_committing,
    Finished: finished,
    StartUndo: start_undo,
    Undone: undone,
}
"""What each of the engine's events does to its group."""
