"""What keeps a replica from generating between two requests of its manager: a pause, or a sleep, and its lease.

    serving --Pause--> paused --Pause(level)--> asleep --Resume(tags)--> asleep --Resume--> serving
                          |                        |                                     (torn, where the weights were
                          +--------Resume----------+                                      discarded and not updated)

One manager holds a replica at a time. When its process ends, or its lease runs out, the replica goes on by itself, and the
manager is told so if it comes back. One exception: a replica that is asleep stays so while its silent manager's process
lives on this host, because the memory that it would take back may be in that process's use; its card says so, it is
woken when the process ends, and until then any manager may take it over.

Commits and verifications happen while a replica is held, but where the memory of the weights is released: those are
refused. After a sleep that discarded the weights the groups are torn until an update heals them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import zmq

from inference_plugin.engines.pending import Pending
from inference_plugin.wire.addresses import boot_id
from inference_plugin.wire.channel import open_pidfd
from inference_plugin.wire.errors import (
    CommitFailed,
    PeerLost,
    ReplicaAsleep,
    SyncTimeout,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import Body, Done, InFlight, MemoryTag, Pause, Resume, Sender, SleepLevel, Stands

if TYPE_CHECKING:
    from inference_plugin.engines.front import Front
    from inference_plugin.engines.rank import RankReply

__all__ = ["Hold", "PendingPause", "PendingResume"]

logger = logging.getLogger(__name__)

ALL: tuple[MemoryTag, ...] = get_args(MemoryTag)
ENDED_KEPT = 16
"""So many managers are remembered whose pause ended without them."""


@dataclass(eq=False)
class Held:
    """A replica that stands still. The control thread moves `expires_at_s`, the engine's thread the rest.

    `orphaned`: its lease ran out and it stays asleep nevertheless.
    """

    sender: Sender
    lease_s: float
    expires_at_s: float
    in_flight: InFlight
    level: SleepLevel = 0
    asleep: frozenset[MemoryTag] = frozenset()
    orphaned: bool = False

    @property
    def session(self) -> str:
        return self.sender.session


class Hold:
    """The pause or sleep of one replica, and whoever asked for it."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.held: Held | None = None
        self._ended: dict[str, str] = {}
        # the control thread's
        self._watches: Held | None = None
        self._pidfd: int | None = None
        self._gone = False

    @property
    def detail(self) -> str:
        """In words, for the replica's card."""
        held = self.held
        if held is None:
            return ""
        by = f"by the manager of process {held.sender.pid}"
        if not held.asleep:
            return f"paused {by}"
        what = f"asleep at level {held.level} {by}, released: {', '.join(sorted(held.asleep))}"
        if held.orphaned:
            what += f"; that manager is silent for more than {held.lease_s:g} s, and its process may use the memory"
        return what

    def check_awake(self) -> None:
        """Raises `ReplicaAsleep` where the memory of the weights is released."""
        if self.held is not None and "weights" in self.held.asleep:
            raise ReplicaAsleep(f"the memory of its weights is released: {self.detail}")

    def policy(self, in_flight: InFlight) -> InFlight:
        """What a commit, or a further pause, by that policy is to do. Raises `ReplicaAsleep`, and `CommitFailed` for what
        can't be done."""
        self.check_awake()
        if self.held is None or in_flight not in ("abort", "drain"):
            return in_flight
        if self.held.in_flight in ("abort", "drain"):
            return "recompute"  # nothing is in flight any more, and what came since waits
        if in_flight == "abort":
            return in_flight
        raise CommitFailed(
            f"requests in flight can't end first: {self.detail}",
            hint="resume it and pause with in_flight='drain', or use another policy here",
        )

    # --- the control thread ------------------------------------------------------------------------------------------

    def renew(self, session: str) -> Done:
        """Keeps the lease. Raises `VersionConflict` where there is none."""
        held = self.held
        if held is None or held.session != session:
            why = self._ended.get(session, "somebody else does" if held else "it was resumed")
            raise VersionConflict(f"this manager doesn't hold the replica: {why}", hint="pause it again")
        held.expires_at_s = time.monotonic() + held.lease_s
        if held.orphaned:
            held.orphaned = False
            self._front.control.submit(self._front.show)
        return Done()

    def watched(self) -> list[int]:
        """What becomes readable when the process ends that holds the replica."""
        held = self.held
        if held is not self._watches:
            self.close()
            self._watches, self._gone = held, False
            if held is not None and held.sender.pid and held.sender.boot_id == boot_id():
                self._pidfd = open_pidfd(held.sender.pid)
                self._gone = self._pidfd is None
        return [] if self._pidfd is None else [self._pidfd]

    def due_s(self) -> float:
        """When to `look`, on `time.monotonic()`'s clock."""
        if self._watches is None:
            return math.inf
        return 0.0 if self._gone else self._watches.expires_at_s

    def look(self) -> None:
        """Has the replica let go where its manager is gone or silent: once for either."""
        held = self._watches
        if held is None:
            return
        gone = self._gone or (self._pidfd is not None and bool(zmq.zmq_poll([(self._pidfd, zmq.POLLIN)], 0)))
        if not gone and time.monotonic() < held.expires_at_s:
            return
        held.expires_at_s = math.inf
        if gone:
            self._gone = False
            self.close()
        self._front.control.submit(_LetGo(self._front, held, gone=gone).start)

    def close(self) -> None:
        """Watches nobody any longer."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    # --- the engine's own thread -------------------------------------------------------------------------------------

    def wake(self, tags: Iterable[MemoryTag]) -> None:
        """Takes memory back, on all ranks; where one can't, the replica is torn, and what is released may be asked for
        again."""
        held = self.held
        assert held is not None
        released = tuple(tag for tag in ALL if tag in held.asleep and tag in tags)
        if not released:
            return
        try:
            raise_first(self._front.ask_ranks("wake", tags=released))
            held.asleep -= set(released)
            self._front.control.hold(held.asleep)
        except Exception as error:
            failed = WeightwireError.wrap(error)
            self._front.tear_model(f"it could not be woken ({', '.join(released)}): {failed.message}")
            raise failed from error
        self._front.show()

    def release(self) -> None:
        """The replica generates again, or where it is torn refuses to."""
        front = self._front
        self.held = None
        try:
            if front.torn is not None:
                front.control.refuse(front.torn)
            front.control.resume()
        except Exception as error:
            failed = WeightwireError.wrap(error)
            front.tear_model(f"it could not go on after a pause: {failed.message}")
            raise failed from error
        front.show()

    def end(self, session: str, why: str) -> None:
        """A manager's pause ended without it: it is told when it comes."""
        self._ended[session] = why
        while len(self._ended) > ENDED_KEPT:
            self._ended.pop(next(iter(self._ended)))

    def check_not_ended(self, session: str) -> None:
        """Raises `SyncTimeout` where this manager's pause ended without it."""
        if (why := self._ended.get(session)) is not None:
            raise SyncTimeout(
                f"the pause is over: {why}, and the replica went on by itself",
                hint="renewal needs a live process: give lease_s more time where it stalls, or pause again",
            )

    def forget_ended(self, session: str) -> None:
        self._ended.pop(session, None)


class PendingPause(Pending):
    """A pause, or a sleep, until no step runs and the memory is released."""

    phase = "pause"

    def __init__(self, front: Front, request: Pause, reply: Callable[[Body], None]) -> None:
        super().__init__(front, reply)
        self.request = request
        # What is released takes keys and values with it.
        keeps = request.level == 0 or request.in_flight != "keep"
        self._in_flight: InFlight = request.in_flight if keeps else "recompute"
        self._falling_asleep = False

    def is_asked_again(self, body: Body) -> bool:
        return body == self.request

    def cancel(self) -> None:
        if self.over:
            return
        late = SyncTimeout(
            f"no step boundary by policy {self._in_flight!r} within {self.request.timeout_s:g} s",
            hint="the replica goes on; give the pause more time, or use another policy for requests in flight",
        )
        if self.front.at_work is self:
            self._give_up(late)
        else:
            self._fail(late)

    def _run(self) -> None:
        try:
            if self._is_done():
                self._end(stands(self.front))
                return
            if self.request.level:
                self._falling_asleep = True
                self._ask_all("may_sleep", level=self.request.level)
            self.front.control.pause(self.front.hold.policy(self._in_flight), self._at_boundary)
        except Exception as error:
            if not isinstance(error, WeightwireError):
                logger.exception("weightwire: the engine could not be paused")
            self._give_up(error)

    def _is_done(self) -> bool:
        """Whether there is nothing to do. Raises `VersionConflict` where somebody else holds the replica."""
        request, hold = self.request, self.front.hold
        hold.forget_ended(request.sender.session)
        held = hold.held
        if held is None:
            return False
        if held.session != request.sender.session:
            if not held.orphaned:
                raise VersionConflict(hold.detail, hint="resume it with that manager, or end its process")
            held = hold.held = replace(held, sender=request.sender, orphaned=False)
            self.front.show()
        held.lease_s = request.lease_s
        held.expires_at_s = time.monotonic() + request.lease_s
        if held.asleep and request.level not in (0, held.level):
            raise VersionConflict(f"{hold.detail}, not at {request.level}", hint="wake it up first")
        return bool(held.asleep) or (request.level == 0 and held.in_flight == self._in_flight)

    def _at_boundary(self, error: BaseException | None) -> None:
        if self.over:
            return
        front, request = self.front, self.request
        try:
            if error is not None:
                raise error
            front.control.hold(frozenset())
            if request.level:
                self._ask_all("sleep", level=request.level)
                front.control.hold(frozenset(ALL))
        except Exception as failure:  # noqa: BLE001 -- it is the answer
            self._give_up(failure)
            return
        front.hold.held = Held(
            request.sender,
            request.lease_s,
            time.monotonic() + request.lease_s,
            self._in_flight,
            request.level,
            frozenset(ALL if request.level else ()),
        )
        if request.level == 2:
            front.tear_model("a sleep of level 2 discarded the weights")
        front.show()
        self._end(stands(front))

    def _give_up(self, error: BaseException) -> None:
        """As it was before, on all ranks."""
        front = self.front
        failed = WeightwireError.wrap(error)
        try:
            if self._falling_asleep:
                self._ask_all("wake", tags=ALL)
                front.control.hold(frozenset())
        except Exception as worse:  # noqa: BLE001 -- it is in the replica's card
            front.tear_model(f"it could not fall asleep ({failed.message}), nor be woken: {worse}")
        with contextlib.suppress(PeerLost):
            front.resume_unless_held()
        self._fail(failed)

    def _ask_all(self, name: str, **arguments: object) -> None:
        raise_first(self.front.ask_ranks(name, **arguments))


class PendingResume(Pending):
    """Waking up, in part or whole; whole, the replica goes on."""

    phase = "resume"

    def __init__(self, front: Front, request: Resume, reply: Callable[[Body], None]) -> None:
        super().__init__(front, reply)
        self.request = request

    def is_asked_again(self, body: Body) -> bool:
        return body == self.request

    def cancel(self) -> None:
        if not self.over and self.front.at_work is not self:
            self._fail(SyncTimeout(f"the engine's thread was not free within {self.request.timeout_s:g} s"))

    def _run(self) -> None:
        request, hold = self.request, self.front.hold
        held = hold.held
        try:
            if held is None or (held.session != request.session and not held.orphaned):
                hold.check_not_ended(request.session)
                if held is not None:
                    raise VersionConflict(hold.detail, hint="that manager resumes it")
            elif not request.tags:
                hold.wake(ALL)
                hold.release()
            elif held.level:
                hold.wake(request.tags)
                if not held.asleep:
                    hold.release()
            self._end(stands(self.front))
        except Exception as error:  # noqa: BLE001 -- it is the answer
            self._fail(WeightwireError.wrap(error))


class _LetGo(Pending):
    """What happens to a replica whose manager is `gone`, or silent."""

    phase = "resume"

    def __init__(self, front: Front, held: Held, *, gone: bool) -> None:
        super().__init__(front, lambda _: None)
        self._held = held
        self._process_is_gone = gone

    def cancel(self) -> None:
        """It has no deadline."""

    def is_asked_again(self, body: Body) -> bool:
        return False

    def _run(self) -> None:
        front, held, gone = self.front, self._held, self._process_is_gone
        if front.hold.held is held and (gone or held.expires_at_s == math.inf):  # else it was renewed meanwhile
            why = "the manager's process ended" if gone else f"the manager was silent for {held.lease_s:g} s"
            if held.asleep and not gone and held.sender.pid and held.sender.boot_id == boot_id():
                held.orphaned = True
                logger.warning("weightwire: %s; %s", why, front.hold.detail)
                front.show()
            else:
                logger.warning("weightwire: %s: the replica goes on", why)
                front.hold.end(held.session, why)
                try:
                    front.hold.wake(ALL)
                    front.hold.release()
                except WeightwireError:
                    logger.exception("weightwire: the replica could not go on")
        self._end(Done())


def stands(front: Front) -> Stands:
    """How the replica stands, as an answer."""
    held = front.hold.held
    return Stands(front.stands()[0], tuple(sorted(held.asleep)) if held is not None else ())


def raise_first(replies: list[RankReply]) -> None:
    """Raises the first error among the ranks' answers."""
    for reply in replies:
        if reply.error is not None:
            raise WeightwireError.of(reply.error)
