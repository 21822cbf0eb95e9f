"""The cases of `test_fsdp_adapter.py`, run by torchrun (see `observing.py`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trainers.observing import Result, main, nudge, observe, refused, state, tiny_qwen3, tiny_qwen3_moe, train
from tests.trainers.tiny_models import MODELS, WITH_IMAGES, checkpoint_of, tiny
from trainer_adapters import FSDPAdapter, ModuleAdapter


class Odd(nn.Module):
    """What models have besides large matrices: fewer rows than ranks, several dtypes, buffers, frozen and
    ignored parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one_row = nn.Linear(6, 1)
        self.three_rows = nn.Linear(4, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(5, 9, bias=False).requires_grad_(False)
        self.ignored = nn.Parameter(torch.randn(600, 901))
        self.batch_norm = nn.BatchNorm1d(3)
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("passing", torch.ones(3), persistent=False)


def shard_odd(model: Odd, **options: Any) -> Odd:
    for part in (model.one_row, model.three_rows, model.norm, model.frozen):
        fully_shard(part, **options)
    return fully_shard(model, ignored_params={model.ignored}, **options)


def shard_layers(model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# --- cases that must arrive ---------------------------------------------------


def tied_model_after_training() -> Result:
    gold = tiny_qwen3()
    train(gold)
    model = shard_layers(tiny_qwen3())
    train(model)
    return observe(FSDPAdapter(model), state(gold))


def untied_model_after_training_in_mixed_precision() -> Result:
    model = shard_layers(tiny_qwen3(tied=False), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    train(model, steps=2)
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
    rules = {"*norm.weight": torch.float32, "*": torch.bfloat16}
    return observe(FSDPAdapter(model, dtype_rules=rules), full)


def odd_parts() -> Result:
    return observe(FSDPAdapter(shard_odd(Odd())), state(Odd()))


def odd_parts_offloaded() -> Result:
    offload = CPUOffloadPolicy(pin_memory=False)
    return observe(FSDPAdapter(shard_odd(Odd(), offload_policy=offload)), state(Odd()))


def sharded_by_columns() -> Result:
    torch.manual_seed(1)
    gold = nn.Sequential(nn.Linear(8, 5, bias=False), nn.Linear(12, 3, bias=False))
    values = state(gold)
    return observe(FSDPAdapter(fully_shard(gold, shard_placement_fn=lambda _: Shard(1))), values)


def wrapped_in_compile_and_checkpointing() -> Result:
    gold = state(tiny_qwen3())
    model: Any = tiny_qwen3()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    model = shard_layers(model)
    return observe(FSDPAdapter(torch.compile(model)), gold)


def renamed_without_the_value_head() -> Result:
    class WithValueHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pretrained = tiny_qwen3()
            self.v_head = nn.Linear(36, 1)

    model = fully_shard(WithValueHead())
    source = FSDPAdapter(model, rename=lambda name: name.removeprefix("pretrained.") if "v_head" not in name else None)
    return observe(source, state(tiny_qwen3()))


def copies_and_shards() -> Result:
    """HSDP: two copies, each sharded over half of the ranks."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    gold = state(Odd())
    return observe(FSDPAdapter(shard_odd(Odd(), mesh=mesh)), gold)


def replicated_dtensors() -> Result:
    """Parameters that are DTensors held whole by every rank are divided like plain ones."""
    torch.manual_seed(2)
    gold = {"whole": torch.randn(700, 800), "part.weight": torch.randn(10, 3)}
    model = nn.Module()
    model.part = nn.Linear(3, 10, bias=False)
    model.part.weight = nn.Parameter(gold["part.weight"].clone())
    fully_shard(model.part)
    model.whole = nn.Parameter(distribute_tensor(gold["whole"], model.part.weight.device_mesh, [Replicate()]))
    return observe(FSDPAdapter(model), gold)


def one_model_on_each_half() -> Result:
    """Two models on two submeshes; the second half's is left out of the comparison."""
    half = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("model", "shard"))
    inside = dist.get_rank() < dist.get_world_size() // 2
    gold = state(Odd())
    model = shard_odd(Odd(), mesh=half["shard"])
    result = observe(FSDPAdapter(model), gold)
    return result if inside else {**result, "slices": [], "claims": []}


def stacked_experts(columns: bool = False) -> Result:
    """Five experts over the ranks, whole or by columns of each: shards are cut into what the checkpoint has."""
    gold = tiny_qwen3_moe()
    nudge(gold)
    saved = checkpoint_of(gold)
    options = {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 3 else None} if columns else {}
    model = shard_layers(tiny_qwen3_moe(), **options)
    nudge(model)
    return observe(FSDPAdapter(model), saved)


def models_that_memory_holds_otherwise() -> Result:
    """Tiny models of transformers, as parts of one module; `fully_shard` changes each one's class."""
    model, gold = nn.ModuleDict(), {}
    few = ["gpt_neox", "hrm_text", "nemotron_h", "ernie4_5_vl_moe"]
    for model_type in few if dist.get_world_size() > 2 else (*MODELS, *WITH_IMAGES):
        part = model[model_type] = tiny(model_type)
        gold |= {f"{model_type}.{name}": tensor for name, tensor in checkpoint_of(part).items()}
        fully_shard(part)
    return observe(FSDPAdapter(model), gold)


def stacked_experts_by_columns() -> Result:
    return stacked_experts(columns=True)


def filtered() -> Result:
    model = shard_layers(tiny_qwen3())
    source = FSDPAdapter(model, include=["model.layers.*"], exclude=["*norm.weight"])
    values = {n: t for n, t in state(tiny_qwen3()).items() if n.startswith("model.layers.") and "norm" not in n}
    return observe(source, values)


def data_parallel_module() -> Result:
    model = tiny_qwen3()
    gold = state(model)
    return observe(ModuleAdapter(nn.parallel.DistributedDataParallel(model)), gold)


def several_updates() -> Result:
    """A source is used again; its values follow, its manifest stays the same object, a new parameter is
    noticed."""
    model: Any = shard_layers(tiny_qwen3())
    source = FSDPAdapter(model)
    manifest = source.manifest()
    before = {piece.box: piece.tensor.clone() for piece in source.slices()}
    own = {tensor.to_local().data_ptr() for tensor in model.parameters() if tensor.to_local().numel()}
    views = all(piece.tensor.data_ptr() in own and not piece.tensor.requires_grad for piece in source.slices())
    train(model)
    same_manifest = source.manifest() is manifest
    changed = [not torch.equal(piece.tensor, before[piece.box]) for piece in source.slices()]
    model.extra = nn.Parameter(torch.ones(3))
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    stale = refused(source.slices)
    appeared = "extra" in source.manifest().index
    return {"views": views, "same_manifest": same_manifest, "changed": changed, "appeared": appeared, **stale}


# --- cases that must be refused -----------------------------------------------


def refuse_after_a_forward_pass_alone() -> Result:
    model = shard_layers(tiny_qwen3())
    source = FSDPAdapter(model)
    source.manifest()
    with torch.no_grad():
        model(input_ids=torch.arange(8).view(1, 8))
    by_manifest, by_slices = refused(source.manifest), refused(source.slices)
    model.reshard()
    return {**by_manifest, "slices": by_slices, "after_reshard": refused(source.slices)["error"]}


def refuse_while_a_layer_is_unsharded() -> Result:
    model = shard_layers(tiny_qwen3())
    model.model.layers[1].unshard()
    return refused(FSDPAdapter(model).manifest)


def refuse_pending_sums() -> Result:
    model = fully_shard(nn.Linear(4, 4, bias=False))
    model.sum = nn.Parameter(DTensor.from_local(torch.ones(3), model.weight.device_mesh, [Partial()]))
    return refused(FSDPAdapter(model).manifest)


def refuse_tied_weights_that_were_sharded_apart() -> Result:
    model: Any = tiny_qwen3()
    fully_shard(model.model.embed_tokens)
    return refused(FSDPAdapter(fully_shard(model)).manifest)


def refuse_a_model_on_the_meta_device() -> Result:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    return refused(FSDPAdapter(fully_shard(model)).manifest)


def refuse_a_module_that_is_not_sharded() -> Result:
    return refused(lambda: FSDPAdapter(nn.Linear(2, 2)))


def refuse_a_sharded_module_in_a_module_adapter() -> Result:
    by_module = refused(lambda: ModuleAdapter(fully_shard(nn.Linear(4, 4))))
    by_state = refused(ModuleAdapter(fully_shard(nn.Linear(4, 4)).state_dict()).manifest)
    return {**by_module, "state_dict": by_state}


def refuse_tensor_parallel_below_fsdp() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return refused(FSDPAdapter(fully_shard(model, mesh=mesh["dp"])).manifest)


def refuse_two_sharded_dimensions() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
    return refused(FSDPAdapter(fully_shard(model, mesh=mesh["dp"])).manifest)


def refuse_parameters_on_other_sets_of_ranks() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    fully_shard(model[0])
    fully_shard(model[1], mesh=mesh["dp"])
    return refused(FSDPAdapter(model).manifest)


def refuse_a_rank_outside_the_mesh() -> Result:
    model: Any = fully_shard(nn.Linear(4, 4, bias=False))
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())]
    elsewhere = meshes[(dist.get_rank() + 1) % len(meshes)]
    model.far = nn.Parameter(DTensor.from_local(torch.ones(3), elsewhere, [Shard(0)], run_check=False))
    return refused(FSDPAdapter(model).manifest)


ANY_WORLD = [
    tied_model_after_training,
    untied_model_after_training_in_mixed_precision,
    odd_parts,
    odd_parts_offloaded,
    sharded_by_columns,
    wrapped_in_compile_and_checkpointing,
    renamed_without_the_value_head,
    replicated_dtensors,
    data_parallel_module,
    stacked_experts,
    stacked_experts_by_columns,
    models_that_memory_holds_otherwise,
    filtered,
    several_updates,
    refuse_after_a_forward_pass_alone,
    refuse_while_a_layer_is_unsharded,
    refuse_pending_sums,
    refuse_tied_weights_that_were_sharded_apart,
    refuse_a_model_on_the_meta_device,
    refuse_a_module_that_is_not_sharded,
    refuse_a_rank_outside_the_mesh,
    refuse_a_sharded_module_in_a_module_adapter,
]
FOUR_RANKS = [
    copies_and_shards,
    one_model_on_each_half,
    refuse_tensor_parallel_below_fsdp,
    refuse_two_sharded_dimensions,
    refuse_parameters_on_other_sets_of_ranks,
]


if __name__ == "__main__":
    main(ANY_WORLD, FOUR_RANKS)
