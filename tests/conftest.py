"""Which tests are the smoke tests (`make smoke`), which only `make test-full` runs, and which come first."""

from __future__ import annotations

import gc
import os

import pytest

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # an interpreter for the tests on a GPU may have only what the package needs
    pass
else:  # on a busy machine an example takes as long as it takes
    settings.register_profile("any speed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")

from tests.support.yielding import make_yielding_fair

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported, here and in whatever a test starts: threads of several processes on two cores mostly wait for each
other, spinning. A reference of `transformers` took five times the CPU time."""

os.environ.setdefault("UCX_NET_DEVICES", "lo")
"""Transport `nixl` is there where it names devices."""

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", RAY_worker_register_timeout_seconds="600")
"""For each Ray that a test starts. Its workers have nice 15 by default: beside tests that keep the cores busy they get a few
percent of one, and an actor that took 3 s to start took minutes."""

SMOKE = (
    "tests/wire/",
    "tests/test_face.py",
    "tests/install/test_installer.py",
    "tests/install/test_plan.py",
    "tests/transports/test_shm.py",
    "tests/worker/test_coordinator.py",
    "tests/worker/test_groups.py",
    "tests/worker/test_machine.py",
    "tests/worker/test_server.py",
    "tests/manager/test_manager.py",
    "tests/manager/test_catching_up.py",
    "tests/engines/test_vllm_tokens.py::test_updates_through_every_policy_and_transport_and_back_again[tp2]",
    "tests/engines/test_vllm_faults.py::test_an_installation_that_fails_on_one_rank_is_undone_on_all",
    "tests/engines/test_sglang_tokens.py::test_twenty_times_there_and_back",
)
"""Files, directories and single tests, as pytest names them."""


ENGINES = "tests/engines/"
FULL = (
    "tests/gpu/test_bench.py",
    *(
        f"tests/install/test_trial_memory.py::test_a_trial_takes_no_more_memory_than_was_asked_for_in_advance[{case}"
        for case in ("plan-apart", "loader")
    ),
    "tests/batch/test_async_rl.py::test_memory_is_flat_in_every_process_over_200_steps",
    "tests/batch/test_killed_steps.py::test_an_owner_killed_at_any_step_of_a_put[that replaces rows",
    # models: the second layout of a model, and those whose way another model of the list goes as well
    *(
        f"{ENGINES}test_vllm_models.py::{test}"
        for test in (
            *(
                f"test_five_updates_in_a_row_are_a_fresh_engine_bit_for_bit[{kind}"
                for kind in ("llama-padded-plain", "dense-and-moe-plain", "shipped-head-plain")
            ),
            *(
                f"test_five_updates_in_a_row_reach_what_hangs_beside_the_modules[{kind}-plain"
                for kind in (
                    "w8a8-int8",
                    "gpt-oss-bfloat16",
                    "fp8-kv-scales",
                    "fp8-kv-scales-whole",
                    "bloom",
                    "apertus",
                )
            ),
            "test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened[dense-and-moe-plain",
            "test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened[gpt-oss-bfloat16",
            "test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened[apertus",
            "test_what_a_partial_update_does_not_send_keeps_its_bytes[plain",
            "test_a_tied_head_stays_right_in_five_updates_in_a_row_where_the_engine_tied_it_while_loading[qwen3-plain",
        )
    ),
    # requests in flight: the policies that differ little from one that stays
    *(
        f"{ENGINES}test_sglang_tokens.py::test_requests_in_flight_follow_the_policy_and_their_keys_serve_no_new_request[{kind}"
        for kind in (
            "dp-attention-keep",
            "dp-attention-recompute",
            "dp-attention-abort",
            "dp-attention-drain",
            "tp2-recompute",
            "tp2-drain",
        )
    ),
    f"{ENGINES}test_sglang_tokens.py::test_a_commit_wakes_ranks_that_sleep_on_idle[dp-attention",
    f"{ENGINES}test_sglang_draft.py",
    f"{ENGINES}test_sglang_tokens.py::test_an_updated_engine_is_a_fresh_engine[llama-tied-tp1",
    # LoRA in SGLang: on two ranks, and of the policies those that differ most
    *(
        f"{ENGINES}test_sglang_lora.py::{test}[tp1"
        for test in (
            "test_an_installation_that_fails_on_one_rank_is_undone_on_all",
            "test_an_adapter_that_does_not_fit_is_refused_with_names_and_the_old_one_serves",
            "test_an_adapter_that_sglang_does_not_know_is_refused_with_what_to_do",
            "test_base_and_adapter_are_groups_of_their_own",
            "test_merged_while_streaming_an_engine_serves_what_peft_says",
        )
    ),
    *(
        f"{ENGINES}test_sglang_lora.py::test_requests_in_flight_follow_the_policy[tp1-{policy}"
        for policy in ("abort", "recompute")
    ),
    # of policies and layouts, each once
    f"{ENGINES}test_sglang_tokens.py::test_an_updated_engine_is_a_fresh_engine[qwen3_moe-tp1",
    *(
        f"{ENGINES}test_sglang_tokens.py::test_a_cached_prefix_of_the_old_weights_is_not_used_after_an_idle_update[tp1-{case}"
        for case in ("abort-standby", "drain-copy")
    ),
    *(
        f"{ENGINES}test_vllm_models.py::{test}"
        for test in (
            "test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened[dense-and-moe-packed",
            "test_what_a_partial_update_does_not_send_keeps_its_bytes[packed-copy",
            *(
                f"test_a_trainer_with_a_tied_head_gives_an_untied_engine_both_or_is_refused_with_a_word_on_tying[{case}"
                for case in ("plain-copy", "packed-standby")
            ),
            *(
                "test_a_tied_head_stays_right_in_five_updates_in_a_row_where_the_engine_tied_it_while_loading"
                f"[retied-head-{case}"
                for case in ("plain-tied-copy", "packed-tied-standby", "packed-embedding_alone-copy")
            ),
        )
    ),
    *(
        f"{ENGINES}test_sglang_dtypes.py::test_a_trainer_in_any_dtype_sends_what_sglang_keeps_there_and_back[{case}"
        for case in ("float32-copy", "bfloat16-standby")
    ),
    # pipelines of SGLang: there and back, load, and faults stay
    *(
        f"{ENGINES}test_sglang_pipeline.py::{test}"
        for test in (
            "test_an_updated_pipeline_is_a_fresh_pipeline[qwen3_moe",
            "test_an_updated_pipeline_is_a_fresh_pipeline[llama",
            "test_requests_in_flight_follow_the_policy_and_their_keys_serve_no_new_request",
            "test_a_conversation_that_keeps_its_cache_finds_it_after_an_update_and_nobody_else_does",
            "test_every_token_is_of_exactly_one_version_on_all_stages_while_updates_alternate_under_load[two-slots",
            "test_every_token_is_of_exactly_one_version_on_all_stages_while_updates_alternate_under_load[three-slots-of-one-request-in-chunks-recompute",
            "test_every_token_is_of_exactly_one_version_on_all_stages_while_updates_alternate_under_load[three-stages",
            "test_a_server_of_stages_shows_its_version_is_healthy_while_paused_and_heeds_sglang_s_own_pause",
            "test_an_adapter_is_refused_when_its_group_is_opened_and_the_base_is_updated",
        )
    ),
    f"{ENGINES}test_sglang_pipeline_pauses.py",
    f"{ENGINES}test_nodes.py",
    f"{ENGINES}test_vllm_pipeline_faults.py",  # SGLang's stay
    *(
        f"{ENGINES}test_sglang_pipeline_faults.py::"
        f"test_a_silent_worker_fails_the_update_by_the_deadline_and_takes_the_next_one_when_it_wakes[{case}"
        for case in ("0", "1-sealed")
    ),
    *(
        f"{ENGINES}test_families.py::test_a_family_in_sglang_is_a_fresh_engine_after_every_update[{kind}"
        for kind in ("glm4_moe", "minicpm3", "gpt_oss", "gemma4", "qwen3_next", "llama-fp8", "qwen3-fp8")
    ),
    f"{ENGINES}test_sglang_in_flight.py::test_a_beam_search_does_not_end_the_engine[keep",
    f"{ENGINES}test_sglang_in_flight.py::"
    "test_a_client_that_waits_for_a_vector_hears_that_an_update_has_aborted_its_request[2",
    f"{ENGINES}test_families.py::test_what_each_rank_of_sglang_derives_from_its_shard_follows_the_updates",
    f"{ENGINES}test_families.py::test_the_text_model_of_qwen_3_5",  # in a process of its own
    f"{ENGINES}test_families.py::test_a_model_that_sglang_runs_through_transformers_is_a_fresh_engine_after_every_update[llama",
    f"{ENGINES}test_families.py::test_a_model_that_vllm_runs_through_transformers_is_a_fresh_engine_after_every_update[gpt",
    *(
        f"{ENGINES}test_vllm_tokens.py::test_requests_in_flight_follow_the_policy_and_their_blocks_serve_no_new_request[{kind}"
        for kind in ("pp2-recompute", "pp2-drain")
    ),
    *(
        f"{ENGINES}test_memory.py::test_an_update_takes_the_memory_of_its_policy_and_of_a_module_or_two[{scheme}"
        for scheme in ("w4a16", "fp8 by", "latent", "packed", "loader, part by part")
    ),
    *(
        f"{ENGINES}test_vllm_quantised_load.py::"
        f"test_every_token_of_a_quantised_engine_is_of_its_version_while_updates_alternate[{case}"
        for case in ("copy-llama-fp8", "copy-llama-w4a16", "standby-llama-w")
    ),
    *(
        f"{ENGINES}test_vllm_models.py::test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened[{model}"
        for model in ("opt", "llama")
    ),
    *(
        f"{ENGINES}test_vllm_models.py::test_five_updates_in_a_row_reach_what_hangs_beside_the_modules[{case}"
        for case in ("gpt-oss-float16-plain", "fp8-kv-scales-whole")
    ),
    *(
        f"{ENGINES}test_families.py::test_a_family_in_sglang_is_a_fresh_engine_after_every_update[{kind}"
        for kind in ("gemma2", "apertus")
    ),
    f"{ENGINES}test_vllm_shared_experts.py::test_four_ranks_of_two_cores_are_one_replica",
    f"{ENGINES}test_vllm_shared_experts.py::"
    "test_a_core_that_is_silent_costs_a_bounded_wait_and_the_old_version_is_served[parts",
    f"{ENGINES}test_vllm_shared_experts.py::test_behind_an_external_load_balancer_each_rank_has_a_server",
    f"{ENGINES}test_vllm_shared_experts.py::"
    "test_every_step_and_every_token_is_of_one_version_on_both_ranks_while_updates_alternate[experts-async",
    # ranks that share experts: without expert parallel the first and the last stay
    *(
        f"{ENGINES}test_vllm_shared_experts.py::{test}[parts"
        for test in (
            "test_every_step_and_every_token_is_of_one_version_on_both_ranks_while_updates_alternate",
            "test_requests_of_both_ranks_follow_the_policy",
            "test_no_rank_steps_while_it_is_paused_and_requests_of_then_are_answered_with_the_update",
            "test_an_installation_that_fails_on_one_rank_is_undone_on_both",
            "test_a_torn_replica_refuses_on_both_ranks_and_is_healed_by_an_update",
        )
    ),
    *(
        f"{ENGINES}test_vllm_shared_experts.py::{test}"
        for test in (
            "test_both_ranks_are_one_replica_and_serve_what_a_fresh_engine_would_there_and_back[parts",
            "test_an_installation_that_fails_on_one_rank_is_undone_on_both[experts-copy-0",
            "test_an_installation_that_fails_on_one_rank_is_undone_on_both[experts-standby-1",
            "test_requests_of_both_ranks_follow_the_policy[experts-recompute",
            "test_requests_of_both_ranks_follow_the_policy[experts-drain",
        )
    ),
    *(
        f"{ENGINES}test_vllm_faults.py::test_post_processing_that_fails_half_way_on_one_rank_is_undone_on_all[{case}"
        for case in ("0-copy-commit", "1-standby-seal")
    ),
    f"{ENGINES}test_memory_policy.py",
    *(
        f"{ENGINES}test_hosts_in_trouble.py::{test}[sglang"
        for test in (
            "test_a_full_runtime_directory_costs_records_and_no_update",
            "test_an_engine_that_starts_again_between_two_updates_takes_the_next_one",
        )
    ),
    # faults: of each family the corners stay
    *(
        f"{ENGINES}test_{file}.py::{test}"
        for file in ("vllm_faults", "sglang_faults", "sglang_pipeline_faults", "vllm_old")
        for test in (
            *(
                f"test_a_manager_killed_before_the_commit_leaves_the_old_version_and_nothing_of_its_own[{point}"
                for point in ("writing-standby", "wrote-copy", "wrote-standby", "sealed-copy")
            ),
            "test_a_manager_killed_after_it_sent_the_commit_leaves_the_old_version_or_the_new_one[drain",
            *(
                f"test_an_installation_that_fails_on_one_rank_is_undone_on_all[{case}"
                for case in ("copy-0", "copy-1-before", "standby-0-after", "standby-1")
            ),
            *(
                f"test_a_silent_worker_fails_the_update_by_the_deadline_and_takes_the_next_one_when_it_wakes[{case}"
                for case in ("0-sealed", "1-staging")
            ),
        )
    ),
    f"{ENGINES}test_sglang_pipeline_faults.py::test_an_installation_that_fails_on_one_rank_is_undone_on_all[copy-1-after",
    f"{ENGINES}test_vllm_streaming.py::test_a_silent_worker_fails_the_update_by_the_deadline_and_the_next_one_heals[1",
    f"{ENGINES}test_sglang_streaming.py::test_a_silent_worker_fails_the_update_by_the_deadline_and_the_next_one_heals[0",
    *(
        f"{ENGINES}test_rebuilt_faults.py::"
        f"test_a_fault_where_ranks_reduce_what_they_quantise_by_leaves_all_ranks_as_they_were[{case}"
        for case in ("copy-note-seal-1", "copy-reduce-commit-0", "standby-note-seal-0", "standby-reduce-commit-1")
    ),
    *(
        f"{ENGINES}test_rebuilt_faults.py::"
        f"test_a_fault_where_ranks_of_sglang_derive_weights_leaves_all_ranks_as_they_were[{case}"
        for case in ("copy-commit-1", "standby-seal-0")
    ),
    # families of vLLM: one of the two policies
    *(
        f"{ENGINES}test_families.py::test_a_family_in_vllm_is_a_fresh_engine_after_every_update[{case}"
        for case in (
            *("bert-classifier-copy", "deepseek_v2-standby", "deepseek_v3-copy", "falcon-standby", "hunyuan_moe-copy"),
            *("llama-awq-standby", "llama-compressed-nvfp4-copy", "llama-fp8-by-the-engine-standby"),
            *("llama-fp8-one-kv-scale-copy", "llama-fp8_per_tensor-without-its-kernel-standby", "llama-gptq-copy"),
            *(
                "llama-w4a16-standby",
                "llama-w8a8-int8-static-copy",
                "mamba2-standby",
                "phi-copy",
                "qwen3-classifier-standby",
            ),
        )
    ),
    # what happens in the trainer, whichever engine is on the other side
    *(
        f"{ENGINES}test_sglang_faults.py::{test}"
        for test in (
            "test_a_killed_trainer_rank_fails_the_update_on_its_manager_at_once[wrote",
            "test_a_silent_manager_loses_its_lease_and_is_told_so_when_it_wakes[sealed",
            "test_a_silent_trainer_rank_fails_the_update_on_its_manager_by_the_deadline",
            "test_a_trainer_rank_that_learns_of_its_manager_s_death_fails_with_a_typed_error",
        )
    ),
    *(
        f"{ENGINES}test_sglang_streaming.py::{test}"
        for test in (
            "test_a_killed_trainer_rank_fails_the_update_which_says_that_the_replica_is_torn",
            "test_a_trainer_that_wakes_late_writes_into_nothing_that_is_served",
            "test_a_manager_killed_while_it_streams_tears_the_replica_until_the_next_update[wrote",
        )
    ),
    f"{ENGINES}test_vllm_faults.py::test_a_replica_that_dies_is_reported_and_the_others_take_the_update[worker-sealed",
    f"{ENGINES}test_pause.py::test_a_manager_that_is_killed_leaves_no_engine_standing[sglang-pause",
    f"{ENGINES}test_vllm_lora.py::test_requests_in_flight_follow_the_policy[tp1-recompute",
    f"{ENGINES}test_vllm_lora.py::test_adapters_of_pipeline_stages_are_those_of_one_rank",
    f"{ENGINES}test_vllm_lora.py::test_requests_in_flight_follow_the_policy[tp1-abort",
    f"{ENGINES}test_sglang_lora.py::test_what_latent_attention_derives_from_its_weights_follows_the_updates_of_an_engine_with_slots[copy",
    *(
        f"{ENGINES}test_vllm_one_version.py::"
        f"test_every_step_and_every_token_is_of_exactly_one_version_while_updates_alternate_under_load[{kind}"
        for kind in (
            *("tp2-recompute", "pp2-keep", "pp3", "in-process-recompute"),
            *("async-keep", "async-recompute", "async-in-process", "async-tp2-recompute"),
        )
    ),
    f"{ENGINES}test_sglang_life.py::test_every_token_is_of_exactly_one_version_while_50_updates_alternate_under_load[recompute",
    f"{ENGINES}test_fan_out.py::test_engines_that_pass_an_update_on_generate_meanwhile_and_end_up_with_the_trainers_tokens[tree",
    # programs that start several interpreters: each kind of trainer once more, examples
    *(
        f"{ENGINES}test_trainers.py::test_the_engines_say_what_the_trained_checkpoint_says[{trainer}"
        for trainer in ("fsdp1", "hsdp", "fsdp2-2-x-tp-2", "megatron-ep", "zero3")
    ),
    f"{ENGINES}test_pause.py::test_the_colocated_example_pauses_where_the_engine_cannot_sleep",
    "tests/batch/test_transferqueue.py::test_a_hook_of_ray_registers_the_backend_in_processes_that_know_nothing_of_it",
    "tests/batch/test_ray_store.py::"
    "test_a_rollout_actor_that_is_killed_is_restarted_by_ray_and_its_task_is_lost_or_runs_again[fail",
    # whole programs, which take minutes each
    f"{ENGINES}test_storm.py",
    f"{ENGINES}test_ray.py",
    f"{ENGINES}test_fleet.py",
    f"{ENGINES}test_vllm_draft.py::test_two_ranks",
    f"{ENGINES}test_vllm_images.py::test_under_every_policy_the_next_answers_about_known_images_are_a_fresh_engines[llava]",
    f"{ENGINES}test_vllm_images.py::test_under_every_policy_models_whose_images_torchvision_prepares_answer_as_fresh_engines",
    *(
        f"{ENGINES}test_{engine}_images.py::test_under_every_policy_the_families_that_people_train"
        for engine in ("vllm", "sglang")
    ),
    f"{ENGINES}test_async_rl.py::test_a_batch_holds_rollouts_of_several_versions_and_none_staler_than_it_may",
    f"{ENGINES}test_async_rl.py::test_a_rollout_worker_that_is_killed_loses_its_samples_and_the_loop_goes_on",
    f"{ENGINES}test_worker_in_engine.py",
    f"{ENGINES}test_async_rl.py::test_a_controller_that_is_killed_leaks_nothing_and_a_new_one_goes_on",
)
"""Left to `make test-full`, which runs everything: variants of tests that stay, whole programs, and the long random ones."""

FIRST = (
    "tests/simulation/",  # in two processes of its own, while the next two wait for deadlines
    "tests/manager/test_silence",
    "tests/worker/test_isolation",
    ENGINES,
    "tests/batch/test_ray",
    "tests/batch/test_tr",
    "tests/trainers/",
    "tests/manager/test_cli",
)
"""What takes long comes first, so that no process is left with it at the end."""


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker inherits it
        make_yielding_fair(config.rootpath / "build")


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage need go through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is not marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SMOKE):
            item.add_marker(pytest.mark.smoke)
        if item.nodeid.startswith(FULL):
            item.add_marker(pytest.mark.full)
    items.sort(
        key=lambda item: next((place for place, one in enumerate(FIRST) if item.nodeid.startswith(one)), len(FIRST))
    )
