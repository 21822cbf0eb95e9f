"""vLLM's LoRA slots: adapters by name, from tensors instead of from a directory.

A request names its adapter by a `LoRARequest`: a name, a number, a path. A worker reads the path when it gets a number that it
does not hold, also after it has evicted that adapter. That one place is wrapped, on the worker's own object, because verl and
ms-swift replace the class's method: if an update has brought an adapter of that name, the adapter is made of the update's
tensors, whatever the path. A commit replaces the adapters that a worker holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inference_plugin.engines.lora_slots import LayerSlice, TensorSlots
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.tensors import dtype_name

__all__ = ["VllmAdapterSlots"]


class VllmAdapterSlots(TensorSlots):
    """`install.contract.AdapterSlots` of one worker."""

    def __init__(self, worker_manager: Any) -> None:
        super().__init__()
        self._workers = worker_manager
        self._manager = worker_manager._adapter_manager
        self.max_rank = int(worker_manager.lora_config.max_lora_rank)
        self.dtype = dtype_name(worker_manager.lora_config.lora_dtype)
        self.names: dict[int, str] = {}
        worker_manager._load_adapter = self._load

    def check(self, adapter: str) -> None:
        if self._workers.lora_config.fully_sharded_loras:
            raise EngineUnsupported(
                "fully sharded LoRA slots have no rule here", hint="start vLLM without --fully-sharded-loras"
            )

    def held(self, adapter: str) -> object:
        """None if vLLM has read the adapter itself, or does not hold it."""
        return self._tensors.get(adapter)

    def put(self, adapter: str, what: Any) -> None:
        manager, tensors = self._manager, what
        self._remember(adapter, tensors)
        for number in self.numbers_of(adapter):
            active = number in manager._active_adapters
            pinned = number in manager._registered_adapters.pinned_items
            manager.remove_adapter(number)
            if tensors is None:
                continue  # the next request that names it has it read from its path
            manager.add_adapter(self.made_of(number, tensors))
            if active:
                manager.activate_adapter(number)
            if pinned:
                manager.pin_adapter(number)
        # An adapter may have got another slot. Up to 0.25 vLLM would look for it in the slot of before, as long as the same
        # requests run on.
        manager._last_mapping = None

    def refill(self) -> None:
        """vLLM takes its own copies for what is in the slots, and the mapping of the last step for what its kernels hold. Several
        ranks have a table beside the slots of the head, in the same memory, that puts their logits in order."""
        manager = self._manager
        active, pinned = list(manager._active_adapters), list(manager._active_adapters.pinned_items)
        for layer in manager.modules.values():
            for slot in range(len(manager.lora_index_to_id)):
                layer.reset_lora(slot)
            if (order := getattr(layer, "sharded_to_full_mapping_gpu", None)) is not None:
                order.copy_(torch.tensor(layer.sharded_to_full_mapping))
        for number in active:
            manager.deactivate_adapter(number)
        for number in active:
            manager.activate_adapter(number)
        for number in pinned:
            manager.pin_adapter(number)
        manager._last_mapping = None

    def _load(self, request: Any) -> Any:
        """The adapter that a request asks for: of an update's tensors if one brought it, else as the manager's class loads it."""
        held = self._workers.list_adapters()  # of others the name is noted again once they are loaded again
        self.names = {number: name for number, name in self.names.items() if number in held}
        self.names[request.lora_int_id] = request.lora_name
        tensors = self._tensors.get(request.lora_name)
        if tensors is None:
            return type(self._workers)._load_adapter(self._workers, request)
        return self.made_of(request.lora_int_id, tensors)

    def _slots_with(self, adapter: str) -> Sequence[int]:
        held = self.numbers_of(adapter)
        return [slot for slot, number in enumerate(self._manager.lora_index_to_id) if number in held]

    def _values(self, found: LayerSlice, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return found.layer.lora_a_stacked[found.at][slot, 0], found.layer.lora_b_stacked[found.at][slot, 0]

    def numbers_of(self, adapter: str) -> list[int]:
        held = self._workers.list_adapters()
        return [number for number, name in self.names.items() if name == adapter and number in held]

    def made_of(self, number: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        layers = {}
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                own, rank = self._engine_name(module), a.shape[0]
                layers[own] = LoRALayerWeights(own, rank, rank, a, tensors[f"{module}.lora_B.weight"], 1.0)
        return LoRAModel(number, max((layer.rank for layer in layers.values()), default=1), layers)

    def _engine_name(self, module: str) -> str:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        # Without the rules that join q, k and v into one name: 0.28 renamed the method.
        ways = (getattr(mapper, name, None) for name in ("get_rename_mapper", "get_unstacked_mapper"))
        renames = next((way() for way in ways if way is not None), mapper)
        return str(parse_fine_tuned_lora_name(f"{module}.lora_A.weight", renames)[0])

    def _slice_of(self, module: str) -> LayerSlice | None:
        from vllm.lora import layers

        plain = (layers.ColumnParallelLinearWithLoRA, layers.RowParallelLinearWithLoRA, layers.ReplicatedLinearWithLoRA)
        packed = (layers.MergedColumnParallelLinearWithLoRA, layers.MergedQKVParallelLinearWithLoRA)
        name = self._engine_name(module)
        layer = self._manager.modules.get(name)
        if layer is not None and type(layer) in plain and not getattr(layer, "is_merged_col_linear", False):
            return LayerSlice(layer, name, 0)
        for packed_name, parts in self._manager.packed_modules.items():
            if name in parts and type(layer := self._manager.modules[packed_name]) in packed:
                return LayerSlice(layer, packed_name, parts.index(name))
        return None

    def _first(self, layer: Any, at: int) -> tuple[int, int]:
        from vllm.lora import layers

        if isinstance(layer, layers.RowParallelLinearWithLoRA):
            return 0, layer.tp_rank * layer.input_size
        if isinstance(layer, layers.MergedColumnParallelLinearWithLoRA):
            return layer.output_ids[at] * layer.output_slices[at], 0
        if isinstance(layer, layers.ColumnParallelLinearWithLoRA):
            return layer.tp_rank * layer.output_size, 0
        return 0, 0
