"""Decides whether `update` returns a finished update's report or raises an error with it. Every trainer rank judges the same
report by the same settings, so that all of them do the same."""

from __future__ import annotations

from inference_plugin.wire.errors import CommitFailed, PeerLost, SyncTimeout, WeightwireError
from inference_plugin.wire.reports import ReplicaReport, UpdateReport
from trainer_adapters.settings import OnFailure, Stragglers

__all__ = ["failure_of"]


def failure_of(report: UpdateReport, on_failure: OnFailure, stragglers: Stragglers) -> WeightwireError | None:
    """The error that `update` raises, with the report as its `report`; None if it returns the report.

    If no replica took the version, that is an error. Otherwise `on_failure` decides. With "raise", these replicas are still only
    reported: lost replicas, and late replicas if a quorum or a deadline says that the commit does not wait for them.
    """
    failed = report.failed
    if len(failed) == len(report.replicas):
        return _with(report, _first(failed) or CommitFailed("no replica took the version", hint=NOBODY))
    if on_failure == "report":
        return None
    wait_for_all = isinstance(stragglers, str)
    refused = [one for one in failed if not _is_lost(one) and (wait_for_all or not _was_late(one))]
    if not refused:
        return None
    error = _first(refused) or CommitFailed("it did not take the version", replica=refused[0].replica)
    count, serving = len(refused), len(report.replicas) - len(failed)
    several = "; the first of them" if count > 1 else ""
    words = (
        f"{count} of {len(report.replicas)} replicas did not take version {report.version}, {serving} serve it{several}"
    )
    error.message = f"{words}: {error.message}"
    error.args = (error.message,)
    return _with(report, error)


NOBODY = "`weightwire status` shows which replicas there are"


def _first(failed: list[ReplicaReport] | tuple[ReplicaReport, ...]) -> WeightwireError | None:
    return next(
        (WeightwireError.of(one.error).at(replica=one.replica) for one in failed if one.error is not None), None
    )


def _with(report: UpdateReport, error: WeightwireError) -> WeightwireError:
    error.report = report
    return error


def _is_lost(one: ReplicaReport) -> bool:
    return one.error is not None and one.error.kind == PeerLost.__name__


def _was_late(one: ReplicaReport) -> bool:
    return one.error is not None and one.error.kind == SyncTimeout.__name__ and one.error.phase != "commit"
