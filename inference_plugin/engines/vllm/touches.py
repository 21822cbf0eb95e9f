"""The places of vLLM that the plug-in touches, and why."""

from __future__ import annotations

from inference_plugin.engines.touch import Touch
from inference_plugin.engines.vllm.lora import LORA_TOUCHES

__all__ = ["KNOWN_VERSIONS", "TOUCHES"]

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
