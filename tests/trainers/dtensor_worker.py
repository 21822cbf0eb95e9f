"""The cases of `test_dtensor_adapter.py`, run by torchrun (see `observing.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.trainers.observing import Result, main, nudge, observe, refused, state, tiny_qwen3, tiny_qwen3_moe, train
from trainer_adapters import DTensorAdapter, ExportAdapter

PLAN: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def two_dimensions(first: str = "dp", second: str = "tp") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=(first, second))


def parallel_qwen3(mesh: DeviceMesh, **options: Any) -> Any:
    """A tensor-parallel plan, and `fully_shard` over it."""
    model: Any = tiny_qwen3(tied=False, key_heads=2)
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


def gold_qwen3() -> dict[str, torch.Tensor]:
    model = tiny_qwen3(tied=False, key_heads=2)
    nudge(model)
    return state(model)


class Experts(nn.Module):
    """Six experts, a router, and something that all ranks of a data-parallel group divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(6, 8, 6))
        self.experts.down = nn.Parameter(torch.randn(6, 6, 8))
        self.router = nn.Linear(6, 7, bias=False)
        self.dense = nn.Linear(6, 9)
        self.register_buffer("bias", torch.randn(6))


# --- cases that must arrive ---------------------------------------------------


def tensor_parallel_plan_alone() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tiny_qwen3(tied=False, key_heads=2)
    parallelize_module(model, mesh, PLAN)
    nudge(model)
    return observe(DTensorAdapter(model), gold_qwen3())


def fsdp_over_tensor_parallel() -> Result:
    model = parallel_qwen3(two_dimensions())
    nudge(model)
    return observe(DTensorAdapter(model), gold_qwen3())


def fsdp_over_tensor_parallel_offloaded() -> Result:
    model = parallel_qwen3(two_dimensions(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    nudge(model)
    return observe(DTensorAdapter(model), gold_qwen3())


def trained_with_norms_that_come_apart() -> Result:
    """Real training: each tensor-parallel rank sees the gradients of its own heads, and nothing sums them."""
    model = parallel_qwen3(two_dimensions())
    train(model, steps=2)
    gathered = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
    return observe(DTensorAdapter(model), gathered)


def copies_of_plain_tensors_that_come_apart() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8))
    gold = {name: torch.full(tensor.shape, 0.5) for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(gold[name] + (dist.get_rank() if name.startswith("1.") else 0))
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return observe(DTensorAdapter(model), gold)


def sequence_parallel_norms() -> Result:
    """A plan that knows of its norms: the mesh describes the copies, and they are divided."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 7, bias=False), nn.LayerNorm(7))
    gold = state(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": SequenceParallel()})
    return observe(DTensorAdapter(model), gold)


def experts_on_a_mesh_of_their_own() -> Result:
    """Experts over (dp, ep), the router over dp, dense layers over all ranks: three meshes in one model."""
    mesh = two_dimensions("dp", "ep")
    everyone = mesh._flatten("everyone")
    gold = Experts()
    nudge(gold)
    model: Any = Experts()
    for name, parameter in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])))
    fully_shard(model.experts, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1) if p.dim() == 3 else None)
    fully_shard(model.router, mesh=mesh["dp"])
    fully_shard(model.dense, mesh=everyone)
    nudge(model)
    return observe(DTensorAdapter(model), state(gold))


def experts_divided_twice() -> Result:
    """Both meshes cut the experts' own dimension: `_StridedShard`."""
    mesh = two_dimensions("dp", "ep")
    gold = Experts().experts
    nudge(gold)
    experts: Any = Experts().experts
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])))
    nudge(fully_shard(experts, mesh=mesh["dp"]))
    return observe(DTensorAdapter(experts), state(gold))


def a_shard_of_several_boxes() -> Result:
    """A strided shard that no other completes: the rank's rows are apart."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(11 * 13.0).view(11, 13)
    rows = [piece.chunk(mesh.size()) for piece in whole.chunk(3)]
    rank = dist.get_rank()
    local = torch.cat([pieces[rank] for pieces in rows if rank < len(pieces)] or [whole[:0]])
    model = nn.Module()
    strided = [_StridedShard(0, split_factor=3)]
    model.w = nn.Parameter(DTensor.from_local(local, mesh, strided, shape=whole.shape, stride=whole.stride()))
    return observe(DTensorAdapter(model), {"w": whole})


def a_tensor_on_some_of_the_ranks() -> Result:
    few = DeviceMesh("cpu", [0, 1])
    model = nn.Module()
    whole = torch.arange(15.0).view(5, 3)
    if dist.get_rank() < 2:
        local = distribute_tensor(whole, few, [Shard(0)])
    else:
        local = DTensor.from_local(whole[:0], few, [Shard(0)], run_check=False, shape=whole.shape, stride=(3, 1))
    model.w = nn.Parameter(local)
    return observe(DTensorAdapter(model), {"w": whole})


def replicas_of_tensor_parallel_groups() -> Result:
    """(Replicate, Shard(1)) and (Replicate, Replicate): the first copy is sent, or all send a share."""
    mesh = two_dimensions()
    torch.manual_seed(6)
    whole = {"columns": torch.randn(3, 5), "everywhere": torch.randn(700, 800)}
    model = nn.Module()
    model.columns = nn.Parameter(distribute_tensor(whole["columns"], mesh, [Replicate(), Shard(1)]))
    model.everywhere = nn.Parameter(distribute_tensor(whole["everywhere"], mesh, [Replicate(), Replicate()]))
    return observe(DTensorAdapter(model), whole)


def a_local_tensor_that_is_not_contiguous() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    whole = torch.randn(8, 3)
    model = nn.Module()
    local = whole.T.contiguous().chunk(mesh.size(), 1)[dist.get_rank()].T
    model.w = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride()))
    return observe(DTensorAdapter(model), {"w": whole})


def one_model_on_each_half() -> Result:
    """Two models on two submeshes, each with a process group of its own; the second half's isn't looked at."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("model", "tp"))
    model = tiny_qwen3(tied=False, key_heads=2)
    parallelize_module(model, mesh["tp"], PLAN)
    nudge(model)
    result = observe(DTensorAdapter(model, process_group=mesh["tp"].get_group()), gold_qwen3())
    if dist.get_rank() < dist.get_world_size() // 2:
        return result
    return {**result, "slices": [], "claims": [], "second": len(result["slices"])}


def an_export_of_shards() -> Result:
    """DTensors of every layout from a function, whole tensors among them, and one that the first rank alone has."""
    size = dist.get_world_size()
    mesh, two = init_device_mesh("cpu", (size,)), two_dimensions()
    layouts: dict[str, Any] = {
        "rows": ((7, 5), mesh, [Shard(0)]),
        "columns": ((3, 9), mesh, [Shard(1)]),
        "everywhere": ((700, 800), mesh, [Replicate()]),
        "number": ((), mesh, [Replicate()]),
        "nothing": ((0, 3), mesh, [Shard(0)]),
        "rows twice": ((11, 6), two, [Shard(0), Shard(0)]),
        "both": ((6, 11), two, [Shard(1), Shard(0)]),
        "whole": ((5, 4), None, []),
        "first": ((4,), None, []),
    }
    torch.manual_seed(12)
    gold = {name: torch.randn(shape) for name, (shape, _, _) in layouts.items()}
    shards = {
        name: gold[name].clone() if on is None else distribute_tensor(gold[name].clone(), on, placements)
        for name, (_, on, placements) in layouts.items()
        if name != "first" or dist.get_rank() == 0
    }
    return observe(ExportAdapter(lambda: shards.items()), gold)


def an_export_of_trained_shards() -> Result:
    """Names and values as another format has them: a projection's heads in another order, all else as it is sharded."""

    def converted(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if "q_proj" in name:
                whole = tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor
                tensor = whole.view(2, -1, 36).flip(0).reshape(-1, 36)
            yield name.replace("model.", "policy."), tensor

    model = tiny_qwen3(tied=False)
    for layer in model.model.layers:  # type: ignore[union-attr, operator]
        fully_shard(layer)
    nudge(fully_shard(model))
    gold = tiny_qwen3(tied=False)
    nudge(gold)
    return observe(ExportAdapter(lambda: converted(model)), {n: t.detach() for n, t in converted(gold)})


def an_export_by_transformers_own_conversion() -> Result:
    """As docs/trainers.md shows it for models whose tensors in memory are not the checkpoint's."""
    from transformers.core_model_loading import revert_weight_conversion

    model, gold = tiny_qwen3_moe(), tiny_qwen3_moe()
    for layer in model.model.layers:
        fully_shard(layer)
    nudge(fully_shard(model))
    nudge(gold)
    source = ExportAdapter(lambda: revert_weight_conversion(model, model.state_dict()).items())
    return observe(
        source, {n: t.detach().clone() for n, t in revert_weight_conversion(gold, gold.state_dict()).items()}
    )


def an_export_of_copies_that_come_apart() -> Result:
    """Each tensor-parallel rank has the router on its own data-parallel submesh, and nothing keeps them equal."""
    mesh = two_dimensions()
    whole = torch.arange(700 * 800.0).view(700, 800)
    own = whole + mesh["tp"].get_local_rank()
    router = distribute_tensor(own, mesh["dp"], [Shard(0)], src_data_rank=None)
    return observe(ExportAdapter(lambda: [("router", router)]), {"router": whole})


# --- cases that must be refused -----------------------------------------------


def refuse_an_export_of_pending_sums() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pairs = [("sum", DTensor.from_local(torch.ones(3), mesh, [Partial()]))]
    return refused(lambda: ExportAdapter(lambda: pairs))


def refuse_an_export_that_shards_otherwise_the_second_time() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = iter([Shard(0), Shard(1)])
    source = ExportAdapter(lambda: [("w", distribute_tensor(torch.ones(8, 8), mesh, [next(placements)]))])
    return refused(lambda: list(source.slices()))


def refuse_a_function() -> Result:
    return refused(lambda: DTensorAdapter(dict))  # type: ignore[arg-type]


def refuse_pending_sums() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    model.sum = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    return refused(DTensorAdapter(model).manifest)


def refuse_ranks_in_another_order() -> Result:
    """torch's groups count the ranks from the lowest on, and so `fully_shard` cuts; DTensors count as the mesh does."""
    mesh = DeviceMesh("cpu", list(reversed(range(dist.get_world_size()))))
    return refused(DTensorAdapter(fully_shard(nn.Linear(4, 8), mesh=mesh)).manifest)


def refuse_while_a_layer_is_unsharded() -> Result:
    model = parallel_qwen3(two_dimensions())
    model.model.layers[1].unshard()
    return refused(DTensorAdapter(model).manifest)


def refuse_a_model_on_the_meta_device() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
    return refused(DTensorAdapter(parallelize_module(model, mesh, {"0": ColwiseParallel()})).manifest)


def refuse_a_shard_of_another_shape() -> Result:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    local = torch.ones(2, 3)
    model.w = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(92, 3), stride=(3, 1)))
    return refused(DTensorAdapter(model).manifest)


class Marked(torch.Tensor):
    """A shard of a class of its own."""


def refuse_shards_that_were_freed_since_the_last_update() -> Result:
    """Of a plain class in one model and of a class of its own in the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for kind in (torch.Tensor, Marked):
        model = nn.Module()
        local = torch.ones(2, 3).as_subclass(kind)
        model.register_buffer("w", DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        source = DTensorAdapter(model)
        source.manifest()
        local.untyped_storage().resize_(0)
        found.append(refused(source.manifest))
    (error,) = {seen["error"] for seen in found}
    return {"error": error, "text": " and ".join(seen["text"] for seen in found)}


def refuse_the_first_fsdp() -> Result:
    return refused(lambda: DTensorAdapter(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))))


def parameters_that_come_and_go() -> Result:
    """Between manifest and slices: an error. Between updates: the next manifest."""
    model = parallel_qwen3(two_dimensions())
    source = DTensorAdapter(model)
    before = len(source.manifest().tensors)
    model.extra = nn.Parameter(torch.ones(3))
    appeared = refused(lambda: list(source.slices()))
    with_it = len(source.manifest().tensors)
    del model.extra
    vanished = refused(lambda: list(source.slices()))
    model.lm_head.weight = model.model.embed_tokens.weight
    newly_tied = refused(lambda: list(source.slices()))
    tied = source.manifest().tied
    return {
        "counts": [before, with_it, len(source.manifest().tensors)],
        "texts": [appeared["text"], vanished["text"], newly_tied["text"]],
        "tied": tied,
    }


ANY_WORLD = [
    tensor_parallel_plan_alone,
    copies_of_plain_tensors_that_come_apart,
    sequence_parallel_norms,
    a_shard_of_several_boxes,
    a_tensor_on_some_of_the_ranks,
    a_local_tensor_that_is_not_contiguous,
    an_export_of_shards,
    an_export_of_trained_shards,
    an_export_by_transformers_own_conversion,
    refuse_an_export_of_pending_sums,
    refuse_an_export_that_shards_otherwise_the_second_time,
    refuse_a_function,
    refuse_pending_sums,
    refuse_ranks_in_another_order,
    refuse_a_model_on_the_meta_device,
    refuse_a_shard_of_another_shape,
    refuse_shards_that_were_freed_since_the_last_update,
    refuse_the_first_fsdp,
]
FOUR_RANKS = [
    fsdp_over_tensor_parallel,
    fsdp_over_tensor_parallel_offloaded,
    trained_with_norms_that_come_apart,
    experts_on_a_mesh_of_their_own,
    experts_divided_twice,
    replicas_of_tensor_parallel_groups,
    one_model_on_each_half,
    an_export_of_copies_that_come_apart,
    refuse_while_a_layer_is_unsharded,
    parameters_that_come_and_go,
]

if __name__ == "__main__":
    main(ANY_WORLD, FOUR_RANKS)
