"""The places of SGLang that the plug-in touches, and why."""

from __future__ import annotations

from inference_plugin.engines.sglang.lora import LORA_TOUCHES
from inference_plugin.engines.touch import Touch

__all__ = ["KNOWN_VERSIONS", "TOUCHES"]

KNOWN_VERSIONS = ("0.5.23",)
"""Versions that the tests run with. `TOUCHES`, not this list, decides whether another one is accepted."""

_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler."
_LOADER = "sglang.srt.model_loader.loader:"

TOUCHES = (
    # the event loop
    Touch(_SCHEDULER + "init_request_dispatcher", ("self",), "wrapped: the model is there; runtime and front start"),
    Touch("sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._pull_raw_reqs", ("self",), "wrapped: our turn joins the requests"),
    Touch("sglang.utils:TypeBasedDispatcher", why="its `_mapping` gets our turn"),
    Touch(_SCHEDULER + "run_batch", ("batch",), "wrapped: notes when a step ran, for the brake"),
    Touch(_SCHEDULER + "_add_request_to_queue", ("req", "is_retracted"), "wrapped: holds new requests during a drain, refuses them while torn"),
    Touch(_SCHEDULER + "_maybe_namespace_elastic_radix_cache", ("req",), "wrapped: new requests get the version's prefix namespace"),
    # pausing, caches, versions
    Touch(_SCHEDULER + "pause_generation", ("recv_req",), "called: retract, in_place; its `_engine_paused` is read"),
    Touch(_SCHEDULER + "continue_generation", ("recv_req",), "called"),
    Touch(_SCHEDULER + "maybe_send_health_check_signal", ("self",), "called while paused: health checks are answered"),
    Touch(_SCHEDULER + "maybe_sleep_on_idle", ("self",), "called while paused"),
    Touch("sglang.srt.managers.utils:is_health_check_generate_req", ("recv_req",), "called: recognises them"),
    Touch("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.release_memory_occupation", ("recv_req",), "called: releases device memory"),
    Touch("sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager.resume_memory_occupation", ("recv_req",), "called: takes it back"),
    Touch("sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput", ("tags",), "made"),
    Touch("sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput", ("tags",), "made"),
    Touch(_SCHEDULER + "abort_request", ("recv_req",), "called: abort all"),
    Touch(_SCHEDULER + "is_fully_idle", ("ignore_waiting",), "called: drained?"),
    Touch(_SCHEDULER + "flush_cache", ("empty_cache",), "called"),
    Touch(_SCHEDULER + "record_weight_version_change", ("new_version",), "called: stamps outputs"),
    Touch("sglang.srt.utils.weight_versions:WeightVersionEvent", ("old_version", "num_output_tokens"), "made: tokens still to be processed"),
    Touch("sglang.srt.runtime_context:get_serving", why="called: the version that is served"),
    Touch(_SCHEDULER + "send_abort_output", why="called: refuses a request"),
    Touch(_SCHEDULER + "_release_aborted_request", ("req",), "called: what a refused request holds"),
    Touch("sglang.srt.managers.scheduler:_make_abort_req", ("req", "finished_reason"), "called: refuses a request"),
    Touch("sglang.srt.managers.io_struct:PauseGenerationReqInput", ("mode",), "made"),
    Touch("sglang.srt.managers.io_struct:ContinueGenerationReqInput", ("torch_empty_cache",), "made"),
    Touch("sglang.srt.managers.io_struct:AbortReq", ("abort_all", "abort_message", "finished_reason"), "made"),
    # the model
    Touch("sglang.srt.runtime_context:get_parallel", why="called: ranks and groups"),
    Touch(_LOADER + "_initialize_model", ("model_config", "load_config", "quant_config"), "called: the skeleton"),
    Touch(_LOADER + "_get_quantization_config", ("model_config", "load_config"), "called: for the skeleton"),
    Touch("sglang.srt.layers.quantization.base_config:QuantizeMethodBase.process_weights_after_loading", ("layer",), "called on stand-ins: what the engine does to a module after a load"),
    Touch("sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbedding", why="recognised: padded on purpose"),
    Touch("sglang.srt.layers.rotary_embedding.factory:_ROPE_DICT", why="saved and restored around the skeleton's construction"),
    Touch("sglang.srt.model_loader.utils:set_default_torch_dtype", ("dtype",), "called: the skeleton's dtype"),
    # starting
    Touch("sglang.srt.managers.scheduler:run_scheduler_process", why="called by `run_scheduler`"),
    Touch("sglang.srt.entrypoints.engine:Engine.run_scheduler_process_func", why="replaced in `make_engine`'s class"),
    *LORA_TOUCHES,
)  # fmt: skip
