"""Pauses and sleeps of a replica between two requests of its manager, and what happens when that manager is gone.

    serving --Pause--> paused --Pause(level)--> asleep --Resume(tags)--> asleep --Resume--> serving
                          |                        |                                     (torn, where the weights were
                          +--------Resume----------+                                      discarded and not updated)

One manager holds a replica at a time. When its process ends, or its lease runs out, the replica goes on by itself, and the
manager is told so if it comes back. One exception: a replica that is asleep stays so while its silent manager's process
lives on this host, because the memory that it would take back may be in that process's use; its card says so, it is
woken when the process ends, and until then any manager may take it over.

Commits and verifications happen while a replica is held, unless the memory of the weights is released: then they are
refused. After a sleep that discarded the weights the groups are torn until an update heals them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from inference_plugin.engines.actions import Ask, Hold, Publish, Refuse, ResumeSteps, Steps, StopSteps
from inference_plugin.engines.operations import RankOperation, raise_first
from inference_plugin.engines.standing import ALL_MEMORY, Held, Standing
from inference_plugin.wire.errors import VersionConflict, WeightwireError
from inference_plugin.wire.messages import Done, InFlight, MemoryTag, Pause, Resume, Stands

__all__ = ["let_go", "pause", "pause_policy", "resume"]

logger = logging.getLogger(__name__)


def pause_policy(request: Pause) -> InFlight:
    """The policy of a pause: memory that is released takes keys and values with it, so they cannot be kept."""
    return "recompute" if request.level and request.in_flight == "keep" else request.in_flight


def pause(standing: Standing, request: Pause, now_s: Callable[[], float]) -> Steps[Stands]:
    """Stops the replica and, with a `level`, releases its memory. A failure leaves the replica as it was."""
    in_flight, level = pause_policy(request), request.level
    falling_asleep = False
    try:
        if is_done(standing, request, now_s()):
            yield Publish()
            return standing.answer()
        if level:
            falling_asleep = True
            raise_first((yield Ask(RankOperation("", "may_sleep", level=level))))
        yield StopSteps(standing.policy(in_flight))
        yield Hold(frozenset())
        if level:
            raise_first((yield Ask(RankOperation("", "sleep", level=level))))
            yield Hold(frozenset(ALL_MEMORY))
    except Exception as error:
        failed = WeightwireError.wrap(error)
        try:
            if falling_asleep:
                raise_first((yield Ask(RankOperation("", "wake", tags=ALL_MEMORY))))
                yield Hold(frozenset())
        except Exception as worse:  # noqa: BLE001 -- it is in the replica's card
            yield from standing.tear_model(f"it could not fall asleep ({failed.message}), nor be woken: {worse}")
        yield from standing.resume_unless_held()
        raise
    asleep = frozenset(ALL_MEMORY if level else ())
    standing.held = Held(request.sender, request.lease_s, now_s() + request.lease_s, in_flight, level, asleep)
    if level == 2:
        yield from standing.tear_model("a sleep of level 2 discarded the weights")
    yield Publish()
    return standing.answer()


def resume(standing: Standing, request: Resume) -> Steps[Stands]:
    """Takes back the memory of `tags`, or all of it. With all of it the replica generates again."""
    held = standing.held
    if held is None or (held.session != request.session and not held.orphaned):
        standing.check_not_ended(request.session)
        if held is not None:
            raise VersionConflict(held.detail, hint="that manager resumes it")
    elif not request.tags:
        yield from _wake(standing, held, ALL_MEMORY)
        yield from _release(standing)
    elif held.level:
        yield from _wake(standing, held, request.tags)
        if not held.asleep:
            yield from _release(standing)
    return standing.answer()


def let_go(standing: Standing, held: Held, *, gone: bool, stays_asleep: bool) -> Steps[Done]:
    """Resumes a replica once its manager's process has ended (`gone`), or its lease has run out. `stays_asleep`: that process
    lives on this host and may use the memory."""
    why = "the manager's process ended" if gone else f"the manager was silent for {held.lease_s:g} s"
    if held.asleep and not gone and stays_asleep:
        held.orphaned = f"that manager is silent for more than {held.lease_s:g} s, and its process may use the memory"
        logger.warning("weightwire: %s; %s", why, held.detail)
        yield Publish()
        return Done()
    logger.warning("weightwire: %s: the replica goes on", why)
    standing.end_pause(held.session, why)
    held.orphaned = f"{why}, and it could not be woken"  # until it is
    yield from _wake(standing, held, ALL_MEMORY)
    yield from _release(standing)
    return Done()


def is_done(standing: Standing, request: Pause, now_s: float) -> bool:
    """Whether the replica is paused as asked. Raises `VersionConflict` where somebody else holds it."""
    standing.ended.pop(request.sender.session, None)
    held = standing.held
    if held is None:
        return False
    if held.session != request.sender.session:
        if not held.orphaned:
            raise VersionConflict(held.detail, hint="resume it with that manager, or end its process")
        held = standing.held = replace(held, sender=request.sender, orphaned="")
    held.lease_s = request.lease_s
    held.expires_at_s = now_s + request.lease_s
    if held.asleep and request.level not in (0, held.level):
        raise VersionConflict(f"{held.detail}, not at {request.level}", hint="wake it up first")
    return bool(held.asleep) or (request.level == 0 and held.in_flight == pause_policy(request))


def _wake(standing: Standing, held: Held, tags: Iterable[MemoryTag]) -> Steps[None]:
    """Takes memory back on all ranks. If a rank cannot, the replica is torn; whoever resumes may ask again for the rest."""
    released = tuple(tag for tag in ALL_MEMORY if tag in held.asleep and tag in tags)
    if not released:
        return
    try:
        raise_first((yield Ask(RankOperation("", "wake", tags=released))))
        held.asleep -= set(released)
        yield Hold(held.asleep)
    except Exception as error:
        failed = WeightwireError.wrap(error)
        yield from standing.tear_model(f"it could not be woken ({', '.join(released)}): {failed.message}")
        raise failed from error
    yield Publish()


def _release(standing: Standing) -> Steps[None]:
    """The replica generates again; a torn one refuses requests."""
    standing.held = None
    try:
        if standing.refusal is not None:
            yield Refuse(standing.refusal)
        yield ResumeSteps()
    except Exception as error:
        failed = WeightwireError.wrap(error)
        yield from standing.tear_model(f"it could not go on after a pause: {failed.message}")
        raise failed from error
    yield Publish()
