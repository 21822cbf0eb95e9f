"""Tests whether torch or DeepSpeed has sharded a module or a tensor, and whether a module has PEFT's adapters, without importing
torch's sharding modules, DeepSpeed or PEFT.

That takes seconds, and a trainer that uses them has already done it: no object exists of a class that nobody imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "class_before_sharding", "has_lora_layers", "has_partitions", "is_deepspeed_engine", "is_dtensor", "is_fsdp_alone",
    "is_fully_sharded", "is_one_of_several_experts", "is_partitioned", "is_wrapped_by_fsdp1", "refuse_fsdp",
    "refuse_lora_layers", "shape_of",
]  # fmt: skip


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return _is("torch.distributed.tensor", "DTensor", value)


def is_fully_sharded(module: object) -> bool:
    """Whether `fully_shard` (FSDP2) was called on this module itself."""
    return _is("torch.distributed.fsdp", "FSDPModule", module)


def class_before_sharding(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The module's class, without what `fully_shard` makes of it."""
    if not is_fully_sharded(module):
        return type(module)
    from torch.distributed.fsdp import FSDPModule

    kinds: Any = type(module).__mro__
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))  # type: ignore[no-any-return]


def is_fsdp_alone(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` alone has sharded this model, so that `FSDPAdapter` takes it: all parameters are on one mesh of all
    ranks, sharded over one of its dimensions."""
    if not any(is_fully_sharded(part) for part in model.modules()):
        return False
    from torch.distributed.tensor import Shard

    parameters = [parameter for parameter in model.parameters() if is_dtensor(parameter)]
    meshes = {tuple(sorted(parameter.device_mesh.mesh.flatten().tolist())) for parameter in parameters}
    layouts = {tuple(type(one) for one in parameter.placements if not one.is_replicate()) for parameter in parameters}
    return meshes <= {tuple(range(dist.get_world_size()))} and layouts <= {(), (Shard,)}


def is_wrapped_by_fsdp1(module: object) -> bool:
    """Whether this is a FullyShardedDataParallel, which holds the module that it wraps."""
    return _is("torch.distributed.fsdp", "FullyShardedDataParallel", module)


def is_deepspeed_engine(module: object) -> bool:
    """Whether `deepspeed.initialize` returned this, which holds the model that it was given."""
    return _is("deepspeed.runtime.engine", "DeepSpeedEngine", module)


def is_partitioned(value: object) -> bool:
    """Whether it is a parameter that DeepSpeed's ZeRO-3 has partitioned: the tensor itself is empty or, for a while, gathered."""
    return hasattr(value, "ds_tensor")


def is_one_of_several_experts(value: object) -> bool:
    """Whether it is an expert's parameter under the expert parallelism of DeepSpeed or Megatron, whose ranks have different
    experts under one name. Under DeepSpeed's `ep_size_1` all have all."""
    return getattr(value, "allreduce", True) is False and getattr(value, "group_name", "") != "ep_size_1"


def has_partitions(model: torch.nn.Module) -> bool:
    return any(map(is_partitioned, model.parameters()))


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def check_module(model: object) -> None:
    """Raises `ArgumentError` for what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"expected a torch.nn.Module, not a {type(model).__name__}",
            hint="DTensorAdapter takes the dict or list of a sharded model's tensors, ModuleAdapter those of whole tensors",
            side="trainer",
        )


def refuse_fsdp(model: torch.nn.Module) -> None:
    """Raises `ArgumentError` for a model with a part that FSDP shards."""
    for part in model.modules():
        if is_fully_sharded(part):
            raise ArgumentError("this module is sharded by fully_shard: use FSDPAdapter")
        if is_wrapped_by_fsdp1(part):
            raise ArgumentError("this module is sharded by FullyShardedDataParallel: use FSDPAdapter")


def has_lora_layers(model: torch.nn.Module) -> bool:
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(part, tuners.BaseTunerLayer) for part in model.modules())


def refuse_lora_layers(model: torch.nn.Module, rename: object) -> None:
    """Raises `ArgumentError` for a model with adapters, unless a `rename` is given: no engine knows PEFT's names, and the base
    weights alone are not what was trained."""
    if rename is not None:
        return
    for part in model.modules():
        if _is("peft.peft_model", "PeftModel", part) and _learns_its_prompt(part):
            raise ArgumentError(
                "this model was trained by prompt, prefix or P-tuning, or by an adaption prompt (PEFT), which changes no weight "
                "that an engine has: what was trained stands before the prompt or in the attention, and engines have no place "
                "for it",
                hint="train LoRA, which engines take merged or as an adapter; `model.get_base_model()` is the unchanged model",
                side="trainer",
            )
    if has_lora_layers(model):
        raise ArgumentError(
            "this model has PEFT adapters",
            hint="for LoRA use MergedLoRAAdapter, which sends the base model with the adapters merged in, or LoRAAdapter for the "
            "adapter alone; `update(model)` finds the first by itself",
            side="trainer",
        )


def _learns_its_prompt(model: Any) -> bool:
    return any(config.is_prompt_learning or config.is_adaption_prompt for config in model.peft_config.values())


def _is(module: str, name: str, value: object) -> bool:
    kind = getattr(sys.modules.get(module), name, None)  # also None while that module is being imported
    return kind is not None and isinstance(value, kind)
