"""Tiny checkpoints of more models that read images and whose configuration comes with code of its own."""

from __future__ import annotations

from typing import Any

from tests.support.models import SHAPE
from tests.support.multimodal import TOWER, WIDTH, WORDS, Medium
from tests.support.remote_checkpoints import linear, norm, qwen, remote
from tests.support.written_checkpoints import NORMS, ROPE, Shapes, attention, mlp, model, norms

__all__ = ["REMOTE_MEDIA"]

NARROW: int = TOWER["hidden_size"]

# --- ERNIE 4.5 VL -----------------------------------------------------------------------------------------------------

ERNIE_TOKENS = (
    "<|IMAGE_PLACEHOLDER|>", "<|image@placeholder|>", "<|video@placeholder|>", "<|IMAGE_START|>", "<|IMAGE_END|>",
    "<|VIDEO_START|>", "<|VIDEO_END|>",
)  # fmt: skip
ERNIE = '''\
import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin


class Images:
    image_mean, image_std, rescale_factor = [0.5] * 3, [0.5] * 3, 1 / 255
    size = {"min_pixels": 28 * 28, "max_pixels": 28 * 28}


class Processor(ProcessorMixin):
    """Each image is resized to one token, and each frame of a video."""

    attributes = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"
    spatial_conv_size = temporal_conv_size = 2

    def __init__(self, tokenizer=None, **_):
        super().__init__(tokenizer)
        self.image_processor = Images()

    def __call__(self, text=None, images=None, videos=None, return_tensors=None, **_):
        made = dict(self.tokenizer(text, return_tensors="pt"))
        items = [[np.asarray(image.convert("RGB").resize((28, 28)))] for image in images or ()]
        items += [[np.resize(frame, (28, 28, 3)) for frame in video] for video in videos or ()]
        if items:
            patches = [torch.tensor(frame.copy()).permute(2, 0, 1).reshape(3, 2, 14, 2, 14) for item in items for frame in item]
            made["images"] = torch.cat([one.permute(1, 3, 0, 2, 4).reshape(4, -1) for one in patches])
            made["grid_thw"] = torch.tensor([[len(item), 2, 2] for item in items])
        return BatchFeature(made)
'''


def processor(code: str) -> dict[str, dict[str, Any] | str]:
    """Files of a processor that comes with the checkpoint."""
    known = {"processor_class": "Processor", "auto_map": {"AutoProcessor": "processing.Processor"}}
    return {"processing.py": code, "preprocessor_config.json": known, "processor_config.json": known}


def _ernie() -> Medium:
    """Experts for text and others for images; the router's weights are transposed."""
    wide = 4 * NARROW

    def layer(number: int) -> Shapes:
        found = NORMS | attention("self_attn", 2, 1)
        if not number:
            return found | mlp("mlp")
        found |= mlp("mlp.shared_experts", 64) | {"mlp.moe_statics.e_score_correction_bias": (2, 4)}
        found |= {"mlp.gate.weight": (WIDTH, 4), "mlp.gate.weight_1": (WIDTH, 4)}
        for expert in range(8):
            found |= mlp(f"mlp.experts.{expert}", 64 if expert < 4 else 32)
        return found

    shapes = model(layer) | linear("vision_model.patch_embed.proj", NARROW, 3 * 14 * 14, bias=False)
    shapes |= norm("vision_model.ln", width=NARROW)
    for number in range(2):
        at = f"vision_model.blocks.{number}"
        shapes |= norm(f"{at}.norm1", f"{at}.norm2", width=NARROW)
        shapes |= linear(f"{at}.attn.qkv", 3 * NARROW, NARROW) | linear(f"{at}.attn.proj", NARROW, NARROW)
        shapes |= linear(f"{at}.mlp.fc1", 64, NARROW) | linear(f"{at}.mlp.fc2", NARROW, 64)
    at = "model.resampler_model"
    shapes |= linear(f"{at}.spatial_linear.0", wide, wide) | linear(f"{at}.spatial_linear.2", wide, wide)
    shapes |= linear(f"{at}.temporal_linear.0", wide, 2 * wide) | linear(f"{at}.temporal_linear.2", wide, wide)
    shapes |= norm(f"{at}.spatial_linear.3", f"{at}.temporal_linear.3", width=wide)
    shapes |= linear(f"{at}.mlp", WIDTH, wide) | norms(f"{at}.after_norm")
    return remote(
        "Ernie4_5_VLMoeForConditionalGeneration",
        SHAPE | {
            "model_type": "ernie4_5_moe_vl", "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "use_bias": False, "rope_parameters": ROPE, "rope_theta": 10000.0,
            "freq_allocation": 4, "moe_num_experts": [4, 4], "moe_intermediate_size": [64, 32], "moe_num_shared_experts": 1,
            "moe_k": 2, "moe_layer_start_index": [1, 1], "moe_layer_end_index": [1, 1], "moe_layer_interval": 1,
            "im_patch_id": "<|IMAGE_PLACEHOLDER|>", "image_start_token_id": "<|IMAGE_START|>",
            "image_end_token_id": "<|IMAGE_END|>", "video_start_token_id": "<|VIDEO_START|>",
            "video_end_token_id": "<|VIDEO_END|>", "pixel_hidden_size": NARROW, "spatial_conv_size": 2, "temporal_conv_size": 2,
            "use_temporal_conv": True,
            "vision_config": {
                "model_type": "DFNRope_vision_transformer", "depth": 2, "embed_dim": NARROW, "hidden_size": NARROW,
                "num_heads": 2, "mlp_ratio": 2, "patch_size": 14, "in_channels": 3, "spatial_merge_size": 2,
                "hidden_act": "quick_gelu",
            },
        },
        shapes,
        place=["<|IMAGE_START|>", "<|image@placeholder|>", "<|IMAGE_END|>"], last=ERNIE_TOKENS, files=processor(ERNIE),
        name="Ernie4_5_VLMoeConfig",
    )  # fmt: skip


OVIS_TOKENS = (
    "<image>", "<video>", "<ovis_visual_atom>", "<ovis_image_start>", "<ovis_image_end>", "<ovis_video_start>",
    "<ovis_video_end>", "<|image_pad|>",
)  # fmt: skip


def _ovis() -> Medium:
    """Ovis 2.5: an image is a table of visual words. vLLM knows the numbers of its tokens, which this vocabulary lacks."""
    shapes, words = qwen("llm."), 32
    at = "visual_tokenizer.vit.vision_model"
    shapes |= {f"{at}.embeddings.patch_embedding.weight": (NARROW, 3, 16, 16)}
    shapes |= {f"{at}.embeddings.patch_embedding.bias": (NARROW,)}
    shapes |= linear(f"{at}.embeddings.position_embedding", 16, NARROW, bias=False) | norm(
        f"{at}.post_layernorm", width=NARROW
    )
    for number in range(2):
        layer = f"{at}.encoder.layers.{number}"
        shapes |= norm(f"{layer}.layer_norm1", f"{layer}.layer_norm2", width=NARROW)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.self_attn.{part}", NARROW, NARROW)
        shapes |= linear(f"{layer}.mlp.fc1", 64, NARROW) | linear(f"{layer}.mlp.fc2", NARROW, 64)
    shapes |= linear("visual_tokenizer.head.0", words - 4, 4 * NARROW, bias=False)
    shapes |= norm("visual_tokenizer.head.1", width=words - 4) | {"vte.weight": (words, WIDTH)}
    return remote(
        "Ovis2_5",
        {
            "model_type": "ovis2_5", "hidden_size": WIDTH, "vocab_size": WORDS, "visual_vocab_size": words,
            "tie_word_embeddings": False,
            "text_config": SHAPE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
            "vit_config": TOWER | {
                "model_type": "siglip2_navit", "image_size": 64, "patch_size": 16, "num_patches": -1, "num_channels": 3,
                "hidden_stride": 2, "temporal_patch_size": 1, "preserve_original_pe": True, "use_rope": True, "window_size": 112,
                "fullatt_block_indexes": None, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
                "attention_dropout": 0.0,
            },
        },
        shapes,
        last=OVIS_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "SiglipImageProcessor",  # transformers 5.19 resizes no image by the published one
            }
        },
        name="Ovis2_5_Config", skip_mm_profiling=True,
    )  # fmt: skip


REMOTE_MEDIA: dict[str, Medium] = {"ernie4.5-vl": _ernie(), "ovis2.5": _ovis()}
