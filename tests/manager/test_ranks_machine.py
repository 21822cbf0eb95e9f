"""Rank 0's decisions about the other ranks, without sockets: who is told what, and when all have been heard."""

from __future__ import annotations

import time

import torch

from inference_plugin.wire.errors import ManifestMismatch, PeerLost, SyncTimeout, VersionConflict, WeightwireError
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.messages import Failed, Go, Outcome, Ready, Wrote
from tests.support.plain_engine import manifest_of
from trainer_adapters.update.agreement import Claims
from trainer_adapters.update.ranks_machine import (
    EnterOperation,
    Event,
    FailAll,
    Gather,
    Gone,
    RanksMachine,
    Reply,
    Said,
    SendGo,
    SendOutcome,
    Tick,
)


class Rank0:
    """A machine of three ranks, and a clock. What rank 1 says is said by asker "1"."""

    def __init__(self) -> None:
        self.machine = RanksMachine(3)
        self.now_s = 0.0

    def on(self, event: Event) -> dict[object, object]:
        """What each asker is answered: an error, or the message."""
        replies: list[Reply] = self.machine.on(event, self.now_s)
        bodies = {reply.asker: reply.body for reply in replies}
        return {a: WeightwireError.of(body.error) if isinstance(body, Failed) else body for a, body in bodies.items()}

    def enter(self, operation: str, deadline_s: float = 100.0) -> dict[object, object]:
        self.on(EnterOperation(operation, self.now_s + deadline_s))
        return self.on(Gather())

    def ready(self, rank: int, operation: str, **fields: object) -> dict[object, object]:
        return self.on(Said(Ready(1, operation, rank, **fields), str(rank)))  # type: ignore[arg-type]

    def wrote(self, rank: int, txn: str, **fields: object) -> dict[object, object]:
        return self.on(Said(Wrote(txn, rank, **fields), str(rank)))  # type: ignore[arg-type]


def test_hearing_many_ranks_costs_in_proportion_to_them() -> None:
    machine, count = RanksMachine(2048), 2047
    machine.on(EnterOperation("update:1", 100.0), 0.0)
    machine.on(Gather(), 0.0)
    began_s = time.process_time()
    heard = []
    for rank in range(1, count + 1):
        machine.on(Said(Ready(1, "update:1", rank), rank), 0.0)
        heard.append(machine.all_heard)
    machine.on(SendGo(Go("t", (), 10.0)), 0.0)
    for rank in range(1, count + 1):
        machine.on(Said(Wrote("t", rank), rank), 0.0)
        heard.append(machine.all_heard)
    assert time.process_time() - began_s < 3, "it was 6 s: all reports were sorted at each"
    assert [i for i, all_heard in enumerate(heard, 1) if all_heard] == [count, 2 * count]


def test_all_ranks_are_heard_then_write_then_are_told_the_outcome() -> None:
    ranks = Rank0()
    assert ranks.ready(2, "update:1") == {}, "rank 0 is in no operation: it waits"
    ranks.enter("update:1")
    assert not ranks.machine.all_heard and ranks.machine.missing == {1}
    ranks.ready(1, "update:1")
    assert ranks.machine.all_heard
    go, outcome = Go("t", (), 10.0), Outcome(b"")
    assert ranks.on(SendGo(go)) == {"1": go, "2": go}
    ranks.wrote(2, "t")
    assert ranks.machine.missing == {1}
    ranks.wrote(1, "t")
    assert ranks.machine.all_heard and ranks.on(SendOutcome(outcome)) == {"1": outcome, "2": outcome}
    assert ranks.machine.state == "idle" and ranks.machine.wakes_at_s is None


def test_the_first_error_of_a_rank_ends_the_operation_for_all_and_late_ranks_hear_of_it_when_they_come() -> None:
    ranks = Rank0()
    ranks.enter("update:1")
    ranks.ready(1, "update:1", error=ManifestMismatch("no such model").info())
    error = ranks.machine.error
    assert isinstance(error, ManifestMismatch) and error.rank == 1
    assert ranks.on(FailAll(error)).keys() == {"1"} and ranks.machine.state == "failing", "rank 2 is on its way"
    assert isinstance(ranks.ready(2, "update:1")["2"], ManifestMismatch)
    assert ranks.machine.state == "idle"


def test_a_rank_that_is_silent_gone_or_gave_up_is_named() -> None:
    silent = Rank0()
    silent.enter("update:1", deadline_s=5)
    silent.ready(1, "update:1")
    silent.now_s = silent.machine.wakes_at_s or 0.0
    silent.on(Tick())
    assert isinstance(silent.machine.error, SyncTimeout) and silent.machine.error.rank == 2
    silent.on(FailAll(silent.machine.error))
    assert silent.machine.state == "idle", "its deadline has passed: nobody else is waited for"
    late = silent.ready(2, "update:1")["2"]
    assert isinstance(late, SyncTimeout) and "came too late" in late.message

    gone = Rank0()
    gone.enter("update:1")
    gone.on(Gone(2))
    assert isinstance(gone.machine.error, PeerLost) and gone.machine.error.rank == 2

    gave_up = Rank0()
    gave_up.enter("update:1")
    gave_up.ready(1, "update:1", given_up=True)
    assert isinstance(gave_up.machine.error, SyncTimeout) and gave_up.machine.error.rank == 1

    went_on = Rank0()
    went_on.ready(1, "update:1", given_up=True)
    went_on.ready(1, "update:2")
    went_on.ready(2, "update:1")
    went_on.enter("update:1")
    assert isinstance(went_on.machine.error, SyncTimeout) and went_on.machine.error.rank == 1
    assert went_on.on(FailAll(went_on.machine.error)).keys() == {"2"} and went_on.machine.state == "idle"
    went_on.ready(2, "update:2")
    went_on.enter("update:2")
    assert went_on.machine.error is None and went_on.machine.all_heard


def test_a_rank_that_wrote_has_written_even_if_it_waits_no_longer_for_the_outcome() -> None:
    ranks = Rank0()
    ranks.enter("update:1")
    ranks.ready(1, "update:1")
    ranks.ready(2, "update:1")
    ranks.on(SendGo(Go("t", (), 10.0)))
    ranks.wrote(1, "t")
    ranks.ready(1, "update:1", given_up=True)
    ranks.wrote(2, "t")
    assert ranks.machine.error is None and ranks.machine.all_heard


def test_ranks_in_different_operations_fail_together_and_a_message_of_an_old_one_is_refused() -> None:
    ranks = Rank0()
    ranks.enter("update:1")
    answers = ranks.ready(1, "update:2")
    assert isinstance(answers["1"], VersionConflict) and isinstance(ranks.machine.error, VersionConflict)
    ranks.on(FailAll(ranks.machine.error))
    refused = ranks.wrote(2, "another")["2"]
    assert isinstance(refused, SyncTimeout) and "given this operation up" in refused.message


def test_a_rank_that_was_told_of_a_failure_is_not_told_again_in_its_next_operation_of_the_same_name() -> None:
    """Verifications have no number: rank 1 is in its next one while rank 0 still tells rank 2 how this one failed."""
    astray = Rank0()
    astray.enter("verify")
    assert isinstance(astray.ready(1, "update:3")["1"], VersionConflict)
    astray.ready(1, "verify")
    error = astray.machine.error
    assert isinstance(error, VersionConflict)
    assert astray.on(FailAll(error)) == {} and astray.ready(2, "verify").keys() == {"2"}
    astray.enter("verify")
    assert set(astray.machine.waiting) == {1} and astray.machine.error is None, "together again"

    told = Rank0()
    told.enter("verify")
    told.ready(1, "verify")
    assert told.on(FailAll(error)).keys() == {"1"}
    assert told.ready(1, "verify") == {} and told.ready(2, "verify").keys() == {"2"}
    told.enter("verify")
    assert set(told.machine.waiting) == {1}


def test_claims_that_rank_0_heard_in_an_update_that_failed_are_told_again() -> None:
    """Else it would hold them against every later update whose claims are those of before."""
    manifest = manifest_of({"w": torch.zeros(4)})
    low, high = (Box(0, (0,), (2,)),), (Box(0, (2,), (2,)),)
    leader, follower = Claims(), Claims()

    def update(mine: tuple[Box, ...], theirs: tuple[Box, ...], *, fails: bool = False) -> bool:
        claims, same = follower.news(1, manifest, theirs)
        leader.check(manifest, mine, [Ready(1, "update", 1, manifest.fingerprint, None, claims, same)])
        if not fails:  # the rank hears `Go`
            follower.agree(1, manifest, theirs)
        return same

    assert [update(low, high), update(low, high)] == [False, True]
    update(high, low, fails=True)
    assert [update(low, high), update(low, high)] == [False, True]
