"""Where vLLM's engine core is wrapped, and how the coordinator starts in it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from inference_plugin.engines.kept_caches import KEEP, keeps_cache
from inference_plugin.engines.monkeypatch import contained, run_without, wrap
from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.engines.starting import begin_start, end_start, ends_start
from inference_plugin.engines.vllm.core import CoreCommand, CoreControl
from inference_plugin.engines.vllm.core_start import ExecutorLost, start, stop
from inference_plugin.engines.vllm.own_loads import ask_of_loads_here, note_memory, noted_loads
from inference_plugin.engines.vllm.shared_core import SharedCore
from inference_plugin.engines.vllm.weight_transfer import BACKEND, NativeCalls
from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["hook_core", "hook_inproc", "hook_own_commands", "hook_requests", "hook_shared_cores", "hook_start"]

logger = logging.getLogger("vllm.weightwire")

CALLED_UNDER_THE_LOCK = (
    *("abort_requests", "reset_prefix_cache", "reset_encoder_cache"),
    *("add_lora", "remove_lora", "pin_lora"),
    *("save_sharded_state", "execute_dummy_batch", "list_loras", "reset_mm_cache", "profile"),
    "release_kv_cache_memory",  # since 0.31
)
"""Methods of an in-process client that must not run while an update does, besides those with a hook of their own: they change
what the update changes (an adapter that it replaces would be added as it was before), read the weights, or ask the workers: an
executor with several would hand the answers of the two calls to the wrong caller."""


def hook_core(lacks: tuple[str, ...]) -> None:
    """The life of an engine core, and the commands that its coordinator submits. `lacks`: what users of this version of vLLM
    miss, in words."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor

    @wrap(Executor, "__init__")
    def init_executor(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
        begin_start("vllm", vllm_config.model_config.model, logger)
        try:
            original(self, vllm_config)  # loads the model
        except BaseException:
            end_start()
            raise
        if getattr(vllm_config.parallel_config, "node_rank_within_dp", 0):
            end_start()  # the engine core is on another host, and tells of the replica there

    @wrap(EngineCore, "_initialize_kv_caches")
    def initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
        with ends_start():
            result = original(self, vllm_config)
            start_coordinator(self, lacks)
        return result

    @wrap(EngineCore, "__init__")
    def init_core(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except BaseException:  # after the coordinator has started, too: in the caller's process it would stay
            if (control := _control_of(self)) is not None:
                stop(control)
            raise

    @wrap(EngineCore, "shutdown")
    def shutdown(original: Callable[..., Any], self: Any) -> Any:
        control = _control_of(self)
        if control is None:
            return original(self)
        with control.between_commands():
            if control.coordinator is not None:
                with contained("closing the coordinator", logger):
                    control.coordinator.close()
            return original(self)

    @wrap(EngineCoreProc, "_handle_client_request")
    def handle_client_request(original: Callable[..., Any], self: Any, request_type: Any, request: Any) -> Any:
        if isinstance(request, CoreCommand):
            request.run()
            return None
        return original(self, request_type, request)


def hook_own_commands() -> None:
    """vLLM's own commands that pause, release memory or write weights."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor

    @wrap(EngineCore, "collective_rpc")
    def collective_rpc(
        original: Callable[..., Any],
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        native: NativeCalls | None = getattr(self, "weightwire_native", None)
        if native is not None and (answers := native.answer(method, args, kwargs or {})) is not None:
            return answers
        control = _control_of(self)
        if control is None:
            return original(self, method, timeout, args, kwargs)
        with control.lock:
            if method == "reset_weights":
                _tear(control)
                return original(self, method, timeout, args, kwargs)
            with noted_loads(control, method):
                return original(self, method, timeout, args, kwargs)

    for core in (EngineCore, EngineCoreProc):

        @_wrap_where_we_run(core, "pause_scheduler")
        def pause_scheduler(control: CoreControl, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with control.lock:
                result = control.pauses.pause(partial(original, *args, **kwargs))
                control.end_drain()  # it may have ended the requests that an update waits for
                return result

    @_wrap_where_we_run(EngineCore, "resume_scheduler")
    def resume_scheduler(control: CoreControl, original: Callable[..., Any]) -> Any:
        with control.lock:
            return control.pauses.resume(original)

    if hasattr(EngineCore, "release_kv_cache_memory"):  # since 0.31

        @_wrap_where_we_run(EngineCore, "release_kv_cache_memory")
        def release_kv_cache_memory(control: CoreControl, original: Callable[..., Any]) -> Any:
            with control.lock:
                control.pauses.check_may_release()
                return original()

    @_wrap_where_we_run(EngineCore, "sleep")
    def sleep_core(control: CoreControl, original: Callable[..., Any], level: int = 1, mode: str = "abort") -> Any:
        with control.lock:
            if level and mode == "keep":
                control.check_may_sleep()  # before vLLM stops the scheduler; under "abort" that ends what an update waits for
            return original(level, mode)

    @_wrap_where_we_run(Executor, "sleep")
    def sleep(control: CoreControl, original: Callable[..., Any], level: int = 1) -> Any:
        with control.lock:
            control.check_may_sleep()
            return note_memory(control, partial(original, level), level)

    @_wrap_where_we_run(Executor, "wake_up")
    def wake_up(control: CoreControl, original: Callable[..., Any], tags: list[str] | None = None) -> Any:
        with control.lock:
            control.check_may_wake_up()
            return note_memory(control, partial(original, tags), None)


def hook_requests() -> None:
    """No request finds what an older version of the weights computed; a torn replica refuses requests."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched import output
    from vllm.v1.engine.core import EngineCore

    @_wrap_where_we_run(EngineCore, "preprocess_add_request")
    def preprocess_add_request(control: CoreControl, original: Callable[..., Any], request: Any) -> Any:
        epoch = control.caches.root_epoch
        prepared, wave = original(request)
        prepared.weightwire_epoch = epoch
        if epoch and prepared.mm_features:
            control.caches.hash_anew(prepared)  # not with encodings that an older version of the weights made
        return prepared, wave

    @_wrap_where_we_run(EngineCore, "add_request")
    def add_request(control: CoreControl, original: Callable[..., Any], request: Any, request_wave: int = 0) -> Any:
        control.caches.some_keep |= keeps_cache(getattr(request, "cache_salt", None))
        if getattr(request, "weightwire_epoch", 0) != control.caches.root_epoch:
            try:
                control.caches.hash_anew(request)  # it waited in the input queue while a commit turned the root
            except Exception as error:  # it must not find what an older version computed, and the engine must not end
                logger.exception("weightwire: a request could not be hashed anew")
                control.end_outputs([request.request_id], f"weightwire: {error}", request.client_index)
                return None
        result = original(request, request_wave)
        if control.refusal is not None and not control.in_process:
            control.refuse(control.refusal)  # it ends with the reason, before any step
        return result

    @wrap(kv_cache_utils, "hash_block_tokens")
    def hash_block_tokens(
        original: Callable[..., Any],
        hash_function: Callable[[Any], bytes],
        parent_block_hash: Any,
        curr_block_token_ids: Any,
        extra_keys: Any = None,
    ) -> Any:
        """The first block of a conversation that keeps its cache has a root that no commit turns."""
        # Newer versions give (name, key).
        salts = (key[-1] if isinstance(key, tuple) else key for key in extra_keys or ())
        if not parent_block_hash and any(map(keeps_cache, salts)):
            parent_block_hash = hash_function(KEEP)
        return original(hash_function, parent_block_hash, curr_block_token_ids, extra_keys)

    if hasattr(output, "strip_covered_mm_data"):  # since 0.32

        @wrap(output, "strip_covered_mm_data")
        def keep_pixels(_: Callable[..., Any], mm_features: Any, *args: Any, **kwargs: Any) -> Any:
            """Workers get the pixels of images whose keys and values lie in the prefix cache, too: `recompute` drops those, and
            vLLM would end where it has to encode an image anew without its pixels."""
            return mm_features


def hook_shared_cores() -> None:
    """The loop of engine cores that share experts."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    @_wrap_where_we_run(EngineCoreProc, "_process_input_queue")
    def process_input_queue(control: CoreControl, original: Callable[..., Any]) -> Any:
        return control.between_steps(original) if isinstance(control, SharedCore) else original()

    @_wrap_where_we_run(DPEngineCoreProc, "_has_global_unfinished_reqs")
    def has_global_unfinished_reqs(control: SharedCore, original: Callable[..., Any], local_unfinished: bool) -> Any:
        unfinished = original(local_unfinished)
        control.gate.count()
        return unfinished

    @_wrap_where_we_run(DPEngineCoreProc, "_handle_client_request")
    def handle_collective_request(
        control: SharedCore, original: Callable[..., Any], request_type: Any, request: Any
    ) -> Any:
        if request_type != EngineCoreRequestType.UTILITY or request[2] not in ("resume_scheduler", "wake_up"):
            return original(request_type, request)
        with control.collective() as entered:
            return original(request_type, request) if entered else control.defer((request_type, request))


def hook_start() -> None:
    """In the process that asks for an engine: notes that an engine starts, until the engine core notes it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    @wrap(EngineArgs, "create_engine_config")
    def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        begin_start("vllm", getattr(self, "model", "unknown"), logger)
        with ends_start():
            return original(self, *args, **kwargs)

    for frontend in (AsyncLLM, LLMEngine):

        @wrap(frontend, "__init__")
        def init(original: Callable[..., Any], self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            if not kwargs.get("client_addresses"):  # else this is one of several API servers, and starts no engine
                begin_start("vllm", vllm_config.model_config.model, logger)
            with ends_start():
                original(self, vllm_config, *args, **kwargs)


def _control_of(owner: Any) -> CoreControl | None:
    """The control of an engine core, or of what belongs to it; None where the engine runs without us."""
    control: CoreControl | None = getattr(owner, "weightwire_control", None)
    return control


def _wrap_where_we_run(owner: Any, name: str) -> Callable[[Callable[..., Any]], object]:
    """`wrap` for a method of an engine core, or of what belongs to it: the function gets the core's control, and the original as
    a bound method. Where the engine runs without us the original is called."""

    def decorate(wrapper: Callable[..., Any]) -> object:
        @wrap(owner, name)
        def wrapped(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            control = _control_of(self)
            bound = partial(original, self)
            return bound(*args, **kwargs) if control is None else wrapper(control, bound, *args, **kwargs)

        return wrapped

    return decorate


def start_coordinator(core: Any, lacks: tuple[str, ...]) -> None:
    """Starts workers and coordinator and publishes the replica's card. Where that fails the engine runs without us; it is refused
    where the user named our worker extension."""
    core.weightwire_control = None
    native = core.vllm_config.weight_transfer_config
    core.weightwire_native = NativeCalls(lambda: _cards(core)) if native and native.backend == BACKEND else None
    try:
        core.weightwire_control = core.model_executor.weightwire_control = start(core, lacks)
        for what in lacks:
            logger.warning("weightwire: in this version of vLLM %s", what)
    except ExecutorLost:
        raise
    except Exception as error:
        if "inference_plugin" in core.vllm_config.parallel_config.worker_extension_cls:
            raise
        run_without("vllm", error, logger, f"model {core.vllm_config.model_config.model}")


def _tear(control: CoreControl) -> None:
    """Tears the replica before vLLM zeroes its weights for `/weight_checker`."""
    if isinstance(control, SharedCore):
        raise EngineUnsupported(
            "weights of ranks that share experts can't be reset: the engine cores would do so one after the other",
            hint="start the engine anew with a checkpoint of zeros",
            side="coordinator",
        )
    assert control.coordinator is not None
    control.coordinator.tear(
        "vLLM reset the weights, as its /weight_checker was asked (a parameter that no update fills stays zero until a restart)"
    )


def _cards(core: Any) -> list[bytes]:
    """The card of every rank, encoded; empty where Weightwire does not run."""
    control = _control_of(core)
    if control is None:
        return [b""]
    with control.lock:
        answers: list[bytes] = core.model_executor.collective_rpc("weightwire_card", timeout=rank_timeout_s())
    return answers


def hook_inproc() -> None:
    from vllm.v1.engine.core_client import InprocClient

    @wrap(InprocClient, "__init__")
    def init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.weightwire_control = control = _control_of(self.engine_core)
        if control is not None:
            control.lock.release()

    @_wrap_where_we_run(InprocClient, "get_output")
    def get_output(control: CoreControl, original: Callable[..., Any]) -> Any:
        def step() -> Any:
            ask_of_loads_here(control)
            return original()

        return control.step(step)

    @_wrap_where_we_run(InprocClient, "add_request")
    def add_request(control: CoreControl, original: Callable[..., Any], request: Any) -> Any:
        with control.lock:
            if control.refusal is not None:
                # Raising here would leave the request in the caller's tables, and its next `generate` would hang.
                control.end_outputs([request.request_id], control.refusal)
                return None
            return original(request)

    for name in filter(partial(hasattr, InprocClient), CALLED_UNDER_THE_LOCK):

        @_wrap_where_we_run(InprocClient, name)
        def locked(control: CoreControl, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with control.lock:
                result = original(*args, **kwargs)
                control.end_drain()
                return result
