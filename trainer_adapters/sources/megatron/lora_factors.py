"""LoRA adapters of Megatron-Bridge: finds them, gathers their factors A and B, and merges these.

Megatron-Bridge puts a module around a linear layer: `to_wrap` is the layer, `adapter` has `linear_in` (A: rank, columns)
and `linear_out` (B: rows, rank). The merged weight is `W + alpha / rank * (B @ A)`, computed in float32 (float64 if W is) for
the rows and columns that this rank sends. Tensor parallelism divides A by rank (by columns if it divides W by columns) and B by
rows: each rank gathers both, which are small, from its tensor-parallel peers, once per update and before the first slice.
Experts that share a layer (`TEGroupedMLP`) share its adapter.

Megatron-Bridge is not imported: its modules are recognised by the names of their classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.sources.exchange import exchange_bytes, exchange_tensors, in_buckets
from trainer_adapters.sources.lora.product import add_product, exact_copy

__all__ = ["BridgeAdapter", "BridgeFactors", "LayerKey", "adapted_layers", "adapters_of", "base_name", "factors_of"]

KNOWN = {"LoRALinear", "TEFusedLoRALinear"}
HINT = "change these adapters, or send what Megatron-Bridge exports, which merges them too (ExportAdapter)"

LayerKey = tuple[int, str]
"""An adapted layer of this rank: the chunk of the model, and the layer's name in it, without wrappers."""


@dataclass(frozen=True, slots=True)
class BridgeAdapter:
    """One adapter. `a`, `b`: shapes of this rank's parts of A and B. `input_is_parallel`: tensor parallelism divides A by
    columns, else by rank."""

    scaling: float
    rank: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    input_is_parallel: bool
    by_expert: bool


def base_name(name: str) -> str | None:
    """The parameter's name without the wrapper around its layer; None for a parameter of the adapter itself."""
    return None if ".adapter.linear_" in name else name.replace(".to_wrap.", ".")


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Megatron-Bridge's wrappers, by the name of the layer inside."""
    return {name.replace(".to_wrap.", "."): part for name, part in model.named_modules() if hasattr(part, "to_wrap")}


def adapters_of(model: torch.nn.Module) -> dict[str, BridgeAdapter]:
    """The adapters of a model, by the name of the layer that they adapt. Reads no values and doesn't communicate.

    Raises `ManifestMismatch`, which names them, for adapters that can't be merged: of a kind without a rule here, or
    disabled at the moment.
    """
    found: dict[str, BridgeAdapter] = {}
    problems = []
    for name, module in adapted_layers(model).items():
        part, adapter = type(module).__name__, module.adapter
        kind = type(adapter).__name__
        if part not in KNOWN or kind != "ParallelLinearAdapter" or type(adapter.activation).__name__ != "Identity":
            problems.append(f"{name} has Megatron-Bridge's {part} with a {kind}, which has no rule here")
        elif not getattr(module, "_adapter_enabled", True):
            problems.append(f"{name} has an adapter that is disabled at the moment: update while it is enabled")
        else:
            found[name] = BridgeAdapter(
                scaling=adapter.alpha / adapter.dim,
                rank=adapter.dim,
                a=tuple(adapter.linear_in.weight.shape),
                b=tuple(adapter.linear_out.weight.shape),
                input_is_parallel=bool(adapter.input_is_parallel),
                by_expert=bool(adapter.is_expert),
            )
    if problems:
        raise ManifestMismatch(
            f"these adapters can't be merged into the weights: {first_few(problems)}", hint=HINT, side="trainer"
        )
    return found


def factors_of(models: Sequence[Any], adapted: Sequence[Mapping[str, BridgeAdapter]]) -> BridgeFactors | None:
    """The factors of all adapters of a model's chunks; None if there are no adapters."""
    from megatron.core import parallel_state as mpu

    layers = {(i, name): one for i, own in enumerate(adapted) for name, one in own.items()}
    if not layers:
        return None
    groups = getattr(models[0], "pg_collection", None)
    dense = getattr(groups, "tp", None) or mpu.get_tensor_model_parallel_group()
    by_expert = getattr(groups, "expt_tp", None) or mpu.get_expert_tensor_parallel_group()
    return BridgeFactors(models, layers, (dense, by_expert))


class BridgeFactors:
    """A and B of all adapters of this rank, whole. `groups`: the tensor-parallel groups of layers and of layers of experts.

    It uses Megatron's groups, not groups of its own, although gathering may then mix with the collectives of a running training:
    torch names a group that only some ranks make after the number of groups that each of them is in, which differs in Megatron.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        adapted: Mapping[LayerKey, BridgeAdapter],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ) -> None:
        self._models = models
        self._adapted = adapted
        self._groups = dict(zip((False, True), groups, strict=True))
        self._whole: dict[LayerKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self.config = Config.from_environment()

    @property
    def are_divided(self) -> bool:
        """Whether gathering communicates with other ranks."""
        return any(dist.get_world_size(self._groups[one.by_expert]) > 1 for one in self._adapted.values())

    def gather(self) -> None:
        """Gathers the current A and B. Collective over the tensor-parallel ranks. Raises `ManifestMismatch` on all of them if
        their adapters differ."""
        wrappers = [adapted_layers(model) for model in self._models]
        self._whole = {}
        for by_expert, group in self._groups.items():
            layers = [layer for layer, one in self._adapted.items() if one.by_expert == by_expert]
            factors = {
                layer: [adapter.linear_in.weight.detach(), adapter.linear_out.weight.detach()]
                for layer in layers
                for adapter in (wrappers[layer[0]][layer[1]].adapter,)
            }
            if dist.get_world_size(group) > 1:
                _check_alike(self._adapted, factors, self.config.bucket_bytes, group)
            for some in in_buckets(factors.items(), _nbytes, self.config.bucket_bytes):
                everybody = _gathered([tensor for _, own in some for tensor in own], group)
                for i, (layer, _) in enumerate(some):
                    a = torch.cat(
                        [one[2 * i] for one in everybody], dim=1 if self._adapted[layer].input_is_parallel else 0
                    )
                    self._whole[layer] = a, torch.cat([one[2 * i + 1] for one in everybody])

    def whole(self, layer: LayerKey) -> tuple[torch.Tensor, torch.Tensor]:
        """A (rank, columns) and B (rows, rank) of a layer, as last gathered."""
        if layer not in self._whole:
            self.gather()
        return self._whole[layer]

    def merged(self, layer: LayerKey, values: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
        """`values` of a layer's weight, which begin at `starts` of the whole weight, plus the adapter's product: in float32, or
        float64 if `values` are. Raises `ManifestMismatch` for an adapter that doesn't fit."""
        whole = self.whole(layer)
        total = exact_copy(values)
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


def _check_alike(
    adapted: Mapping[LayerKey, BridgeAdapter],
    factors: Mapping[LayerKey, list[torch.Tensor]],
    bucket_bytes: int,
    group: dist.ProcessGroup,
) -> None:
    """Raises `ManifestMismatch`, on all ranks of the group, if their adapters or settings differ: they would gather in different
    buckets."""
    said = repr([bucket_bytes, *((adapted[layer], str(own[0].dtype)) for layer, own in factors.items())])
    everybody = exchange_bytes(hashlib.sha256(said.encode()).digest(), group)
    if any(one != everybody[0] for one in everybody):
        raise ManifestMismatch(
            "tensor-parallel ranks have different adapters, or a different bucket_bytes",
            hint="make the same adapters on all of them, and give all the same configuration",
            side="trainer",
        )


def _nbytes(factors_of_layer: tuple[LayerKey, list[torch.Tensor]]) -> int:
    return sum(tensor.nbytes for tensor in factors_of_layer[1])


def _gathered(local: list[torch.Tensor], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """The tensors of each rank of the group, which have the shapes and dtypes of `local`."""
    if dist.get_world_size(group) == 1:
        return [local]
    everybody = exchange_tensors(torch.cat([_bytes(tensor) for tensor in local]), group)
    return [list(_cut(one, local)) for one in everybody]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _cut(raw: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(raw, [tensor.nbytes for tensor in like])
    return [part.clone().view(one.dtype).view(one.shape) for part, one in zip(parts, like, strict=True)]
