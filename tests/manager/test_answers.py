"""What the caller of an operation is answered: nothing after the commit changes it, it comes by the deadline, and calls from the
manager's own callbacks and listeners answer or say at once what to do instead."""

from __future__ import annotations

import errno
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.net.addresses import runtime_dir
from inference_plugin.net.records import last_report
from inference_plugin.transports.shm import ShmSender
from inference_plugin.transports.zone import ZoneSender
from inference_plugin.wire.errors import CommitFailed, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Committed, Outcome
from inference_plugin.wire.reports import UpdateReport
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source, waiting
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import LONG_S, Rig, eventually
from trainer_adapters import LocalSlice, PendingUpdate, manager
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.update import handle as pending
from trainer_adapters.update import leader, machine_io, reporting, thread
from trainer_adapters.update.machine_io import Answered, Event
from trainer_adapters.update.trainer_ranks import TrainerRanks
from trainer_adapters.update.transaction import Transaction


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# --- what comes after the commit -----------------------------------------------------------------------------------------


def a_directory_in_the_reports_place(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    (runtime_dir() / "policy.report").unlink()
    (runtime_dir() / "policy.report").mkdir()


def files_that_may_not_grow(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = leader.save_report

    def limited(report: UpdateReport) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        try:
            save(report)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    patch.setattr(leader, "save_report", limited)


def bytes_that_cant_be_kept(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    for sender in (ShmSender, ZoneSender):
        patch.setattr(sender, "kept", no_space)


def bookkeeping_that_fails(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "settle", no_space)


def ranks_that_cant_be_told(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    tell = TrainerRanks.tell_all
    patch.setattr(
        TrainerRanks, "tell_all", lambda crew, body: no_space() if isinstance(body, Outcome) else tell(crew, body)
    )


def a_trace_that_cant_be_saved(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manager, "save", no_space)


def a_listener_that_wants_to_exit(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    def leave(**_: Any) -> None:
        raise SystemExit(3)

    one.on("committed", leave)


def an_answer_whose_details_cant_be_read(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    take = Transaction.do

    def taking(transaction: Transaction, event: Event) -> None:
        take(transaction, event)
        if isinstance(event, Answered) and isinstance(event.answer, Committed):
            raise KeyError("a bug of ours")

    patch.setattr(Transaction, "do", taking)


def an_answer_whose_costs_cant_be_reported(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reporting, "costs", no_space)


def a_plugin_that_raises_before_the_report(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leader, "phase_begins", lambda *arguments: no_space() if arguments[3] == "report" else None)


def a_plugin_that_wants_to_exit_before_the_report(one: SyncManager, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leader, "phase_begins", lambda *arguments: sys.exit(3) if arguments[3] == "report" else None)


@pytest.mark.parametrize(
    "trouble",
    [
        a_directory_in_the_reports_place,
        files_that_may_not_grow,
        bytes_that_cant_be_kept,
        bookkeeping_that_fails,
        ranks_that_cant_be_told,
        a_trace_that_cant_be_saved,
        a_listener_that_wants_to_exit,
        an_answer_whose_details_cant_be_read,
        an_answer_whose_costs_cant_be_reported,
        a_plugin_that_raises_before_the_report,
        a_plugin_that_wants_to_exit_before_the_report,
    ],
)
def test_whatever_fails_after_the_commit_the_update_is_reported_committed(
    start: Start, trouble: Callable[[SyncManager, pytest.MonkeyPatch], None], caplog: pytest.LogCaptureFixture
) -> None:
    rig = start(tp=2)
    told: list[str] = []
    with SyncManager(timeout_s=60) as one:
        one.update(source(1), 1)
        one.on("failed", lambda **_: told.append("failed"))
        one.on("committed", lambda **_: told.append("committed"))
        with pytest.MonkeyPatch.context() as patch:
            trouble(one, patch)
            caplog.clear()
            report = one.update(source(2), 2)
        assert [(r.replica, r.status, r.version) for r in report.replicas] == [(rig.replica, "committed", 2)]
        assert holds(rig, 2) and told == ["committed"]
        if trouble in (a_directory_in_the_reports_place, files_that_may_not_grow):
            (line,) = (
                text for text in caplog.text.splitlines() if "can't be written into the runtime directory" in text
            )
            assert "the report of policy version 2" in line and "Traceback" not in caplog.text
        else:
            assert [record for record in caplog.records if record.exc_info], "it is in the log, with its trace"
        assert one.update(source(3), 3).failed == ()
        assert holds(rig, 3)


@pytest.mark.parametrize("trouble", [None, a_directory_in_the_reports_place, bookkeeping_that_fails])
def test_an_update_that_no_replica_took_is_never_reported_committed(start: Start, trouble: Any) -> None:
    rigs = [start(), start()]
    told: list[str] = []
    with SyncManager(timeout_s=60) as one:
        one.update(source(1), 1)
        one.on("failed", lambda **_: told.append("failed"))
        one.on("committed", lambda **_: told.append("committed"))
        for rig in rigs:
            rig.ask("fault", rank=0, step="install")
        with pytest.MonkeyPatch.context() as patch:
            if trouble is not None:
                trouble(one, patch)
            with pytest.raises(CommitFailed, match="undone on all ranks"):
                one.update(source(2), 2)
        assert told == ["failed"] and all(holds(rig, 1) for rig in rigs)


# --- when the answer comes -----------------------------------------------------------------------------------------------


class Hanging(ShardSource):
    """A source that is not read to its end before the test says so."""

    def __init__(self, seed: int, go_on: threading.Event) -> None:
        super().__init__(checkpoint(seed))
        self._go_on = go_on

    def slices(self) -> Iterator[LocalSlice]:
        self._go_on.wait(LONG_S)
        yield from super().slices()


def test_an_operation_has_one_deadline_from_its_call_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest wait: the one behind an operation that takes all of its own time, and the grace of an installation."""
    monkeypatch.setattr(machine_io, "INSTALLING_S", 0.5)
    rig = start()
    timeout_s = 8.0
    with SyncManager(timeout_s=timeout_s) as one:
        rig.ask("hold")
        began_s = time.monotonic()
        under_way = [one.update_async(source(version), version) for version in (1, 2, 3)]
        errors = [update.exception(LONG_S) for update in under_way]
        waited_s = time.monotonic() - began_s
        assert waited_s < 3 * timeout_s, f"the last one took {waited_s:.1f} s"
        assert all(isinstance(error, SyncTimeout) for error in errors), errors
        rig.ask("go on")
        eventually(lambda: waiting(rig) == 0, "the loop going on")
        one.settings.timeout_s = 60
        assert one.update(source(4), 4).failed == () and holds(rig, 4)


def test_a_source_that_hangs_holds_its_caller_no_longer_than_the_deadline(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = start()
    monkeypatch.setattr(pending, "GRACE_S", 0.5)
    go_on = threading.Event()
    with SyncManager(timeout_s=1) as one:
        try:
            for call in (lambda: one.update(Hanging(1, go_on), 1), one.pause, lambda: one.verify(source(1))):
                with pytest.raises(SyncTimeout):
                    call()
            assert one.versions() == {rig.replica: None}, "who only asks doesn't stand in line"
        finally:
            go_on.set()


@pytest.mark.parametrize("what", ["a listener", "the disk of the reports"])
def test_a_listener_that_hangs_after_the_commit_does_not_make_it_a_failure(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rig = start()
    monkeypatch.setattr(pending, "GRACE_S", 0.5)
    go_on = threading.Event()
    with SyncManager(timeout_s=10) as one:
        if what == "a listener":
            remove = one.on("committed", lambda **_: go_on.wait(LONG_S))
        else:
            remove = lambda: None  # noqa: E731
            monkeypatch.setattr(leader, "save_report", lambda _: go_on.wait(LONG_S))
        try:
            assert one.update(source(1), 1).replicas[0].status == "committed"
        finally:
            go_on.set()
            remove()
    assert holds(rig, 1)


# --- calls from inside ---------------------------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the error's type."""
    try:
        return call()
    except WeightwireError as error:
        return type(error) if error.hint else error


def everything(one: SyncManager, rig: Rig, version: int) -> dict[str, Any]:
    """The calls of the manager, from wherever this is called."""
    return {
        "update": outcome(lambda: one.update(source(version), version)),
        "verify": outcome(lambda: one.verify(source(version))),
        "versions": outcome(one.versions),
        "replicas": outcome(lambda: [status.replica for status in one.replicas()]),
        "discover": outcome(lambda: [card.replica for card in one.discover()]),
        "wait_for_replicas": outcome(lambda: len(one.wait_for_replicas(1, timeout_s=LONG_S))),
        "pause": outcome(lambda: [r.state for r in one.pause().replicas]),
        "resume": outcome(lambda: [r.state for r in one.resume().replicas]),
    }


@pytest.mark.parametrize("where", ["callback", "staged", "committed", "failed", "source"])
def test_calls_from_the_managers_own_thread_answer_or_say_what_to_do(start: Start, where: str) -> None:
    rig = start()
    seen: list[dict[str, Any]] = []
    queued: list[PendingUpdate] = []
    with SyncManager(timeout_s=60) as one:
        one.update(source(1), 1)

        def call(*_: Any, **__: Any) -> None:
            remove()
            queued.append(one.update_async(source(9), 9))
            seen.append(everything(one, rig, 5))
            seen[-1]["result"] = outcome(queued[0].result)
            seen[-1]["wait_released"] = outcome(queued[0].wait_released)
            seen[-1]["exception"] = outcome(queued[0].exception)

        class Calling(ShardSource):
            def slices(self) -> Iterator[LocalSlice]:
                call()
                yield from super().slices()

        remove: Callable[[], None] = threading.Event().set  # harmless
        if where in ("staged", "committed", "failed"):
            remove = one.on(where, call)  # type: ignore[arg-type]
        weights = Calling(checkpoint(2)) if where == "source" else source(2)
        version = 0 if where == "failed" else 2
        first = one.update_async(weights, version, call if where == "callback" else None)
        concluded = first.exception(LONG_S)
        assert (concluded is None) == (where != "failed")
        eventually(lambda: queued, "the calls")
        assert queued[0].result(LONG_S).version == 9
    served = {"staged": 1, "source": 1, "failed": 1}.get(where, 2)
    assert seen == [
        {
            "update": ProtocolError,
            "verify": ProtocolError,
            "versions": {rig.replica: served},
            "replicas": [rig.replica],
            "discover": [rig.replica],
            "wait_for_replicas": 1,
            "pause": ["paused"],
            "resume": ["serving"],
            "result": ProtocolError,
            "wait_released": ProtocolError,
            "exception": ProtocolError,
        }
    ]
    assert holds(rig, 9)


def test_a_listener_of_replicas_may_update_and_pause(start: Start) -> None:
    """It is called in a thread that no operation waits for."""
    start()
    done: list[UpdateReport] = []
    with SyncManager(timeout_s=60) as one:
        one.update(source(1), 1)

        def joined(card: Any, **_: Any) -> None:
            with one.paused():
                done.append(one.update(source(2), 2))

        one.on("replica_joined", joined)
        second = start()
        eventually(lambda: done, "the listener's update")
        eventually(
            lambda: {s.replica: s.version for s in one.replicas()}.get(second.replica) == 2, "the newcomer's version"
        )


@pytest.mark.parametrize("where", ["callback", "staged", "committed", "replica_joined", "source"])
def test_a_manager_that_is_closed_from_inside_is_closed_after_the_operation_under_way(
    start: Start, directory: Path, where: str
) -> None:
    rig = start()
    one = SyncManager(timeout_s=60)
    closed = threading.Event()

    def close(*_: Any, **__: Any) -> None:
        one.close()
        closed.set()

    class Closing(ShardSource):
        def slices(self) -> Iterator[LocalSlice]:
            close()
            yield from super().slices()

    if where in ("staged", "committed", "replica_joined"):
        one.on(where, close)  # type: ignore[arg-type]
    weights = Closing(checkpoint(1)) if where == "source" else source(1)
    update = one.update_async(weights, 1, close if where == "callback" else None)
    assert update.result(LONG_S).failed == () and holds(rig, 1)
    assert closed.wait(LONG_S)
    for call in (lambda: one.update(source(2), 2), one.pause, lambda: one.verify(source(1))):
        with pytest.raises(CommitFailed, match="the manager is closed"):
            call()
    one.close()  # and from outside: waits until it is
    assert not any(thread.name.startswith("weightwire-manager") for thread in threading.enumerate())
    assert last_report("policy") == update.result()


def test_a_group_is_not_closed_under_the_update_that_uses_it(start: Start) -> None:
    rig = start()
    seen: list[Any] = []
    with SyncManager(timeout_s=60) as one:
        remove = one.on("staged", lambda **_: seen.append(outcome(one.close_group)))
        assert one.update(source(1), 1).failed == ()
        remove()
        one.update_async(source(2), 2, lambda _: seen.append(outcome(one.close_group))).result(LONG_S)
        eventually(lambda: len(seen) == 2, "both calls")
        assert seen == [ProtocolError, None]
        assert one.update(source(1), 1).replicas[0].status == "committed", "the group is a new one"
    assert holds(rig, 1)


def test_a_call_that_ctrl_c_ends_before_its_turn_is_never_made(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would resume what a forgotten `pause` pauses."""
    rig = start()
    rig.ask("hold")
    with SyncManager(timeout_s=60) as manager:
        manager.update_async(source(1), 1)
        eventually(lambda: waiting(rig) == 1, "a commit that waits for its step")
        with monkeypatch.context() as patch:
            patch.setattr(thread, "wait_for", ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                manager.pause()
        rig.ask("go on")
    assert "hold" not in rig.ask("state")["log"] and holds(rig, 1)


def ctrl_c(*_: object) -> bool:
    raise KeyboardInterrupt
