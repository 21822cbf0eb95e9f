"""Tiny checkpoints of further models that read images or hear sounds and that transformers lacks, for `make models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import load, maker_of, noise, rewrite
from tests.support.models import SHAPE
from tests.support.multimodal import HEADS_OF_ITS_OWN, TEXT, TOWER, WIDTH, WORDS, Medium
from tests.support.remote_checkpoints import linear, norm, qwen, remote
from tests.support.remote_media import processor
from tests.support.written_checkpoints import NORMS, ROPE, Shapes, attention, mlp, model, norms, stacked

__all__ = ["REMOTE_NEWEST"]

NARROW: int = TOWER["hidden_size"]


def encoder(at: str, names: str, *, norms_of: str = "layer_norm1 layer_norm2", parts: str = "self_attn mlp") -> Shapes:
    """Layers of a tower as CLIP has them. `names`: of the four projections of attention."""
    attends, computes = parts.split()
    found: Shapes = {}
    for number in range(2):
        layer = f"{at}.{number}"
        found |= norm(*(f"{layer}.{name}" for name in norms_of.split()), width=NARROW)
        for name in names.split():
            found |= linear(f"{layer}.{attends}.{name}", NARROW, NARROW)
        found |= linear(f"{layer}.{computes}.fc1", 64, NARROW) | linear(f"{layer}.{computes}.fc2", NARROW, 64)
    return found


PROJECTIONS = "q_proj k_proj v_proj out_proj"


def _step3() -> Medium:
    """Step 3: experts from the second layer on, a shared key, and images of 728 pixels."""

    def layer(number: int) -> Shapes:
        at = "self_attn"
        found = NORMS | linear(f"{at}.q_proj", 32, WIDTH, bias=False) | linear(f"{at}.wq", 128, 32, bias=False)
        found |= {f"{at}.{part}_proj.weight": (32, WIDTH) for part in "kv"} | norms(f"{at}.inter_norm", width=32)
        found |= {f"{at}.o_proj.weight": (WIDTH, 128)}
        return found | (stacked("moe", "share_expert") if number else mlp("mlp"))

    shapes, at = model(layer), "vision_model"
    shapes |= {f"{at}.embeddings.class_embedding": (1, NARROW), f"{at}.embeddings.patch_embedding.bias": (NARROW,)}
    shapes |= {f"{at}.embeddings.patch_embedding.weight": (NARROW, 3, 14, 14)}
    shapes |= {f"{at}.embeddings.position_embedding.weight": (52 * 52 + 1, NARROW)}
    shapes |= encoder(f"{at}.transformer.layers", "qkv_proj out_proj")
    for number in range(2):
        shapes |= linear(f"{at}.transformer.layers.{number}.self_attn.qkv_proj", 3 * NARROW, NARROW)
    shapes |= {"vit_downsampler.weight": (NARROW, NARROW, 2, 2), "vit_downsampler.bias": (NARROW,)}
    shapes |= {"vit_downsampler2.weight": (2 * NARROW, NARROW, 3, 3), "vit_downsampler2.bias": (2 * NARROW,)}
    shapes |= linear("vit_large_projector", WIDTH, 2 * NARROW)
    return remote(
        "Step3VLForConditionalGeneration",
        {
            "model_type": "step3_vl", "image_token_id": "<im_patch>", "understand_projector_stride": 2, "projector_bias": True,
            "text_config": {
                "model_type": "step3_text", "architectures": ["Step3TextForCausalLM"], "vocab_size": WORDS,
                "hidden_size": WIDTH, "intermediate_size": 128,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_attention_groups": 1, "head_dim": 32, "share_q_dim": 32,
                "moe_intermediate_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "moe_layers_enum": "1",
                "share_expert_dim": 64, "max_position_embedding": 1024, "eos_token_id": 0, "pad_token_id": 0,
                "tie_word_embeddings": False,
            },
            "vision_config": TOWER | {"image_size": 728, "patch_size": 14, "output_hidden_size": NARROW},
        },
        shapes,
        place=["<im_patch>"],
        last=("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        code=False, max_model_len=512, skip_mm_profiling=True,
    )  # fmt: skip


def _glm4v() -> Medium:
    """GLM-4V 9B: ChatGLM with a tower whose projection has a gate."""
    layer = NORMS | {
        "self_attention.query_key_value.weight": (128, WIDTH), "self_attention.query_key_value.bias": (128,),
        "self_attention.dense.weight": (WIDTH, WIDTH), "mlp.dense_h_to_4h.weight": (256, WIDTH),
        "mlp.dense_4h_to_h.weight": (WIDTH, 128),
    }  # fmt: skip
    at = "transformer.vision"
    shapes = model(
        lambda _: layer,
        "transformer.encoder.layers",
        embedding="transformer.embedding.word_embeddings",
        norm="transformer.encoder.final_layernorm",
        head="transformer.output_layer",
    )
    shapes |= {f"{at}.patch_embedding.cls_embedding": (1, NARROW), f"{at}.patch_embedding.proj.bias": (NARROW,)}
    shapes |= {f"{at}.patch_embedding.proj.weight": (NARROW, 3, 14, 14)}
    shapes |= {f"{at}.patch_embedding.position_embedding.weight": (17, NARROW)}
    names = "input_layernorm post_attention_layernorm"
    shapes |= encoder(f"{at}.transformer.layers", "dense", norms_of=names, parts="attention mlp")
    for number in range(2):
        shapes |= linear(f"{at}.transformer.layers.{number}.attention.query_key_value", 3 * NARROW, NARROW)
    shapes |= {f"{at}.conv.weight": (WIDTH, NARROW, 2, 2), f"{at}.conv.bias": (WIDTH,)}
    shapes |= {f"{at}.boi": (1, 1, WIDTH), f"{at}.eoi": (1, 1, WIDTH)} | norm(f"{at}.linear_proj.norm1", width=WIDTH)
    for name, rows, columns in (
        ("linear_proj", WIDTH, WIDTH),
        ("dense_h_to_4h", 128, WIDTH),
        ("gate_proj", 128, WIDTH),
        ("dense_4h_to_h", WIDTH, 128),
    ):
        shapes |= linear(f"{at}.linear_proj.{name}", rows, columns, bias=False)
    tokens = ("<|begin_of_image|>", "<|endoftext|>", "<|end_of_image|>")
    return remote(
        "GLM4VForCausalLM",
        {
            "model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 1, "num_attention_heads": 2,
            "kv_channels": 32, "num_layers": 2, "hidden_size": WIDTH, "add_bias_linear": False, "add_qkv_bias": True,
            "original_rope": True, "ffn_hidden_size": 128, "seq_length": 1024, "rmsnorm": True, "layernorm_epsilon": 1e-5,
            "hidden_dropout": 0.0, "padded_vocab_size": WORDS, "eos_token_id": 0, "pad_token_id": tokens[1],
            "tie_word_embeddings": False, "boi_token_id": tokens[0],
            "eoi_token_id": tokens[2],
            "vision_config": TOWER | {
                "num_heads": 2, "image_size": 56, "patch_size": 14, "in_channels": 3, "num_positions": 17, "scaling_factor": 8,
                "dropout_prob": 0.0, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
            },
        },
        shapes, place=tokens, last=tokens, code=False, skip_mm_profiling=True,
    )  # fmt: skip


ULTRAVOX = """\
import torch
from transformers import BatchFeature, ProcessorMixin, WhisperFeatureExtractor


class Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, **_):
        super().__init__(tokenizer)
        self.audio_processor = WhisperFeatureExtractor(chunk_length=2)

    def __call__(self, text=None, audios=None, sampling_rate=16000, **_):
        made = dict(self.tokenizer(text, return_tensors="pt"))
        if audios:
            sounds = self.audio_processor(list(audios), sampling_rate=sampling_rate, return_tensors="pt")
            made["audio_values"] = sounds["input_features"]
            made["audio_lens"] = torch.tensor([len(one) // 160 for one in audios])
            made["audio_token_len"] = -(-made["audio_lens"] // 16)
            made["audio_num_chunks"] = torch.ones(len(audios), dtype=torch.long)
        return BatchFeature(made)
"""


def _ultravox() -> Medium:
    """A Llama behind the encoder of a Whisper, whose vectors are stacked."""
    at = "audio_tower"
    shapes = {
        f"language_model.{name}": shape
        for name, shape in model(lambda _: NORMS | attention("self_attn", 2, 1) | mlp("mlp")).items()
    }
    shapes |= {f"{at}.conv1.weight": (NARROW, 80, 3), f"{at}.conv2.weight": (NARROW, NARROW, 3)}
    shapes |= {f"{at}.conv1.bias": (NARROW,), f"{at}.conv2.bias": (NARROW,)}
    shapes |= norm(f"{at}.layer_norm", width=NARROW) | {f"{at}.embed_positions.weight": (100, NARROW)}
    for number in range(2):
        layer = f"{at}.layers.{number}"
        shapes |= norm(f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm", width=NARROW)
        for part in PROJECTIONS.split():
            shapes |= linear(f"{layer}.self_attn.{part}", NARROW, NARROW, bias=part != "k_proj")
        shapes |= linear(f"{layer}.fc1", 64, NARROW) | linear(f"{layer}.fc2", NARROW, 64)
    at = "multi_modal_projector"
    shapes |= norms(f"{at}.ln_pre", width=8 * NARROW) | norms(f"{at}.ln_mid", width=WIDTH)
    shapes |= linear(f"{at}.linear_1", 2 * WIDTH, 8 * NARROW, bias=False)
    shapes |= linear(f"{at}.linear_2", WIDTH, WIDTH, bias=False)
    return remote(
        "UltravoxModel",
        {
            "model_type": "ultravox", "hidden_size": 2 * WIDTH, "stack_factor": 8, "projector_act": "swiglu",
            "projector_ln_mid": True, "audio_token_index": "<|audio|>", "vocab_size": WORDS,
            "text_config": HEADS_OF_ITS_OWN | {
                "model_type": "llama", "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
            },
            "audio_config": {
                "model_type": "whisper", "d_model": NARROW, "encoder_layers": 2, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64, "num_mel_bins": 80, "max_source_positions": 100,
            },
        },
        shapes, place=["<|audio|>"], last=("<|audio|>",), sound=True, code=False, files=processor(ULTRAVOX),
        trust_remote_code=True, skip_mm_profiling=True,
    )  # fmt: skip


PROCESSOR = """\
from types import SimpleNamespace

from transformers import BatchFeature, ProcessorMixin


class Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer=None, **_):
        super().__init__(tokenizer)
        vars(self).update(OWN)
        self.image_processor = self.video_processor = SimpleNamespace(**IMAGES)

    def __call__(self, text=None, **_):
        return BatchFeature(dict(self.tokenizer(text, return_tensors="pt")))
"""


def text_only(images: dict[str, Any], **own: Any) -> dict[str, dict[str, Any] | str]:
    """A processor of the tests, which is never given an image; the engine asks for these entries all the same."""
    return processor(PROCESSOR.replace("OWN", repr(own)).replace("IMAGES", repr(images)))


def _keye(architecture: str, model_type: str, projector: Shapes) -> Medium:
    """Kuaishou's Keye: a Qwen3 behind a tower as SigLIP's. Its configuration is one, with the tower's inside."""
    shapes, at = qwen(""), "visual.vision_model"
    shapes |= {f"{at}.embeddings.patch_embedding.weight": (NARROW, 3, 14, 14)}
    shapes |= {f"{at}.embeddings.patch_embedding.bias": (NARROW,)}
    shapes |= linear(f"{at}.embeddings.position_embedding", 16, NARROW, bias=False)
    shapes |= linear(f"{at}.embeddings.packing_position_embedding", 32768, NARROW, bias=False)
    shapes |= norm(f"{at}.post_layernorm", width=NARROW) | encoder(f"{at}.encoder.layers", PROJECTIONS)
    tokens = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|fast|>", "<|frame|>")
    return remote(
        architecture,
        SHAPE | {
            "model_type": model_type, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}, "vision_start_token_id": tokens[0],
            "image_token_id": tokens[1], "vision_end_token_id": tokens[2], "video_token_id": tokens[3],
            "fast_video_token_id": tokens[4],
            "vision_config": TOWER | {
                "model_type": "Keye", "image_size": 56, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-6, "spatial_merge_size": 2, "temporal_patch_size": 1, "attention_dropout": 0.0,
                "tokens_per_second": 2,
            },
        },
        shapes | projector,
        place=tokens[:3], last=tokens, special={"image_token": tokens[1], "video_token": tokens[3]},
        files=text_only(
            {
                "merge_size": 2, "patch_size": 14, "min_pixels": 784, "max_pixels": 3136,
                "size": {"min_pixels": 784, "max_pixels": 3136, "shortest_edge": 784, "longest_edge": 3136},
            },
            image_token=tokens[1],
            video_token=tokens[3],
        ), name="KeyeConfig", skip_mm_profiling=True,
    )  # fmt: skip


MOLMO_TOKENS = (
    "<|image|>", "<|video|>", "<im_patch>", "<im_start>", "<im_end>", "<im_col>", "<low_res_im_start>", "<frame_start>",
    "<frame_end>", "<im_low>",
)  # fmt: skip
MOLMO = """\
from types import SimpleNamespace

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin


class Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"
    image_use_col_tokens, video_use_col_tokens, use_single_crop_col_tokens = True, True, None
    use_single_crop_start_token, use_frame_special_tokens = True, True

    def __init__(self, tokenizer=None, **_):
        super().__init__(tokenizer)
        self.image_processor = self.video_processor = SimpleNamespace(
            patch_size=14, overlap_margins=(1, 1), max_crops=1, pooling_size=(2, 2), size={"height": 56, "width": 56},
            num_frames=1,
        )

    def __call__(self, text=None, images=None, **_):
        made = dict(self.tokenizer(text, return_tensors="pt"))
        if images:
            pixels = [torch.tensor(np.asarray(one.convert("RGB").resize((56, 56)))) / 128 - 1 for one in images]
            patches = [one.reshape(4, 14, 4, 14, 3).permute(0, 2, 1, 3, 4).reshape(16, -1) for one in pixels]
            made["pixel_values"] = torch.stack([one for one in patches for _ in range(2)])
            grid = torch.arange(32 * len(images)).reshape(-1, 2, 2, 2, 2)
            made["image_token_pooling"] = grid.permute(0, 1, 3, 2, 4).reshape(-1, 4)
            made["image_grids"] = torch.tensor([[2, 2, 2, 2]] * len(images))
            made["image_num_crops"] = torch.tensor([2] * len(images))
        return BatchFeature(made)
"""


def _molmo2() -> Medium:
    """Molmo 2: its loader joins two tensors to one embedding."""
    shapes: Shapes = {"lm_head.weight": (WORDS, WIDTH), "model.transformer.wte.embedding": (WORDS, WIDTH)}
    shapes |= {"model.transformer.wte.new_embedding": (16, WIDTH)} | norms("model.transformer.ln_f")
    for number in range(2):
        at = f"model.transformer.blocks.{number}"
        shapes |= norms(f"{at}.attn_norm", f"{at}.ff_norm")
        shapes |= norms(f"{at}.self_attn.q_norm", f"{at}.self_attn.k_norm", width=32)
        shapes |= linear(f"{at}.self_attn.att_proj", 128, WIDTH) | linear(
            f"{at}.self_attn.attn_out", WIDTH, 64, bias=False
        )
        shapes |= linear(f"{at}.mlp.ff_proj", 256, WIDTH, bias=False) | linear(
            f"{at}.mlp.ff_out", WIDTH, 128, bias=False
        )
    back = "model.vision_backbone"
    shapes |= {f"{back}.image_vit.positional_embedding": (16, NARROW)}
    shapes |= linear(f"{back}.image_vit.patch_embedding", NARROW, 3 * 14 * 14)
    for number in range(2):
        at = f"{back}.image_vit.transformer.resblocks.{number}"
        shapes |= norm(f"{at}.attention_norm", f"{at}.ffn_norm", width=NARROW)
        for part in ("wq", "wk", "wv", "wo"):
            shapes |= linear(f"{at}.attention.{part}", NARROW, NARROW)
        shapes |= linear(f"{at}.feed_forward.w1", 64, NARROW) | linear(f"{at}.feed_forward.w2", NARROW, 64)
    for part in ("wq", "wk", "wv"):
        shapes |= linear(f"{back}.image_pooling_2d.{part}", NARROW, 2 * NARROW)
    shapes |= linear(f"{back}.image_pooling_2d.wo", NARROW, NARROW)
    for part, rows, columns in (("w1", 128, NARROW), ("w3", 128, NARROW), ("w2", WIDTH, 128)):
        shapes |= linear(f"{back}.image_projector.{part}", rows, columns, bias=False)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    return remote(
        "Molmo2ForConditionalGeneration",
        {
            "model_type": "molmo2", "image_patch_id": "<im_patch>", "image_col_id": "<im_col>",
            "image_start_token_id": "<im_start>", "image_end_token_id": "<im_end>",
            "low_res_image_start_token_id": "<low_res_im_start>",
            "frame_start_token_id": "<frame_start>", "frame_end_token_id": "<frame_end>", "image_low_res_id": "<im_low>",
            "tie_word_embeddings": False,
            "text_config": TEXT | {
                "model_type": "molmo2_text", "additional_vocab_size": 16, "qkv_bias": True, "hidden_act": "silu",
                "rope_theta": 10000.0, "rope_parameters": ROPE, "use_qk_norm": True, "qk_norm_type": "qwen3",
                "layer_norm_eps": 1e-6,
                "norm_after": False, "rope_scaling_layers": None, "tie_word_embeddings": False,
            },
            "vit_config": TOWER | heads | {
                "model_type": "molmo2_vit", "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
                "image_default_input_size": [56, 56], "image_patch_size": 14, "image_num_pos": 16,
            },
            "adapter_config": TOWER | heads | {
                "model_type": "molmo2_adapter", "vit_layers": [-1, -2], "pooling_attention_mask": True, "hidden_act": "silu",
                "intermediate_size": 128, "text_hidden_size": WIDTH,
            },
        },
        shapes,
        place=["<|image|>"], last=MOLMO_TOKENS,
        special={"bos_token": "<|end|>"}, files=processor(MOLMO), name="Molmo2Config",
        skip_mm_profiling=True, limit_mm_per_prompt={"video": 0},
    )  # fmt: skip


def _nano_nemotron() -> Medium:
    """Nemotron Nano VL 2: Nemotron-H behind a RADIO of the smallest size that the engines know."""
    narrow, inner = 384, 1536
    text = maker_of(
        "NemotronHConfig", "NemotronHForCausalLM", dtype=torch.bfloat16, hybrid_override_pattern="M*-", mamba_num_heads=4,
        mamba_head_dim=32, n_groups=1,
    )  # fmt: skip
    shapes: Shapes = {"mlp1.0.weight": (4 * narrow,), "mlp1.1.weight": (64, 4 * narrow), "mlp1.3.weight": (WIDTH, 64)}
    at = "vision_model.radio_model.model"
    shapes |= {f"{at}.patch_generator.embedder.weight": (narrow, 3 * 16 * 16)}
    shapes |= {
        f"{at}.patch_generator.pos_embed": (1, 128 * 128, narrow),
        f"{at}.patch_generator.cls_token.token": (1, narrow),
    }
    for number in range(12):
        block = f"{at}.blocks.{number}"
        shapes |= norm(f"{block}.norm1", f"{block}.norm2", width=narrow)
        shapes |= linear(f"{block}.attn.qkv", 3 * narrow, narrow) | linear(f"{block}.attn.proj", narrow, narrow)
        shapes |= linear(f"{block}.mlp.fc1", inner, narrow) | linear(f"{block}.mlp.fc2", narrow, inner)
    tokens = ("<image>", "<img>", "</img>", "<video>", "<so_embedding>", "<so_start>", "<so_end>", "<unk>")

    def make(directory: Path, seed: int) -> Path:
        path = text(directory, seed)
        tensors = {
            f"language_model.{n}": t + 0.2 * noise(t, 100 * seed + i) for i, (n, t) in enumerate(load(path).items())
        }
        tower = shell.make(directory.with_name(f"{directory.name}-tower"), seed)
        known = json.loads((path / "config.json").read_text()) | {
            "layers_block_type": ["mamba", "attention", "mlp"], "mtp_layers_block_type": ["attention"],
            "mamba_n_groups": 1,
        }  # fmt: skip
        return rewrite(tower, tensors | load(tower), text_config=known, llm_config=known)

    shell = remote(
        "NemotronH_Nano_VL_V2",
        {
            "model_type": "NemotronH_Nano_VL_V2", "force_image_size": 64, "patch_size": 16, "template": "",
            "downsample_ratio": 0.5, "ps_version": "v2", "image_tag_type": "internvl", "vit_hidden_size": narrow,
            "projector_hidden_size": 64,
            "use_thumbnail": False, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "img_context_token_id": "<image>",
            "vision_config": {
                "patch_size": 16, "preferred_resolution": [64, 64],
                "args": {"model": "vit_small_patch16_224"},
            },
        },
        shapes, place=["<image>"], last=tokens, special={"unk_token": "<unk>"}, name="NemotronConfig", dtype="bfloat16",
        skip_mm_profiling=True, enable_prefix_caching=False,
    )  # fmt: skip
    return Medium(make, shell.prompt, dtype="bfloat16", vllm=shell.vllm)


REMOTE_NEWEST: dict[str, Medium] = {
    "molmo2": _molmo2(),
    "nemotron-nano-vl": _nano_nemotron(),
    "step3": _step3(),
    "glm-4v": _glm4v(),
    "ultravox": _ultravox(),
    "keye": _keye(
        "KeyeForConditionalGeneration",
        "Keye",
        norm("mlp_AR.pre_norm", width=NARROW)
        | linear("mlp_AR.linear_1", 4 * NARROW, 4 * NARROW)
        | linear("mlp_AR.linear_2", WIDTH, 4 * NARROW),
    ),
    "keye-vl-1.5": _keye(
        "KeyeVL1_5ForConditionalGeneration",
        "KeyeVL1_5",
        norm("mlp_AR.pre_norm", width=4 * NARROW)
        | linear("mlp_AR.linear_1", 4 * NARROW, 4 * NARROW)
        | linear("mlp_AR.linear_2", WIDTH, 4 * NARROW),
    ),
}
