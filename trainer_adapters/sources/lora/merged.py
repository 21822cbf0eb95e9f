"""Merges PEFT's LoRA adapters into the slices as they are sent, without changing the model.

The manifest is that of the plain base model. A slice of an adapted weight is computed from this rank's shard of the base,
which stays in place, and from the adapters' A and B, which are small and gathered once per update (collective). Product and
sum are in float32 (float64 if the base is), then cast once to the manifest's dtype.

A product is computed tile by tile, on a grid of the whole weight that is the same for any shard: so its bits don't depend on
the sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import torch_dtype
from trainer_adapters.sources.base import LocalSlice, WeightSource, WrappingSource
from trainer_adapters.sources.fsdp import FSDPAdapter
from trainer_adapters.sources.lora.factors import PeftFactors, source_of
from trainer_adapters.sources.lora.peft_model import AddedBias, AddedProduct, Addition, PeftStructure, structure_of
from trainer_adapters.sources.lora.product import add_product, exact_copy
from trainer_adapters.sources.plan import Dims, Rename, Target, checked_rename, new_name
from trainer_adapters.sources.scan import ScannedSource
from trainer_adapters.sources.selection import DtypeRules, NameFilter, Rules
from trainer_adapters.sources.streams import Buffers

__all__ = ["MergedLoRAAdapter"]


@dataclass(frozen=True)
class _AdaptedTensor:
    """A tensor of the manifest, or a part of one, that adapters change: the additions, and its place in the trainer's weight."""

    additions: tuple[Addition, ...]
    target: Target

    def has(self, box: Box) -> bool:
        """Whether a box of the manifest lies in this part."""
        target = self.target
        return all(
            at <= first < at + target.sizes[dim]
            for first, at, dim in zip(box.offsets, target.at, target.dims, strict=True)
        )


class MergedLoRAAdapter(WrappingSource):
    """A source for a PEFT model with LoRA adapters, sharded by `fully_shard`, of DTensors, under DeepSpeed, or unsharded: the
    base model with its active adapters merged in.

    The names are the base model's, without PEFT's additions. Several active adapters are added in their order.
    `modules_to_save` replace the originals. Biases that PEFT trains in place (`bias="lora_only"`, `"all"`) are sent unchanged;
    an adapter's own biases (`lora_bias`) are added. Adapted embeddings, transposed weights (`fan_in_fan_out`), stacked experts
    (`target_parameters`) and DoRA of linear layers are merged; DoRA only if shards hold whole rows.

    Make it on every rank, in the same order as other process groups: it makes a process group of its own, so that gathering
    doesn't mix with the collectives of a running training. The options are those of `DTensorAdapter` (`DeepSpeedAdapter`,
    `ModuleAdapter`); patterns and `rename` apply to the base model's names.

    Raises `ArgumentError` for a model without LoRA layers or wrapped by FSDP1. `manifest()` raises `ManifestMismatch`, which
    names them, for adapters that are merged in place or disabled at the moment, for variants and layers without a rule, for
    tied weights that the adapters make different, and for tensors that the adapter of this sharding refuses.
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
        self.factors = PeftFactors(model, process_group)
        self._model = model
        self._ranks = process_group
        self._rename = checked_rename(rename)
        names = NameFilter(include, exclude)
        self._options: dict[str, Any] = {
            "dtype_rules": DtypeRules(dtype_rules),
            "include_buffers": include_buffers,
            "include": names.include,
            "exclude": names.exclude,
        }
        self._structure = PeftStructure()
        self._seen: set[str] = set()
        self._source: FSDPAdapter | ScannedSource | None = None
        self._manifest = Manifest(())
        self._adapted: dict[int, list[_AdaptedTensor]] = {}

    def configure(self, config: Config) -> None:
        self.factors.configure(config)

    def manifest(self) -> Manifest:
        structure = structure_of(self._model)
        if structure.inside != self._structure.inside or self._source is None:  # its names would be the old ones
            self._source = source_of(self._model, self._final_name, self._ranks, **self._options)
        self._structure = structure
        self._manifest = self._source.manifest()
        self._check_names()
        self._adapted = self._places()
        self._check_magnitudes()
        self.factors.choose(structure.factors)
        return self._manifest

    def made_together(self) -> frozenset[int]:
        self._ready()
        return frozenset(self._adapted) if self.factors.sharded else frozenset()

    def _ready(self) -> WeightSource:
        """The base model's source. Raises `ManifestMismatch` if adapters have changed since the manifest was made."""
        if self._source is None:
            self.manifest()
        elif structure_of(self._model) != self._structure:
            raise ManifestMismatch(
                "adapters were switched, scaled or changed after the manifest was made",
                hint="start the update again: each one makes a manifest of its own",
                side="trainer",
            )
        assert self._source is not None
        return self._source

    def _changed(self, slices: Iterator[LocalSlice], *, anew: bool) -> Iterator[LocalSlice]:
        factors = self.factors.whole(anew=anew) if self._adapted else {}
        for item in slices:
            if (adapted := self._adapted_part(item.box)) is None:
                yield item
            else:
                dtype = torch_dtype(self._manifest.tensors[item.box.tensor].dtype)
                with torch.no_grad():
                    value = _merge(adapted, item, factors).to(dtype)
                yield LocalSlice(item.box, value)
                del value
            del item  # before the next one is made

    def _adapted_part(self, box: Box) -> _AdaptedTensor | None:
        """What adapts a box of the manifest, which lies in one weight of the trainer."""
        return next((one for one in self._adapted.get(box.tensor, ()) if one.has(box)), None)

    def _final_name(self, name: str) -> str | None:
        """The base model's name of a tensor of the PEFT model; None for a tensor that doesn't travel."""
        if (base := self._structure.base_name(name)) is None:
            return None
        self._seen.add(base)
        return new_name(self._rename, base)

    def _check_names(self) -> None:
        """Checks names that the base model's source can't check, because it sees PEFT's names. Raises `ManifestMismatch`."""
        if isinstance(self._rename, Mapping) and (unused := sorted(set(self._rename) - self._seen)):
            raise ManifestMismatch(
                f"rename has names that the base model doesn't: {first_few(unused)}",
                hint="give names without the parts that PEFT adds",
                side="trainer",
            )
        if unseen := sorted(set(self._structure.additions) - self._seen):
            raise ManifestMismatch(
                f"adapted weights that the model's tensors don't include: {first_few(unseen)}", side="trainer"
            )
        apart = [
            f"{alias} and {source}"
            for alias, source in self._structure.ties.items()
            if new_name(self._rename, alias) in self._manifest.index
            and new_name(self._rename, source) in self._manifest.index
        ]
        if apart:
            raise ManifestMismatch(
                f"declared tied, but the adapters make them different: {first_few(apart)}",
                hint="leave them out of modules_to_save, or train and serve with tie_word_embeddings=False",
                side="trainer",
            )

    def _places(self) -> dict[int, list[_AdaptedTensor]]:
        """The tensors of the manifest that adapters change, by index, each with the parts that they change."""
        assert self._source is not None
        targets = self._source.targets()
        spoken = set(self._manifest.tied.values())
        places: dict[int, list[_AdaptedTensor]] = {}
        tied: list[str] = []
        for base, additions in self._structure.additions.items():
            for target in targets.get(new_name(self._rename, base) or "", ()):
                if target.name in self._manifest.tied or target.name in spoken:
                    tied.append(target.name)
                else:
                    places.setdefault(self._manifest.index[target.name], []).append(_AdaptedTensor(additions, target))
        if tied:
            raise ManifestMismatch(
                f"an adapter changes only one of two tied weights: {first_few(tied)}",
                hint="the model then computes with two weights, an engine with one: don't target it, or train and serve "
                "with tie_word_embeddings=False",
                side="trainer",
            )
        return places

    def _check_magnitudes(self) -> None:
        """Raises `ManifestMismatch` for DoRA if a rank has parts of rows: DoRA scales each row by its norm."""
        cut = [
            self._manifest.describe(box)
            for box in (self._source.claims() if self._source is not None else None) or ()
            if (adapted := self._adapted_part(box)) is not None
            and any(isinstance(a, AddedProduct) and a.magnitude for a in adapted.additions)
            and box.sizes[adapted.target.dims[-1]] != adapted.target.sizes[-1]
        ]
        if cut:
            raise ManifestMismatch(
                f"the rows of these weights with DoRA are divided between ranks: {first_few(cut)}",
                hint="shard them by rows, or send an unsharded copy after merge_and_unload() with ModuleAdapter",
                side="trainer",
            )


def _merge(adapted: _AdaptedTensor, item: LocalSlice, factors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The slice with all additions, in the dtype of the computation."""
    total = exact_copy(item.tensor)
    target = adapted.target
    starts, shape = list(target.offsets), [1] * len(target.sizes)
    for i, dim in enumerate(target.dims):
        starts[dim] += item.box.offsets[i] - target.at[i]
        shape[dim] = item.box.sizes[i]
    in_order = sorted(range(total.dim()), key=target.dims.__getitem__)
    view = total.permute(in_order).view(shape)  # as the trainer has it

    def factor(name: str) -> torch.Tensor:
        return factors[name].detach().to(total)

    for addition in adapted.additions:
        if isinstance(addition, AddedBias):
            view += factor(addition.bias)[starts[0] : starts[0] + view.shape[0]] * addition.scaling
            continue
        a, b = factor(addition.a), factor(addition.b)
        rank = a.shape[0] // addition.experts
        if view.dim() == 2:
            _add(view, tuple(starts), addition, a, b)
        for i in range(view.shape[0] if view.dim() == 3 else 0):
            expert = starts[0] + i
            own_a = a[expert * rank : (expert + 1) * rank]
            _add(view[i], tuple(starts[1:]), addition, own_a, b[:, expert :: addition.experts])
        if addition.magnitude:
            size = factor(addition.magnitude)[starts[0] : starts[0] + view.shape[0]]
            view *= (size / torch.linalg.norm(view, dim=1)).view(-1, 1)
    return total


def _add(total: torch.Tensor, starts: Dims, addition: AddedProduct, a: torch.Tensor, b: torch.Tensor) -> None:
    if addition.transposed:
        total, starts = total.t(), starts[::-1]
    add_product(total, starts, a, b, addition.scaling)
