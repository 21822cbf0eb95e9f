"""Run by `test_plan_vllm` in a process of its own: plans of vLLM's model classes, JSON on the last line.

No engine is started: one process that is all ranks, tiny checkpoints on disk, three instances of each model
class: a skeleton on meta, one in memory that the engine's loader fills, one that the plan fills.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from inference_plugin.install import proof
from inference_plugin.install.plan import PlacementPlan, TensorInfo
from inference_plugin.install.proof import prove_plan
from inference_plugin.install.replay import Copies, Replay, read_back
from inference_plugin.install.storages import storage_views
from inference_plugin.install.trace import trace_plan
from inference_plugin.wire.geometry import Box
from tests.support.models import SHAPE, make_llama, make_qwen3, make_qwen3_moe, save_model
from tests.support.rebasing import rebase


def build_skeleton(vllm_config: VllmConfig) -> nn.Module:
    """A second instance of the model on meta; it shares nothing with the live one and leaves no trace in it.

    On the engine's own thread only: the default dtype and the current config are the whole process's.
    """
    with _registries_of_its_own(vllm_config) as config, torch.device("meta"):
        return initialize_model(config)


@contextmanager
def _registries_of_its_own(vllm_config: VllmConfig) -> Iterator[VllmConfig]:
    config = copy.copy(vllm_config)
    config.compilation_config = compilation = copy.copy(vllm_config.compilation_config)
    compilation.static_forward_context = {}  # else "Duplicate layer name"
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    compilation.mode = CompilationMode.NONE
    # `get_rope` caches modules for the whole process: the skeleton would get the live ones, and a model
    # that is built later would get the skeleton's, on meta.
    ropes = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        with set_default_torch_dtype(vllm_config.model_config.dtype):
            yield config
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(ropes)


def make_qwen2(directory: str | Path, *, seed: int) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"} | {"tie_word_embeddings": False})
    return save_model(Qwen2ForCausalLM, config, directory, seed=seed, dtype=torch.bfloat16)


MODELS: dict[str, Callable[[str], Path]] = {
    "qwen3-moe": lambda d: make_qwen3_moe(d, seed=1),  # first: the expert group is made for MoE models only
    "llama": lambda d: make_llama(d, seed=1, vocab_size=250 + 7),
    "llama-tied": lambda d: make_llama(d, seed=1, vocab_size=250 + 7, tied=True),
    "qwen2": lambda d: make_qwen2(d, seed=1),
    "qwen3": lambda d: make_qwen3(d, seed=1),
}


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def study(vllm_config: VllmConfig, checkpoint: Path) -> dict[str, Any]:
    """Everything the test asserts on, of one model."""
    weights = load_file(checkpoint / "model.safetensors")
    tensors: list[TensorInfo] = [(n, tuple(t.shape), t.dtype) for n, t in weights.items()]
    began = time.perf_counter()
    skeleton = build_skeleton(vllm_config)
    built = time.perf_counter()
    plan = trace_plan(skeleton, skeleton.load_weights, tensors)
    traced = time.perf_counter()
    wrong = prove_plan(plan, skeleton, skeleton.load_weights, tensors)
    proven = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "BUDGET_BYTES", 1 << 16)
        wrong_in_batches = prove_plan(plan, skeleton, skeleton.load_weights, tensors)
    reversed_plan = trace_plan(skeleton, skeleton.load_weights, tensors[::-1])
    untouched = not vllm_config.compilation_config.static_forward_context
    needs_no_memory = all(t.is_meta for t in storage_views(skeleton).values())

    with set_default_torch_dtype(vllm_config.model_config.dtype):
        live, other = initialize_model(vllm_config), build_real(vllm_config)
    for model in (live, other):
        for name, parameter in model.named_parameters():
            parameter.data.fill_(-3 if "weight" in name else -5)
    live.load_weights((n, t.clone()) for n, t in weights.items())
    targets, loaded = storage_views(other), storage_views(live)
    Replay(Copies(plan.placements, plan.fills), weights, targets).run()
    boxes = plan.needs()
    parts = {n: weights[n][_index(box)] for n, box in boxes.items()}
    Replay(Copies(rebase(plan.placements, boxes)), {n: t.contiguous() for n, t in parts.items()}, targets).run()
    back = [torch.equal(held, weights[n][_index(box)]) for n, box, held in read_back(plan.placements, loaded)]
    return {
        "refusal": plan.refusal,
        "refused": dict(plan.refused),
        "unused": plan.unused,
        "uncovered": dict(plan.uncovered),
        "doubled": plan.doubled,
        "fills": [(f.dest.tensor, f.dest.offset, f.dest.numel, f.value) for f in plan.fills],
        "placements": len(plan.placements),
        "proof": [wrong, wrong_in_batches],
        "same_plan_reversed": reversed_plan.placements == plan.placements and reversed_plan.fills == plan.fills,
        "skeleton_on_meta": needs_no_memory,
        "context_untouched": untouched,
        "differs": [n for n in loaded if "cos_sin" not in n and not torch.equal(loaded[n], targets[n])],
        "names_agree": list(loaded) == list(storage_views(skeleton)),
        "read_back": [len(back), all(back)],
        "live_ropes_are_real": not any(b.is_meta for b in live.buffers()),
        "bad_plan": broken(plan, skeleton, tensors),
        "tied_alias": tied_alias(plan, skeleton, tensors),
        "cast": casts(skeleton, tensors),
        "seconds": {
            "build": round(built - began, 3),
            "trace": round(traced - built, 3),
            "prove": round(proven - traced, 3),
        },
    }


def build_real(vllm_config: VllmConfig) -> nn.Module:
    with _registries_of_its_own(vllm_config) as config:
        return initialize_model(config)


def broken(plan: PlacementPlan, skeleton: nn.Module, tensors: list[TensorInfo]) -> str:
    """What the proof says of a plan in which one fused projection lost its second part."""
    lost = next(p for p in plan.placements if p.source.tensor.endswith("layers.1.self_attn.k_proj.weight"))
    without = PlacementPlan(
        placements=tuple(p for p in plan.placements if p is not lost),
        fills=plan.fills,
        unused=(*plan.unused, lost.source.tensor),
        extents=plan.extents,
    )
    return prove_plan(without, skeleton, skeleton.load_weights, tensors)


def tied_alias(plan: PlacementPlan, skeleton: nn.Module, tensors: list[TensorInfo]) -> dict[str, Any] | None:
    """The plan of a tied model whose trainer sends the head under its own name as well."""
    if any(name == "lm_head.weight" for name, _, _ in tensors):
        return None
    _, shape, dtype = next(info for info in tensors if info[0] == "model.embed_tokens.weight")
    both = [("lm_head.weight", shape, dtype), *tensors]
    found = trace_plan(skeleton, skeleton.load_weights, both)
    return {
        "unused": found.unused,
        "doubled": found.doubled,
        "same": found.placements == plan.placements,
        "proof": prove_plan(found, skeleton, skeleton.load_weights, both),
    }


def casts(skeleton: nn.Module, tensors: list[TensorInfo]) -> list[str]:
    """What the plan says if the trainer sends one norm in float32."""
    changed = [(n, s, torch.float32 if n == "model.norm.weight" else d) for n, s, d in tensors]
    plan = trace_plan(skeleton, skeleton.load_weights, changed)
    return [*plan.dtype_conflicts, *plan.refused]


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in MODELS.items():
            checkpoint = make(f"{scratch}/{name}")
            args = EngineArgs(model=str(checkpoint), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
            vllm_config = args.create_engine_config()
            if not torch.distributed.is_initialized():
                with set_current_vllm_config(vllm_config):
                    init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
                    initialize_model_parallel(1, 1)
            results[name] = study(vllm_config, checkpoint)
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
