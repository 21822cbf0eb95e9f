"""Tiny checkpoints of the latest models that read images or hear sounds, for `make models`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.multimodal import (
    BLOCKS,
    GLM_IDS,
    GLM_TOKENS,
    GRID,
    HEADS_OF_ITS_OWN,
    TEXT,
    TOWER,
    WIDTH,
    Medium,
    family,
    patches,
    side,
)
from tests.support.multimodal_asked import TWICE, published

__all__ = ["FOR_GPUS", "IN_VLLM_ONLY", "LATEST"]

M3_TOKENS = (
    "]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[", "]<]start of video[>[", "]<]end of video[>[",
)  # fmt: skip
QFORMER: dict[str, Any] = TOWER | {"num_hidden_layers": 1, "encoder_hidden_size": 32, "vocab_size": 64}

EARS = '''\
from types import SimpleNamespace

import torch
from transformers.models.granite_speech import feature_extraction_granite_speech as published


class Spectrogram:
    def __init__(self, n_fft, hop_length, n_mels, **_):
        self.sizes = n_fft, hop_length, n_mels

    def to(self, device):
        return self

    def __call__(self, sound):
        size, hop, bands = self.sizes
        window = torch.hann_window(size)
        return torch.stft(sound, size, hop, window=window, return_complex=True).abs().square()[:, :bands]


published.requires_backends = lambda *_: None
published.torchaudio = SimpleNamespace(transforms=SimpleNamespace(MelSpectrogram=Spectrogram))


class Ears(published.GraniteSpeechFeatureExtractor):
    """Granite's own, without torchaudio."""
'''


def all_of(*fixes: Callable[[Path], object]) -> Callable[[Path], object]:
    def fix(path: Path) -> None:
        for one in fixes:
            one(path)

    return fix


def with_code(name: str, code: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(code)


def with_entries(**parts: dict[str, Any]) -> Callable[[Path], object]:
    """Adds entries of published configurations to parts of `config.json`, which transformers does not write back."""

    def fix(path: Path) -> None:
        known = json.loads((path / "config.json").read_text())
        known |= {part: known[part] | entries for part, entries in parts.items()}
        (path / "config.json").write_text(json.dumps(known, indent=2))

    return fix


LATEST: dict[str, Medium] = {
    "granite-speech": family(
        "GraniteSpeech",
        place=["<|audio|>"],
        last=("<|audio|>",),
        files={
            "preprocessor_config.json": {
                "feature_extractor_type": "Ears", "processor_class": "GraniteSpeechProcessor",
                "auto_map": {"AutoFeatureExtractor": "ears.Ears"},
                "melspec_kwargs": {"hop_length": 160, "n_fft": 512, "n_mels": 80, "sample_rate": 16000, "win_length": 400},
                "sampling_rate": 16000, "projector_window_size": 15, "projector_downsample_rate": 5,
            },
            "processor_config.json": {"processor_class": "GraniteSpeechProcessor", "audio_token": "<|audio|>"},
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {"model_type": "granite", "tie_word_embeddings": False},
            "encoder_config": {
                "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "output_dim": 42, "context_size": 50,
                "max_pos_emb": 64, "feedforward_mult": 2, "conv_kernel_size": 3, "dropout": 0.0,
            },
            "projector_config": QFORMER | {"model_type": "blip_2_qformer"},
            "audio_token_index": "<|audio|>", "has_lora_adapter": False, "tie_word_embeddings": False,
        },
        sound=True,
        fix=all_of(published(TWICE), with_code("ears.py", EARS)),
        trust_remote_code=True,
        max_model_len=512,
    ),
    "blip-2": family(
        "Blip2",
        place=["<image>"],
        last=("<image>",),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "BlipImageProcessor", "size": side(56), "processor_class": "Blip2Processor",
            },
            "processor_config.json": {"processor_class": "Blip2Processor", "num_query_tokens": 4},
        },
        config={
            "text_config": {
                "model_type": "opt", "hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 128,
                "vocab_size": 512, "max_position_embeddings": 1024, "word_embed_proj_dim": WIDTH, "eos_token_id": 0,
                "pad_token_id": 1, "bos_token_id": 2,
            },
            "vision_config": TOWER | GRID, "qformer_config": QFORMER, "num_query_tokens": 4, "image_token_index": "<image>",
        },
        special={"image_token": "<image>"},
    ),
    "minimax-m3": family(
        "MiniMaxM3VL",
        model="MiniMaxM3SparseForConditionalGeneration",
        place=[M3_TOKENS[2], M3_TOKENS[0], M3_TOKENS[3]],
        last=M3_TOKENS,
        files=patches("MiniMaxM3VLProcessor", "MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor", 14, size=side(56)),
        config={
            "text_config": TEXT | {
                "dense_intermediate_size": 128, "shared_intermediate_size": 64, "intermediate_size": 64, "num_local_experts": 4,
                "num_experts_per_tok": 2, "rotary_dim": 16, "index_n_heads": 1, "index_head_dim": 32,
                "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"],
                "bos_token_id": None,
            },
            "vision_config": TOWER | GRID, "image_token_index": M3_TOKENS[0], "video_token_index": M3_TOKENS[1],
            "projector_hidden_size": 32,
        },
        special={"image_token": M3_TOKENS[0], "video_token": M3_TOKENS[1]},
        dtype="bfloat16",
        fix=all_of(
            published((r"block_sparse_moe\.(fc|\w+_proj)", r"mlp.\1")),  # transformers 5.19 renames these, too
            with_entries(
                text_config={
                    "moe_layer_freq": [0, 1], "hidden_act": "swigluoai", "qk_norm_type": "per_head", "use_gemma_norm": True,
                    "scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1, "partial_rotary_factor": 0.5,
                    "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
                    "sparse_attention_config": {
                        "sparse_disable_index_value": [0, 1],
                        "sparse_attention_freq": [0, 1], "sparse_num_index_heads": 1, "sparse_index_dim": 32,
                        "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_local_block": 1, "sparse_init_block": 0,
                    },
                },
                vision_config={
                    "img_token_compression_config": {"temporal_patch_size": 2, "spatial_merge_size": 2},
                    "position_embedding_type": "rope", "rope_mode": "3d", "vision_segment_max_frames": 4,
                },
            ),
        ),
    ),
    "glm5-next": family(
        "Glm5Next",
        place=GLM_TOKENS[:3],
        last=GLM_TOKENS,
        files=patches("Glm5NextProcessor", "Glm5NextImageProcessor", "Glm5NextVideoProcessor", 14),
        config={
            "text_config": {name: value for name, value in TEXT.items() if name != "head_dim"} | {
                "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 4,
                "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 0,
                "v_head_dim": 32, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4, "linear_head_dim": 32,
                "linear_num_heads": 4, "mlp_layer_types": ["dense", "sparse"], "pad_token_id": 0,
                "layer_types": ["linear_attention", "full_attention"],
            },
            "vision_config": BLOCKS | GRID | {"projection_intermediate_size": 64, "rope_parameters": None}, **GLM_IDS,
        },
        special={"image_token": GLM_TOKENS[1], "video_token": GLM_TOKENS[4]},
        dtype="bfloat16",
        fix=with_entries(
            text_config={
                "mhc": True, "mla_use_nope": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                "indexer_rope_interleave": True, "num_nextn_predict_layers": 0, "index_kpool_compress": True,
                "first_k_dense_replace": 1, "moe_layer_freq": 1,
            }
        ),
        enable_prefix_caching=False,
        mamba_block_size=256,
    ),
}  # fmt: skip
FOR_GPUS = {
    "qwen4-exp": "qwen4_exp",
    "deepseek_v4-vision": "deepseek_v4",
    "deepseek_v4.1": "deepseek_v41",
    "glm5-next": "own",
    "minimax-m3": "minimax_m3",
}
"""Of these, those that vLLM computes with on GPUs only, and what `gpu_classes` gives."""
IN_VLLM_ONLY = (
    "minicpm-o2.6", "step3", "glm-4v", "ultravox", "keye", "keye-vl-1.5", "molmo2",
)  # fmt: skip
"""Models that are not tried in SGLang."""
