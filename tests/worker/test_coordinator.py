"""The coordinator: what it makes of answers that are missing, mixed up or not there at all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference_plugin.engines.actions import Ask, Publish, Refuse
from inference_plugin.engines.control import EngineControl
from inference_plugin.engines.coordinator import ReplicaCoordinator, open_coordinator
from inference_plugin.engines.operations import RankOperation, RankReply
from inference_plugin.engines.standing import Standing
from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire.errors import (
    ErrorInfo,
    PeerLost,
    ProtocolError,
    SyncTimeout,
    TornReplica,
    VersionConflict,
    WeightwireError,
)
from inference_plugin.wire.messages import (
    Begun,
    BoxDigest,
    Commit,
    Committed,
    Describe,
    Done,
    Pause,
    RankCommit,
    RankVerify,
    ReplicaCard,
    Resume,
    Sender,
    Stands,
    Verified,
    Verify,
    WorkerCard,
)
from tests.support.rig import eventually


class Control(EngineControl):
    """An engine whose thread is whoever submits, and whose ranks answer as the test says."""

    def __init__(self, answers: Callable[[RankOperation], list[RankReply]]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.escaped: list[Exception] = []
        self.refusal: str | None = None

    def submit(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception as error:  # noqa: BLE001 -- what would have ended an engine's loop
            self.escaped.append(error)

    def call_ranks(self, request: bytes) -> list[bytes]:
        operation = msgspec.msgpack.decode(request, type=RankOperation)
        self.asked.append(operation.name)
        return [msgspec.msgpack.encode(reply) for reply in self.answers(operation)]

    def pause(self, in_flight: Any) -> None:
        """It stands still."""

    def hold(self, asleep: frozenset[str]) -> None:
        """Nothing runs."""

    def resume(self) -> None:
        """Nothing was paused."""

    def installed(self, group: str, stamp: str, txn: str, in_flight: Any) -> None:
        """There is no cache."""

    def refuse(self, reason: str | None) -> None:
        self.asked.append("refuse" if reason is not None else "generate")
        self.refusal = reason


def coordinator_of(control: Control, workers: int) -> ReplicaCoordinator:
    replica = addresses.new_replica_id("plain")
    cards = [WorkerCard(replica, rank, rank, 0, 1, addresses.boot_id(), "", "cpu", 0) for rank in range(workers)]
    return open_coordinator(control, replica, cards, engine="plain", engine_version="0", model="m", tp=workers)


def committed(operation: RankOperation, ranks: int) -> list[RankReply]:
    done = [RankCommit(rank, 1, 0.0, False) for rank in range(ranks)]
    said = operation.name == "finish"
    return [RankReply(operation.nonce, r, commit=done[r] if said else None) for r in range(ranks)]


def commit(coordinator: ReplicaCoordinator, txn: str = "t") -> Committed:
    with Channel(coordinator.address) as asking:
        return asking.request(Commit("policy", txn, 1), Committed, timeout_s=60)


def test_a_commit_whose_answer_was_lost_is_answered_from_memory_and_asks_no_rank_again(directory: Path) -> None:
    """A rank that fails its check by then must not turn a commit into a failure."""
    control = Control(lambda operation: committed(operation, 2))
    coordinator = coordinator_of(control, 2)
    assert commit(coordinator) == commit(coordinator)
    assert control.asked == ["check", "install", "finish", "generate"]
    coordinator.close()


def test_a_commit_asks_all_ranks_in_order(directory: Path) -> None:
    control = Control(lambda operation: committed(operation, 2))
    coordinator = coordinator_of(control, 2)
    assert [rank.rank for rank in commit(coordinator).ranks] == [0, 1]
    assert control.asked == ["check", "install", "finish", "generate"]
    coordinator.close()
    coordinator.close()
    assert list(addresses.runtime_dir().iterdir()) == []


def test_an_engine_that_starts_warns_once_of_a_misspelt_variable(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_LEASES_S", "5")
    coordinator_of(Control(lambda _: []), 1).close()
    assert sum("WEIGHTWIRE_LEASES_S is set" in line for line in caplog.messages) == 1


def test_a_version_that_is_lost_in_each_step_for_the_same_reason_is_warned_of_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = coordinator_of(Control(lambda _: []), 1)
    with caplog.at_level(logging.INFO):
        for unknown in ({"policy": "it slept"}, {}, {"policy": "it slept"}, {}, {"policy": "a load"}):
            coordinator.lose_version(unknown)
    told = [(line.levelname, line.getMessage().split(": ")[1]) for line in caplog.records if "is unknown" in line.msg]
    assert told == [("WARNING", "it slept"), ("INFO", "it slept"), ("WARNING", "a load")]
    coordinator.close()


@pytest.mark.parametrize("answering", [0, 1])
def test_fewer_answers_than_ranks_are_no_success(directory: Path, answering: int) -> None:
    """`all()` of nothing is true: an executor that returns nothing must not look like one that agreed. It is not asked again."""
    control = Control(lambda operation: committed(operation, answering))
    coordinator = coordinator_of(control, 2)
    for txn in ("t", "another"):
        with pytest.raises(PeerLost, match=f"{answering} of 2 workers answered 'check'.*restart the engine"):
            commit(coordinator, txn)
    assert control.asked == ["check"]
    coordinator.close()


def test_another_calls_answer_is_no_answer(directory: Path) -> None:
    coordinator = coordinator_of(Control(lambda _: [RankReply("an older nonce", 0)]), 1)
    with pytest.raises(PeerLost, match="returned another call's answer to 'check'") as raised:
        commit(coordinator)
    assert raised.value.hint.startswith("restart the engine")
    coordinator.close()


def test_what_is_no_request_to_a_coordinator_is_refused_and_it_goes_on(directory: Path) -> None:
    coordinator = coordinator_of(Control(lambda operation: committed(operation, 1)), 1)
    with Channel(coordinator.address) as asking:
        with pytest.raises(ProtocolError, match="a coordinator takes no Begun"):
            asking.request(Begun(), Done, timeout_s=60)
        with pytest.raises(ProtocolError, match="a Describe takes no payload frame"):
            asking.request(Describe(), ReplicaCard, timeout_s=60, payload=b"x")
        assert asking.request(Describe(), ReplicaCard, timeout_s=60).address == coordinator.address
    coordinator.close()


def unwritable(coordinator: ReplicaCoordinator, kind: str) -> Path:
    """From now on the card can't be written, not even by root; removing the directory that is returned heals that."""
    path = addresses.runtime_dir() / f"{coordinator.card.replica}.{kind}"
    eventually(lambda: _is_replaced_by_a_directory(path), f"a directory in the place of {kind}")
    return path


def _is_replaced_by_a_directory(path: Path) -> bool:
    """False where the coordinator, which looks after its card, was first."""
    path.unlink(missing_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def failing(*steps: str) -> Callable[[RankOperation], list[RankReply]]:
    def answers(operation: RankOperation) -> list[RankReply]:
        if operation.name in steps:
            return [RankReply(operation.nonce, 0, error=ErrorInfo("WeightwireError", f"{operation.name} failed"))]
        return committed(operation, 1)

    return answers


@pytest.mark.parametrize("kind", ["card.tmp", "card"])
def test_a_torn_replica_refuses_before_anybody_is_told_and_whether_or_not_its_card_can_be_written(
    directory: Path, kind: str
) -> None:
    control = Control(failing("install", "undo"))
    coordinator = coordinator_of(control, 1)
    path = unwritable(coordinator, kind)
    with pytest.raises(TornReplica, match="install failed; and the roll-back failed: undo failed"):
        commit(coordinator)
    assert control.refusal == "group 'policy': undo failed" and control.escaped == []
    assert control.asked == ["check", "install", "undo", "refuse", "tear"]
    with Channel(coordinator.address) as asking:
        assert asking.request(Describe(), ReplicaCard, timeout_s=60).state == "torn"
    path.rmdir()
    eventually(lambda: [card.state for card in addresses.discover()] == ["torn"], "the card, written later")
    coordinator.close()


def test_ranks_that_cant_be_told_keep_a_torn_replica_from_nothing(directory: Path) -> None:
    def answers(operation: RankOperation) -> list[RankReply]:
        if operation.name in ("undo", "tear", "tear_all"):
            raise RuntimeError("no rank can be reached")
        return failing("install")(operation)

    control = Control(answers)
    coordinator = coordinator_of(control, 1)
    with pytest.raises(TornReplica, match="no rank can be reached"):
        commit(coordinator)
    assert control.refusal is not None and "no rank can be reached" in control.refusal and control.escaped == []
    coordinator.close()


def test_a_model_of_which_nothing_is_known_is_refused_before_the_ranks_and_the_card_are_told() -> None:
    steps = Standing().tear_model("the test says so")
    assert next(steps) == Refuse("the test says so")
    assert steps.send(None) == Ask(RankOperation("", "tear_all", reason="the test says so"))
    assert steps.throw(PeerLost("no rank can be reached")) == Publish()


def test_a_pause_and_its_end_go_on_without_a_card(directory: Path) -> None:
    control = Control(lambda operation: committed(operation, 1))
    coordinator = coordinator_of(control, 1)
    path = unwritable(coordinator, "card.tmp")
    sender = Sender("session")
    with Channel(coordinator.address) as asking:
        assert asking.request(Pause(sender, 600), Stands, timeout_s=60).state == "paused"
        assert asking.request(Resume("session"), Stands, timeout_s=60).state == "serving"
        assert asking.request(Pause(sender, 0.2), Stands, timeout_s=60).state == "paused"
        eventually(lambda: coordinator.machine.standing.held is None, "the end of the lease")
        assert asking.request(Describe(), ReplicaCard, timeout_s=60).state == "serving"
        assert asking.request(Pause(sender, 600), Stands, timeout_s=60).state == "paused"
    assert control.escaped == [] and [card.state for card in addresses.discover()] == ["serving"], "as it was before"
    path.rmdir()
    eventually(lambda: [card.state for card in addresses.discover()] == ["paused"], "the card, written later")
    coordinator.close()


def test_what_fails_in_a_command_is_answered_and_never_reaches_the_engine_s_loop(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Control(lambda operation: committed(operation, 1))
    coordinator = coordinator_of(control, 1)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("inference_plugin.engines.pauses.is_done", broken)
    for method in ("check_not_ended", "check_awake", "resume_unless_held"):
        monkeypatch.setattr(Standing, method, broken)
    with Channel(coordinator.address) as asking:
        for request in (Pause(Sender("s"), 60), Resume("s"), Verify("policy"), Commit("policy", "t", 1)):
            with pytest.raises(WeightwireError, match="a bug"):
                asking.request(request, Done, timeout_s=60)
        assert asking.request(Describe(), ReplicaCard, timeout_s=60).state == "serving"
    assert control.escaped == []
    coordinator.close()


class Later(Control):
    """Its thread comes to a step boundary when the test says so."""

    def __init__(self, answers: Callable[[RankOperation], list[RankReply]]) -> None:
        super().__init__(answers)
        self.commands: list[Callable[[], None]] = []

    def submit(self, command: Callable[[], None]) -> None:
        self.commands.append(command)

    def boundary(self) -> None:
        commands, self.commands = self.commands, []
        for command in commands:
            super().submit(command)


def test_commands_whose_time_is_over_are_dropped_before_the_engine_is_stopped_for_them(directory: Path) -> None:
    control = Later(lambda operation: committed(operation, 1))
    coordinator = coordinator_of(control, 1)
    requests = (
        Commit("policy", "t", 1, timeout_s=0.1),
        Pause(Sender("s"), 60, timeout_s=0.1),
        Resume("s", timeout_s=0.1),
        Verify("policy", timeout_s=0.1),
        Verify("other", timeout_s=0.1),
    )
    asking = [Channel(coordinator.address) for _ in requests]
    for channel, request in zip(asking, requests, strict=True):
        channel.send(request)
    for channel in asking:  # answered, although the engine's thread comes to no boundary
        with pytest.raises(SyncTimeout):
            channel.receive(Done, timeout_s=60)
        channel.close()
    assert control.commands
    control.boundary()
    assert control.asked == [] and control.escaped == []
    coordinator.close()


def portions(count: int, changes_at: list[int]) -> Callable[[RankOperation], list[RankReply]]:
    """One rank, of which a verification reads `count` portions; at each of `changes_at` (portions in all) the weights
    change."""
    read, at = 0, 0

    def answers(operation: RankOperation) -> list[RankReply]:
        nonlocal read, at
        if operation.name == "verify":
            at = 0
        at, read = at + 1, read + 1
        if read in changes_at:
            return [RankReply(operation.nonce, 0, left="changed")]
        box = BoxDigest("w", (at,), (1,), "float32", 7)
        return [RankReply(operation.nonce, 0, verify=RankVerify(0, 3, (box,)), left="more" if at < count else "")]

    return answers


def test_a_verification_is_read_in_portions_with_a_step_between_and_whole_again_after_a_commit(directory: Path) -> None:
    control = Control(portions(5, changes_at=[4]))
    coordinator = coordinator_of(control, 1)
    with Channel(coordinator.address) as asking:
        found = asking.request(Verify("policy"), Verified, timeout_s=60)
    assert [box.offsets for box in found.ranks[0].boxes] == [(1,), (2,), (3,), (4,), (5,)] and found.ranks[
        0
    ].version == 3
    assert control.asked == ["verify", *["read_on"] * 3, "verify", *["read_on"] * 4]
    coordinator.close()


def test_weights_that_change_again_and_again_can_t_be_verified(directory: Path) -> None:
    control = Control(portions(2, changes_at=[2, 4, 6, 8]))
    coordinator = coordinator_of(control, 1)
    with Channel(coordinator.address) as asking, pytest.raises(VersionConflict, match="changed 4 times while"):
        asking.request(Verify("policy"), Verified, timeout_s=60)
    assert control.asked == [*["verify", "read_on"] * 4, "stop_reading"]
    coordinator.close()


def test_a_verification_ends_at_its_deadline_and_a_repeated_one_is_read_once(directory: Path) -> None:
    control = Later(portions(10**9, changes_at=[]))
    coordinator = coordinator_of(control, 1)
    with Channel(coordinator.address) as asking:
        request = Verify("policy", timeout_s=2)
        asking.send(request)
        eventually(lambda: control.commands, "the first portion")
        asking.transmit("again")
        while "stop_reading" not in control.asked:
            control.boundary()
        with pytest.raises(SyncTimeout, match=r"after \d+ tensors the 2 s of the verification were over"):
            asking.receive(Verified, timeout_s=60)
    assert control.asked.count("verify") == 1 and control.asked[-1] == "stop_reading"
    coordinator.close()


class Slow(Control):
    def resume(self) -> None:
        time.sleep(0.2)


class Listening:
    """A third party's listener that hangs until the test lets it go."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.heard: list[tuple[str, int, float]] = []

    @hookimpl
    def weightwire_committed(self, group: str, version: int, stopped_s: float) -> None:
        assert self.may_go_on.wait(600)
        self.heard.append((group, version, stopped_s))
        raise RuntimeError("a third party's bug")


def test_the_stop_that_is_reported_ends_where_the_next_step_may_run_and_no_listener_prolongs_it(
    directory: Path,
) -> None:
    control = Slow(lambda operation: committed(operation, 1))
    coordinator = coordinator_of(control, 1)
    listening = Listening()
    plugin_manager().register(listening)
    try:
        stops = [commit(coordinator, txn).stopped_s for txn in ("t1", "t2")]
        assert min(stops) >= 0.2 and listening.heard == [], "answered, and the engine goes on, before anybody listens"
        listening.may_go_on.set()
        eventually(lambda: len(listening.heard) == 2, "the listener")
        assert listening.heard == [("policy", 1, stopped_s) for stopped_s in stops] and control.escaped == []
    finally:
        plugin_manager().unregister(listening)
        coordinator.close()


def test_nothing_that_is_told_after_a_commit_can_make_it_a_failure(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    control = Control(lambda operation: committed(operation, 1))
    coordinator = coordinator_of(control, 1)
    monkeypatch.setattr("inference_plugin.engines.recorder.CommitListeners.tell", broken)
    monkeypatch.setattr("inference_plugin.engines.coordinator.span_since", broken)
    monkeypatch.setattr("inference_plugin.engines.published_card.PublishedCard.show", broken)
    assert commit(coordinator).version == 1 and control.refusal is None and control.escaped == []
    coordinator.close()


class Deaf(Control):
    """Its requests in flight can't be ended, as long as the test says so."""

    deaf = True

    def refuse(self, reason: str | None) -> None:
        super().refuse(reason)
        if self.deaf and reason is not None:
            raise RuntimeError("the scheduler fails")

    def resume(self) -> None:
        self.asked.append("resume")


def test_an_engine_whose_requests_can_t_be_ended_takes_no_step_until_it_is_healed(directory: Path) -> None:
    control = Deaf(failing("install", "undo"))
    coordinator = coordinator_of(control, 1)
    with pytest.raises(TornReplica):
        commit(coordinator)
    assert "resume" not in control.asked and control.escaped == []
    control.answers = lambda operation: committed(operation, 1)
    commit(coordinator, "another")
    assert control.asked[-2:] == ["generate", "resume"] and control.refusal is None
    coordinator.close()
