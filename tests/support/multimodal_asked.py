"""Tiny checkpoints of models that `make models` asks about an image or a sound, beside text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.checkpoints import load, rewrite
from tests.support.multimodal import (
    EARS,
    HEADS_OF_ITS_OWN,
    HEARD,
    LINEAR,
    PIXTRAL,
    PIXTRAL_TOKENS,
    TEXT,
    TOWER,
    WIDTH,
    Medium,
    family,
    side,
)
from tests.support.multimodal_more import SIGLIP

__all__ = ["ASKED", "WITHOUT_MEDIA", "WITHOUT_TEXT"]

SPEECH = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
MINICPM_TOKENS = (
    "<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>",
)  # fmt: skip

SLICES = {"patch_size": 14, "scale_resolution": 56, "max_slice_nums": 1}
AYA_TOKENS = (
    "<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL", "TILE",
)  # fmt: skip
HUNYUAN_TOKENS = ("<im_start>", "<image>", "<im_end>", "<im_newline>")
LATENT_TEXT: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "head_dim"} | {
    "model_type": "deepseek_v3", "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}  # fmt: skip


def published(*names: tuple[str, str], **entries: Any) -> Callable[[Path], object]:
    """Gives a checkpoint the tensors' names (a pattern, and what stands for it) and the configuration of published ones."""

    def fix(path: Path) -> None:
        tensors = {}
        for name, tensor in load(path).items():
            for pattern, new in names:
                name = re.sub(pattern, new, name)
            tensors[name] = tensor
        rewrite(path, tensors, **entries)

    return fix


TWICE = (r"model\.model\.", "model.")
"""transformers 5.19 writes a model that it has not loaded with `model.` twice."""

ASKED: dict[str, Medium] = {
    "whisper": family(
        "Whisper",
        place=SPEECH,
        last=SPEECH,
        files={"preprocessor_config.json": EARS | {"feature_size": 80, "chunk_length": 2, "processor_class": "WhisperProcessor"}},
        config={
            "vocab_size": 512, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 100,
            "max_target_positions": 448, "num_mel_bins": 80, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
            "decoder_start_token_id": "<|startoftranscript|>", "suppress_tokens": None, "begin_suppress_tokens": None,
        },
        sound=True,
    ),
    "minicpm-v4.6": family(
        "MiniCPMV4_6",
        place=["<|image_pad|>"],
        last=MINICPM_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMV4_6ImageProcessor", "processor_class": "MiniCPMV4_6Processor", **SLICES,
            },
            "video_preprocessor_config.json": {"video_processor_type": "MiniCPMV4_6VideoProcessor", **SLICES},
            "processor_config.json": {"processor_class": "MiniCPMV4_6Processor"},
        },
        config={
            "text_config": TEXT | LINEAR | {"model_type": "qwen3_5_text"}, "insert_layer_id": 0, "image_size": 56,
            "vision_config": TOWER | {"patch_size": 14, "image_size": 56},
            "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
        },
        special={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
            "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
        },
        dtype="bfloat16",
    ),
    "kimi-k2.5": family(
        "Kimi_K25",
        place=["<|media_pad|>"],
        last=("<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_end|>"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Kimi_K25ImageProcessor", "processor_class": "Kimi_K25Processor",
                "media_proc_cfg": {
                    "in_patch_limit": 16, "patch_size": 14, "merge_kernel_size": 2, "fixed_output_tokens": None,
                    "patch_limit_on_one_side": 4, "in_patch_limit_each_frame": 16, "in_patch_limit_video": 64,
                    "temporal_merge_kernel_size": 4, "sample_fps": 2.0, "max_num_frames_each_video": 4,
                    "timestamp_mode": "hh:mm:ss.fff",
                    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
                },
            },
            "processor_config.json": {"processor_class": "Kimi_K25Processor"},
        },
        config={
            "text_config": LATENT_TEXT | {
                "architectures": ["DeepseekV3ForCausalLM"], "moe_layer_freq": 1, "scoring_func": "sigmoid",
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
                    "mscale": 0.707, "mscale_all_dim": 0.707,
                },
            },
            "vision_config": TOWER | {"patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4} | {
                "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
                "merge_type": "sd2_tpool", "video_attn_type": "spatial_temporal", "vt_hidden_size": 32, "text_hidden_size": WIDTH,
            },
            "projection_hidden_size": 32, "tie_word_embeddings": False,
            "image_token_id": "<|media_pad|>", "video_token_id": "<|kimi_k25_video_placeholder|>",
            "vision_start_token_id": "<|media_begin|>", "vision_end_token_id": "<|media_end|>",
        },
        special={"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"},
        fix=published(
            (r"^language_model\.model\.blocks", "language_model.model.layers"),
            (r"^model\.mm_projector", "mm_projector"),
            (r"^vision_tower\.encoder\.patch_embed", "vision_tower.patch_embed"),
            (r"pos_emb\.weight", "pos_emb.weight"),
            architectures=["KimiK25ForConditionalGeneration"],
        ),
        attention_backend="CPU_MLA",
    ),
    "lighton-ocr": family(
        "LightOnOcr",
        place=["[IMG]", "[IMG_END]"],
        last=PIXTRAL_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 56},
                "processor_class": "LightOnOcrProcessor",
            },
            "processor_config.json": {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
        },
        config={
            "text_config": TEXT | {"model_type": "qwen3", "tie_word_embeddings": False}, "vision_config": PIXTRAL,
            "image_token_id": "[IMG]", "tie_word_embeddings": False,
        },
        special={"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    ),
    "aria": family(
        "Aria",
        place=["<|img|>"],
        last=("<|img|>",),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "AriaImageProcessor", "max_image_size": 490, "min_image_size": 28,
                "processor_class": "AriaProcessor",
            },
            "processor_config.json": {"processor_class": "AriaProcessor", "size_conversion": {"490": 4, "980": 16}},
        },
        config={
            "text_config": TEXT | {
                "model_type": "aria_text", "intermediate_size": 64, "moe_num_experts": 4, "moe_topk": 2,
                "moe_num_shared_experts": 1,
            },
            "vision_config": TOWER | {"model_type": "idefics3_vision", "image_size": 490, "patch_size": 70},
            "image_token_index": "<|img|>", "projector_patch_to_query_dict": {"49": 4, "196": 16},
        },
        special={"image_token": "<|img|>"},
    ),
    "glm-asr": family(
        "GlmAsr",
        place=["<|pad|>"],
        last=("<|pad|>",),
        files={
            "preprocessor_config.json": EARS | {"processor_class": "GlmAsrProcessor"},
            "processor_config.json": {"processor_class": "GlmAsrProcessor", "audio_token": "<|pad|>"},
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {"model_type": "llama", "tie_word_embeddings": False},
            "audio_config": TOWER | {"num_key_value_heads": 2, "num_mel_bins": 128, "intermediate_size": 128},
            "audio_token_id": "<|pad|>", "tie_word_embeddings": False,
        },
        sound=True,
        fix=published(TWICE),
    ),
    "audio-flamingo3": family(
        "AudioFlamingo3",
        place=["<sound>"],
        last=("<sound>",),
        files={
            "preprocessor_config.json": EARS | {"processor_class": "AudioFlamingo3Processor"},
            "processor_config.json": {"processor_class": "AudioFlamingo3Processor", "audio_token": "<sound>"},
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {"model_type": "qwen2", "tie_word_embeddings": False},
            "audio_config": TOWER | {"num_mel_bins": 128}, "audio_token_id": "<sound>",
        },
        sound=True,
        fix=published(TWICE),
        max_model_len=1024,
    ),
    "qwen3-asr": family(
        "Qwen3ASR",
        place=HEARD[:3],
        last=HEARD,
        files={"preprocessor_config.json": EARS | {"processor_class": "Qwen3ASRProcessor"}},
        config={
            "text_config": TEXT | {"model_type": "qwen3", "tie_word_embeddings": False},
            "audio_config": {
                "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32, "n_window": 50,
                "output_dim": WIDTH, "n_window_infer": 400, "downsample_hidden_size": 32,
            },
            "audio_token_id": "<|AUDIO|>", "pad_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
        },
        special={"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        fix=published((r"^lm_head", "thinker.lm_head")),
        sound=True,
    ),
    "aya-vision": family(
        "AyaVision",
        place=["<image>"],
        last=AYA_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessor", "size": side(56), "crop_to_patches": False,
                "processor_class": "AyaVisionProcessor",
            },
            "processor_config.json": {
                "processor_class": "AyaVisionProcessor", "patch_size": 14, "img_size": 56, "downsample_factor": 2,
            },
        },
        config={
            "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 32, "tie_word_embeddings": True},
            "vision_config": SIGLIP, "image_token_index": "<|IMG_PATCH|>", "downsample_factor": 2,
        },
        special={"image_token": "<|IMG_PATCH|>"},
    ),
    "hunyuan-vl": family(
        "HunYuanVL",
        place=HUNYUAN_TOKENS[:3],
        last=HUNYUAN_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "HunYuanVLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 1,
                "min_pixels": 3136, "max_pixels": 3136, "processor_class": "HunYuanVLProcessor",
            },
            "processor_config.json": {"processor_class": "HunYuanVLProcessor"},
        },
        config={
            "text_config": TEXT | {
                "rope_parameters": {
                    "rope_type": "xdrope", "rope_theta": 10000.0, "xdrope_section": [4, 4, 4, 4], "alpha": 1000.0, "factor": 1.0,
                },
                "tie_word_embeddings": False,
            },
            "vision_config": TOWER | {
                "num_key_value_heads": 2, "patch_size": 14, "max_image_size": 56, "min_image_size": 56, "text_hidden_size": WIDTH,
                "out_hidden_size": WIDTH,
            },
            "image_token_id": HUNYUAN_TOKENS[1], "im_start_id": HUNYUAN_TOKENS[0], "im_end_id": HUNYUAN_TOKENS[2],
            "im_newline_id": HUNYUAN_TOKENS[3], "tie_word_embeddings": False,
        },
        special={"image_token": HUNYUAN_TOKENS[1], "image_start_token": HUNYUAN_TOKENS[0], "image_end_token": HUNYUAN_TOKENS[2]},
    ),
}  # fmt: skip
WITHOUT_MEDIA = (
    "nvlm-d",
    "kimi-k2.5",
    "cohere2-vision",
    "llama4",
    "llava-next-video",
    "step3-vl",
    "muse-glimmer",
    "ovis2.5",
    "minicpm-o2.6",
    "keye",
    "keye-vl-1.5",
)
"""Models that are asked about text only."""
WITHOUT_TEXT = ("whisper",)
"""Of these, those that answer about a sound only."""
