"""Tiny checkpoints of models that transformers lacks and whose configuration comes with code of its own: their tensors by name
and shape, as published ones have them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.models import SHAPE, save_tokenizer
from tests.support.multimodal import TOWER, WIDTH, WORDS, Medium
from tests.support.written_checkpoints import NORMS, Shapes, attention, experts, mlp, model, norms

__all__ = ["REMOTE", "REMOTE_TEXT", "internvl_chat", "remote"]

CODE = '''\
from transformers import AutoConfig, PretrainedConfig


def made(value):
    """Configurations of parts, whose entries are read as attributes."""
    if isinstance(value, list):
        return [made(one) for one in value]
    if not isinstance(value, dict) or "rope_type" in value:
        return value
    if "model_type" not in value:
        return Entries({name: made(entry) for name, entry in value.items()})
    try:
        return AutoConfig.for_model(**value)
    except ValueError:  # a part that transformers does not know
        return Part(**value)


class Entries(dict):
    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Part(PretrainedConfig):
    def __init__(self, **entries):
        super().__init__(**{name: made(value) for name, value in entries.items()})


class CLASS(PretrainedConfig):
    model_type = "MODEL_TYPE"

    def __init__(self, **entries):
        super().__init__(**{name: made(value) for name, value in entries.items()})
'''


def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def norm(*names: str, width: int) -> Shapes:
    return norms(*names, width=width) | norms(*names, width=width, part="bias")


def remote(
    architecture: str,
    entries: dict[str, Any],
    shapes: Shapes,
    *,
    place: Sequence[str | int] = (),
    last: Sequence[str] = (),
    special: dict[str, str] | None = None,
    files: dict[str, dict[str, Any] | str] | None = None,
    dtype: str = "float32",
    sound: bool = False,
    name: str = "Config",
    code: bool = True,
    **vllm: Any,
) -> Medium:
    """`name`: of the class of the configuration. `code`: whether that comes with the checkpoint, or the engine has it. `entries`
    of `config.json`; in them, a token stands for its number. Else as `multimodal.family`."""
    ids = {token: WORDS - len(last) + i for i, token in enumerate(last)}

    def make(directory: Path, seed: int) -> Path:
        directory.mkdir(parents=True)
        known = {entry: ids.get(value, value) if isinstance(value, str) else value for entry, value in entries.items()}
        known |= {"architectures": [architecture], "dtype": dtype}
        if code:
            known |= {"auto_map": {"AutoConfig": f"configuration.{name}"}}
            made = CODE.replace("CLASS", name).replace("MODEL_TYPE", entries["model_type"])
            (directory / "configuration.py").write_text(made)
        (directory / "config.json").write_text(json.dumps(known, indent=2))
        random = torch.Generator().manual_seed(seed)
        tensors = {
            tensor: (0.2 * torch.randn(shape, generator=random) + ("norm" in tensor and shape == (WIDTH,))).to(
                getattr(torch, dtype)
            )
            for tensor, shape in shapes.items()
        }
        tensors = {tensor: value.to(getattr(torch, dtype)) for tensor, value in tensors.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        save_tokenizer(directory, last, **(special or {}))
        for file, content in (files or {}).items():
            (directory / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return directory

    prompt = [1, 7, *(ids[token] if isinstance(token, str) else token for token in place), 5, 9, 42]
    return Medium(make, prompt, sound, dtype, vllm={"trust_remote_code": code} | vllm)


def qwen(at: str) -> Shapes:
    """A Qwen3 whose names begin with `at`."""
    shapes = model(
        lambda _: (
            NORMS
            | attention("self_attn")
            | mlp("mlp")
            | norms("self_attn.q_norm", "self_attn.k_norm", width=SHAPE["head_dim"])
        )
    )
    return {f"{at}{name}": shape for name, shape in shapes.items()}


def internvl_chat(
    architecture: str = "InternVLChatModel",
    model_type: str = "internvl_chat",
    *,
    heads: int = TOWER["num_attention_heads"],
    inner: int = WIDTH,
    bias: bool = True,
    tokens: tuple[str, str, str] = ("<img>", "</img>", "<IMG_CONTEXT>"),
    place: Sequence[str | int] = ("<image>",),
    **entries: Any,
) -> Medium:
    """InternVL and its relatives. `heads`: those that the tower's weights have. `inner`: rows of the projector's first layer.
    `bias`: whether the projector has one."""
    width, size = TOWER["hidden_size"], TOWER["hidden_size"] // TOWER["num_attention_heads"]
    shapes = qwen("language_model.")
    shapes |= {
        "vision_model.embeddings.class_embedding": (1, 1, width),
        "vision_model.embeddings.patch_embedding.weight": (width, 3, 14, 14),
        "vision_model.embeddings.patch_embedding.bias": (width,),
        "vision_model.embeddings.position_embedding": (1, 17, width),
    }
    for number in range(TOWER["num_hidden_layers"]):
        at = f"vision_model.encoder.layers.{number}"
        shapes |= linear(f"{at}.attn.qkv", 3 * heads * size, width) | linear(f"{at}.attn.proj", width, heads * size)
        shapes |= linear(f"{at}.mlp.fc1", 64, width) | linear(f"{at}.mlp.fc2", width, 64)
        shapes |= norm(f"{at}.norm1", f"{at}.norm2", width=width) | {f"{at}.ls1": (width,), f"{at}.ls2": (width,)}
    shapes |= norm("mlp1.0", width=4 * width) | linear("mlp1.1", inner, 4 * width, bias=bias)
    shapes |= linear("mlp1.3", WIDTH, inner, bias=bias)
    return remote(
        architecture,
        {
            "model_type": model_type,
            "llm_config": SHAPE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
            "vision_config": TOWER | {
                "model_type": "intern_vit_6b", "image_size": 56, "patch_size": 14, "qkv_bias": True, "qk_normalization": False,
                "norm_type": "layer_norm", "layer_norm_eps": 1e-6, "hidden_act": "gelu", "initializer_factor": 0.1,
            },
            "force_image_size": 56, "downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1, "min_dynamic_patch": 1,
            "max_dynamic_patch": 1, "dynamic_image_size": True, "use_thumbnail": True, "template": "internvl2_5",
        } | entries,
        shapes,
        place=place, last=("<image>", *tokens, "<|video_pad|>"),
    )  # fmt: skip


MINICPM_PLACE = (8, "<image>", 14, 15, "</image>", 9)
"""What `(<image>./</image>)` is in the tests' tokenizer."""
MINICPM_TOKENS = (
    "<unk>",
    "<image>",
    "</image>",
    "<image_id>",
    "</image_id>",
    "<slice>",
    "</slice>",
    "<im_start>",
    "<im_end>",
    "<s>",
)
SLICES = '''\
import numpy as np
import torch
from transformers import BatchFeature, ImageProcessingMixin, ProcessorMixin, WhisperFeatureExtractor
from transformers.processing_utils import ImagesKwargs


class Images(ImageProcessingMixin):
    """One slice of each image, without its details."""

    max_slice_nums, image_feature_size, im_id_start, im_id_end = 1, 4, "<image_id>", "</image_id>"
    model_input_names = ["pixel_values"]
    valid_kwargs = ImagesKwargs

    def get_sliced_grid(self, image_size, max_slice_nums=None):
        return None

    def get_slice_image_placeholder(self, image_size, image_idx=0, max_slice_nums=None, use_image_id=True):
        mark = f"<image_id>{image_idx}</image_id>" if use_image_id else ""
        return f"{mark}<image>{'<unk>' * self.image_feature_size}</image>"

    def __call__(self, images, **_):
        images = images if isinstance(images, list) else [images]
        images = [image for batch in images for image in (batch if isinstance(batch, list) else [batch])]
        pixels, sizes = [], [image.size for image in images]
        for image in images:
            values = torch.tensor(np.asarray(image.convert("RGB").resize((28, 28)))).permute(2, 0, 1) / 128 - 1
            rows = values.reshape(3, 2, 14, 2, 14).permute(0, 2, 1, 3, 4)
            pixels.append(rows.reshape(3, 14, 56))
        grids = torch.tensor([[2, 2]] * len(images))
        return BatchFeature({"pixel_values": [pixels], "image_sizes": [sizes], "tgt_sizes": [grids]})


class Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, **_):
        super().__init__(tokenizer)
        self.feature_extractor = WhisperFeatureExtractor(chunk_length=2)  # which MiniCPM-o asks for
'''


def _minicpm_v(
    architecture: str = "MiniCPMV",
    model_type: str = "minicpmv",
    more: Shapes | None = None,
    **entries: Any,
) -> Medium:
    """MiniCPM-V 2.6, with a processor of the tests in place of the published one. Its resampler takes heads of 128. What
    MiniCPM-o has beside it: `more` tensors, `entries` of the configuration, and what `prepares` sounds."""
    wide, narrow, at = 128, TOWER["hidden_size"], "vpm.encoder.layers"
    shapes = linear("llm.model.embed_tokens", WORDS, wide, bias=False) | linear("llm.lm_head", WORDS, wide, bias=False)
    shapes |= norms("llm.model.norm", width=wide)
    for number in range(2):
        layer = f"llm.model.layers.{number}"
        shapes |= norms(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", width=wide)
        for part, rows in (("q", wide), ("k", 64), ("v", 64)):
            shapes |= linear(f"{layer}.self_attn.{part}_proj", rows, wide)
        shapes |= linear(f"{layer}.self_attn.o_proj", wide, wide, bias=False)
        shapes |= linear(f"{layer}.mlp.down_proj", wide, 256, bias=False)
        for part in ("gate", "up"):
            shapes |= linear(f"{layer}.mlp.{part}_proj", 256, wide, bias=False)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{at}.{number}.self_attn.{part}", narrow, narrow)
        shapes |= linear(f"{at}.{number}.mlp.fc1", 64, narrow) | linear(f"{at}.{number}.mlp.fc2", narrow, 64)
        shapes |= norm(f"{at}.{number}.layer_norm1", f"{at}.{number}.layer_norm2", width=narrow)
    shapes |= norm("vpm.post_layernorm", width=narrow) | linear(
        "vpm.embeddings.position_embedding", 16, narrow, bias=False
    )
    shapes |= {
        "vpm.embeddings.patch_embedding.weight": (narrow, 3, 14, 14),
        "vpm.embeddings.patch_embedding.bias": (narrow,),
    }
    shapes |= norm("resampler.ln_q", "resampler.ln_kv", "resampler.ln_post", width=wide)
    shapes |= linear("resampler.kv_proj", wide, narrow, bias=False) | linear("resampler.attn.out_proj", wide, wide)
    shapes |= {"resampler.query": (4, wide), "resampler.proj": (wide, wide)}
    shapes |= {"resampler.attn.in_proj_weight": (3 * wide, wide), "resampler.attn.in_proj_bias": (3 * wide,)}
    return remote(
        architecture,
        {name: value for name, value in SHAPE.items() if name != "head_dim"} | {
            "model_type": model_type, "version": 2.6, "hidden_size": wide, "intermediate_size": 256, "num_attention_heads": 2,
            "num_key_value_heads": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "query_num": 4, "image_size": 56,
            "drop_vision_last_layer": False, "slice_mode": True, "use_cache": True, "batch_vision_input": True,
            "vision_config": TOWER | {
                "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-6, "num_channels": 3, "attention_dropout": 0.0,
            },
        } | entries,
        shapes | (more or {}),
        place=MINICPM_PLACE, last=MINICPM_TOKENS, special={"unk_token": "<unk>", "bos_token": "<s>"},
        name=f"{architecture}Config",
        files={
            "processing.py": SLICES,
            "preprocessor_config.json": {
                "image_processor_type": "Images", "processor_class": "Processor",
                "auto_map": {"AutoImageProcessor": "processing.Images", "AutoProcessor": "processing.Processor"},
            },
            "processor_config.json": {"processor_class": "Processor", "auto_map": {"AutoProcessor": "processing.Processor"}},
        },
    )  # fmt: skip


def _minicpm_o() -> Medium:
    """MiniCPM-o 2.6: an encoder of sounds as Whisper's beside what MiniCPM-V has."""
    narrow, at = TOWER["hidden_size"], "apm.layers"
    shapes: Shapes = {"apm.conv1.weight": (narrow, 80, 3), "apm.conv2.weight": (narrow, narrow, 3)}
    shapes |= {"apm.conv1.bias": (narrow,), "apm.conv2.bias": (narrow,), "apm.embed_positions.weight": (100, narrow)}
    shapes |= norm("apm.layer_norm", width=narrow)
    for number in range(2):
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{at}.{number}.self_attn.{part}", narrow, narrow, bias=part != "k_proj")
        shapes |= linear(f"{at}.{number}.fc1", 4 * narrow, narrow) | linear(f"{at}.{number}.fc2", narrow, 4 * narrow)
        shapes |= norm(f"{at}.{number}.self_attn_layer_norm", f"{at}.{number}.final_layer_norm", width=narrow)
    shapes |= linear("audio_projection_layer.linear1", 128, narrow) | linear("audio_projection_layer.linear2", 128, 128)
    return _minicpm_v(
        "MiniCPMO",
        "minicpmo",
        shapes,
        audio_config={
            "model_type": "whisper", "d_model": narrow, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 4 * narrow, "num_mel_bins": 80, "max_source_positions": 100, "decoder_layers": 1,
            "decoder_attention_heads": 2, "decoder_ffn_dim": narrow, "vocab_size": WORDS, "pad_token_id": 0,
        },
        audio_pool_step=2, audio_chunk_length=1.0, init_audio=True, init_vision=True, init_tts=False,
    )  # fmt: skip


KIMI = '''\
import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin


class Images:
    patch_size, merge_kernel_size, in_token_limit = 14, (2, 2), 16


class Processor(ProcessorMixin):
    """Each image is resized to one token."""

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    def __init__(self, tokenizer=None, **_):
        super().__init__(tokenizer)
        self.image_processor = Images()

    def __call__(self, text=None, images=None, return_tensors=None, **_):
        made = {} if text is None else dict(self.tokenizer(text, return_tensors="pt"))
        if images:
            images = images if isinstance(images, list) else [images]
            pixels = [torch.tensor(np.asarray(image.convert("RGB").resize((28, 28)))).permute(2, 0, 1) for image in images]
            patches = [one.reshape(3, 2, 14, 2, 14).permute(1, 3, 0, 2, 4).reshape(4, 3, 14, 14) for one in pixels]
            made["pixel_values"] = torch.cat(patches) / 128 - 1
            made["image_grid_hws"] = torch.tensor([[2, 2]] * len(images))
        return BatchFeature(made)
'''


def _kimi_vl() -> Medium:
    """Kimi-VL: attention and experts of DeepSeek-V3, with a processor of the tests in place of the published one."""
    narrow = TOWER["hidden_size"]
    shapes = linear("multi_modal_projector.linear_1", 4 * narrow, 4 * narrow)
    shapes |= linear("multi_modal_projector.linear_2", WIDTH, 4 * narrow)
    shapes |= norm("multi_modal_projector.pre_norm", "vision_tower.encoder.final_layernorm", width=narrow)
    shapes |= {
        "vision_tower.patch_embed.proj.weight": (narrow, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (narrow,),
    }
    shapes["vision_tower.patch_embed.pos_emb.weight"] = (4, 4, narrow)
    for number in range(TOWER["num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{number}"
        shapes |= norm(f"{at}.norm0", f"{at}.norm1", width=narrow)
        shapes |= linear(f"{at}.wqkv", 3 * narrow, narrow) | linear(f"{at}.wo", narrow, narrow)
        shapes |= linear(f"{at}.mlp.fc0", 64, narrow) | linear(f"{at}.mlp.fc1", narrow, 64)
    latent: Shapes = {
        "self_attn.q_proj.weight": (2 * 96, WIDTH), "self_attn.kv_a_proj_with_mqa.weight": (576, WIDTH),
        "self_attn.kv_a_layernorm.weight": (512,), "self_attn.kv_b_proj.weight": (2 * 64, 512),
        "self_attn.o_proj.weight": (WIDTH, 64),
    }  # fmt: skip
    text = model(lambda number: NORMS | latent | (experts("mlp", "e_score_correction_bias") if number else mlp("mlp")))
    return remote(
        "KimiVLForConditionalGeneration",
        {
            "model_type": "kimi_vl", "media_placeholder_token_id": "<|media_pad|>", "tie_word_embeddings": False,
            "text_config": {name: value for name, value in SHAPE.items() if name != "head_dim"} | {
                "model_type": "deepseek_v3", "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None,
                "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4,
                "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
                "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
                "routed_scaling_factor": 1.0, "moe_layer_freq": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
                "hidden_act": "silu", "rms_norm_eps": 1e-6,
            },
            "vision_config": TOWER | {
                "model_type": "moonvit", "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4,
                "merge_kernel_size": [2, 2],
            },
        },
        shapes | {f"language_model.{name}": shape for name, shape in text.items()},
        place=["<|media_pad|>"], last=("<|media_pad|>",),
        files={
            "processing.py": KIMI,
            "processor_config.json": {"processor_class": "Processor", "auto_map": {"AutoProcessor": "processing.Processor"}},
        },
        attention_backend="CPU_MLA",
    )  # fmt: skip


BERT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "max_position_embeddings": 1024, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def _nomic() -> Medium:
    shapes = linear("embeddings.word_embeddings", WORDS, WIDTH, bias=False) | norm("emb_ln", width=WIDTH)
    shapes |= linear("embeddings.token_type_embeddings", 2, WIDTH, bias=False)
    for number in range(2):
        at = f"encoder.layers.{number}"
        shapes |= linear(f"{at}.attn.Wqkv", 3 * WIDTH, WIDTH, bias=False) | linear(
            f"{at}.attn.out_proj", WIDTH, WIDTH, bias=False
        )
        shapes |= norm(f"{at}.norm1", f"{at}.norm2", width=WIDTH) | linear(f"{at}.mlp.fc2", WIDTH, 128, bias=False)
        shapes |= linear(f"{at}.mlp.fc11", 128, WIDTH, bias=False) | linear(f"{at}.mlp.fc12", 128, WIDTH, bias=False)
    return remote(
        "NomicBertModel",
        BERT | {
            "model_type": "nomic_bert", "activation_function": "swiglu", "mlp_fc1_bias": False, "mlp_fc2_bias": False,
            "qkv_proj_bias": False, "rotary_emb_scale_base": None, "rotary_emb_interleaved": False, "layer_norm_epsilon": 1e-12,
            "n_inner": 128, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 1024,
        },
        shapes, name="NomicBertConfig",
    )  # fmt: skip


def _gte(architecture: str, name: str, at: str = "", *, classes: int = 0) -> Medium:
    shapes = linear("embeddings.word_embeddings", WORDS, WIDTH, bias=False) | norm("embeddings.LayerNorm", width=WIDTH)
    shapes |= linear("embeddings.token_type_embeddings", 2, WIDTH, bias=False)
    for number in range(2):
        layer = f"encoder.layer.{number}"
        shapes |= linear(f"{layer}.attention.qkv_proj", 3 * WIDTH, WIDTH) | linear(
            f"{layer}.attention.o_proj", WIDTH, WIDTH
        )
        shapes |= linear(f"{layer}.mlp.up_gate_proj", 256, WIDTH, bias=False) | linear(
            f"{layer}.mlp.down_proj", WIDTH, 128
        )
        shapes |= norm(f"{layer}.attn_ln", f"{layer}.mlp_ln", width=WIDTH)
    if classes:
        shapes |= linear("pooler.dense", WIDTH, WIDTH)
    shapes = {f"{at}{tensor}": shape for tensor, shape in shapes.items()}
    if classes:
        shapes |= linear("classifier", classes, WIDTH)
    entries = BERT | {
        "model_type": "new" if name == "NewConfig" else "gte",
        "hidden_act": "gelu",
        "position_embedding_type": "rope",
    }
    if classes:
        entries |= {
            "id2label": {str(i): str(i) for i in range(classes)},
            "label2id": {str(i): i for i in range(classes)},
        }
    return remote(architecture, entries, shapes, name=name)


def _jina() -> Medium:
    """Jina's v3: each matrix has adapters, one for each task, which vLLM adds while it loads."""
    matrices = {"embeddings.word_embeddings": (WORDS, WIDTH), "embeddings.token_type_embeddings": (1, WIDTH)}
    shapes = norm("emb_ln", width=WIDTH)
    for number in range(2):
        at = f"encoder.layers.{number}"
        matrices |= {f"{at}.mixer.Wqkv": (3 * WIDTH, WIDTH), f"{at}.mixer.out_proj": (WIDTH, WIDTH)}
        matrices |= {f"{at}.mlp.fc1": (128, WIDTH), f"{at}.mlp.fc2": (WIDTH, 128)}
        shapes |= norm(f"{at}.norm1", f"{at}.norm2", width=WIDTH)
    for name, (rows, columns) in matrices.items():
        weight = f"{name}.parametrizations.weight"
        sides = ((5, 4, columns), (5, rows, 4))
        one, other = reversed(sides) if "embeddings" in name else sides
        shapes |= {f"{weight}.original": (rows, columns), f"{weight}.0.lora_A": one, f"{weight}.0.lora_B": other}
        if "embeddings" not in name:
            shapes[f"{name}.bias"] = (rows,)
    return remote(
        "XLMRobertaModel",
        BERT | {
            "model_type": "xlm-roberta", "type_vocab_size": 1, "hidden_act": "gelu", "position_embedding_type": "rotary",
            "lora_rank": 4, "lora_alpha": 1, "lora_adaptations": ["a", "b", "c", "d", "e"],
        },
        {f"roberta.{name}": shape for name, shape in shapes.items()}, name="XLMRobertaFlashConfig",
    )  # fmt: skip


def _nemotron_nas() -> Medium:
    """Layers without attention, without MLP, and with wider ones."""
    shapes: Shapes = {f"{name}.weight": (WORDS, WIDTH) for name in ("model.embed_tokens", "lm_head")} | norms(
        "model.norm"
    )
    kinds = [(2, 1.0), (None, 2.0), (2, None), (2, 1.3125)]
    blocks = []
    for number, (group, multiple) in enumerate(kinds):
        at = f"model.layers.{number}"
        attends, computes = group is not None, multiple is not None
        if attends:
            shapes |= norms(f"{at}.input_layernorm") | attention(f"{at}.self_attn", 4, 4 // group)
        if computes:
            inner = -(-int(2 * multiple * WIDTH / 3) // 256) * 256
            shapes |= norms(f"{at}.post_attention_layernorm") | mlp(f"{at}.mlp", inner)
        blocks.append(
            {
                "attention": {"no_op": not attends, "n_heads_in_group": group, "replace_with_linear": False},
                "ffn": {"no_op": not computes, "ffn_mult": multiple, "replace_with_linear": False},
            }
        )
    entries = SHAPE | {
        "model_type": "nemotron-nas",
        "num_hidden_layers": 4,
        "block_configs": blocks,
        "tie_word_embeddings": False,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return remote("DeciLMForCausalLM", entries, shapes)  # fmt: skip


REMOTE: dict[str, Medium] = {
    "internvl-chat": internvl_chat(),
    "minicpm-v2.6": _minicpm_v(),
    "minicpm-o2.6": _minicpm_o(),
    "kimi-vl": _kimi_vl(),
}
"""Models that read images."""
REMOTE_TEXT: dict[str, tuple[Medium, str]] = {
    "nemotron_nas": (_nemotron_nas(), "tokens"),
    "nomic-embedding": (_nomic(), "embed"),
    "gte-embedding": (_gte("GteNewModel", "NewConfig"), "embed"),
    "gte-classifier": (_gte("GteNewForSequenceClassification", "NewConfig", "new.", classes=3), "classify"),
    "snowflake-embedding": (_gte("GteModel", "GteConfig"), "embed"),
    "jina-v3-embedding": (_jina(), "embed"),
}
"""Others, and with what an engine answers."""
