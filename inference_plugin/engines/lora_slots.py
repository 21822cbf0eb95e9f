"""LoRA slots: what is the same on every engine.

The tensors of an adapter have PEFT's names. An engine keeps each adapter twice: as a copy from which slots are filled, and in the
slot, if a request has named the adapter lately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from inference_plugin.install.contract import AdapterPlace

__all__ = ["LayerSlice", "TensorSlots"]


class LayerSlice(NamedTuple):
    """The engine's layer that has a module in it, that layer's name, and which of its slices the module is."""

    layer: Any
    name: str
    at: int


class TensorSlots(ABC):
    """The part of `install.contract.AdapterSlots` that is alike on all engines. `_tensors`: what updates brought, by adapter."""

    def __init__(self) -> None:
        self._tensors: dict[str, Mapping[str, torch.Tensor]] = {}

    def place(self, module: str) -> AdapterPlace | None:
        if (found := self._slice_of(module)) is None:
            return None
        base = found.layer.base_layer
        if hasattr(base, "total_num_heads"):
            heads = base.total_num_heads if found.at == 0 else base.total_num_kv_heads
            return AdapterPlace(heads * base.head_size, base.input_size)
        outputs = base.output_sizes if hasattr(base, "output_sizes") else [base.output_size]
        return AdapterPlace(outputs[found.at], base.input_size)

    def read(self, adapter: str) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor | str]]:
        slots = self._slots_with(adapter)
        for name, tensor in self._tensors.get(adapter, {}).items():
            if not slots:
                yield name, (), "no request has named the adapter, so it is in no slot just now"
                continue
            module, _, kind = name.removesuffix(".weight").rpartition(".")
            found = self._slice_of(module)
            assert found is not None
            row, column = self._first(found.layer, found.at)
            for slot in slots:
                a, b = self._values(found, slot)
                if kind == "lora_A":
                    yield name, (0, column), a[: tensor.shape[0]]
                else:
                    yield name, (row, 0), b[:, : tensor.shape[1]]

    def _remember(self, adapter: str, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Remembers an adapter's tensors; None forgets them, and the engine reads the adapter from its path again."""
        if tensors is None:
            self._tensors.pop(adapter, None)
        else:
            self._tensors[adapter] = tensors

    @abstractmethod
    def _slice_of(self, module: str) -> LayerSlice | None:
        """Where a module lies; None if this rank lacks the module, or it takes no adapter."""

    @abstractmethod
    def _slots_with(self, adapter: str) -> Sequence[Any]:
        """The slots that hold the adapter now."""

    @abstractmethod
    def _values(self, found: LayerSlice, slot: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What a slot holds for a module: A and B, which may have more rows (A) and columns (B) than the adapter."""

    @abstractmethod
    def _first(self, layer: Any, at: int) -> tuple[int, int]:
        """The first row of B and the first column of A that this rank holds."""
