"""Sends one LoRA adapter of PEFT by itself, for the engine's own LoRA slots: the base model doesn't travel.

The names are those of PEFT's checkpoints. A travels unchanged. B is multiplied by the layer's scaling in float32 and then
cast to the manifest's dtype: so the engine needs no alpha, no patterns and no rsLoRA, and its slots can be compared with
what was sent, bit for bit. Each rank sends the shards that it holds; nothing is gathered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import torch_dtype
from trainer_adapters.sources.base import LocalSlice, WeightSource, WrappingSource
from trainer_adapters.sources.lora.factors import check_kind, source_of
from trainer_adapters.sources.lora.peft_model import AddedProduct, PeftStructure, base_changed_by, structure_of
from trainer_adapters.sources.lora.product import saved_name, scaled
from trainer_adapters.sources.selection import DtypeRules, Rules

__all__ = ["LoRAAdapter"]

logger = logging.getLogger(__name__)


class LoRAAdapter(WrappingSource):
    """A source for adapter `adapter` of a PEFT model, sharded by `fully_shard`, of DTensors, under DeepSpeed, or unsharded,
    active or not.

    Send it as the group `lora.NAME`, where NAME is the engine's name of the adapter: `SyncManager(group="lora.policy")`.
    The base model must be the one that the engine serves; if it is trained too, it is sent as a group of its own. A warning tells
    of an adapter whose initialisation changed the base (PiSSA, OLoRA and the like).
    `dtype_rules` as in `DTensorAdapter`: PEFT keeps adapters of a bf16 model in float32, and slots have the model's dtype.

    Raises `ArgumentError` for a model without LoRA layers or wrapped by FSDP1. `manifest()` raises `ManifestMismatch`, which
    names the layers, for adapters that slots can't hold: DoRA and other variants, adapters with biases, `modules_to_save`,
    embeddings and stacked experts. `MergedLoRAAdapter` sends those.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        adapter: str = "default",
        *,
        dtype_rules: Rules = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_kind(model)
        if (kind := base_changed_by(model, adapter)) and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning(
                "weightwire: adapter %r was made with init_lora_weights=%r, which changed the base weights, and only the adapter "
                "is sent: the engine must serve the trainer's base (start it from that, or send it as a group too); or send the "
                "merged model with MergedLoRAAdapter",
                adapter,
                kind,
            )
        self._model = model
        self._adapter = adapter
        self._ranks = process_group
        self._options: dict[str, Any] = {"dtype_rules": DtypeRules(dtype_rules), "include_buffers": "none"}
        self._names: dict[str, str] = {}
        self._scaling: dict[str, float] = {}
        self._source: WeightSource | None = None
        self._manifest = Manifest(())

    def manifest(self) -> Manifest:
        structure = structure_of(self._model, only=self._adapter)
        products = self._products(structure)
        names = {name: _saved(name, structure) for product in products for name in product.names}
        if self._source is None or names != self._names:
            self._names = names
            self._source = source_of(self._model, names.get, self._ranks, **self._options)
        self._scaling = {names[product.b]: product.scaling for product in products}
        self._manifest = self._source.manifest()
        return self._manifest

    def _ready(self) -> WeightSource:
        if self._source is None:
            self.manifest()
        assert self._source is not None
        return self._source

    def _products(self, structure: PeftStructure) -> list[AddedProduct]:
        products: list[AddedProduct] = []
        refused = list(structure.replaced)
        for name, additions in structure.additions.items():
            for addition in additions:
                if isinstance(addition, AddedProduct) and addition.is_plain:
                    products.append(addition)
                else:
                    refused.append(name)
        if refused:
            raise ManifestMismatch(
                f"an engine's LoRA slots can't hold the changes of adapter {self._adapter!r} to: {first_few(refused)}",
                hint="send the merged model with MergedLoRAAdapter",
                side="trainer",
            )
        return products

    def _changed(self, slices: Iterator[LocalSlice], *, anew: bool) -> Iterator[LocalSlice]:
        for item in slices:
            spec = self._manifest.tensors[item.box.tensor]
            if (scaling := self._scaling.get(spec.name)) is None:
                yield item
            else:
                yield LocalSlice(item.box, scaled(item.tensor, scaling, torch_dtype(spec.dtype)))


def _saved(name: str, structure: PeftStructure) -> str:
    """The name in PEFT's checkpoints of A or B, whose `name` in the model contains the adapter's name."""
    factor: Literal["lora_A", "lora_B"] = "lora_A" if ".lora_A." in name else "lora_B"
    layer = structure.base_name(name[: name.rindex(f"{factor}.")] + "base_layer.") or ""
    return saved_name(layer.removesuffix("."), factor)
