"""Where vLLM's engine core is wrapped, and how the coordinator starts in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from inference_plugin.engines.coordinator import ReplicaCoordinator, open_coordinator
from inference_plugin.engines.kept_caches import keeps_cache
from inference_plugin.engines.monkeypatch import contained, installed_version, run_without, wrap
from inference_plugin.engines.operations import RankReply
from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.engines.starting import begin_start, end_start, ends_start
from inference_plugin.engines.vllm.core import CoreCommand, CoreControl, own_root
from inference_plugin.engines.vllm.patch_points import VLLM
from inference_plugin.engines.vllm.weight_transfer import BACKEND, NativeCalls
from inference_plugin.net import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, PeerLost, WeightwireError

__all__ = ["hook_core", "hook_inproc"]

logger = logging.getLogger("vllm.weightwire")

_START_TIMEOUT_S = 600.0


def hook_core(lacks: tuple[str, ...]) -> None:
    """`lacks`: what users of this version of vLLM miss, in words."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.executor import Executor

    @wrap(Executor, "__init__")
    def init_executor(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
        begin_start("vllm", str(vllm_config.model_config.model), logger)
        try:
            original(self, vllm_config)  # loads the model
        except BaseException:
            end_start()
            raise

    @wrap(EngineCore, "_initialize_kv_caches")
    def initialize_kv_caches(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
        with ends_start():
            result = original(self, vllm_config)
            _start_coordinator(self, lacks)
        return result

    @wrap(EngineCore, "collective_rpc")
    def collective_rpc(
        original: Callable[..., Any],
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        native: NativeCalls | None = getattr(self, "_weightwire_native", None)
        if native is not None and (answers := native.answer(method, args, kwargs or {})) is not None:
            return answers
        return original(self, method, timeout, args, kwargs)

    @wrap(EngineCore, "preprocess_add_request")
    def preprocess_add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
        control = _control_of(self)
        if control is None:
            return original(self, request)
        epoch = control.root_epoch
        prepared, wave = original(self, request)
        prepared.weightwire_epoch = epoch
        if epoch and prepared.mm_features:
            control.hash_anew(prepared)  # not with encodings that an older version of the weights made
        return prepared, wave

    @wrap(EngineCore, "add_request")
    def add_request(original: Callable[..., Any], self: Any, request: Any, request_wave: int = 0) -> Any:
        control = _control_of(self)
        if control is None:
            return original(self, request, request_wave)
        control.some_keep_cache |= keeps_cache(getattr(request, "cache_salt", None))
        if getattr(request, "weightwire_epoch", 0) != control.root_epoch:
            try:
                control.hash_anew(request)  # it waited in the input queue while a commit turned the root
            except Exception as error:  # it must not find what an older version computed, and the engine must not end
                logger.exception("weightwire: a request could not be hashed anew")
                control.end_outputs([request.request_id], f"weightwire: {error}", request.client_index)
                return None
        result = original(self, request, request_wave)
        if control.refusal is not None and not control.in_process:
            control.refuse(control.refusal)  # it ends with the reason, before any step
        return result

    wrap(kv_cache_utils, "hash_block_tokens")(own_root)

    @wrap(EngineCore, "shutdown")
    def shutdown(original: Callable[..., Any], self: Any) -> Any:
        coordinator: ReplicaCoordinator | None = getattr(self, "_weightwire_coordinator", None)
        if coordinator is not None:
            with contained("closing the coordinator", logger):
                coordinator.close()
        return original(self)

    @wrap(EngineCoreProc, "_handle_client_request")
    def handle_client_request(original: Callable[..., Any], self: Any, request_type: Any, request: Any) -> Any:
        if isinstance(request, CoreCommand):
            request.run()
            return None
        return original(self, request_type, request)


def _control_of(core: Any) -> CoreControl | None:
    """None where the engine runs without us."""
    control: CoreControl | None = getattr(core, "_weightwire_control", None)
    return control


def _start_coordinator(core: Any, lacks: tuple[str, ...]) -> None:
    """Starts workers and coordinator and publishes the replica's card. Where that fails the engine runs without us; it is refused
    where the user named our worker extension."""
    core._weightwire_control = core._weightwire_coordinator = None
    native = core.vllm_config.weight_transfer_config
    core._weightwire_native = NativeCalls(lambda: _cards(core)) if native and native.backend == BACKEND else None
    try:
        core._weightwire_control, core._weightwire_coordinator = _started(core, lacks)
        for what in lacks:
            logger.warning("weightwire: in this version of vLLM %s", what)
    except _ExecutorLost:
        raise
    except Exception as error:
        if "inference_plugin" in core.vllm_config.parallel_config.worker_extension_cls:
            raise
        run_without("vllm", error, logger, f"model {core.vllm_config.model_config.model}")


def _started(core: Any, lacks: tuple[str, ...]) -> tuple[CoreControl, ReplicaCoordinator]:
    """Starts workers and coordinator. If one of them fails, nothing of ours is left on any rank."""
    from vllm.v1.engine.core import DPEngineCoreProc

    if isinstance(core, DPEngineCoreProc):
        raise EngineUnsupported(
            "a mixture of experts with data parallelism spreads one replica over several engine cores",
            hint="run it with --data-parallel-size 1",
            phase="start",
        )
    control = CoreControl(core)
    config = core.vllm_config
    replica = addresses.new_replica_id("vllm")
    # A call of what a worker hasn't got would raise there, and leave the executor out of step.
    if not all(_ask_workers(core, hasattr, "weightwire_start")):
        raise EngineUnsupported(
            "the plug-in is live in the engine core, but not in every worker",
            hint="install weightwire wherever workers run; the workers' logs may say more",
            phase="start",
        )
    try:
        replies = [decode_as(reply, RankReply) for reply in _ask_workers(core, "weightwire_start", replica)]
        for reply in replies:
            if reply.error is not None:
                raise WeightwireError.of(reply.error).at(side="worker", rank=reply.rank, replica=replica, phase="start")
        if control.in_process:
            control.lock.acquire()  # until the client is made: `hook_inproc`
        coordinator = open_coordinator(
            control,
            replica,
            [reply.card for reply in replies],
            engine="vllm",
            engine_version=installed_version(*VLLM.distributions),
            model=str(config.model_config.model),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            tp=config.parallel_config.tensor_parallel_size,
            pp=config.parallel_config.pipeline_parallel_size,
            dp_rank=config.parallel_config.data_parallel_index,
            parent_pid=os.getpid() if control.in_process else os.getppid(),
            lacks=lacks,
        )
    except _ExecutorLost:
        raise
    except BaseException:
        _ask_workers(core, "weightwire_stop")
        with contextlib.suppress(OSError, WeightwireError):
            addresses.remove_replica(replica)
        raise
    return control, coordinator


def _cards(core: Any) -> list[bytes]:
    """The card of every rank, encoded; empty where Weightwire does not run."""
    control = _control_of(core)
    if control is None:
        return [b""]
    with control.lock:
        answers: list[bytes] = core.model_executor.collective_rpc("weightwire_card", timeout=rank_timeout_s())
    return answers


class _ExecutorLost(PeerLost):
    """A call to the workers raised. A multi-process executor may now take late answers to it for answers to its next call, and
    the engine would compute nonsense: it must not start, with us or without."""


def _ask_workers(core: Any, method: Any, *args: Any) -> list[Any]:
    try:
        answers: list[Any] = core.model_executor.collective_rpc(method, timeout=_START_TIMEOUT_S, args=args)
    except Exception as error:
        raise _ExecutorLost(
            f"the workers could not be asked: {error}", hint="WEIGHTWIRE_DISABLE=1 starts the engine without Weightwire"
        ) from error
    return answers


def hook_inproc() -> None:
    from vllm.v1.engine.core_client import InprocClient

    @wrap(InprocClient, "__init__")
    def init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if (control := _control_of(self.engine_core)) is not None:
            control.lock.release()

    @wrap(InprocClient, "get_output")
    def get_output(original: Callable[..., Any], self: Any) -> Any:
        control = _control_of(self.engine_core)
        return original(self) if control is None else control.step(lambda: original(self))

    @wrap(InprocClient, "add_request")
    def add_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
        control = _control_of(self.engine_core)
        if control is None:
            return original(self, request)
        with control.lock:
            if control.refusal is not None:
                # Raising here would leave the request in the caller's tables, and its next `generate` would hang.
                control.end_outputs([request.request_id], control.refusal)
                return None
            return original(self, request)

    for name in ("abort_requests", "reset_prefix_cache"):

        @wrap(InprocClient, name)
        def locked(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            control = _control_of(self.engine_core)
            with control.lock if control is not None else contextlib.nullcontext():
                return original(self, *args, **kwargs)
