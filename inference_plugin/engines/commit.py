"""A commit: one transaction on all ranks of a replica, at one step boundary.

On vLLM the engine core runs `commit_on_all_ranks`, and each `Ask` is one round over the executor. On SGLang every rank runs
it at the same time: the first rank sends the plan once, and each `Ask` is one gathering of answers. All ranks decide by the
same plan and the same answers, so they decide the same.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from inference_plugin.engines.actions import Ask, Finish, NoteSpan, Publish, Steps, StopSteps
from inference_plugin.engines.operations import RankOperation, RankReply, first_error
from inference_plugin.engines.standing import Standing, printable
from inference_plugin.wire.errors import CommitFailed, ErrorInfo, PeerLost, SyncTimeout, TornReplica, WeightwireError
from inference_plugin.wire.messages import Committed, InFlight

__all__ = ["CommitPlan", "commit_on_all_ranks"]

logger = logging.getLogger(__name__)


class CommitPlan(msgspec.Struct, frozen=True):
    """All that a rank needs to run a commit: the transaction, the policy for requests in flight, and how the replica stands.

    `forbidden`: why this commit may not install, although its transaction may be committed already. `nonce` is of this
    attempt.
    """

    nonce: str
    group: str
    txn: str
    version: int
    asked_in_flight: InFlight
    in_flight: InFlight
    forbidden: ErrorInfo | None = None
    held: bool = False
    must_stand: bool = False
    torn: dict[str, str] = {}

    def operation(
        self,
        name: Literal["check", "release", "install", "undo", "finish", "tear"],
        *,
        reason: str = "",
        install_s: float = 0.0,
        turn: int = 0,
        shares: tuple[bytes, ...] = (),
    ) -> RankOperation:
        """One operation of this commit; every rank gives it the same nonce."""
        nonce = f"{self.nonce}.{name}.{turn}" if turn else f"{self.nonce}.{name}"
        return RankOperation(
            nonce, name, self.group, self.txn, self.version, printable(reason), install_s, shares=shares
        )


def commit_on_all_ranks(
    plan: CommitPlan, standing: Standing, now_s: Callable[[], float], submitted_s: float
) -> Steps[Committed]:
    """Checks, stops, installs, finishes and resumes; or undoes; or tears. Raises why the version was not committed."""
    began_s = now_s()
    checked: list[RankReply] = yield Ask(plan.operation("check"))
    if all(reply.commit is not None for reply in checked):
        done = tuple(reply.commit for reply in checked if reply.commit is not None)
        return Committed(plan.version, done, 0.0, 0.0, already=True)

    # Nothing is written yet: whatever fails up to here leaves the old version.
    stopping = False
    try:
        if (refused := first_error(checked)) is not None:
            if any(reply.commit is not None for reply in checked):  # asked again: the version may well be served
                words = f"rank {refused.rank} could not say whether the version is installed: {refused.message}"
                raise SyncTimeout(
                    words, hint="other ranks have installed it: `versions()` asks which version is served"
                )
            raise refused
        if plan.forbidden is not None:
            raise WeightwireError.of(plan.forbidden)
        if plan.in_flight == "keep" and any(reply.scales_cache for reply in checked):
            # With other scales, what is cached would not be of older weights but of none.
            plan = msgspec.structs.replace(plan, in_flight="recompute")
        stopping = True
        stepped_on = yield StopSteps(plan.in_flight)
    except Exception as error:
        if not isinstance(error, WeightwireError):
            logger.exception("weightwire: the engine could not be stopped for a commit")
        if stopping:
            yield from standing.resume_unless_held()
        with contextlib.suppress(PeerLost):
            yield Ask(plan.operation("release"))
        raise WeightwireError.wrap(error) from error

    # From here on weights are written: the commit is finished, undone, or the replica is torn.
    stopped_from_s = now_s() if stepped_on else began_s
    yield NoteSpan("wait", submitted_s, "wait for the boundary", {"in_flight": plan.asked_in_flight})
    try:
        committed = yield from _install(plan, standing, tuple(reply.share for reply in checked if reply.share))
    except Exception as error:
        failure: Exception = error
        if not isinstance(error, WeightwireError):
            yield from tear(plan, standing, f"{type(error).__name__}: {error}")
            logger.exception("weightwire: a commit failed")
            failure = TornReplica(printable(str(error)))
        yield from standing.resume_unless_held()
        yield NoteSpan("stopped", stopped_from_s, "generation stopped")
        raise failure from error
    yield from standing.resume_unless_held()
    stopped_s = now_s() - stopped_from_s  # from here on the next step may run
    yield NoteSpan("stopped", stopped_from_s, "generation stopped")
    return msgspec.structs.replace(committed, stopped_s=stopped_s, waited_s=stopped_from_s - submitted_s)


def _install(plan: CommitPlan, standing: Standing, shares: tuple[bytes, ...]) -> Steps[Committed]:
    seconds: dict[int, float] = {}
    for turn in itertools.count():  # one, but where bytes are streamed: then as long as any rank waits for more
        try:
            installed: list[RankReply] = yield Ask(plan.operation("install", turn=turn, shares=shares))
        except PeerLost as error:
            yield from tear(plan, standing, _words(error))
            raise
        if (failed := first_error(installed)) is not None:
            yield from _undo(plan, standing, failed)
        for reply in installed:
            seconds[reply.rank] = seconds.get(reply.rank, 0.0) + reply.seconds
        if not any(reply.left for reply in installed):
            break
    slowest_s = max(seconds.values())
    try:
        finished: list[RankReply] = yield Finish(plan.operation("finish", install_s=slowest_s), plan.in_flight)
        if (failed := first_error(finished)) is not None:
            raise failed
    except WeightwireError as error:
        yield from tear(plan, standing, _words(error))
        raise
    ranks = [reply.commit for reply in finished if reply.commit is not None]
    still_torn = {group for rank in ranks for group in rank.torn}
    standing.torn = {group: standing.torn.get(group, "an earlier update failed half way") for group in still_torn}
    still_unknown = {group for rank in ranks for group in rank.unknown}
    standing.unknown = {group: why for group, why in standing.unknown.items() if group in still_unknown}
    yield from standing.refuse_while_torn()
    yield Publish()
    timed = tuple(msgspec.structs.replace(rank, install_s=seconds[rank.rank]) for rank in ranks)
    return Committed(plan.version, timed, stopped_s=0.0, waited_s=0.0)


def _undo(plan: CommitPlan, standing: Standing, failed: WeightwireError) -> Steps[None]:
    """Goes back to the old version on all ranks and raises `CommitFailed`, or `TornReplica` where that fails too."""
    where = f"rank {failed.rank}: {failed.message}"
    try:
        undone: list[RankReply] = yield Ask(plan.operation("undo", reason=failed.message))
        torn = first_error(undone)
    except PeerLost as error:
        torn = error
    if torn is None:
        raise CommitFailed(f"{where}; undone on all ranks") from failed
    yield from tear(plan, standing, _words(torn))
    hint = torn.hint if isinstance(torn, PeerLost) else ""
    first = f"{failed.message}; the roll-back failed: "  # so a rank's own words begin
    why = torn.message.removeprefix(first)
    raise TornReplica(f"{where}; and the roll-back failed: {why}", hint=hint)


def tear(plan: CommitPlan, standing: Standing, reason: str) -> Steps[None]:
    """The group is torn: the engine refuses first; then the card and the other ranks learn of it."""
    standing.torn[plan.group] = printable(reason)
    yield from standing.refuse_while_torn()
    logger.error("weightwire: group %r is torn: %s", plan.group, reason)
    yield Publish()
    try:
        yield Ask(plan.operation("tear", reason=reason))
    except PeerLost as error:
        logger.warning("weightwire: not all ranks know that the replica is torn: %s", error)


def _words(error: WeightwireError) -> str:
    """Why the replica is torn. No update heals it where a rank is lost: then the words say what does."""
    says_more = isinstance(error, PeerLost) and error.hint != error.default_hint
    return f"{error.message}; {error.hint}" if says_more else error.message
