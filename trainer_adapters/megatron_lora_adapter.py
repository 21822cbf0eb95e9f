"""The LoRA adapter of a Megatron-Bridge model by itself, for the engine's own LoRA slots: the base model doesn't travel.

Megatron has one adapter where the checkpoint has several layers (queries, keys and values; gate and up). Their A is the
same; the rows of B go where the rows of the weight go, by the architecture's table. Names are those of PEFT's checkpoints,
and B travels multiplied by the scaling, as from `lora_adapter`. A and B are gathered over tensor-parallel ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Box, Manifest
from inference_plugin.wire.tensors import dtype_name, torch_dtype
from trainer_adapters.inventory import Inventory, Item, Share, divide, exchange_all, merge
from trainer_adapters.lora_adapter import PREFIX
from trainer_adapters.megatron import Chunk, chunks_of
from trainer_adapters.megatron_lora import Layer, look_for_adapters, make_factors
from trainer_adapters.megatron_rules import PADDING, Architecture, Facts, Run
from trainer_adapters.plan import Rules
from trainer_adapters.source import DtypeRules, LocalSlice, NameFilter, WeightSource

__all__ = ["MegatronLoRAAdapter"]


@dataclass(frozen=True, slots=True)
class _Factor:
    """A or B of one layer of the checkpoint: of which of Megatron's layers, and for B, which rows of it they are."""

    layer: Layer
    rows: tuple[Run, ...] | None
    scaling: float


class MegatronLoRAAdapter(WeightSource):
    """A source for the adapters that Megatron-Bridge's `LoRA` put into a model, without the model.

    Send it as a group that is named `lora.` and the engine's name of the adapter: `SyncManager(group="lora.policy")`.
    `model`, `hf_config`, `architecture` and `process_group` are `MegatronAdapter`'s, and as there every rank that holds
    part of the model makes one, at the same time. `dtype_rules` see the names of PEFT's checkpoints.

    Raises `ManifestMismatch`, on all ranks and naming them, for what slots can't hold or the table doesn't know: adapters
    of experts, of kinds other than `LoRA`, a model without any. `manifest()` and `slices()` raise it where adapters came,
    went or were scaled since: make a new one then, on all ranks.
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
        self._chunks: list[Chunk] = []
        self._held: list[_Factor] = []

        def look() -> Inventory:
            self._chunks = chunks_of(model, hf_config, architecture)
            items: list[Item] = []
            for number, chunk in enumerate(self._chunks):
                for item, factor in _factors(number, chunk):
                    items.append(item)
                    self._held.append(factor)
            return Inventory(items)

        everybody = exchange_all(look, process_group)
        if not any(inventory.items for inventory in everybody):
            raise ManifestMismatch("no layer has an adapter of Megatron-Bridge", side="trainer")
        self._manifest = merge(everybody, tied={}, rules=DtypeRules(dtype_rules), names=NameFilter((), ()))
        rank = dist.get_rank(process_group) if len(everybody) > 1 else 0
        self._sent, self._left = divide(self._manifest, everybody, rank)
        self._gathered = make_factors(
            [chunk.model for chunk in self._chunks], [chunk.adapted for chunk in self._chunks]
        )

    def manifest(self) -> Manifest:
        if any(look_for_adapters(chunk.model) != chunk.adapted for chunk in self._chunks):
            raise ManifestMismatch(
                "LoRA adapters came, went or were scaled after this source was made",
                hint="make a new MegatronLoRAAdapter, on all ranks",
                side="trainer",
            )
        return self._manifest

    def slices(self) -> Iterator[LocalSlice]:
        self.manifest()
        if self._gathered is not None:
            self._gathered.gather()
        return (self._slice(share) for share in self._sent)

    def copies(self) -> Iterator[LocalSlice]:
        return (self._slice(share) for share in self._left)

    def claims(self) -> tuple[Box, ...]:
        return tuple(share.box for share in self._sent)

    def made_together(self) -> frozenset[int]:
        divided = self._gathered is not None and self._gathered.are_divided
        return frozenset(range(len(self._manifest.tensors))) if divided else frozenset()

    def _slice(self, share: Share) -> LocalSlice:
        assert self._gathered is not None
        factor = self._held[share.item]
        a, b = self._gathered.whole(factor.layer)
        if factor.rows is None:
            values = a
        else:
            values = torch.cat([b[run.start : run.start + run.rows] for run in factor.rows])
            values = values.to(torch.promote_types(b.dtype, torch.float32)) * factor.scaling
        for dim, (start, size) in enumerate(zip(share.box.offsets, share.box.sizes, strict=True)):
            values = values.narrow(dim, start, size)
        return LocalSlice(share.box, values.to(torch_dtype(self._manifest.tensors[share.box.tensor].dtype)))


def _factors(number: int, chunk: Chunk) -> Iterator[tuple[Item, _Factor]]:
    """What this rank's chunk has: each A and B whole, since they are gathered before they are sent."""
    modules = {name.replace(".to_wrap.", "."): part for name, part in chunk.model.named_modules()}
    refused = [name for name, one in chunk.adapted.items() if one.by_expert]
    if refused:
        raise ManifestMismatch(
            f"an engine's LoRA slots can't hold the adapters of experts: {first_few(refused)}",
            hint="send the merged model with MegatronAdapter",
            side="trainer",
        )
    ways = chunk.place.tp_size
    turn = chunk.place.pp_rank * ways + chunk.place.tp_rank
    for name, one in chunk.adapted.items():
        adapter = modules[name].adapter
        rank, columns, rows = one.rank, one.a[1] * (ways if one.by_columns else 1), one.b[0] * ways
        match = chunk.match(f"{name}.weight", adapter.linear_out.weight)
        if match.rule is None:
            continue
        axis = match.rule.axis(one.b, Facts(chunk.model.config, chunk.vocab_size, ways))
        runs = list(match.rule.runs(rows, Facts(chunk.model.config, chunk.vocab_size, ways))) if axis != 1 else []
        if axis != 1 and sum(run.rows for run in runs) != rows:
            raise ManifestMismatch(
                f"{name} has an adapter of {rows} rows, its rule {match.rule} accounts for another number",
                hint="send the merged model with MegatronAdapter",
                side="trainer",
            )
        for part, target in enumerate(chunk.names(match)):
            layer = PREFIX + target.removesuffix("weight")
            own = _rows_of(part, runs) if axis != 1 else (Run(0, 0, rows),)
            height = sum(run.rows for run in own)
            for word, weight, shape, taken in (
                ("lora_A", adapter.linear_in.weight, (rank, columns), None),
                ("lora_B", adapter.linear_out.weight, (height, rank), own),
            ):
                item = Item(f"{layer}{word}.weight", dtype_name(weight.dtype), shape, (0, 0), shape, turn)
                yield item, _Factor((number, name), taken, one.scaling)


def _rows_of(part: int, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Which rows of the parameter are those of the checkpoint tensor at `part`, in its order."""
    found = []
    row = 0
    for run in runs:
        if run.part == part != PADDING:
            found.append((run.start, Run(part, row, run.rows)))
        row += run.rows
    return tuple(run for _, run in sorted(found))
