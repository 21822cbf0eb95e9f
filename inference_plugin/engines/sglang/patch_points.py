"""The places of SGLang that the plug-in uses, and why. Importing this imports neither SGLang nor torch."""

from __future__ import annotations

from inference_plugin.engines.patch_points import EngineTable, PatchPoint

__all__ = ["PATCH_POINTS", "SGLANG"]

_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler."
_LOADER = "sglang.srt.model_loader.loader:"
_LORA_MANAGER = "sglang.srt.lora.lora_manager:LoRAManager."
_LORA_POOL = "sglang.srt.lora.mem_pool:LoRAMemoryPool."
_LORA_LAYERS = "sglang.srt.lora.layers:"

PATCH_POINTS = (
    # the event loop
    PatchPoint(_SCHEDULER + "init_model_worker", ("self",), "wrapped: the engine starts"),
    PatchPoint(_SCHEDULER + "init_request_dispatcher", ("self",), "wrapped: the model is there; runtime and coordinator start"),
    PatchPoint("sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._pull_raw_reqs", ("self",), "wrapped: our turn joins the requests"),
    PatchPoint("sglang.utils:TypeBasedDispatcher", why="its `_mapping` gets our turn"),
    PatchPoint(_SCHEDULER + "run_batch", ("batch",), "wrapped: notes when a step ran, for the throttle"),
    PatchPoint(_SCHEDULER + "_add_request_to_queue", ("req", "is_retracted"), "wrapped: holds new requests during a drain, refuses them while torn; called: those that were held"),
    PatchPoint(_SCHEDULER + "_maybe_namespace_elastic_radix_cache", ("req",), "wrapped: new requests get the version's prefix namespace"),
    # pipelines
    PatchPoint(_SCHEDULER + "get_next_batch_to_run", ("running_batch", "last_batch"), "wrapped: stages plan nothing before a turn and while paused"),
    PatchPoint("sglang.srt.managers.schedule_batch:NextBatchPlan", ("batch_to_run", "running_batch"), "made: no batch"),
    PatchPoint("sglang.srt.managers.schedule_batch:ScheduleBatch.filter_batch", ("self",), "called: who has ended leaves a slot; its first argument names requests that leave, too"),
    PatchPoint("sglang.srt.managers.schedule_batch:ScheduleBatch.merge_batch", ("other",), "called: who has begun joins those that run"),
    PatchPoint("sglang.srt.distributed.parallel_state:GroupCoordinator.send", ("tensor", "dst"), "replaced while the skeleton is made"),
    PatchPoint("sglang.srt.distributed.parallel_state:GroupCoordinator.recv", ("size", "dtype", "src"), "replaced while the skeleton is made"),
    PatchPoint("sglang.srt.managers.scheduler_pp_mixin:SchedulerPPMixin.init_pp_loop_state", ("self",), why="makes `mbs`, `last_mbs` and `running_mbs`, which are read and set"),
    # pausing, caches, versions
    PatchPoint(_SCHEDULER + "pause_generation", ("recv_req",), "called: retract, in_place; its `_engine_paused` is read; wrapped: while we hold the engine, a pause of the user's is noted"),
    PatchPoint(_SCHEDULER + "continue_generation", ("recv_req",), "called; wrapped: while we hold the engine, its end is noted"),
    PatchPoint(_SCHEDULER + "maybe_send_health_check_signal", ("self",), "called while paused: health checks are answered"),
    PatchPoint(_SCHEDULER + "maybe_sleep_on_idle", ("self",), "called while paused"),
    PatchPoint("sglang.srt.managers.scheduler_components.idle_sleeper:IdleSleeper", why="of the scheduler's `idle_sleeper`: its `poller` gets our doorbell"),
    PatchPoint("sglang.srt.managers.scheduler_components.idle_sleeper:RustServerIdleSleeper", ("timeout_ms",), "of the scheduler's `idle_sleeper`: its `timeout_ms` is set"),
    PatchPoint("sglang.srt.managers.utils:is_health_check_generate_req", ("recv_req",), "called: recognises them"),
    PatchPoint("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.release_memory_occupation", ("recv_req",), "called: releases device memory; wrapped: no update while the user has released it"),
    PatchPoint("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.resume_memory_occupation", ("recv_req",), "called: takes it back; wrapped"),
    PatchPoint("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.check_weights", ("recv_req",), "wrapped: the replica is torn before SGLang resets its weights"),
    PatchPoint("sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.update_weights_from_tensor", ("named_tensors",), "wrapped: the weights' version is unknown from then on"),
    PatchPoint("sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.begin_weight_update", ("self",), "wrapped, as until the end others may write the weights", since="0.5.21"),
    PatchPoint("sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.end_weight_update", ("self",), "wrapped", since="0.5.21"),
    PatchPoint("sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater.get_model", why="called: whose weights it writes"),
    PatchPoint("sglang.srt.managers.io_struct:CheckWeightsReqOutput", ("success", "message"), "made: why they were not reset"),
    PatchPoint("sglang.srt.managers.io_struct:ResumeMemoryOccupationReqOutput", why="made: not woken"),
    PatchPoint("sglang.srt.utils.weight_checker:_is_non_persistent_buffer_name", ("name",), "called: what a reset spares"),
    PatchPoint("sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput", ("tags",), "made"),
    PatchPoint("sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput", ("tags",), "made"),
    PatchPoint(_SCHEDULER + "abort_request", ("recv_req",), "called: abort all; wrapped: aborts requests that are held, too"),
    PatchPoint(_SCHEDULER + "is_fully_idle", ("self",), "called: drained?"),
    PatchPoint(_SCHEDULER + "is_fully_idle", ("ignore_waiting",), "called: may the cache be flushed?", since="0.5.21"),
    PatchPoint(_SCHEDULER + "flush_cache", ("empty_cache",), "called"),
    PatchPoint("sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.release_session", ("session_id",), "called: what a streaming session holds of old weights"),
    PatchPoint("sglang.srt.session.streaming_session:StreamingSession", why="its `slots` are marked: what they hold is old"),
    PatchPoint("sglang.srt.session.streaming_session:SessionSlot", why="marked"),
    PatchPoint("sglang.srt.beam_search.coordinator:BeamCoordinator._free_member_rows", ("group",), "called before a retraction: what a beam search holds; its `_num_live_groups` is read"),
    PatchPoint("sglang.srt.beam_search.coordinator:BeamCoordinator.retire_group", ("req",), "called: a request has ended"),
    PatchPoint("sglang.srt.managers.schedule_batch:FINISH_ABORT", ("message",), "made: why a beam search ends"),
    PatchPoint("sglang.srt.managers.schedule_batch:ScheduleBatch", ("beam_tail",), "set to None where the requests are gone"),
    PatchPoint("sglang.srt.constrained.grammar_manager:GrammarManager.has_waiting_grammars", ("self",), "of the scheduler's `grammar_manager`, whose `grammar_queue` is left out of a flush"),
    PatchPoint("sglang.srt.managers.mm_schedule:embedding_cache", why="cleared: encodings of images and sounds"),
    PatchPoint("sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear", ("self",), "called"),
    PatchPoint(_SCHEDULER + "record_weight_version_change", ("new_version",), "called: stamps outputs"),
    PatchPoint("sglang.srt.utils.weight_versions:WeightVersionEvent", ("old_version", "num_output_tokens"), "made: tokens still to be processed"),
    PatchPoint("sglang.srt.runtime_context:get_serving", why="called: the version that is served"),
    PatchPoint("sglang.srt.managers.scheduler_components.output_sender:SenderWrapper.send_output", ("output", "recv_obj"), "called: refuses a request", until="0.5.23"),
    PatchPoint(_SCHEDULER + "send_abort_output", ("abort_req", "req"), "called: refuses a request", since="0.5.23"),
    PatchPoint(_SCHEDULER + "_release_aborted_request", ("req",), "called: what a refused request holds"),
    PatchPoint("sglang.srt.managers.scheduler:_make_abort_req", ("req", "finished_reason"), "called: refuses a request"),
    PatchPoint("sglang.srt.managers.io_struct:PauseGenerationReqInput", ("mode",), "made"),
    PatchPoint("sglang.srt.managers.io_struct:ContinueGenerationReqInput", ("torch_empty_cache",), "made"),
    PatchPoint("sglang.srt.managers.io_struct:AbortReq", ("abort_all", "abort_message", "finished_reason"), "made"),
    # the model
    PatchPoint("sglang.srt.runtime_context:get_parallel", why="called: ranks and groups"),
    PatchPoint(_LOADER + "_initialize_model", ("model_config", "load_config", "quant_config"), "called: the skeleton"),
    PatchPoint(_LOADER + "_get_quantization_config", ("model_config", "load_config"), "called: for the skeleton"),
    PatchPoint("sglang.srt.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", ("layer",), "called on stand-ins: what the engine does to a module after a load"),
    PatchPoint("sglang.srt.layers.amx_utils:PackWeightMethod.process_weights_after_loading", ("module",), "called on stand-ins, too: what it packs for AMX"),
    PatchPoint("sglang.srt.model_executor.model_runner_components.weight_updater:_unsupported_derived_weight_cache_error", why="called: what SGLang itself can't update"),
    PatchPoint("sglang.srt.eplb.expert_location:get_global_expert_location_metadata", why="called: which expert is in which place"),
    PatchPoint("sglang.srt.eplb.expert_location:ExpertLocationMetadata", ("physical_to_logical_map_cpu",), "read: which expert is in which place"),
    PatchPoint("sglang.srt.models.deepseek_common.deepseek_weight_loader:DeepseekV2WeightLoaderMixin.post_load_weights", ("self", "weight_names"), "called on a twin of the model: what a load derives for latent attention", without="models of the DeepSeek-V2 and -V3 families can't be updated"),
    PatchPoint("sglang.srt.models.minicpm3:MiniCPM3AttentionMLA", why="recognised: its loader derives weights and removes their projection", without="MiniCPM3 can't be updated"),
    PatchPoint("sglang.srt.models.minicpm3:MiniCPM3ForCausalLM.load_weights", ("self", "weights"), "called on a stand-in: what a load derives for its attention", without="MiniCPM3 can't be updated"),
    PatchPoint("sglang.srt.models.gemma4_causal:Gemma4Router.fuse_scale", ("self",), "called after each commit: a router's scale; its `_scale_fused` is read", without="Gemma 4 with experts goes on with the old scales of its routers"),
    PatchPoint("sglang.srt.speculative.spec_info:SpeculativeAlgorithm.is_none", ("self",), "called: is there a draft?"),
    PatchPoint("sglang.srt.speculative.spec_info:SpeculativeAlgorithm.is_ngram", ("self",), "called: does the draft have a model?"),
    PatchPoint("sglang.srt.model_executor.cuda_graph_config:cuda_graph_fully_disabled", why="called: may weights move?", without="on a GPU updates are copied in, also where no graphs are captured"),
    PatchPoint("sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding", why="recognised: padded on purpose"),
    PatchPoint("sglang.srt.layers.rotary_embedding.factory:_ROPE_DICT", why="saved and restored around the skeleton's construction"),
    PatchPoint("sglang.srt.models.transformers:TransformersBase._init_parameters", ("self", "module"), "replaced while the skeleton is built: its parameters stay on meta", without="updates of models that SGLang runs through transformers are refused"),
    PatchPoint("sglang.srt.model_loader.utils:set_default_torch_dtype", ("dtype",), "called: the skeleton's dtype"),
    # the server
    PatchPoint("sglang.srt.observability.http_request_metrics:add_http_request_metrics_middleware", ("app",), "wrapped: adds the middleware", since="0.5.23", without="the server has no /ready and none of our metrics, and /get_model_info doesn't know the version of the weights"),
    PatchPoint("sglang.srt.managers.tokenizer_manager:TokenizerManager.record_config_updates", ("source",), "called: the version in /model_info", without="/model_info does not say the committed version"),
    PatchPoint("sglang.srt.managers.tokenizer_manager:TokenizerManager.config_value", ("name",), "called: the version that it says now", without="/model_info does not say the committed version"),
    # starting
    PatchPoint("sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes", ("server_args",), "wrapped: the engine starts"),
    PatchPoint("sglang.srt.entrypoints.engine:SchedulerInitResult", ("wait_for_ready",), "its function is wrapped: the engine has started"),
    PatchPoint("sglang.srt.managers.scheduler:run_scheduler_process", why="called by `run_scheduler`"),
    PatchPoint("sglang.srt.entrypoints.engine:Engine.run_scheduler_process_func", why="replaced in `make_engine`'s class"),
    PatchPoint("sglang.srt.entrypoints.http_server:launch_server", ("server_args", "run_scheduler_process_func"), "called: the server that we start"),
    PatchPoint("sglang.srt.plugins:load_plugins", why="called, in that server"),
    PatchPoint("sglang.srt.server_args:prepare_server_args", ("argv",), "called: its arguments"),
    PatchPoint("sglang.srt.utils:kill_process_tree", ("parent_pid", "include_parent"), "called: its end"),
    # LoRA slots
    PatchPoint(_LORA_MANAGER + "load_lora_weights", ("self", "lora_ref"), "wrapped: an adapter that an update brought is not the one on disk"),
    PatchPoint(_LORA_MANAGER + "load_lora_weights_from_tensors", ("self", "lora_ref", "tensors"), "wrapped: nor the one that a user sends"),
    PatchPoint(_LORA_MANAGER + "_notify_lora_slots_updated", ("self", "slot_ids"), "called"),
    PatchPoint(_LORA_POOL + "load_lora_weight_to_buffer", ("uid", "buffer_id", "lora_adapter", "lora_modules", "lora_embed_tokens_module", "lora_lm_head_module"), "called: fills a slot"),
    PatchPoint("sglang.srt.lora.lora:LoRAAdapter.initialize_weights_from_tensors", ("self", "tensors"), "called"),
    PatchPoint("sglang.srt.lora.lora_config:LoRAConfig.from_dict", ("config_dict",), "called"),
    PatchPoint("sglang.srt.lora.lora_registry:LoRARef", why="read: id and name"),
    PatchPoint("sglang.srt.lora.utils:get_target_module_name", ("full_module_name", "target_modules"), "called: which buffer a layer's slots are in"),
    PatchPoint("sglang.srt.layers.utils:get_layer_id", ("weight_name",), "called"),
    PatchPoint("sglang.srt.distributed.utils:get_group_rank_size", ("group",), "called: a layer's rank; before, layers have `tp_rank` and `kv_tp_rank`", since="0.5.22"),
    PatchPoint(_LORA_LAYERS + "BaseLayerWithLoRA", why="recognised: around the model's own layers"),
    PatchPoint(_LORA_LAYERS + "QKVParallelLinearWithLoRA", why="recognised: attention's packed projections"),
    PatchPoint(_LORA_LAYERS + "MergedColumnParallelLinearWithLoRA", why="recognised: packed projections"),
    PatchPoint(_LORA_LAYERS + "ColumnParallelLinearWithLoRA", why="recognised"),
    PatchPoint(_LORA_LAYERS + "RowParallelLinearWithLoRA", why="recognised"),
)  # fmt: skip

SGLANG = EngineTable(
    "sglang",
    ("sglang",),
    oldest="0.5.20",
    newest="0.5.23",
    run=("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    points=PATCH_POINTS,
)
