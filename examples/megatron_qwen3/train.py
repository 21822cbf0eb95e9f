"""Trains a small Qwen3 with Megatron-Core for a few steps and sends it into every running engine of the job.

    torchrun --nproc-per-node 4 examples/megatron_qwen3/train.py CHECKPOINT_DIR --tp 2 --pp 2

CHECKPOINT_DIR is what the engines were started from; only its config.json is read, the weights begin at random. Runs on
a CPU with gloo. "Training" is a random walk here: the three lines that matter are the same with a real optimizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from trainer_adapters import MegatronAdapter, SyncManager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="the engines' dtype")
    arguments = parser.parse_args()
    hf = json.loads((arguments.checkpoint / "config.json").read_text())
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(arguments.tp, arguments.pp)
    model = build(hf, arguments.tp, arguments.pp)

    source = MegatronAdapter(model, hf, dtype_rules={"*": arguments.dtype})
    with SyncManager(group="policy", timeout_s=300) as manager:
        first = 1 + max((version for version in manager.versions().values() if version is not None), default=-1)
        for version in range(first, first + arguments.steps):
            train_one_step(model)
            report = manager.update(source, version)
            report.raise_failed()
            equal = manager.verify(source).ok
            if dist.get_rank() == 0:
                print(f"version {version}: {report.bytes} bytes in {report.seconds:.2f} s, equal: {equal}", flush=True)
    dist.destroy_process_group()


def build(hf: dict[str, Any], tp: int, pp: int) -> GPTModel:
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        init_method_std=0.2,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-hf["vocab_size"] // (128 * tp)) * 128 * tp,
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
    )


@torch.no_grad()
def train_one_step(model: GPTModel) -> None:
    for parameter in model.parameters():
        parameter.mul_(1 + 0.01 * torch.randn(()))


if __name__ == "__main__":
    main()
