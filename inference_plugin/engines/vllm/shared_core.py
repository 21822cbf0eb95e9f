"""One of several engine cores that share experts: the operations on its own scheduler and its own ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from inference_plugin.engines.vllm.core import CoreControl
from inference_plugin.engines.vllm.step_gate import StepGate
from inference_plugin.wire.errors import ErrorInfo, PeerLost, WeightwireError
from inference_plugin.wire.messages import InFlight, MemoryTag

__all__ = ["CoreOrder", "CoreReply", "SharedCore"]

logger = logging.getLogger("vllm.weightwire")


class CoreOrder(msgspec.Struct, frozen=True):
    """What the first core asks of every core. "halt" begins a turn, "allow" says after how many `steps` all stand (None: the turn
    is off), "end" ends it. The others are done in between, while all of them stand."""

    name: Literal["halt", "allow", "end", "rank", "finish", "drain", "stand", "hold", "look", "go_on", "refuse"]
    steps: int | None = None
    stand: bool = False
    request: bytes = b""
    in_flight: InFlight = "keep"
    asleep: tuple[MemoryTag, ...] = ()
    reason: str | None = None


class CoreReply(msgspec.Struct, frozen=True):
    """`begun`: number of steps begun; None if the core can't be halted now. `done`: false while the core has to step on."""

    begun: int | None = None
    answers: list[bytes] = []
    done: bool = True
    error: ErrorInfo | None = None


class SharedCore(CoreControl):
    """On every core. All but `submit` and `gate.halt` are called on the core's own thread, between two steps."""

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.gate = StepGate()
        self.take_turn: Callable[[], None] = lambda: None
        """This core's part of a turn, as far as it gets before the next step; set by what leads or follows the turns."""
        self._weights_in_doubt = False
        self._deferred: list[tuple[Any, Any]] = []

    def between_steps(self, take_requests: Callable[[], None]) -> None:
        """Around vLLM's wait for requests, with which each pass of the core's loop begins."""
        self.gate.end()
        self.take_turn()
        while True:
            take_requests()
            if self.gate.begin():
                return
            self.take_turn()

    def perform(self, order: CoreOrder) -> CoreReply:
        """Never raises: the reply says what failed."""
        try:
            return self._performed(order)
        except Exception as error:
            if not isinstance(error, WeightwireError):
                logger.exception("weightwire: %r failed on an engine core", order.name)
            return CoreReply(error=WeightwireError.wrap(error).info())

    def call_ranks(self, request: bytes) -> list[bytes]:
        try:
            return super().call_ranks(request)
        except Exception as error:
            raise PeerLost(
                f"engine core {self.core.dp_rank} lost a worker: {error}", hint="restart the engine"
            ) from error

    def _performed(self, order: CoreOrder) -> CoreReply:
        match order.name:
            case "rank":
                self._weights_in_doubt |= self.pauses.held
                return CoreReply(answers=self.call_ranks(order.request))
            case "finish":
                return CoreReply(answers=self.finish(order.request, order.in_flight))
            case "drain":
                return CoreReply(done=self._drain())
            case "stand":
                self._stand(order.in_flight)
            case "hold":
                self._weights_in_doubt = True
                self.hold(frozenset(order.asleep))
            case "look":
                return CoreReply(done=self._may_stand())
            case "go_on":
                self.go_on(order.stand)
            case "refuse":
                self.refuse(order.reason)
        return CoreReply()

    def step_on(self) -> None:
        """The core takes the next step together with the others, with an empty batch if it has no request."""
        self.core.engines_running = True

    def end_turn(self) -> None:
        """The core may step again, unless it was told to stand."""
        from vllm.v1.core.sched.interface import PauseState

        core = self.core
        if self.pauses.held and core.scheduler.pause_state == PauseState.PAUSED_ALL and not core.pending_pause:
            core.engines_running = False  # a step that another core had begun may have set it
        for request in self._deferred:
            core.input_queue.put_nowait(request)
        self._deferred.clear()
        self.gate.release()

    def lost(self, why: str) -> None:
        """The cores have lost each other: no turn follows. If the weights may differ between them, this core refuses."""
        self.gate.open()
        if not self.pauses.held:
            return
        if not self._weights_in_doubt:
            self.go_on(self._may_stand())
        elif self.refusal is None:
            self.refuse(f"the engine cores lost each other during an update or a pause: {why}; start the engine anew")

    def go_on(self, stand: bool) -> None:
        """Undoes `_drain` and `_stand`. `stand`: vLLM's own pause keeps all cores from every step; else all take the next one. A
        core that refuses stays where it is, without requests: a step would wait for a core whose worker may be lost."""
        from vllm.v1.core.sched.interface import PauseState

        if self.refusal is not None or not self.pauses.let_go():
            return
        self._weights_in_doubt = False
        core = self.core
        core.ignore_start_dp_wave = stand
        # One step finds out whether any core has requests: vLLM's word that one came may have been ignored meanwhile. Cores
        # that vLLM paused come to stand in their steps, once all of them are paused.
        core.engines_running = not stand
        core.pending_pause = not stand and core.scheduler.pause_state != PauseState.UNPAUSED

    def _may_stand(self) -> bool:
        """Whether vLLM's own pause is in force and no request of this core is to end under it."""
        from vllm.v1.core.sched.interface import PauseState

        wanted = self.pauses.wanted
        ends = wanted == PauseState.PAUSED_NEW and self.core.scheduler.running
        return wanted not in (None, PauseState.UNPAUSED) and not self.core.pending_pause and not ends

    @contextlib.contextmanager
    def collective(self) -> Iterator[bool]:
        """Around vLLM's own resume and wake-up, in which all cores wait for each other between two steps. False: not now. While
        we hold the cores they stand on, and the resume takes effect in `go_on`."""
        entered = self.gate.enter_collective()
        ignores = self.core.ignore_start_dp_wave
        try:
            yield entered
        finally:
            if self.pauses.held:
                self.core.ignore_start_dp_wave = ignores
            self.gate.leave_collective()

    def defer(self, request: tuple[Any, Any]) -> None:
        """Handles a client's request once the turn is over."""
        self._deferred.append(request)

    def _drain(self) -> bool:
        """Takes no new request; returns whether none runs any more."""
        from vllm.v1.core.sched.interface import PauseState

        self.pauses.hold()
        self.core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.core.ignore_start_dp_wave = False
        self.core.engines_running = True
        return not (self.core.scheduler.has_unfinished_requests() or self.core.batch_queue)

    def _stand(self, in_flight: InFlight) -> None:
        """No step runs until `go_on`, and none is under way. Requests follow the policy."""
        self.pauses.hold()
        self.core.ignore_start_dp_wave = True
        self._stop(in_flight)
        self.core.engines_running = False
