"""Model families for `make models`: one table, and tiny random checkpoints of each.

A family is a model class of transformers with a tiny configuration, made from a seed without the network. Two seeds are two
versions of one model: every tensor differs. `make_versions` checks that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional

from tests.support.checkpoints import HALF_HEADS, MAKERS, NO_HEAD_DIM, REMOVED, Maker, load, maker_of, noise, rewrite
from tests.support.models import make_gemma3_vision, make_llava, make_paligemma, make_qwen_vl
from tests.support.multimodal import FAMILIES as MULTIMODAL
from tests.support.multimodal_asked import ASKED, WITHOUT_MEDIA, WITHOUT_TEXT
from tests.support.multimodal_latest import FOR_GPUS, IN_VLLM_ONLY, LATEST
from tests.support.multimodal_more import MORE
from tests.support.multimodal_newest import IN_SGLANG_ONLY, NEWEST, POOLED, TEXT_ONLY
from tests.support.multimodal_rest import REST
from tests.support.quantised import FOR_BOTH, FOR_VLLM, FOUR_BITS, FP8, QUANTISED
from tests.support.remote_checkpoints import REMOTE, REMOTE_TEXT
from tests.support.remote_hybrids import HYBRIDS, OF_A_CPU
from tests.support.remote_media import REMOTE_MEDIA
from tests.support.remote_newest import REMOTE_NEWEST
from tests.support.written_checkpoints import IN_BOTH, IN_SGLANG, REWARDS, WRITTEN
from tests.support.written_newest import IN_SGLANG_TOO, INKLING, KIMI_K3

__all__ = ["FAMILIES", "Answer", "Family", "make_versions"]

Answer = Literal["tokens", "embed", "classify", "token_embed", "token_classify"]

Tensors = dict[str, torch.Tensor]
Publish = Callable[[Tensors], Tensors]

FORM = (
    *(".weight_shape", ".g_idx", ".qzeros", ".num_batches_tracked"),
    *(".ngram_heads_vocab_sizes", ".ngram_heads_offsets", ".layer_multipliers"),
)
"""Tensors that are the same in every version: how others of a quantised checkpoint are packed, counts, and how n-grams are
numbered."""
NOISE = 0.2
"""Weight of the noise that every tensor gets, beside the initialisation by transformers."""


@dataclass(frozen=True)
class Family:
    """One family: how its checkpoints are made, and how engines are started with them."""

    name: str
    maker: Maker
    answer: Answer = "tokens"
    """What an engine answers with: greedy tokens, or a pooled vector per prompt or per token."""
    dtype: str = "float32"
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of a vLLM engine beside those that every engine of the tests gets."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Arguments of an SGLang engine beside those that every engine of the tests gets."""
    engines: tuple[str, ...] = ("vllm", "sglang")
    torchvision: bool = False
    """Whether vLLM's module of the model imports torchvision, although the model reads text only: the module also has a class
    that reads images."""
    stand_ins: bool = False
    """Whether SGLang's processes import `sglang_stand_ins`, and attend as that does."""
    sglang_for_gpus: bool = False
    """Whether SGLang takes its code for GPUs (`sglang_gpu_classes`), which answers nothing."""
    medium: str = ""
    """"image" or "sound", if vLLM is also asked about some."""
    place: tuple[int, ...] = ()
    """A prompt with the place of one image or sound."""
    text: bool = True
    """Whether it answers a prompt without an image or sound."""
    gpu_class: str = ""
    """The package of vLLM whose class for GPUs it takes (`gpu_classes`), which answers nothing."""


def make_versions(family: Family, directory: Path) -> tuple[Path, Path]:
    """Two checkpoints of the family. Raises AssertionError if a tensor is the same in both."""
    one, two = (family.maker(directory / f"{family.name}-{seed}", seed) for seed in (1, 2))
    first, second = load(one), load(two)
    same = [name for name in first if torch.equal(first[name], second[name]) and not name.endswith(FORM)]
    assert not same, f"equal in both versions: {', '.join(same)}"
    return one, two


def _lively_model(
    config: str, model: str, *, dtype: torch.dtype, entries: dict[str, Any], publish: Publish, overrides: dict[str, Any]
) -> Maker:
    """A model of transformers in which every floating tensor gets noise of its own: some start as constants. `entries` replace
    those of the saved `config.json`."""
    plain = maker_of(config, model, dtype=dtype, **overrides)

    def build(directory: Path, seed: int) -> Path:
        path = plain(directory, seed)
        tensors = {name: _with_noise(tensor, seed, i) for i, (name, tensor) in enumerate(load(path).items())}
        return rewrite(path, publish(tensors), **entries)

    return build


def _without_experts_that_pass_on(tensors: Tensors) -> Tensors:
    """As LongCat-Flash is published: transformers has half of the tensors of the experts that compute nothing."""
    return {name: tensor for name, tensor in tensors.items() if not re.search(r"experts\.[45]\.", name)}


def _as_bailing(tensors: Tensors) -> Tensors:
    """A model of transformers with the names of Ling and Ring: queries, keys and values are one tensor."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensor, *(tensors[name.replace("q_proj", part)] for part in ("k_proj", "v_proj"))]
            made[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            for old, new in _BAILING.items():
                name = name.replace(old, new)
            made[name] = tensor
    return made


_BAILING = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "embed_tokens": "word_embeddings",
    "e_score_correction_bias": "expert_bias",
}


def _as_mimo_v2(tensors: Tensors, chunks: int = 1) -> Tensors:
    """Queries, keys and values are one tensor: each chunk of it has its part of all three."""
    made = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", part)].chunk(chunks) for part in ("q_proj", "k_proj", "v_proj")]
            made[name.replace("q_proj", "qkv_proj")] = torch.cat([part[i] for i in range(chunks) for part in parts])
        elif "k_proj" not in name and "v_proj" not in name:
            made[name] = tensor
    return made


def _as_mimo_v2_fp8(tensors: Tensors) -> Tensors:
    """That tensor in FP8, with a scale for each 128 rows."""
    made = _as_mimo_v2(tensors, chunks=2)
    for name in [name for name in made if "qkv_proj" in name]:
        blocks = made[name].float().view(-1, 128, 128)
        scales = blocks.abs().amax((1, 2), keepdim=True) / 400
        made[name] = (blocks / scales).view(made[name].shape).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales.view(-1, 1)
    return made


def _as_hy_v4(tensors: Tensors) -> Tensors:
    """With the published names, which transformers does not write back."""
    made = {}
    for name, tensor in tensors.items():
        name = re.sub(r"hc_pre\.(hc_\w+_layer)\.", r"\1.hc_pre.", name).replace("hc_pre.hc_head", "hc_head")
        made[re.sub(r"(mlp|shared_experts)\.linear_gate", r"\1.gate_proj", name)] = tensor
    return made


def _as_olmo_hybrid(tensors: Tensors) -> Tensors:
    """With the names that vLLM's loader has, of which transformers writes older ones."""
    new = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
    return {re.sub("|".join(new), lambda old: new[old[0]], name): tensor for name, tensor in tensors.items()}


def _in_fp8_blocks(tensors: Tensors) -> Tensors:
    """As DeepSeek publishes its models: matrices of linear layers in FP8, with a scale for each block of 128 x 128."""
    made = {}
    for name, tensor in tensors.items():
        if not re.search(r"(_proj|_mqa|\.wk|\.wq_b)\.weight$", name) or "weights_proj" in name:
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = functional.pad(tensor.float(), (0, -columns % 128, 0, -rows % 128)).unflatten(1, (-1, 128))
        blocks = blocks.unflatten(0, (-1, 128))
        scales = blocks.abs().amax((1, 3), keepdim=True) / 400
        made[name] = (blocks / scales).flatten(2).flatten(0, 1)[:rows, :columns].to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales[:, 0, :, 0]
    return made


def _as_mistral(tensors: Tensors) -> Tensors:
    """A DeepSeek-V3 with Mistral's own names of tensors. It has no biases of experts."""
    made = {}
    for name, tensor in tensors.items():
        if not name.endswith("e_score_correction_bias"):
            for old, new in _MISTRAL.items():
                name = re.sub(old, new, name)
            made[name] = tensor
    return made


_MISTRAL = {
    r"^model\.": "",
    "lm_head": "output",
    "embed_tokens": "tok_embeddings",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    r"self_attn\.(q|kv)_a_layernorm": r"attention.\1_a_norm",
    r"self_attn\.(q_a|q_b|kv_a|kv_b|o)_proj": r"attention.w\1",
    r"mlp\.(gate|up|down)_proj": r"feed_forward.\1_proj",
    r"mlp\.(gate|experts|shared_experts)\.": r"\1.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def _as_colbert(tensors: Tensors) -> Tensors:
    """A BERT with a projection of each token, made of rows of the embedding; vLLM builds the layer while it loads."""
    rows = tensors["embeddings.word_embeddings.weight"][:16]
    return {f"bert.{n}": t for n, t in tensors.items() if not n.startswith("pooler")} | {"linear.weight": rows.clone()}


def _with_a_linear_layer(prefix: str = "") -> Publish:
    """Beside a model whose tensors begin with `prefix`, a projection of each token's vector to 16 numbers."""

    def publish(tensors: Tensors) -> Tensors:
        rows = next(tensor for name, tensor in tensors.items() if "embed" in name and tensor.dim() == 2)[:16]
        return {f"{prefix}{name}": tensor for name, tensor in tensors.items()} | {"linear.weight": rows.clone()}

    return publish


def _with_noise(tensor: torch.Tensor, seed: int, number: int) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor + noise(tensor, 100 * seed + number) * NOISE


def _family(
    name: str,
    stem: str,
    *,
    config: str = "",
    model: str = "",
    dtype: str = "float32",
    answer: Answer = "tokens",
    vllm: dict[str, Any] | None = None,
    sglang: dict[str, Any] | None = None,
    engines: tuple[str, ...] = ("vllm", "sglang"),
    architecture: str = "",
    entries: dict[str, Any] | None = None,
    torchvision: bool = False,
    stand_ins: bool = False,
    gpu_class: str = "",
    sglang_for_gpus: bool = False,
    publish: Publish = dict,
    **overrides: Any,
) -> Family:
    """The family of `{stem}Config` and `{stem}ForCausalLM`; `overrides` go to the configuration, on top of `SHAPE`.
    `architecture`: the name in published checkpoints, where transformers calls the class otherwise. `entries`: of published
    `config.json` files, where transformers writes others. `publish`: makes the tensors of published checkpoints of those that
    transformers saves."""
    maker = _lively_model(
        config or f"{stem}Config",
        model or f"{stem}ForCausalLM",
        dtype=getattr(torch, dtype),
        entries=({"architectures": [architecture]} if architecture else {}) | (entries or {}),
        publish=publish,
        overrides=overrides,
    )
    more = {
        "torchvision": torchvision,
        "stand_ins": stand_ins,
        "gpu_class": gpu_class,
        "sglang_for_gpus": sglang_for_gpus,
    }
    return Family(name, maker, answer, dtype, vllm or {}, sglang or {}, engines, **more)


def _existing(
    name: str,
    kind: str,
    dtype: str = "float32",
    vllm: dict[str, Any] | None = None,
    sglang: dict[str, Any] | None = None,
    *,
    stand_ins: bool = False,
    sglang_for_gpus: bool = False,
) -> Family:
    """A family that `checkpoints.MAKERS` makes."""
    more = {"stand_ins": stand_ins, "sglang_for_gpus": sglang_for_gpus}
    return Family(name, MAKERS[kind], "tokens", dtype, vllm or {}, sglang or {}, **more)


def _configured(**entries: Any) -> dict[str, Any]:
    """Arguments of an SGLang engine that reads `config.json` with other entries."""
    return {"json_model_override_args": json.dumps(entries)}


def _classifier_of(stem: str, method: str, tokens: list[str]) -> dict[str, Any]:
    """What makes vLLM take a language model for a classifier."""
    return {"architectures": [f"{stem}ForSequenceClassification"], "method": method, "classifier_from_token": tokens}


TWO_HEADS: dict[str, Any] = {**NO_HEAD_DIM, "num_attention_heads": 2}
"""Heads of 32 where the configuration has no `head_dim`."""
LFM2: dict[str, Any] = (
    TWO_HEADS
    | {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 32,
        "block_ff_dim": 128,
    }
    | dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 64)
)
UNGROUPED_HEADS: dict[str, Any] = {**HALF_HEADS}
"""As TWO_HEADS, where the configuration has no number of key heads either."""
EVERY_HEAD: dict[str, Any] = {**NO_HEAD_DIM, "num_attention_heads": 2, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
BAILING: dict[str, Any] = {
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 64,
    "embedding_dropout": 0.0,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "norm_head": False,
    "router_dtype": "fp32",
    "num_nextn_predict_layers": 0,
}
"""What published configurations of Ling and Ring say. transformers lacks these models, and has others with the same tensors."""
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "head_dim": REMOVED,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
"""Multi-head latent attention; kernels take these two sizes of the cache, 512 and 64, and no smaller ones."""
INDEXER: dict[str, Any] = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}
BIASED: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""How published DeepSeek models choose experts."""
WIDE_LATENT: dict[str, Any] = LATENT | {
    "hidden_size": 256,
    "intermediate_size": 256,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
"""The same in sizes that blocks of 128 x 128 fit."""
BLOCKS: dict[str, Any] = {"weight_block_size": [128, 128], "fmt": "e4m3", "scale_fmt": "ue8m0"}
PLAIN_LATENT: dict[str, Any] = {"attention_backend": "CPU_MLA"}
"""On a CPU with AMX, vLLM would choose a backend that takes no float32."""
DEEPSEEK: dict[str, Any] = {
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
"""What published DeepSeek models say and the configurations of transformers leave out; SGLang has no other rotary embeddings for
DeepSeek on a CPU."""
OF_GPUS: dict[str, Any] = {"moe_layer_freq": 1}
"""The same for SGLang's code for GPUs."""
STATE: dict[str, Any] = {
    "num_attention_heads": REMOVED,
    "num_key_value_heads": REMOVED,
    "head_dim": REMOVED,
    "intermediate_size": REMOVED,
    "max_position_embeddings": REMOVED,
}
"""State-space models without attention."""
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
ENCODER: dict[str, Any] = {
    **UNGROUPED_HEADS,
    "pad_token_id": 1,
    "tie_word_embeddings": REMOVED,
    "position_embedding_type": "absolute",
}
LONG = ENCODER | {"max_position_embeddings": 1026}
PADDED: dict[str, Any] = {"pad_token_id": 1}
NEAR = ENCODER | {"local_attention": 32}
MIXTRAL: dict[str, Any] = LOCAL_EXPERTS | {"num_attention_heads": 2}
PRIVATE: dict[str, Any] = LOCAL_EXPERTS | {"intermediate_size": 64, "sliding_window": 32}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
"""Gated delta nets, every second layer."""
TWO_KINDS: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}
WHOLE_PROMPTS: dict[str, Any] = {"enable_prefix_caching": False}
"""Where one scale is taken over all activations of a batch, an answer depends on what is computed with it: a prompt whose
beginning is cached is answered otherwise than before, by the same weights."""
CACHES: dict[str, dict[str, Any]] = {"llama-fp8-one-kv-scale": {"kv_cache_dtype": "fp8"}}
NO_PREFIXES: dict[str, Any] = {"enable_prefix_caching": False}
"""With a cache of prefixes vLLM takes the intermediate states of a Mamba-2 layer, which its kernel on a CPU does not return."""
MIMO_V2: dict[str, Any] = {
    **ROUTED_EXPERTS,
    **TWO_KINDS,
    "v_head_dim": 32,
    "mlp_layer_types": ["dense", "sparse"],
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
    "layernorm_epsilon": 1e-5,
    "sliding_window_size": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
CLASSES: dict[str, Any] = {"num_labels": 3, "pad_token_id": 0}

NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Names of layers in published configurations, which transformers writes otherwise."""
NEMOTRON_EXPERTS: dict[str, Any] = ROUTED_EXPERTS | {
    "first_k_dense_replace": REMOVED,
    "moe_shared_expert_intermediate_size": 64,
}

BOTH = ("vllm", "sglang")
POOLED_IN_BOTH = ("gemma2-classifier", "xlm-roberta-classifier")
GEMMAS: dict[str, Any] = {"sliding_window": 32, "query_pre_attn_scalar": 32, "hidden_act": "gelu_pytorch_tanh"}
CLASSIFIERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("mistral", "Mistral", {}),
    ("gemma", "Gemma", {}),
    ("gemma2", "Gemma2", GEMMAS),
    ("phi3", "Phi3", TWO_HEADS),
    ("olmo2", "Olmo2", TWO_HEADS),
    ("smollm3", "SmolLM3", TWO_HEADS),
    ("glm4", "Glm4", {}),
    ("exaone4", "Exaone4", {"num_attention_heads": 2}),
    ("seed_oss", "SeedOss", {}),
    ("gpt_oss", "GptOss", LOCAL_EXPERTS | {"intermediate_size": 64, "sliding_window": 32}),
    ("qwen2_moe", "Qwen2Moe", TWO_HEADS | EXPERTS | {"shared_expert_intermediate_size": 64}),
)
"""Language models with a head of classes, such as those that reward models are made of."""


def _multimodal(function: Callable[..., Path], **options: Any) -> Maker:
    return lambda directory, seed: function(directory, seed=seed, **options)


INTERVAL = _configured(text_config={"full_attention_interval": 2}, vision_config={"deepstack_visual_indexes": []})
"""What transformers leaves out of the configuration of Qwen3.5."""
MULTIMODAL_MAKERS: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "qwen2-vl": (_multimodal(make_qwen_vl, generation="Qwen2"), (1, 7, 508, 509, 510, 5, 9, 42)),
    "qwen2.5-vl": (_multimodal(make_qwen_vl, generation="Qwen2_5_"), (1, 7, 508, 509, 510, 5, 9, 42)),
    "gemma3-vision": (_multimodal(make_gemma3_vision), (1, 7, 507, 5, 9, 42)),
    "paligemma": (_multimodal(make_paligemma), (1, 7, 5, 9, 42)),
    "llava": (_multimodal(make_llava), (1, 7, 511, 5, 9, 42)),
}
"""What makes a checkpoint, and a prompt with the place of an image."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # dense, as Llama is
        _family("llama", "Llama"),
        _family("llama-tied", "Llama", tie_word_embeddings=True),
        _family("mistral", "Mistral"),
        _family("ministral3", "Ministral3"),
        _family(
            "rnj1",
            "Gemma3Text",
            model="Gemma3ForCausalLM",
            architecture="Rnj1ForCausalLM",
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=True,
            engines=("vllm",),
        ),
        _family("qwen2", "Qwen2", **TWO_HEADS),
        _family("qwen3", "Qwen3"),
        _family("gemma", "Gemma", tie_word_embeddings=True),
        _family(
            "gemma2",
            "Gemma2",
            tie_word_embeddings=True,
            sliding_window=32,
            query_pre_attn_scalar=32,
            hidden_act="gelu_pytorch_tanh",
        ),
        _family("gemma3", "Gemma3Text", model="Gemma3ForCausalLM", sliding_window=32, tie_word_embeddings=True),
        _family(
            "gemma4",
            "Gemma4Text",
            stand_ins=True,
            model="Gemma4ForCausalLM",
            sliding_window=32,
            tie_word_embeddings=True,
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=16,
            global_head_dim=32,
            sglang=_configured(swa_num_key_value_heads=2, swa_head_dim=32, swa_v_head_dim=32),
        ),
        _family("phi3", "Phi3", **TWO_HEADS, pad_token_id=0),
        _family("olmo", "Olmo", **TWO_HEADS),
        _family("olmo2", "Olmo2", **TWO_HEADS),
        _family("olmo3", "Olmo3", **TWO_HEADS, sliding_window=32),
        _family("granite", "Granite", **TWO_HEADS),
        _family("cohere", "Cohere", **TWO_HEADS, tie_word_embeddings=True, use_qk_norm=True),
        _family("cohere2", "Cohere2", num_attention_heads=2, sliding_window=32, tie_word_embeddings=True),
        _family("glm", "Glm", pad_token_id=0),
        _family("glm4", "Glm4", pad_token_id=0),
        _family(
            "exaone4",
            "Exaone4",
            stand_ins=True,
            num_attention_heads=2,
            sliding_window=None,
            layer_types=["full_attention", "full_attention"],
        ),
        _family("ernie4_5", "Ernie4_5"),
        _family("hunyuan_dense", "HunYuanDenseV1", num_attention_heads=2, use_qk_norm=True),
        _family("smollm3", "SmolLM3", **TWO_HEADS, pad_token_id=0),
        _family("seed_oss", "SeedOss"),
        _family("apertus", "Apertus", **TWO_HEADS, dtype="bfloat16"),
        _family("arcee", "Arcee"),
        _family("nemotron", "Nemotron", **TWO_HEADS),
        _family("hyperclovax", "HyperCLOVAX"),
        _family("mimo", "Qwen2", architecture="MiMoForCausalLM", **TWO_HEADS),
        _family(
            "solar",
            "Llama",
            architecture="SolarForCausalLM",
            num_hidden_layers=3,
            bskcn_1=[1],
            bskcn_2=[1],
            bskcn_3=[2],
            bskcn_4=[2],
            bskcn_tv=[0.9, 0.8],
        ),
        _family("cwm", "Cwm", **TWO_KINDS, bos_token_id=1),
        _family("jais2", "Jais2", **TWO_HEADS),
        _family("vaultgemma", "VaultGemma", tie_word_embeddings=True, sliding_window=32, query_pre_attn_scalar=32),
        _family("helium", "Helium", num_attention_heads=2),
        _family("starcoder2", "Starcoder2", **TWO_HEADS),
        _family("stablelm", "StableLm", **TWO_HEADS),
        _family("persimmon", "Persimmon", **EVERY_HEAD),
        _family("granite_swa", "GraniteSWA", stand_ins=True, **TWO_HEADS, **TWO_KINDS, layer_rope_theta=[1e4, 1e4]),
        _family(
            "gemma3n",
            "Gemma3nText",
            model="Gemma3nForCausalLM",
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=32,
            intermediate_size=[128] * 4,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            vocab_size_per_layer_input=512,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        _family(
            "hrm_text",
            "HrmText",
            num_key_value_heads=REMOVED,
            num_layers_per_stack=1,
            H_cycles=1,
            L_cycles=2,
            L_bp_cycles=[1],
        ),
        # dense, of older shapes
        _existing("opt", "opt"),
        _family(
            "gpt2",
            "GPT2",
            model="GPT2LMHeadModel",
            **UNGROUPED_HEADS,
            n_positions=1024,
            intermediate_size=REMOVED,
            tie_word_embeddings=True,
        ),
        _existing("gpt2-untied", "gpt2"),
        _existing("bloom", "bloom"),
        _family("gpt_neox", "GPTNeoX", **EVERY_HEAD),
        _family("gptj", "GPTJ", **UNGROUPED_HEADS, n_positions=1024, rotary_dim=16, intermediate_size=REMOVED),
        _family(
            "gpt_bigcode",
            "GPTBigCode",
            **UNGROUPED_HEADS,
            n_positions=1024,
            intermediate_size=REMOVED,
            tie_word_embeddings=True,
        ),
        _family("falcon", "Falcon", **UNGROUPED_HEADS, intermediate_size=REMOVED, tie_word_embeddings=True),
        _family(
            "falcon-new",
            "Falcon",
            **UNGROUPED_HEADS,
            intermediate_size=REMOVED,
            new_decoder_architecture=True,
            num_kv_heads=1,
            tie_word_embeddings=True,
        ),
        _family(
            "mpt",
            "Mpt",
            d_model=64,
            n_heads=2,
            n_layers=2,
            expansion_ratio=2,
            max_seq_len=1024,
            **{**STATE, "hidden_size": REMOVED, "num_hidden_layers": REMOVED},
            tie_word_embeddings=True,
        ),
        _family("phi", "Phi", **TWO_HEADS),
        # mixtures of experts
        _family("mixtral", "Mixtral", **LOCAL_EXPERTS, num_attention_heads=2),
        _family(
            "qwen2_moe",
            "Qwen2Moe",
            stand_ins=True,
            **TWO_HEADS,
            **EXPERTS,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
        ),
        _family("qwen3_moe", "Qwen3Moe", **EXPERTS, decoder_sparse_step=1),
        _family(
            "phimoe",
            "Phimoe",
            architecture="PhiMoEForCausalLM",
            attention_bias=True,
            lm_head_bias=True,
            **TWO_HEADS,
            **LOCAL_EXPERTS,
        ),
        _family("olmoe", "Olmoe", **TWO_HEADS, num_experts=4, num_experts_per_tok=2),
        _family("granitemoe", "GraniteMoe", **TWO_HEADS, **LOCAL_EXPERTS),
        _family("granitemoeshared", "GraniteMoeShared", **TWO_HEADS, **LOCAL_EXPERTS, shared_intermediate_size=64),
        _family("glm4_moe", "Glm4Moe", **ROUTED_EXPERTS, pad_token_id=0),
        _family("dots1", "Dots1", **ROUTED_EXPERTS),
        _family(
            "bailing_moe",  # Ling before 2.0
            "Qwen3Moe",
            architecture="BailingMoeForCausalLM",
            publish=lambda tensors: {n: t for n, t in _as_bailing(tensors).items() if "y_layernorm" not in n},
            first_k_dense_replace=0,
            decoder_sparse_step=1,
            **BAILING | {"norm_head": True, "num_shared_experts": 0},
            **EXPERTS,
        ),
        _family(
            "bailing_moe_v2",  # Ling and Ring 2.0
            "Glm4Moe",
            architecture="BailingMoeV2ForCausalLM",
            publish=_as_bailing,
            use_qk_norm=True,
            score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            num_experts=4,
            pad_token_id=0,
            **BAILING,
            **ROUTED_EXPERTS,
        ),
        _family("ernie4_5_moe", "Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=64),
        _family(
            "hunyuan_moe",
            "HunYuanMoEV1",
            sglang=_configured(use_mixed_mlp_moe=True, num_shared_expert=1),
            num_experts=4,
            moe_topk=2,
            moe_intermediate_size=128,
            use_qk_norm=True,
        ),
        _existing("gpt_oss", "gpt-oss-bfloat16", "bfloat16", stand_ins=True),
        _family(
            "llama4",
            "Llama4Text",
            dtype="bfloat16",
            model="Llama4ForCausalLM",
            **LOCAL_EXPERTS | {"num_experts_per_tok": 1},
            intermediate_size_mlp=128,
            pad_token_id=0,
        ),
        _family(
            "dbrx",
            "Dbrx",
            **STATE | {"hidden_size": REMOVED, "num_hidden_layers": REMOVED},
            d_model=64,
            n_heads=2,
            n_layers=2,
            max_seq_len=1024,
            ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ),
        _family(
            "minimax_m2",
            "MiniMaxM2",
            stand_ins=True,
            vllm={
                "hf_overrides": {"scoring_func": "softmax"}
            },  # the only one that it has for ungrouped experts on a CPU
            **LOCAL_EXPERTS,
            rotary_dim=16,
            scoring_func="sigmoid",
            use_qk_norm=True,
            use_routing_bias=True,
        ),
        _family(
            "afmoe",
            "Afmoe",
            stand_ins=True,
            **EXPERTS,
            num_dense_layers=1,
            num_shared_experts=1,
            sliding_window=32,
            score_func="sigmoid",
            route_norm=True,
            n_group=1,
            topk_group=1,
        ),
        _family("jetmoe", "JetMoe", **LOCAL_EXPERTS, kv_channels=32, num_key_value_heads=2, head_dim=REMOVED),
        _family(
            "cohere2_moe",
            "Cohere2Moe",
            num_attention_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            mlp_layer_types=["sparse", "sparse"],
            **TWO_KINDS,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        _family(
            "exaone_moe",
            "ExaoneMoe",
            stand_ins=True,
            **EXPERTS,
            **TWO_KINDS | {"layer_types": ["sliding_attention", "full_attention"]},
            mlp_layer_types=["dense", "sparse"],
            sglang=_configured(is_moe_layer=[False, True]),
            num_attention_heads=2,
            num_shared_experts=1,
            n_group=1,
            topk_group=1,
        ),
        _family(
            "laguna",
            "Laguna",
            **EXPERTS,
            **TWO_KINDS,
            shared_expert_intermediate_size=64,
            mlp_layer_types=["dense", "sparse"],
            num_attention_heads_per_layer=[4, 4],
        ),
        _family(
            "granitemoe_swa",
            "GraniteMoeSWA",
            stand_ins=True,
            **TWO_HEADS,
            **LOCAL_EXPERTS,
            **TWO_KINDS,
            layer_rope_theta=[1e4, 1e4],
        ),
        _family(
            "hy_v3",
            "HYV3",
            **EXPERTS,
            expert_hidden_dim=64,
            num_shared_experts=1,
            mlp_layer_types=["dense", "sparse"],
            first_k_dense_replace=1,
            qk_norm=True,
            route_norm=True,
        ),
        _family("mellum", "Mellum", **EXPERTS, **TWO_KINDS),
        _family(
            "mimo_v2_flash",
            "MiMoV2Flash",
            stand_ins=True,
            sglang=_configured(rope_parameters=None, rope_theta=1e4, swa_rope_theta=1e4),
            **MIMO_V2,
        ),
        _family(
            "mimo_v2",  # MiMo V2.5: queries, keys and values are one tensor
            "MiMoV2Flash",
            architecture="MiMoV2ForCausalLM",
            publish=_as_mimo_v2,
            stand_ins=True,
            sglang=_configured(rope_parameters=None, rope_theta=1e4, swa_rope_theta=1e4),
            **MIMO_V2,
        ),
        _family(
            "mimo_v2-fp8-blocks",
            "MiMoV2Flash",
            architecture="MiMoV2ForCausalLM",
            publish=_as_mimo_v2_fp8,
            dtype="bfloat16",
            vllm=WHOLE_PROMPTS,
            engines=("vllm",),
            entries={
                "quantization_config": {
                    "quant_method": "fp8",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [128, 128],
                    "ignored_layers": [
                        *(f"model.layers.{i}.self_attn.o_proj" for i in range(2)),
                        *(f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")),
                        *(f"model.layers.1.mlp.{part}" for part in ("gate", "experts")),
                    ],
                }
            },
            **MIMO_V2
            | {f"{kind}{name}": 64 for kind in ("", "swa_") for name in ("head_dim", "v_head_dim")}
            | {"hidden_size": 128, "num_key_value_heads": 2},
        ),
        _family("flex_olmo", "FlexOlmo", **TWO_HEADS, num_experts=4, num_experts_per_tok=2, pad_token_id=0),
        _family("solar_open", "SolarOpen", **ROUTED_EXPERTS | {"first_k_dense_replace": REMOVED}),
        _family("nanochat", "NanoChat", **TWO_HEADS),
        _family("ministral", "Ministral", sliding_window=32),
        _family("diffllama", "DiffLlama", engines=("vllm",), **TWO_HEADS),
        _family("doge", "Doge", **TWO_HEADS),
        _family("bitnet", "BitNet", engines=("vllm",), **TWO_HEADS),
        _family("minimax", "MiniMax", **LOCAL_EXPERTS, layer_types=["linear_attention", "full_attention"]),
        # latent attention
        _family(
            "mistral_large_3",
            "DeepseekV3",
            architecture="MistralLarge3ForCausalLM",
            publish=_as_mistral,
            vllm=PLAIN_LATENT,
            sglang=_configured(**DEEPSEEK, topk_method="greedy", scoring_func="softmax"),
            **LATENT,
            **ROUTED_EXPERTS,
        ),
        _family("youtu", "Youtu", **LATENT | {"v_head_dim": 96}),
        _family("mistral4", "Mistral4", **LATENT | {"v_head_dim": 96}, **ROUTED_EXPERTS | {"first_k_dense_replace": 0}),
        _family("axk1", "AXK1", vllm=PLAIN_LATENT, **LATENT, **ROUTED_EXPERTS | {"first_k_dense_replace": 0}),
        _family(
            "longcat_flash",
            "LongcatFlash",
            vllm=PLAIN_LATENT,
            sglang=_configured(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
            | {"attention_backend": "torch_native"},
            stand_ins=True,
            publish=_without_experts_that_pass_on,
            **LATENT,
            num_hidden_layers=REMOVED,
            intermediate_size=REMOVED,
            num_layers=2,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=64,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
            zero_expert_type="identity",
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
            router_bias=False,
        ),
        *(
            _family(
                name,
                stem,
                gpu_class=package,
                sglang=_configured(**OF_GPUS, indexer_rope_interleave=name == "glm_moe_dsa"),
                sglang_for_gpus=True,
                **LATENT,
                **ROUTED_EXPERTS,
                **INDEXER,
                **more,
            )
            for name, stem, package, more in (
                ("deepseek_v32", "DeepseekV32", "deepseek_v32", BIASED),
                ("glm_moe_dsa", "GlmMoeDsa", "deepseek_v32", BIASED),
                ("hy_v4", "HYV4", "hy_v4", {"publish": _as_hy_v4}),
            )
        ),
        *(
            _family(
                f"{name}-fp8-blocks",
                stem,
                publish=_in_fp8_blocks,
                dtype="bfloat16",
                vllm=WHOLE_PROMPTS,
                sglang=_configured(**OF_GPUS, indexer_rope_interleave=name == "glm_moe_dsa"),
                entries={"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"} | BLOCKS},
                gpu_class="deepseek_v32",
                sglang_for_gpus=True,
                **WIDE_LATENT,
                **ROUTED_EXPERTS | {"moe_intermediate_size": 128},
                **INDEXER,
                **BIASED,
            )
            for name, stem in (("deepseek_v32", "DeepseekV32"), ("glm_moe_dsa", "GlmMoeDsa"))
        ),
        _family(
            "deepseek_v2",
            "DeepseekV2",
            vllm=PLAIN_LATENT,
            sglang=_configured(**DEEPSEEK, scoring_func="softmax"),
            **LATENT,
            **ROUTED_EXPERTS,
        ),
        _family(
            "deepseek_v3",
            "DeepseekV3",
            vllm=PLAIN_LATENT,
            sglang=_configured(**DEEPSEEK),
            **LATENT,
            **ROUTED_EXPERTS,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
        ),
        _family("glm4_moe_lite", "Glm4MoeLite", vllm=PLAIN_LATENT, **LATENT, **ROUTED_EXPERTS, pad_token_id=0),
        _family("minicpm3", "MiniCPM3", **LATENT | {"v_head_dim": 16}, dim_model_base=64),
        # state spaces, alone or beside attention
        _family("mamba", "Mamba", **STATE, state_size=16, pad_token_id=0),
        _family("mamba2", "Mamba2", **STATE | {"head_dim": 32}, num_heads=4, state_size=16, n_groups=1, pad_token_id=0),
        _family("falcon_mamba", "FalconMamba", **STATE, state_size=16, pad_token_id=0),
        _family("falcon_h1", "FalconH1", stand_ins=True, vllm=NO_PREFIXES, **MAMBA2, mamba_d_ssm=128),
        _family("bamba", "Bamba", **MAMBA2, **TWO_HEADS, attn_layer_indices=[1]),
        _family(
            "jamba",
            "Jamba",
            **TWO_HEADS,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            use_mamba_kernels=False,
            pad_token_id=0,
        ),
        _family(
            "zamba2",
            "Zamba2",
            vllm=NO_PREFIXES,
            **EVERY_HEAD | {"num_attention_heads": 4, "num_key_value_heads": 4},
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            hybrid_layer_ids=[1],
            num_mem_blocks=1,
            n_mamba_heads=4,
            mamba_headdim=32,
            mamba_d_state=16,
            mamba_ngroups=1,
            attention_hidden_size=128,
            attention_head_dim=32,
            use_mem_rope=True,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        _family(
            "granitemoehybrid",
            "GraniteMoeHybrid",
            stand_ins=True,
            vllm=NO_PREFIXES,
            **TWO_HEADS,
            **LOCAL_EXPERTS,
            **MAMBA2,
            shared_intermediate_size=64,
            layer_types=["mamba", "attention"],
        ),
        *(
            _family(
                name,
                "NemotronH",
                stand_ins=True,
                sglang=_configured(mamba_n_groups=1),
                entries={
                    "layers_block_type": [NEMOTRON[layer] for layer in pattern],
                    "mtp_layers_block_type": ["attention"],
                },
                hybrid_override_pattern=pattern,
                mamba_num_heads=4,
                mamba_head_dim=32,
                n_groups=1,
                **more,
            )
            for name, pattern, more in (
                ("nemotron_h", "M*-", {}),
                ("nemotron_h_moe", "ME*E", NEMOTRON_EXPERTS),
                ("nemotron_h_moe-latent", "ME*E", NEMOTRON_EXPERTS | {"moe_latent_size": 32}),
            )
        ),
        _family(
            "lfm2",
            "Lfm2",
            stand_ins=True,
            sglang={"attention_backend": "torch_native"},
            vllm={"enable_prefix_caching": False},
            **LFM2,
            tie_word_embeddings=True,
        ),
        _family(
            "lfm2_moe",
            "Lfm2Moe",
            stand_ins=True,
            sglang={"attention_backend": "torch_native"},
            vllm={"enable_prefix_caching": False},
            **TWO_HEADS,
            **EXPERTS,
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
            tie_word_embeddings=True,
        ),
        _family(
            "qwen3_next",
            "Qwen3Next",
            stand_ins=True,
            full_attention_interval=2,
            dtype="bfloat16",
            **EXPERTS,
            **LINEAR,
            shared_expert_intermediate_size=64,
        ),
        _family(
            "qwen3_5_text",
            "Qwen3_5Text",
            stand_ins=True,
            model="Qwen3_5ForCausalLM",
            dtype="bfloat16",
            torchvision=True,
            sglang=_configured(full_attention_interval=2),
            **LINEAR,
        ),
        _family(
            "qwen3_5_moe_text",
            "Qwen3_5MoeText",
            stand_ins=True,
            model="Qwen3_5MoeForCausalLM",
            dtype="bfloat16",
            torchvision=True,
            sglang=_configured(full_attention_interval=2),
            **EXPERTS,
            **LINEAR,
            shared_expert_intermediate_size=64,
        ),
        _family(
            "olmo_hybrid",
            "OlmoHybrid",
            publish=_as_olmo_hybrid,
            dtype="bfloat16",
            **EVERY_HEAD,
            **LINEAR,
            pad_token_id=0,
        ),
        _family(
            "kimi_linear",
            "KimiLinear",
            stand_ins=True,
            sglang={"attention_backend": "torch_native"},
            gpu_class="kimi_k3",
            mla_use_nope=True,
            vllm=PLAIN_LATENT | {"enable_prefix_caching": False, "mamba_block_size": 256},
            **LATENT | {"q_lora_rank": None},
            **ROUTED_EXPERTS | {"first_k_dense_replace": 0},
            num_local_experts=4,
            linear_attn_config={
                "kda_layers": [1],
                "full_attn_layers": [2],
                "head_dim": 128,
                "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
            mlp_layer_types=["sparse", "sparse"],
            pad_token_id=0,
        ),
        _family(
            "qwen4_exp_text",
            "Qwen4ExpText",
            model="Qwen4ExpForCausalLM",
            gpu_class="qwen4_exp",
            dtype="bfloat16",
            torchvision=True,
            **EXPERTS,
            **LINEAR | {"layer_types": ["linear_attention", "indexed_attention"]},
            shared_expert_intermediate_size=64,
            hc_lowrank=12,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=32,
            indexer_budget=64,
            indexer_compress_ratio=4,
            output_gate_type="silu",
        ),
        _family(
            "zaya",
            "Zaya",
            num_experts=4,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
            router_hidden_size=32,
            pad_token_id=0,
        ),
        # vectors instead of tokens
        _family("bert-embedding", "Bert", model="BertModel", answer="embed", **ENCODER),
        _family(
            "roberta-embedding",
            "Roberta",
            model="RobertaModel",
            answer="embed",
            **ENCODER | {"max_position_embeddings": 1026},
        ),
        _family(
            "modernbert-embedding", "ModernBert", model="ModernBertModel", answer="embed", **ENCODER, local_attention=32
        ),
        _family(
            "qwen3-embedding",
            "Qwen3",
            answer="embed",
            tie_word_embeddings=True,
            vllm={"runner": "pooling", "convert": "embed"},
        ),
        _family(
            "bert-classifier", "Bert", model="BertForSequenceClassification", answer="classify", **ENCODER | CLASSES
        ),
        _family(
            "qwen2-classifier",
            "Qwen2",
            model="Qwen2ForSequenceClassification",
            answer="classify",
            **TWO_HEADS,
            **CLASSES,
        ),
        _family(
            "xlm-roberta-embedding",
            "XLMRoberta",
            model="XLMRobertaModel",
            answer="embed",
            **ENCODER | {"max_position_embeddings": 1026},
        ),
        _family(
            "modernbert-classifier",
            "ModernBert",
            model="ModernBertForSequenceClassification",
            answer="classify",
            **ENCODER | CLASSES,
            local_attention=32,
        ),
        _family("qwen3-classifier", "Qwen3", model="Qwen3ForSequenceClassification", answer="classify", **CLASSES),
        _family("llama-classifier", "Llama", model="LlamaForSequenceClassification", answer="classify", **CLASSES),
        _family(
            "gemma3-embedding",
            "Gemma3Text",
            model="Gemma3TextModel",
            answer="embed",
            sliding_window=32,
            vllm={"runner": "pooling"},
            engines=("vllm",),
        ),
        _family(
            "gpt2-classifier",
            "GPT2",
            model="GPT2ForSequenceClassification",
            answer="classify",
            **UNGROUPED_HEADS,
            **CLASSES,
            n_positions=1024,
            intermediate_size=REMOVED,
            engines=("vllm",),
        ),
        _family(
            "colbert",
            "Bert",
            model="BertModel",
            answer="token_embed",
            architecture="HF_ColBERT",
            publish=_as_colbert,
            vllm={"pooler_config": {"enable_flash_late_interaction": False}},
            engines=("vllm",),
            **ENCODER,
        ),
        _family(
            "bert-splade",
            "Bert",
            model="BertForMaskedLM",
            answer="embed",
            architecture="BertSpladeSparseEmbeddingModel",
            engines=("vllm",),
            **ENCODER | {"tie_word_embeddings": False},
        ),
        *(
            _family(
                f"{stem.lower()}-token-classifier",
                stem,
                model=f"{stem}ForTokenClassification",
                answer="token_classify",
                engines=("vllm",),
                **shape | CLASSES,
            )
            for stem, shape in (("Bert", ENCODER), ("Qwen2", TWO_HEADS))
        ),
        *(
            _family(
                name,
                stem,
                model=f"{stem}{kind}",
                answer=answer,
                engines=BOTH if name in POOLED_IN_BOTH else ("vllm",),
                **shape,
            )
            for name, stem, kind, answer, shape in (
                ("roberta-classifier", "Roberta", "ForSequenceClassification", "classify", LONG | CLASSES | PADDED),
                (
                    "xlm-roberta-classifier",
                    "XLMRoberta",
                    "ForSequenceClassification",
                    "classify",
                    LONG | CLASSES | PADDED,
                ),
                (
                    "roberta-token-classifier",
                    "Roberta",
                    "ForTokenClassification",
                    "token_classify",
                    LONG | CLASSES | PADDED,
                ),
                (
                    "modernbert-token-classifier",
                    "ModernBert",
                    "ForTokenClassification",
                    "token_classify",
                    NEAR | CLASSES,
                ),
                ("bert-masked", "Bert", "ForMaskedLM", "token_classify", ENCODER | {"tie_word_embeddings": False}),
                (
                    "privacy_filter",
                    "OpenAIPrivacyFilter",
                    "ForTokenClassification",
                    "token_classify",
                    PRIVATE | CLASSES,
                ),
                *(
                    (f"{name}-classifier", stem, "ForSequenceClassification", "classify", shape | CLASSES)
                    for name, stem, shape in CLASSIFIERS
                ),
                ("mixtral-classifier", "Mixtral", "ForSequenceClassification", "classify", MIXTRAL | CLASSES),
                ("qwen3_moe-classifier", "Qwen3Moe", "ForSequenceClassification", "classify", EXPERTS | CLASSES),
            )
        ),
        *(
            _family(
                f"{stem.lower()}-embedding",
                stem,
                model=f"{stem}Model",
                answer="embed",
                vllm={"runner": "pooling"},
                engines=BOTH if stem == "Mistral" else ("vllm",),
                **shape,
            )
            for stem, shape in (
                ("Qwen2", TWO_HEADS),
                ("Mistral", {}),
                ("Gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 32}),
            )
        ),
        _family("llama-embedding", "Llama", model="LlamaModel", answer="embed", vllm={"runner": "pooling"}),
        _family(
            "phi3-embedding",
            "Phi3",
            answer="embed",
            vllm={"runner": "pooling", "convert": "embed"},
            tie_word_embeddings=True,
            **TWO_HEADS,
        ),
        _family(
            "voyage-qwen3",
            "Qwen3",
            model="Qwen3Model",
            architecture="VoyageQwen3BidirectionalEmbedModel",
            answer="embed",
            publish=_with_a_linear_layer("model."),
            num_labels=16,
            engines=("vllm",),
        ),
        _family(
            "colbert-modernbert",
            "ModernBert",
            model="ModernBertModel",
            architecture="ColBERTModernBertModel",
            answer="token_embed",
            publish=_with_a_linear_layer(),
            vllm={"pooler_config": {"enable_flash_late_interaction": False}},
            engines=("vllm",),
            **NEAR,
        ),
        _family(
            "colbert-lfm2",
            "Lfm2",
            model="Lfm2Model",
            architecture="ColBERTLfm2Model",
            answer="token_embed",
            publish=_with_a_linear_layer(),
            vllm={"enable_prefix_caching": False, "pooler_config": {"enable_flash_late_interaction": False}},
            engines=("vllm",),
            **LFM2,
            tie_word_embeddings=True,
        ),
        _family(
            "llama-bidirectional-classifier",
            "Llama",
            model="LlamaForSequenceClassification",
            architecture="LlamaBidirectionalForSequenceClassification",
            answer="classify",
            pooling="avg",
            engines=("vllm",),
            **CLASSES,
        ),
        _family(
            "deepseek_v3-bidirectional",
            "DeepseekV3",
            model="DeepseekV3Model",
            architecture="DeepseekV3BidirectionalModel",
            answer="embed",
            topk_method="noaux_tc",
            vllm={"runner": "pooling"},
            engines=("vllm",),
            **LATENT,
            **ROUTED_EXPERTS,
        ),
        _family(
            "llama-bidirectional",
            "Llama",
            model="LlamaModel",
            architecture="LlamaBidirectionalModel",
            answer="embed",
            pooling="avg",
            engines=("vllm",),
        ),
        # rerankers: vLLM makes the head of a classifier of some rows of the language model's, while it loads
        *(
            _family(
                f"{stem.lower()}-reranker",
                stem,
                answer="classify",
                tie_word_embeddings=tied,
                vllm={"runner": "pooling", "hf_overrides": _classifier_of(stem, method, tokens)},
                engines=("vllm",),
            )
            for stem, method, tokens, tied in (
                ("Qwen3", "from_2_way_softmax", ["a", "b"], True),
                ("Llama", "no_post_processing", ["a", "b", "c"], False),
            )
        ),
        # models that transformers lacks
        *(
            Family(
                name,
                maker,
                vllm=vllm,
                engines=("vllm", "sglang") if name in IN_BOTH else ("vllm",),
                stand_ins=name in ("step3p5", "deepseek_v1"),
            )
            for name, (maker, vllm) in WRITTEN.items()
        ),
        *(
            Family(name, maker, engines=("sglang",), sglang_for_gpus=name == "gigachat3_5")
            for name, (maker, _) in (IN_SGLANG | IN_SGLANG_TOO).items()
        ),
        *(
            Family(name, maker, answer, vllm=vllm, engines=engines)
            for name, ((maker, vllm), answer, engines) in REWARDS.items()
        ),
        *(
            Family(
                name,
                medium.make,
                answer,
                medium.dtype,
                vllm=medium.vllm,
                sglang={"trust_remote_code": True},
                engines=BOTH if answer == "tokens" and name != "deepseek_v4-published" else ("vllm",),
                gpu_class="deepseek_v4" if name.startswith("deepseek_v4") else "",
            )
            for name, (medium, answer) in (REMOTE_TEXT | TEXT_ONLY).items()
        ),
        *(
            Family(
                name,
                medium.make,
                vllm=medium.vllm,
                sglang=_configured(**OF_A_CPU.get(name, {})) | {"attention_backend": "torch_native"},
                stand_ins=True,
                gpu_class="own",
            )
            for name, medium in HYBRIDS.items()
        ),
        Family(
            "kimi_k3_text",
            KIMI_K3.make,
            dtype=KIMI_K3.dtype,
            vllm=KIMI_K3.vllm | PLAIN_LATENT,
            engines=("vllm",),
            gpu_class="kimi_k3",
        ),
        Family(
            "inkling_text", INKLING.make, dtype=INKLING.dtype, vllm=INKLING.vllm, engines=("vllm",), gpu_class="inkling"
        ),
        # models that read images or hear sounds
        *(
            Family(
                f"{name}-vision"
                if name in ("gemma4", "llama4")
                else name,  # of which there is one that reads text only
                medium.make,
                POOLED.get(name, "tokens"),
                dtype=medium.dtype,
                vllm=medium.vllm,
                sglang={
                    "enable_multimodal": name
                    != "kimi-k2.5",  # SGLang asks for the processor that comes with the checkpoint
                    "trust_remote_code": medium.vllm.get("trust_remote_code", False),
                }
                | ({"attention_backend": "torch_native"} if name in ("kimi-k2.5", "kimi-vl") else {})
                | (INTERVAL if name.startswith(("qwen3.5", "minicpm-v4")) else {}),
                torchvision=True,
                stand_ins=True,
                gpu_class=FOR_GPUS.get(name, ""),
                sglang_for_gpus=name in FOR_GPUS,
                medium="" if name in WITHOUT_MEDIA else "sound" if medium.sound else "image",
                place=tuple(medium.prompt),
                text=name not in WITHOUT_TEXT,
                engines=("sglang",)
                if name in IN_SGLANG_ONLY
                else ("vllm",)
                if name in (*POOLED, *IN_VLLM_ONLY, *REMOTE_MEDIA, *REST)
                else BOTH,
            )
            for name, medium in (
                MULTIMODAL
                | MORE
                | ASKED
                | REMOTE
                | REMOTE_MEDIA
                | REMOTE_NEWEST
                | NEWEST
                | LATEST
                | REST
                | IN_SGLANG_ONLY
            ).items()
        ),
        *(
            Family(
                name,
                maker,
                sglang={"enable_multimodal": True},
                torchvision=True,
                stand_ins=True,
                medium="image",
                place=place,
            )
            for name, (maker, place) in MULTIMODAL_MAKERS.items()
        ),
        # quantised
        _existing("llama-w8a8-int8", "w8a8-int8", "bfloat16", stand_ins=True),
        _existing(
            "llama-fp8-kv-scales",
            "fp8-kv-scales",
            "bfloat16",
            {"kv_cache_dtype": "fp8"},
            {"kv_cache_dtype": "fp8_e4m3"},
            sglang_for_gpus=True,
        ),
        _family(
            "llama-classifier-fp8-by-the-engine",
            "Llama",
            model="LlamaForSequenceClassification",
            answer="classify",
            dtype="bfloat16",
            vllm={"quantization": "fp8_per_channel"},
            engines=("vllm",),
            **CLASSES,
        ),
        *(
            _family(
                f"{stem.lower()}-fp8-by-the-engine",
                stem,
                dtype="bfloat16",
                vllm={"quantization": "fp8_per_channel"},
                engines=("vllm",),
                **shape,
            )
            for stem, shape in (("Llama", {}), ("Qwen3", {}), ("Qwen2", TWO_HEADS))
        ),
        *(
            _family(
                f"llama-{scheme}-without-its-kernel",
                "Llama",
                dtype="bfloat16",
                vllm={"quantization": scheme, **more},
                engines=("vllm",),
            )
            for scheme, more in (("fp8_per_tensor", WHOLE_PROMPTS), ("fp8_per_block", {}), ("mxfp8", {}), ("mxfp4", {}))
        ),
        *(
            _family(
                f"qwen3_moe-{scheme}-without-its-kernel",
                "Qwen3Moe",
                dtype="bfloat16",
                vllm={"quantization": scheme, **more},
                engines=("vllm",),
                decoder_sparse_step=1,
                hidden_size=128,  # vLLM makes experts for blocks of 128, here twice as wide as the checkpoint's
                **EXPERTS,
            )
            for scheme, more in (
                ("fp8_per_tensor", WHOLE_PROMPTS),
                ("fp8_per_channel", {}),
                ("fp8_per_block", {}),
                ("experts_int8", {}),
                ("mxfp4", {}),
            )
        ),
        *(
            Family(
                f"llama-{scheme}",
                maker,
                "tokens",
                "bfloat16",
                stand_ins=scheme == "w8a8-int8-static",
                sglang_for_gpus=scheme != "w8a8-int8-static",
            )
            for scheme, maker in QUANTISED.items()
        ),
        *(
            Family(name, maker, "tokens", "bfloat16", sglang_for_gpus=True, gpu_class="marlin")
            for name, maker in FOUR_BITS.items()
        ),
        *(Family(name, maker, "tokens", "bfloat16", WHOLE_PROMPTS, stand_ins=True) for name, maker in FP8.items()),
        *(
            Family(
                name,
                maker,
                "tokens",
                "bfloat16",
                WHOLE_PROMPTS | CACHES.get(name, {}),
                engines=BOTH if name in FOR_BOTH else ("vllm",),
                sglang_for_gpus=name in FOR_BOTH,
            )
            for name, maker in FOR_VLLM.items()
        ),
        *(
            _family(
                f"{name}-fp8-by-sglang",
                stem,
                dtype="bfloat16",
                sglang={"quantization": "fp8"},
                engines=("sglang",),
                stand_ins=True,
                **more,
            )
            for name, stem, more in (("llama", "Llama", {}), ("qwen3_moe", "Qwen3Moe", EXPERTS))
        ),
        _existing("gpt_oss-float16", "gpt-oss-float16", "float16", stand_ins=True),
    )
}
"""Every family by its name."""
