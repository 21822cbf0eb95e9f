"""The models of the trainers' benchmark, sharded in every way. A row of `ADAPTERS` is one trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainer_adapters import DTensorAdapter, FSDPAdapter, WeightSource

__all__ = ["ADAPTERS", "bench_model"]

PLAN = {
    "model.embed_tokens": RowwiseParallel(),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
}


def bench_model(layers: int) -> Any:
    """A Qwen3 in bf16 with tied embeddings: 506 M parameters (1.01 GB) with 28 layers. Its weights don't matter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=150000,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        dtype=torch.bfloat16,
    )
    on_meta = torch.get_default_device().type == "meta"
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if not on_meta:
        model.to_empty(device="cpu")
        model.tie_weights()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.02, 0.02)
    return model


def fsdp1(model: Any) -> tuple[nn.Module, WeightSource]:
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    return model, FSDPAdapter(model)


def fsdp2(model: Any, **options: Any) -> tuple[nn.Module, WeightSource]:
    _shard(model, **options)
    return model, FSDPAdapter(model)


def hsdp(model: Any) -> tuple[nn.Module, WeightSource]:
    """Copies on every second rank; with two ranks, two copies."""
    return fsdp2(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")))


def two_dimensions(model: Any) -> tuple[nn.Module, WeightSource]:
    """`fully_shard` over a tensor-parallel plan of two; the tied head follows the embedding."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    model.lm_head.weight = model.model.embed_tokens.weight
    _shard(model, mesh=mesh["dp"])
    return model, DTensorAdapter(model)


def _shard(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


ADAPTERS: dict[str, Callable[[Any], tuple[nn.Module, WeightSource]]] = {
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "FSDP2 x TP": two_dimensions,
}
"""By name: what shards a model, and the source of it."""
