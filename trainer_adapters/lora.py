"""LoRA adapters of PEFT, merged into what is sent while it is sent; the model itself isn't touched.

The manifest is the plain base model's. A slice of an adapted weight is computed from this rank's shard of the base, which
stays where it is, and from the adapters' A and B, which are small and gathered once per update (collective). Product and
sum are in float32 (float64 where the base is), then cast once to the manifest's dtype.

A product is computed tile by tile of a grid that is the whole weight's, whatever the shard: so its bits don't depend on
how the model is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Box, Manifest
from inference_plugin.wire.tensors import torch_dtype
from trainer_adapters.dtensor import DTensorAdapter
from trainer_adapters.experts import checkpoint_layout
from trainer_adapters.gather import gathered
from trainer_adapters.lora_layers import AddedBias, AddedProduct, Addition, PeftLook, look_at, look_for_layers
from trainer_adapters.lora_product import add_product
from trainer_adapters.module import Buffers, ModuleAdapter
from trainer_adapters.plan import Dims, Region, Rename, Rules
from trainer_adapters.source import LocalSlice, WeightSource

__all__ = ["MergedLoRAAdapter", "check_kind", "source_of"]


@dataclass(frozen=True)
class _Merged:
    """What is added to one tensor of the manifest, which lies at `region` of the trainer's weight."""

    additions: tuple[Addition, ...]
    region: Region


class MergedLoRAAdapter(WeightSource):
    """A source for a PEFT model with LoRA adapters, sharded by `fully_shard`, of DTensors, or unsharded: the base model
    with its active adapters merged in.

    The names are the base model's, as if PEFT had never been there. Several active adapters are added in their order.
    `modules_to_save` replace the originals; biases that PEFT trains in place (`bias="lora_only"`, `"all"`) are sent as
    they are, an adapter's own (`lora_bias`) are added. Adapted embeddings, transposed weights (`fan_in_fan_out`), stacked
    experts (`target_parameters`) and DoRA of linear layers are merged; DoRA where shards hold whole rows.

    Make it on every rank, in the same order as other process groups: it makes one of its own, so that gathering doesn't
    get between the collectives of a training that goes on. The options are those of `DTensorAdapter` (`ModuleAdapter` for
    an unsharded model); patterns and `rename` see the base model's names.

    Raises TypeError for a model without LoRA layers or wrapped by FSDP1. `manifest()` raises `ManifestMismatch`, which
    names them, for adapters that are merged in place or disabled just now, for variants and layers without a rule, for
    tied weights that the adapters make two of, and for what the sharding's own adapter refuses.
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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._factors = _Factors(model, process_group)
        self._model = model
        self._ranks = process_group
        self._rename = rename
        self._options: dict[str, Any] = {
            "dtype_rules": dtype_rules,
            "include_buffers": include_buffers,
            "include": include,
            "exclude": exclude,
        }
        self._look = PeftLook()
        self._seen: set[str] = set()
        self._base: WeightSource | None = None
        self._manifest = Manifest(())
        self._merged: dict[int, _Merged] = {}

    def manifest(self) -> Manifest:
        look = look_at(self._model)
        if look.inside != self._look.inside or self._base is None:  # else the base would go on with the old names
            self._base = source_of(self._model, self._final_name, self._ranks, **self._options)
        self._look = look
        self._manifest = self._base.manifest()
        self._check_names()
        self._merged = self._places()
        self._check_magnitudes()
        self._factors.choose(look.factors)
        return self._manifest

    def slices(self) -> Iterator[LocalSlice]:
        return self._merging(self._ready().slices(), anew=True)

    def copies(self) -> Iterator[LocalSlice]:
        return self._merging(self._ready().copies(), anew=False)

    def claims(self) -> tuple[Box, ...] | None:
        return self._ready().claims()

    def made_together(self) -> frozenset[int]:
        self._ready()
        return frozenset(self._merged) if self._factors.sharded else frozenset()

    def _ready(self) -> WeightSource:
        """The base model's source. Raises `ManifestMismatch` where adapters changed since the manifest was made."""
        if self._base is None:
            self.manifest()
        elif look_at(self._model) != self._look:
            raise ManifestMismatch(
                "adapters were switched, scaled or changed after the manifest was made",
                hint="start the update again: each one makes a manifest of its own",
                side="trainer",
            )
        assert self._base is not None
        return self._base

    def _merging(self, slices: Iterator[LocalSlice], *, anew: bool) -> Iterator[LocalSlice]:
        factors = self._factors.whole(anew=anew)
        for item in slices:
            if (merged := self._merged.get(item.box.tensor)) is None:
                yield item
                continue
            dtype = torch_dtype(self._manifest.tensors[item.box.tensor].dtype)
            with torch.no_grad():
                value = _merge(merged, item, factors).to(dtype)
            yield LocalSlice(item.box, value)

    def _final_name(self, name: str) -> str | None:
        """What the base model's source calls a tensor of the PEFT model; None for one that doesn't travel."""
        if (base := self._look.base_name(name)) is None:
            return None
        self._seen.add(base)
        return self._renamed(base)

    def _renamed(self, base: str) -> str | None:
        if self._rename is None:
            return base
        return self._rename.get(base, base) if isinstance(self._rename, Mapping) else self._rename(base)

    def _check_names(self) -> None:
        """What the base model's source can't tell, because it sees PEFT's names."""
        if isinstance(self._rename, Mapping) and (unused := sorted(set(self._rename) - self._seen)):
            raise ManifestMismatch(
                f"rename has names that the base model doesn't: {first_few(unused)}",
                hint="names are given without what PEFT adds to them",
                side="trainer",
            )
        if unseen := sorted(set(self._look.additions) - self._seen):
            raise ManifestMismatch(
                f"adapted weights that the model's tensors don't include: {first_few(unseen)}", side="trainer"
            )
        apart = [
            f"{alias} and {source}"
            for alias, source in self._look.ties.items()
            if self._renamed(alias) in self._manifest.index and self._renamed(source) in self._manifest.index
        ]
        if apart:
            raise ManifestMismatch(
                f"declared tied, but the adapters make two of them: {first_few(apart)}",
                hint="leave them out of modules_to_save, or train and serve with tie_word_embeddings=False",
                side="trainer",
            )

    def _places(self) -> dict[int, _Merged]:
        """What is added to which tensor of the manifest."""
        layout = checkpoint_layout(self._model)
        spoken = set(self._manifest.tied.values())
        places: dict[int, _Merged] = {}
        tied: list[str] = []
        for base, additions in self._look.additions.items():
            if (name := self._renamed(base)) is None:
                continue
            shape = self._look.shapes[base]
            regions = layout(name, shape) if layout else (Region(name, (0,) * len(shape), shape),)
            for region in regions:
                if region.name in self._manifest.tied or region.name in spoken:
                    tied.append(region.name)
                elif (index := self._manifest.index.get(region.name)) is not None:
                    places[index] = _Merged(additions, region)
        if tied:
            raise ManifestMismatch(
                f"tied weights of which one place is adapted: {first_few(tied)}",
                hint="the model computes with two weights there, an engine has one: don't target it, or train and serve "
                "with tie_word_embeddings=False",
                side="trainer",
            )
        return places

    def _check_magnitudes(self) -> None:
        """DoRA scales each row by its norm: a rank must have whole rows."""
        cut = [
            self._manifest.describe(box)
            for box in (self._base.claims() if self._base is not None else None) or ()
            if (merged := self._merged.get(box.tensor)) is not None
            and any(isinstance(a, AddedProduct) and a.magnitude for a in merged.additions)
            and box.sizes[-1] != self._manifest.tensors[box.tensor].shape[-1]
        ]
        if cut:
            raise ManifestMismatch(
                f"weights with DoRA whose rows are divided between ranks: {first_few(cut)}",
                hint="shard them by rows, or send an unsharded copy after merge_and_unload() with ModuleAdapter",
                side="trainer",
            )


def check_kind(model: torch.nn.Module) -> None:
    """Raises TypeError for a model without LoRA layers, or wrapped by FSDP1."""
    if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
        raise TypeError("LoRA under FullyShardedDataParallel has no rule here: shard with fully_shard")
    look_for_layers(model)


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def source_of(
    model: torch.nn.Module, rename: Rename, process_group: dist.ProcessGroup | None, **options: Any
) -> WeightSource:
    """A source of the model as it is sharded, under the names that `rename` gives."""
    if is_sharded(model):
        return DTensorAdapter(model, rename=rename, process_group=process_group, **options)
    return ModuleAdapter(model, rename=rename, **options)


class _Factors:
    """The adapters' own tensors: whole, on every rank."""

    def __init__(self, model: torch.nn.Module, process_group: dist.ProcessGroup | None) -> None:
        check_kind(model)
        self.sharded = is_sharded(model)
        self._model = model
        self._ranks = process_group
        self._group: dist.ProcessGroup | None = None
        if self.sharded:
            self._group = dist.new_group(
                dist.get_process_group_ranks(process_group or dist.group.WORLD),
                backend="gloo",
                timeout=timedelta(seconds=Config.from_environment().timeout_s),  # a lost rank must not hold the others
                use_local_synchronization=True,
            )
        self._chosen: frozenset[str] = frozenset()
        self._names: tuple[str, ...] = ()
        self._source: WeightSource | None = None
        self._values: dict[str, torch.Tensor] | None = None

    def choose(self, names: frozenset[str]) -> None:
        """Those that are wanted, by the model's own names."""
        if self._source is not None and names == self._chosen:
            return
        self._chosen, self._values = names, None
        self._names = tuple(sorted(names))
        # Numbers for names: no rule for the checkpoint's names takes them for the base model's.
        numbers = {name: str(i) for i, name in enumerate(self._names)}
        if self.sharded:
            self._source = source_of(self._model, numbers.get, self._ranks, include_buffers="none")
        else:
            options: dict[str, Any] = {"include_buffers": "none", "rank": 0, "world_size": 1}
            self._source = ModuleAdapter(self._model, rename=numbers.get, **options)

    def whole(self, *, anew: bool) -> dict[str, torch.Tensor]:
        """By name; gathered again with `anew`, which is then collective."""
        if self._values is None or anew:
            assert self._source is not None
            source = self._source
            manifest = source.manifest()
            if self.sharded:
                found = {name: tensor.clone() for name, tensor in gathered(source, process_group=self._group)}
            else:
                found = {manifest.tensors[item.box.tensor].name: item.tensor for item in source.slices()}
            found |= {alias: found[name] for alias, name in manifest.tied.items()}
            self._values = {self._names[int(number)]: tensor for number, tensor in found.items()}
        return self._values


def _merge(merged: _Merged, item: LocalSlice, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The slice with everything added, in the dtype of the computation."""
    local = item.tensor
    total = local.to(torch.float64 if local.dtype == torch.float64 else torch.float32, copy=True)
    region = merged.region
    lead = (0,) * region.dropped
    starts = tuple(first + offset for first, offset in zip(region.offsets, lead + item.box.offsets, strict=True))
    view = total.view((1,) * region.dropped + item.box.sizes) if region.dropped else total

    def factor(name: str) -> torch.Tensor:
        return factors[name].detach().to(total)

    for addition in merged.additions:
        if isinstance(addition, AddedBias):
            total += factor(addition.bias)[starts[0] : starts[0] + total.shape[0]] * addition.scaling
            continue
        a, b = factor(addition.a), factor(addition.b)
        rank = a.shape[0] // addition.experts
        if view.dim() == 2:
            _add(view, starts, addition, a, b)
        for i in range(view.shape[0] if view.dim() == 3 else 0):
            expert = starts[0] + i
            own_a = a[expert * rank : (expert + 1) * rank]
            _add(view[i], starts[1:], addition, own_a, b[:, expert :: addition.experts])
        if addition.magnitude:
            size = factor(addition.magnitude)[starts[0] : starts[0] + total.shape[0]]
            total *= (size / torch.linalg.norm(total, dim=1)).view(-1, 1)
    return total


def _add(total: torch.Tensor, starts: Dims, addition: AddedProduct, a: torch.Tensor, b: torch.Tensor) -> None:
    if addition.transposed:
        total, starts = total.t(), starts[::-1]
    add_product(total, starts, a, b, addition.scaling)
