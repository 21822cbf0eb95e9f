"""Reads from Megatron: a model's sizes, this rank's place in the parallel groups, the numbers of layers, and the dimension of a
parameter that tensor parallelism divides.

Megatron is imported inside the functions that query it; functions that need no Megatron are pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch

__all__ = [
    "ModelDims", "ParallelPlace", "check_gathered", "check_marks", "layer_offset", "mtp_offset", "partition_dim", "place_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelDims:
    """The values that a rule may use: Megatron's `config`; the vocabulary without padding; and `ways`, the number of ranks over
    which tensor parallelism divides the parameter (for an expert's parameter: expert-tensor parallelism)."""

    config: Any
    vocab_size: int
    ways: int


@dataclass(frozen=True, slots=True)
class ParallelPlace:
    """This rank's place in Megatron's parallel groups."""

    tp_rank: int
    tp_size: int
    expert_tp_rank: int
    expert_tp_size: int
    ep_rank: int
    ep_size: int
    pp_rank: int

    def tensor_parallel(self, *, by_expert: bool) -> tuple[int, int]:
        """Rank and size of the tensor-parallel group for parameters of experts, or of other layers."""
        return (self.expert_tp_rank, self.expert_tp_size) if by_expert else (self.tp_rank, self.tp_size)


def place_of(model: Any) -> ParallelPlace:
    """This rank's place, from the groups that the model was built with (`pg_collection`), else from Megatron's global ones."""
    from megatron.core import parallel_state as mpu

    groups = getattr(model, "pg_collection", None)

    def at(name: str, rank: Callable[[], int], size: Callable[[], int]) -> tuple[int, int]:
        group = getattr(groups, name, None)
        return (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (rank(), size())

    tp = at("tp", mpu.get_tensor_model_parallel_rank, mpu.get_tensor_model_parallel_world_size)
    expert_tp = at("expt_tp", mpu.get_expert_tensor_parallel_rank, mpu.get_expert_tensor_parallel_world_size)
    ep = at("ep", mpu.get_expert_model_parallel_rank, mpu.get_expert_model_parallel_world_size)
    pp = at("pp", mpu.get_pipeline_model_parallel_rank, mpu.get_pipeline_model_parallel_world_size)
    return ParallelPlace(*tp, *expert_tp, *ep, pp[0])


def layer_offset(config: Any, stage: int | None, pp_rank: int) -> int:
    """Number of decoder layers before this chunk, over all pipeline stages. `stage`: the virtual stage."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return _call(get_transformer_layer_offset, config, stage, pp_rank)


def mtp_offset(config: Any, stage: int | None) -> int:
    """Number of multi-token-prediction layers before this chunk."""
    if not getattr(config, "mtp_num_layers", None):
        return 0
    from megatron.core.transformer import multi_token_prediction

    offset = getattr(multi_token_prediction, "get_mtp_layer_offset", None)
    return 0 if offset is None else _call(offset, config, stage, 0)


def _call(function: Callable[..., int], config: Any, stage: int | None, pp_rank: int) -> int:
    """Calls `function` with the arguments that this version of Megatron takes; one without a stage reads a global stage."""
    from megatron.core import parallel_state as mpu

    known = {"vp_stage": stage, "pp_rank": pp_rank}
    takes = inspect.signature(function).parameters
    arguments = {name: value for name, value in known.items() if name in takes}
    if stage is None or "vp_stage" in takes:
        return int(function(config, **arguments))
    before = mpu.get_virtual_pipeline_model_parallel_rank()
    mpu.set_virtual_pipeline_model_parallel_rank(stage)
    try:
        return int(function(config, **arguments))
    finally:
        mpu.set_virtual_pipeline_model_parallel_rank(before)


def partition_dim(layer: Any, name: str, parameter: torch.Tensor) -> int | None:
    """The dimension of `parameter` (named `name` in its `layer`) that tensor parallelism divides; None if each tensor-parallel
    rank holds all of it.

    The parameter's own marks say so: `tensor_model_parallel` and `partition_dim` (Megatron leaves it out, or at -1, where the
    layer itself made the parameter, by dimension 0: `GatedDeltaNet`). For two kinds these marks mean nothing, and
    the class of the layer decides:

    - a parameter built without initialisation (by a converter, for example) has no marks, or `tensor_model_parallel=False`,
      which Megatron gives every unmarked parameter; neither Megatron nor Transformer Engine marks `softmax_offset`, one for each
      of this rank's heads;
    - Transformer Engine marks each layer without a `parallel_mode` as divided along dimension 0, even if it is duplicated on all
      ranks, or is a layer of experts that Megatron divided itself along either dimension.
    """
    if getattr(parameter, "tensor_model_parallel", False) and _marks_are_meant(layer):
        return max(0, int(getattr(parameter, "partition_dim", -1)))
    if name == "softmax_offset":
        return 0
    if not name.startswith(("weight", "bias")):  # a norm that is fused into the layer
        return None
    kinds = [kind.__name__ for kind in type(layer).__mro__]
    if any("ColumnParallel" in kind or "VocabParallel" in kind for kind in kinds):
        return 0
    return 1 if parameter.dim() > 1 and any("RowParallel" in kind for kind in kinds) else None


def check_marks(
    layer: Any, name: str, parameter: torch.Tensor, *, strides: tuple[int, ...], expert: bool, ep_size: int
) -> None:
    """Compares the other marks of a parameter with the rule of the model's parameter `name`.

    `strides`: the values of `partition_stride` that the rule supports. With expert parallelism, `allreduce` is False for the
    parameters of experts and for no others. Raises `ManifestMismatch` if a mark contradicts the rule.
    """
    stride = getattr(parameter, "partition_stride", 1) if _marks_are_meant(layer) else 1
    if getattr(parameter, "tensor_model_parallel", False) and stride not in strides:
        raise ManifestMismatch(
            f"{name} is divided with partition_stride {stride}, but its rule supports {' and '.join(map(str, strides))}",
            hint="give it a rule whose strides and runs say how its rows lie (docs/trainers/megatron.md)",
            side="trainer",
        )
    allreduce = getattr(parameter, "allreduce", None)
    if ep_size > 1 and allreduce is not None and bool(allreduce) == expert:
        meant = "an expert's" if not allreduce else "no expert's"
        raise ManifestMismatch(
            f"{name} has allreduce={allreduce}, so it is {meant} parameter, and its rule says otherwise",
            hint="a rule for the parameter of an expert has {expert} in Megatron's name, and no other rule does",
            side="trainer",
        )


def check_gathered(model: Any) -> None:
    """Raises `ManifestMismatch` for a chunk, in its wrappers or without them, whose parameters are not all those of the
    optimizer's last step.

    With `overlap_param_gather` the distributed optimizer changes a part of them on each data-parallel rank, and the next forward
    pass gathers the parts of the others. The bucket groups of Megatron's `DistributedDataParallel` know whether that has begun
    since the last backward pass, and whether it has ended.
    """
    for wrapper in _wrappers_of(model):
        config = getattr(wrapper, "ddp_config", None)
        overlaps = getattr(config, "use_distributed_optimizer", False) and getattr(
            config, "overlap_param_gather", False
        )
        groups = (*getattr(wrapper, "bucket_groups", ()), *getattr(wrapper, "expert_parallel_bucket_groups", ()))
        if overlaps and any(map(_awaits_gather, groups)):
            raise ManifestMismatch(
                "the parameters have not been gathered since the optimizer's step (overlap_param_gather): of most of them "
                "this rank holds the values before it",
                hint="call start_param_sync(force_sync=True) of each chunk's DistributedDataParallel before the update, on "
                "all ranks, or update after the next forward pass",
                side="trainer",
            )


def _wrappers_of(model: Any) -> list[Any]:
    """The wrappers around a chunk, as far as they can be seen: of a chunk without them, the `DistributedDataParallel` whose hook
    gathers the parameters before a forward pass."""
    found = []
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        found.append(model)
        model = inner
    for hook in model._forward_pre_hooks.values():
        captured = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        found += [value for value in captured if hasattr(value, "bucket_groups")]
    return found


def _awaits_gather(group: Any) -> bool:
    if getattr(group, "intra_distributed_optimizer_instance_size", 2) == 1:
        return False
    if getattr(group, "param_gather_handle", None) is not None:
        return True
    has_begun = getattr(group, "param_gather_dispatched", True)
    shards = getattr(group, "cached_grad_buffer_shard_list", None)
    has_stepped = (
        shards is None  # Megatron-Core before 0.14, where nothing tells a model that has never been trained
        or not getattr(group, "is_first_batch", True)
        or bool(getattr(group, "per_param_grad_ready_counts", ()))
        # Without `overlap_grad_reduce` nothing is counted; the first reduction of gradients makes these.
        or any(shard is not None for shard in shards)
    )
    return has_stepped and not has_begun


def _marks_are_meant(layer: Any) -> bool:
    return getattr(layer, "parallel_mode", "") is not None
