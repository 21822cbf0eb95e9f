"""How a replica stands: what is torn, and who holds it paused or asleep."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import get_args

from inference_plugin.engines.actions import Ask, Publish, Refuse, ResumeSteps, Steps
from inference_plugin.engines.operations import RankOperation
from inference_plugin.wire.errors import CommitFailed, PeerLost, ReplicaAsleep, SyncTimeout, VersionConflict
from inference_plugin.wire.messages import InFlight, MemoryTag, ReplicaState, Sender, SleepLevel, Stands
from inference_plugin.worker.torn import MODEL

__all__ = ["ALL_MEMORY", "Held", "Standing", "printable"]

logger = logging.getLogger(__name__)

ALL_MEMORY: tuple[MemoryTag, ...] = get_args(MemoryTag)
MAX_DETAIL_CHARACTERS = 4000
"""Longest description of a replica's state in its card."""
ENDED_KEPT = 16
"""How many managers are remembered whose pause ended without them."""


@dataclass(eq=False)
class Held:
    """A replica that stands still. `orphaned`: why any manager may wake it or take it over; "" if only its own may."""

    sender: Sender
    lease_s: float
    expires_at_s: float
    in_flight: InFlight
    level: SleepLevel = 0
    asleep: frozenset[MemoryTag] = frozenset()
    orphaned: str = ""

    @property
    def session(self) -> str:
        return self.sender.session

    @property
    def detail(self) -> str:
        """In words, for the replica's card."""
        by = f"by the manager of process {self.sender.pid}"
        if not self.asleep:
            return f"paused {by}"
        text = f"asleep at level {self.level} {by}, released: {', '.join(sorted(self.asleep))}"
        return f"{text}; {self.orphaned}" if self.orphaned else text


@dataclass
class Standing:
    """The state of one replica. `must_stand`: not all of the engine could be told to refuse, so no step may run. `unknown`: by
    group, who else wrote its weights since its last update."""

    held: Held | None = None
    torn: dict[str, str] = field(default_factory=dict)
    must_stand: bool = False
    unknown: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """Why the pause of a manager ended without it, by session."""

    @property
    def refusal(self) -> str | None:
        """Why the replica refuses to generate; None if it doesn't."""
        reasons = [f"group {group!r}: {reason}" if group else reason for group, reason in self.torn.items()]
        return "; ".join(reasons) or None

    def described(self) -> tuple[ReplicaState, str]:
        """The state, and the reason in words."""
        held, refusal = self.held, self.refusal
        words = [refusal, *dict.fromkeys(self.unknown.values()), held.detail if held else ""]
        detail = "; ".join(filter(None, words))[:MAX_DETAIL_CHARACTERS]
        if held is not None and held.asleep:
            return "asleep", detail
        if refusal is not None:
            return "torn", detail
        return ("paused" if held is not None else "serving"), detail

    def answer(self) -> Stands:
        """The state as an answer to `Pause` and `Resume`."""
        return Stands(self.described()[0], tuple(sorted(self.held.asleep)) if self.held is not None else ())

    def check_awake(self) -> None:
        """Raises `ReplicaAsleep` where the memory of the weights is released."""
        if self.held is not None and "weights" in self.held.asleep:
            raise ReplicaAsleep(f"the memory of its weights is released: {self.held.detail}")

    def policy(self, in_flight: InFlight) -> InFlight:
        """The policy to use for requests in flight where a commit, or a further pause, asks for `in_flight`. Raises
        `ReplicaAsleep`, and `CommitFailed` for a policy that cannot be followed while the replica is held."""
        self.check_awake()
        if self.held is None or in_flight not in ("abort", "drain"):
            return in_flight
        if self.held.in_flight in ("abort", "drain"):
            return "recompute"  # nothing is in flight any more, and what came since waits
        if in_flight == "abort":
            return in_flight
        raise CommitFailed(
            f"requests in flight can't end first: {self.held.detail}",
            hint="resume it and pause with in_flight='drain', or use another policy here",
        )

    def end_pause(self, session: str, why: str) -> None:
        """Remembers why a manager's pause ended without it, for when the manager comes back."""
        self.ended[session] = why
        while len(self.ended) > ENDED_KEPT:
            self.ended.pop(next(iter(self.ended)))

    def check_not_ended(self, session: str) -> None:
        """Raises `SyncTimeout` where this manager's pause ended without it."""
        if (why := self.ended.get(session)) is not None:
            raise SyncTimeout(
                f"the pause is over: {why}, and the replica went on by itself",
                hint="renewal needs a live process: give lease_s more time where it stalls, or pause again",
            )

    def renew(self, session: str, now_s: float) -> bool:
        """Renews the lease; returns whether the replica was orphaned. Raises `VersionConflict` where there is no lease."""
        held = self.held
        if held is None or held.session != session:
            why = self.ended.get(session, "somebody else does" if held else "it was resumed")
            raise VersionConflict(f"this manager doesn't hold the replica: {why}", hint="pause it again")
        held.expires_at_s = now_s + held.lease_s
        was_orphaned, held.orphaned = bool(held.orphaned), ""
        return was_orphaned

    # --- steps that every command shares -----------------------------------------------------------------------------

    def refuse_while_torn(self) -> Steps[None]:
        """The engine refuses requests while a group is torn, and takes them otherwise. Comes before anything else is done
        about a torn replica."""
        if self.held is not None and self.refusal is not None:
            return  # no step runs while it is held; an update may heal it before the pause ends, which checks again
        try:
            yield Refuse(self.refusal)
            self.must_stand = False
        except Exception:
            # Requests may still run somewhere: no step may. A rank that missed "generate again" only goes on refusing.
            self.must_stand = self.refusal is not None
            logger.exception("weightwire: not all of the engine was told whether to refuse")

    def resume_unless_held(self) -> Steps[None]:
        """The engine steps again, unless somebody holds it, or it must refuse and can't."""
        if self.held is not None or self.must_stand:
            return
        try:
            yield ResumeSteps()
        except Exception:  # the engine stands; what was committed stays committed
            logger.exception("weightwire: the engine could not be resumed")

    def tear_model(self, reason: str) -> Steps[None]:
        """All of the model's weights are unknown from here on: every group is torn."""
        reason = printable(reason)
        self.torn[MODEL] = reason
        yield from self.refuse_while_torn()
        try:
            replies = yield Ask(RankOperation("", "tear_all", reason=reason))
        except PeerLost as error:
            logger.warning("weightwire: not all ranks know that the replica is torn: %s", error)
        else:
            groups = {group.group for reply in replies if reply.card is not None for group in reply.card.groups}
            if groups:
                self.torn.update(dict.fromkeys(groups, reason))
                del self.torn[MODEL]
                yield from self.refuse_while_torn()  # with the groups' names
        yield Publish()


def printable(text: str) -> str:
    """Escapes what UTF-8 cannot encode: names of an operating system may hold such characters."""
    return text.encode("utf-8", "backslashreplace").decode()
