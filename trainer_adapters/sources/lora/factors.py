"""Gathers the factors of a PEFT model's adapters, and chooses the source that fits the model's sharding."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import bytes_view, narrowed
from trainer_adapters.sources.base import LocalSlice, WeightSource
from trainer_adapters.sources.dtensor import DTensorAdapter
from trainer_adapters.sources.exchange import OwnGroup
from trainer_adapters.sources.fsdp import FSDPAdapter
from trainer_adapters.sources.gather import gathered
from trainer_adapters.sources.module import ModuleAdapter
from trainer_adapters.sources.plan import Rename
from trainer_adapters.sources.scan import ScannedSource
from trainer_adapters.sources.sharded import (
    check_module,
    has_partitions,
    is_dtensor,
    is_fsdp_alone,
    is_wrapped_by_fsdp1,
)
from trainer_adapters.sources.zero import DeepSpeedAdapter

__all__ = ["PeftFactors", "check_kind", "source_of"]

logger = logging.getLogger(__name__)


def check_kind(model: torch.nn.Module) -> None:
    """Raises `ArgumentError` for a model without LoRA layers, or wrapped by FSDP1."""
    check_module(model)
    if any(is_wrapped_by_fsdp1(part) for part in model.modules()):
        raise ArgumentError("LoRA under FullyShardedDataParallel can't be sent: shard with fully_shard")
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(isinstance(part, LoraLayer) for part in model.modules()):
        if any(isinstance(part, BaseTunerLayer) for part in model.modules()):
            raise ArgumentError(
                "this model has adapters of PEFT that are no LoRA",
                hint="send what merge_and_unload() returns, of a copy of the model if it trains on",
            )
        raise ArgumentError("this model has no LoRA layers of PEFT: use FSDPAdapter, DTensorAdapter or ModuleAdapter")


def is_sharded(model: torch.nn.Module) -> bool:
    return has_partitions(model) or any(is_dtensor(parameter) for parameter in model.parameters())


def source_of(
    model: torch.nn.Module, rename: Rename, process_group: dist.ProcessGroup | None, **options: Any
) -> FSDPAdapter | ScannedSource:
    """A source that fits the model's sharding, with the names that `rename` returns."""
    if is_fsdp_alone(model):
        return FSDPAdapter(model, rename=rename, **options)
    if has_partitions(model):
        return DeepSpeedAdapter(model, rename=rename, **options)
    if is_sharded(model):
        return DTensorAdapter(model, rename=rename, process_group=process_group, **options)
    if process_group is not None:
        options |= {"rank": dist.get_rank(process_group), "world_size": dist.get_world_size(process_group)}
    return ModuleAdapter(model, rename=rename, **options)


class PeftFactors:
    """The adapters' own tensors (A, B, biases, magnitudes): whole, on every rank.

    Made on every rank of `process_group`, in the same order as other process groups: a sharded model gets a process group of its
    own, so that gathering doesn't mix with the collectives of a running training. Raises TypeError as `check_kind` does.
    """

    def __init__(self, model: torch.nn.Module, process_group: dist.ProcessGroup | None) -> None:
        check_kind(model)
        self.sharded = is_sharded(model)
        self._model = model
        self._ranks = process_group
        self._config = Config.from_environment()
        self.own = OwnGroup(process_group) if self.sharded else None
        self._names: tuple[str, ...] = ()
        self._source: WeightSource | None = None
        self._values: dict[str, torch.Tensor] | None = None

    def configure(self, config: Config) -> None:
        """Takes the bytes to gather at a time (`bucket_bytes`), and how long a lost rank may block the others (`timeout_s`)."""
        if self.own is not None:
            self.own.configure(config)
        self._config = config

    def choose(self, names: frozenset[str]) -> None:
        """Chooses the tensors that `whole` returns, by the model's own names."""
        if self._source is not None and names == frozenset(self._names):
            return
        self._names, self._values = tuple(sorted(names)), None
        # Numbers serve as names: no rule mistakes them for names of the base model.
        numbers = {name: str(i) for i, name in enumerate(self._names)}
        if self.sharded:
            self._source = source_of(self._model, numbers.get, self._ranks, include_buffers="none")
        else:
            self._source = ModuleAdapter(self._model, rename=numbers.get, include_buffers="none", rank=0, world_size=1)

    def whole(self, *, anew: bool) -> dict[str, torch.Tensor]:
        """The chosen tensors by name. With `anew` they are gathered again; if the model is sharded, that is collective.

        Raises `ManifestMismatch` on a rank that holds other values than another rank sent, if training keeps the two equal.
        """
        if self._values is None or anew:
            assert self._source is not None
            source = self._source
            manifest = source.manifest()
            if self.own is not None:
                self.own.renew()
                with self.own.used() as group:
                    whole = gathered(source, bucket_bytes=self._config.bucket_bytes, process_group=group)
                    found = {name: tensor.clone() for name, tensor in whole}
                self._compare(source, manifest, found)
            else:
                found = {manifest.tensors[item.box.tensor].name: item.tensor for item in source.slices()}
            found |= {alias: found[name] for alias, name in manifest.tied.items()}
            self._values = {self._names[int(number)]: tensor for number, tensor in found.items()}
        return self._values

    def _compare(self, source: WeightSource, manifest: Manifest, whole: Mapping[str, torch.Tensor]) -> None:
        """Compares this rank's copies with what other ranks sent. Nobody would notice later, because all ranks merge the same."""

        def apart(slices: Iterable[LocalSlice]) -> list[str]:
            return [
                f"{self._names[int(manifest.tensors[item.box.tensor].name)]} on rank {dist.get_rank()}"
                for item in slices
                if not _same(item, whole[manifest.tensors[item.box.tensor].name])
            ]

        if copies := apart(source.copies()):
            logger.warning(
                "weightwire: trainer ranks hold copies of adapters that have come apart; one of each was merged: %s",
                first_few(copies),
            )
        if mixed := apart(source.kept_equal()):
            raise ManifestMismatch(
                "the trainer's ranks hold different weights in their adapters, and each would send a part of its own weights: "
                f"{first_few(mixed)}",
                hint="data-parallel ranks hold one adapter: broadcast it from one rank and reduce its gradients in training, "
                "which fully_shard does not for ignored_params",
                side="trainer",
            )


def _same(item: LocalSlice, whole: torch.Tensor) -> bool:
    """Whether a slice has the values of its place in the whole tensor, bit for bit."""
    sent = narrowed(whole, item.box.offsets, item.box.sizes)
    return torch.equal(bytes_view(item.tensor.to(sent.device).contiguous()), bytes_view(sent.contiguous()))
