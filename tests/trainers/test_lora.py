"""LoRA adapters merged while streaming, on real gloo ranks: what all ranks write together is what PEFT's own
`merge_and_unload()` makes of an unsharded model with the same weights.

All cases run in one launch (`lora_worker.py`); each test below looks at one case.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from tests.trainers.launching import Ranks, assert_is_gold, launch, of, written
from tests.trainers.test_module_adapter import received
from tests.trainers.tiny_models import tiny
from trainer_adapters import LoRAAdapter, MergedLoRAAdapter
from trainer_adapters.sources.chosen import source_for


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("lora_worker.py", 2, tmp_path_factory.mktemp("lora"))


BIT_FOR_BIT = [
    "trained_by_real_steps",
    "unsharded_on_every_rank",
    "rank_stabilised_with_patterns",
    "two_active_adapters",
    "one_of_two_adapters",
    "base_in_bf16",
    "sent_as_bf16",
    "transposed_with_biases",
    "biases_of_adapted_layers_and_of_adapters",
    "modules_to_save",
    "adapted_embeddings",
    "fused_projections",
    "renamed_and_filtered",
]
TO_THE_LAST_PLACE = ["row_norms_of_dora", "stacked_experts"]
"""PEFT computes these otherwise than row by row and expert by expert: they are equal up to the order of a sum."""
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize("case", BIT_FOR_BIT)
def test_merged_slices_equal_merge_and_unload_bit_for_bit(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    manifest, values, _ = written(seen, seen[0]["collectives"])
    assert_is_gold(values, seen[0]["gold"], manifest.tied)
    assert manifest.tied in ({}, TIED)


@pytest.mark.parametrize("case", TO_THE_LAST_PLACE)
def test_norms_of_rows_and_stacked_experts_equal_merge_and_unload_up_to_the_last_place(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    _, values, _ = written(seen, seen[0]["collectives"])
    assert set(values) >= set(seen[0]["gold"]) - set(TIED)
    for name, value in values.items():
        torch.testing.assert_close(value, seen[0]["gold"][name], rtol=4 * torch.finfo(torch.float32).eps, atol=1e-8)


@pytest.mark.parametrize(
    "case", ["alone_rank_stabilised_with_patterns", "alone_and_not_active", "alone_as_bf16", "alone_transposed"]
)
def test_an_adapter_alone_is_what_peft_saves_of_it_with_its_scaling(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    manifest, values, _ = written(seen, seen[0]["collectives"])
    assert_is_gold(values, seen[0]["gold"], manifest.tied)
    assert values, "something must have been sent"


@pytest.mark.parametrize("model_type", ["qwen3", "nemotron_h", "hrm_text", "ernie4_5_vl_moe", "qwen2_vl"])
def test_an_adapter_of_a_model_that_memory_names_otherwise_has_the_names_that_peft_saves(
    model_type: str, tmp_path: Path
) -> None:
    """transformers' rules for the names of checkpoints would match in them, too: "base_backbone.model..."."""
    targets = ["q_proj", "o_proj", "in_proj", "up_proj"]
    model = get_peft_model(tiny(model_type), LoraConfig(r=2, lora_alpha=6, target_modules=targets))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    arrived = received(LoRAAdapter(model))
    assert sorted(arrived) == sorted(saved)
    for name, tensor in saved.items():
        assert torch.equal(arrived[name], tensor * 3 if ".lora_B." in name else tensor), name


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("refuse_alone_dora", ["the changes of adapter 'default' to", "q_proj.weight"]),
        ("refuse_alone_biases_of_adapters", ["the changes of adapter 'default' to", "c_attn.bias"]),
        ("refuse_alone_biases_beside_no_bias", ["q_proj has an adapter with a bias (lora_bias=True)"]),
        ("refuse_alone_biases_of_the_base", ["the changes of adapter 'default' to", "biases ('all')"]),
        ("refuse_alone_modules_to_save", ["the changes of adapter 'default' to", "lm_head"]),
        ("refuse_alone_embeddings", ["the changes of adapter 'default' to", "embed_tokens.weight"]),
        ("refuse_alone_stacked_experts", ["the changes of adapter 'default' to", "experts.gate_up_proj"]),
        ("refuse_alone_another_name", ["no layer has an adapter named 'policy'"]),
    ],
)
def test_what_slots_cannot_hold_is_refused_by_name(ranks: Ranks, case: str, parts: list[str]) -> None:
    for seen in of(ranks, case):
        assert seen["error"] == "ManifestMismatch", seen
        assert [part for part in parts if part not in seen["text"]] == [], seen["text"]


def test_a_and_b_are_gathered_in_a_few_collectives_and_the_base_never(ranks: Ranks) -> None:
    for rank in of(ranks, "trained_by_real_steps"):
        assert rank["collectives"] == 2 + 2, "who has what, twice; and one bucket, a broadcast a rank"
    for rank in of(ranks, "unsharded_on_every_rank"):
        assert rank["collectives"] == 0


def test_no_adapter_is_gathered_where_what_is_sent_has_none(ranks: Ranks) -> None:
    seen = of(ranks, "filtered_to_norms")
    manifest, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)


def test_bits_do_not_depend_on_the_sharding_and_differ_from_one_large_product_in_the_last_place(ranks: Ranks) -> None:
    seen = of(ranks, "of_many_tiles")[0]
    _, split, _ = written(of(ranks, "tensor_parallel_of_many_tiles"), 2 + 1)
    for name, gold in seen["gold"].items():
        assert torch.equal(seen["whole"][name], seen["rows"][name])
        assert torch.equal(seen["whole"][name], split[name])
        # rank 16: at most so many roundings of terms below 0.1, far below what bf16 or a training step can see
        assert (seen["whole"][name] - gold).abs().max() < 16 * torch.finfo(torch.float32).eps * 0.1


def test_ranks_of_a_process_group_send_the_whole_model_together(ranks: Ranks) -> None:
    for seen in of(ranks, "unsharded_in_a_part_of_the_world"):
        assert seen["sent"] == seen["all"] > seen["share"]


def test_the_model_is_not_touched_and_updates_follow_it(ranks: Ranks) -> None:
    for seen in of(ranks, "several_updates"):
        assert seen["untouched"], "the base was merged in place"
        assert seen["same"]
        assert seen["changed"]
        assert not torch.equal(seen["first"], seen["second"])


def test_adapters_are_gathered_as_the_managers_configuration_says(ranks: Ranks) -> None:
    for seen in of(ranks, "gathered_as_the_manager_says"):
        assert seen == {"sizes": [5 << 20], "timeout_s": 77, "all": True}


def test_a_switch_of_adapters_between_manifest_and_slices_is_noticed(ranks: Ranks) -> None:
    for seen in of(ranks, "several_updates"):
        assert seen["error"] == "ManifestMismatch"
        assert "adapters were switched" in seen["text"]


@pytest.mark.parametrize(
    ("case", "error", "parts"),
    [
        ("refuse_merged_in_place", "ManifestMismatch", ["q_proj has default merged", "unmerge_adapter()"]),
        ("refuse_disabled", "ManifestMismatch", ["q_proj is disabled at the moment", "outside of disable_adapter()"]),
        ("refuse_dora_by_columns", "ManifestMismatch", ["self_attn.q_proj.weight[0:20, ", "shard them by rows"]),
        ("refuse_two_adapters_with_dora", "ManifestMismatch", ["q_proj has DoRA adapter default beside another"]),
        ("refuse_a_variant_without_a_rule", "ManifestMismatch", ["adapter default of variant ALoraLinearVariant"]),
        (
            "refuse_biases_beside_no_bias",
            "ManifestMismatch",
            ["q_proj has an adapter with a bias", "no bias of its own"],
        ),
        (
            "refuse_an_adapter_for_a_part_of_a_layer",
            "ManifestMismatch",
            ["lm_head has a weight [251, 36] and an adapter for [125, 36]", "don't target it"],
        ),
        ("refuse_convolutions", "ManifestMismatch", ["0 is a lora.Conv2d", "merge_and_unload()"]),
        ("refuse_tied_weights_adapted_in_one_place", "ManifestMismatch", ["model.embed_tokens.weight", "tie_word"]),
        ("refuse_tied_weights_saved_in_one_place", "ManifestMismatch", ["lm_head.weight and", "modules_to_save"]),
        ("refuse_other_adapters_than_lora", "ArgumentError", ["that are no LoRA", "merge_and_unload()"]),
        ("refuse_a_model_without_adapters", "ArgumentError", ["no LoRA layers", "use FSDPAdapter"]),
        ("refuse_fsdp1", "ArgumentError", ["shard with fully_shard"]),
        ("refuse_a_typo_in_rename", "ManifestMismatch", ["rename has names", "model.norm (1 in all)"]),
    ],
)
def test_what_cannot_be_merged_rightly_is_refused_on_every_rank_by_name(
    ranks: Ranks, case: str, error: str, parts: list[str]
) -> None:
    for seen in of(ranks, case):
        assert seen["error"] == error, seen
        assert [part for part in parts if part not in seen["text"]] == [], seen["text"]
        assert seen.get("after") is None, "it must work again afterwards"


def test_a_rank_with_another_adapter_is_an_error_on_all_and_no_hang(ranks: Ranks) -> None:
    for seen in of(ranks, "refuse_another_rank_of_the_adapter_on_one_trainer_rank"):
        assert seen["error"] == "ManifestMismatch"
        assert "trainer rank 1 has another model" in seen["text"]


def test_a_plain_adapter_sends_no_base_model_by_mistake(ranks: Ranks) -> None:
    for seen in of(ranks, "refuse_a_plain_adapter"):
        assert seen["error"] == "ArgumentError" and "MergedLoRAAdapter" in seen["text"]


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_a_model_that_learned_a_prompt_is_refused_before_anything_is_sent(config: PeftConfig) -> None:
    """An engine refuses its names, but not in these words."""
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    model: Any = get_peft_model(LlamaForCausalLM(LlamaConfig(**shape)), config)
    for sent in (model, torch.nn.Sequential(model)):
        with pytest.raises(ArgumentError, match=r"prefix or P-tuning.*get_base_model\(\)"):
            source_for(sent)
    if not config.is_adaption_prompt:
        assert source_for(model.get_base_model()) is not None


@pytest.mark.parametrize(
    ("kind", "warned"), [("olora", True), ("pissa_niter_2", True), ("gaussian", False), (True, False)]
)
def test_an_adapter_that_took_a_part_of_the_base_is_warned_about(
    kind: bool | str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=kind)  # type: ignore[arg-type]
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), config)
    with caplog.at_level(logging.WARNING):
        LoRAAdapter(model)
    assert (f"init_lora_weights={kind!r}, which changed the base weights" in caplog.text) == warned


def test_an_adapter_over_a_quantised_base_is_sent_alone_and_not_merged() -> None:
    """QLoRA. The layers' class stands in for that of bitsandbytes, which the locked environments lack."""
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(8, 8)), LoraConfig(r=2, lora_alpha=6, target_modules=["0"])
    )
    layer = model.base_model.model[0]
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    layer.__class__ = type("Linear4bit", (torch.nn.Module, LoraLayer), {"__module__": "peft.tuners.lora.bnb"})
    layer.base_layer.weight = torch.nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    source = LoRAAdapter(model)
    names = [spec.name.rpartition(".")[0].rpartition(".")[2] for spec in source.manifest().tensors]
    sent = {names[piece.box.tensor]: piece.tensor for piece in source.slices()}
    assert torch.equal(sent["lora_A"], layer.lora_A["default"].weight)
    assert torch.equal(sent["lora_B"], layer.lora_B["default"].weight * 3)
    with pytest.raises(ManifestMismatch, match=r"lora\.Linear4bit, which has no rule here"):
        MergedLoRAAdapter(model).manifest()


def linear_with_adapter(**options: Any) -> Any:
    torch.manual_seed(5)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), LoraConfig(r=2, target_modules=["0"]), **options)
    torch.nn.init.normal_(model.base_model.model[0].lora_B["default"].weight)
    return model


def test_a_model_of_peft_s_mixed_class_is_sent_as_any_other() -> None:
    mixed, plain = linear_with_adapter(mixed=True), linear_with_adapter()
    for adapter in (MergedLoRAAdapter, LoRAAdapter):
        sent, expected = received(adapter(mixed)), received(adapter(plain))
        assert sorted(sent) == sorted(expected)
        assert all(torch.equal(sent[name], expected[name]) for name in sent)


@pytest.mark.parametrize("computed", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
def test_a_layer_whose_a_and_b_are_computed_at_each_use_is_refused_by_name(computed: Any) -> None:
    model = linear_with_adapter()
    for factor in ("lora_A", "lora_B"):
        computed(getattr(model.base_model.model[0], factor)["default"])
    for adapter in (MergedLoRAAdapter, LoRAAdapter):
        with pytest.raises(
            ManifestMismatch, match=r"no parameters: .*0\.lora_A\.default\.weight.*remove_parametrizations"
        ):
            adapter(model).manifest()
