"""Experts that transformers stacks in memory: what is sent is what `save_pretrained` writes, name by name, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.tensors import bytes_view
from tests.trainers.test_module_adapter import received
from trainer_adapters import ModuleAdapter
from trainer_adapters.sources.experts import STACKED

BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARED = {"intermediate_size": 24, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPED = {"intermediate_size": 24, "moe_intermediate_size": 10, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
DEEP = {**GROUPED, "n_shared_experts": 1, "first_k_dense_replace": 1}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ALL_SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
SECOND_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**SHARED, "num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1, "head_dim": 8}),
    "axk1": ("AXK1", {**DEEP, **LATENT}),
    "cohere2_moe": ("Cohere2Moe", {**ALL_SPARSE, **SLIDING, "intermediate_size": 10, "num_experts": 4}),
    "deepseek_v2": ("DeepseekV2", {**DEEP, **LATENT}),
    "deepseek_v3": ("DeepseekV3", {**DEEP, **LATENT}),
    "deepseek_v32": ("DeepseekV32", {**DEEP, **LATENT, **INDEXED}),
    "dots1": ("Dots1", DEEP),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 10, "intermediate_size": 24},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**SHARED, **SECOND_SPARSE, **SLIDING, "num_experts": 4, "n_group": 1, "topk_group": 1},
    ),
    "flex_olmo": ("FlexOlmo", {"intermediate_size": 10, "num_experts": 3}),
    "glm4_moe": ("Glm4Moe", {**DEEP, "head_dim": 8}),
    "glm4_moe_lite": ("Glm4MoeLite", {**DEEP, **LATENT}),
    "glm_moe_dsa": ("GlmMoeDsa", {**DEEP, **LATENT, **INDEXED}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 10, "intermediate_size": 24, "head_dim": 8},
    ),
    "jamba": (
        "Jamba",
        {"intermediate_size": 24, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 2},
    ),
    "laguna": (
        "Laguna",
        {
            **SHARED,
            **SECOND_SPARSE,
            **SLIDING,
            "num_experts": 4,
            "num_attention_heads_per_layer": [2, 2],
            "head_dim": 8,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {**SHARED, "num_experts": 4, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "longcat_flash": (
        "LongcatFlash",
        {**LATENT, "n_routed_experts": 4, "zero_expert_num": 1, "moe_topk": 2, "expert_ffn_hidden_size": 10}
        | {"ffn_hidden_size": 24, "num_layers": 2},
    ),
    "mellum": ("Mellum", {**SHARED, **ALL_SPARSE, "num_experts": 3, "head_dim": 8}),
    "mimo_v2_flash": ("MiMoV2Flash", {**GROUPED, **SECOND_SPARSE, **SLIDING, "head_dim": 8, "v_head_dim": 8}),
    "minimax": (
        "MiniMax",
        {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8, "layer_types": LINEAR["layer_types"]},
    ),
    "minimax_m2": ("MiniMaxM2", {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8, "rotary_dim": 4}),
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 3}),
    "olmoe": ("Olmoe", {"intermediate_size": 10, "num_experts": 3}),
    "phimoe": ("Phimoe", {"intermediate_size": 24, "num_local_experts": 3}),
    "qwen2_moe": ("Qwen2Moe", {**SHARED, "num_experts": 3}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {**SHARED, **LINEAR, "num_experts": 3, "head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", {**SHARED, "num_experts": 3, "head_dim": 8}),
    "qwen3_next": ("Qwen3Next", {**SHARED, **LINEAR, "num_experts": 3, "head_dim": 8}),
    "solar_open": ("SolarOpen", {**DEEP, "head_dim": 8}),
    "gpt_oss": ("GptOss", {"intermediate_size": 24, "num_local_experts": 3, "head_dim": 8}),
    "qwen3": ("Qwen3", {"intermediate_size": 24, "head_dim": 8}),
}


def tiny(model_type: str) -> Any:
    """A model of this type with random weights; its router's bias isn't zero."""
    stem, options = MODELS[model_type]
    torch.manual_seed(13)
    config: Any = getattr(transformers, f"{stem}TextConfig" if model_type.endswith("_text") else f"{stem}Config")
    model = getattr(transformers, f"{stem}ForCausalLM")(config(**BASE, **options))
    assert model.config.model_type == model_type
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            tensor.normal_()
    return model


def test_the_tables_models_are_all_compared() -> None:
    assert set(STACKED) < set(MODELS)


@pytest.mark.parametrize("model_type", MODELS)
def test_names_and_values_are_those_that_save_pretrained_writes(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    arrived = received(*(ModuleAdapter(model, rank=rank, world_size=3) for rank in range(3)))
    assert sorted(arrived) == sorted(saved)
    for name, tensor in saved.items():
        assert arrived[name].dtype == tensor.dtype and arrived[name].shape == tensor.shape, name
        assert torch.equal(bytes_view(arrived[name]), bytes_view(tensor)), name


def test_dtype_rules_and_filters_see_each_expert() -> None:
    model = tiny("deepseek_v3").to(torch.bfloat16)
    source = ModuleAdapter(
        model,
        dtype_rules={"*.experts.0.*": torch.float32},
        include=["*.mlp.*"],
        exclude=["*.experts.[12].*", "*.shared_experts.*"],
    )
    dtypes = {spec.name: spec.dtype for spec in source.manifest().tensors}
    assert {name.split("mlp.")[1]: dtype for name, dtype in dtypes.items() if "layers.1." in name} == {
        "gate.weight": "bfloat16",
        "gate.e_score_correction_bias": "bfloat16",
        **{
            f"experts.{i}.{p}_proj.weight": d
            for i, d in ((0, "float32"), (3, "bfloat16"))
            for p in ("gate", "up", "down")
        },
    }
    arrived = received(source)
    stacked = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(arrived["model.layers.1.mlp.experts.0.up_proj.weight"], stacked[0, 10:].float())


def test_a_router_bias_that_is_kept_in_fp32_stays_so() -> None:
    model = tiny("deepseek_v3").to(torch.bfloat16)
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = torch.randn(4)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    arrived = received(ModuleAdapter(model, dtype_rules={"*bias": torch.float32, "*": torch.bfloat16}))
    assert arrived[bias].dtype == torch.float32
    assert torch.equal(arrived[bias], gate.e_score_correction_bias)


def test_a_wrapper_around_the_model_and_a_rename_change_nothing_about_its_experts() -> None:
    wrapper = nn.Module()
    wrapper.policy = tiny("qwen3_moe")
    arrived = received(ModuleAdapter(wrapper, rename=lambda name: name.removeprefix("policy.")))
    assert sorted(arrived) == sorted(received(ModuleAdapter(wrapper.policy)))


@pytest.mark.parametrize("shape", [(3, 16, 20), (3, 21, 16), (60, 16)])
def test_experts_stacked_in_another_way_are_refused_never_cut_wrongly(shape: tuple[int, ...]) -> None:
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.gate_up_proj = nn.Parameter(torch.randn(shape))
    with pytest.raises(
        ManifestMismatch, match=r"layers.1.mlp.experts.gate_up_proj: experts of shape .* in a known way"
    ):
        ModuleAdapter(model).manifest()


def test_a_model_type_that_is_not_in_the_table_keeps_its_names() -> None:
    model = tiny("qwen3_moe")
    model.config.model_type = "next_years_moe"
    names = [spec.name for spec in ModuleAdapter(model).manifest().tensors]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
