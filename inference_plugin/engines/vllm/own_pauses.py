"""vLLM's own pauses beside ours: `pause_generation`, `resume_generation`, and what its `sleep` and `wake_up` do to the scheduler.

Two may want the engine to stand: whoever gave vLLM's command, and we. It steps once neither does. So while we hold the engine,
vLLM's pause and resume are noted, and take effect as we let go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from inference_plugin.wire.errors import VersionConflict

__all__ = ["OwnPauses"]


class OwnPauses:
    """Of one engine core, on its own thread. `submit` runs a command between two later steps."""

    def __init__(self, core: Any, submit: Callable[[Callable[[], None]], None]) -> None:
        self._core = core
        self._submit = submit
        self.wanted: Any = None
        """The scheduler's state as vLLM's own commands want it, while we hold the engine; else None."""
        self._is_ours = False
        self._answered_later: list[Future[None]] = []
        self._idle_later: list[Callable[[Any], None]] = []

    @property
    def held(self) -> bool:
        """Whether we hold the engine."""
        return self.wanted is not None

    def hold(self) -> None:
        """We are about to stop the scheduler, or to change how it stands."""
        if self.wanted is None:
            self.wanted = self._core.scheduler.pause_state

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Around a pause that we ask vLLM for."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def let_go(self) -> bool:
        """The scheduler stands or steps as vLLM's commands want it. False where we did not hold it."""
        if self.wanted is None:
            return False
        self._core.scheduler.set_pause_state(self.wanted)
        self.wanted = None
        answered, self._answered_later = self._answered_later, []
        for future in answered:
            future.set_result(None)
        if self._idle_later:
            self._core._idle_state_callbacks += self._idle_later
            self._idle_later = []
        return True

    def pause(self, pause: Callable[[], Any]) -> Any:
        """vLLM's own pause; returns what answers it."""
        from vllm.v1.core.sched.interface import PauseState

        core = self._core
        if self._is_ours:
            return pause()
        ours = core.scheduler.pause_state
        stopped = pause()
        if isinstance(stopped, Future):
            core._idle_state_callbacks.append(self._once_idle(core._idle_state_callbacks.pop()))
        if not self.held:
            return stopped
        self.wanted = core.scheduler.pause_state
        core.scheduler.set_pause_state(ours)
        has_work = getattr(core, "has_work", lambda: False)  # an in-process engine's caller, who steps it, can't wait
        if stopped is None and ours == PauseState.PAUSED_NEW and has_work():  # we wait for requests that go on
            stopped = Future()
            self._answered_later.append(stopped)
        return stopped

    def resume(self, resume: Callable[[], Any]) -> Any:
        """vLLM's own resume."""
        from vllm.v1.core.sched.interface import PauseState

        if not self.held:
            return resume()
        self.wanted = PauseState.UNPAUSED
        return None

    def check_may_release(self) -> None:
        """Before vLLM releases the memory of its KV cache, for which it asks that the engine is paused. Raises `VersionConflict`
        where only we hold it: it would step on without that memory as we let go."""
        from vllm.v1.core.sched.interface import PauseState

        if self.wanted == PauseState.UNPAUSED:
            raise VersionConflict(
                "a manager holds this replica, and no pause of vLLM's own would keep it from stepping without its KV cache",
                hint="pause it by vLLM's own pause before, or let the manager put it to sleep",
                side="coordinator",
            )

    def _once_idle(self, complete: Callable[[Any], None]) -> Callable[[Any], None]:
        """The end of a pause of vLLM's: where it waits for requests to end, not while they only stand because of us."""
        from vllm.v1.core.sched.interface import PauseState

        def idle(core: Any) -> None:
            if self.held and core.scheduler.running and self.wanted != PauseState.PAUSED_ALL:
                self._idle_later.append(idle)
            elif core.has_work():
                self._submit(lambda: core._idle_state_callbacks.append(idle))
            else:
                complete(core)

        return idle
