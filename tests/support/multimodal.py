"""Tiny checkpoints of models that read images or hear sounds, for the families that people train by reinforcement learning.

As in `models.py`: random weights from a seed, without the network. What prepares images needs torchvision
(`torchvision_here.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import load, noise, rewrite
from tests.support.models import SHAPE, rename_tower, save_model, save_tokenizer
from trainer_adapters import ModuleAdapter

__all__ = ["FAMILIES", "Medium", "family", "load_trained", "patches", "rope", "side"]

WORDS: int = SHAPE["vocab_size"]
WIDTH: int = SHAPE["hidden_size"]
TEXT: dict[str, Any] = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Of the part that reads text: heads of 32, the smallest that vLLM's attention on a CPU takes without another kernel."""
HEADS_OF_ITS_OWN: dict[str, Any] = {name: value for name, value in TEXT.items() if name != "head_dim"}
"""The same for a configuration that has no `head_dim`."""
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Of the part that reads images, as most configurations name it."""
BLOCKS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
}
"""The same as Qwen's and GLM's name it."""
GRID: dict[str, Any] = {"image_size": 56, "patch_size": 14}
NOISE = 0.2

Files = Mapping[str, dict[str, Any]]


def load_trained(path: Path) -> Any:
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM.from_pretrained(path, dtype="auto")


@dataclass(frozen=True)
class Medium:
    """A family: what makes its checkpoints, and a prompt with the place of one image or sound."""

    make: Callable[[Path, int], Path]
    prompt: list[int]
    sound: bool = False
    dtype: str = "float32"
    alone: bool = False
    """Whether vLLM 0.32 on a CPU repeats an answer only if no other request runs."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Arguments of a vLLM engine beside those that every engine of the tests gets."""
    trained: Callable[[Path], Any] = load_trained
    """A checkpoint as a trainer holds it in memory."""


def _thinker(path: Path) -> Any:
    """The part that answers, which vLLM knows by the names that it has in the whole."""
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(path, dtype="auto")
    return ModuleAdapter(model, rename=lambda name: f"thinker.{name}")


def family(
    stem: str,
    *,
    place: Sequence[str],
    last: Sequence[str],
    files: Files,
    config: Mapping[str, Any],
    special: Mapping[str, str] | None = None,
    model: str = "",
    dtype: str = "float32",
    sound: bool = False,
    alone: bool = False,
    fix: Callable[[Path], object] = lambda path: None,
    trained: Callable[[Path], Any] = load_trained,
    **vllm: Any,
) -> Medium:
    """`stem`: of transformers' names. `place`: tokens that stand for an image in a prompt. `last`: of the tokenizer's vocabulary.
    `files`: what prepares images, by the names of its files. In `config`, a token stands for its number. `special`: the
    tokenizer's tokens that have a name. `fix` is given the checkpoint at the end."""
    ids = {token: WORDS - len(last) + i for i, token in enumerate(last)}

    def make(directory: Path, seed: int) -> Path:
        import transformers

        numbers = {
            name: ids[value] if isinstance(value, str) and value in ids else value for name, value in config.items()
        }
        made = getattr(transformers, f"{stem}Config")(**numbers)
        kind = getattr(transformers, model or f"{stem}ForConditionalGeneration")
        path = save_model(kind, made, directory, seed=seed, dtype=getattr(torch, dtype))
        tensors = {name: _lively(tensor, 100 * seed + i) for i, (name, tensor) in enumerate(load(path).items())}
        rewrite(path, tensors)
        save_tokenizer(path, last, **(special or {}))
        for name, content in files.items():
            (path / name).write_text(json.dumps(content))
        fix(path)
        return path

    return Medium(make, [1, 7, *(ids[token] for token in place), 5, 9, 42], sound, dtype, alone, vllm, trained)


def _lively(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Some weights start as constants, and towers with numbers too small to show in an answer."""
    return tensor + NOISE * noise(tensor, seed) if tensor.is_floating_point() else tensor


# --- Qwen and GLM -----------------------------------------------------------------------------------------------------


def rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


def patches(processor: str, image: str, video: str, patch: int, **more: Any) -> Files:
    """Four tokens for an image."""
    area = (4 * patch) ** 2
    size = {"shortest_edge": area, "longest_edge": area}
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": size, "processor_class": processor}
    return {
        "preprocessor_config.json": {"image_processor_type": image, **sizes, **more},
        "video_preprocessor_config.json": {"video_processor_type": video, **sizes},
    }


QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
QWEN_VISION = BLOCKS | {"patch_size": 16, "num_position_embeddings": 16}
INTERLEAVED = rope(6, 5, 5, mrope_interleaved=True)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def qwen(stem: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Medium:
    return family(
        stem,
        place=QWEN_TOKENS[:3],
        last=QWEN_TOKENS,
        files=patches("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", 16),
        config={"text_config": TEXT | text, "vision_config": vision, **QWEN_IDS},
        special={"image_token": QWEN_TOKENS[1], "video_token": QWEN_TOKENS[3]},
        **more,
    )


def _turn_experts(path: Path) -> None:
    """Published checkpoints have them transposed, unlike those that transformers writes."""
    tensors = load(path)
    rewrite(path, {name: t.transpose(1, 2) if "mlp.experts." in name else t for name, t in tensors.items()})


LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.25),
}  # fmt: skip

GLM_TOKENS = (
    "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>",
)  # fmt: skip
GLM_IDS = {
    "image_start_token_id": GLM_TOKENS[0], "image_token_id": GLM_TOKENS[1], "image_end_token_id": GLM_TOKENS[2],
    "video_start_token_id": GLM_TOKENS[3], "video_token_id": GLM_TOKENS[4], "video_end_token_id": GLM_TOKENS[5],
}  # fmt: skip


def _glm(stem: str, text: dict[str, Any], **more: Any) -> Medium:
    return family(
        stem,
        place=GLM_TOKENS[:3],
        last=GLM_TOKENS,
        files=patches("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor", 14),
        config={"text_config": TEXT | text, "vision_config": BLOCKS | GRID, **GLM_IDS},
        special={"image_token": GLM_TOKENS[1], "video_token": GLM_TOKENS[4]},
        **more,
    )


GLM_TEXT = {"attention_bias": True, "rope_parameters": rope(2, 3, 3, partial_rotary_factor=0.5)}
GLM_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": False,
}  # fmt: skip


# --- others that read images ------------------------------------------------------------------------------------------


def side(size: int) -> dict[str, int]:
    return {"height": size, "width": size}


INTERNVL_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PIXTRAL = {**TOWER, **GRID, "head_dim": 16, "model_type": "pixtral"}
SMOL_TOKENS = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)  # fmt: skip


def _pixtral_files(merge: int) -> Files:
    image = {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 56}}
    processor = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": merge}
    return {
        "preprocessor_config.json": {**image, "processor_class": "PixtralProcessor"},
        "processor_config.json": processor,
    }


def _smol(stem: str) -> Medium:
    image = {
        "image_processor_type": f"{stem}ImageProcessor", "size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 56},
        "processor_class": f"{stem}Processor",
    }  # fmt: skip
    video = {
        "video_processor_type": "SmolVLMVideoProcessor",
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 56},
    }
    return family(
        stem,
        place=["<image>"],
        last=SMOL_TOKENS,
        files={
            "preprocessor_config.json": image,
            "processor_config.json": {"processor_class": f"{stem}Processor", "image_seq_len": 4},
            **({"video_preprocessor_config.json": video} if stem == "SmolVLM" else {}),
        },
        config={
            "text_config": TEXT | {"model_type": "llama"}, "vision_config": TOWER | GRID, "image_token_id": "<image>",
            "pad_token_id": 0,
        },
        special={"image_token": "<image>"},
    )  # fmt: skip


GEMMA_TOKENS = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>")
GEMMA_PROCESSOR = {
    "processor_class": "Gemma4Processor", "image_seq_length": 70,
    "image_processor": {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70,
    },
    "video_processor": {
        "video_processor_type": "Gemma4VideoProcessor", "patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70,
    },
    "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
}  # fmt: skip
LLAMA_TOKENS = (
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip
LFM_TOKENS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")


PADDLE_TOKENS = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|VIDEO_PLACEHOLDER|>")


# --- models that hear sounds ------------------------------------------------------------------------------------------

HEARD = (
    "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>", "<|VIDEO|>",
)  # fmt: skip
EARS: dict[str, Any] = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
AUDIO = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 128,
}  # fmt: skip


def _published_audio_names(path: Path) -> None:
    """transformers 5.19 writes a model that it has not loaded with `model.` twice."""
    rewrite(path, {name.replace("model.model.model.", "model.model."): t for name, t in load(path).items()})


OMNI_IDS = {
    "audio_token_index": "<|AUDIO|>", "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
    "image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>", "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
}  # fmt: skip


FAMILIES: dict[str, Medium] = {
    "qwen3-vl": qwen(
        "Qwen3VL", {"rope_parameters": INTERLEAVED}, QWEN_VISION | {"deepstack_visual_indexes": [0]}
    ),
    "qwen3-vl-moe": qwen(
        "Qwen3VLMoe",
        EXPERTS | {"rope_parameters": INTERLEAVED, "norm_topk_prob": True, "moe_intermediate_size": 128},
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
        fix=_turn_experts,
    ),
    "qwen3.5": qwen("Qwen3_5", LINEAR, QWEN_VISION, dtype="bfloat16"),
    "qwen3.5-moe": qwen(
        "Qwen3_5Moe", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64}, QWEN_VISION, dtype="bfloat16"
    ),
    "glm4v": _glm("Glm4v", GLM_TEXT),
    "glm4v-moe": _glm("Glm4vMoe", GLM_TEXT | GLM_EXPERTS),
    "internvl": family(
        "InternVL",
        place=["<img>", "<IMG_CONTEXT>", "</img>"],
        last=INTERNVL_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "GotOcr2ImageProcessor", "size": side(56), "crop_to_patches": True,
                "processor_class": "InternVLProcessor",
            },
            "video_preprocessor_config.json": {"video_processor_type": "InternVLVideoProcessor", "size": side(56)},
            "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        },
        config={
            "text_config": TEXT | {"model_type": "qwen3"}, "image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4,
            "vision_config": TOWER | {"image_size": [56, 56], "patch_size": [14, 14]}, "tie_word_embeddings": False,
        },
        special={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "mistral3": family(
        "Mistral3",
        place=["[IMG]", "[IMG_END]"],
        last=PIXTRAL_TOKENS,
        files=_pixtral_files(2),
        config={
            "text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL, "image_token_index": "[IMG]",
            "tie_word_embeddings": False,
        },
    ),
    "pixtral": family(
        "Llava",
        place=["[IMG]"],
        last=PIXTRAL_TOKENS,
        files=_pixtral_files(1),
        config={
            "text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL, "image_token_index": "[IMG]",
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "tie_word_embeddings": False,
        },
    ),
    "idefics3": _smol("Idefics3"),
    "smolvlm": _smol("SmolVLM"),
    "gemma4": family(
        "Gemma4",
        place=["<|image|>"],
        last=GEMMA_TOKENS,
        files={"processor_config.json": GEMMA_PROCESSOR},
        config={
            "text_config": TEXT | {
                "sliding_window": 32, "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 16,
                "global_head_dim": 32, "pad_token_id": 0,
            },
            "vision_config": TOWER | {
                "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
                "position_embedding_size": 64, "default_output_length": 70,
            },
            "boi_token_id": "<|image>", "image_token_id": "<|image|>", "eoi_token_id": "<image|>",
            "video_token_id": "<|video|>", "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
        },
        special={
            "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        alone=True,
        max_model_len=512,
    ),
    "llama4": family(
        "Llama4",
        place=["<|image|>"],
        last=LLAMA_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Llama4ImageProcessor", "size": side(56), "max_patches": 1,
                "processor_class": "Llama4Processor",
            },
            "processor_config.json": {"processor_class": "Llama4Processor", "patch_size": 14, "pixel_shuffle_ratio": 0.5},
        },
        config={
            "text_config": TEXT | {
                "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 64, "intermediate_size_mlp": 128,
                "pad_token_id": 0, "model_type": "llama4_text",
            },
            "vision_config": TOWER | GRID | {
                "intermediate_size": 128, "vision_output_dim": WIDTH, "projector_input_dim": WIDTH,
                "projector_output_dim": WIDTH, "pixel_shuffle_ratio": 0.5,
            },
            "image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>",
        },
        dtype="bfloat16",
    ),
    "lfm2-vl": family(
        "Lfm2Vl",
        place=["<image>"],
        last=LFM_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Lfm2VlImageProcessor", "do_image_splitting": False, "min_image_tokens": 4,
                "max_image_tokens": 4, "encoder_patch_size": 16, "tile_size": 64, "size": side(64),
                "processor_class": "Lfm2VlProcessor",
            },
            "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {
                "conv_dim": WIDTH, "conv_dim_out": WIDTH, "block_dim": WIDTH, "block_ff_dim": 128, "block_multiple_of": 32,
                "layer_types": ["conv", "full_attention"], "model_type": "lfm2", "tie_word_embeddings": True,
            },
            "vision_config": TOWER | {
                "patch_size": 16, "num_patches": 16, "model_type": "siglip2_vision_model", "vision_use_head": False,
            },
            "image_token_id": "<image>", "projector_hidden_size": WIDTH, "downsample_factor": 2,
        },
        special={
            "image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        fix=functools.partial(rename_tower, tower="vision_tower.", published="vision_tower.vision_model."),
        alone=True,
        enable_prefix_caching=False,
    ),
    "paddleocr-vl": family(
        "PaddleOCRVL",
        place=PADDLE_TOKENS[:3],
        last=PADDLE_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 14, "merge_size": 2,
                "min_pixels": 3136, "max_pixels": 3136, "processor_class": "PaddleOCRVLProcessor",
            },
            "processor_config.json": {"processor_class": "PaddleOCRVLProcessor"},
        },
        config={
            "text_config": TEXT | {"rope_parameters": rope(4, 6, 6), "tie_word_embeddings": False},
            "vision_config": TOWER | {"image_size": 84, "patch_size": 14, "tokens_per_second": 2}, "tie_word_embeddings": False,
            "vision_start_token_id": PADDLE_TOKENS[0], "image_token_id": PADDLE_TOKENS[1],
            "vision_end_token_id": PADDLE_TOKENS[2], "video_token_id": PADDLE_TOKENS[3],
        },
        special={"image_token": PADDLE_TOKENS[1]},
    ),
    "qwen2-audio": family(
        "Qwen2Audio",
        place=HEARD[:3],
        last=HEARD,
        files={"preprocessor_config.json": EARS | {"processor_class": "Qwen2AudioProcessor"}},
        config={
            "text_config": HEADS_OF_ITS_OWN | {"model_type": "qwen2"},
            "audio_config": AUDIO, "audio_token_index": "<|AUDIO|>",
        },
        special={"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        fix=_published_audio_names,
        sound=True,
    ),
    "qwen2.5-omni": family(
        "Qwen2_5Omni",
        place=HEARD[:3],
        last=HEARD,
        files={
            "preprocessor_config.json": EARS | {
                "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5OmniProcessor", "patch_size": 14,
                "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 3136,
            },
        },
        config={
            "enable_audio_output": False,
            "thinker_config": {
                "text_config": HEADS_OF_ITS_OWN | {"rope_parameters": rope(4, 6, 6), "tie_word_embeddings": False},
                "vision_config": {
                    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": WIDTH,
                    "fullatt_block_indexes": [1], "window_size": 56,
                },
                "audio_config": AUDIO | {"output_dim": WIDTH, "n_window": 100},
                **{name: WORDS - len(HEARD) + HEARD.index(token) for name, token in OMNI_IDS.items()},
            },
        },
        special={
            "audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
            "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
        },
        sound=True,
        trained=_thinker,
    ),
}  # fmt: skip
