"""Tiny checkpoints of more models that read images or hear sounds, for `make models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import rename_tower
from tests.support.multimodal import (
    AUDIO,
    BLOCKS,
    EARS,
    EXPERTS,
    GLM_IDS,
    GLM_TOKENS,
    GRID,
    HEADS_OF_ITS_OWN,
    HEARD,
    INTERLEAVED,
    OMNI_IDS,
    QWEN_VISION,
    TEXT,
    TOWER,
    WIDTH,
    WORDS,
    Medium,
    family,
    patches,
    rope,
    side,
)

__all__ = ["MORE", "SIGLIP"]

HEARD_IDS = {name: WORDS - len(HEARD) + HEARD.index(token) for name, token in OMNI_IDS.items()}
QWEN3_OMNI_IDS = {
    "audio_token_id": HEARD_IDS["audio_token_index"], "audio_start_token_id": HEARD_IDS["audio_start_token_id"],
    "audio_end_token_id": HEARD_IDS["audio_end_token_id"], "image_token_id": HEARD_IDS["image_token_index"],
    "video_token_id": HEARD_IDS["video_token_index"], "vision_start_token_id": HEARD_IDS["vision_start_token_id"],
    "vision_end_token_id": HEARD_IDS["vision_end_token_id"],
}  # fmt: skip
SIGLIP: dict[str, Any] = TOWER | GRID | {"model_type": "siglip_vision_model", "vision_use_head": False}


def _llava(stem: str, image: str, **more: Any) -> Medium:
    """A Qwen2 behind a tower of Siglip's."""
    return family(
        stem,
        place=["<image>"],
        last=("<image>", "<video>"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": image, "size": side(56), "crop_size": side(56), "image_grid_pinpoints": [[56, 56]],
                "processor_class": f"{stem}Processor",
            },
            "processor_config.json": {
                "processor_class": f"{stem}Processor", "patch_size": 14, "vision_feature_select_strategy": "full",
                "num_image_tokens": 16,
            },
            **more.pop("files", {}),
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {"model_type": "qwen2", "tie_word_embeddings": False},
            "vision_config": SIGLIP, "image_token_index": "<image>", "video_token_index": "<video>",
            "image_grid_pinpoints": [[56, 56]], "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
        special={"image_token": "<image>"},
        **more,
    )  # fmt: skip


def _as_published(path: Path) -> None:
    """LLaVA's names, as they were before transformers 5."""
    rename_tower(path, "vision_tower.", "vision_tower.vision_model.")


MORE: dict[str, Medium] = {
    "qwen3-omni": family(
        "Qwen3OmniMoe",
        place=HEARD[:3],
        last=HEARD,
        files={
            **patches("Qwen3OmniMoeProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", 16),
            "preprocessor_config.json": EARS | {
                "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3OmniMoeProcessor", "patch_size": 16,
                "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 4096, "max_pixels": 4096,
            },
        },
        config={
            "enable_audio_output": False,
            "thinker_config": {
                "text_config": TEXT | EXPERTS | {
                    "rope_parameters": INTERLEAVED, "norm_topk_prob": True, "tie_word_embeddings": False,
                },
                "vision_config": QWEN_VISION | {
                    "deepstack_visual_indexes": [0], "image_size": 64, "apply_vit_abs_pos_embed": True,
                },
                "audio_config": AUDIO | {"output_dim": WIDTH, "n_window": 50, "downsample_hidden_size": 32},
                **QWEN3_OMNI_IDS,
            },
        },
        special={
            "audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
            "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
        },
        sound=True,
    ),
    "glm-ocr": family(
        "GlmOcr",
        place=GLM_TOKENS[:3],
        last=GLM_TOKENS,
        files=patches("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor", 14),
        config={
            "text_config": TEXT | {"intermediate_size": 3 * WIDTH, "rope_parameters": rope(4, 6, 6, partial_rotary_factor=1.0)},
            "vision_config": BLOCKS | GRID | {"intermediate_size": 3 * WIDTH}, **GLM_IDS,
        },
        special={"image_token": GLM_TOKENS[1], "video_token": GLM_TOKENS[4]},
    ),
    "llava-next": _llava("LlavaNext", "LlavaNextImageProcessor", fix=_as_published),
    "llava-next-video": _llava(
        "LlavaNextVideo",
        "LlavaNextImageProcessor",
        files={
            "video_preprocessor_config.json": {
                "video_processor_type": "LlavaNextVideoVideoProcessor", "size": side(56), "crop_size": side(56),
            }
        },
        fix=_as_published,
    ),
    "llava-onevision": _llava(
        "LlavaOnevision",
        "LlavaOnevisionImageProcessor",
        files={
            "video_preprocessor_config.json": {
                "video_processor_type": "LlavaOnevisionVideoProcessor", "size": side(56)
            }
        },
        fix=_as_published,
    ),
    "exaone4.5": family(
        "Exaone4_5_",
        place=["<|image_pad|>"],
        last=("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        files=patches("Exaone4_5_Processor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", 14),
        config={
            "text_config": TEXT | {
                "model_type": "exaone4", "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": BLOCKS | {"num_key_value_heads": 1, "fullatt_block_indexes": [1], "window_size": 56},
            "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        },
        special={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ),
    "cohere2-vision": family(
        "Cohere2Vision",
        place=["<image>"],
        last=("<image>", "<boi>", "<eoi>", "<line>"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Cohere2VisionImageProcessor", "size": side(56), "patch_size": 14,
                "downsample_factor": 2, "processor_class": "Cohere2VisionProcessor",
            },
            "processor_config.json": {"processor_class": "Cohere2VisionProcessor"},
        },
        config={
            "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 32, "tie_word_embeddings": True},
            "vision_config": SIGLIP, "image_token_id": "<image>", "downsample_factor": 2, "alignment_intermediate_size": 64,
        },
        special={"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "img_line_break_token": "<line>"},
        fix=_as_published,
    ),
}  # fmt: skip
