"""DeepSpeed's ZeRO: each rank sends its partitions from where they lie.

Under ZeRO-3 a parameter's elements, in C order and padded, are divided evenly between the ranks of its process group, each
parameter by itself. So a rank holds a run of each parameter's elements: a partial first row, whole rows, a partial last row,
each a box. The partition (`ds_tensor`) is what a forward pass gathers, in the dtype in which the model computes; it
exists even while the parameter is gathered, and the optimizer's step writes into it.

Under ZeRO-1 and 2 every rank holds whole parameters, and sends a share of them.

What DeepSpeed hangs on a parameter and is read here: `ds_tensor` (with `ds_quant_scale`, `status` and `final_location`),
`ds_shape`, `ds_process_group`, how many `GatheredParameters` hold it, and `ds_status`, `ds_persist` and `is_external_param`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.sources.inspection import Inspection, mark_of, why_not_plain
from trainer_adapters.sources.plan import Plan, Rename, TensorInfo, shards_of_run, whole_shard
from trainer_adapters.sources.scan import ScannedSource
from trainer_adapters.sources.selection import Rules
from trainer_adapters.sources.sharded import check_module, is_partitioned, refuse_fsdp, refuse_lora_layers
from trainer_adapters.sources.slice_plan import LocalShards
from trainer_adapters.sources.streams import Buffers, module_stream

__all__ = ["DeepSpeedAdapter"]

INSTEAD = "let ExportAdapter send what GatheredParameters gathers"


class DeepSpeedAdapter(ScannedSource):
    """A source for a model under DeepSpeed, of any stage of ZeRO: the engine that `deepspeed.initialize` returns, or the model
    that it was given.

    Every rank makes one. Under ZeRO-3 each sends its own partition of every parameter, from the CPU if it is offloaded there;
    nothing is gathered. What all ranks hold whole (buffers; under ZeRO-1 and 2 everything) is divided between them by bytes, and
    must be equal on all. Frozen parameters are sent like the others.

    `dtype_rules`, `include_buffers`, `rename`, `include`, `exclude`, stacked experts and tied weights are as in
    `ModuleAdapter`. The parameters' dtype is that in which the model computes, not that of the optimizer's master weights.

    Raises `ArgumentError` (a TypeError) for what is no module, and for a model that FSDP shards or PEFT adapts. `manifest()`
    raises `ManifestMismatch`, which names them, for parameters that are gathered at the moment and may be changing, offloaded
    to NVMe, quantised (`zero_quantized_nontrainable_weights`), or divided in another way than ZeRO-3's (MiCS), for the experts
    of a `MoE` with an `ep_size` above 1, and if parameters are partitioned over different sets of ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        dtype_rules: Rules = None,
        include_buffers: Buffers = "persistent",
        rename: Rename = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
    ) -> None:
        check_module(model)
        refuse_fsdp(model)
        refuse_lora_layers(model, rename)
        super().__init__(
            module_stream(model, include_buffers),
            module=model,
            in_memory=True,
            dtype_rules=dtype_rules,
            rename=rename,
            include=include,
            exclude=exclude,
        )
        self._ranks: tuple[int, ...] = ()

    def _inspect(self, thing: Any) -> Inspection:
        return _inspect(thing) if is_partitioned(thing) else super()._inspect(thing)

    def _mark(self, thing: Any) -> Hashable:
        if not is_partitioned(thing):
            return super()._mark(thing)
        own = mark_of(thing.ds_tensor) if thing.ds_tensor is not None else None
        return None if own is None else (id(thing), own, thing.ds_shape, id(thing.ds_process_group), _problem(thing))

    def _local(self, thing: Any) -> torch.Tensor:
        return super()._local(thing.ds_tensor if is_partitioned(thing) else thing)

    def _check_plan(self, plan: Plan) -> None:
        groups: dict[tuple[int, ...], str] = {}
        for info, places in zip(plan.infos, plan.places, strict=True):
            if isinstance(info.spread, Partition) and places:
                groups.setdefault(info.spread.ranks, info.name)
        if len(groups) > 1:
            uses = [f"{name} over ranks {list(ranks)}" for ranks, name in groups.items()]
            raise ManifestMismatch(
                f"parameters are partitioned over different sets of ranks: {first_few(uses)}",
                hint="DeepSpeed's expert parallelism has no rule here: let ExportAdapter send what your program gathers",
                side="trainer",
            )
        everyone = tuple(range(dist.get_world_size())) if dist.is_available() and dist.is_initialized() else (0,)
        self._ranks = next(iter(groups), everyone)

    def _local_shards(self, info: TensorInfo) -> LocalShards:
        part = info.spread
        if isinstance(part, Partition):
            return LocalShards(tuple(shards_of_run(info.shape, part.start, part.count, 0)))
        place = self._ranks.index(dist.get_rank()) if len(self._ranks) > 1 else 0
        return LocalShards((whole_shard(info.shape),), self._ranks, place)


@dataclass(frozen=True, slots=True)
class Partition:
    """The run of a parameter's elements that this rank has, of those that `ranks` divide: `count` elements from `start` on."""

    start: int
    count: int
    ranks: tuple[int, ...]


def _inspect(parameter: Any) -> Inspection:
    shape = tuple(parameter.ds_shape)
    memory = ("partition", id(parameter))  # tied weights are one parameter
    if problem := _problem(parameter):
        return Inspection(shape, parameter.dtype, None, problem, memory)
    held, group = parameter.ds_tensor, parameter.ds_process_group
    numel, ranks = math.prod(shape), tuple(dist.get_process_group_ranks(group))
    even = -(-numel // len(ranks))
    if held.numel() != even:
        problem = f"is divided into parts of {held.numel()} elements where ZeRO-3 over {len(ranks)} ranks makes {even}: {INSTEAD}"
    start = min(dist.get_rank(group) * even, numel)
    return Inspection(shape, held.dtype, Partition(start, min(even, numel - start), ranks), problem, memory)


def _problem(parameter: Any) -> str:
    """Why this rank's partition is not what was trained, or can't be read; "" if it is."""
    held = parameter.ds_tensor
    if held is None:
        return "has no partition yet: update after deepspeed.initialize"
    if hasattr(held, "ds_quant_scale"):
        return f"is quantised, and only DeepSpeed can undo it: switch zero_quantized_nontrainable_weights off, or {INSTEAD}"
    if getattr(held, "final_location", None) == "nvme" or held.status.name != "AVAILABLE":
        return f"is offloaded to NVMe, not in memory: offload parameters to the CPU, or {INSTEAD}"
    if _may_be_changing(parameter):
        return (
            "is gathered at the moment, and what is changed there is in no partition yet: update outside of "
            "GatheredParameters, after the step"
        )
    return why_not_plain(held)


def _may_be_changing(parameter: Any) -> bool:
    """Whether `GatheredParameters` holds a parameter, whose user may change it: the partitions get that when it lets go. Versions
    of DeepSpeed that don't count these (0.16) don't tell it from a parameter that a forward pass has left gathered."""
    deepspeed = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    counter = getattr(deepspeed, "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR", None)
    if counter is not None:
        return bool(getattr(parameter, counter, 0))
    return parameter.ds_status.name != "NOT_AVAILABLE" and not (parameter.ds_persist or parameter.is_external_param)
