"""Tiny checkpoints of further models, most of which read images, for `make models`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.checkpoints import load, maker_of, noise, rewrite
from tests.support.models import SHAPE, rename_tower
from tests.support.multimodal import (
    FAMILIES,
    GEMMA_TOKENS,
    HEADS_OF_ITS_OWN,
    LINEAR,
    TEXT,
    TOWER,
    WIDTH,
    WORDS,
    Medium,
    family,
    side,
)
from tests.support.multimodal_asked import MINICPM_TOKENS, SLICES
from tests.support.multimodal_more import SIGLIP
from tests.support.remote_checkpoints import linear, norm, remote
from tests.support.written_checkpoints import NORMS, Shapes, attention, mlp, model, norms

__all__ = ["IN_SGLANG_ONLY", "NEWEST", "POOLED", "TEXT_ONLY", "matrices", "v4_layers"]

STEP_TOKENS = ("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>")
DOTS_TOKENS = ("<|img|>", "<|imgpad|>", "<|endofimg|>", "<|video_pad|>")


def _dots_ocr() -> Medium:
    """A Qwen2 behind a tower of dots' own. The configuration comes as code."""
    wide, at = TOWER["hidden_size"], "vision_tower"
    shapes: Shapes = model(lambda _: NORMS | attention("self_attn", 2, 1) | mlp("mlp"))
    for number in range(2):
        for part, rows in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2)):
            shapes[f"model.layers.{number}.self_attn.{part}_proj.bias"] = (rows,)
        block = f"{at}.blocks.{number}"
        shapes |= norms(f"{block}.norm1", f"{block}.norm2", width=wide)
        shapes |= linear(f"{block}.attn.qkv", 3 * wide, wide, bias=False) | linear(
            f"{block}.attn.proj", wide, wide, bias=False
        )
        shapes |= linear(f"{block}.mlp.fc1", 64, wide, bias=False) | linear(f"{block}.mlp.fc2", wide, 64, bias=False)
        shapes |= linear(f"{block}.mlp.fc3", 64, wide, bias=False)
    patch = f"{at}.patch_embed.patchifier"
    shapes |= {f"{patch}.proj.weight": (wide, 3, 14, 14), f"{patch}.proj.bias": (wide,)}
    shapes |= norms(f"{patch}.norm", f"{at}.post_trunk_norm", width=wide) | norm(f"{at}.merger.ln_q", width=wide)
    shapes |= linear(f"{at}.merger.mlp.0", 4 * wide, 4 * wide) | linear(f"{at}.merger.mlp.2", WIDTH, 4 * wide)
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    return remote(
        "DotsOCRForCausalLM",
        HEADS_OF_ITS_OWN | {
            "model_type": "dots_ocr", "tie_word_embeddings": False, "image_token_id": DOTS_TOKENS[1],
            "video_token_id": DOTS_TOKENS[3], "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "use_sliding_window": False,
            "vision_config": TOWER | {"embed_dim": wide, "hidden_size": WIDTH, "patch_size": 14, "num_channels": 3,
                "spatial_merge_size": 2, "temporal_patch_size": 1, "rms_norm_eps": 1e-5, "use_bias": False, "post_norm": True},
        },
        shapes,
        place=DOTS_TOKENS[:3], last=DOTS_TOKENS, special={"image_token": DOTS_TOKENS[1], "video_token": DOTS_TOKENS[3]},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 1,
                "size": size, "processor_class": "Qwen2_5_VLProcessor",
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 1,
                "size": size,
            },
        },
        name="DotsOCRConfig",
    )  # fmt: skip


def _step3_vl() -> Medium:
    """Step3-VL 10B: a Qwen3 behind a tower of its own, whose images are of 728 pixels."""
    wide, at = TOWER["hidden_size"], "vision_model"
    shapes: Shapes = model(
        lambda _: NORMS | attention("self_attn") | mlp("mlp") | norms("self_attn.q_norm", "self_attn.k_norm", width=32)
    )
    shapes |= norm(f"{at}.ln_pre", width=wide) | {f"{at}.conv1.weight": (wide, 3, 14, 14)}
    shapes |= {f"{at}.positional_embedding": (52 * 52, wide)}
    for number in range(2):
        block = f"{at}.transformer.resblocks.{number}"
        shapes |= norm(f"{block}.ln_1", f"{block}.ln_2", width=wide) | linear(f"{block}.attn.out_proj", wide, wide)
        shapes |= {f"{block}.attn.in_proj_weight": (3 * wide, wide), f"{block}.attn.in_proj_bias": (3 * wide,)}
        shapes |= linear(f"{block}.mlp.c_fc", 64, wide) | linear(f"{block}.mlp.c_proj", wide, 64)
        shapes |= {f"{block}.ls_{part}.gamma": (wide,) for part in (1, 2)}
    for number, width in ((1, 2 * wide), (2, 4 * wide)):
        shapes |= {f"{at}.vit_downsampler{number}.weight": (width, width // 2, 3, 3)}
        shapes |= {f"{at}.vit_downsampler{number}.bias": (width,)}
    shapes |= linear("vit_large_projector", WIDTH, 4 * wide, bias=False)
    return remote(
        "StepVLForConditionalGeneration",
        {
            "model_type": "step_robotics", "tie_word_embeddings": False, "image_token_id": "<im_patch>", "projector_bias": False,
            "text_config": SHAPE | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
            "vision_config": {
                "width": wide, "layers": 2, "heads": 2, "patch_size": 14, "image_size": 728, "mlp_ratio": 2, "output_dim": None,
                "use_abs_posemb": True, "use_cls_token": False, "use_rope2d": True, "use_ln_pre": True, "use_ln_post": False,
                "ls_init_value": 0.1, "hidden_act": "quick_gelu", "enable_patch": False,
            },
        },
        shapes, place=["<im_patch>"], last=STEP_TOKENS, name="StepRoboticsConfig", max_model_len=512,
    )  # fmt: skip


def _colqwen3() -> Medium:
    """A Qwen3-VL with a projection of each token's vector."""
    base = FAMILIES["qwen3-vl"]

    def make(directory: Path, seed: int) -> Path:
        path = base.make(directory, seed)
        tensors = {f"vlm.{name}": tensor for name, tensor in load(path).items()}
        random = torch.Generator().manual_seed(seed)
        tensors["embedding_proj_layer.weight"] = torch.randn(16, WIDTH, generator=random)
        tensors["embedding_proj_layer.bias"] = torch.randn(16, generator=random)
        return rewrite(path, tensors, architectures=["ColQwen3"], model_type="colqwen3", embed_dim=16)

    return replace(base, make=make, vllm=LATE)


def _qwen3_vl_embedding() -> Medium:
    """A Qwen3-VL without a head."""
    base = FAMILIES["qwen3-vl"]

    def make(directory: Path, seed: int) -> Path:
        path = base.make(directory, seed)
        return rewrite(path, {name: tensor for name, tensor in load(path).items() if name != "lm_head.weight"})

    return replace(base, make=make, vllm={"runner": "pooling", "convert": "embed"})


LATE: dict[str, Any] = {"pooler_config": {"enable_flash_late_interaction": False}}
NEWEST: dict[str, Medium] = {
    "dots-ocr": _dots_ocr(),
    "step3-vl": _step3_vl(),
    "colqwen3": _colqwen3(),
    "qwen3-vl-embedding": _qwen3_vl_embedding(),
    "gemma4-unified": family(
        "Gemma4Unified",
        place=["<|image|>"],
        last=GEMMA_TOKENS,
        files={
            "processor_config.json": {
                "processor_class": "Gemma4UnifiedProcessor", "image_seq_length": 70,
                "image_processor": {
                    "image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "pooling_kernel_size": 3,
                    "max_soft_tokens": 70,
                },
                "video_processor": {
                    "video_processor_type": "Gemma4UnifiedVideoProcessor", "patch_size": 4, "pooling_kernel_size": 3,
                    "max_soft_tokens": 70,
                },
                "feature_extractor": {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor"},
            }
        },
        config={
            "text_config": TEXT | {
                "sliding_window": 32, "pad_token_id": 0, "layer_types": ["sliding_attention", "full_attention"],
                "per_layer_config": {"01": {"head_dim": 32}},
            },
            "vision_config": {
                "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32,
                "num_soft_tokens": 70,
            },
            "boi_token_id": "<|image>", "image_token_id": "<|image|>", "eoi_token_id": "<image|>",
            "video_token_id": "<|video|>", "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
        },
        special={
            "boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        max_model_len=512,
    ),
    "minicpm-v4.7": family(
        "MiniCPMV4_7",
        place=["<|image_pad|>"],
        last=MINICPM_TOKENS,
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMV4_6ImageProcessor", "processor_class": "MiniCPMV4_7Processor", **SLICES,
            },
            "video_preprocessor_config.json": {"video_processor_type": "MiniCPMV4_6VideoProcessor", **SLICES},
            "processor_config.json": {"processor_class": "MiniCPMV4_7Processor"},
        },
        config={
            "text_config": TEXT | LINEAR | {"model_type": "qwen3_5_text"}, "insert_layer_id": 0, "image_size": 56,
            "vision_config": TOWER | {"patch_size": 14, "image_size": 56, "insert_layer_id": 0}, "patch_size": 14,
            "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
            "image_start_id": "<image>", "image_end_id": "</image>", "slice_start_id": "<slice>", "slice_end_id": "</slice>",
        },
        special={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
            "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
        },
        dtype="bfloat16",
    ),
    "muse-glimmer": family(
        "MuseGlimmer",
        place=["<|image|>"],
        last=("<|image|>", "<|video|>"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MuseGlimmerImageProcessor", "patch_size": 14, "merge_size": 2,
                "processor_class": "MuseGlimmerProcessor",
            },
            "video_preprocessor_config.json": {"video_processor_type": "MuseGlimmerVideoProcessor", "patch_size": 14},
            "processor_config.json": {"processor_class": "MuseGlimmerProcessor"},
        },
        config={
            "text_config": TEXT | {"sliding_window": 32, "pad_token_id": 0, "tie_word_embeddings": False},
            "vision_config": TOWER | {
                "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4, "output_dim": 128, "adapter_dim": 32,
            },
            "image_token_id": "<|image|>", "video_token_id": "<|video|>", "out_hidden_size": 128, "projector_hidden_size": 32,
        },
        special={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "granite4-vision": family(
        "Granite4Vision",
        place=["<image>"],
        last=("<image>",),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "LlavaNextImageProcessor", "size": side(56), "crop_size": side(56),
                "image_grid_pinpoints": [[56, 56]], "processor_class": "Granite4VisionProcessor",
            },
            "processor_config.json": {
                "processor_class": "Granite4VisionProcessor", "patch_size": 14, "vision_feature_select_strategy": "full",
                "downsample_rate": "2/4",
            },
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {"tie_word_embeddings": False},
            "vision_config": SIGLIP | {"hidden_size": 64}, "image_token_index": "<image>", "image_grid_pinpoints": [[56, 56]],
            "vision_feature_select_strategy": "full", "downsample_rate": "2/4", "deepstack_layer_map": [[-2, 0]],
            "spatial_vision_layer": -1, "spatial_target_layers": [0, 1, 0, 1],
            "qformer_config": TOWER | {
                "hidden_size": 64, "encoder_hidden_size": 64, "model_type": "blip_2_qformer", "num_hidden_layers": 1,
                "num_attention_heads": 1, "intermediate_size": 3072,
            },
        },
        fix=lambda path: rename_tower(path, "vision_tower.", "vision_tower.vision_model."),
    ),
    "colpali": family(
        "ColPali",
        model="ColPaliForRetrieval",
        place=(),
        last=("\n", "<image>"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "SiglipImageProcessor", "size": side(28), "image_seq_length": 4,
                "processor_class": "ColPaliProcessor",
            },
            "processor_config.json": {"processor_class": "ColPaliProcessor"},
        },
        config={
            "vlm_config": {
                "model_type": "paligemma", "vision_config": SIGLIP | {"image_size": 28}, "projection_dim": WIDTH,
                "text_config": SHAPE | {"model_type": "gemma", "tie_word_embeddings": True}, "hidden_size": WIDTH,
                "image_token_index": WORDS - 1, "vocab_size": WORDS,
            },
            "text_config": SHAPE | {"model_type": "gemma", "tie_word_embeddings": True}, "embedding_dim": 16,
        },
        special={"bos_token": "<|end|>", "image_token": "<image>"},
        **LATE,
        fix=lambda path: rename_tower(path, "vision_tower.", "vision_tower.vision_model."),
    ),
}  # fmt: skip

IN_SGLANG_ONLY: dict[str, Medium] = {
    "mllama": family(
        "Mllama",
        place=["<|image|>"],
        last=("<|image|>",),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MllamaImageProcessor", "size": side(56), "max_image_tiles": 2,
                "processor_class": "MllamaProcessor",
            },
            "processor_config.json": {"processor_class": "MllamaProcessor"},
        },
        config={
            "text_config": HEADS_OF_ITS_OWN | {
                "num_hidden_layers": 3, "cross_attention_layers": [1], "tie_word_embeddings": False, "pad_token_id": 0,
                "bos_token_id": 1,
            },
            "vision_config": TOWER | {
                "num_global_layers": 1, "attention_heads": 2, "image_size": 56, "patch_size": 14, "max_num_tiles": 2,
                "vision_output_dim": 64, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            "image_token_index": "<|image|>",
        },
        special={"image_token": "<|image|>"},
    ),
}  # fmt: skip
"""Models that vLLM lacks."""
POOLED: dict[str, str] = {"colpali": "token_embed", "colqwen3": "token_embed", "qwen3-vl-embedding": "embed"}
"""Models that answer with vectors, and with which."""


def matrices(at: str, **shapes: tuple[int, ...]) -> Shapes:
    return {f"{at}.{name}.weight": shape for name, shape in shapes.items()}


def v4_layers(wide: int, head: int, ranks: int, rows: int, inner: int, biases: tuple[str, ...] = ("bias",)) -> Shapes:
    """What the two layers of a DeepSeek-V4 have in common; `biases`: those of a router."""
    shapes: Shapes = {}
    for number in range(2):
        at = f"layers.{number}"
        shapes |= norms(f"{at}.attn_norm", f"{at}.ffn_norm", width=wide)
        for part in ("attn", "ffn"):
            shapes |= {
                f"{at}.hc_{part}_fn": (24, 4 * wide),
                f"{at}.hc_{part}_base": (24,),
                f"{at}.hc_{part}_scale": (3,),
            }
        shapes |= matrices(
            f"{at}.attn", wq_a=(ranks, wide), wkv=(head, wide), q_norm=(ranks,), kv_norm=(head,), wq_b=(4 * head, ranks),
            wo_a=(2 * rows, 2 * head), wo_b=(wide, 2 * rows),
        ) | {f"{at}.attn.attn_sink": (4,)}  # fmt: skip
        shapes |= matrices(f"{at}.ffn", gate=(4, wide)) | {f"{at}.ffn.gate.{bias}": (4,) for bias in biases}
        for expert in (*(f"experts.{i}" for i in range(4)), "shared_experts"):
            shapes |= matrices(f"{at}.ffn.{expert}", w1=(inner, wide), w2=(wide, inner), w3=(inner, wide))
    return shapes


def _deepseek_v4(ranks: int = 64, rows: int = 32, inner: int = 64) -> Medium:
    """Without quantisation: a layer with a sliding window, and one that also compresses what it keeps, and indexes that."""
    wide, head = 128, 512

    def compressor(at: str, size: int) -> Shapes:
        return matrices(at, wkv=(2 * size, wide), wgate=(2 * size, wide), norm=(size,)) | {f"{at}.ape": (4, 2 * size)}

    shapes: Shapes = {"embed.weight": (WORDS, wide), "head.weight": (WORDS, wide), "norm.weight": (wide,)}
    shapes |= {"hc_head_fn": (4, 4 * wide), "hc_head_base": (4,), "hc_head_scale": (1,)}
    shapes |= v4_layers(wide, head, ranks, rows, inner)
    shapes |= compressor("layers.1.attn.compressor", head) | compressor("layers.1.attn.indexer.compressor", 128)
    shapes |= matrices("layers.1.attn.indexer", wq_b=(4 * 128, ranks), weights_proj=(4, wide))
    return remote(
        "DeepseekV4ForCausalLM",
        {
            "model_type": "deepseek_v4", "vocab_size": WORDS, "hidden_size": wide, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": head, "qk_rope_head_dim": 64, "q_lora_rank": ranks,
            "o_lora_rank": rows, "o_groups": 2, "sliding_window": 32, "compress_ratios": [0, 4], "compress_rope_theta": 160000.0,
            "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
            "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": inner,
            "num_hash_layers": 0, "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
            "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "num_nextn_predict_layers": 0, "eos_token_id": 0, "max_position_embeddings": 1024, "tie_word_embeddings": False,
            "expert_dtype": "bf16", "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
            },
        },
        shapes, dtype="bfloat16", code=False,
    )  # fmt: skip


def _deepseek_v4_published() -> Medium:
    """As published: linear layers in FP8, experts in MXFP4, and exponents for scales."""
    plain = _deepseek_v4(128, 128, 128)

    def make(directory: Path, seed: int) -> Path:
        path, random = plain.make(directory, seed), torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load(path).items():
            at, (rows, columns) = name.removesuffix("weight"), (*tensor.shape, 0)[:2]
            scales = (rows, columns // 32) if ".experts." in name else (-(-rows // 128), -(-columns // 128))
            if ".experts." in name:
                codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8).view(
                    torch.int8
                )
            elif re.search(r"\.(wq_a|wkv|wq_b|wo_a|wo_b|w[123])\.weight$", name) and "compressor" not in name:
                codes = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
            else:
                tensors[name] = tensor
                continue
            exponents = torch.randint(112 + 3 * seed, 115 + 3 * seed, scales, generator=random, dtype=torch.uint8)
            tensors |= {name: codes, f"{at}scale": exponents.view(torch.float8_e8m0fnu)}
        blocks = {"weight_block_size": [128, 128], "fmt": "e4m3", "scale_fmt": "ue8m0"}
        config = {"quant_method": "fp8", "activation_scheme": "dynamic"} | blocks
        return rewrite(path, tensors, quantization_config=config, expert_dtype="fp4")

    return Medium(make, [], dtype="bfloat16", vllm={"enable_prefix_caching": False})


def _jina_v5() -> Medium:
    """A Qwen3 to which vLLM adds, while it loads, an adapter from another file: one and the same in all versions."""

    def make(directory: Path, seed: int) -> Path:
        path = maker_of("Qwen3Config", "Qwen3Model")(directory, seed)
        tensors = {
            name: tensor + 0.2 * noise(tensor, 100 * seed + i) for i, (name, tensor) in enumerate(load(path).items())
        }
        rewrite(path, tensors, architectures=["JinaEmbeddingsV5Model"], is_decoder=True)
        adapter = path / "adapters" / "retrieval"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "r": 4}))
        random = torch.Generator().manual_seed(0)
        query = "base_model.model.layers.0.self_attn.q_proj"
        parts = {"lora_A": torch.randn(4, WIDTH, generator=random), "lora_B": torch.randn(128, 4, generator=random)}
        save_file(
            {f"{query}.{part}.weight": made for part, made in parts.items()}, adapter / "adapter_model.safetensors"
        )
        return path

    return Medium(make, [], vllm={"runner": "pooling"})


TEXT_ONLY: dict[str, tuple[Medium, str]] = {
    "jina-v5-embedding": (_jina_v5(), "embed"),
    "deepseek_v4": (_deepseek_v4(), "tokens"),
    "deepseek_v4-published": (_deepseek_v4_published(), "tokens"),
}
"""Models whose configuration the engines have, and with what an engine answers."""
