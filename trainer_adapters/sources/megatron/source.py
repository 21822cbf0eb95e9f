"""Megatron-Core: each rank sends the parts of checkpoint tensors that it holds, from where they lie. Nothing is gathered.

How it works:
1. for each parameter of this rank, the architecture's rules say to which rows of which checkpoint tensors its rows belong;
   Megatron's own functions and groups give the numbers of layers and experts in the whole model;
2. at construction the ranks exchange what they hold (`inventory`), because no pipeline stage knows the others' tensors;
   from that, each rank derives the manifest and which rank sends what;
3. `slices()` cuts views of the current parameters. A model that has changed since the exchange is an error.

Megatron is imported inside the functions that use it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import narrowed, torch_dtype
from trainer_adapters.sources.base import LocalSlice
from trainer_adapters.sources.inventory import ExchangedSource, Inventory, SendAssignment
from trainer_adapters.sources.lora.product import exact_copy
from trainer_adapters.sources.megatron.architecture import Architecture
from trainer_adapters.sources.megatron.chunks import Chunk, chunks_of
from trainer_adapters.sources.megatron.dims import check_gathered
from trainer_adapters.sources.megatron.held import (
    ParameterBox,
    ParameterKey,
    boxes_of_parameters,
    check_complete,
    check_readable,
    described,
    inventory_of,
)
from trainer_adapters.sources.megatron.lora_factors import adapters_of, factors_of
from trainer_adapters.sources.selection import DtypeRules, NameFilter, Rules

__all__ = ["MegatronAdapter", "MegatronSource"]


class MegatronSource(ExchangedSource):
    """The common base of sources of Megatron models: the chunks, the exchange, and their LoRA adapters.

    `held` returns this rank's inventory of the chunks. Collective over `process_group`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        hf_config: Any,
        architecture: Architecture | None,
        held: Callable[[list[Chunk]], Inventory],
        process_group: dist.ProcessGroup | None,
    ) -> None:
        def look() -> Inventory:
            self._chunks = chunks_of(model, hf_config, architecture)
            return held(self._chunks)

        super().__init__(look, process_group)
        self._wrapped = list(model) if isinstance(model, list | tuple) else [model]
        self.factors = factors_of([chunk.model for chunk in self._chunks], [chunk.adapted for chunk in self._chunks])

    def configure(self, config: Config) -> None:
        if self.factors is not None:
            self.factors.config = config

    def slices(self) -> Iterator[LocalSlice]:
        slices = self._slices(self._sent)
        if self.factors is not None:
            self.factors.gather()
        return slices

    def copies(self) -> Iterator[LocalSlice]:
        """Copies on tensor-parallel ranks and stages of tensors that another one sends: norms, routers, embeddings. Only
        Megatron's reduction of their gradients keeps these equal."""
        return self._slices(self._left)

    def kept_equal(self) -> Iterator[LocalSlice]:
        return self._slices(self._equal)

    @abstractmethod
    def _slices(self, assignments: Sequence[SendAssignment]) -> Iterator[LocalSlice]:
        """The slices of these boxes. Raises `ManifestMismatch`, at once, if the model has changed since the exchange."""

    def _check_model(self) -> None:
        """Raises `ManifestMismatch` if the parameters are not those that training has made, or other than at the exchange."""
        for one in self._wrapped:
            check_gathered(one)
        if any(adapters_of(chunk.model) != chunk.adapted for chunk in self._chunks):
            raise ManifestMismatch(
                "LoRA adapters were added, removed or scaled after this source was made",
                hint=f"make a new {type(self).__name__}, on all ranks",
                side="trainer",
            )


class MegatronAdapter(MegatronSource):
    """A source for a Megatron-Core GPT model with tensor, pipeline (also virtual), expert and expert-tensor parallelism in any
    combination. Data- and context-parallel copies each send a share of the bytes.

    `model`: the training loop's model on this rank, a `GPTModel` or the list of its chunks, with or without
    `DistributedDataParallel` and `Float16Module`. `hf_config`: the checkpoint's config, a transformers config or the mapping
    of a `config.json`. Its `model_type` chooses the architecture (`megatron_architecture` registers one), `vocab_size` cuts
    the padding, `tie_word_embeddings` must be the model's. `architecture` replaces the registered one.

    Collective over `process_group` (default: all of torch.distributed): every rank that holds part of the model makes
    one, at the same time. Parameters and persistent buffers are sent, without wrappers' names. Tied embeddings travel once,
    from the first stage. The first tensor-parallel rank sends copies that all of them hold (norms). `dtype_rules`, `include` and
    `exclude` as in `ModuleAdapter`; the router's expert bias counts as fp32, in which Megatron keeps it.

    LoRA adapters of Megatron-Bridge are merged into the sent weights; their A and B are gathered over tensor-parallel ranks,
    once per update, in the manager's thread (`lora_factors`).

    Raises TypeError for anything but a Megatron model, and `ManifestMismatch`, on all ranks and naming the rank that caused it,
    for a parameter without a rule, or that Megatron divides differently from its rule, or whose size contradicts the config;
    for ranks with different models; for elements that are on no rank, or in two parts. `manifest()` and `slices()` raise it if
    this rank's parameters have changed in name, shape or dtype since: then make a new adapter, on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        hf_config: Any,
        *,
        dtype_rules: Rules = None,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        architecture: Architecture | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._boxes: list[ParameterBox] = []

        def held(chunks: list[Chunk]) -> Inventory:
            tensors = _tensors(chunks)
            self._described = described(chunks, tensors)
            self._boxes = list(boxes_of_parameters(chunks, tensors))
            return inventory_of(chunks, self._boxes)

        super().__init__(model, hf_config, architecture, held, process_group)
        check_complete(self._everybody)
        self._settle(self._chunks[0].ties(), DtypeRules(dtype_rules), NameFilter(include, exclude))

    def manifest(self) -> Manifest:
        self._tensors()
        return super().manifest()

    def made_together(self) -> frozenset[int]:
        if self.factors is None or not self.factors.are_divided:
            return frozenset()
        adapted = (one.box.name for one in self._boxes if one.adapted)
        return frozenset(self._manifest.index[name] for name in adapted if name in self._manifest.index)

    def _slices(self, assignments: Sequence[SendAssignment]) -> Iterator[LocalSlice]:
        tensors = self._tensors()
        return (self._slice(one, tensors) for one in assignments)

    def _slice(self, assignment: SendAssignment, tensors: Mapping[ParameterKey, torch.Tensor]) -> LocalSlice:
        held, box = self._boxes[assignment.held], assignment.box
        starts = tuple(s + o - h for s, o, h in zip(held.starts, box.offsets, held.box.offsets, strict=True))
        values = tensors[held.parameter].detach()
        begin = held.origin
        if held.rearranged is None:
            values = narrowed(values, starts, box.sizes)
            begin = tuple(map(sum, zip(held.origin, starts, strict=True)))
        is_computed = True
        if held.adapted and self.factors is not None:
            layer = held.parameter[0], held.parameter[1].rpartition(".")[0]
            values = self.factors.merged(layer, values, begin)
        elif held.added:
            values = exact_copy(values).add_(held.added)
        else:
            is_computed = False
        if held.rearranged is not None:
            values = narrowed(held.rearranged(values), starts, box.sizes)
        if is_computed:
            values = values.to(torch_dtype(self._manifest.tensors[box.tensor].dtype))
        return LocalSlice(box, values)

    def _tensors(self) -> dict[ParameterKey, torch.Tensor]:
        """The current parameters and buffers. Raises `ManifestMismatch` if they differ from those of the exchange."""
        self._check_model()
        tensors = _tensors(self._chunks)
        check_readable(tensors)
        before, now = self._described, described(self._chunks, tensors)
        if now != before:
            changes = [f"{key[1]} appeared" for key in now if key not in before]
            changes += [f"{key[1]} vanished" for key in before if key not in now]
            changes += [
                f"{key[1]} was {told} and is {now[key]}"
                for key, told in before.items()
                if key in now and now[key] != told
            ]
            raise ManifestMismatch(
                f"the model changed after its adapter was made: {first_few(changes)}",
                hint="make a new MegatronAdapter, on all ranks",
                side="trainer",
            )
        return tensors


def _tensors(chunks: Sequence[Chunk]) -> dict[ParameterKey, torch.Tensor]:
    return {(i, name): tensor for i, chunk in enumerate(chunks) for name, tensor in chunk.stream()}
