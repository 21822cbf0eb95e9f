"""Tiny checkpoints of models that transformers lacks: their tensors by name and shape, as published ones have them, and a
configuration of transformers' that carries the entries which vLLM's class of the model reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.models import SHAPE, save_tokenizer

__all__ = ["IN_BOTH", "IN_SGLANG", "REWARDS", "WRITTEN", "Written"]

WORDS, WIDTH, INNER, HEAD = SHAPE["vocab_size"], SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
LAYERS = range(SHAPE["num_hidden_layers"])
EXPERTS = range(4)

Shapes = dict[str, tuple[int, ...]]
Written = tuple[Callable[[Path, int], Path], dict[str, Any]]
"""What makes a checkpoint, and arguments of a vLLM engine beside those that every engine of the tests gets."""


def written(
    architecture: str,
    entries: dict[str, Any],
    shapes: Shapes,
    *,
    config: str = "LlamaConfig",
    without: tuple[str, ...] = (),
    **vllm: Any,
) -> Written:
    """`entries` of `config.json`, and those of `SHAPE` but `without`, in the class `config` of transformers."""

    def make(directory: Path, seed: int) -> Path:
        import transformers

        entries_of_all = SHAPE | {"tie_word_embeddings": False} | entries
        made = getattr(transformers, config)(**{n: v for n, v in entries_of_all.items() if n not in without})
        known = json.loads(made.to_json_string(use_diff=False)) | entries
        known = {name: value for name, value in known.items() if name not in without}
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(
            json.dumps(known | {"architectures": [architecture], "dtype": "float32"}, indent=2)
        )
        random = torch.Generator().manual_seed(seed)
        tensors = {
            name: 0.2 * torch.randn(shape, generator=random) + name.endswith("norm.weight")
            for name, shape in shapes.items()
        }
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        save_tokenizer(directory, ())
        return directory

    return make, vllm


def model(layer: Callable[[int], Shapes], at: str = "model.layers", **names: str) -> Shapes:
    """`layer` by its number; `names`: of the embedding, the last norm and the head, where they are others than Llama's."""
    ends = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"} | names
    found: Shapes = {
        f"{ends['embedding']}.weight": (WORDS, WIDTH),
        f"{ends['norm']}.weight": (WIDTH,),
        f"{ends['head']}.weight": (WORDS, WIDTH),
    }
    for number in LAYERS:
        found |= {f"{at}.{number}.{name}": shape for name, shape in layer(number).items()}
    return found


def norms(*names: str, width: int = WIDTH, part: str = "weight") -> Shapes:
    return {f"{name}.{part}": (width,) for name in names}


NORMS = norms("input_layernorm", "post_attention_layernorm")


def attention(
    at: str, heads: int = 4, key_heads: int = 2, names: str = "q_proj k_proj v_proj o_proj", *, bias: bool = False
) -> Shapes:
    query, key, value, output = names.split()
    rows = {query: heads * HEAD, key: key_heads * HEAD, value: key_heads * HEAD, output: WIDTH}
    found: Shapes = {
        f"{at}.{name}.weight": (count, heads * HEAD if name == output else WIDTH) for name, count in rows.items()
    }
    return found | ({f"{at}.{name}.bias": (count,) for name, count in rows.items()} if bias else {})


def mlp(at: str, inner: int = INNER, names: str = "gate_proj up_proj down_proj") -> Shapes:
    gate, up, down = names.split()
    return {
        f"{at}.{gate}.weight": (inner, WIDTH),
        f"{at}.{up}.weight": (inner, WIDTH),
        f"{at}.{down}.weight": (WIDTH, inner),
    }


def experts(at: str, bias: str = "") -> Shapes:
    """Routed and shared ones, and the router."""
    found: Shapes = {f"{at}.gate.weight": (len(EXPERTS), WIDTH)} | mlp(f"{at}.shared_experts", 64)
    for number in EXPERTS:
        found |= mlp(f"{at}.experts.{number}", 64)
    return found | ({f"{at}.gate.{bias}": (len(EXPERTS),)} if bias else {})


def stacked(at: str, shared: str) -> Shapes:
    """Experts of Step 3, one tensor for all of a kind."""
    count = len(EXPERTS)
    rows: Shapes = {f"{at}.{name}.weight": (count, 64, WIDTH) for name in ("gate_proj", "up_proj")}
    return rows | {f"{at}.down_proj.weight": (count, WIDTH, 64), f"{at}.gate.weight": (count, WIDTH)} | mlp(shared, 64)


def ling(number: int) -> Shapes:
    """A layer as of Ling 2.0: queries, keys and values are one tensor; all layers but the first have experts."""
    return {
        **NORMS,
        "attention.query_key_value.weight": (8 * HEAD, WIDTH),
        "attention.dense.weight": (WIDTH, 4 * HEAD),
        **norms("attention.query_layernorm", "attention.key_layernorm", width=HEAD),
        **(experts("mlp", "expert_bias") if number else mlp("mlp")),
    }


ROUTED: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    "norm_topk_prob": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True,
}  # fmt: skip
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def _plamo3() -> Written:
    layer = {
        **norms("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        **norms("mixer.q_norm", "mixer.k_norm", width=HEAD),
        "mixer.qkv_proj.weight": (8 * HEAD, WIDTH),
        "mixer.o_proj.weight": (WIDTH, 4 * HEAD),
        "mlp.gate_up_proj.weight": (2 * INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
    }
    kinds = ("full_attention", "sliding_attention")
    entries = {"layer_types": list(kinds), "interleaved_sliding_window": [None, 32], "sliding_window": 32}
    entries |= {"rope_local_theta": 10000, "rope_parameters": dict.fromkeys(kinds, ROPE)}
    return written("Plamo3ForCausalLM", entries, model(lambda _: layer, "model.layers.layers"))


def _step3() -> Written:
    def layer(number: int) -> Shapes:
        found = NORMS | {"self_attn.q_proj.weight": (48, WIDTH), "self_attn.inter_norm.weight": (48,)}
        found |= {f"self_attn.{name}_proj.weight": (HEAD, WIDTH) for name in ("k", "v")}
        found |= {"self_attn.wq.weight": (4 * HEAD, 48), "self_attn.o_proj.weight": (WIDTH, 4 * HEAD)}
        return found | (stacked("moe", "share_expert") if number else mlp("mlp"))

    entries = {
        "share_q_dim": 48, "share_expert_dim": 64, "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 64,
        "norm_expert_weight": True, "max_position_embedding": 1024, "moe_layers_enum": "1", "num_key_value_heads": 1,
    }  # fmt: skip
    return written("Step3TextForCausalLM", entries, model(layer))


def _telechat2() -> Written:
    layer = NORMS | mlp("mlp") | norms("mlp.down_proj", "self_attention.dense", part="bias")
    layer |= {"self_attention.query.weight": (WIDTH, WIDTH), "self_attention.dense.weight": (WIDTH, WIDTH)}
    layer |= {"self_attention.key_value.weight": (2 * WIDTH, WIDTH)}
    shapes = model(lambda _: layer, "transformer.h", embedding="transformer.word_embeddings", norm="transformer.ln_f")
    entries = {"n_layer": 2, "n_head": 2, "ffn_hidden_size": INNER, "layer_norm_epsilon": 1e-5, **TWO_HEADS}
    return written("TeleChat2ForCausalLM", entries, shapes, without=("head_dim",))


def _iquest() -> Written:
    shapes = model(lambda _: NORMS | attention("self_attn", 2, 2) | mlp("mlp"))
    for number in LAYERS:
        shapes |= {f"model.gate_projections.{number}.weight": (2, HEAD), f"model.gate_projections.{number}.bias": (2,)}
    return written("IQuestLoopCoderForCausalLM", {"loop_num": 2, "loop_window_size": 32, **TWO_HEADS}, shapes)


def _k2_horizon() -> Written:
    """Its loader puts the rows of queries and keys into another order."""
    layer = NORMS | attention("self_attn") | mlp("mlp") | {"self_attn.gate_proj.weight": (4 * HEAD, WIDTH)}
    layer |= {"self_attn.q_norm.weight": (4 * HEAD,), "self_attn.k_norm.weight": (2 * HEAD,)}
    entries = {
        "layernorm_num_groups": 1, "rope_head_dim": HEAD // 2, "query_key_norm": True, "attention_gate_func": "silu",
        "mova_num_experts": 0, "mova_num_experts_per_tok": 0, "num_experts": 0, "decoder_sparse_step": 1,
        "moe_gate_bias": False, "router_score_func": "sigmoid", "router_scaling_factor": 1.0,
    }  # fmt: skip
    return written("K2HorizonForCausalLM", entries, model(lambda _: layer))


def _sarvam_mla() -> Written:
    def layer(number: int) -> Shapes:
        found = NORMS | {"self_attn.kv_a_proj_with_mqa.weight": (576, WIDTH), "self_attn.kv_a_layernorm.weight": (512,)}
        found |= {"self_attn.q_proj.weight": (4 * 96, WIDTH), "self_attn.kv_b_proj.weight": (4 * 64, 512)}
        found |= {"self_attn.o_proj.weight": (WIDTH, 4 * 32)}
        return found | (experts("mlp", "e_score_correction_bias") if number else mlp("mlp"))

    entries = ROUTED | {
        "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "num_key_value_heads": 4, "n_routed_experts": 4,
    }  # fmt: skip
    return written(
        "SarvamMLAForCausalLM", entries, model(layer), config="DeepseekV2Config", without=("head_dim",),
        attention_backend="CPU_MLA",
    )  # fmt: skip


def _gigachat() -> Written:
    """A gated delta network, then latent attention; norms with a gate of low rank."""

    def gated(name: str, width: int = WIDTH) -> Shapes:
        return {
            f"{name}.weight": (width,),
            f"{name}.gate_up_projection.weight": (16, width),
            f"{name}.gate_down_projection.weight": (width, 16),
        }

    def layer(number: int) -> Shapes:
        found: Shapes = {}
        for name in ("input", "post_attention", "post_self_attn", "post_feedforward"):
            found |= gated(f"{name}_layernorm")
        if not number:
            found |= {
                "in_proj_qkvz.weight": (4 * 64, WIDTH),
                "in_proj_ba.weight": (4, WIDTH),
                "conv1d.weight": (3 * 64, 1, 4),
            }
            found |= {"A_log": (2,), "dt_bias": (2,), "norm.weight": (32,), "out_proj.weight": (WIDTH, 64)}
            inside = {f"self_attn.{n}": found.pop(n) for n in list(found) if n.partition(".")[0] in GATED_DELTA}
            return found | inside | mlp("mlp")
        found |= {"self_attn.q_a_proj.weight": (32, WIDTH), "self_attn.q_b_proj.weight": (4 * 96, 32)}
        found |= {"self_attn.kv_a_proj_with_mqa.weight": (576, WIDTH), "self_attn.kv_b_proj.weight": (4 * 64, 512)}
        found |= {"self_attn.o_proj.weight": (WIDTH, 4 * 32), "self_attn.gate_proj.weight": (4 * 32, WIDTH)}
        found |= gated("self_attn.q_a_layernorm", 32) | gated("self_attn.kv_a_layernorm", 512)
        return found | experts("mlp", "e_score_correction_bias")

    entries = ROUTED | {
        "model_type": "gigachat3_5", "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
        "v_head_dim": 32, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "full_attention_layers": [1],
        "layer_types": None, "rope_theta": 10000.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "rope_parameters": ROPE | {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "mscale": 0.7, "mscale_all_dim": 0.7,
        },
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }  # fmt: skip
    shapes = {n: s for n, s in model(layer).items() if n != "model.norm.weight"} | gated("model.norm")
    return written("GigaChat35ForCausalLM", entries, shapes, config="DeepseekV2Config", without=("head_dim",))


GATED_DELTA = ("in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias", "norm", "out_proj")


def _chatglm() -> Written:
    """Its names of layers, norms and head are its own, and so is its configuration."""
    layer = NORMS | {
        "self_attention.query_key_value.weight": (4 * HEAD, WIDTH),
        "self_attention.query_key_value.bias": (4 * HEAD,),
        "self_attention.dense.weight": (WIDTH, WIDTH),
        "mlp.dense_h_to_4h.weight": (2 * INNER, WIDTH),
        "mlp.dense_4h_to_h.weight": (WIDTH, INNER),
    }
    entries = {
        "multi_query_attention": True, "multi_query_group_num": 1, "num_attention_heads": 2, "kv_channels": HEAD, "num_layers": 2,
        "add_bias_linear": False, "add_qkv_bias": True, "original_rope": True, "ffn_hidden_size": INNER, "seq_length": 1024,
        "apply_residual_connection_post_layernorm": False, "fp32_residual_connection": False, "post_layer_norm": True,
        "rmsnorm": True, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.0, "padded_vocab_size": WORDS,
    }  # fmt: skip
    shapes = model(
        lambda _: layer,
        "transformer.encoder.layers",
        embedding="transformer.embedding.word_embeddings",
        norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
    )
    return written("ChatGLMModel", entries, shapes)


def _step3p5() -> Written:
    """Experts as in Step 3; queries and keys are normed, and each head has a gate."""

    def layer(number: int) -> Shapes:
        found = NORMS | attention("self_attn") | norms("self_attn.q_norm", "self_attn.k_norm", width=HEAD)
        found |= {"self_attn.g_proj.weight": (4, WIDTH)}
        if not number:
            return found | mlp("mlp")
        return found | stacked("moe", "share_expert") | {"moe.router_bias": (len(EXPERTS),)}

    entries = {
        "model_type": "step3p5", "num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "moe_layers_enum": "1",
        "moe_intermediate_size": 64, "share_expert_dim": 64, "max_seq_len": 1024, "rope_theta": [10000.0, 10000.0],
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32, "use_head_wise_attn_gate": True,
        "moe_router_activation": "softmax", "partial_rotary_factors": [0.5, 1.0], "bos_token_id": 1, "eos_token_id": 0,
        "pad_token_id": 0, "swiglu_limits": [0.0, 0.0], "swiglu_limits_shared": [0.0, 0.0], "need_fp32_gate": True,
        "use_moe_router_bias": True, "moe_router_scaling_factor": 1.0, "yarn_only_types": [],
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 4, "num_attention_groups": 2, "head_dim": HEAD,
        },
    }  # fmt: skip
    return written("Step3p5ForCausalLM", entries, model(layer), without=("rope_parameters",))


def _pangu_ultra() -> Written:
    """A DeepSeek-V3 with norms before and after each part."""
    around = norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    around |= {"self_attn.q_a_proj.weight": (32, WIDTH), "self_attn.q_a_layernorm.weight": (32,)}
    around |= {"self_attn.kv_a_proj_with_mqa.weight": (576, WIDTH), "self_attn.kv_a_layernorm.weight": (512,)}
    around |= {"self_attn.q_b_proj.weight": (4 * 96, 32), "self_attn.kv_b_proj.weight": (4 * 64, 512)}
    around |= {"self_attn.o_proj.weight": (WIDTH, 4 * 32)}
    biased = {"mlp.e_score_correction_bias": (len(EXPERTS),)}
    entries = ROUTED | LATENT | {
        "n_routed_experts": 4, "n_shared_experts": 1, "sandwich_norm": True, "q_lora_rank": 32, "rope_theta": 10000.0,
        "router_enable_expert_bias": True,
    }  # fmt: skip
    return written(
        "PanguUltraMoEForCausalLM",
        entries,
        model(lambda number: around | (experts("mlp") | biased if number else mlp("mlp"))),
        config="DeepseekV3Config", without=("head_dim",), attention_backend="CPU_MLA",
    )  # fmt: skip


def _reward(architecture: str, numbers: int, stem: str = "Qwen2", **vllm: Any) -> Written:
    """A Qwen with a head of two layers, which gives each token a number, or more."""
    one = stem == "Qwen2"
    more = {f"self_attn.{name}_proj.bias": (WIDTH,) for name in "qkv"} if one else {}
    more |= {} if one else norms("self_attn.q_norm", "self_attn.k_norm", width=HEAD)
    heads = (2, 2) if one else (4, 2)
    shapes = model(lambda _: NORMS | attention("self_attn", *heads) | more | mlp("mlp"), head="score.0")
    shapes |= {
        "score.0.weight": (WIDTH, WIDTH),
        "score.0.bias": (WIDTH,),
        "score.2.weight": (numbers, WIDTH),
        "score.2.bias": (numbers,),
    }
    without = ("head_dim",) if one else ()
    return written(architecture, TWO_HEADS if one else {}, shapes, config=f"{stem}Config", without=without, **vllm)


def _gaussian_reward() -> Written:
    """A Llama with two heads: pairs of a reward and its spread, and a weight for each pair."""
    shapes = model(lambda _: NORMS | attention("self_attn") | mlp("mlp"), head="score")
    shapes["score.weight"] = (4, WIDTH)
    for place, rows in (("0", WIDTH), ("2", WIDTH), ("4", 2)):
        shapes |= {f"weights.fc.{place}.weight": (rows, WIDTH), f"weights.fc.{place}.bias": (rows,)}
    return written("LlamaForSequenceClassificationWithNormal_Weights", {"num_labels": 4, "pad_token_id": 0}, shapes)


def _internlm2_layer() -> Shapes:
    return {
        **norms("attention_norm", "ffn_norm"),
        **mlp("feed_forward", names="w1 w3 w2"),
        "attention.wqkv.weight": (4 * HEAD, WIDTH),
        "attention.wo.weight": (WIDTH, 2 * HEAD),
    }


def _internlm2_reward() -> Written:
    shapes = model(lambda _: _internlm2_layer(), embedding="model.tok_embeddings", head="v_head")
    shapes["v_head.weight"] = (1, WIDTH)
    return written("InternLM2ForRewardModel", TWO_HEADS | {"num_key_value_heads": 1}, shapes)


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
REWARDS: dict[str, tuple[Written, str, tuple[str, ...]]] = {
    "qwen2-reward": (_reward("Qwen2ForRewardModel", 1), "token_classify", ("vllm", "sglang")),
    "qwen2-process-reward": (
        _reward("Qwen2ForProcessRewardModel", 2, pooler_config={"step_tag_id": 9}),
        "token_classify",
        ("vllm",),
    ),
    "internlm2-reward": (_internlm2_reward(), "token_classify", ("vllm", "sglang")),
    "qwen3-reward": (_reward("Qwen3ForRewardModel", 1, "Qwen3"), "classify", ("sglang",)),
    "llama-gaussian-reward": (_gaussian_reward(), "classify", ("sglang",)),
}
"""Reward models: what makes one, with what an engine answers, and in which engines."""
IN_BOTH = (
    "chatglm", "teleflm", "internlm3", "minicpm", "iquest_loopcoder", "internlm2", "exaone", "orion",
    "deepseek_v1", "sarvam_moe", "sarvam_mla", "step3p5", "iquest_coder",
)  # fmt: skip
"""Of `WRITTEN`, those that SGLang has too."""
IN_SGLANG: dict[str, Written] = {
    "gigachat3_5": _gigachat(),
    "baichuan": written(
        "BaichuanForCausalLM",
        TWO_HEADS,
        model(
            lambda _: (
                NORMS
                | mlp("mlp")
                | {"self_attn.W_pack.weight": (3 * WIDTH, WIDTH), "self_attn.o_proj.weight": (WIDTH, WIDTH)}
            )
        ),
    ),
    "xverse": written(
        "XverseForCausalLM", TWO_HEADS, model(lambda _: NORMS | attention("self_attn", 2, 2) | mlp("mlp"))
    ),
    "qwen": written(
        "QWenLMHeadModel",
        TWO_HEADS | {"layer_norm_epsilon": 1e-5, "intermediate_size": 2 * INNER},
        model(
            lambda _: {
                **norms("ln_1", "ln_2"),
                "attn.c_attn.weight": (3 * WIDTH, WIDTH),
                "attn.c_attn.bias": (3 * WIDTH,),
                "attn.c_proj.weight": (WIDTH, WIDTH),
                "mlp.w1.weight": (INNER, WIDTH),
                "mlp.w2.weight": (INNER, WIDTH),
                "mlp.c_proj.weight": (WIDTH, INNER),
            },
            "transformer.h",
            embedding="transformer.wte",
            norm="transformer.ln_f",
        ),
    ),
}
"""Models of SGLang that vLLM lacks."""
WRITTEN: dict[str, Written] = {
    "chatglm": _chatglm(),
    "teleflm": written(
        "TeleFLMForCausalLM",
        {"use_mup": True, "input_mult": 2.0, "output_mult": 0.5, "mup_scale_factor": 4.0, **TWO_HEADS},
        model(lambda _: NORMS | attention("self_attn", 2, 2) | mlp("mlp")),
    ),
    "internlm3": written(
        "InternLM3ForCausalLM", {"qkv_bias": False}, model(lambda _: NORMS | attention("self_attn") | mlp("mlp"))
    ),
    "plamo3": _plamo3(),
    "step3_text": _step3(),
    "telechat2": _telechat2(),
    "minicpm": written(
        "MiniCPMForCausalLM",
        {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 64, "num_experts": 0, **TWO_HEADS},
        model(lambda _: NORMS | attention("self_attn", 2, 2) | mlp("mlp")),
    ),
    "iquest_loopcoder": _iquest(),
    "internlm2": written(
        "InternLM2ForCausalLM",
        TWO_HEADS | {"num_key_value_heads": 1},
        model(
            lambda _: _internlm2_layer(),
            embedding="model.tok_embeddings",
            head="output",
        ),
    ),
    "exaone": written(
        "ExaoneForCausalLM",
        TWO_HEADS | {"num_key_value_heads": 1, "activation_function": "silu", "layer_norm_epsilon": 1e-5, "num_layers": 2},
        model(
            lambda _: (
                norms("ln_1", "ln_2")
                | attention("attn.attention", 2, 1, "q_proj k_proj v_proj out_proj")
                | mlp("mlp", names="c_fc_0 c_fc_1 c_proj")
            ),
            "transformer.h",
            embedding="transformer.wte",
            norm="transformer.ln_f",
        ),
    ),
    "orion": written(
        "OrionForCausalLM",
        TWO_HEADS,
        norms("model.norm", part="bias")
        | model(
            lambda _: (
                NORMS
                | norms("input_layernorm", "post_attention_layernorm", part="bias")
                | attention("self_attn", 2, 2)
                | mlp("mlp")
            )
        ),
    ),
    "pangu_embedded": written(
        "PanguEmbeddedForCausalLM",
        {"bias": True},
        model(lambda _: NORMS | attention("self_attn", bias=True) | mlp("mlp")),
    ),
    "k2_horizon": _k2_horizon(),
    "deepseek_v1": written(
        "DeepseekForCausalLM",
        ROUTED | TWO_HEADS | {"num_key_value_heads": 1, "n_routed_experts": 4, "n_shared_experts": 1, "moe_layer_freq": 1},
        model(lambda number: NORMS | attention("self_attn", 2, 1) | (experts("mlp") if number else mlp("mlp"))),
    ),
    "param2moe": written(
        "Param2MoEForCausalLM",
        ROUTED,
        model(ling, embedding="model.word_embeddings"),
        hf_overrides={"rope_theta": 10000.0},
    ),
    "sarvam_moe": written(
        "SarvamMoEForCausalLM",
        ROUTED | {
            "use_qkv_bias": False, "use_bias": False, "use_rmsnorm": True, "norm_head": False, "router_dtype": "fp32",
            "embedding_dropout": 0.0, "num_nextn_predict_layers": 0,
        },
        model(ling, embedding="model.word_embeddings"),
    ),
    "sarvam_mla": _sarvam_mla(),
    "step3p5": _step3p5(),
    "pangu_ultra_moe": _pangu_ultra(),
    "iquest_coder": written(
        "IQuestCoderForCausalLM", {}, model(lambda _: NORMS | attention("self_attn") | mlp("mlp"))
    ),
    "telechat3": written("TeleChat3ForCausalLM", {}, model(lambda _: NORMS | attention("self_attn") | mlp("mlp"))),
    "step1": written(
        "Step1ForCausalLM",
        {"num_attention_groups": 2},
        model(lambda _: NORMS | attention("self_attn") | mlp("mlp")),
    ),
}  # fmt: skip
