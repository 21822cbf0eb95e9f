"""The decisions of one transaction, without sockets: for whom the commit waits, who drops out, and what never changes again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from inference_plugin.wire.errors import (
    CommitFailed,
    DigestMismatch,
    EngineUnsupported,
    ManifestMismatch,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TransportUnavailable,
    VersionConflict,
)
from inference_plugin.wire.messages import (
    Begin,
    Begun,
    Commit,
    Committed,
    GroupOpened,
    RankCommit,
    Seal,
    Sealed,
    Sender,
    TakesBytes,
)
from tests.support.plain_engine import checkpoint, manifest_of
from trainer_adapters.settings import BestEffort, Quorum
from trainer_adapters.update.machine import COMMIT_SHARE, OPEN_SHARE, TransactionMachine
from trainer_adapters.update.machine_io import (
    INSTALLING_S,
    AbortAll,
    Action,
    Answered,
    Ask,
    AskToOpen,
    BeginAll,
    CommitAll,
    Drop,
    Dropped,
    EndStream,
    Event,
    Holds,
    Joining,
    LeaveBehind,
    OpenAll,
    SealAll,
    TellAbort,
    Terms,
    Tick,
)

MANIFEST = manifest_of(checkpoint(0))
OPENED = GroupOpened(tuple(MANIFEST.whole(i) for i in range(len(MANIFEST.tensors))), "plan", "copy")
TIMEOUT_S = 100.0


def committed(version: int = 7) -> Committed:
    return Committed(version, (RankCommit(0, version, 0.1, releases_segment=False),), 0.1, 0.1)


class Played:
    """A machine with a clock; each step is answered by whom the test says."""

    def __init__(
        self, *replicas: str, stragglers: Any = "report", workers: int = 1, transports: tuple[str, ...] = ("shm", "zmq")
    ) -> None:
        self.now_s = 0.0
        self.actions: list[Action] = []
        terms = Terms(
            "policy", "t", 7, MANIFEST, transports, "auto", False, "keep", stragglers, Sender("me"),
            lease_s=30, timeout_s=TIMEOUT_S, deadline_s=TIMEOUT_S, silence_s=10, control_timeout_s=10,
            streams=frozenset(["stream"]),
        )  # fmt: skip
        self.machine = TransactionMachine(terms)
        self.on(OpenAll([Joining(name, workers) for name in replicas], {}))

    def on(self, event: Event) -> list[Action]:
        actions = self.machine.on(event, self.now_s)
        self.actions += actions
        return actions

    def say(self, replica: str, answer: object, worker: int | None = 0) -> list[Action]:
        return self.on(Answered(replica, worker, answer))

    def begin(self, *replicas: str) -> Played:
        for name in replicas:
            self.say(name, OPENED)
        assert not self.machine.is_busy
        self.on(BeginAll({"shm": b"there"}))
        for name in replicas:
            self.say(name, Begun())
        assert not self.machine.is_busy
        return self

    def states(self) -> dict[str, str]:
        return {name: one.state for name, one in self.machine.participants.items()}

    def asked(self, kind: type) -> list[str]:
        return [each.replica for each in self.actions if isinstance(each, Ask) and isinstance(each.body, kind)]


def streaming() -> Played:
    """A replica that stands still, which its coordinator was asked to commit, and takes bytes."""
    played = Played("a", transports=("stream",))
    played.say("a", msgspec.structs.replace(OPENED, install="streaming"))
    played.on(BeginAll({"stream": b""}))
    played.say("a", Begun())
    played.say("a", TakesBytes(stands=True))
    return played


@pytest.mark.parametrize(
    ("stragglers", "ready", "commits"),
    [
        ("report", "a", True),
        ("report", "", False),
        ("all", "abc", True),
        ("all", "ab", False),
        (Quorum(2), "ab", True),
        (Quorum(2), "a", False),
        (BestEffort(5), "a", True),
    ],
)
def test_a_commit_waits_for_whom_the_policy_says_and_commits_those_that_are_ready(
    stragglers: Any, ready: Sequence[str], commits: bool
) -> None:
    played = Played(*"abc", stragglers=stragglers).begin(*"abc")
    played.on(SealAll((), "digest"))
    for name in ready:
        played.say(name, Sealed(done=True))
    is_enough = len(ready) == 3 or (isinstance(stragglers, Quorum) and len(ready) >= stragglers.count)
    assert played.machine.is_busy != is_enough
    if not is_enough:
        ends_s = 5.0 if isinstance(stragglers, BestEffort) else (1 - COMMIT_SHARE) * TIMEOUT_S
        assert played.machine.wakes_at_s == ends_s
        played.now_s = ends_s
        played.on(Tick())
    assert not played.machine.is_busy
    if stragglers in ("all", Quorum(2)) and not commits:
        assert isinstance(played.machine.error, CommitFailed) and "none commits" in played.machine.error.message
        played.on(CommitAll())
    else:
        assert played.machine.error is None
        played.on(CommitAll())
    assert played.asked(Commit) == (list(ready) if commits else [])


def test_what_no_rank_of_a_replica_reads_refuses_the_update_by_name_and_what_one_rank_reads_does_not() -> None:
    *others, last = OPENED.needs
    part, rest = (msgspec.structs.replace(OPENED, needs=needs) for needs in (tuple(others), (last,)))
    played = Played("a", "b", workers=2)
    played.say("a", part, 0)
    played.say("a", rest, 1)
    assert played.states()["a"] == "open" and played.machine.error is None
    played.say("b", part, 0)
    played.say("b", part, 1)
    assert isinstance(played.machine.error, ManifestMismatch)
    assert "no place for: norm.weight (1 in all)" in played.machine.error.message


def test_a_replica_that_is_slow_to_open_the_group_leaves_the_others_their_time() -> None:
    played = Played("ready", "slow")
    assert played.machine.wakes_at_s == TIMEOUT_S, "alone, it has all of it"
    played.say("ready", OPENED)
    assert played.machine.wakes_at_s == (1 - OPEN_SHARE) * TIMEOUT_S
    played.now_s = (1 - OPEN_SHARE) * TIMEOUT_S
    played.on(Tick())
    assert played.states() == {"ready": "open", "slow": "failed"} and not played.machine.is_busy


def test_a_step_that_begins_late_shares_the_time_that_is_left() -> None:
    """Writing took most of the time: no replica would have had any to check what was written."""
    played = Played("a", "b").begin("a", "b")
    played.now_s = 90.0
    played.on(SealAll((), "digest"))
    assert played.machine.is_busy and played.machine.wakes_at_s == pytest.approx(TIMEOUT_S - COMMIT_SHARE * 10)
    for name in "ab":
        played.say(name, Sealed(done=True))
    played.on(CommitAll())
    assert played.asked(Commit) == ["a", "b"]


def test_the_opening_of_a_large_fleet_costs_in_proportion_to_its_workers() -> None:
    names = [f"replica-{i}" for i in range(128)]
    played = Played(*names, workers=8)
    began_s = time.process_time()
    for worker, name in itertools.product(range(8), names):
        played.say(name, OPENED, worker)
        assert played.machine.wakes_at_s > 0, "asked for after each event"
    assert time.process_time() - began_s < 2, "it was 8 s: each answer looked at each pair of replicas"
    assert set(played.states().values()) == {"open"}


def test_transports_are_tried_in_order_and_each_refusal_is_named() -> None:
    played = Played("a", workers=2)
    assert [each.transport for each in played.actions if isinstance(each, AskToOpen)] == ["shm"]
    played.say("a", OPENED, 0)
    (again,) = played.say("a", TransportUnavailable("another host", hint="-"), 1)
    assert again == AskToOpen("a", "zmq")
    played.say("a", TransportUnavailable("no key", hint="-"), 0)
    played.say("a", OPENED, 1)
    error = played.machine.participants["a"].error
    assert isinstance(error, TransportUnavailable)
    assert "shm: another host" in error.message and "zmq: no key" in error.message


@pytest.mark.parametrize("error", [ManifestMismatch("another model"), VersionConflict("older")])
def test_what_is_wrong_with_the_trainer_fails_the_update_and_what_is_wrong_with_a_replica_only_that(error: Any) -> None:
    played = Played("a", "b").begin("a", "b")
    played.on(SealAll((), "digest"))
    played.say("b", DigestMismatch("one bit"))
    assert played.states() == {"a": "sealing", "b": "failed"} and played.machine.error is None
    played.say("a", error)
    assert played.machine.error is error and error.replica == "a"
    aborts = [each for each in played.on(AbortAll("why")) if isinstance(each, TellAbort)]
    assert [each.replica for each in aborts] == ["a"], "the other one has been told"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_refusal_is_the_lowest_rank_s_whichever_rank_answers_first(order: tuple[int, ...]) -> None:
    answers = [OPENED, EngineUnsupported("stage 1"), EngineUnsupported("stage 2")]
    played = Played("a", workers=3)
    for worker in order:
        assert played.machine.is_busy
        played.say("a", answers[worker], worker)
    assert played.machine.participants["a"].error is answers[1] and not played.machine.is_busy


def test_a_refusal_waits_for_no_rank_that_is_lost_and_for_a_silent_one_until_the_step_ends() -> None:
    refusal = EngineUnsupported("stage 1")
    played = Played("a", workers=3)
    played.say("a", refusal, 1)
    played.say("a", PeerLost("ended"), 0)
    assert played.machine.participants["a"].error is refusal and not played.machine.is_busy
    played = Played("a", workers=3)
    played.say("a", lost := PeerLost("ended"), 0)
    assert played.machine.participants["a"].error is lost and not played.machine.is_busy
    played = Played("a", workers=3)
    played.say("a", refusal, 1)
    played.now_s = TIMEOUT_S
    played.on(Tick())
    assert played.machine.participants["a"].error is refusal and not played.machine.is_busy


def test_nothing_that_comes_after_the_commit_changes_an_outcome() -> None:
    played = Played("a", "b").begin("a", "b")
    played.on(SealAll((), "digest"))
    for name in ("a", "b"):
        played.say(name, Sealed(done=True))
    played.on(CommitAll())
    played.say("a", committed(), None)
    before = played.states()
    for event in (
        Answered("a", None, PeerLost("gone")),
        Answered("a", 0, SyncTimeout("late")),
        Dropped("a", PeerLost("gone")),
        Tick(),
        AbortAll("something failed"),
    ):
        played.on(event)
    assert before["a"] == played.states()["a"] == "committed" and played.machine.participants["a"].error is None
    assert not [each for each in played.actions if isinstance(each, Drop | TellAbort) and each.replica == "a"]


def test_a_replica_that_does_not_answer_its_commit_is_kept_both_segments_until_somebody_knows() -> None:
    played = Played("a").begin("a")
    played.on(SealAll((), "digest"))
    played.say("a", Sealed(done=True))
    played.on(CommitAll())
    assert played.machine.wakes_at_s == TIMEOUT_S + INSTALLING_S
    played.now_s = TIMEOUT_S + INSTALLING_S
    actions = played.on(Tick())
    assert Holds("a", "either") in actions and played.states() == {"a": "failed"}
    error = played.machine.participants["a"].error
    assert isinstance(error, SyncTimeout) and error.phase == "commit" and "versions()" in error.hint


def test_a_replica_whose_commit_can_no_longer_be_waited_for_is_kept_both_segments() -> None:
    played = Played("a", "b").begin("a", "b")
    played.on(SealAll((), "digest"))
    for name in ("a", "b"):
        played.say(name, Sealed(done=True))
    played.on(CommitAll())
    actions = played.on(AbortAll("no memory for the answers"))
    assert [each for each in actions if isinstance(each, Holds)] == [Holds("a", "either"), Holds("b", "either")]
    assert played.states() == {"a": "aborted", "b": "aborted"}


@pytest.mark.parametrize(("failed_at_s", "waits_s"), [(1.0, 10.0), (TIMEOUT_S, INSTALLING_S)])
def test_a_replica_that_does_not_say_what_it_holds_of_a_stream_is_waited_for_no_longer_than_an_installation_after_the_deadline(
    failed_at_s: float, waits_s: float
) -> None:
    played = streaming()
    played.now_s = failed_at_s
    assert EndStream("a", "the update failed: no word of rank 1") in played.on(AbortAll("no word of rank 1"))
    assert played.machine.wakes_at_s == failed_at_s + waits_s
    played.now_s = failed_at_s + waits_s
    played.on(Tick())
    assert not played.machine.is_busy and played.states() == {"a": "failed"}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("lost", [PeerLost, SyncTimeout])
def test_a_stream_whose_coordinator_falls_silent_is_of_an_unknown_version_in_whatever_step_the_others_are(
    lost: Any, sealed: bool
) -> None:
    """The simulator found it reported as late with the old version, while it served the new one."""
    played = streaming()
    if sealed:
        played.on(SealAll((), "digest"))
        played.say("a", Sealed(done=True))
    assert Holds("a", "either") in played.say("a", lost("silent"), worker=None)
    error = played.machine.participants["a"].error
    assert played.states() == {"a": "failed"} and isinstance(error, lost)
    assert error.phase == "commit" and "the old version or the new one" in error.hint


def test_terms_that_another_trainer_replaced_are_agreed_anew_once() -> None:
    played = Played("a", "b")
    played.say("a", OPENED), played.say("b", OPENED)
    played.on(BeginAll({"shm": b"there"}))
    played.say("b", Begun())
    for _ in range(2):
        played.say("a", ProtocolError("the group is open with other terms"))
        if played.states()["a"] == "opening":
            played.say("a", OPENED)
    assert played.states() == {"a": "failed", "b": "begun"} and played.asked(Begin) == ["a", "b", "a"]


def test_ranks_that_have_begun_keep_their_leases_while_others_open_the_group_anew_and_hear_if_that_fails() -> None:
    played = Played("a", "b", workers=2)
    for name, worker in itertools.product("ab", (0, 1)):
        played.say(name, OPENED, worker)
    played.on(BeginAll({"shm": b"there"}))
    played.say("b", Begun(), 0), played.say("b", Begun(), 1)
    played.say("a", Begun(), 0)
    played.say("a", ProtocolError("the group is open with other terms"), 1)
    assert played.states() == {"a": "opening", "b": "begun"} and played.machine.participants["a"].is_in
    (drop,) = [each for each in played.say("a", SyncTimeout("silent"), 1) if isinstance(each, Drop)]
    assert drop.replica == "a" and drop.tells_abort


def test_a_replica_of_which_some_ranks_serve_the_version_already_and_others_do_not_fails_alone() -> None:
    """A catch-up may meet it: some ranks have closed the group since their commit, or lost it, and the others have not."""
    played = Played("a", "b", workers=2)
    for name, worker in itertools.product("ab", (0, 1)):
        played.say(name, OPENED, worker)
    played.on(BeginAll({"shm": b"there"}))
    for name, worker in itertools.product("ab", (0, 1)):
        played.say(name, Begun(already=(name, worker) == ("a", 1)), worker)
    assert played.states() == {"a": "failed", "b": "begun"}
    error = played.machine.participants["a"].error
    assert isinstance(error, CommitFailed) and "different versions" in error.message and "next version" in error.hint
    (drop,) = [each for each in played.actions if isinstance(each, Drop)]
    assert drop.replica == "a" and drop.tells_abort, "one of its ranks has begun"


def test_a_replica_that_was_not_ready_is_left_behind_and_asked_nothing_more() -> None:
    played = Played("ready", "slow", stragglers=Quorum(1)).begin("ready", "slow")
    played.on(SealAll((), "digest"))
    played.say("ready", Sealed(done=True))
    played.on(CommitAll())
    assert played.say("slow", Sealed(done=False)) == [], "the list is not asked for again during the commit"
    played.say("ready", committed(), None)
    (drop,) = [each for each in played.on(LeaveBehind()) if isinstance(each, Drop)]
    assert drop.replica == "slow" and drop.tells_abort
    error = played.machine.participants["slow"].error
    assert isinstance(error, SyncTimeout) and error.phase == "seal"
    assert played.asked(Seal) == ["ready", "slow"]


def test_a_replica_that_was_asked_to_commit_when_this_side_fails_is_of_an_unknown_version() -> None:
    """Another one serves the version, so the update is over; it counted as one that was not ready."""
    played = Played("a", "b").begin("a", "b")
    played.on(SealAll((), "digest"))
    for name in "ab":
        played.say(name, Sealed(done=True))
    played.on(CommitAll())
    played.say("a", committed(), None)
    actions = played.on(LeaveBehind())
    error = played.machine.participants["b"].error
    assert (
        isinstance(error, SyncTimeout)
        and error.phase == "commit"
        and "whether the update is installed" in error.message
    )
    assert Holds("b", "either") in actions and played.states() == {"a": "committed", "b": "failed"}


@pytest.mark.parametrize("lost", [PeerLost, SyncTimeout])
def test_a_hint_promises_the_old_version_before_the_commit_and_nothing_after_it(lost: Any) -> None:
    played = Played("a", "b", "c").begin("a", "b", "c")
    played.on(SealAll((), "digest"))
    played.say("a", lost("silent"))
    for name in "bc":
        played.say(name, Sealed(done=True))
    played.on(CommitAll())
    played.say("b", lost("silent"), worker=None)
    played.say("c", committed(), worker=None)
    hints = {name: one.error.hint for name, one in played.machine.participants.items() if one.error is not None}
    assert "serves the version that it had" in hints["a"]
    assert "the old version or the new one" in hints["b"]
