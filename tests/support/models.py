"""Tiny, real Hugging Face checkpoints: config, random weights and tokenizer, as any engine reads them.

Two models of one architecture made with different seeds stand for two versions of one set of weights.
The weights are drawn wide (``initializer_range`` 0.2) so that the best next token is far ahead of the second:
greedy tokens then show a wrong weight, and do not show rounding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

EOS = "<|end|>"
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def make_llama(
    directory: str | Path,
    *,
    seed: int,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Path:
    """Write a Llama of a few hundred thousand parameters to ``directory`` and return it.

    ``overrides`` replace entries of :data:`SHAPE` or add any other field of ``LlamaConfig``.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(SHAPE | {"tie_word_embeddings": tied} | overrides))
    return save_model(LlamaForCausalLM, config, directory, seed=seed, dtype=dtype)


def make_qwen3(
    directory: str | Path,
    *,
    seed: int,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Path:
    """The same for Qwen3: it differs from Llama by norms on queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**(SHAPE | {"tie_word_embeddings": tied} | overrides))
    return save_model(Qwen3ForCausalLM, config, directory, seed=seed, dtype=dtype)


def make_qwen3_moe(
    directory: str | Path,
    *,
    seed: int,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Path:
    """A Qwen3 mixture of four experts, two of them active; one tensor per expert, as in published models."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
    }
    config = Qwen3MoeConfig(**(SHAPE | experts | {"tie_word_embeddings": tied} | overrides))
    return save_model(Qwen3MoeForCausalLM, config, directory, seed=seed, dtype=dtype)


def make_paligemma(directory: str | Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A Gemma that reads images: a vision tower of two layers makes four tokens of an image of 28 pixels."""
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )  # fmt: skip
    text = GemmaConfig(**(SHAPE | {"tie_word_embeddings": True}))
    width, words = SHAPE["hidden_size"], SHAPE["vocab_size"]
    config = PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=words - 1, vocab_size=words, projection_dim=width,
        hidden_size=width,
    )  # fmt: skip
    path = save_model(PaliGemmaForConditionalGeneration, config, directory, seed=seed, dtype=dtype)
    rename_tower(path, "vision_tower.", "vision_tower.vision_model.")
    tokenizer = tiny_tokenizer(words, last=("\n", "<image>"))
    tokenizer.bos_token, tokenizer.image_token = EOS, "<image>"
    tokenizer.save_pretrained(path)
    image = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}, "image_seq_length": 4}
    (path / "preprocessor_config.json").write_text(json.dumps(image | {"processor_class": "PaliGemmaProcessor"}))
    return path


def make_llava(directory: str | Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama that reads images: a vision tower of two layers makes four tokens of an image of 28 pixels. Token 511 stands for
    one in a prompt."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )  # fmt: skip
    text = LlamaConfig(**(SHAPE | {"tie_word_embeddings": False}))
    words = SHAPE["vocab_size"]
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=words - 1, image_seq_length=4, tie_word_embeddings=False
    )  # fmt: skip
    path = save_model(LlavaForConditionalGeneration, config, directory, seed=seed, dtype=dtype)
    rename_tower(path, "vision_tower.", "vision_tower.vision_model.")
    tokenizer = tiny_tokenizer(words, last=("<image>",))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(path)
    size = {"height": 28, "width": 28}
    image = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": size}
    (path / "preprocessor_config.json").write_text(json.dumps(image | {"processor_class": "LlavaProcessor"}))
    processor = {
        "processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default", "image_token": "<image>",
    }  # fmt: skip
    (path / "processor_config.json").write_text(json.dumps(processor))
    return path


def make_qwen_vl(directory: str | Path, *, generation: str, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A Qwen ("Qwen2" or "Qwen2_5_") that reads images: a vision tower of two layers makes four tokens of an image. Tokens 508 to
    510 stand for one in a prompt. Its processor needs torchvision."""
    import transformers

    prefix, words, one = f"{generation}VL", SHAPE["vocab_size"], generation == "Qwen2"
    sizes = {"embed_dim": 32, "hidden_size": SHAPE["hidden_size"], "in_chans": 3}
    sizes = sizes if one else {"hidden_size": 32, "intermediate_size": 64}
    more = {} if one else {"out_hidden_size": SHAPE["hidden_size"], "fullatt_block_indexes": [1], "window_size": 56}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, **sizes, **more}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    del text["head_dim"]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config=vision, text_config=text, tie_word_embeddings=False, vision_start_token_id=words - 4,
        vision_end_token_id=words - 2, image_token_id=words - 3, video_token_id=words - 1,
    )  # fmt: skip
    path = save_model(
        getattr(transformers, f"{prefix}ForConditionalGeneration"), config, directory, seed=seed, dtype=dtype
    )
    last = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    save_tokenizer(path, last, image_token=last[1], video_token=last[3])
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 3136}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{prefix}Processor", **sizes}
    (path / "preprocessor_config.json").write_text(json.dumps(image))
    return path


def make_gemma3_vision(directory: str | Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """A Gemma3 that reads images: a vision tower of two layers makes four tokens of an image. Token 507 stands for one in a
    prompt. Its processor needs torchvision."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    words = SHAPE["vocab_size"]
    config = Gemma3Config(
        vision_config=vision, text_config=SHAPE | {"sliding_window": 32}, tie_word_embeddings=True, mm_tokens_per_image=4,
        boi_token_index=words - 5, eoi_token_index=words - 6, image_token_index=words - 7,
    )  # fmt: skip
    path = save_model(Gemma3ForConditionalGeneration, config, directory, seed=seed, dtype=dtype)
    rename_tower(path, "vision_tower.", "vision_tower.vision_model.")
    tensors, random = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    (zeros,) = (
        name for name, tensor in tensors.items() if tensor.dim() > 1 and not tensor.any()
    )  # what joins both parts
    tensors[zeros] = 0.2 * torch.randn(tensors[zeros].shape, generator=random, dtype=dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    last = ("<image_soft_token>", "<end_of_image>", "<start_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n")
    save_tokenizer(path, last, image_token=last[0], eoi_token=last[1], boi_token=last[2])
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}}
    (path / "preprocessor_config.json").write_text(json.dumps(image | {"processor_class": "Gemma3Processor"}))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    (path / "processor_config.json").write_text(json.dumps(processor))
    return path


def save_tokenizer(path: Path, last: Sequence[str], **special: str) -> None:
    """A tokenizer whose vocabulary ends with `last`; `special`: which of these are its special tokens, by attribute."""
    tokenizer = tiny_tokenizer(SHAPE["vocab_size"], last=last)
    tokenizer.add_special_tokens({"extra_special_tokens": [t for t in last if t.strip()]})
    tokenizer._set_model_specific_special_tokens(special_tokens=special)
    tokenizer.pad_token = EOS
    tokenizer.save_pretrained(path)


def rename_tower(path: Path, tower: str, published: str) -> None:
    """Gives a vision tower the names of published checkpoints."""
    tensors = load_file(path / "model.safetensors")
    renamed = {name if published in name else name.replace(tower, published): t for name, t in tensors.items()}
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def tiny_tokenizer(vocab_size: int, last: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of ``vocab_size`` entries: id 0 ends a text, then 256 bytes, then filler, and ``last``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [EOS, *letters, *(f"<|filler{i}|>" for i in range(vocab_size - len(letters) - 1))]
    words[vocab_size - len(last) :] = last
    backend = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words[:vocab_size])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)


def save_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: str | Path,
    *,
    seed: int,
    dtype: torch.dtype,
) -> Path:
    path = Path(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        # One-dimensional weights start equal in every seed; two versions must differ there as well.
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.add_(torch.randn_like(weight) * 0.1)
    model.to(dtype).save_pretrained(path)
    # Engines read it several times in each process; of a large vocabulary most words have no text then.
    tiny_tokenizer(min(config.get_text_config().vocab_size, SHAPE["vocab_size"])).save_pretrained(path)
    return path
