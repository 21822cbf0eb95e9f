"""The cases of `test_fsdp1.py`, run by torchrun (see `observing.py`)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.trainers.observing import (
    Result,
    main,
    nudge,
    observe,
    refused,
    state,
    tiny_qwen3,
    tiny_qwen3_moe,
    train,
)
from tests.trainers.tiny_models import checkpoint_of, tiny
from trainer_adapters import FSDPAdapter, ModuleAdapter

CPU = torch.device("cpu")


def wrap(model: nn.Module, *, units: bool = True, **options: Any) -> Any:
    """The whole model in one unit, or each decoder layer in one of its own and the rest in the root's."""
    layers: set[type[nn.Module]] = {type(layer) for layer in model.model.layers}  # type: ignore[union-attr, attr-defined]
    policy = ModuleWrapPolicy(layers) if units else None
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=CPU, **options)


def summoned(model: nn.Module) -> dict[str, torch.Tensor]:
    """What FSDP itself gathers, by clean names."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }


# --- cases that must arrive ---------------------------------------------------


def trained(strategy: str, use_orig_params: bool) -> Result:
    gold = tiny_qwen3()
    train(gold, steps=2)
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        options["process_group"] = hybrid_groups()
    model = wrap(tiny_qwen3(), use_orig_params=use_orig_params, **options)
    train(model, steps=2)
    result = observe(FSDPAdapter(model), state(gold))
    full = summoned(model)
    return {**result, "as summoned": all(torch.equal(full[name], tensor) for name, tensor in state(gold).items())}


@functools.cache
def hybrid_groups() -> tuple[Any, Any]:
    """Shards within each pair of ranks, copies across pairs (FSDP1 sums no gradients over copies of undivided models)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    width = max(2, world // 2)
    shards = [dist.new_group(list(range(start, start + width))) for start in range(0, world, width)]
    copies = [dist.new_group(list(range(start, world, width))) for start in range(width)]
    return shards[rank // width], copies[rank % width]


def of(strategy: str, use_orig_params: bool) -> Callable[[], Result]:
    case = functools.partial(trained, strategy, use_orig_params)
    case.__name__ = f"{strategy} {'own parameters' if use_orig_params else 'flat parameters'}"  # type: ignore[attr-defined]
    return case


def one_unit() -> Result:
    gold = tiny_qwen3()
    nudge(gold)
    model = wrap(tiny_qwen3(), units=False, use_orig_params=True)
    nudge(model)
    return observe(FSDPAdapter(model), state(gold))


def before_the_first_forward_pass() -> Result:
    return observe(FSDPAdapter(wrap(tiny_qwen3())), state(tiny_qwen3()))


def while_parameters_are_unsharded() -> Result:
    """After a forward pass alone the root is unsharded, and under SHARD_GRAD_OP everything: the shards are there."""
    model = wrap(tiny_qwen3(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
    model(input_ids=torch.arange(8).view(1, 8))
    return observe(FSDPAdapter(model), state(tiny_qwen3()))


def offloaded() -> Result:
    """Without an accelerator there is no memory to pin, and a stream has nothing to wait for; FSDP1 asks for both."""
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]
    gold = tiny_qwen3()
    train(gold)
    model = wrap(tiny_qwen3(), cpu_offload=CPUOffload(offload_params=True), use_orig_params=True)
    train(model)
    return observe(FSDPAdapter(model), state(gold))


def mixed_precision() -> Result:
    """Master weights in fp32 are sent, as bf16 where a rule says so."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = wrap(tiny_qwen3(tied=False), mixed_precision=precision, use_orig_params=False)
    train(model, steps=2)
    rules = {"*norm.weight": torch.float32, "*": torch.bfloat16}
    return observe(FSDPAdapter(model, dtype_rules=rules), summoned(model))


def checkpointed_and_frozen() -> Result:
    gold = tiny_qwen3()
    model: Any = tiny_qwen3()
    for i, layer in enumerate(model.model.layers):
        layer.mlp.requires_grad_(False)
        model.model.layers[i] = checkpoint_wrapper(layer)
    return observe(FSDPAdapter(wrap(model, use_orig_params=True)), state(gold))


def stacked_experts() -> Result:
    gold = tiny_qwen3_moe()
    nudge(gold)
    model = wrap(tiny_qwen3_moe(), use_orig_params=True)
    nudge(model)
    unstacked = {s.box.tensor: s.tensor.clone() for s in ModuleAdapter(gold, rank=0, world_size=1).slices()}
    names = [spec.name for spec in ModuleAdapter(gold).manifest().tensors]
    return observe(FSDPAdapter(model), {names[i]: tensor for i, tensor in unstacked.items()})


def models_that_memory_holds_otherwise() -> Result:
    """Fused, transposed, and of a conversion that looks at the parameters' shapes, which FSDP1 flattens."""
    model, gold = nn.ModuleDict(), {}
    for model_type in ("hrm_text", "ernie4_5_vl_moe", "qwen3_vl_moe"):
        part = model[model_type] = tiny(model_type)
        gold |= {f"{model_type}.{name}": tensor for name, tensor in checkpoint_of(part).items()}
    wrapped = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    return observe(FSDPAdapter(wrapped), gold)


class Images(nn.Module):
    """Units of convolutions, some of them in channels-last memory; odd sizes, a buffer, an ignored parameter, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(7)
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.cube = nn.Parameter(torch.randn(3, 5, 2))
        self.ignored = nn.Linear(3, 4)


def not_contiguous(use_orig_params: bool = True) -> Result:
    gold = state(Images())
    model = Images()
    model.second = FullyShardedDataParallel(model.second, device_id=CPU, use_orig_params=use_orig_params)
    model = FullyShardedDataParallel(
        model, device_id=CPU, use_orig_params=use_orig_params, ignored_modules=[model.ignored]
    )
    return observe(FSDPAdapter(model), gold)


def not_contiguous_flat() -> Result:
    return not_contiguous(use_orig_params=False)


def trained_after_it_was_summoned() -> Result:
    """The first update goes out before the first forward pass."""
    unit = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    parts = FullyShardedDataParallel(unit, device_id=CPU), nn.Conv2d(5, 2, 3)
    model = FullyShardedDataParallel(nn.Sequential(*parts), device_id=CPU)
    source = FSDPAdapter(model)
    list(source.slices())
    model(torch.ones(1, 3, 8, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return observe(source, summoned(model))


def summoned_for_the_others(stops: int) -> Result:
    """Three units are summoned. Rank 0 closes its slices when it has taken `stops`, or raises in the middle of the next."""
    group = dist.new_group(timeout=timedelta(seconds=120))
    units: list[Any] = [nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last) for _ in range(3)]
    units = [FullyShardedDataParallel(unit, process_group=group, device_id=CPU) for unit in units]
    model = FullyShardedDataParallel(nn.Sequential(*units), process_group=group, device_id=CPU)
    source = FSDPAdapter(model)
    source.manifest()
    slices = source.slices()
    count = stops if dist.get_rank() == 0 else len(source.claims() or ())
    taken = [next(slices).box for _ in range(count)]
    slices.close()  # type: ignore[attr-defined]
    return {"taken": len(taken), "next": len(list(source.slices())), "all": len(source.claims() or ())}


def nobody_takes_all() -> Result:
    return summoned_for_the_others(1)


def several_updates() -> Result:
    """A source is used again: its values follow the training, its manifest stays the same object."""
    model = wrap(tiny_qwen3(), use_orig_params=True)
    source = FSDPAdapter(model)
    manifest, claims = source.manifest(), source.claims()
    before = {piece.box: piece.tensor.clone() for piece in source.slices()}
    train(model)
    shards = {handle.flat_param._local_shard.untyped_storage().data_ptr() for handle in handles(model)}
    after = {piece.box: piece.tensor for piece in source.slices()}
    return {
        "same": source.manifest() is manifest and source.claims() is claims,
        "changed": sum(not torch.equal(after[box], before[box]) for box in before) / max(len(before), 1),
        "views": {tensor.untyped_storage().data_ptr() for tensor in after.values()} <= shards,
        "grad": any(tensor.requires_grad for tensor in after.values()),
    }


def handles(model: nn.Module) -> list[Any]:
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle is not None]  # noqa: SLF001


# --- cases that must be refused -----------------------------------------------


def refuse_while_summoned() -> Result:
    model = wrap(tiny_qwen3())
    source = FSDPAdapter(model)
    with FullyShardedDataParallel.summon_full_params(model):
        inside = refused(source.manifest)
    return {**inside, "after": refused(lambda: list(source.slices()))["error"]}


def refuse_memory_that_fsdp_has_not_taken_over() -> Result:
    model = wrap(tiny_qwen3(), units=False, use_orig_params=True)
    train(model)
    source = FSDPAdapter(model)
    source.manifest()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    by_slices = refused(lambda: list(source.slices()))
    return {**refused(source.manifest), "slices": by_slices["error"]}


def refuse_a_parameter_that_fsdp_has_not_taken_over() -> Result:
    """FSDP takes an object that was put in a parameter's place over in its next forward pass."""
    model = wrap(tiny_qwen3(tied=False), units=False, use_orig_params=True)
    train(model)
    source = FSDPAdapter(model)
    source.manifest()
    head = model.module.lm_head
    head.weight = nn.Parameter(torch.full_like(head.weight, 7))
    before = refused(source.manifest)
    model(input_ids=torch.arange(8).view(1, 8))
    return {**before, "after": refused(source.manifest)["error"]}


def refuse_both_kinds_of_fsdp() -> Result:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0] = FullyShardedDataParallel(model[0], device_id=CPU)
    fully_shard(model[1])
    return refused(lambda: FSDPAdapter(model))


def refuse_tied_weights_in_two_units() -> Result:
    model: Any = tiny_qwen3()
    model.lm_head.weight = nn.Parameter(copy.deepcopy(model.model.embed_tokens.weight.detach()))
    return refused(FSDPAdapter(wrap(model, use_orig_params=True)).manifest)


def refuse_a_module_adapter() -> Result:
    return refused(lambda: ModuleAdapter(wrap(tiny_qwen3())))


ANY_WORLD = [
    *(of(s, o) for s in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD") for o in (True, False)),
    one_unit,
    before_the_first_forward_pass,
    while_parameters_are_unsharded,
    mixed_precision,
    checkpointed_and_frozen,
    stacked_experts,
    models_that_memory_holds_otherwise,
    not_contiguous,
    not_contiguous_flat,
    trained_after_it_was_summoned,
    nobody_takes_all,
    several_updates,
    refuse_while_summoned,
    refuse_memory_that_fsdp_has_not_taken_over,
    refuse_a_parameter_that_fsdp_has_not_taken_over,
    refuse_both_kinds_of_fsdp,
    refuse_tied_weights_in_two_units,
    refuse_a_module_adapter,
    offloaded,
]

if __name__ == "__main__":
    main(ANY_WORLD, [])
