"""Sends the LoRA adapter of a Megatron-Bridge model by itself, for the engine's own LoRA slots: the base model doesn't travel.

Megatron has one adapter where the checkpoint has several layers (queries, keys and values; gate and up). These layers get the
same A; the rows of B are divided like the rows of the weight, by the architecture's rules. Names are those of PEFT's
checkpoints, and B travels multiplied by the scaling, as from `LoRAAdapter`. Before, A and B are gathered over tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import dtype_name, narrowed, torch_dtype
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.inventory import HeldBox, Inventory, SendAssignment
from trainer_adapters.sources.lora.product import saved_name, scaled
from trainer_adapters.sources.megatron.architecture import Architecture
from trainer_adapters.sources.megatron.chunks import Chunk
from trainer_adapters.sources.megatron.lora_factors import LayerKey, adapted_layers
from trainer_adapters.sources.megatron.rules import Run
from trainer_adapters.sources.megatron.source import MegatronSource
from trainer_adapters.sources.selection import DtypeRules, NameFilter, Rules

__all__ = ["MegatronLoRAAdapter"]


@dataclass(frozen=True, slots=True)
class _Factor:
    """A or B of one layer of the checkpoint: Megatron's layer, and for B the rows of that layer's B."""

    layer: LayerKey
    rows: tuple[Run, ...] | None
    scaling: float


class MegatronLoRAAdapter(MegatronSource):
    """A source for the adapters that Megatron-Bridge's `LoRA` put into a model, without the model.

    Send it as the group `lora.NAME`, where NAME is the engine's name of the adapter: `SyncManager(group="lora.policy")`.
    `model`, `hf_config`, `architecture` and `process_group` are as in `MegatronAdapter`; as there, every rank that holds part of
    the model makes one, at the same time. `dtype_rules` apply to the names of PEFT's checkpoints.

    Raises `ManifestMismatch`, on all ranks and naming the layers, for adapters that slots can't hold or the architecture has no
    rule for (adapters of experts, kinds other than `LoRA`), and for a model without adapters. `manifest()` and `slices()` raise
    it if adapters were added, removed or scaled since: then make a new one, on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        hf_config: Any,
        *,
        dtype_rules: Rules = None,
        architecture: Architecture | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._held: list[_Factor] = []

        def held(chunks: list[Chunk]) -> Inventory:
            pairs = [pair for number, chunk in enumerate(chunks) for pair in _factors(number, chunk)]
            self._held = [factor for _, factor in pairs]
            return Inventory([box for box, _ in pairs])

        super().__init__(model, hf_config, architecture, held, process_group)
        if not any(inventory.boxes for inventory in self._everybody):
            raise ManifestMismatch("no layer has an adapter of Megatron-Bridge", side="trainer")
        self._settle({}, DtypeRules(dtype_rules), NameFilter())

    def manifest(self) -> Manifest:
        self._check_model()
        return super().manifest()

    def made_together(self) -> frozenset[int]:
        divided = self.factors is not None and self.factors.are_divided
        return frozenset(range(len(self._manifest.tensors))) if divided else frozenset()

    def _slices(self, assignments: Sequence[SendAssignment]) -> Iterator[LocalSlice]:
        self._check_model()
        return map(self._slice, assignments)

    def _slice(self, assignment: SendAssignment) -> LocalSlice:
        assert self.factors is not None  # a rank without adapters sends nothing
        factor, box = self._held[assignment.held], assignment.box
        dtype = torch_dtype(self._manifest.tensors[box.tensor].dtype)
        a, b = self.factors.whole(factor.layer)
        if factor.rows is None:
            return LocalSlice(box, narrowed(a, box.offsets, box.sizes).to(dtype))
        rows = torch.cat([b[run.start : run.start + run.rows] for run in factor.rows])
        return LocalSlice(box, scaled(narrowed(rows, box.offsets, box.sizes), factor.scaling, dtype))


def _factors(number: int, chunk: Chunk) -> Iterator[tuple[HeldBox, _Factor]]:
    """Each A and B of this rank's chunk, as a whole, because they are gathered before they are sent."""
    if refused := [name for name, one in chunk.adapted.items() if one.by_expert]:
        raise ManifestMismatch(
            f"an engine's LoRA slots can't hold the adapters of experts: {first_few(refused)}",
            hint="send the merged model with MegatronAdapter",
            side="trainer",
        )
    wrappers = adapted_layers(chunk.model)
    weights = dict(chunk.stream())
    ways = chunk.place.tp_size
    turn = chunk.place.pp_rank * ways + chunk.place.tp_rank
    for name, one in chunk.adapted.items():
        weight = weights[f"{name}.weight"]
        match = chunk.match(f"{name}.weight", weight)
        if match.rule.rearranges:
            raise ManifestMismatch(
                f"the checkpoint orders the weight of {name} differently, and an adapter's A and B have no such order",
                hint="send the merged model with MegatronAdapter",
                side="trainer",
            )
        rows = one.b[0] * ways
        all_rows = [Run(0, 0, rows)]
        if chunk.partition_dim(f"{name}.weight", match, weight) != 1:  # else rules count the weight's columns
            all_rows = chunk.runs(f"{name}.weight", match, rows)
        columns = one.a[1] * (ways if one.input_is_parallel else 1)
        adapter = wrappers[name].adapter
        for part, target in enumerate(chunk.names(match)):
            layer, own = target.removesuffix(".weight"), _rows_of(part, all_rows)
            shape_a, shape_b = (one.rank, columns), (sum(run.rows for run in own), one.rank)
            name_a, name_b = saved_name(layer, "lora_A"), saved_name(layer, "lora_B")
            dtype_a, dtype_b = dtype_name(adapter.linear_in.weight.dtype), dtype_name(adapter.linear_out.weight.dtype)
            key = number, name
            yield HeldBox(name_a, dtype_a, shape_a, (0, 0), shape_a, turn), _Factor(key, None, one.scaling)
            yield HeldBox(name_b, dtype_b, shape_b, (0, 0), shape_b, turn), _Factor(key, own, one.scaling)


def _rows_of(part: int, runs: Sequence[Run]) -> tuple[Run, ...]:
    """The rows of the parameter that belong to checkpoint tensor `part`, in that tensor's order."""
    found = []
    row = 0
    for run in runs:
        if run.part == part:
            found.append((run.start, Run(part, row, run.rows)))
        row += run.rows
    return tuple(run for _, run in sorted(found))
