"""Rank 0's decisions about the trainer's other ranks, without sockets, threads or clocks: which are in its operation, which are
told that they came too late, when all have been heard, and who ended it.

    idle --EnterOperation--> entered --Gather--> gathering --SendGo--> writing --SendOutcome--> idle
                                \\--------------------+----------------------+--FailAll--> failing --> idle

A rank waits for the answer to what it said last. Which operations belong together is `Turns`'s judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec import Struct

from inference_plugin.wire.errors import PeerLost, ProtocolError, SyncTimeout, VersionConflict, WeightwireError
from inference_plugin.wire.messages import Failed, Go, Outcome, Ready, Wrote
from trainer_adapters.update.turns import Turns

__all__ = [
    "EnterOperation", "FailAll", "Gather", "Gone", "HINT", "RanksMachine", "Reply", "Said", "SendGo", "SendOutcome", "Tick",
]  # fmt: skip

HINT = (
    "call update and verify on every rank, in one order and with the same versions; as soon as all ranks call the same "
    "operation again they are together again"
)


# --- events ----------------------------------------------------------------------------------------------------------


class EnterOperation(Struct, frozen=True):
    """Rank 0 begins an operation ("update:7", "verify") that ends at `deadline_s`."""

    operation: str
    deadline_s: float


class Gather(Struct, frozen=True):
    """Rank 0 waits for the other ranks to be in its operation."""


class Said(Struct, frozen=True):
    """A rank reported, and waits for a `Reply` with this `asker`, unless it has given the operation up."""

    message: Ready | Wrote
    asker: object = None


class SendGo(Struct, frozen=True):
    """All ranks are to write."""

    go: Go


class SendOutcome(Struct, frozen=True):
    """The operation is over."""

    outcome: Outcome


class FailAll(Struct, frozen=True):
    """The operation failed on rank 0. Ranks that come to it until its deadline are told as well."""

    error: WeightwireError


class Gone(Struct, frozen=True):
    """A rank's process ended."""

    rank: int


class Tick(Struct, frozen=True):
    """The operation's deadline has come."""


Event: TypeAlias = EnterOperation | Gather | Said | SendGo | SendOutcome | FailAll | Gone | Tick


# --- actions ---------------------------------------------------------------------------------------------------------


class Reply(Struct, frozen=True):
    """Answer what was said with this `asker`."""

    asker: object
    body: Go | Outcome | Failed


# --- the machine -----------------------------------------------------------------------------------------------------


@dataclass
class RanksMachine:
    """`on` takes one event and returns the replies to send. `size` counts all ranks, rank 0 included.

    `error`: why rank 0's operation fails, until that is over. `waiting`: what each rank that waits for an answer said last.
    """

    size: int
    state: Literal["idle", "entered", "gathering", "writing", "failing"] = "idle"
    error: WeightwireError | None = None
    waiting: dict[int, Ready | Wrote] = field(default_factory=dict)
    _deadline_s: float = 0.0
    _turns: Turns = field(default_factory=Turns)
    _txn: str = ""
    _wrote: dict[int, Wrote] = field(default_factory=dict)
    _last_txn: tuple[str, str] = ("", "")
    _askers: dict[int, object] = field(default_factory=dict)
    _away: set[int] = field(default_factory=set)
    _astray: set[int] = field(default_factory=set)
    _gave_up: dict[int, str] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _told: set[int] = field(default_factory=set)
    _replies: list[Reply] = field(default_factory=list)

    @property
    def wakes_at_s(self) -> float | None:
        """When a `Tick` is due, if nothing happens before."""
        return None if self.state == "idle" else self._deadline_s

    @property
    def heard(self) -> list[Ready | Wrote]:
        """What the ranks said for this step of rank 0's operation, in order of rank."""
        return sorted(self._reports, key=lambda said: said.rank)

    @property
    def _reports(self) -> list[Ready | Wrote]:
        """As `heard`, in any order: asked for at each message."""
        if self.state == "writing":
            return list(self._wrote.values())
        return [said for said in self.waiting.values() if isinstance(said, Ready)]

    @property
    def all_heard(self) -> bool:
        return len(self._reports) == self.size - 1

    @property
    def missing(self) -> set[int]:
        """Ranks whose report is awaited: rank 0 watches their processes."""
        others = set(range(1, self.size))
        if self.state == "failing":
            return others - self._told - self._away - self._astray - set(self.waiting)
        return others - {said.rank for said in self._reports}

    def on(self, event: Event, now_s: float) -> list[Reply]:
        match event:
            case EnterOperation():
                self._enter(event)
            case Gather():
                self.state = "gathering"
                self._sort_out(sorted(self.waiting))
            case Said():
                self._take(event)
            case SendGo():
                self._answer_those_here(event.go)
                self.state, self._txn = "writing", event.go.txn
            case SendOutcome():
                self._answer_those_here(event.outcome)
                self._leave(set())
            case FailAll():
                self.error, self.state = event.error, "failing"
            case Gone():
                self._gone.add(event.rank)
            case Tick():
                pass
        if self.state == "failing":
            self._fail_those_here(now_s)
        elif self.state in ("gathering", "writing") and self.error is None:
            self.error = self._why_it_fails(now_s)
        replies, self._replies = self._replies, []
        return replies

    # --- what each event does ----------------------------------------------------------------------------------------

    def _enter(self, event: EnterOperation) -> None:
        self.state, self.error, self._deadline_s = "entered", None, event.deadline_s
        self._txn = ""
        self._wrote.clear()
        for ranks in (self._away, self._astray, self._gone, self._told):
            ranks.clear()
        self._turns.enter(event.operation)

    def _take(self, event: Said) -> None:
        said = event.message
        if not 0 < said.rank < self.size:
            words = "this message comes from none of this trainer's ranks"
            self._refuse(event.asker, ProtocolError(words, hint="ranks make a SyncManager together"))
            return
        rank = said.rank
        if isinstance(said, Wrote) and said.txn != self._txn:
            if said.txn == self._last_txn[0]:
                self._turns.knows_the_end(rank, self._last_txn[1])
            words, hint = "rank 0 has given this operation up", "go on with the operation that follows"
            self._refuse(event.asker, SyncTimeout(words, hint=hint, rank=rank))
            return
        self.waiting.pop(rank, None)
        if not isinstance(said, Ready) or said.operation == self._gave_up.get(rank):
            self._gave_up.pop(rank, None)
        if isinstance(said, Ready):
            self._turns.reported(rank, said.operation)
            if self._txn or said.given_up:  # the rank is not, or no longer, in rank 0's operation
                self._away.add(rank)
            else:
                self._away.discard(rank)
            if said.given_up:
                self._turns.knows_the_end(rank, said.operation)
                if not self._turns.has_left(said.operation):
                    self._gave_up[rank] = said.operation
                return
        else:
            self._wrote[rank] = said
        self.waiting[rank], self._askers[rank] = said, event.asker
        if self.state == "idle" or (self.state == "gathering" and self.error is None):
            self._sort_out([rank])  # the others were sorted out as they came

    def _why_it_fails(self, now_s: float) -> WeightwireError | None:
        """The first reason for which rank 0's operation cannot go on."""
        reports = self._reports
        if errors := {said.rank: said.error for said in reports if said.error is not None}:
            rank = min(errors)
            return WeightwireError.of(errors[rank]).at(side="trainer", rank=rank)
        if self.state == "gathering":
            for rank in [rank for rank, operation in self._gave_up.items() if operation == self._turns.now]:
                del self._gave_up[rank]
                self._away.add(rank)
                words = f"trainer rank {rank} gave {self._turns.now!r} up before all ranks were in it"
                return SyncTimeout(words, hint=f"that rank's own error says why; {HINT}", side="trainer", rank=rank)
        elif self._away and (away := sorted(self._away & self.missing)):
            words = f"trainer rank {away[0]} gave {self._turns.now!r} up before it had written its part"
            return SyncTimeout(words, hint=f"that rank's own error says why; {HINT}", side="trainer", rank=away[0])
        if len(reports) == self.size - 1:
            return None
        if self._gone and (gone := sorted(self._gone & self.missing)):
            words, hint = (
                f"trainer rank {gone[0]}'s process ended",
                "restart the trainer; replicas serve what they served",
            )
            return PeerLost(words, hint=hint, side="trainer", rank=gone[0])
        if now_s >= self._deadline_s:
            silent = sorted(self.missing)
            words = f"trainer ranks {silent} were not heard of in time"
            return SyncTimeout(
                words, hint=f"those ranks' logs say where they are; {HINT}", side="trainer", rank=silent[0]
            )
        return None

    def _sort_out(self, ranks: Sequence[int]) -> None:
        """Before `Go`: what becomes of those ranks that wait in another operation than rank 0's."""
        for rank in ranks:
            if not isinstance(said := self.waiting.get(rank), Ready):
                continue
            verdict = self._turns.judge(rank, said.operation)
            if verdict == "late":
                where = f" and is in {self._turns.now!r}" if self._turns.now else ""
                words = (
                    f"trainer rank {rank} came too late: rank 0 has given this operation up, {said.operation!r}{where}"
                )
                hint = f"go on with the operation that follows; {HINT}"
                self._tell(rank, Failed(SyncTimeout(words, hint=hint, rank=rank).info()))
            elif verdict == "ahead" and self._gave_up.get(rank) == self._turns.now:
                pass  # `_why_it_fails` says that
            elif verdict in ("ahead", "astray"):
                error = VersionConflict(
                    f"trainer rank {rank} is in its operation {said.count}, {said.operation!r}; rank 0 is in "
                    f"{self._turns.now!r}",
                    hint=HINT,
                    rank=rank,
                )
                self.error = self.error or error
                if verdict == "astray" and rank not in self._astray:  # else it is in its next operation already
                    self._astray.add(rank)
                    self._tell(rank, Failed(error.info()))

    def _fail_those_here(self, now_s: float) -> None:
        assert self.error is not None
        if self._astray:  # a rank that comes only now, and is astray as well, fails as the others did
            self._sort_out(sorted(self.waiting))
        # A rank that was told already is in its next operation, which may have the same name: it waits for rank 0's.
        here = [rank for rank in self._here() if rank not in self._told | self._astray]
        for rank in here:
            self._tell(rank, Failed(self.error.info()))
        self._told |= {*here, *self._away, *self._astray, *self._gone}
        if not self.missing or now_s >= self._deadline_s:
            self._leave(set(range(1, self.size)) - self._told)

    def _leave(self, untold: set[int]) -> None:
        """Rank 0's operation is over; ranks that wait in another one are told if they are too late."""
        self._last_txn = (self._txn, self._turns.now)
        self._gave_up = {rank: one for rank, one in self._gave_up.items() if one != self._turns.now}
        self.state, self._txn, self.error = "idle", "", None  # its traceback holds the model and the caller's future
        self._away.clear()
        self._turns.leave(untold)
        self._sort_out(sorted(self.waiting))

    # --- replies -----------------------------------------------------------------------------------------------------

    def _here(self) -> list[int]:
        """Ranks that wait in rank 0's operation: for `Go`, or since then for `Outcome`."""
        return [
            rank
            for rank, said in self.waiting.items()
            if (isinstance(said, Wrote) if self._txn else isinstance(said, Ready) and said.operation == self._turns.now)
        ]

    def _answer_those_here(self, body: Go | Outcome) -> None:
        for rank in self._here():
            self._tell(rank, body)

    def _tell(self, rank: int, body: Go | Outcome | Failed) -> None:
        del self.waiting[rank]
        self._replies.append(Reply(self._askers.pop(rank), body))

    def _refuse(self, asker: object, error: WeightwireError) -> None:
        self._replies.append(Reply(asker, Failed(error.at(side="manager").info())))
