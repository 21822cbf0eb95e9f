"""The models of the trainers' benchmark, sharded in every way. A row of `SETUPS` is one trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.model import bench_model, make_model
from trainer_adapters import DTensorAdapter, FSDPAdapter, MegatronAdapter, WeightSource

__all__ = ["SETUPS", "Setup"]

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


@dataclass(frozen=True)
class Setup:
    """A trainer: its parameters on this rank, its source, and what its users gather with (a name, and a function that
    yields whole tensors on every rank, each once)."""

    parameters: list[torch.Tensor]
    source: WeightSource
    native: str
    gather: Callable[[], Iterator[torch.Tensor]]


def fsdp1(layers: int) -> Setup:
    model: Any = bench_model(layers)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )

    def units() -> Iterator[torch.Tensor]:
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, owner, _ in unit._handle.flat_param._param_infos:  # type: ignore[union-attr]
                    yield getattr(owner, name).detach()

    return Setup(list(model.parameters()), FSDPAdapter(model), "summon_full_params per unit", units)


def fsdp2(layers: int, **options: Any) -> Setup:
    model = bench_model(layers)
    _shard(model, **options)
    return _of_dtensors(model, FSDPAdapter(model))


def hsdp(layers: int) -> Setup:
    """Copies on every second rank; with two ranks, two copies."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    return fsdp2(layers, mesh=mesh)


def two_dimensions(layers: int) -> Setup:
    """`fully_shard` over a tensor-parallel plan of two; the tied head follows the embedding."""
    model = bench_model(layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    model.lm_head.weight = model.model.embed_tokens.weight
    _shard(model, mesh=mesh["dp"])
    return _of_dtensors(model, DTensorAdapter(model))


def megatron(layers: int) -> Setup:
    """Tensor parallel over all ranks, built by Megatron-Bridge, in the tests' Megatron environment."""
    from tests.support import megatron_cpu

    megatron_cpu.run_on_cpu()
    megatron_cpu.fake_transformer_engine()
    megatron_cpu.import_bridge()
    megatron_cpu.without_fused_kernels()
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(make_model(layers)))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = dist.get_world_size()
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    source = MegatronAdapter(model, bridge.hf_pretrained.config)
    tied = source.manifest().tied

    def export() -> Iterator[torch.Tensor]:
        for name, tensor in bridge.export_hf_weights(model, cpu=True, show_progress=False):
            if name not in tied:
                yield tensor

    return Setup([p for chunk in model for p in chunk.parameters()], source, "Megatron-Bridge export", export)


def _shard(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _of_dtensors(model: nn.Module, source: WeightSource) -> Setup:
    def full() -> Iterator[torch.Tensor]:
        for parameter in model.parameters():
            yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()

    return Setup(list(model.parameters()), source, "full_tensor per parameter", full)


SETUPS: dict[str, Callable[[int], Setup]] = {
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "FSDP2 x TP": two_dimensions,
    "Megatron TP": megatron,
}
"""By name: what makes a trainer of so many layers."""
