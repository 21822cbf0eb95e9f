"""LoRA adapters of Megatron-Bridge, merged into what is sent while it is sent; the model itself isn't touched.

Megatron-Bridge puts a module around a linear layer: `to_wrap` is the layer, `adapter` has `linear_in` (A: rank, columns)
and `linear_out` (B: rows, rank). The merged weight is `W + alpha / rank * (B @ A)`, computed in float32 (float64 where W
is), for the rows and columns that this rank sends. Tensor parallelism divides A by rank, or by columns where it divides W
so, and B by rows: each rank gathers both from its tensor-parallel peers, once per update and before the first slice. They
are small. Experts that share a layer (`TEGroupedMLP`) share its adapter.

Megatron-Bridge is not imported: its modules are known by the names of their classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.exchange import exchange_tensors
from trainer_adapters.lora_product import add_product

__all__ = ["Adapted", "Factors", "Layer", "base_name", "look_for_adapters", "make_factors"]

KNOWN = {"LoRALinear", "TEFusedLoRALinear"}
HINT = "change it as it says, or send what Megatron-Bridge exports, which merges too (ExportAdapter)"

Layer = tuple[int, str]
"""Chunk of the model, and the layer's name in it, without wrappers."""


@dataclass(frozen=True, slots=True)
class Adapted:
    """What there is to know about one adapter. `by_columns`: tensor parallelism divides A by columns, not by rank."""

    scaling: float
    rank: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    by_columns: bool
    by_expert: bool


def base_name(name: str) -> str | None:
    """What a parameter is called without the wrapper around its layer; None for one of the adapter's own."""
    return None if ".adapter.linear_" in name else name.replace(".to_wrap.", ".")


def look_for_adapters(model: torch.nn.Module) -> dict[str, Adapted]:
    """The adapters of a model, by the name of the layer that they adapt; no values, no communication.

    Raises `ManifestMismatch`, which names them, for those that can't be merged: of a kind without a rule here, or
    disabled just now.
    """
    found: dict[str, Adapted] = {}
    problems = []
    for raw_name, module in model.named_modules():
        if not hasattr(module, "to_wrap"):
            continue
        name, part, adapter = raw_name.replace(".to_wrap.", "."), type(module).__name__, module.adapter
        kind = type(adapter).__name__
        if part not in KNOWN or kind != "ParallelLinearAdapter" or type(adapter.activation).__name__ != "Identity":
            problems.append(f"{name} has Megatron-Bridge's {part} with a {kind}, which has no rule here")
        elif not getattr(module, "_adapter_enabled", True):
            problems.append(f"{name} has an adapter that is disabled just now: update while it is enabled")
        else:
            found[name] = Adapted(
                scaling=adapter.alpha / adapter.dim,
                rank=adapter.dim,
                a=tuple(adapter.linear_in.weight.shape),
                b=tuple(adapter.linear_out.weight.shape),
                by_columns=bool(adapter.input_is_parallel),
                by_expert=bool(adapter.is_expert),
            )
    if problems:
        raise ManifestMismatch(
            f"adapters that can't be merged into what is sent: {first_few(problems)}", hint=HINT, side="trainer"
        )
    return found


def make_factors(models: Sequence[Any], adapted: Sequence[Mapping[str, Adapted]]) -> Factors | None:
    """Of a model's chunks and their adapters; None where there are none."""
    from megatron.core import parallel_state as mpu

    layers = {(i, name): one for i, own in enumerate(adapted) for name, one in own.items()}
    if not layers:
        return None
    groups = getattr(models[0], "pg_collection", None)
    dense = getattr(groups, "tp", None) or mpu.get_tensor_model_parallel_group()
    by_expert = getattr(groups, "expt_tp", None) or mpu.get_expert_tensor_parallel_group()
    return Factors(models, layers, (dense, by_expert))


class Factors:
    """A and B of all adapters of this rank, whole. `groups` are those that tensor parallelism divides layers over, and
    layers of experts.

    Groups of its own, so that gathering couldn't get between the collectives of a training, are not to be had: torch
    names a group that only some ranks make by how many others each of these is in, and in Megatron they differ.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        adapted: Mapping[Layer, Adapted],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        self._models = models
        self._adapted = adapted
        self._groups = dict(zip((False, True), groups, strict=True))
        self._whole: dict[Layer, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def are_divided(self) -> bool:
        """Whether gathering talks to other ranks."""
        return any(dist.get_world_size(self._groups[one.by_expert]) > 1 for one in self._adapted.values())

    def gather(self) -> None:
        """Takes A and B as they are now. Collective over the tensor-parallel ranks. Raises `ManifestMismatch`, on all of
        them, where their adapters differ."""
        modules = [
            {name.replace(".to_wrap.", "."): part for name, part in model.named_modules() if hasattr(part, "to_wrap")}
            for model in self._models
        ]
        self._whole = {}
        for by_expert, group in self._groups.items():
            layers = [layer for layer, one in self._adapted.items() if one.by_expert == by_expert]
            local = [
                tensor.detach()
                for chunk, name in layers
                for tensor in (
                    modules[chunk][name].adapter.linear_in.weight,
                    modules[chunk][name].adapter.linear_out.weight,
                )
            ]
            everybody = _gathered(local, [self._adapted[layer] for layer in layers], group)
            for i, layer in enumerate(layers):
                a = torch.cat([one[2 * i] for one in everybody], dim=1 if self._adapted[layer].by_columns else 0)
                self._whole[layer] = a, torch.cat([one[2 * i + 1] for one in everybody])

    def whole(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """A (rank, columns) and B (rows, rank) of a layer, as they were when they were gathered last."""
        if layer not in self._whole:
            self.gather()
        return self._whole[layer]

    def merged(self, layer: Layer, values: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
        """`values` of a layer's weight, which begin at `starts` in the whole weight, with the adapter's product added: in
        float32, or float64. Raises `ManifestMismatch` for an adapter that doesn't fit."""
        whole = self.whole(layer)
        total = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True)
        a, b = (factor.to(total) for factor in whole)
        one = self._adapted[layer]
        ends = tuple(start + size for start, size in zip(starts, values.shape, strict=True))
        if a.shape[0] != one.rank or b.shape[1] != one.rank or ends[0] > b.shape[0] or ends[1] > a.shape[1]:
            raise ManifestMismatch(
                f"{layer[1]}: an adapter of rank {one.rank} with A {list(a.shape)} and B {list(b.shape)} over all ranks "
                f"doesn't fit rows and columns up to {list(ends)}",
                hint=HINT,
                side="trainer",
            )
        add_product(total, starts, a, b, one.scaling)
        return total


def _gathered(local: list[torch.Tensor], adapted: list[Adapted], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Of each rank of the group its tensors, which have the shapes and dtypes of `local`."""
    if not local or dist.get_world_size(group) == 1:
        return [local]
    said = repr([(one, str(tensor.dtype)) for one, tensor in zip(adapted, local[::2], strict=True)])
    head = torch.frombuffer(bytearray(hashlib.sha256(said.encode()).digest()), dtype=torch.uint8)
    head = head.to(local[0].device)
    everybody = exchange_tensors(torch.cat([head, *(_bytes(tensor) for tensor in local)]), group)
    if any(not torch.equal(one[: len(head)], head) for one in everybody):
        raise ManifestMismatch(
            "tensor-parallel ranks have different adapters",
            hint="make the same adapters on all of them",
            side="trainer",
        )
    return [list(_cut(one[len(head) :], local)) for one in everybody]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _cut(raw: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(raw, [tensor.nbytes for tensor in like])
    return [part.clone().view(one.dtype).view(one.shape) for part, one in zip(parts, like, strict=True)]
