"""The coordinator's decisions alone: no socket, no thread, no clock; one list of events in, one list of actions out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_plugin.engines.actions import (
    AnnounceCommit,
    Ask,
    EngineAction,
    Finish,
    Hold,
    Publish,
    Refuse,
    ResumeSteps,
    StopSteps,
    TellListeners,
)
from inference_plugin.engines.events import (
    AllRead,
    Asked,
    Command,
    Event,
    ManagerEnded,
    NotSubmitted,
    Overwritten,
    Perform,
    Performed,
    PublishCard,
    Reply,
    Submit,
    TellFailure,
    Turn,
    VersionLost,
)
from inference_plugin.engines.machine import ReplicaMachine
from inference_plugin.engines.operations import RankReply
from inference_plugin.wire.errors import ErrorInfo, PeerLost
from inference_plugin.wire.messages import (
    Body,
    Commit,
    Committed,
    Done,
    Failed,
    MemoryTag,
    Pause,
    RankCommit,
    RenewPause,
    Resume,
    Sender,
    Stands,
)

HERE = "this host"
Answer = Callable[[EngineAction], Any]


class Simulated:
    """A machine, the time, and an engine that answers each action as the test says; "wait" completes it later."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.machine = ReplicaMachine({"replica": "r"}, HERE)
        self.now_s = 0.0
        self.answer = answer or agreeing
        self.due: list[Command] = []
        self.waiting: Perform | None = None
        self.performed: list[EngineAction] = []
        self.answered: dict[str, Body] = {}
        self.told: list[ErrorInfo] = []
        self.published = 0

    def on(self, event: Event) -> None:
        following: Event | None = event
        while following is not None:
            actions, following = self.machine.on(following, self.now_s), None
            for action in actions:
                if isinstance(action, Reply):
                    assert action.asker not in self.answered, "answered twice"
                    self.answered[action.asker] = action.body
                elif isinstance(action, Submit):
                    self.due.append(action.command)
                elif isinstance(action, PublishCard):
                    self.published += 1
                elif isinstance(action, TellFailure):
                    self.told.append(action.error)
                else:
                    following = self._perform(action)

    def _perform(self, perform: Perform) -> Event | None:
        self.performed.append(perform.action)
        try:
            value = self.answer(perform.action)
        except Exception as error:  # noqa: BLE001 -- the engine's
            return Performed(perform.command, perform.action, error=error)
        if value == "wait":
            self.waiting = perform
            return None
        return Performed(perform.command, perform.action, value)

    def ask(self, asker: str, body: Body) -> None:
        self.on(Asked(asker, body))

    def boundary(self) -> None:
        """The engine's thread takes the turns that it was asked for."""
        due, self.due = self.due, []
        for command in due:
            self.on(Turn(command))

    def at(self, now_s: float, event: Event | None = None) -> None:
        self.now_s = now_s
        self.on(event or AllRead())

    def kinds(self) -> list[str]:
        """What was performed since the last look: operations by name."""
        found = [a.operation.name if isinstance(a, Ask | Finish) else type(a).__name__ for a in self.performed]
        self.performed = []
        return [name for name in found if name not in ("AnnounceCommit", "NoteSpan", "TellListeners")]


def agreeing(action: EngineAction) -> Any:
    """Two ranks that do all they are asked."""
    if isinstance(action, Ask | Finish):
        finished = isinstance(action, Finish)
        done = [RankCommit(rank, action.operation.version, 0.0, False) if finished else None for rank in range(2)]
        return [RankReply("", rank, commit=done[rank]) for rank in range(2)]
    return None


def failing(*names: str) -> Answer:
    """Rank 1 fails in these operations."""

    def answer(action: EngineAction) -> Any:
        replies = agreeing(action)
        if isinstance(action, Ask | Finish) and action.operation.name in names:
            text = f"{action.operation.name} failed"
            return [replies[0], RankReply("", 1, error=ErrorInfo("WeightwireError", text, rank=1))]
        return replies

    return answer


def draining(action: EngineAction) -> Any:
    return "wait" if action == StopSteps("drain") else agreeing(action)


def error_of(body: Body) -> ErrorInfo:
    assert isinstance(body, Failed)
    return body.error


COMMIT = Commit("policy", "t", 1)


@pytest.mark.parametrize(
    ("failures", "kind", "steps"),
    [
        ((), "", ["check", "StopSteps", "install", "finish", "Refuse", "Publish", "ResumeSteps"]),
        (("check",), "WeightwireError", ["check", "release"]),
        (("install",), "CommitFailed", ["check", "StopSteps", "install", "undo", "ResumeSteps"]),
        (
            ("install", "undo"),
            "TornReplica",
            ["check", "StopSteps", "install", "undo", "Refuse", "Publish", "tear", "ResumeSteps"],
        ),
        (
            ("finish",),
            "WeightwireError",
            ["check", "StopSteps", "install", "finish", "Refuse", "Publish", "tear", "ResumeSteps"],
        ),
    ],
)
def test_a_commit_is_finished_undone_or_torn_and_a_torn_replica_refuses_before_anything_else(
    failures: tuple[str, ...], kind: str, steps: list[str]
) -> None:
    one = Simulated(failing(*failures))
    one.ask("a", COMMIT)
    one.boundary()
    assert one.kinds() == steps
    if kind:
        assert error_of(one.answered["a"]).kind == kind
    else:
        assert isinstance(one.answered["a"], Committed)
    assert (one.machine.standing.refusal is not None) == ("tear" in steps)


def test_a_rank_that_is_lost_while_it_installs_tears_and_an_engine_that_cannot_refuse_stands() -> None:
    def answer(action: EngineAction) -> Any:
        if isinstance(action, Ask) and action.operation.name in ("install", "tear"):
            raise PeerLost("rank 1 is gone")
        if action == Refuse("group 'policy': rank 1 is gone"):
            raise RuntimeError("the scheduler fails")
        return agreeing(action)

    one = Simulated(answer)
    one.ask("a", COMMIT)
    one.boundary()
    assert error_of(one.answered["a"]).kind == "PeerLost"
    assert one.kinds() == ["check", "StopSteps", "install", "Refuse", "Publish", "tear"], "it does not resume"


@pytest.mark.parametrize("failures", [("finish",), ("install", "undo")])
def test_a_commit_that_tore_is_answered_from_memory_until_another_one_has_healed_the_group(
    failures: tuple[str, ...],
) -> None:
    """Its answer may be lost while the manager asks again. With a rank lost, no turn would come for a second attempt."""
    one = Simulated(failing(*failures))
    one.ask("a", COMMIT)
    one.boundary()
    one.kinds()
    one.ask("a again", COMMIT)
    assert one.answered["a again"] == one.answered["a"] and isinstance(one.answered["a"], Failed)
    one.boundary()
    assert one.kinds() == []
    one.answer = agreeing
    one.ask("b", Commit("policy", "t2", 2))
    one.boundary()
    assert isinstance(one.answered["b"], Committed) and one.machine.standing.refusal is None
    one.ask("b again", Commit("policy", "t2", 2))
    assert one.answered["b again"] == one.answered["b"]


def test_a_commit_that_did_not_tear_is_tried_again_also_where_its_group_was_torn_before() -> None:
    one = Simulated(failing("finish"))
    one.ask("a", COMMIT)
    one.boundary()
    one.answer = failing("check")
    again = Commit("policy", "t2", 2)
    one.ask("b", again)
    one.boundary()
    assert isinstance(one.answered["b"], Failed) and one.machine.standing.refusal is not None
    one.answer = agreeing
    one.ask("b again", again)
    one.boundary()
    assert isinstance(one.answered["b again"], Committed) and one.machine.standing.refusal is None


def test_a_commit_that_fails_is_told_once_whatever_phase_its_error_names_and_a_failed_pause_is_not() -> None:
    def losing(action: EngineAction) -> Any:
        if isinstance(action, Finish):
            raise PeerLost("rank 1 is gone", phase="install", rank=1)
        return agreeing(action)

    one = Simulated(losing)
    for asker in ("a", "a again"):
        one.ask(asker, COMMIT)
        one.boundary()
    assert (error_of(one.answered["a"]).kind, error_of(one.answered["a"]).phase) == ("PeerLost", "install")
    assert one.told == [error_of(one.answered["a"])] == [error_of(one.answered["a again"])]
    one.ask("late", Commit("critic", "t", 1, timeout_s=10))
    one.ask("pause", Pause(Sender("s", 1, HERE), 600, timeout_s=10))
    one.at(10)
    assert error_of(one.answered["pause"]).kind == "SyncTimeout"
    assert one.told[1:] == [error_of(one.answered["late"])]


def test_commits_and_pauses_take_turns_in_order_and_a_repeated_request_answers_who_asked_last() -> None:
    one = Simulated(draining)
    one.ask("a", Pause(Sender("s", 1, HERE), 600, in_flight="drain"))
    one.boundary()
    one.ask("b", COMMIT)
    one.ask("b again", COMMIT)
    one.boundary()
    assert one.kinds() == ["StopSteps"], "the commit waits for its turn"
    assert one.waiting is not None
    one.on(Performed(one.waiting.command, one.waiting.action, True))
    assert one.answered == {"a": Stands("paused")}
    one.boundary()
    assert one.kinds() == ["Hold", "Publish", "check", "StopSteps", "install", "finish", "Refuse", "Publish"]
    assert isinstance(one.answered["b again"], Committed) and "b" not in one.answered


def test_a_commit_that_comes_during_another_of_its_group_may_come_again_later() -> None:
    """The manager catches a replica up that has just woken in its commit. A `VersionConflict` would end that for good."""
    one = Simulated(draining)
    one.ask("a", Commit("policy", "t", 1, in_flight="drain"))
    one.boundary()
    one.ask("b", Commit("policy", "t2", 2))
    refused = error_of(one.answered["b"])
    assert refused.kind == "SyncTimeout" and "still under way here" in refused.message
    assert one.waiting is not None
    one.on(Performed(one.waiting.command, one.waiting.action, True))
    assert isinstance(one.answered["a"], Committed)
    one.ask("b again", Commit("policy", "t2", 2))
    one.boundary()
    one.on(Performed(one.waiting.command, one.waiting.action, True))
    assert isinstance(one.answered["b again"], Committed)


def test_a_repeated_commit_is_answered_once_it_is_over_so_that_the_next_one_finds_it_over() -> None:
    """Its result is known before its listeners are told: answered then, the trainer's next commit came during this one."""
    one = Simulated(lambda action: "wait" if isinstance(action, TellListeners) else agreeing(action))
    one.ask("a", COMMIT)
    one.boundary()
    one.ask("a again", COMMIT)
    assert one.answered == {}
    assert one.waiting is not None
    one.on(Performed(one.waiting.command, one.waiting.action))
    assert isinstance(one.answered["a again"], Committed)
    one.ask("a once more", COMMIT)
    assert one.answered["a once more"] == one.answered["a again"]
    one.ask("b", Commit("policy", "t2", 2))
    assert "b" not in one.answered


def test_late_commands_are_answered_once_and_the_engine_is_not_stopped_for_them() -> None:
    one = Simulated(draining)
    one.ask("a", Commit("policy", "t", 1, in_flight="drain", timeout_s=2))
    one.ask("b", Pause(Sender("s", 1, HERE), 600, timeout_s=1))
    one.boundary()
    one.at(1.0)
    assert error_of(one.answered["b"]).kind == "SyncTimeout" and "a" not in one.answered
    one.at(2.0)
    assert "a" not in one.answered, "its requests run: only the engine's thread can let them go on"
    one.boundary()
    assert error_of(one.answered["a"]).kind == "SyncTimeout"
    assert one.kinds() == ["check", "StopSteps", "ResumeSteps", "release"]
    assert one.waiting is not None
    one.on(Performed(one.waiting.command, one.waiting.action, True))  # the requests ended all the same
    assert one.kinds() == [] and one.machine.wakes_at_s() == float("inf")
    one.ask("c", Commit("policy", "u", 2, timeout_s=1))
    one.now_s = 4.0  # nothing said so before the engine's thread came
    one.boundary()
    assert error_of(one.answered["c"]).kind == "SyncTimeout" and one.kinds() == []


def paused(tags: frozenset[MemoryTag] = frozenset(), level: int = 0) -> Simulated:
    one = Simulated()
    one.ask("a", Pause(Sender("s", 1, HERE), 10, level=level))  # type: ignore[arg-type]
    one.boundary()
    assert one.machine.standing.held is not None and one.machine.wakes_at_s() == 10
    one.kinds()
    return one


def test_a_pause_ends_with_its_lease_once_and_its_manager_is_told() -> None:
    one = paused()
    one.at(9.0)
    one.ask("renew", RenewPause("s"))
    assert one.answered["renew"] == Done() and one.machine.wakes_at_s() == 19
    one.at(19.0, VersionLost({}))
    assert one.due == [], "a message that renews it may wait to be read"
    one.on(AllRead())
    one.on(AllRead())
    assert len(one.due) == 1
    one.boundary()
    assert one.kinds() == ["ResumeSteps", "Publish"] and one.machine.standing.held is None
    one.ask("resume", Resume("s"))
    one.boundary()
    assert "was silent for 10 s" in error_of(one.answered["resume"]).message


def test_a_sleeping_replica_outlives_its_lease_until_its_manager_s_process_ends() -> None:
    one = paused(level=1)
    held = one.machine.standing.held
    assert held is not None
    one.at(10.0, AllRead())
    one.boundary()
    assert held.orphaned and one.kinds() == ["Publish"]
    one.on(ManagerEnded(held))
    one.boundary()
    assert one.kinds() == ["wake", "Hold", "Publish", "ResumeSteps", "Publish"] and one.machine.standing.held is None


def test_a_replica_that_can_t_be_woken_when_its_manager_ends_may_be_woken_by_another_one() -> None:
    one = paused(level=1)
    held = one.machine.standing.held
    assert held is not None
    one.answer = failing("wake")
    one.on(ManagerEnded(held))
    one.boundary()
    state, detail = one.machine.standing.described()
    assert (
        state == "asleep"
        and "wake failed" in detail
        and detail.endswith("the manager's process ended, and it could not be woken")
    )
    assert one.machine.wakes_at_s() == float("inf")
    one.answer = agreeing
    one.kinds()
    one.ask("resume", Resume("t"))
    one.boundary()
    answer = one.answered["resume"]
    assert isinstance(answer, Stands) and answer.state == "torn" and one.machine.standing.held is None
    assert one.kinds() == ["wake", "Hold", "Publish", "Refuse", "ResumeSteps", "Publish"]


def test_weights_about_to_be_written_over_tear_the_replica_at_once_whatever_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Simulated(draining)
    one.ask("a", Commit("policy", "t", 1, in_flight="drain"))
    one.boundary()
    assert one.kinds() == ["check", "StopSteps"]
    one.on(Overwritten("engine", "they are reset"))
    assert one.performed[0] == Refuse("they are reset") and one.kinds() == ["Refuse", "tear_all", "Publish"]
    assert one.answered["engine"] == Done() and one.machine.standing.described()[0] == "torn"
    assert caplog.messages == ["weightwire: they are reset: generation is refused until a full update"]


def test_weights_are_not_written_over_where_not_all_of_the_engine_could_be_told_to_refuse() -> None:
    def answer(action: EngineAction) -> Any:
        if isinstance(action, Refuse):
            raise PeerLost("a rank is silent")
        return agreeing(action)

    one = Simulated(answer)
    one.on(Overwritten("engine", "they are reset"))
    assert error_of(one.answered["engine"]).kind == "TornReplica" and one.machine.standing.must_stand


def test_a_paused_replica_whose_weights_were_written_over_refuses_once_it_goes_on() -> None:
    one = paused()
    one.on(Overwritten("engine", "they are reset"))
    assert one.kinds() == ["tear_all", "Publish"], "no step runs meanwhile"
    one.ask("resume", Resume("s"))
    one.boundary()
    assert one.kinds() == ["Refuse", "ResumeSteps", "Publish"]


def test_an_engine_that_cannot_be_asked_for_a_turn_is_asked_again_until_the_deadline() -> None:
    one = Simulated()
    one.ask("a", Commit("policy", "t", 1, timeout_s=1))
    (command,) = one.due
    one.on(NotSubmitted(command))
    assert one.machine.wakes_at_s() == pytest.approx(0.1)
    one.at(0.1)
    assert one.due == [command, command]
    one.on(NotSubmitted(command))
    one.at(1.0)
    assert error_of(one.answered["a"]).kind == "SyncTimeout" and one.kinds() == []


def test_a_plan_says_all_that_a_rank_has_to_know() -> None:
    one = paused()
    one.machine.standing.torn["critic"] = "an older failure"
    one.ask("b", Commit("policy", "t", 1, in_flight="recompute"))
    one.boundary()
    (announced,) = [action for action in one.performed if isinstance(action, AnnounceCommit)]
    plan = announced.plan
    assert (plan.group, plan.txn, plan.version, plan.in_flight, plan.held) == ("policy", "t", 1, "recompute", True)
    assert plan.torn == {"critic": "an older failure"} and plan.forbidden is None
    assert Hold(frozenset()) not in one.performed and ResumeSteps() not in one.performed
    assert Publish() in one.performed
