"""vLLM's engine core under its coordinator: pauses, versions, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from inference_plugin.devices import in_use, start_thread
from inference_plugin.engines.control import UNKNOWN_VERSION, EngineControl
from inference_plugin.engines.coordinator import ReplicaCoordinator
from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.engines.vllm.api import TORN
from inference_plugin.engines.vllm.caches import CoreCaches
from inference_plugin.engines.vllm.own_pauses import OwnPauses
from inference_plugin.wire.errors import VersionConflict
from inference_plugin.wire.groups import DRAFT
from inference_plugin.wire.messages import InFlight, MemoryTag

__all__ = ["CoreCommand", "CoreControl"]

logger = logging.getLogger("vllm.weightwire")


class CoreControl(EngineControl):
    """The engine as its coordinator sees it: one EngineCore, in a process of its own or in the caller's."""

    def __init__(self, core: Any) -> None:
        from vllm.v1.engine.core import EngineCoreProc

        self.core = core
        self.coordinator: ReplicaCoordinator | None = None
        """Where this core has it, once it serves."""
        self.in_process = not isinstance(core, EngineCoreProc)
        self.refusal: str | None = None
        self.caches = CoreCaches(core)
        self.pauses = OwnPauses(core, self.submit)
        self._asleep: frozenset[MemoryTag] = frozenset()
        self._wait: object = None
        """The pause that empties the caches once requests have ended, unless it was given up."""
        # in-process only
        self.loads_told = 0
        """The number of noted loads in this process when workers were last asked of them."""
        self.lock = threading.RLock()
        self._ran = threading.Condition(self.lock)
        self._device = in_use().current()
        self._commands: list[Callable[[], None]] = []
        self.stash: list[Any] = []
        self._drained: Future[None] | None = None

    # any thread

    def submit(self, command: Callable[[], None]) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        def run() -> None:
            try:
                command()
            except Exception:  # whatever it is, it must not end the engine's loop
                logger.exception("weightwire: a command failed")

        if not self.in_process:
            self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, CoreCommand(run)))
            return
        self._commands.append(run)
        try:
            # Not on the caller's thread, which steps: Ctrl-C would raise there in the middle of an installation.
            start_thread(self._run_commands, name="weightwire-commands")
        except RuntimeError:
            self._commands.remove(run)
            raise

    @contextlib.contextmanager
    def between_commands(self) -> Iterator[None]:
        """In-process: no command runs meanwhile, such as a commit. One that hangs is waited for as long as its ranks are."""
        is_free = self.lock.acquire(timeout=rank_timeout_s())
        try:
            yield
        finally:
            if is_free:
                self.lock.release()

    # the engine's own thread

    def _run_commands(self) -> None:
        """In-process: runs the submitted commands under the lock that every step holds, on a thread of ours."""
        with self.lock:
            while self._commands:
                command = self._commands.pop(0)
                try:
                    in_use().use(self._device)
                    command()
                except BaseException:  # a plug-in's SystemExit, say: whoever steps waits for this thread
                    logger.exception("weightwire: a command failed")
            self._ran.notify_all()

    def call_ranks(self, request: bytes) -> list[bytes]:
        replies: list[bytes] = self.core.model_executor.collective_rpc(
            "weightwire_call", timeout=rank_timeout_s(), args=(request,)
        )
        return replies

    def pause(self, in_flight: InFlight) -> Future[None] | None:
        self.pauses.hold()
        if self.in_process:
            return self._pause_in_process(in_flight)
        mode = {"keep": "keep", "recompute": "keep", "abort": "abort", "drain": "wait"}[in_flight]
        with self.pauses.ours():
            stopped: Future[None] | None = self.core.pause_scheduler(mode=mode, clear_cache=False)
        if in_flight == "keep":
            return stopped
        self._wait = wait = object()  # vLLM calls back when it is idle next, also where nobody waits for that any more
        return _then(stopped, lambda: self.caches.reset() if self._wait is wait else None)

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        # `pause` has stopped the scheduler. The executor's own record keeps vLLM from stepping on memory that isn't there.
        executor = self.core.model_executor
        by_user = set(executor.sleeping_tags) - self._asleep  # what vLLM's own sleep released stays so
        self._asleep = asleep
        executor.sleeping_tags = by_user | asleep
        if "is_sleeping" in vars(executor):  # before 0.31; since then it follows the tags
            executor.is_sleeping = bool(executor.sleeping_tags)

    def check_may_wake_up(self) -> None:
        """Raises `VersionConflict` where a manager put the engine to sleep: its trainer may use the memory."""
        if self._asleep:
            raise VersionConflict(
                "a manager put this replica to sleep, and its trainer may use the memory",
                hint="wake it up with that manager",
                side="coordinator",
            )

    def check_may_sleep(self) -> None:
        """In-process, before vLLM's own sleep: an update that only waited for requests to end is installed. Raises
        `VersionConflict` where it waits on: it would write into released memory."""
        self._let_commands_run()
        if self._drained is not None:
            raise VersionConflict(
                "an update waits for the requests of this engine to end",
                hint="step the engine until they have ended, or abort them, before it sleeps",
                side="coordinator",
            )

    def resume(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._drained = self._wait = None
        if self.pauses.let_go() and not self.in_process:
            # The core may sleep on its input queue by now, with requests that may go on.
            self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def installed(self, group: str, stamp: str, txn: str, in_flight: InFlight) -> None:
        if in_flight == "keep" or self.caches.connector is not None:
            self.caches.turn_root(txn, in_flight)
        # Tokens are the served model's, whichever draft proposed them.
        if group != DRAFT and hasattr(self.core, "set_weight_version"):  # since 0.27
            self.core.set_weight_version(stamp)

    def lose_version(self) -> None:
        """Somebody else writes the weights: outputs get a stamp that says so."""
        if hasattr(self.core, "set_weight_version"):  # since 0.27
            self.core.set_weight_version(UNKNOWN_VERSION)

    def refuse(self, reason: str | None) -> None:
        from vllm.v1.request import RequestStatus

        self.refusal = reason
        if reason is not None:
            self.end_all(RequestStatus.FINISHED_ERROR, reason)

    def end_all(self, status: Any, reason: str | None) -> None:
        """Ends all requests with that status of vLLM's, and tells their clients; `reason` None means aborted."""
        by_client: dict[int, list[str]] = {}
        for ended in self.core.scheduler.finish_requests(None, status):
            # Before 0.26 vLLM returns pairs of these.
            request_id, client = ended if isinstance(ended, tuple) else (ended.request_id, ended.client_index)
            by_client.setdefault(client, []).append(request_id)
        for client, ids in by_client.items():
            self.end_outputs(ids, reason, client)

    def end_outputs(self, ids: list[str], reason: str | None, client: int = 0) -> None:
        """Sends the outputs that end a client's requests; `reason` None means aborted. In-process the next step returns them."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        if not ids:
            return
        kind = FinishReason.ABORT if reason is None else FinishReason.ERROR
        error = {}
        if reason is not None:
            error = _request_error(EngineCoreOutput, self._told(reason))
        ended = EngineCoreOutputs(
            outputs=[EngineCoreOutput(i, [], finish_reason=kind, stop_reason=reason, **error) for i in ids],
            finished_requests=set(ids),
        )
        self._send(client, ended)

    def _told(self, reason: str) -> str:
        """The reason as clients read it; of a torn replica in the words of `TornReplicaMiddleware`."""
        if reason != self.refusal:
            return reason
        replica = f"replica {self.coordinator.card.replica}: " if self.coordinator is not None else ""
        return f"{TORN}: {replica}{reason}"

    def _send(self, client: int, outputs: Any) -> None:
        if self.in_process:
            self.stash.append(outputs)
        else:
            self.core.output_queue.put_nowait((client, outputs))

    def step(self, step: Callable[[], Any]) -> Any:
        """In-process: one call of `get_output`."""
        with self.lock:
            self._let_commands_run()
            outputs = self.stash.pop(0) if self.stash else step()
            self.end_drain()
            return outputs

    def end_drain(self) -> None:
        """In-process, under the lock: a drain is over once no request runs. Nobody may step again before the next one, so a batch
        that vLLM planned ahead (asynchronous scheduling) may be left."""
        if (drained := self._drained) is not None and not self.core.scheduler.has_unfinished_requests():
            with contextlib.suppress(RuntimeError):  # no thread can be started now: the next step tries again
                self.submit(lambda: _settle(drained, lambda: self._stop("drain")))
                self._drained = None

    def _let_commands_run(self) -> None:
        while self._commands:
            self._ran.wait()  # without the lock

    def _pause_in_process(self, in_flight: InFlight) -> Future[None] | None:
        from vllm.v1.core.sched.interface import PauseState

        if in_flight != "drain":
            self._stop(in_flight)
            return None
        self.core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        if self.core.scheduler.has_unfinished_requests():
            self._drained = Future()  # `end_drain` completes it
            return self._drained
        self._stop(in_flight)
        return None

    def _stop(self, in_flight: InFlight) -> None:
        """Stops at once; under "drain" no request runs any more."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        core = self.core
        if in_flight == "abort":
            self.end_all(RequestStatus.FINISHED_ABORTED, None)
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:  # where cores share experts all have begun the same steps, so these end
            outputs, _ = core.step_with_batch_queue()
            for client, output in outputs.items() if outputs else ():
                self._send(client, output)
        if in_flight != "keep":
            self.caches.reset()


def _then(stopped: Future[None] | None, act: Callable[[], None]) -> Future[None] | None:
    """Calls `act` once the engine stands, on its own thread; completes after that."""
    if stopped is None:
        act()
        return None
    acted: Future[None] = Future()

    def reached(future: Future[None]) -> None:
        future.result(timeout=0)
        act()

    stopped.add_done_callback(lambda future: _settle(acted, lambda: reached(future)))
    return acted


def _settle(future: Future[None], act: Callable[[], None]) -> None:
    """Calls `act`, and completes the future with what came of it."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001 -- it is the future's
        future.set_exception(error)
    else:
        future.set_result(None)


def _request_error(output: Any, message: str) -> dict[str, Any]:
    """Since 0.33 an output can carry an error of its own: an API server answers 503 with it, and clients may retry."""
    if "error" not in output.__struct_fields__:
        return {}
    from vllm.outputs import RequestError

    return {"error": RequestError(code="engine_paused", message=message, retryable=True)}


@dataclasses.dataclass(frozen=True)
class CoreCommand:
    """A callable on its way through the core's input queue."""

    run: Callable[[], None]
