"""vLLM's own pauses beside ours, on the parts of an engine core that they touch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState

from inference_plugin.engines.vllm.core import CoreControl
from inference_plugin.engines.vllm.own_pauses import OwnPauses
from inference_plugin.wire.errors import CommitFailed
from inference_plugin.wire.messages import InFlight


class Core:
    """vLLM's `EngineCoreProc`, as far as pauses go: how many requests run, and the loop's idle callbacks."""

    def __init__(self) -> None:
        self.state = PauseState.UNPAUSED
        self.scheduler = SimpleNamespace(set_pause_state=self._set, running=0)
        self._idle_state_callbacks: list[Callable[[Any], None]] = []
        self.commands: list[Callable[[], None]] = []
        self.pauses = OwnPauses(self, self.commands.append)

    def _set(self, state: PauseState) -> None:
        self.state = self.scheduler.pause_state = state

    def has_work(self) -> bool:
        return self.scheduler.running > 0 and self.state != PauseState.PAUSED_ALL

    def user_waits(self) -> Future[None]:
        """`pause_scheduler(mode="wait")` of the user's."""
        answer: Future[None] = Future()

        def pause() -> Future[None]:
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._idle_state_callbacks.append(lambda _: answer.set_result(None))
            return answer

        result: Future[None] = self.pauses.pause(pause)
        return result

    def go_round(self) -> None:
        """Some passes of the loop, without a step."""
        for _ in range(3):
            commands, self.commands[:] = list(self.commands), []
            for command in commands:
                command()
            while not self.has_work() and self._idle_state_callbacks:
                self._idle_state_callbacks.pop()(self)


@pytest.fixture
def core() -> Core:
    core = Core()
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    return core


def test_a_pause_that_waits_for_requests_is_answered_once_they_have_ended_and_not_while_they_only_stand(
    core: Core,
) -> None:
    core.scheduler.running = 1
    answer = core.user_waits()
    core.pauses.hold()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    core.go_round()
    assert not answer.done(), "the request stands because of us, and has not ended"
    core.pauses.let_go()
    core.go_round()
    assert not answer.done() and core.state == PauseState.PAUSED_NEW
    core.scheduler.running = 0
    core.go_round()
    assert answer.done() and core.state == PauseState.PAUSED_NEW


def test_a_pause_given_while_we_hold_the_engine_waits_for_requests_after_we_let_go(core: Core) -> None:
    core.scheduler.running = 1
    core.pauses.hold()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    answer = core.user_waits()
    core.go_round()
    assert not answer.done() and core.state == PauseState.PAUSED_ALL
    core.pauses.let_go()
    core.go_round()
    assert not answer.done() and core.state == PauseState.PAUSED_NEW
    core.scheduler.running = 0
    core.go_round()
    assert answer.done()


def test_a_pause_that_stops_requests_which_we_let_end_is_answered_when_it_is_in_force(core: Core) -> None:
    core.scheduler.running = 1
    core.pauses.hold()
    core.scheduler.set_pause_state(PauseState.PAUSED_NEW)  # we wait for requests to end
    answer = core.pauses.pause(lambda: core.scheduler.set_pause_state(PauseState.PAUSED_ALL))
    assert isinstance(answer, Future) and not answer.done() and core.state == PauseState.PAUSED_NEW
    core.pauses.let_go()
    assert answer.done() and core.state == PauseState.PAUSED_ALL


@pytest.mark.parametrize("policy", ["recompute", "drain"])
def test_a_cache_that_a_session_keeps_from_being_emptied_fails_the_update_with_what_to_do(
    core: Any, policy: InFlight
) -> None:
    def reset_prefix_cache(**_: bool) -> bool:
        raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")

    core.batch_queue, core.reset_prefix_cache = [], reset_prefix_cache
    core.scheduler.has_unfinished_requests = lambda: False
    with pytest.raises(CommitFailed, match=r"Failed to reset KV cache.*streaming input.*'keep'"):
        CoreControl(core).pause(policy)


def test_an_update_that_gave_up_waiting_for_requests_empties_no_cache_of_those_that_a_later_one_keeps(
    core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[Any] = []

    def pause_scheduler(mode: str, clear_cache: bool) -> Future[None] | None:
        stands: Future[None] = Future()
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        core._idle_state_callbacks.append(lambda _: stands.set_result(None))
        return stands

    core.pause_scheduler, core.input_queue = pause_scheduler, SimpleNamespace(put_nowait=lambda _: None)
    control = CoreControl(core)
    control.in_process = False
    monkeypatch.setattr(control.caches, "reset", lambda: emptied.append(core.state))
    core.scheduler.running = 1
    control.pause("drain")
    control.resume()
    kept = control.pause("keep")
    core.go_round()
    assert kept is not None and kept.done() and emptied == []
    control.resume()
    control.pause("drain")
    core.scheduler.running = 0
    core.go_round()
    assert emptied == [PauseState.PAUSED_NEW]
